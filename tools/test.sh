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
# a process a core, each with one thread; a file's tests stay together, for the bundles they share
OMP_NUM_THREADS=1 .venv/bin/python -m pytest -m "not gpu" -rs -n auto --maxprocesses 4 \
  --dist loadfile "$@" < /dev/null
