"""Quantises a matrix of a graph when its arrays are written, some rows at a time."""

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import DTypeLike

from spec_export.graphs.edit import GraphEditor

PART = 1 << 20  # weights that are quantised at once, which bounds what that takes for a moment

Arrays = tuple[np.ndarray, ...]


class Packed:
    """A matrix W [N, K], or a stack of such [E, N, K], in a quantised form: arrays whose first axis
    is that of all rows.

    They are made together when the first of them is written, and each is dropped once it is.
    """

    def __init__(
        self,
        edit: GraphEditor,
        weight: ir.TensorProtocol,
        pack: Callable[[np.ndarray], Arrays],
        *,
        is_transposed: bool = False,
    ) -> None:
        """pack: quantises some rows, f32[n, K]. is_transposed: the tensor holds Wᵀ."""
        self._edit, self._weight, self._pack = edit, weight, pack
        self._is_transposed = is_transposed
        self._made: dict[int, np.ndarray] = {}
        self._values: dict[int, ir.Value] = {}

    def array(
        self, index: int, dtype: DTypeLike, shape: Sequence[int], stem: str, *, turn: bool = False
    ) -> ir.Value:
        """Returns the initializer of one of the arrays, of this type and shape; turn: transposed,
        and the shape is that of the result."""
        if index not in self._values:

            def made() -> np.ndarray:
                found = self._take(index)
                return found.T if turn else found.reshape(shape)

            self._values[index] = self._edit.lazy(made, dtype, shape, stem)
        return self._values[index]

    def _take(self, index: int) -> np.ndarray:
        if index not in self._made:
            self._made = dict(enumerate(self._pack_all()))
        return self._made.pop(index)

    def _pack_all(self) -> Arrays:
        whole = self._weight.numpy()
        whole_NK = whole.T if self._is_transposed else whole.reshape(-1, whole.shape[-1])
        rows = max(1, PART // whole_NK.shape[1])
        starts = range(0, len(whole_NK), rows)
        parts = [self._pack(whole_NK[start : start + rows]) for start in starts]
        return tuple(np.concatenate(each) for each in zip(*parts, strict=True))
