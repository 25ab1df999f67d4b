"""Checks how the packages are built: no import circles, no long functions, few files at a root."""

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from spec_export.model import annex
from tools import structure
from tools.structure import MAX_FILES, Structure

Read = Callable[[dict[str, str]], Structure]


@pytest.fixture(scope="module")
def found() -> Structure:
    return structure.read()


# ---- the packages ----


def test_the_findings_are_shown(
    found: Structure, record_property: Callable[[str, object], None]
) -> None:
    """The text comes into the summary of the tests, see conftest.py."""
    text = structure.describe(found)
    record_property("shown", text)
    assert text.startswith("import circles: ")
    assert len(found.imports) > 80, "files are missing"


@pytest.mark.parametrize("finding", ["circles", "forbidden", "long_functions"])
def test_the_packages_have_none_of_these(found: Structure, finding: str) -> None:
    assert not getattr(found, finding), "; ".join(map(str, getattr(found, finding)))


@pytest.mark.parametrize("package", structure.PACKAGES)
def test_few_files_lie_at_the_root(found: Structure, package: str) -> None:
    assert 1 < found.num_root_files[package] <= MAX_FILES


@pytest.mark.parametrize("kind", structure.BUDGETS)
def test_no_kind_of_file_has_more_lines_than_its_budget(kind: str) -> None:
    assert 1000 < structure.sizes()[kind] <= structure.BUDGETS[kind][0]


def test_the_door_leads_to_the_annex_and_imports_nothing_of_it_by_itself(found: Structure) -> None:
    """Its names are strings, which no other file has."""
    files = [module.replace(".", "/") for module in found.imports if "spec_export" in module]
    naming = {
        name
        for name in files
        if not name.startswith(("spec_export/imports", "spec_export/cli"))
        and (path := structure.ROOT / f"{name}.py").is_file()
        and "spec_export.imports" in path.read_text(encoding="utf-8")
    }
    assert naming == {"spec_export/model/annex"}
    for name in annex.MODULES.values():
        assert f"spec_export.imports.{name}" in found.imports
    code = "import sys, spec_export.model.files; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "spec_export.model.annex" in run.stdout.split()
    assert "spec_export.imports" not in run.stdout.split()


# ---- what finds them ----


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Reads packages made of these texts by path."""

    def write_and_read(files: dict[str, str]) -> Structure:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return structure.read(tmp_path)

    return write_and_read


def test_circles_are_found_wherever_the_imports_stand(read: Read) -> None:
    found = read(
        {
            "spec_runtime/__init__.py": "",
            "spec_runtime/one.py": "import numpy\nfrom spec_runtime.two import x\n",
            "spec_runtime/two.py": "def f():\n    from spec_runtime import three\n",
            "spec_runtime/three.py": (
                "from typing import TYPE_CHECKING\n"
                "if TYPE_CHECKING:\n    import spec_runtime.one\n"
                "from .room import four\n"
            ),
            "spec_runtime/room/__init__.py": "",
            "spec_runtime/room/four.py": "from ..three import y\n",
            "spec_runtime/alone.py": "from spec_runtime import one\n",
        }
    )
    circle, of_rooms = found.circles
    path = circle.split(" -> ")
    assert path[0] == path[-1]
    assert "spec_runtime.three" in path
    assert all(name in found.imports[module] for module, name in pairwise(path))
    assert "spec_runtime.three" in of_rooms
    assert circle in structure.describe(found)
    assert found.outside["spec_runtime.one"] == {"numpy"}


def test_a_package_is_a_module_of_its_own(read: Read) -> None:
    """A package that imports its parts is no circle until a part imports the package's names."""
    files = {
        "spec_runtime/__init__.py": "from spec_runtime.engine import Engine\n",
        "spec_runtime/engine.py": "from spec_runtime import text\n",
        "spec_runtime/text.py": "import spec_runtime.kv\n",
        "spec_runtime/kv.py": "",
    }
    assert read(files).circles == []
    circle, _ = read(files | {"spec_runtime/kv.py": "from spec_runtime import Engine\n"}).circles
    assert len(set(circle.split(" -> "))) == 4


