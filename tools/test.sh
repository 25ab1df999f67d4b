#!/usr/bin/env bash
# Lint, type-check and test, from a bare clone with nothing but Python and pip.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/venv.sh
make_venv cpu,export,dev

.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/python -m pytest -m "not gpu" -rs "$@" < /dev/null
