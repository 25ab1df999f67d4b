"""Says whether this CPU's int8 products saturate, as those of AVX2 without VNNI do.

Tests build their int8 graphs with `reduce_range=SATURATES`, so that they run on every CPU; those of
the full range are skipped where it cannot be had.
"""

import numpy as np
import onnx_ir as ir
import pytest
from onnxruntime import InferenceSession

from spec_export.graphs.quantize import saturation_probe
from spec_runtime.backends.cpu import require_exact_int8
from spec_runtime.errors import UserError


class _Probe:
    def __init__(self) -> None:
        model = ir.to_proto(saturation_probe()).SerializeToString()
        self._session = InferenceSession(model, providers=["CPUExecutionProvider"])

    def run(self, feeds: dict[str, np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
        return dict(zip(names, self._session.run(names, feeds), strict=True))


def _saturates() -> bool:
    try:
        require_exact_int8(_Probe())  # type: ignore[arg-type]
    except UserError:
        return True
    return False


SATURATES = _saturates()
needs_whole_int8 = pytest.mark.skipif(SATURATES, reason="this CPU's int8 products saturate")
