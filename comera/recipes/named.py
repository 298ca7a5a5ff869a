"""The configurations that come with the package, found by their names."""

from pathlib import Path

from comera.misspelt import did_you_mean

_FIRST = "quickstart.yaml"


def folder() -> Path:
    """Find the folder of the files: inside the package if installed, above it in a checkout.

    Raises:
        FileNotFoundError: If it is at neither place.
    """
    package = Path(__file__).parents[1]
    places = [package / "_configs", package.parent / "configs"]
    for place in places:
        if (place / _FIRST).is_file():
            return place
    shown = " nor in ".join(map(str, places))
    raise FileNotFoundError(f"comera's configurations are neither in {shown}: reinstall it")


def names() -> list[str]:
    """List all names, such as ``quickstart`` and ``nli/snli-small``."""
    root = folder()
    files = sorted(root.rglob("*.yaml"), key=lambda path: (path.parent != root, path))
    return [path.relative_to(root).with_suffix("").as_posix() for path in files]


def file_of(word: str, beside: Path = Path()) -> Path:
    """Return the file that a word stands for: a path, else the configuration of that name.

    Args:
        word: Such as ``mine.yaml``, ``nli/snli-small`` or, where one has it, ``snli-small``.
        beside: Folder that a path starts from.

    Raises:
        FileNotFoundError: If there is neither.
    """
    path = beside / Path(word).expanduser()
    if path.is_file():
        return path
    by_name = {short: name for name in names() for short in (name, Path(name).name)}
    if word in by_name:
        return folder() / f"{by_name[word]}.yaml"
    if path.is_dir():
        raise FileNotFoundError(f"{path} is a folder, and not that of a run: it has no config.yaml")
    near = did_you_mean(Path(word).stem, by_name)
    raise FileNotFoundError(
        f"there is no file {path}{near}"
        if "did you mean" in near
        else f"there is no file {path}; `comera init` lists the configurations that need none"
    )


def described() -> list[tuple[str, str]]:
    """List names, each with the first sentence of its file."""
    return [(name, first_sentence(folder() / f"{name}.yaml")) for name in names()]


def first_sentence(path: Path) -> str:
    """Return the first sentence of the comment that a file begins with."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    text = " ".join(comment)
    return text.split(". ")[0].rstrip(".")
