"""Defines the spec-export command; each verb is a file in this folder."""

from collections.abc import Sequence

from spec_runtime.cli import run

VERBS = ("add", "build", "calibrate", "check", "distill", "export", "import", "recipe", "train")


def main(argv: Sequence[str] | None = None) -> None:
    """Train drafters and export them with their target as a bundle."""
    run("spec-export", __name__, VERBS, main.__doc__, argv)
