"""Says how old measured figures are, in commits that changed the two packages since."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def commits_since(commit: str) -> int | None:
    """Counts the commits since then that changed a package; None where Git does not know it."""
    command = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", "spec_runtime", "spec_export"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else None
