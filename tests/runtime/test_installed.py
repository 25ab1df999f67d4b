"""Tests the commands that errors name: they work in the shell that printed the error."""

import importlib.metadata
import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spec_runtime.bundle import manifest as bundles
from spec_runtime.files import installed

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes an environment with pip and spec-export the running one, without activating it."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("pip", "spec-export"):
        (programs / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    return programs


def as_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, direct_url: str | None) -> None:
    """Lets specsplit be an installed package that came from `direct_url`."""
    monkeypatch.setattr(installed, "__file__", str(tmp_path / "site/spec_runtime/files/it.py"))
    found = SimpleNamespace(read_text=lambda name: direct_url)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: found)


def test_a_program_is_named_by_its_path_unless_the_shell_finds_it(
    environment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert installed.program("pip") == ".venv/bin/pip"
    monkeypatch.setenv("PATH", str(environment))
    assert installed.program("pip") == "pip"
    other = tmp_path / "other"
    other.mkdir()
    (other / "pip").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{other}:{environment}")
    assert installed.program("pip") == ".venv/bin/pip", "another environment's pip comes first"
    monkeypatch.chdir(other)
    assert installed.program("pip") == str(environment / "pip")
    assert installed.program("nothing") == "nothing"


def test_in_a_checkout_an_extra_is_installed_from_it(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert installed.install("serve") == f".venv/bin/pip install -e '{ROOT}[serve]'"
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", str(environment))
    assert installed.install("serve") == "pip install -e '.[serve]'"


def test_elsewhere_an_extra_is_installed_from_the_wheel_that_is_there(
    environment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel = tmp_path / "my wheels" / "specsplit-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()
    as_package(monkeypatch, tmp_path, json.dumps({"url": wheel.as_uri()}))
    *_, source = shlex.split(installed.install("hub"))
    assert source == "my wheels/specsplit-0.1.0-py3-none-any.whl[hub]"
    wheel.unlink()
    assert installed.install("hub").endswith("install 'specsplit[hub]'"), "pip knows its extras"


@pytest.mark.parametrize("direct_url", [None, "", "no JSON", "{}", '{"url": "https://x/y.whl"}'])
def test_without_an_origin_the_installed_name_is_enough(
    direct_url: str | None, environment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    as_package(monkeypatch, tmp_path, direct_url)
    assert installed.install("hub") == ".venv/bin/pip install 'specsplit[hub]'"


@pytest.mark.parametrize("is_there", [True, False])
def test_no_bundle_names_commands_that_work(
    is_there: bool, environment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without what `spec-export build` needs, the command that installs it comes first."""
    spec: Any = object() if is_there else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    build = ".venv/bin/spec-export build"
    expected = build if is_there else f".venv/bin/pip install -e '{ROOT}[export]', and then {build}"
    for look in (lambda: bundles.find(tmp_path), lambda: bundles.read(tmp_path)):
        with pytest.raises(bundles.BundleError) as caught:
            look()
        assert f"make one with {expected}" in str(caught.value)
        assert "pull" not in str(caught.value), "nothing is published there"


def test_no_error_writes_the_command_itself() -> None:
    written = re.compile(r"pip install '?specsplit\[|'specsplit\[")
    for package in ("spec_runtime", "spec_export"):
        for file in (ROOT / package).rglob("*.py"):
            assert not written.search(file.read_text(encoding="utf-8")), file
