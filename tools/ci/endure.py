"""Runs fuzz, faults and a soak in their short form, as tools/test.sh does: two at a time.

    python -m tools.ci.endure

Takes about a minute of two cores. What each prints comes when it has ended. Exit code 1 if any
failed; the tests of pytest show that they do where there is a fault.
"""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The seed is fixed: a change of the code, not chance, makes these fail.
FAULTS = ["faults", "--short"]
FUZZ = ["fuzz", "--cases", "1000", "--seed", "15", "--workers", "1", "--both-ways"]
SOAK = ["soak", "--minutes", "0.5", "--toy"]


def endure(words: list[str]) -> int:
    """Runs a tool, prints what it said, and returns its exit code."""
    begun = time.monotonic()
    command = [sys.executable, "-m", f"tools.ci.{words[0]}", *words[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = done.stdout if done.returncode == 0 else done.stdout + done.stderr
    seconds = time.monotonic() - begun
    print(f"---- {words[0]}: exit code {done.returncode}, {seconds:.0f} s\n{said}", flush=True)
    return done.returncode


def main() -> int:
    with ThreadPoolExecutor(2) as pool:
        return int(any([*pool.map(endure, (FAULTS, FUZZ, SOAK))]))


if __name__ == "__main__":
    sys.exit(main())
