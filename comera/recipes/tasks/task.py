"""Define the base of all tasks, which have data, model and loss of one run."""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comera.recipes.run_config import TASKS, RunConfig
from comera.recipes.run_folder import DataRecord
from comera.train.processes import Processes

Batch = dict[str, Any]  # tensors by name, and plain values

CLOCK_STEPS = 1000  # what a run by the clock counts as to its schedule and rank learning

Digests = Mapping[str, str] | None  # digests of the data by name, if they are known already

_CPU = torch.device("cpu")


class Task(ABC):
    """Data, model and loss of one run."""

    inputs: tuple[str, ...]  # parts of a batch that the model takes, in its order
    lean = False  # built without memory, tensorised, then drawn by its reset_parameters(init)
    vocabulary: Any = None  # tokenizer of text, or encoder of raw rows, for predict()
    # Set by prepare():
    sizes: Mapping[str, Any]  # of the dense model, see planned_sizes()
    steps: int  # optimizer steps of the whole run, or CLOCK_STEPS
    record: DataRecord
    per_step: tuple[int, str]  # number and name of what all processes train on in a step
    get_batch: Callable[[int], Batch]  # by a step number, the rows of this process
    evaluate: Callable[[nn.Module], dict[str, float]]  # named figures, the same in all processes
    test: Callable[[nn.Module], dict[str, float]] | None  # on data by which nothing is chosen

    def __init__(
        self, config: RunConfig, device: torch.device = _CPU, processes: Processes | None = None
    ) -> None:
        self.config = config
        self.data: Any = config.data
        self.device, self._processes = device, processes or Processes()
        # Under fsdp all processes have to run the model together, on the same batches.
        self._evaluators = self._processes if config.parallel == "ddp" else Processes()

    @abstractmethod
    def prepare(self, digests: Digests) -> None:
        """Read the data; raises errors of the readers."""

    def _prepared(
        self,
        data: Any,
        get_batch: Callable[[int], Batch],
        rows: int | None = None,
        valid: Iterable[Batch] = (),
        test: Iterable[Batch] = (),
    ) -> None:
        """Set the attributes; ``ValueError`` for no step. ``rows`` is None without an end."""
        train = self.config.train
        per_epoch = None if rows is None else rows // train.batch_size
        if per_epoch == 0:
            raise ValueError(f"train.batch_size={train.batch_size} exceeds {rows} training rows")
        passed = round((train.epochs or 0) * (per_epoch or 0))
        self.steps = train.steps or (passed if train.seconds is None else CLOCK_STEPS)
        if self.steps < 1:
            raise ValueError(
                f"train.epochs={train.epochs} is no step: an epoch has {per_epoch} of them"
            )
        self.record = DataRecord(data.digests, data.prepared)
        self.get_batch = lambda step: self._to_device(self._processes.share_of(get_batch(step)))
        self._first_batch = lambda: self._to_device(get_batch(0))  # the rows of all processes
        self.evaluate = lambda model: self._measure(model, valid)
        self.test = (lambda model: self._measure(model, test)) if test else None

    @abstractmethod
    def planned_sizes(self) -> Mapping[str, Any]:
        """Return the sizes of the dense model; read the data only if no setting determines them.

        They are ``vocab_size``, or ``table_sizes`` by field and ``num_continuous`` of a click log.
        """

    @abstractmethod
    def dense_model(self, sizes: Mapping[str, Any]) -> nn.Module:
        """Return the dense model of these sizes, on torch's default device."""

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(*(batch[name] for name in self.inputs)).float()

    def spread(self, model: nn.Module) -> dict[str, float]:
        """Return the mean relative deviation, within a batch, of the probabilities answered."""
        logits = self.logits(model, self._first_batch())
        rows = logits.flatten(0, -2) if logits.dim() > 1 else F.pad(logits[:, None], (0, 1))
        logs = rows.log_softmax(-1)  # those of two answers, if there is one logit
        square = (logs.exp().mean(0) * logs.var(0, correction=0)).sum()
        return {"spread": float(square.sqrt())}

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch."""

    @abstractmethod
    def _measure(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Evaluate a model on batches, and return the figures by name."""

    @abstractmethod
    def drawn_batch(self, rows: int, sizes: Mapping[str, Any]) -> Batch:
        """Return a random batch for a model of these sizes, on torch's default device."""

    @abstractmethod
    def save_vocabulary(self, folder: Path) -> None:
        """Save the tokenizer or the categories in the folder of a run."""

    @abstractmethod
    def load_vocabulary(self, folder: Path) -> None:
        """Read ``vocabulary`` from the folder of a run."""

    @abstractmethod
    def predict(self, model: nn.Module, line: str, new_tokens: int) -> dict[str, Any]:
        """Return a prediction for a line; raise ``ValueError`` if its form is wrong."""

    def completion(self, model: nn.Module) -> list[str] | None:
        """Return the end of a held-out text, and how a causal model ends its last line."""
        return None

    def _own(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        own = islice(batches, self._evaluators.rank, None, self._evaluators.count)
        return map(self._to_device, own)

    def _to_device(self, batch: Batch) -> Batch:
        return {
            key: value.to(self.device) if isinstance(value, Tensor) else value
            for key, value in batch.items()
        }


def logits_of(model: nn.Module, *inputs: Any) -> Tensor:
    """Return the logits of a trained model, on the CPU in float32."""
    device = next(model.parameters()).device
    moved = (value.to(device) if isinstance(value, Tensor) else value for value in inputs)
    return model(*moved).float().cpu()


def task_of(
    config: RunConfig, device: torch.device = _CPU, processes: Processes | None = None
) -> Task:
    """Return the task of a run, without reading its data."""
    kind = pkgutil.resolve_name(f"comera.recipes.tasks.{TASKS[config.task].made_by}")
    return kind(config, device, processes)


def prepare_task(
    config: RunConfig,
    device: torch.device,
    digests: Digests = None,
    processes: Processes | None = None,
) -> Task:
    """Return the task of a run with its data; raises errors of the readers."""
    task = task_of(config, device, processes)
    task.prepare(digests)
    return task
