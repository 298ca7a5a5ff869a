"""Experts of transformers that share parameters of three dimensions, taken apart and put together.

From its version 5 on transformers holds the experts of a mixture in ``gate_up_proj`` (or
``up_proj``) and ``down_proj``, ``(experts, out, in)`` each. What such a module computes, whatever
its class, is agreed on by flags that ``transformers.integrations.moe`` sets on it; here it is
computed by a linear layer an expert and matrix, which can be a tensor train.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from comera.nn.swap import swap_layers_

_FLAGS = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")


class SplitExperts(nn.Module):
    """Experts with linear layers of their own, in the place of experts that are one parameter.

    Args:
        fused: Experts for which :func:`is_fused` holds. The new layers read the same memory.

    Shapes:
        hidden_states ``(tokens, width)``, top_k_index ``(tokens, k)`` integers, top_k_weights
        ``(tokens, k)``; output ``(tokens, width)``. An index of no expert adds nothing.
    """

    _fused: tuple[Any]

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.num_experts = len(fused.down_proj)
        self.up = nn.ModuleList(_linears(fused, _up_name(fused)))
        self.down = nn.ModuleList(_linears(fused, "down_proj"))
        # What is between the two, and what is put back; no child, which would be initialised anew
        # and has nothing to save.
        self._fused = (_emptied(fused),)
        self.train(fused.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        (fused,) = self._fused
        between = fused._apply_gate if fused.has_gate else fused.act_fn
        output = torch.zeros_like(hidden_states)
        # Where there are gradients an expert nobody asks has one of zeros; a graph has no ifs.
        may_skip = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            tokens, places = torch.where(top_k_index == expert)
            if may_skip and not len(tokens):
                continue
            found = down(between(up(hidden_states[tokens])))
            found = found * top_k_weights[tokens, places, None]
            output = output.index_add(0, tokens, found.to(output.dtype))
        return output

    @property
    def is_dense(self) -> bool:
        """Whether all its layers are torch's own."""
        return all(type(layer) is nn.Linear for layer in (*self.up, *self.down))

    def fuse(self) -> nn.Module:
        """Return the experts as one module of their first class again; its layers are dense."""
        (fused,) = self._fused
        parts: dict[str, Any] = {_up_name(fused): self.up, "down_proj": self.down}
        for name, layers in parts.items():
            weights = [_turned(fused, layer.weight) for layer in layers]
            fused.register_parameter(name, _stacked(weights))
            if fused.has_bias:
                fused.register_parameter(f"{name}_bias", _stacked([layer.bias for layer in layers]))
        return fused.train(self.training)


def is_fused(module: Any) -> bool:
    """Check that a module holds experts in parameters of three dimensions, and nothing else."""
    if not all(hasattr(module, flag) for flag in _FLAGS) or not hasattr(module, "_apply_gate"):
        return False
    if module.has_post_expert_norm or module._is_expert_parallel or module._buffers:
        return False
    names = {_up_name(module), "down_proj"}
    biases = {f"{name}_bias" for name in names} if module.has_bias else set()
    held = dict(module.named_parameters())
    return held.keys() == names | biases and all(held[name].dim() == 3 for name in names)


@contextmanager
def experts_apart(model: nn.Module, names: Iterable[str] | None = None) -> Iterator[None]:
    """Take fused experts inside a model apart, so that their layers can be replaced, in place.

    After an error they are put together again.

    Args:
        model: What it computes stays the same.
        names: Of the experts. If None, all that can be, and those of which no layer has been
            replaced are put together again in the end.

    Raises:
        ValueError: If a name is not that of fused experts; the model is then unchanged.
    """
    found = {name: module for name, module in model.named_modules() if name and is_fused(module)}
    lost = [name for name in names or () if name not in found]
    if lost:
        raise ValueError(
            f"the saved model has experts at {lost[0]!r}, where the model given has none that are "
            "made as those of transformers 5: make it as the one that was saved"
        )
    wanted = [found[name] for name in (found if names is None else names)]
    params = [dict(fused._parameters) for fused in wanted]
    apart = [SplitExperts(fused) for fused in wanted]
    swap_layers_(model, {id(fused): split for fused, split in zip(wanted, apart, strict=True)})
    done = False
    try:
        yield
        done = True
    finally:
        back = {}
        for split, fused, held in zip(apart, wanted, params, strict=True):
            if not done or (names is None and split.is_dense):
                for name, param in held.items():
                    fused.register_parameter(name, param)
                back[id(split)] = fused
            elif names is None:
                _leave_shared_memory_(split)
        if back:
            swap_layers_(model, back)


def fuse_experts_(model: nn.Module) -> nn.Module:
    """Put experts together whose layers are all dense, in place; return the model."""
    apart = [m for m in model.modules() if isinstance(m, SplitExperts) and m.is_dense]
    return swap_layers_(model, {id(split): split.fuse() for split in apart})


def split_names(model: nn.Module) -> list[str]:
    """Return the names of experts that have been taken apart."""
    return [name for name, module in model.named_modules() if isinstance(module, SplitExperts)]


def _leave_shared_memory_(split: SplitExperts) -> None:
    """Give layers that stay dense memory of their own: that of all experts can be freed then."""
    for layer in (*split.up, *split.down):
        for name, param in list(layer._parameters.items()):
            if param is not None and param.untyped_storage().nbytes() > param.nbytes:
                own = param.detach().clone(memory_format=torch.contiguous_format)
                layer.register_parameter(name, nn.Parameter(own, param.requires_grad))


def _up_name(fused: Any) -> str:
    return "gate_up_proj" if fused.has_gate else "up_proj"


def _linears(fused: Any, name: str) -> Iterator[nn.Linear]:
    """Yield a layer for each expert, on the memory of the parameter of that name."""
    weights = getattr(fused, name)
    biases = getattr(fused, f"{name}_bias") if fused.has_bias else None
    for expert in range(len(weights)):
        weight = _turned(fused, weights.detach()[expert])
        linear = nn.Linear(weight.shape[1], weight.shape[0], biases is not None, "meta")
        linear.weight = nn.Parameter(weight, weights.requires_grad)
        if biases is not None:
            linear.bias = nn.Parameter(biases.detach()[expert], biases.requires_grad)
        yield linear


def _turned(fused: Any, weight: Tensor) -> Tensor:
    """Return a matrix as ``nn.Linear`` has it, or from there as the experts do."""
    return weight.T if fused.is_transposed else weight


def _stacked(tensors: Iterable[Tensor]) -> nn.Parameter:
    tensors = list(tensors)
    whole = torch.stack([tensor.detach() for tensor in tensors])
    return nn.Parameter(whole, any(tensor.requires_grad for tensor in tensors))


def _emptied(fused: nn.Module) -> nn.Module:
    for name in list(fused._parameters):
        fused.register_parameter(name, None)
    return fused
