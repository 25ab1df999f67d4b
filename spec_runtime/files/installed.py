"""Writes the commands that errors name, so that they work in the shell that printed the error.

A program of this environment is named by its path where the shell would find another one or none.
specsplit is on no package index: an extra is installed from where specsplit itself came from.
"""

import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit


def program(name: str) -> str:
    """Returns how a shell here starts a program of this environment: "pip", or ".venv/bin/pip" if
    the environment is not activated."""
    path = Path(sys.executable).parent / name
    found = shutil.which(name)
    if not path.exists() or (found is not None and path.samefile(found)):
        return name
    return shlex.quote(_short(path))


def install(extra: str) -> str:
    """Returns the command that adds an extra: "pip install -e '.[serve]'" in a checkout, and the
    path of the wheel in place of `.` where one was installed.

    Without either, the name of the installed package is enough for pip to find its extras.
    """
    root = Path(__file__).parents[2]
    if (root / "pyproject.toml").exists():
        source = f"-e {shlex.quote(f'{_short(root)}[{extra}]')}"
    else:
        source = shlex.quote(f"{_origin()}[{extra}]")
    return f"{program('pip')} install {source}"


def how_to_build() -> str:
    """Returns the command that builds the demo bundle, after the one that installs what it needs
    if that is missing."""
    build = f"{program('spec-export')} build"
    if importlib.util.find_spec("onnx_ir") is None or importlib.util.find_spec("torch") is None:
        return f"{install('export')}, and then {build}"
    return build


def _origin() -> str:
    """Returns the folder or wheel that specsplit was installed from; its name if that is gone."""
    try:
        written = importlib.metadata.distribution("specsplit").read_text("direct_url.json")
        path = unquote(urlsplit(json.loads(written or "{}").get("url", "")).path)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        path = ""
    return _short(Path(path)) if path and Path(path).exists() else "specsplit"


def _short(path: Path) -> str:
    """Returns the path as seen from the working folder if it lies below it."""
    try:
        here = Path.cwd()
    except OSError:  # the working folder was removed
        return str(path)
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
