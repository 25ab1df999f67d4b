"""Stands in for CUDA where there is no GPU: ONNX Runtime's real provider over host-only libraries.

README.md says what this can show and what it cannot.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .build import CHECKOUT, UnavailableError, built

__all__ = ["StandIn", "UnavailableError"]


@dataclass(frozen=True)
class StandIn:
    """A built stand-in: `wheels` holds onnxruntime-gpu, `libraries` those of CUDA."""

    wheels: Path
    libraries: Path

    @classmethod
    def build(cls) -> "StandIn":
        """Builds it, or finds it built. Raises UnavailableError if it cannot be built here."""
        return cls(*built())

    def run(
        self, *words: object, log: Path | None = None, capability: str = "9.0", **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs this Python with these words in `environment`, and returns how it ended."""
        return subprocess.run(
            [sys.executable, *map(str, words)],
            env=self.environment(log, capability, **more),
            capture_output=True,
            text=True,
            timeout=600,
        )

    def environment(
        self, log: Path | None = None, capability: str = "9.0", **more: str
    ) -> dict[str, str]:
        """Returns a whole environment for a subprocess that runs this Python over the stand-in.

        The checkout, its tests and tools, onnxruntime-gpu and the stand-in's libraries come first.
        `log` is a file to which every call of CUDA appends a line, `capability` the compute
        capability that the device says it has, and `more` are further variables.
        """
        own = {
            "LD_LIBRARY_PATH": [self.libraries / "lib"],
            "PYTHONPATH": [
                CHECKOUT,
                *(CHECKOUT / "tests", CHECKOUT / "tools"),
                self.wheels / "ort",
                self.libraries / "python",
            ],
        }
        paths = {
            name: os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get(name)])])
            for name, folders in own.items()
        }
        settings = {"CUDA_STANDIN_CAPABILITY": capability, "CUDA_STANDIN_LOG": str(log or "")}
        return {**os.environ, "ORT_DISABLE_TELEMETRY": "1", **paths, **settings, **more}
