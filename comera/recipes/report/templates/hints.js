// Shows what the nearest mark of a picture stands for: under the mouse, a finger or, with the arrow
// keys, in the picture that has the focus.
const hint = document.getElementById("hint");
let shown = null;

function show(mark) {
  shown?.classList.remove("shown");
  shown = mark;
  hint.hidden = !mark;
  if (!mark) return;
  mark.classList.add("shown");
  hint.textContent = mark.querySelector("title").textContent;
  const at = mark.getBoundingClientRect(), box = hint.getBoundingClientRect();
  const left = at.left + at.width / 2 - box.width / 2;
  hint.style.left = `${Math.max(4, Math.min(left, document.documentElement.clientWidth - box.width - 4))}px`;
  hint.style.top = `${at.top > box.height + 16 ? at.top - box.height - 10 : at.bottom + 10}px`;
}

function distance(mark, x, y) {
  const at = mark.getBoundingClientRect();
  const outside = (low, value, high) => Math.max(low - value, 0, value - high);
  return Math.hypot(outside(at.left, x, at.right), outside(at.top, y, at.bottom));
}

for (const picture of document.querySelectorAll("svg[role=img]")) {
  const marks = [...picture.querySelectorAll(".mark")];
  if (!marks.length) continue;
  picture.tabIndex = 0;
  const point = ({ clientX, clientY }) => {
    const away = marks.map((mark) => distance(mark, clientX, clientY));
    const least = Math.min(...away);
    show(least < 40 ? marks[away.indexOf(least)] : null);
  };
  picture.addEventListener("pointermove", point);
  picture.addEventListener("pointerdown", point);
  picture.addEventListener("pointerleave", () => show(null));
  picture.addEventListener("blur", () => show(null));
  picture.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = shown ? marks.indexOf(shown) + by : by > 0 ? 0 : marks.length - 1;
    show(marks[Math.max(0, Math.min(next, marks.length - 1))]);
  });
}
addEventListener("scroll", () => show(null), { passive: true });
