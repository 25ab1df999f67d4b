"""Says how old measured figures are, in commits that changed the two packages since."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


# Only figures with these beginnings are about the server, which lay in the second folder before.
SERVER = ("spec_runtime/serve", "spec_runtime/serving")
OF_SERVERS = ("faults", "fuzz", "many-clients", "soak")


def commits_since(commit: str, name: str) -> int | None:
    """Counts the commits since then that changed what the figures `name` are about.

    That is both packages, but the server only where they were measured through it. A branch that
    was merged counts once, into however many commits its author has parted it. Returns None
    where the commit is not in the history: an object that an amended commit left behind is known
    to one checkout and to no clone of it.
    """
    ancestor = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
    if subprocess.run(ancestor, cwd=ROOT, capture_output=True, check=False).returncode:
        return None
    paths = ["spec_runtime", "spec_export"]
    if not name.startswith(OF_SERVERS):
        paths += [f":(exclude){folder}" for folder in SERVER]
    command = ["git", "rev-list", "--first-parent", "--count", f"{commit}..HEAD", "--", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return int(done.stdout)
