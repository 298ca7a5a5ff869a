"""Find the layers of a model to compress, and gather the second moments of their data.

Moments are those of a layer's inputs and of the loss' gradient at its output. Shape suffixes:
N = rows, I = input width, O = output width.
"""

import itertools
import json
import logging
import reprlib
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from comera.extras import listed
from comera.files import replacing
from comera.nn.forms import as_torch, form_of
from comera.nn.swap import evaluation_mode, every_layer_called, uncompiled
from comera.nn.targets import TTConfig, find_targets, other_holders, say_dense, tied_groups
from comera.params import checksum
from comera.planning.printing import with_bar

log = logging.getLogger("comera")

Layer = nn.Linear | nn.Embedding

LossFn = Callable[[nn.Module, Any], Tensor]
"""Takes the model and a batch, and returns the mean loss."""

_SAVE_EVERY = 120.0
"""Seconds between two states of the file from which an interrupted calibration resumes."""
_BLOCK = 256
"""Least width of a block of a symmetric matrix: smaller products run no faster."""


def weight_OI(layer: Layer) -> Tensor:
    """Return a layer's weight as a matrix; a table's is transposed, as for one-hot inputs."""
    return layer.weight.detach().T if isinstance(layer, nn.Embedding) else as_torch(layer).weight


def linear_targets(
    model: nn.Module, targets: str | list[str], exclude: str | list[str] | None, caller: str | None
) -> dict[str, Layer]:
    """Return the layers to compress; the log names ``caller`` and other layers, if it is given.

    Raises ``ValueError`` if no layer is left, or the model is itself one.
    """
    config = TTConfig(target_modules=targets, exclude_modules=exclude, init="svd")
    found: dict[str, Layer] = {}
    dense: dict[str, list[str]] = {}
    for names, modules in tied_groups(find_targets(model, config, None, caller)):
        layer: Any = modules[0]
        why = ""
        if len(modules) > 1 or other_holders(model, modules):
            why = "another module holds the weight"
        elif not isinstance(as_torch(layer), nn.Linear) and (
            not isinstance(layer, nn.Embedding) or form_of(layer) is not None
        ):
            why = f"{type(layer).__name__} is not among what it compresses"
        elif isinstance(layer, nn.Embedding) and (layer.max_norm or layer.scale_grad_by_freq):
            why = "rows that share a basis cannot be scaled one by one (max_norm, ...)"
        else:
            found[names[0]] = layer
        if why:
            dense.setdefault(why, []).extend(names)
    for why, names in dense.items():
        if caller:
            say_dense(caller, model, names, why)
    if "" in found:
        raise ValueError(
            "the model is itself a linear layer or a table: put it into a module to replace it"
        )
    if not found:
        reasons = "; ".join(f"{listed(names)}: {why}" for why, names in dense.items())
        raise ValueError(f"none of the targeted layers can be compressed ({reasons})")
    return found


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that a model of Hugging Face computes itself; ValueError if none."""
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"a batch of type {type(batch).__name__} needs a loss_fn(model, batch); without one, "
            "batches are mappings with labels, as models of Hugging Face take them"
        )
    loss = getattr(model(**batch), "loss", None)
    if loss is None:
        raise ValueError(
            f"the model gives no loss for a batch with {listed(sorted(map(str, batch)))}: add "
            "labels, or pass loss_fn(model, batch)"
        )
    return loss


@dataclass
class LayerMoments:
    """Means over the rows of a linear layer's input, or over the indices that a table looks up.

    ``inputs_II`` is the mean of ``x x^T``; for a table the diagonal, ``(I,)``: each row's share of
    reads. ``grads_OO`` is the sum over the rows of a batch of ``g g^T``, g being the gradient by
    the layer's output, times the terms that the loss is a mean of, which are the rows of the last
    layer called. It is averaged over all batches by their terms, ``grad_rows`` together.
    """

    inputs_II: Tensor
    grads_OO: Tensor
    rows: int = 0
    grad_rows: int = 0
    batches: int = 0

    def add_inputs(self, square_II: Tensor, count: int) -> None:
        """Add the rows of one call, given the sum of ``x x^T`` over them and their number."""
        if count:
            self.rows += count
            self.inputs_II.mul_(1 - count / self.rows).add_(square_II, alpha=1 / self.rows)


def add_square_(total_KK: Tensor, rows_NK: Tensor, beta: float = 1.0, alpha: float = 1.0) -> None:
    """Set the symmetric ``total`` to ``beta * total + alpha * rows^T rows``, in place."""
    width = len(total_KK)
    blocks = max(1, min(4, width // _BLOCK))
    ends = [width * (k + 1) // blocks for k in range(blocks)]
    for start, end in zip([0, *ends], ends, strict=False):
        strip = total_KK[start:end, :end]
        strip.addmm_(rows_NK[:, start:end].T, rows_NK[:, :end], beta=beta, alpha=alpha)
        total_KK[:start, start:end] = strip[:, :start].T


def gather_moments(
    model: nn.Module,
    layers: Mapping[str, Layer],
    batches: Iterable[Any],
    loss_fn: LossFn,
    keep: str | Path | None = None,
    progress: bool = False,
) -> dict[str, LayerMoments]:
    """Run batches forward and backward and collect :class:`LayerMoments` of layers, batch by batch.

    The model is in evaluation mode meanwhile; gradients of parameters stay as they are.
    ``loss_fn(model, batch)`` returns the mean loss over the batch; one batch is held at a time.
    ``keep`` is a file for the moments, as in :func:`~comera.compress_`. Returns moments in float32
    or wider, by layer name, without layers that the loss does not depend on, which the log names.
    Raises ``ValueError`` if there is no batch, a loss is not finite or has no gradient, it depends
    on none of the layers in the first batch, or the file belongs to other layers or weights.
    """
    found = {}
    for name, layer in layers.items():
        weight = weight_OI(layer)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        out_features, in_features = weight.shape
        sides = (in_features,) if isinstance(layer, nn.Embedding) else (in_features, in_features)
        found[name] = LayerMoments(
            weight.new_zeros(sides, dtype=dtype),
            weight.new_zeros(out_features, out_features, dtype=dtype),
        )
    keep = Path(keep).expanduser() if keep else None
    total = len(batches) if hasattr(batches, "__len__") else None  # type: ignore[arg-type]
    seen, complete, mark = 0, False, 0
    if keep:
        batches = iter(batches)
        begin = list(itertools.islice(batches, 1))
        mark = _mark(begin)
        batches = itertools.chain(begin, batches)
        if keep.exists():
            seen, complete = _read(keep, layers, found, mark if begin else None)
    if complete:
        return _without_idle(model, found)
    saved = time.monotonic()
    left = itertools.islice(batches, seen, None)
    with training_only(model), uncompiled(), torch.enable_grad():
        for batch in with_bar(left, "calibration", progress, total, seen):
            with _watched(layers, found) as first:
                loss = loss_fn(model, batch)
                if not isinstance(loss, Tensor) or (first and not loss.requires_grad):
                    raise ValueError(
                        f"loss_fn gave {loss!r} for batch {seen}, which has no gradient: it must "
                        "return a tensor, as the loss is before .item(), and not under no_grad"
                    )
                if loss.numel() != 1 or not bool(torch.isfinite(loss)):
                    raise ValueError(
                        f"loss_fn gave {reprlib.repr(loss.tolist())} for batch {seen}; it must be "
                        "one finite number"
                    )
                if first:
                    torch.autograd.grad(loss, first, allow_unused=True)
            seen += 1
            if not any(moments.grad_rows for moments in found.values()):
                raise ValueError(
                    f"the loss depends on no output of {listed(list(found))}, in the first batch: "
                    "none can be compressed by it"
                )
            if keep and time.monotonic() - saved > _SAVE_EVERY:
                _write(keep, layers, found, seen, mark, complete=False)
                saved = time.monotonic()
    if not seen:
        raise ValueError("calibration has no batch; some hundred sequences are enough")
    whole = max(moments.grad_rows for moments in found.values())
    for moments in found.values():
        moments.batches = seen
        moments.grads_OO.mul_(moments.grad_rows / whole)  # the last batches may not have called it
    if keep:
        _write(keep, layers, found, seen, mark, complete=True)
    return _without_idle(model, found)


def _without_idle(model: nn.Module, found: dict[str, LayerMoments]) -> dict[str, LayerMoments]:
    """Return the moments of layers that play a part in the loss; the log names the others."""
    if idle := [name for name, moments in found.items() if not moments.grad_rows]:
        say_dense("the calibration", model, idle, "the loss depends on none of their outputs")
    return {name: moments for name, moments in found.items() if moments.grad_rows}


def _mark(batch: Any) -> int:
    """Return a checksum of the tensors, numbers and texts in a batch."""
    mark = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Mapping):  # such as a BatchEncoding, which is no tree to torch
            mark ^= _mark(dict(leaf))
        elif isinstance(leaf, Tensor):
            mark = checksum(leaf, mark)
        elif isinstance(leaf, int | float | str):  # the text of others may hold an address
            mark = zlib.crc32(repr(leaf).encode(), mark)
    return mark


def _checksum_of(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    mark = zlib.crc32(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        mark = checksum(tensors[name], mark)
    return mark


def _write(
    path: str | Path,
    layers: Mapping[str, Layer],
    found: Mapping[str, LayerMoments],
    seen: int,
    mark: int,
    complete: bool,
) -> None:
    about = {
        "first_batch": mark,
        "batches": seen,
        "complete": complete,
        "rows": {name: moments.rows for name, moments in found.items()},
        "grad_rows": {name: moments.grad_rows for name, moments in found.items()},
        "weights": {name: checksum(layer.weight) for name, layer in layers.items()},
    }
    tensors = {f"{name}.inputs_II": moments.inputs_II for name, moments in found.items()}
    tensors |= {f"{name}.grads_OO": moments.grads_OO for name, moments in found.items()}
    about["checksum"] = _checksum_of(about, tensors)
    with replacing(path) as temporary:
        save_file(tensors, temporary, {"comera_moments": json.dumps(about)})


def _read(
    path: str | Path,
    layers: Mapping[str, Layer],
    found: Mapping[str, LayerMoments],
    mark: int | None,
) -> tuple[int, bool]:
    """Read moments from a file into ``found``; return its batches, and whether it is complete.

    ``mark`` is the checksum of the first batch of the calibration, None if there is none.
    """
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {})["comera_moments"])
            wrong = [
                name for name in {**layers, **about["weights"]}
                if name not in layers or about["weights"].get(name) != checksum(layers[name].weight)
            ]  # fmt: skip
            if wrong:
                raise ValueError(
                    f"{path} has the moments of other layers or weights ({', '.join(wrong[:3])}): "
                    "remove it, or name another file"
                )
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            stated = about.pop("checksum")
            if stated != _checksum_of(about, tensors):
                raise ValueError(f"{path} is damaged: remove it, or name another file")
            for name, moments in found.items():
                moments.inputs_II.copy_(tensors[f"{name}.inputs_II"])
                moments.grads_OO.copy_(tensors[f"{name}.grads_OO"])
                moments.rows, moments.batches = about["rows"][name], about["batches"]
                moments.grad_rows = about["grad_rows"][name]
    except (SafetensorError, KeyError, json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{path} is no file of moments: remove it, or name another") from None
    if mark not in (None, about["first_batch"]):
        log.warning(
            "%s has the moments of other batches, as the first one tells; they are used: for those "
            "of this calibration remove it, or name another file", path,
        )  # fmt: skip
    log.info("%s: %d batches of calibration were done before", path, about["batches"])
    return about["batches"], about["complete"]


@contextmanager
def training_only(model: nn.Module, trained: Set[nn.Parameter] = frozenset()) -> Iterator[None]:
    """Put a model into evaluation mode inside; only parameters in ``trained`` need a gradient."""
    before = {param: param.requires_grad for param in model.parameters()}
    with evaluation_mode(model, caches=False), every_layer_called():
        for param in before:
            param.requires_grad_(param in trained)
        try:
            yield
        finally:
            for param, was in before.items():
                param.requires_grad_(was)


@contextmanager
def _watched(
    layers: Mapping[str, Layer], found: Mapping[str, LayerMoments]
) -> Iterator[list[Tensor]]:
    """Hook layers to add to their moments; yield the zeros that make outputs need a gradient."""
    first: list[Tensor] = []
    squares = _Squares()
    before, terms = max(moments.grad_rows for moments in found.values()), 0

    def hook(name: str) -> Callable[..., Tensor]:
        def after(layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            args = args or tuple(kwargs.values())
            form = form_of(layer)
            dim = -1 if form is None else form.feature_dim
            moments = found[name]
            padding: Tensor | None = None  # where the output is zero, whatever the weight is
            if isinstance(layer, nn.Embedding):
                counts = torch.bincount(args[0].flatten(), minlength=len(moments.inputs_II))
                if layer.padding_idx is not None:
                    counts[layer.padding_idx] = 0
                    padding = (args[0] == layer.padding_idx).unsqueeze(-1)
                moments.add_inputs(counts.to(moments.inputs_II.dtype), args[0].numel())
            else:
                x = args[0] if dim == -1 else args[0].movedim(dim, -1)
                moments.add_inputs(*squares.of(x, moments.inputs_II.dtype))

            def take(grad: Tensor) -> None:
                nonlocal terms
                grad = grad if padding is None else grad.masked_fill(padding, 0)
                grad = grad if dim == -1 else grad.movedim(dim, -1)
                grad_NO = torch.atleast_2d(grad).flatten(0, -2).to(moments.grads_OO.dtype)
                if len(grad_NO):
                    terms = terms or len(grad_NO)
                    beta, moments.grad_rows = moments.grad_rows / (before + terms), before + terms
                    add_square_(moments.grads_OO, grad_NO, beta, terms**2 / moments.grad_rows)

            # A view that is changed in place afterwards, as by relu_, would lose its hook.
            output = torch.ops.aten._unsafe_view(output, output.shape)
            if not output.requires_grad:
                first.append(output.new_zeros((), requires_grad=True))
                output.add_(first[-1])
            if output.requires_grad:  # else it is under no_grad, which gather_moments refuses
                output.register_hook(lambda grad: None if grad is None else take(grad))
            return output

        return after

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(
                layer.register_forward_hook(hook(name), prepend=True, with_kwargs=True)
            )
        yield first


class _Squares:
    """Sums of ``x x^T``, cached for consecutive layers with the same input, as q, k and v."""

    _x: Tensor | None = None
    _key: object = None
    _square_II = torch.empty(0)

    def of(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
        """Return the sum of ``x x^T`` over the rows of an input, ``(I, I)``, and their number."""
        x_NI = torch.atleast_2d(x.detach()).flatten(0, -2).to(dtype)
        if self._x is not x or self._key != (x._version, dtype):
            width = x_NI.shape[1]
            if self._square_II.shape != (width, width) or self._square_II.dtype != dtype:
                self._square_II = x_NI.new_zeros(width, width)
            add_square_(self._square_II, x_NI, beta=0.0)
            self._x, self._key = x, (x._version, dtype)
        return self._square_II, len(x_NI)
