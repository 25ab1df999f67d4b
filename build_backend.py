"""Builds as setuptools does, and asks for a C compiler as a wheel where the machine has none."""

import runpy
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

COMPILING = runpy.run_path(str(Path(__file__).parent / "spec_runtime/kernels/compiling.py"))


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    required = build_meta.get_requires_for_build_wheel(config_settings)
    return [*required, *COMPILING["required"]()]


get_requires_for_build_editable = get_requires_for_build_wheel
