"""Runs `spec-export` as a module, as `accelerate launch -m spec_export train` needs it."""

from spec_export.cli import main

main()
