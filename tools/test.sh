#!/usr/bin/env bash
# Lint, type-check and test, from a bare clone with nothing but Python and pip.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/venv.sh
extras=cpu,export,dev
# builds TensorRT plans without a GPU; 105 MB, and there are wheels for this platform alone
if [ "$(uname -sm)" = "Linux x86_64" ]; then extras+=,tensorrt-rtx; fi
make_venv "$extras"

.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/python -m pytest -m "not gpu" -rs "$@" < /dev/null
