"""Imports TensorRT-RTX, whose plans are built here and were never executed.

spec_export builds plans with it too.
"""

import importlib
from functools import cache
from typing import Any, NamedTuple

from spec_runtime.bundle.manifest import FLAVOURS
from spec_runtime.errors import UserError
from spec_runtime.files.installed import install

MODULE = "tensorrt_rtx_bindings"
DTYPES = {
    **{"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "BOOL": "bool"},
    **{"INT64": "int64", "INT32": "int32", "INT8": "int8", "UINT8": "uint8"},
}


class TensorRT(NamedTuple):
    """The Python module, its flavour and version in the form that plans name it, and the logger
    that all its objects share."""

    module: Any
    flavour: str
    version: str
    logger: Any

    @property
    def reason(self) -> str:
        """Returns the last error that TensorRT logged."""
        return self.logger.errors[-1][:400] if self.logger.errors else "it gave no reason"


def import_tensorrt() -> TensorRT:
    """Imports TensorRT-RTX. Raises UserError, which says what to install, if it is not here."""
    try:
        module = importlib.import_module(MODULE)
    except (ImportError, OSError) as error:  # OSError: a library it needs does not load
        raise UserError(
            f"TensorRT-RTX is not installed: got no {MODULE} ({error}); run "
            f"{install('tensorrt-rtx')}"
        ) from None
    return TensorRT(module, FLAVOURS[0], str(module.__version__), _logger(module))


@cache
def _logger(module: Any) -> Any:
    """Returns the one logger of a module; it keeps each error as one line."""

    class Logger(module.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (module.ILogger.ERROR, module.ILogger.INTERNAL_ERROR):
                self.errors.append(" ".join(message.split()))

    return Logger()
