"""Has the library `speculators` 0.9.0 itself read what we export in its form."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from importing import borrowed_target

from spec_export.imports.drafters import exporter as export_drafter
from spec_export.imports.drafters import importer

# The library pins an older transformers than ours. Beside it stands what our environment may lack
# of what it imports; all come without their dependencies, torch among them.
PACKAGES = (
    *("speculators==0.9.0", "hs-connectors==0.9.0", "dflash==0.1.0", "transformers==5.19.0"),
    *("openai", "datasets", "loguru", "pydantic-settings", "multiprocess", "pandas", "pyarrow"),
    *("dill", "xxhash"),
)
FOLDER = Path(__file__).parent / "written_by_speculators"
NAMES = (
    *("plain", "trained", "qwen3", "peagle"),
    *("dflash", "dspark", "dflash-trained", "dspark-trained"),
)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment in which `speculators` can be imported."""
    folder = tmp_path_factory.mktemp("speculators")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
    done = subprocess.run(
        [*command, "--target", str(folder), *PACKAGES], capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        pytest.skip(f"speculators 0.9.0 cannot be installed: {last}")
    return folder


@pytest.mark.slow
def test_speculators_reads_what_we_export(library: Path, tmp_path: Path) -> None:
    """Its logits of what was imported and exported again are those of the file that it wrote
    itself, which are those of our module (test_import.py, test_written_blocks.py)."""
    llama = borrowed_target(tmp_path / "llama")
    pairs = []
    for name in NAMES:
        ours = importer.run(
            str(FOLDER / name), str(llama), tmp_path / f"{name}-ours", is_measured=False
        )
        export_drafter.run(str(ours), "speculators", str(llama), tmp_path / name)
        pairs += [str(tmp_path / name), name]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "read.py"), *pairs],
        env=os.environ | {"PYTHONPATH": str(library), "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    print(done.stdout)
    assert len(done.stdout.splitlines()) == len(NAMES)
