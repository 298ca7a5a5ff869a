"""Define the base of every tensor-train module: cores, gates, ranks, loading and moving."""

import logging
import math
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from operator import is_not
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, fx, nn

from comera.extras import say_once
from comera.nn.decompose import canonical, rank_shares, widened
from comera.nn.dense_weight import PARAMETRIZED, WeightByAssignment, WithoutWeight, read_only
from comera.nn.init import Init, normal_, orthogonal_
from comera.ops.context import machine_of, without_autocast
from comera.ops.cores import rank_gate
from comera.ops.dispatch import is_eager
from comera.ops.operator import NOT_PLAIN
from comera.params import is_sharded, may_share, params_of, renew_wrappers_, resize_, versions_of
from comera.planning.candidate import Work
from comera.shapes import Shape, check_tolerance, is_number, whole_number


class SharedGates(NamedTuple):
    """Gates of one module, ``own``, among ``parts`` of ``flat``, the vector of a model's gates."""

    flat: Tensor
    parts: Sequence[Tensor]
    own: list[Tensor]


@dataclass(slots=True)
class Shared:
    """A layer's parameters in a :class:`~comera.BatchedContraction`; ``renew`` contracts again."""

    params: list[Tensor]
    versions: list[int] | None
    renew: Callable[[], None]


_DENSE_CHECKPOINT = (
    "a dense checkpoint is loaded into a compressed model: weights of compressed layers are not "
    'taken from it. Load it before tensorize_(init="svd"), or call set_weight_ of each layer'
)

PRUNE_BELOW = 1e-2
"""A gate at or below this is a pruned rank (CoMERA, arXiv 2405.14377)."""

log = logging.getLogger("comera")

_WORTH_SAYING = 1e-3
"""Relative error of an assigned weight above which it is named."""

_WRITTEN = (
    "{0}.weight is computed from the layer's cores, so that an edit in place would change nothing. "
    "layer.set_weight_(W, tolerance=0.01), or layer.weight = W at the present ranks, approximates "
    "a weight; comera.densify_(model) makes layers whose weight can be edited, such as "
    "by torch.nn.utils.prune or the merge of an adapter"
)


def is_open(gate_R: Tensor, threshold: float | Tensor) -> Tensor:
    """Return which ranks are open, ``(R,)``: above the threshold, as in ``rank_gate``."""
    return gate_R > threshold


class Params(nn.ParameterList):
    """Parameters that are listed by :func:`params_of`."""

    def __iter__(self) -> Iterator[Any]:
        return iter(params_of(self))


