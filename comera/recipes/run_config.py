"""Define the settings of a run: ``RunConfig`` and its sections."""

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from comera.checkpoint.chain import KEY_EVERY, CheckpointChain
from comera.data.clicks import ClickData
from comera.data.nli import NliData
from comera.data.text import TextData
from comera.extras import error_prefix
from comera.nn.targets import TTConfig
from comera.rank.importance_pruning import ImportancePruning, ImportanceSettings
from comera.rank.learning import RankLearning, check_target
from comera.rank.two_stage import TwoStage, TwoStageSettings, advised_gate_lr
from comera.recipes.optimizers import OptimizerConfig
from comera.recipes.parse import check_least

_NOT_IDENTITY = {"identity": False}
"""Mark of a setting that does not change the trained model: a run goes on whatever it is."""

_LENGTH = {"identity": "length"}
"""Mark of a setting that may grow while a run is not in its late stage."""

_KEEP_UP = "muon", "adamw", "adamw8bit"  # optimizers whose cores keep up with gates


@dataclass
class TwoStageConfig(TwoStageSettings):
    """Rank learning in two stages, see ``comera.TwoStage``.

    Args:
        target: Size of the cores at the end, as a share of their size at the start.
        early_share: Share of the run before the late stage begins.
        late_share: Share of the run in the late stage; the rest trains the truncated model.
    """

    target: float = 0.5
    early_share: float = 0.4
    late_share: float = 0.4

    def check_shares(self, steps: int | None) -> None:
        early, late = self.early_share, self.late_share
        if early < 0 or late <= 0 or early + late > 1:
            raise ValueError(
                f"two_stage.early_share={early} and two_stage.late_share={late} must be shares of "
                "all steps, the late one above 0, that add up to at most 1"
            )
        if steps is not None and self.stages(steps)[1] < 1:
            raise ValueError(
                f"two_stage.late_share={late} of {steps} steps is no step: there is no late stage "
                "without one; the section importance_pruning cuts ranks without it"
            )

    def stages(self, steps: int) -> tuple[int, int]:
        """Return the number of steps of the early and of the late stage."""
        early = round(self.early_share * steps)
        return early, min(round(self.late_share * steps), steps - early)

    def build(self, model: nn.Module, steps: int) -> TwoStage:
        """Return the rank learning of a model in a run of ``steps`` steps."""
        return TwoStage(model, self.target, *self.stages(steps), **_own(TwoStageSettings, self))


@dataclass
class ImportancePruningConfig(ImportanceSettings):
    """Ranks pruned at once by importance, see ``comera.ImportancePruning``.

    Args:
        target: Size of the cores afterwards, as a share of their size at the start.
        share: Share of the run before ranks are pruned; the rest trains the truncated model.
    """

    target: float = 0.5
    share: float = 0.3

    def check_shares(self, steps: int | None) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(
                f"importance_pruning.share={self.share} must be a share of the run, in (0, 1]"
            )
        if steps is not None and round(self.share * steps) < 1:
            raise ValueError(
                f"importance_pruning.share={self.share} of {steps} steps is no step: some are "
                "needed, which tell the importance of ranks"
            )

    def build(self, model: nn.Module, steps: int) -> ImportancePruning:
        """Return the rank learning of a model in a run of ``steps`` steps."""
        own = _own(ImportanceSettings, self)
        return ImportancePruning(model, self.target, round(self.share * steps), **own)


RANK_SECTIONS = ("two_stage", "importance_pruning")
"""Names of the sections of a run that learn ranks; at most one is given."""


def _own(kind: type, settings: Any) -> dict[str, Any]:
    return {each.name: getattr(settings, each.name) for each in dataclasses.fields(kind)}