def test_rooms_go_in_a_circle_where_no_modules_do(read: Read) -> None:
    """The first room's file imports the second's; another file of the second imports the first."""
    files = {
        "spec_runtime/trees/tree.py": "",
        "spec_runtime/trees/grow.py": "from spec_runtime.text import x\n",
        "spec_runtime/text.py": "from spec_runtime.trees.tree import y\n\n",
    }
    found = read(files)
    (circle,) = found.circles
    assert set(circle.split(" -> ")) == {"spec_runtime.text", "spec_runtime.trees"}
    assert circle in structure.describe(found)
    assert found.num_lines == {"spec_runtime.text": 2, "spec_runtime.trees": 1}
    assert read(files | {"spec_runtime/trees/grow.py": ""}).circles == []


def test_what_the_runtime_may_not_import_is_named_and_who_may_print(read: Read) -> None:
    printing = "from spec_runtime.cli.terminal import Console\n"
    found = read(
        {
            "spec_runtime/one.py": "def f():\n    import torch.nn\n    import torchless\n",
            "spec_runtime/two.py": "from spec_export import target\n",
            "spec_runtime/cli/terminal.py": "",
            "spec_export/target.py": "import torch\nimport spec_runtime.one\n",
            "spec_export/training/run.py": printing,
            "spec_export/cli/report.py": printing,
        }
    )
    assert found.forbidden == [
        "spec_export.training.run imports spec_runtime.cli.terminal",
        "spec_runtime.one imports torch.nn",
        "spec_runtime.two imports spec_export.target",
    ]


def test_an_annex_is_imported_by_its_commands_only(read: Read) -> None:
    serving = "def f():\n    from spec_runtime.serve.app import make\n"
    importing = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from spec_export import imports\n"
    )
    found = read(
        {
            "spec_runtime/cli/serve.py": serving,
            "spec_runtime/cli/server.py": serving,
            "spec_runtime/engine.py": serving,
            "spec_runtime/serve/app.py": "",
            "spec_runtime/serve/page.py": serving,
            "spec_export/cli/export.py": importing,
            "spec_export/imports/__init__.py": "",
            "spec_export/model/files.py": importing,
        }
    )
    assert found.forbidden == [
        "spec_export.model.files imports spec_export.imports",
        "spec_runtime.cli.server imports spec_runtime.serve.app",
        "spec_runtime.engine imports spec_runtime.serve.app",
    ]


def test_rooms_are_shown_with_their_arrows(read: Read) -> None:
    found = read(
        {
            "spec_runtime/trees/tree.py": "x = 1\n",
            "spec_runtime/text.py": "\nfrom spec_runtime.trees.tree import x\n",
            "spec_export/model/files.py": "\n\nimport spec_runtime.trees.tree\n",
        }
    )
    assert found.arrows == 2
    assert structure.describe_rooms(found).splitlines() == [
        "3 rooms with 2 arrows",
        "     3 lines: spec_export.model",
        "       -> spec_runtime.trees",
        "     2 lines: spec_runtime.text",
        "       -> trees",
        "     1 lines: spec_runtime.trees",
        "       <- spec_export.model, text",
    ]


def test_functions_are_measured_from_their_def_to_their_end(read: Read) -> None:
    body = "".join(f"    x = {i}\n" for i in range(79))
    method = "class A:\n    @property\n    def g(self):\n        return 1\n"
    found = read({"spec_runtime/one.py": f"{method}def f():\n{body}    y = 1\n"})
    assert [str(each) for each in found.functions] == [
        "f, 81 lines, spec_runtime/one.py:5",
        "g, 2 lines, spec_runtime/one.py:3",
    ]
    assert found.long_functions == found.functions[:1]
    assert read({"spec_runtime/one.py": f"def f():\n{body}"}).long_functions == []
