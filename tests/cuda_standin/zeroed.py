"""Sets what runs bring to the host to zero, once it is imported: nothing computes it there."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from spec_runtime.backends.base import OnDevice
from spec_runtime.backends.cuda.backend import CudaBackend
from spec_runtime.backends.cuda.sampling_graph import SamplingGraph

_start, _sample = CudaBackend.start, SamplingGraph.run


def _zeros(outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.zeros_like(array) for name, array in outputs.items()}


def _starting(*arguments: Any) -> Callable[[], OnDevice]:
    finish = _start(*arguments)

    def zeroed() -> OnDevice:
        outputs, kept = finish()
        return _zeros(outputs), kept

    return zeroed


def _sampling(*arguments: Any) -> list[np.ndarray]:
    return [np.zeros_like(array) for array in _sample(*arguments)]


setattr(CudaBackend, "start", _starting)  # noqa: B010
setattr(SamplingGraph, "run", _sampling)  # noqa: B010
