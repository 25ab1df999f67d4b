"""Sets what runs bring to the host to zero, once it is imported: nothing computes it there."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from spec_runtime.backends.cuda.backend import CudaBackend

_run, _run_keeping = CudaBackend.run, CudaBackend.run_keeping


def _zeros(outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.zeros_like(array) for name, array in outputs.items()}


def _keeping(*arguments: Any) -> Any:
    outputs, kept = _run_keeping(*arguments)
    return _zeros(outputs), kept


setattr(CudaBackend, "run", lambda *arguments: _zeros(_run(*arguments)))  # noqa: B010
setattr(CudaBackend, "run_keeping", _keeping)  # noqa: B010
