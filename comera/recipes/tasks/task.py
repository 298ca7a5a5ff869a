"""Base of all kinds of tasks, and the data and model of one run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from comera.data.click_files import ClickRows
from comera.data.vocabulary import Tokenizer
from comera.models.transformer import PAD
from comera.recipes.folder import DataRecord
from comera.recipes.run_config import RunConfig
from comera.train.processes import Processes

Batch = dict[str, Any]
"""Tensors by name, and plain values."""

Digests = Mapping[str, str] | None
"""Digests of the data by name, if they are known already."""


@dataclass
class Task:
    """Data and model of one run.

    Attributes:
        make_model: Builds the dense model; the same for the same random state.
        get_batch: Step number to batch, or to this process' rows of it.
        loss_fn: ``(model, batch)`` to mean loss.
        evaluate: Model to named figures, ``loss`` among them; the same in all processes, each of
            which sees a part of the data.
        steps: Optimizer steps of the whole run.
        record: What the data are.
        per_step: What a step trains on: how many, of all processes, and what they are called.
        test: As ``evaluate``, on data by which nothing is chosen; None if there are none.
        sizes: Sizes of the dense model that the data tell, see :meth:`TaskKind.dense_model`.
        tokenizer: What has made tokens of text, if anything has.
        categories: Returns what makes inputs of raw rows; of a click log.
        lean: The model can be made without ever being dense: built without memory, tensorised, and
            then drawn by its ``reset_parameters(init)``.
    """

    make_model: Callable[[], nn.Module]
    get_batch: Callable[[int], Batch]
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    evaluate: Callable[[nn.Module], dict[str, float]]
    steps: int
    record: DataRecord
    per_step: tuple[int, str]
    test: Callable[[nn.Module], dict[str, float]] | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    categories: Callable[[], ClickRows] | None = None
    lean: bool = False


@dataclass(frozen=True)
class Place:
    """Device and process of a run: its share of batches, and sums over all processes."""

    device: torch.device
    processes: Processes
    alone: bool
    """Whether a process can run the model without the others, which may hold parts of it."""

    def share_of(self, batch: Batch) -> Batch:
        """Move this process' rows of a batch to the device."""
        return _to(self.processes.share_of(batch), self.device)

    def own(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Move those of many batches that this process evaluates to the device, one by one."""
        number, count = self.processes.rank, self.processes.count
        own = islice(batches, number, None, count) if self.alone else batches
        return (_to(batch, self.device) for batch in own)

    def sums(self, *numbers: float) -> list[float]:
        """Add up what processes have found on their own batches."""
        return self.processes.sums(*numbers) if self.alone else list(numbers)

    def gathered(self, rows: Tensor) -> Tensor:
        """Put together what processes have found on their own batches."""
        return self.processes.gathered(rows) if self.alone else rows


class Trained(Protocol):
    """The part of :class:`~comera.recipes.trained.TrainedRun` that predictions use."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def categories(self) -> ClickRows | None: ...


class TaskKind(ABC):
    """One kind of task: its data, its model and its loss.

    A new kind is a section of ``RunConfig``, whose class has ``check``, ``find`` and ``digests`` as
    those of ``comera.data`` have, and a subclass of this, which ``KINDS`` lists.

    Attributes:
        config: The settings of a run of this kind.
        data: Their section that describes the data.
        inputs: Names of the parts of a batch that the model takes, in its order.
        lean: See :class:`Task`.
    """

    inputs: tuple[str, ...]
    lean = False

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.data: Any = config.data

    @abstractmethod
    def prepare(self, place: Place, digests: Digests) -> Task:
        """Read the data; raises what the readers raise."""

    @property
    def is_told_by_data(self) -> bool:
        """Whether the data determine the sizes of the model."""
        return False

    @abstractmethod
    def planned_sizes(self) -> Mapping[str, Any]:
        """Return the sizes of the dense model; data are read only if they alone tell them.

        Raises:
            ValueError: If data are needed and not there.
        """

    @abstractmethod
    def dense_model(self, sizes: Mapping[str, Any]) -> nn.Module:
        """Make the dense model, on torch's default device.

        Args:
            sizes: Those that the data tell: ``vocab_size``; of a click log ``table_sizes`` by the
                names of fields, and ``num_continuous``.
        """

    def count_steps(self, per_epoch: int) -> int:
        """Count the optimizer steps of a run over data with an end.

        Raises:
            ValueError: If there is not one.
        """
        train = self.config.train
        if not per_epoch:
            raise ValueError(f"train.batch_size={train.batch_size} exceeds the training rows")
        if train.steps is not None:
            return train.steps
        steps = round((train.epochs or 0) * per_epoch)
        if steps < 1:
            raise ValueError(
                f"train.epochs={train.epochs} is no step: an epoch has {per_epoch} of them"
            )
        return steps

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Run the model on the inputs of a batch; float32."""
        return model(*(batch[name] for name in self.inputs)).float()

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch."""

    @abstractmethod
    def drawn_batch(self, rows: int, sizes: Mapping[str, Any]) -> Batch:
        """Draw a batch without data, on torch's default device.

        Args:
            rows: Rows of the batch.
            sizes: As of :meth:`dense_model`.
        """

    def example_inputs(self, sizes: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Make the tensors that the model takes, of two rows."""
        batch = self.drawn_batch(2, sizes)
        return tuple(batch[name] for name in self.inputs if isinstance(batch[name], Tensor))

    @abstractmethod
    def predict(self, run: Trained, line: str, new_tokens: int) -> dict[str, Any]:
        """Predict something for a line.

        Raises:
            ValueError: If the line is not what is expected.
        """


def say_padding(batch: dict[str, Tensor]) -> Batch:
    """Add whether any token is padding, computed here because on a GPU it would synchronise."""
    return batch | {"padded": bool((batch["tokens"] == PAD).any())}


def logits_of(run: Trained, *inputs: Any) -> Tensor:
    """Return the logits of a trained model, on the CPU in float32."""
    device = next(run.model.parameters()).device
    moved = (value.to(device) if isinstance(value, Tensor) else value for value in inputs)
    return run.model(*moved).float().cpu()


def _to(batch: Batch, device: torch.device) -> Batch:
    return {
        key: value.to(device) if isinstance(value, Tensor) else value
        for key, value in batch.items()
    }
