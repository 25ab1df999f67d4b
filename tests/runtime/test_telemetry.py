"""Nothing of ours makes ONNX Runtime send telemetry or keep it under the user's cache folder."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

onnx = pytest.importorskip("onnx")
from onnx_text import model_of  # noqa: E402

ROOT = Path(__file__).parents[2]
RUN = """
import sys
from pathlib import Path
import numpy as np
import spec_runtime
from spec_runtime.backends.cpu.backend import CpuBackend
from spec_runtime.bundle.manifest import Graph, TensorSpec
x, y = (TensorSpec(name, "float32", ("M",)) for name in "xy")
backend = CpuBackend(Path(sys.argv[1]), Graph("g.onnx", "stateless", (x,), (y,)), 1, threads=1)
print(backend.run({"x": np.array([1, 2], np.float32)}, ["y"])["y"])
"""
# In place of onnxruntime: says what it would have read.
STUB = "import os; print(os.environ.get('ORT_DISABLE_TELEMETRY'))"
# Imports it three times, where the user has set nothing, "0" and "".
IMPORT = """
import os, sys
for given in (None, "0", ""):
    os.environ.pop("ORT_DISABLE_TELEMETRY", None)
    if given is not None:
        os.environ["ORT_DISABLE_TELEMETRY"] = given
    for name in ("onnxruntime", "spec_runtime.backends.session"):
        sys.modules.pop(name, None)
    import spec_runtime.backends.session
"""


def run(code: str, *arguments: Path, home: Path, path: Path = ROOT, **variables: str) -> str:
    """What a process prints that has this home, and finds modules in `path` first."""
    environment = {
        **{"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "TMPDIR": str(home)},
        **{"PATH": os.environ["PATH"], "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"},
        **{"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_a_run_leaves_no_file_in_an_empty_home(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    onnx.save(model_of("g (float[M] x) => (float[M] y) { y = Neg(x) }"), tmp_path / "g.onnx")
    assert run(RUN, tmp_path / "g.onnx", home=home) == "[-1. -2.]"
    assert list(home.rglob("*")) == []


def test_the_variable_is_set_before_the_import_unless_the_user_has_set_it(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text(STUB)
    assert run(IMPORT + "print('end')", home=tmp_path, path=tmp_path) == "1\n0\n\nend"


@pytest.mark.parametrize(
    "package", ["spec_runtime.hub.push", "spec_runtime.hub.pull", "spec_export"]
)
def test_the_hubs_client_sends_nothing_about_its_use(tmp_path: Path, package: str) -> None:
    pytest.importorskip("huggingface_hub", reason="needs the extra `hub`")
    code = (
        f"import {package}, huggingface_hub.constants as read; print(read.HF_HUB_DISABLE_TELEMETRY)"
    )
    assert run(code, home=tmp_path) == "True"
    if package.endswith("push"):
        assert run(code, home=tmp_path, HF_HUB_DISABLE_TELEMETRY="0") == "False"


def imports_onnxruntime(file: Path) -> bool:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        if any(name.partition(".")[0] == "onnxruntime" for name in names):
            return True
    return False


def test_all_our_imports_go_through_one_file() -> None:
    """Other engines' workers run without this package; they are started with the variable set."""
    files = [
        file.relative_to(ROOT).as_posix()
        for folder in ("spec_runtime", "spec_export", "tools")
        for file in sorted((ROOT / folder).rglob("*.py"))
        if imports_onnxruntime(file)
    ]
    workers = "tools/measure/rivals/workers/"
    ours = [file for file in files if not file.startswith(workers)]
    assert ours == ["spec_runtime/backends/session.py"]
    started = (ROOT / workers).parent / "worker.py"
    assert 'setdefault("ORT_DISABLE_TELEMETRY", "1")' in started.read_text(encoding="utf-8")
