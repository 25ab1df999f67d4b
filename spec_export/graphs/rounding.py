"""Finds weights that sit on a grid of few steps already, and notes what quantising changed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from spec_export.graphs.packed import Arrays

ON_GRID = 2e-3  # of a step: a value this near to a step sits on it
EXACT = 2e-6  # of the largest weight: float32's rounding of a scale and a product


def num_steps(
    values: np.ndarray, low: np.ndarray, high: np.ndarray, most: int, first: int = 1
) -> np.ndarray:
    """Returns the steps between `low` and `high` of each row of values f32[..., K], f32[...].

    They are `most`, or fewer if all values of the row sit on fewer even steps from `low`, as those
    of a quantised checkpoint do: such a row is not rounded a second time.
    """
    span = high - low
    steps = np.full(span.shape, most, np.float32)
    is_open = span > 0
    # One value that is neither end rules out nearly every row that is on no grid.
    inner = np.where(np.abs(values[..., 0] - low) > 0, values[..., 0], values[..., -1])
    for number in range(first, most):
        factor = number / np.where(span == 0, 1, span)
        place = (inner - low) * factor
        chosen = is_open & (np.abs(place - np.rint(place)) < ON_GRID)
        places = (values[chosen] - low[chosen][..., None]) * factor[chosen][..., None]
        fits = (np.abs(places - np.rint(places)) < ON_GRID).all(-1)
        chosen[chosen] = fits
        steps[chosen] = number
        is_open &= ~chosen
    return steps


@dataclass
class Rounding:
    """Adds up what quantising changes in matrices: squares of the changes and of the weights.

    Of each matrix, by name, the largest change and weight, and both sums.
    """

    matrices: dict[str, tuple[float, float, float, float]] = field(default_factory=dict)

    def noted(
        self,
        pack: Callable[[np.ndarray], Arrays],
        restore: Callable[[Arrays], np.ndarray],
        matrix: ir.Value,
    ) -> Callable[[np.ndarray], Arrays]:
        """Returns `pack` that also notes what it changes in the rows of a matrix.

        restore: returns the rows that the packed ones stand for.
        """

        def packed(rows_NK: np.ndarray) -> Arrays:
            made = pack(rows_NK)
            change_NK, name = restore(made) - rows_NK, str(matrix.name)
            worst, largest, changes, weights = self.matrices.get(name, (0.0, 0.0, 0.0, 0.0))
            self.matrices[name] = (
                max(worst, float(np.abs(change_NK).max())),
                max(largest, float(np.abs(rows_NK).max())),
                changes + float(np.square(change_NK, dtype=np.float64).sum()),
                weights + float(np.square(rows_NK, dtype=np.float64).sum()),
            )
            return made

        return packed

    def facts(self) -> dict[str, Any] | None:
        """Returns how many matrices there are, how many are held exactly, and the relative error:
        the root mean square of all changes over that of all weights. None without quantising."""
        if not self.matrices:
            return None
        rows = self.matrices.values()
        rounded = [row for row in rows if row[0] > EXACT * row[1]]
        changes, weights = sum(row[2] for row in rounded), sum(row[3] for row in rows)
        return {
            "matrices": len(rows),
            "exact": len(rows) - len(rounded),
            "added_error": (changes / weights) ** 0.5 if weights else 0.0,
        }


def said_of(facts: Mapping[str, Any]) -> str:
    """Returns what `Rounding.facts` says, in words."""
    exact, matrices = facts["exact"], facts["matrices"]
    said = f"{exact} of {matrices} matrices of the layers are held as the checkpoint has them"
    if exact < matrices:
        said += f"; rounding adds {facts['added_error']:.2%}"
    return said
