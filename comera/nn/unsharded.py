"""Refuse tensor trains that are sharded, where they are needed whole."""

from torch import nn

from comera.nn.module import tensor_trains
from comera.params import is_sharded


def check_unsharded(model: nn.Module, what: str) -> None:
    """Raise ``ValueError`` if a parameter of a tensor-train layer is sharded.

    Args:
        model: Its tensor-train layers are checked.
        what: Name of what needs them whole, for the message.
    """
    for name, layer in tensor_trains(model).items():
        for key, param in layer.named_parameters():
            if is_sharded(param):
                raise ValueError(
                    f"{what} needs whole tensor trains, and {f'{name}.{key}'.lstrip('.')} of shape "
                    f"{tuple(param.shape)} is sharded (a DTensor, as fully_shard makes it). Leave "
                    "the model whole in DistributedDataParallel, or shard its dense matrices alone "
                    "(comera.train.sharded.shard_dense_): tensor trains are small. With all of it "
                    "sharded, write a loop of your own with torch.optim.AdamW or SGD, without "
                    "BatchedContraction, TrainStep and rank learning"
                )
