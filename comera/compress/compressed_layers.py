"""What becomes of the layers of a model under a budget: a tuple that prints itself."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from comera.extras import needed_by
from comera.planning.printing import table_html
from comera.planning.text_table import text_table

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class CompressedLayer:
    """What becomes of one layer.

    Attributes:
        name: As in ``named_modules``.
        dense_params: Entries of the weight it had.
        params: Entries of what it has now, gates included.
        rank: Of its two factors, or of the middle bond; None where it stays dense.
        loss: By how much this is predicted to raise the loss, to second order.
        order: Of the tensor train; 1 is two factors.
    """

    name: str
    dense_params: int
    params: int
    rank: int | None
    loss: float
    order: int = 1


class CompressedLayers(tuple[CompressedLayer, ...]):
    """One :class:`CompressedLayer` for each targeted layer; prints itself, also in Jupyter."""

    def to_pandas(self) -> "pd.DataFrame":
        """Return one row a layer, columns as in :class:`CompressedLayer`. Needs pandas."""
        with needed_by("to_pandas()"):
            import pandas as pd

        return pd.DataFrame([vars(layer) for layer in self])

    def rows(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return header and cells as text."""
        return ("layer", "dense", "now", "rank", "predicted loss"), [
            (
                layer.name,
                f"{layer.dense_params:,}",
                f"{layer.params:,}",
                "dense" if layer.rank is None else str(layer.rank),
                f"{layer.loss:.3g}",
            )
            for layer in self
        ]

    def table(self) -> str:
        """Return the rows as a table of text."""
        return text_table("layers", *self.rows(), names=0)

    def summary(self) -> str:
        """Return a line of totals."""
        kept = sum(layer.rank is None for layer in self)
        params = sum(layer.params for layer in self)
        dense = sum(layer.dense_params for layer in self)
        loss = sum(layer.loss for layer in self)
        return (
            f"{len(self)} layers: {params:,} parameters of {dense:,}, {kept} stay dense, "
            f"predicted rise of the loss {loss:.3g}"
        )

    def __str__(self) -> str:
        return f"{self.table()}\n{self.summary()}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return table_html(*self.rows(), note=self.summary())