class Gates(Params):
    """Trainable vectors, one for each bond, that stay at least float32 when the module is cast."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrowed = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device) if narrowed else moved

        return super()._apply(wide, recurse)

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if any(gate.dtype.itemsize < 4 for gate in params_of(self)):  # by assign=True
            self._apply(lambda gate: gate.to(torch.promote_types(gate.dtype, torch.float32)))


class TensorTrainModule(WeightByAssignment):
    """Base of the tensor-train layers: a weight held as cores, with a gate vector on every bond.

    Attributes:
        cores: The tensor train, ``cores[k]`` of shape ``shape.core_shapes[k]``.
        gates: ``gates[k]`` of width ``shape.ranks[k]`` scales the bond after ``cores[k]``. They
            start as ones; a gate at or below ``prune_below`` is a pruned rank.
        start_ranks: The inner ranks before any truncation.
        dense_form: Class of the layer it replaces, if of :func:`~comera.register_layer`.
    """

    cores: nn.ParameterList
    gates: Gates
    prune_below: float
    start_ranks: tuple[int, ...]
    dense_form: str | None = None
    shared_gates: SharedGates | None = None
    shared: Shared | None = None
    has_plain_form: ClassVar[bool] = True
    """True if layers of torch can compute it as cheaply, see :func:`~comera.to_plain_`."""
    _modes: Shape
    _shapes: ClassVar[type[Any]]
    """Class of the modes and ranks."""
    _settings: ClassVar[tuple[str, ...]] = ("prune_below",)
    """Attributes that the constructor takes under the same names."""

    def _check_there(self, input: Tensor) -> None:
        """Raise if the input is no tensor, or if the cores are on ``meta`` and the input is not."""
        name = type(self).__name__
        if torch._C._get_tracing_state() is not None and torch.onnx.is_in_onnx_export():
            raise self._unread_by("torch.onnx.export(dynamo=False)")
        if type(input) is not Tensor:
            if isinstance(input, fx.Proxy):
                raise self._unread_by("torch.fx.symbolic_trace")
            if not isinstance(input, Tensor):
                raise TypeError(f"{name} takes a tensor, not {reprlib.repr(input)}")
        cores: Any = self._modules["cores"]
        core = cores._parameters.get("0")
        if core is not None and core.is_meta and not input.is_meta:
            raise RuntimeError(
                f"the cores of this {name} are on the meta device and have no "
                f"numbers, the input is on {input.device}: load them first; accelerate brings "
                "those that it has offloaded if it is told of the class: cpu_offload, "
                f'dispatch_model(..., preload_module_classes=["{name}"])'
            )

    def __prepare_scriptable__(self) -> Any:
        raise self._unread_by("torch.jit.script")

    def _unread_by(self, reader: str) -> TypeError:
        how = "to_plain_" if self.has_plain_form else "densify_"
        return TypeError(NOT_PLAIN.format(reader, type(self).__name__, how))

    @property
    def parametrizations(self) -> Any:
        """Refuse ``weight_norm`` and other parametrizations of the weight: it is no parameter."""
        caller: Any = sys._getframe(1).f_back  # the only place where torch asks before it fails
        registers = caller is not None and caller.f_code.co_name == "register_parametrization"
        if registers and caller.f_locals.get("tensor_name") == "weight":
            raise ValueError(PARAMETRIZED)
        raise AttributeError("parametrizations")  # nn.Module then finds those of other parameters

    def _build(
        self,
        shape: Shape,
        prune_below: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        dtype = dtype or torch.get_default_dtype()
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise ValueError(f"dtype={dtype} must be a floating-point type of 16 bits or more")
        if not (is_number(prune_below) and 0 <= prune_below < 1):
            raise ValueError(f"prune_below={prune_below!r} must be in [0, 1): gates start at 1")
        wide = torch.promote_types(dtype, torch.float32)
        self.__dict__["_parameters"] = WithoutWeight(self._parameters)
        self._modes, self._split = shape, shape.split
        self.prune_below = prune_below
        self.start_ranks = shape.ranks
        self.cores = Params(
            nn.Parameter(torch.empty(size, device=device, dtype=dtype))
            for size in shape.core_shapes
        )
        self.gates = Gates(
            nn.Parameter(torch.empty(rank, device=device, dtype=wide)) for rank in shape.ranks
        )

    @property
    def shape(self) -> Shape:
        """The modes and the present ranks."""
        return self._modes.of_ranks(self.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The inner ranks as stored, including pruned ones."""
        return tuple(gate.shape[0] for gate in self.gates)

    @property
    def live_ranks(self) -> tuple[int, ...]:
        """The inner ranks without pruned ones; all zeros if a bond has none left."""
        live = tuple(int(is_open(gate, self.prune_below).sum()) for gate in self.gates)
        return (0,) * len(live) if 0 in live else live

    @property
    def num_dense(self) -> int:
        """Number of entries of the dense weight."""
        return math.prod(self._weight_size())

    @property
    def num_stored(self) -> int:
        """Number of entries of the cores and gates."""
        return sum(param.numel() for param in (*self.cores, *self.gates))

    @property
    def weight(self) -> Tensor:
        """The dense weight, computed from the cores in each access; differentiable.

        Assignment calls :meth:`set_weight_` at the present ranks; writes in place raise
        ``RuntimeError``.
        """
        if is_eager():
            if sys._getframe(1).f_code.co_name == "swap_tensor":  # of torch.func.functional_call
                raise ValueError(PARAMETRIZED)
            check_unsharded(self, "layer.weight")
        with without_autocast(self.cores[0]):
            return read_only(self.dense_weight, _WRITTEN.format(type(self).__name__))

    @weight.setter
    def weight(self, value: Tensor) -> None:
        error = self.set_weight_(value)
        if error > _WORTH_SAYING:
            log.warning(
                "%s.weight = ...: ranks %s hold it with a relative error of %.2g; "
                "set_weight_(weight, tolerance=...) takes the ranks that an error needs",
                type(self).__name__, list(self.ranks), error,
            )  # fmt: skip

    def planner_setting(self) -> dict[str, Any]:
        """Return keywords of the planner's functions: ``dtype`` and ``machine`` of this module."""
        core = self.cores[0]
        return {"dtype": dtype_name(core), "machine": machine_of(core.device)}

    def at(self, tokens: int, *, together: int = 1) -> Work | None:
        """Describe the layer to the planner; ``together`` layers contract their cores at once.

        None for the hot rows of a table: a gather and one product, which have no order.
        """
        return None

    def dense_weight(self) -> Tensor:
        """Compute the dense weight as an ordinary tensor; differentiable."""
        raise NotImplementedError

    def set_weight_(self, weight: Tensor, *, tolerance: float | None = None) -> float:
        """Approximate a dense weight by TT-SVD, or block by block, in place; gates become ones.

        Args:
            weight: The new weight, of the shape of :attr:`weight`.
            tolerance: Bound on the relative Frobenius error before cores are rounded to their
                dtype (bfloat16 adds 0.005), which gives new ranks: parameters change their shapes,
                and the optimizer must be rebuilt. Hot rows keep their rank. None keeps the ranks.

        Returns:
            The relative Frobenius error of the weight that the module now holds.

        Raises:
            ValueError: If the shape differs, an entry is not finite, no rank was left to keep, or a
                core or gate is sharded or computed from other tensors.
            TypeError: If ``weight`` is no tensor of real numbers.
        """
        if not isinstance(weight, Tensor) or weight.is_complex():
            raise TypeError(f"weight={reprlib.repr(weight)} must be a tensor of real numbers")
        size = self._weight_size()
        if tuple(weight.shape) != size:
            raise ValueError(
                f"weight has shape {tuple(weight.shape)}, that of this layer is {size}"
            )
        if tolerance is None and 0 in self.ranks:
            raise ValueError(
                "all ranks of this layer were cut, its weight is zero: give a tolerance, by which "
                "new ones are chosen"
            )
        check_tolerance(tolerance)
        check_unsharded(self, "set_weight_", written=True)
        with torch.no_grad(), without_autocast(self.cores[0]):
            exact = self._as_read(weight.detach().to(self.cores[0].device))
            self._decompose_(exact, tolerance)
            if tolerance is not None:
                self.start_ranks = self.ranks
                renew_wrappers_([self])
            wide = exact.double()
            return float((self.dense_weight() - wide).norm()) / (float(wide.norm()) or 1.0)

    def _as_read(self, weight: Tensor) -> Tensor:
        """Return a dense weight with zeros where the module's weight must be zero."""
        return weight

    def _decompose_(self, weight: Tensor, tolerance: float | None) -> None:
        """Set cores and gates to approximate a weight, at the present ranks or to a tolerance."""
        cores = self._cores_of(weight, self.shape, tolerance)
        self.set_cores_(cores if tolerance is not None else widened(cores, self.ranks))

    @staticmethod
    def _cores_of(weight: Tensor, shape: Any, tolerance: float | None) -> Sequence[Tensor]:
        """Decompose a weight to cores with at most the shape's ranks, or to a tolerance."""
        raise NotImplementedError

    def _weight_size(self) -> tuple[int, int]:
        raise NotImplementedError

    def bond_gates(self) -> list[Tensor]:
        """Return the gate of each bond; views inside a :class:`~comera.BatchedContraction`."""
        shared = self.shared_gates if self.renew_shared() else None
        if shared is not None and may_share(shared.flat, self.gates[0]):
            return list(shared.own)
        return list(self.gates)

    def renew_shared(self) -> bool:
        """Renew the shared contraction if a parameter was written to, except in compiled code.

        Returns False if others replace parameters, as in ``torch.func.functional_call``.
        """
        shared = self.shared
        if shared is None or any(map(is_not, shared.params, self.shared_params())):
            return False
        if is_eager() and shared.versions != versions_of(shared.params):
            shared.renew()
        return True

    def shared_params(self) -> list[Tensor]:
        """Return the module's own parameters, those that take the place of them included."""
        of: Any = self, self._modules["cores"], self._modules["gates"]
        return [param for each in of for param in each._parameters.values() if param is not None]

    def rank_norms(self) -> list[Tensor]:
        """Return for every bond the share of each rank in the weight's squared norm, in float64."""
        return rank_shares([core.double().flatten(1, -2) for core in self.gated_cores()])

    def canonical_cores(self, gated: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]] | None:
        """Return canonical cores of the product of ``gated``, and the singular values of each bond.

        Returns None if the weight is zero or not finite.
        """
        return canonical([core.flatten(1, -2) for core in gated], self.shape.split)

    def gated_cores(self) -> list[Tensor]:
        """Return the cores multiplied by their gates; differentiable."""
        gated = [
            rank_gate(core, gate, self.prune_below)
            for core, gate in zip(self.cores, self.gates, strict=False)
        ]
        return [*gated, *list(self.cores)[len(gated) :]]

    @torch.no_grad()
    def set_cores_(self, cores: Sequence[Tensor]) -> None:
        """Copy cores of any ranks into the parameters, the same objects; set the gates to one."""
        self.resize_ranks_([core.shape[-1] for core in cores[:-1]])
        for mine, new in zip(self.cores, cores, strict=True):
            mine.copy_(new)

    def resize_ranks_(self, ranks: Sequence[int]) -> None:
        """Resize cores to other ranks, contents undefined, and gates, all ones; in place."""
        sizes = self._modes.of_ranks(ranks).core_shapes
        for mine, size in zip(self.cores, sizes, strict=True):
            resize_(mine, size)
        for gate, rank in zip(self.gates, ranks, strict=True):
            resize_(gate, (rank,))
            nn.init.ones_(gate)

    def share_parameters_(self, lead: Any) -> None:
        """Share the cores and gates of another layer; raise ``ValueError`` if its shape differs."""
        if not isinstance(lead, TensorTrainModule) or lead.shape != self.shape:
            raise ValueError(f"a tensor train of {self.shape} cannot work on the cores of {lead!r}")
        self.cores, self.gates = lead.cores, lead.gates

    def config(self) -> dict[str, Any]:
        """Return the settings, for JSON, from which :meth:`from_config` rebuilds the layer."""
        shape: Any = self.shape
        return {
            **{key: getattr(self, key) for key in self._settings},
            **{key: list(value) for key, value in asdict(shape).items()},
            "start_ranks": list(self.start_ranks),
            "dtype": dtype_name(self.cores[0]),
            "dense_form": self.dense_form,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], lead: nn.Module | None = None) -> Self:
        """Make a layer on the ``meta`` device from its :meth:`config`.

        Args:
            config: The settings.
            lead: The layer whose parameters a tied layer shares.

        Raises:
            KeyError, TypeError, ValueError: If a setting is missing or wrong, or the shapes of the
                two layers differ.
        """

        def sizes(key: str) -> tuple[int, ...]:
            return tuple(map(whole_number, config[key]))

        made: Any = cls
        layer = made(
            **{key: config[key] for key in cls._settings},
            shape=cls._shapes(**{field.name: sizes(field.name) for field in fields(cls._shapes)}),
            device="meta", dtype=dtype_of(config),
        )  # fmt: skip
        layer.start_ranks = layer.shape.of_ranks(sizes("start_ranks")).ranks
        layer.dense_form = None if config["dense_form"] is None else str(config["dense_form"])
        if lead is not None:
            layer.share_parameters_(lead)
        return layer

    def freeze_like_(self, dense: Any) -> None:
        """Copy ``requires_grad`` of a dense layer's weight and bias."""
        for name, param in self.named_parameters():
            source = dense.bias if name == "bias" else dense.weight
            param.requires_grad_(source.requires_grad)

    @torch.no_grad()
    def _init_cores_(self, std: float, init: Init) -> None:
        """Draw random cores of a weight with root mean square ``std``; set the gates to one."""
        if init not in ("orthogonal", "normal"):
            raise ValueError(f"init={init!r} must be 'orthogonal' or 'normal'")
        if std < 0:
            raise ValueError(f"std={std!r} must be at least 0: the weight's standard deviation")
        for gate in self.gates:
            gate.fill_(1)
        if self.cores[0].is_meta or 0 in self.ranks:
            return
        # Of sharded cores the whole is drawn, and that of the first process shared out.
        cores = [
            torch.empty(core.shape, dtype=core.dtype, device=core.device)
            if is_sharded(core) else core for core in self.cores
        ]  # fmt: skip
        self._draw_cores_(cores, std or self.num_dense**-0.25, init)
        if not std:  # were all of them zero, none would ever have a gradient
            cores[-1].zero_()
        for core, drawn in zip(self.cores, cores, strict=True):
            if drawn is not core:
                from torch.distributed.tensor import distribute_tensor

                core.copy_(distribute_tensor(drawn, core.device_mesh, core.placements))

    def _draw_cores_(self, cores: list[Tensor], std: float, init: Init) -> None:
        """Draw cores of a weight with root mean square ``std``, which is not zero."""
        if init == "orthogonal":
            orthogonal_(cores, self._split, std)
        else:
            normal_(cores, std)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs) -> None:
        saved = [state_dict.get(f"{prefix}cores.{k}") for k in range(len(self.cores))]
        if all(isinstance(core, Tensor) for core in saved):
            ranks = tuple(core.shape[-1] for core in saved[:-1])
            fits = all(
                core.shape[1:-1] == mine.shape[1:-1]
                for core, mine in zip(saved, self.cores, strict=True)
            )
            if fits and ranks != self.ranks:
                what = f"load_state_dict of other ranks ({prefix.rstrip('.') or 'the layer'})"
                check_unsharded(self, what, written=True)
                self.resize_ranks_(ranks)
                renew_wrappers_([self], during=args[-1])
        elif f"{prefix}weight" in state_dict:
            say_once(log, logging.WARNING, _DENSE_CHECKPOINT)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def without_format(tensor: Tensor) -> Tensor:  # cores are no pictures with channels
            few = tensor.dim() not in (4, 5) or is_sharded(tensor)
            return fn(tensor) if few else fn(tensor[None, None])[0, 0]

        return super()._apply(without_format, recurse)

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes without cached tensors of a :class:`~comera.BatchedContraction`."""
        shared = ("shared", "shared_gates", "shared_factors")
        return {key: value for key, value in self.__dict__.items() if key not in shared}

    def __repr__(self) -> str:
        return f"{self._get_name()}({self.extra_repr()})"

    def _describe_ranks(self, smaller: float) -> str:
        size = f"{smaller:.1f}x smaller" if smaller >= 1 else f"{1 / smaller:.1f}x larger"
        size = size if all(self.ranks) else "weight vanished"
        return f"modes={self._modes.describe_modes()}, ranks={list(self.ranks)}, {size}"


def linear_of(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    """Return an ``nn.Linear`` that holds the given parameters themselves, not copies."""
    linear = nn.Linear.__new__(nn.Linear)  # accelerate's init_on_device takes no parameter on meta
    nn.Module.__init__(linear)
    linear.out_features, linear.in_features = weight.shape
    linear.weight = weight
    linear.register_parameter("bias", bias)
    return linear


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype named in a ``config``; raise ``ValueError`` if torch has no such dtype."""
    dtype = getattr(torch, str(config["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={config['dtype']!r} is none of torch's")
    return dtype


def check_model(model: Any) -> None:
    """Raise ``TypeError`` unless ``model`` is a module; a class is none."""
    if isinstance(model, type):
        raise TypeError(f"{model.__name__} is a class; a model is wanted: {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise TypeError(f"{reprlib.repr(model)} is no model, but of type {type(model).__name__}")


def tensor_trains(model: nn.Module) -> dict[str, TensorTrainModule]:
    """Find the tensor-train layers of a model by name, in the order of ``named_modules``.

    Of layers that share cores only the first is listed. Raises ``TypeError`` if ``model`` is none.
    """
    check_model(model)
    found: dict[int, tuple[str, TensorTrainModule]] = {}
    for name, module in model.named_modules():
        if isinstance(module, TensorTrainModule):
            found.setdefault(id(module.cores), (name, module))
    return dict(found.values())


def check_unsharded(model: nn.Module, what: str, written: bool = False) -> None:
    """Raise ``ValueError``, naming ``what``, if a parameter of a tensor-train layer is sharded.

    Where cores and gates are to be ``written`` to, none may be computed from other tensors.
    """
    for name, layer in tensor_trains(model).items():
        flat = getattr(layer, "_fsdp_use_orig_params", None) is False  # cores are views of one
        parts = (("cores", layer.cores), ("gates", layer.gates))
        held = {f"{kind}.{k}": param for kind, params in parts for k, param in enumerate(params)}
        for key, param in {**held, **dict(layer.named_parameters())}.items():
            which = f"{name}.{key}".lstrip(".")
            if written and not isinstance(param, nn.Parameter) and not flat:
                raise ValueError(
                    f"{what} writes to cores and gates, and {which} is computed from other tensors,"
                    " as by torch.nn.utils.parametrize or prune: remove that first "
                    "(remove_parametrizations, prune.remove)"
                )
            if flat or is_sharded(param):
                raise ValueError(
                    f"{what} needs whole tensor trains, and {which} of shape "
                    f"{tuple(param.shape)} is sharded (as by fully_shard). Leave the "
                    "model whole in DistributedDataParallel, or shard its dense matrices alone "
                    "(comera.train.sharded.shard_dense_): tensor trains are small. With all of it "
                    "sharded, write a loop of your own with torch.optim.AdamW or SGD, without "
                    "BatchedContraction, TrainStep and rank learning"
                )
