"""Promises about the project as a whole: what importing costs, what is declared."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "transformers", "onnx", "onnxruntime"}


def loaded_by(code: str) -> set[str]:
    """The heavy modules that a fresh interpreter has loaded after ``code``."""
    tail = f"\nimport sys; print(*({HEAVY!r} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code + tail], check=True, capture_output=True, text=True
    )
    return set(result.stdout.splitlines()[-1].split())


def test_the_detector_sees_a_heavy_import() -> None:
    assert loaded_by("import sys, types; sys.modules['torch'] = types.ModuleType('torch')") == {
        "torch"
    }


@pytest.mark.parametrize("code", ["import spec_runtime", "import spec_runtime.cli.bench"])
def test_importing_spec_runtime_stays_light(code: str) -> None:
    assert loaded_by(code) == set()


def verbs() -> list[tuple[str, list[str]]]:
    found = []
    for package in ("spec_runtime", "spec_export"):
        files = (ROOT / package / "cli").glob("[a-z]*.py")
        names = sorted(file.stem for file in files if file.stem != "options")
        found += [(package, arguments) for arguments in ([], *([name] for name in names))]
    return found


@pytest.mark.parametrize(("package", "arguments"), verbs())
def test_help_loads_no_heavy_module(package: str, arguments: list[str]) -> None:
    code = (
        f"import {package}.cli\n"
        f"try: {package}.cli.main({[*arguments, '--help']!r})\n"
        "except SystemExit as end: assert end.code == 0, end.code"
    )
    assert loaded_by(code) == set()


def project() -> dict[str, object]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        return tomllib.load(file)["project"]


def names(requirements: object) -> set[str]:
    assert isinstance(requirements, list)
    return {requirement.split(">")[0].split("=")[0].lower() for requirement in requirements}


def test_base_dependencies_are_what_the_runtime_needs() -> None:
    assert names(project()["dependencies"]) == {"numpy", "tokenizers", "jinja2", "typer", "rich"}


def test_every_tested_extra_is_pinned_by_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    for extra in ("cpu", "tensorrt-rtx", "export", "distill", "dev"):
        missing = names(extras[extra]) - pinned
        assert not missing, (extra, missing)
    assert not names(project()["dependencies"]) - pinned


def test_the_readme_maps_every_file() -> None:
    readme = (ROOT / "README.md").read_text()
    for package in ("spec_runtime", "spec_export"):
        section = readme.split(f"**`{package}/`**")[1].split("**`")[0]
        for file in (ROOT / package).rglob("*.py"):
            name = file.relative_to(ROOT / package).as_posix()
            assert f"`{name}`" in section, f"{package}/{name}"
