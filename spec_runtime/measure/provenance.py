"""Records where figures come from: commit, date, machine, versions, command and prompts."""

from __future__ import annotations

import datetime
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_runtime.files.machine import cpu_model, default_threads, versions
from spec_runtime.files.writing import sha256
from spec_runtime.kernels.library import instructions
from spec_runtime.measure.prompts import BenchPrompt, read_prompts

if TYPE_CHECKING:
    from spec_runtime.bundle.manifest import Manifest

# Every file of figures has all of these. What was not recorded is None, and ``note`` says so.
KEYS = ("commit", "date", "cpu", "threads", "versions", "command", "prompts", "bundle", "note")
PACKAGES = ("specsplit", "numpy", "tokenizers", "onnxruntime", "onnxruntime-gpu")
# By the kind of source in a bundle's manifest, where weights are not what "fp32" suggests.
WEIGHTS = {
    "demo": "dequantised from a Q4_1 GGUF file, at every precision, fp32 included",
    "gguf": "dequantised from a GGUF file, at every precision, fp32 included",
}


def collect(
    *,
    threads: int | None = None,
    prompts_file: Path | None = None,
    prompts: Sequence[BenchPrompt] | None = None,
    manifest: Manifest | None = None,
    packages: Sequence[str] = (),
    note: str | None = None,
) -> dict[str, Any]:
    """Returns the provenance of figures that this process measured, with all of `KEYS`.

    ``threads`` is what the engine was given (None: its default). ``prompts`` are those used of
    ``prompts_file`` (None: all). ``packages`` are further distributions whose versions count, next
    to the runtime's. Folders are left out: of the prompts file and
    of arguments outside the working folder only the names are kept.
    """
    return {
        "commit": git_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "threads": threads or default_threads(),
        "versions": versions((*PACKAGES, *packages))
        | {"native operators": instructions() or "none"},
        "command": command(sys.argv),
        "prompts": _prompts(prompts_file, prompts),
        "bundle": None if manifest is None else _bundle(manifest),
        "note": note,
    }


def git_commit(root: Path | None = None) -> str | None:
    """Returns the commit of the checkout that holds this package, with "-dirty" appended where
    tracked files differ from it; None outside of a checkout.
    """
    root = root or Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            describe, cwd=root, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def command(argv: Sequence[str]) -> list[str]:
    """Returns a command line without the folders that say something about one machine only.

    Bytes that are not UTF-8 become question marks, because no JSON file can hold them.

    >>> command(["/opt/venv/bin/spec-runtime", "bench", "--prompts=/data/p.jsonl", "bundles/int8"])
    ['spec-runtime', 'bench', '--prompts=p.jsonl', 'bundles/int8']
    """
    whole = [argument.encode(errors="replace").decode() for argument in argv]
    return [Path(whole[0]).name, *(_without_folder(argument) for argument in whole[1:])]


def _without_folder(argument: str) -> str:
    option, equals, value = argument.rpartition("=")
    if value.startswith(("/", "~", "..")):
        value = Path(value).name
    return f"{option}{equals}{value}"


def _prompts(file: Path | None, prompts: Sequence[BenchPrompt] | None) -> dict[str, Any] | None:
    if file is None:
        return None
    prompts = read_prompts(file) if prompts is None else prompts
    return {"file": file.name, "sha256": sha256(file), "ids": [prompt.id for prompt in prompts]}


def _bundle(manifest: Manifest) -> dict[str, Any]:
    about = manifest.provenance
    return {
        "name": manifest.name,
        "precision": manifest.target.precision,
        "model": about.get("model"),
        "source": about.get("source"),
        "weights": WEIGHTS.get(about.get("source", "")),
        "commit": about.get("git_commit"),
        "date": about.get("date"),
    }
