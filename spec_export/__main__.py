"""`python -m spec_export` is `spec-export`; `accelerate launch -m spec_export train` needs it."""

from spec_export.cli import main

main()
