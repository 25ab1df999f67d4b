"""Runs `spec-runtime` as a module: `python -m spec_runtime generate …`."""

from spec_runtime.cli import main

if __name__ == "__main__":
    main()
