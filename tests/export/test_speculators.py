"""Has the library `speculators` 0.9.0 itself read what we export in its form."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from importing import borrowed_target

from spec_export.imports.drafters import exporter as export_drafter
from spec_export.imports.drafters import importer

FOLDER = Path(__file__).parent / "written_by_speculators"
LIBRARY = Path(__file__).parents[2] / ".venv" / "speculators"  # where tools/test.sh installs it
NAMES = (
    *("plain", "trained", "qwen3", "peagle"),
    *("dflash", "dspark", "dflash-trained", "dspark-trained"),
)


@pytest.mark.slow
@pytest.mark.skipif(
    not LIBRARY.is_dir(),
    reason=f"speculators 0.9.0 is not in {LIBRARY}: pip install --no-deps --target that "
    f"-r {FOLDER / 'requirements.txt'}",
)
def test_speculators_reads_what_we_export(tmp_path: Path) -> None:
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
        env=os.environ | {"PYTHONPATH": str(LIBRARY), "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    print(done.stdout)
    assert len(done.stdout.splitlines()) == len(NAMES)
