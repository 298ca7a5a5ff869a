"""The sections of a run that learn ranks: for each method its settings, and shares of steps."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from comera.rank.importance_pruning import ImportancePruning, ImportanceSettings
from comera.rank.settings import check_target
from comera.rank.two_stage import TwoStage, TwoStageSettings


@dataclass
class TwoStageConfig(TwoStageSettings):
    """Rank learning in two stages, see ``comera.TwoStage``.

    Args:
        target: Size of the cores at the end, as a share of their size at the start.
        early_share: Share of all steps before the late stage begins.
        late_share: Share of all steps in the late stage; the rest trains the truncated model.
    """

    target: float = 0.5
    early_share: float = 0.4
    late_share: float = 0.4

    def check(self, steps: int | None = None) -> None:
        """Raise ``ValueError`` for what does not go, in the words of a run.

        Args:
            steps: Steps of the whole run, where they are known.
        """
        _check("two_stage", self.target, super().check)
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
        """Return the steps of the early and of the late stage in a run of so many."""
        early = round(self.early_share * steps)
        return early, min(round(self.late_share * steps), steps - early)

    def make(self, model: nn.Module, steps: int) -> TwoStage:
        """Make what learns the ranks of a model in a run of so many steps."""
        return TwoStage(model, self.target, *self.stages(steps), **_own(TwoStageSettings, self))


@dataclass
class ImportancePruningConfig(ImportanceSettings):
    """Ranks pruned at once by importance, see ``comera.ImportancePruning``.

    Args:
        target: Size of the cores afterwards, as a share of their size at the start.
        share: Share of all steps before ranks are pruned; the rest trains the truncated model.
    """

    target: float = 0.5
    share: float = 0.3

    def check(self, steps: int | None = None) -> None:
        """Raise ``ValueError`` for what does not go, in the words of a run.

        Args:
            steps: Steps of the whole run, where they are known.
        """
        _check("importance_pruning", self.target, super().check)
        if not 0 < self.share <= 1:
            raise ValueError(
                f"importance_pruning.share={self.share} must be a share of all steps, in (0, 1]"
            )
        if steps is not None and self.steps(steps) < 1:
            raise ValueError(
                f"importance_pruning.share={self.share} of {steps} steps is no step: some are "
                "needed, which tell the importance of ranks"
            )

    def steps(self, steps: int) -> int:
        """Return after how many steps of so many ranks are pruned."""
        return round(self.share * steps)

    def make(self, model: nn.Module, steps: int) -> ImportancePruning:
        """Make what learns the ranks of a model in a run of so many steps."""
        own = _own(ImportanceSettings, self)
        return ImportancePruning(model, self.target, self.steps(steps), **own)


RankConfig = TwoStageConfig | ImportancePruningConfig
RANK_SECTIONS = ("two_stage", "importance_pruning")
"""Names of the sections of a run that learn ranks; at most one is given."""


def _check(section: str, target: Any, check: Any) -> None:
    """Check what the method would, naming the section in what is raised."""
    try:
        check_target(target)
        check()
    except ValueError as problem:
        raise ValueError(f"{section}.{problem}") from None


def _own(kind: type, settings: Any) -> dict[str, Any]:
    """Return those settings of a section that are its method's."""
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(kind)}