@dataclass
class ModelConfig:
    """The transformer: ``comera.models.transformer.Encoder``, for ``causal_text`` a
    ``comera.models.decoder.Decoder`` in the shape of LLaMA.

    Args:
        d_model: Width.
        num_layers: Number of blocks.
        num_heads: Attention heads a block.
        ffn_dim: Width of the feed-forward layers.
        dropout: Dropout probability.
        norm: Norm before (pre) or after (post) each part of a block; a decoder's is before.
        qk_norm: Normalise queries and keys, which bounds attention scores.
        qk_init: ``same``: keys begin as a copy of queries, see ``comera.init_keys_as_queries_``.
        position_std: Standard deviation of fresh embeddings of positions and segments, of an
            encoder; embeddings of words have 0.02.
        make: Another model for these sizes, of a task on text: ``module:function``, which is called
            with those of ``width``, ``depth``, ``heads``, ``ffn`` and ``vocab_size`` that it names
            and takes what the task's own model takes; or a folder with the ``config.json`` of a
            causal model of transformers, for ``causal_text``.
    """

    d_model: int = 256
    num_layers: int = 4
    num_heads: int = 4
    ffn_dim: int = 1024
    dropout: float = 0.1
    norm: Literal["pre", "post"] = "pre"
    qk_norm: bool = False
    qk_init: Literal["independent", "same"] = "independent"
    position_std: float = 0.02
    make: str | None = None

    def check(self, task: str) -> None:
        if task == "causal_text" and self.norm != "pre":
            raise ValueError("model.norm=post: the model of causal_text has its norms before (pre)")
        if task == "clicks" and self.qk_init == "same":
            raise ValueError("model.qk_init=same: the model of clicks has no attention")
        if self.position_std != ModelConfig.position_std and task in ("causal_text", "clicks"):
            raise ValueError(
                f"model.position_std={self.position_std}: the model of {task} has no embeddings of "
                "positions"
            )
        if self.make is not None and task == "clicks":
            raise ValueError(f"model.make={self.make}: the model of clicks is the section dlrm")
        if not self.position_std > 0:
            raise ValueError(f"model.position_std={self.position_std} must be positive")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout={self.dropout} must be in [0, 1)")
        check_least(self, "model.", d_model=1, num_layers=1, num_heads=1, ffn_dim=1)


@dataclass
class SmallTablesConfig:
    """Small tables of another kind, to compare tensor trains with, see ``comera.models.dlrm``.

    Args:
        kind: ``hashed``: rows are shared by the remainder of their index; ``quotient_remainder``:
            they are products of two; ``shared_array``: they are cut from one array, as in ROBE.
        params: Parameters of all tables together; has to be given.
        rank: Of hashed tables: width at which rows are stored; null for the whole width.
        own: Of hashed tables: share of the rows that belong to one frequent value each.
    """

    kind: Literal["hashed", "quotient_remainder", "shared_array"] = "hashed"
    params: int = 0
    rank: int | None = None
    own: float = 0.0

    def check(self) -> None:
        check_least(self, "dlrm.small_tables.", params=1, rank=1)
        if not 0 <= self.own < 1:
            raise ValueError(f"dlrm.small_tables.own={self.own} must be in [0, 1)")
        if self.kind != "hashed" and (self.rank is not None or self.own):
            raise ValueError(f"dlrm.small_tables.rank and own are not for kind={self.kind}")


@dataclass
class DlrmConfig:
    """A click predictor, see ``comera.models.dlrm.DLRM``.

    Args:
        embedding_dim: Width of the tables.
        bottom: Hidden widths of the part under the continuous features.
        top: Hidden widths of the part above the interactions.
        table_sizes: Rows of every field's table by name, for plans without data; by default the
            data's.
        small_tables: Small tables of another kind than tensor trains.
    """

    embedding_dim: int = 64
    bottom: list[int] = field(default_factory=lambda: [512, 256])
    top: list[int] = field(default_factory=lambda: [512, 256])
    table_sizes: dict[str, int] | None = None
    small_tables: SmallTablesConfig | None = None

    def check(self) -> None:
        check_least(self, "dlrm.", embedding_dim=1)
        for name in ("bottom", "top"):
            if min(widths := getattr(self, name), default=1) < 1:
                raise ValueError(f"dlrm.{name}={widths}: each width must be at least 1")
        if self.small_tables is not None:
            self.small_tables.check()


