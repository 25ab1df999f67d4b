"""Imports TensorRT 11 or TensorRT-RTX, which have the same interface and are one code path here.

spec_export builds plans with it too.
"""

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from spec_runtime.bundle.manifest import FLAVOURS
from spec_runtime.errors import UserError
from spec_runtime.files.installed import install

# flavour -> its Python module, and our extra that installs it
PACKAGES = {
    "tensorrt": ("tensorrt", "tensorrt"),
    "tensorrt_rtx": ("tensorrt_rtx_bindings", "tensorrt-rtx"),
}
DTYPES = {
    **{"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "BOOL": "bool"},
    **{"INT64": "int64", "INT32": "int32", "INT8": "int8", "UINT8": "uint8"},
}


class TensorRT(NamedTuple):
    """The Python module of a flavour, its version in the form that plans name it, and the logger
    that all its objects share."""

    module: Any
    flavour: str
    version: str
    logger: Any

    @property
    def reason(self) -> str:
        """Returns the last error that TensorRT logged."""
        return self.logger.errors[-1][:400] if self.logger.errors else "it gave no reason"


def import_tensorrt(flavours: Sequence[str] = FLAVOURS) -> TensorRT:
    """Imports the first of these flavours that is installed.

    Raises UserError, which says what to install, if none is.
    """
    reasons = []
    for flavour in flavours:
        name = PACKAGES[flavour][0]
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError) as error:  # OSError: a library it needs does not load
            reasons.append(f"{name} ({error})")
            continue
        version = str(module.__version__)
        if flavour == "tensorrt" and int(version.partition(".")[0]) < 11:
            reasons.append(f"{name} (version {version}, expected 11 or later)")
            continue
        return TensorRT(module, flavour, version, _logger(module))
    extras = " or ".join(install(PACKAGES[flavour][1]) for flavour in flavours)
    raise UserError(f"TensorRT is not installed: got no {', no '.join(reasons)}; run {extras}")


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
