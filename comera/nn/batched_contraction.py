"""Contract the cores of all linear layers of a model to their factors in a few calls."""

import torch
from torch import Tensor, nn

from comera.nn.layers_together import LayersTogether
from comera.nn.linear import TTLinear
from comera.nn.module import TensorTrainModule, tensor_trains
from comera.nn.shared import Shared, versions_of
from comera.nn.shared_gates import share_gates, unshare_gates
from comera.nn.unsharded import check_unsharded


class BatchedContraction:
    """A context in which the linear layers of a model contract their cores together.

    By itself every :class:`~comera.TTLinear` contracts its own cores to a left and a right factor
    in each forward pass: some dozen small operations a layer, whatever the batch. When this context
    is entered, the cores of layers of equal shape are contracted in one batch, and a forward pass
    uses the factors that are there. Gradients flow as always. ``comera.TrainStep`` enters it in
    each step. The gates of all layers are one vector meanwhile, of which a rank objective reads
    too.

    Args:
        model: The model, whose layers are found once, here; their ranks may change between two
            uses.
        autocast: Dtype in which the layers will be used: the factors are made in it, for layers
            that are called while autocast is on; one that is called outside contracts its own.

    Raises:
        ValueError: If a tensor train is sharded, as by ``fully_shard``.

    Note:
        Call ``backward`` once for each time it is entered; inside, where activation checkpointing
        is used. A parameter that is written to inside, by an optimizer or ``load_state_dict``, is
        noticed, and everything is contracted anew; not by a compiled model, and not where it is
        written to through ``.data``, replaced, or brought to another dtype or device: leave the
        context for that.
        The gates of a layer that no gradient reaches get one of zeros, not None, where they are
        part of one vector with others; in a CUDA graph its cores do, too.

    Example::

        contracted = comera.BatchedContraction(model)
        for batch in loader:
            with contracted:
                loss_fn(model, batch).backward()
            optimizer.step()
    """

    def __init__(self, model: nn.Module, autocast: torch.dtype | None = None) -> None:
        check_unsharded(model, "BatchedContraction")
        self._model = model
        self._trains = list(tensor_trains(model).values())
        self._layers = LayersTogether(
            [m for m in self._trains if isinstance(m, TTLinear)], autocast
        )
        self._params: list[tuple[Tensor, ...]] = []

    def __enter__(self) -> "BatchedContraction":
        if self._layers.have_changed():
            check_unsharded(self._model, "BatchedContraction")  # it may have been sharded since
            self._layers.arrange()
            self._params = [_read_from(train) for train in self._trains]
        try:
            self._share()
        except BaseException:  # such as one of too little memory: nothing stays shared
            self.__exit__()
            raise
        return self

    def _share(self) -> None:
        """Gather the gates and contract the cores of all layers, which then use what was made."""
        for train, params in zip(self._trains, self._params, strict=True):
            vars(train)["shared"] = Shared(params, versions_of(params), self._share)
        share_gates(self._trains)
        self._layers.contract()

    def __exit__(self, *problem: object) -> None:
        self._layers.take_back()
        unshare_gates(self._trains)
        for train in self._trains:
            vars(train)["shared"] = None


def _read_from(train: TensorTrainModule) -> tuple[Tensor, ...]:
    """Return the parameters that the tensors shared with a module are made of."""
    return tuple(train.parameters() if isinstance(train, TTLinear) else train.gates)