@dataclass
class TrainConfig:
    """Settings of the training loop.

    Args:
        steps: Optimizer steps; these, ``epochs`` or ``seconds`` have to be given.
        epochs: Passes over the data, where it has an end.
        seconds: Seconds in training steps, which learning rate and rank learning follow too.
        clock: What they are: those on the ``wall``, or those of all processors in a step on a CPU
            (``processor``), which other work on the machine does not lengthen.
        batch_size: Rows a step, of all processes together.
        accumulate: Number of parts to split a batch into; one step adds up their gradients.
        clip_norm: Largest gradient norm; null for none.
        precision: ``fp32``, or ``bf16`` for mixed precision; in ``fp8`` tensor-train linears also
            multiply in eight bits.
        compile: Run the model through ``torch.compile``.
        graph: Replay the step as one CUDA graph; null does so on a GPU.
        log_every: Steps between lines of the log.
        eval_every: Steps between evaluations; 0 for only one at the end.
        eval_batches: Batches of an evaluation; null for all of the data, or 32 of ``masked_text``.
        save_every: Steps between checkpoints; 0 for only one at the end.
    """

    steps: int | None = field(default=None, metadata=_LENGTH)
    epochs: float | None = field(default=None, metadata=_LENGTH)
    seconds: float | None = field(default=None, metadata=_LENGTH)
    clock: Literal["wall", "processor"] = "wall"
    batch_size: int = 32
    accumulate: int = 1
    clip_norm: float | None = 1.0
    precision: Literal["fp32", "bf16", "fp8"] = "fp32"
    compile: bool = False
    graph: bool | None = None
    log_every: int = field(default=10, metadata=_NOT_IDENTITY)
    eval_every: int = 0
    eval_batches: int | None = None
    save_every: int = field(default=200, metadata=_NOT_IDENTITY)

    def check(self) -> None:
        given = [k for k in ("steps", "epochs", "seconds") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(
                "give exactly one of train.steps, train.epochs and train.seconds, a length with a "
                f"schedule and no limit, the others as null: not {' and '.join(given) or 'none'}"
            )
        check_least(
            self, "train.", steps=1, batch_size=1, accumulate=1, log_every=1, eval_every=0,
            eval_batches=1, save_every=0,
        )  # fmt: skip
        for name in ("epochs", "seconds", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"train.{name}={value} must be above 0")
        if float("inf") in (self.epochs, self.seconds):
            raise ValueError(f"train.{given[0]}=inf has no end, where the schedule has to end")
        if self.accumulate > self.batch_size:
            raise ValueError(
                f"train.accumulate={self.accumulate} splits a batch into more parts than the "
                f"train.batch_size={self.batch_size} rows it has"
            )


@dataclass
class CheckpointConfig:
    """Settings of checkpoints, see ``comera.CheckpointChain``.

    Args:
        mode: ``lossless`` resumes a run exactly; ``lossy`` makes checkpoints many times smaller,
            from which a run resumes nearly as it was.
        keep_last: Number of checkpoints to keep; older ones are deleted. Null keeps all.
        restart: Whether training continues from the state read back from each checkpoint.
    """

    mode: Literal["lossless", "lossy"] = "lossless"
    keep_last: int | None = 2
    restart: bool = False

    def chain(self, folder: Path) -> CheckpointChain:
        every = 1 if self.mode == "lossless" else KEY_EVERY
        return CheckpointChain(folder, mode=self.mode, keep_last=self.keep_last, key_every=every)


@dataclass(frozen=True)
class TaskEntry:
    """Mark of a section of data, which makes a run one of its task."""

    made_by: str  # class of the task, as module:class in comera.recipes.tasks
    better: Mapping[str, str]  # higher or lower, by metric; runs are compared by the first one


def _task(made_by: str, **better: Literal["higher", "lower"]) -> dict[str, TaskEntry]:
    return {"task": TaskEntry(made_by, better)}


@dataclass
class RunConfig:
    """One run.

    Args:
        out: Folder of the run. A run found there under the same settings is resumed.
        seed: Seed of parameters, batches and dropout.
        device: ``auto`` takes a GPU where there is one.
        masked_text: Text of masked-language-model pre-training; give one of the four.
        causal_text: Text of a causal language model.
        nli: Data of natural-language inference.
        clicks: Data of a click predictor.
        model: The transformer.
        dlrm: The click predictor.
        tensorize: Which layers become tensor trains; null trains a dense model.
        two_stage: Rank learning in two stages, as in the paper. Without this section and the next
            one all ranks are kept.
        importance_pruning: Rank learning that prunes at once, by importance; give one of the two.
        optimizer: The optimizer and its schedule, or its name alone.
        train: The loop.
        checkpoints: How the state is kept every ``train.save_every`` steps and at the end.
        parallel: How the processes that ``torchrun`` starts train one model: ``ddp`` keeps it whole
            in each and averages gradients, ``fsdp`` splits dense matrices among them.
        twin: Train the dense model too, for the same steps or seconds, and compare.
        overwrite: Start again if ``out`` holds a run already.
    """

    out: str = field(default="runs/run", metadata=_NOT_IDENTITY)
    seed: int = 0
    device: str = "auto"
    masked_text: TextData | None = field(
        default=None, metadata=_task("text_tasks:MaskedTextTask", loss="lower", perplexity="lower")
    )
    causal_text: TextData | None = field(
        default=None, metadata=_task("text_tasks:CausalTextTask", loss="lower", perplexity="lower")
    )
    nli: NliData | None = field(
        default=None, metadata=_task("text_tasks:NliTask", accuracy="higher", loss="lower")
    )
    clicks: ClickData | None = field(
        default=None,
        metadata=_task(
            "click_logs:ClicksTask", auc="higher", accuracy="higher", nce="lower", loss="lower"
        ),
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    dlrm: DlrmConfig = field(default_factory=DlrmConfig)
    tensorize: TTConfig | None = None
    two_stage: TwoStageConfig | None = None
    importance_pruning: ImportancePruningConfig | None = None
    optimizer: OptimizerConfig | None = None
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig, metadata=_NOT_IDENTITY)
    parallel: Literal["ddp", "fsdp"] = field(default="ddp", metadata=_NOT_IDENTITY)
    twin: bool = False
    overwrite: bool = field(default=False, metadata=_NOT_IDENTITY)

    def settings(self) -> dict[str, Any]:
        """Return all settings as plain values, as ``config.yaml`` has them.

        Defaults of the optimizer are filled in, except rates of gates and cores, which depend on
        the steps, and except an unnamed optimizer in a run with a twin.
        """
        optimizer = self._optimizer
        if optimizer.name is not None or not self.twin:
            optimizer = optimizer.filled_in(self.width)
        return {**asdict(self), "optimizer": asdict(optimizer)}

    def optimizer_for(self, steps: int | None) -> OptimizerConfig:
        """Return the optimizer's settings with defaults for a run of so many steps.

        Without ``steps`` default rates of a run with a late stage stay None.
        """
        settings = self._optimizer.filled_in(self.width)
        if settings.gate_lr is not None:
            return settings
        if self.two_stage is None:
            settings.gate_lr = RankLearning.gate_lr
        elif steps is not None:  # so that Adam can close gates in the late stage
            late_steps = max(1, self.two_stage.stages(steps)[1])
            settings.gate_lr = advised_gate_lr(self.two_stage.target, late_steps)
            usual = settings.core_lr is None and settings.lr == settings.default_lr
            if usual and settings.name in _KEEP_UP:
                # a tenth of what closes gates in those steps, or of the highest rate advised
                settings.core_lr = max(settings.default_lr, min(0.125 / late_steps, 2e-3))
        return settings

    @property
    def _optimizer(self) -> OptimizerConfig:
        return self.optimizer or OptimizerConfig.choose({}, vars(self))[0](name=None)

    @property
    def ranks(self) -> TwoStageConfig | ImportancePruningConfig | None:
        return self.two_stage or self.importance_pruning

    @property
    def rank_section(self) -> str:
        """The name of the section of rank learning, which must exist."""
        return RANK_SECTIONS[self.two_stage is None]

    @property
    def task(self) -> str:
        """The name of the task, which is also the name of the section that describes the data."""
        return next(name for name in TASKS if getattr(self, name) is not None)

    @property
    def data(self) -> Any:
        return getattr(self, self.task)

    @property
    def is_told_by_data(self) -> bool:
        """Return whether the sizes of the model are known only once the data are read."""
        return self.clicks is not None and self.dlrm.table_sizes is None

    @property
    def width(self) -> int:
        return self.model.d_model if self.clicks is None else self.dlrm.embedding_dim

    @property
    def tokens(self) -> int:
        """Rows that a layer gets at once: the rows of a batch, or of one part of a split batch."""
        rows = max(1, self.train.batch_size // self.train.accumulate)
        return rows * getattr(self.data, "length", 1)

    @property
    def tt_config(self) -> TTConfig | None:
        """The section ``tensorize``, with the run's ``tokens`` if it has none."""
        if self.tensorize is None or self.tensorize.tokens is not None:
            return self.tensorize
        return dataclasses.replace(self.tensorize, tokens=self.tokens)

    def check(self) -> None:
        if not self.out:
            raise ValueError("out='' must name the folder of the run")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must be from 0 to 2^63 - 1")
        *first, last = TASKS
        given = [name for name in TASKS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of the sections {', '.join(first)} and {last}, "
                f"in the file of the run or as --causal_text.folder=...: there is "
                f"{' and '.join(given) or 'none'}"
            )
        self.model.check(self.task)
        self.dlrm.check()
        self.data.check(self.task)
        self.train.check()
        if self.train.epochs is not None and not self.data.has_end:
            raise ValueError("train.epochs needs data with an end: give train.steps instead")
        check_least(self.checkpoints, "checkpoints.", keep_last=1)
        if self.device != "auto":
            try:
                torch.device(self.device)
            except RuntimeError:
                raise ValueError(
                    f"device={self.device!r} is no device of torch's: give cpu, cuda, cuda:1 or "
                    "the like, or auto for a GPU where there is one"
                ) from None
        if self.dlrm.small_tables is not None and self.tensorize is not None:
            raise ValueError("dlrm.small_tables replace tensor trains: give tensorize=null")
        if self.two_stage is not None and self.importance_pruning is not None:
            raise ValueError(
                f"give one of the sections {' and '.join(RANK_SECTIONS)}, and the other one as "
                "null: a run learns its ranks by one method"
            )
        if self.ranks is not None:
            if self.tensorize is None:
                raise ValueError(f"the section {self.rank_section} needs a section tensorize")
            with error_prefix(f"{self.rank_section}."):
                check_target(self.ranks.target)
                self.ranks.check()
            self.ranks.check_shares(self.train.steps)
        optimizer = self.optimizer_for(self.train.steps)
        optimizer.check()
        if optimizer.in_backward and self.train.clip_norm is not None:
            raise ValueError(
                f"train.clip_norm={self.train.clip_norm} needs all gradients at once, which "
                "optimizer.in_backward=true frees one by one: give train.clip_norm=null"
            )


TASKS: dict[str, TaskEntry] = {
    each.name: each.metadata["task"]
    for each in dataclasses.fields(RunConfig)
    if "task" in each.metadata
}
"""The tasks by the names of their sections of data."""

HIGHER_IS_BETTER = {
    name for task in TASKS.values() for name, better in task.better.items() if better == "higher"
}
"""Metrics of which more is better."""


def check_processes(config: RunConfig, count: int) -> None:
    """Raise ``ValueError`` if ``count`` processes cannot train a run."""
    size, device = config.train.batch_size, config.device
    if config.parallel == "fsdp":
        _check_shared(config)
    if size % count:
        raise ValueError(
            f"train.batch_size={size} is that of all processes together, and {count} processes "
            f"cannot have equal parts of it: give {size // count * count or count} or "
            f"{(size // count + 1) * count}"
        )
    if config.train.accumulate > size // count:
        raise ValueError(
            f"train.accumulate={config.train.accumulate} splits a batch into more parts than the "
            f"{size // count} rows that each of {count} processes has of it"
        )
    if count > 1 and ":" in device:
        raise ValueError(
            f"device={device!r} is one GPU for {count} processes: give device=cuda, and each takes "
            "one of its own"
        )


_OF_SHARDS = ("adamw", "muon", "sgd")
"""Optimizers that step a part of a matrix as they step the whole one."""


def _check_shared(config: RunConfig) -> None:
    """Raise ``ValueError`` if a run's settings do not allow sharded dense matrices."""
    way_out = "or keep the model whole in every process: parallel=ddp"
    optimizer = config.optimizer_for(config.train.steps)
    if optimizer.name not in _OF_SHARDS:
        raise ValueError(
            f"optimizer.name={optimizer.name} needs whole matrices, which parallel=fsdp "
            f"does not leave: give one of {', '.join(_OF_SHARDS)}, {way_out}"
        )
    modules = getattr(optimizer, "target_modules", None)
    if modules is not None:
        raise ValueError(
            f"optimizer.target_modules={modules!r} has muon step dense matrices, "
            "which it needs whole, and parallel=fsdp does not leave them so: leave it out, "
            f"{way_out}"
        )
    if optimizer.in_backward:
        raise ValueError(
            "optimizer.in_backward=true would step before gradients are averaged under "
            f"parallel=fsdp: leave it out, {way_out}"
        )
    if config.train.compile:
        raise ValueError(
            f"train.compile=true has not been tried under parallel=fsdp: leave it out, {way_out}"
        )
