"""Counts the tests by kind, parameters included, and writes the counts for docs/reliability.md.

python -m tools.ci.count_tests --json recipes/smollm2-135m/results/tests.json
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tools.figures import command_line, run, write

ROOT = Path(__file__).parents[2]
# The first beginning that fits a test's file says its kind.
KINDS = {
    "tests/runtime/": "runtime",
    "tests/export/": "training and export",
    "tests/fuzz/": "fuzzing",
    "tests/faults/": "faults and soak",
    "tests/scripts/test_soak.py": "faults and soak",
    "tests/scripts/": "scripts of tools",
    "tests/": "whole project",
}
MARKERS = ("slow", "gpu", "model")


def collect(marker: str) -> list[str]:
    """Returns the ids of the tests that a marker expression selects; "" selects all."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", marker]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 5):  # 5: there are none
        raise RuntimeError(done.stdout[-2000:] + done.stderr)
    return [line for line in done.stdout.splitlines() if line.startswith("tests/")]


def main(words: list[str] | None = None) -> None:
    args = command_line(__doc__, "--json").parse_args(words)
    ids = collect("")
    kinds = Counter(next(k for start, k in KINDS.items() if i.startswith(start)) for i in ids)
    figures = {
        "tests": len(ids),
        "kinds": {kind: kinds[kind] for kind in dict.fromkeys(KINDS.values()) if kinds[kind]},
        "markers": {marker: len(collect(marker)) for marker in MARKERS},
    }
    print(json.dumps(figures, indent=2))
    write(args.json, figures, note="not recorded: prompts, bundle")


if __name__ == "__main__":
    run(main)
