"""Compiles the native operators into a wheel where there is a C compiler; else it has none.

All else stands in pyproject.toml.
"""

import runpy
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

COMPILING = runpy.run_path(str(Path(__file__).parent / "spec_runtime/kernels/compiling.py"))
FOLDER = Path("spec_runtime/kernels/native")
PLACE = FOLDER / COMPILING["file_name"]()


class BuildWithOperators(build_py):
    def run(self) -> None:
        super().run()
        root = Path(__file__).parent if self.editable_mode else Path(self.build_lib)
        for old in (root / FOLDER).glob("*.so"):  # of an earlier build
            old.unlink()
        try:
            COMPILING["build"](root / PLACE)
        except (OSError, subprocess.SubprocessError) as error:
            reason = getattr(error, "stderr", None) or error
            print(f"the native operators are not built: {reason}")


class WheelOfOneArchitecture(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        if not (Path(self.bdist_dir) / PLACE).is_file():
            return super().get_tag()
        self.root_is_pure = False
        platform = super().get_tag()[2]
        self.root_is_pure = True
        # The library needs no more than the oldest C library that ziglang knows how to link.
        if COMPILING["is_portable"]():
            platform = platform.replace("linux", "manylinux_2_17", 1)
        return "py3", "none", platform


setup(cmdclass={"build_py": BuildWithOperators, "bdist_wheel": WheelOfOneArchitecture})
