"""Says how old measured figures are, in commits that changed the two packages since."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


SERVER = "spec_runtime/serving"  # only figures with these beginnings are about it
OF_SERVERS = ("faults", "fuzz", "many-clients", "soak")


def commits_since(commit: str, name: str) -> int | None:
    """Counts the commits since then that changed what the figures `name` are about.

    That is both packages, but the server only where they were measured through it. Returns None
    where Git does not know the commit.
    """
    paths = ["spec_runtime", "spec_export"]
    if not name.startswith(OF_SERVERS):
        paths.append(f":(exclude){SERVER}")
    command = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else None
