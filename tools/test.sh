#!/usr/bin/env bash
# Lint, type-check, build the documentation, fuzz, disturb, soak and test, from a bare clone with nothing but Python and pip.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/venv.sh
extras=cpu,export,dev,docs,tensorboard,grammar,serve,hub,chat
# builds TensorRT plans without a GPU; 105 MB, and there are wheels for this platform only
if [ "$(uname -sm)" = "Linux x86_64" ]; then extras+=,tensorrt-rtx; fi
make_venv "$extras"
# what reads our exported drafters in one test, which is skipped where this cannot be installed
speculators=.venv/speculators
[ -d $speculators ] || .venv/bin/python -m pip install -q --no-deps --no-compile --target $speculators \
  -r tests/export/written_by_speculators/requirements.txt || rm -rf $speculators

# once, also where Python may write no bytecode: tests start hundreds of processes that need it
.venv/bin/python -m compileall -q spec_export spec_runtime tools
.venv/bin/python -c 'from spec_runtime.kernels.library import library; library()'
# types are checked beside the rest, and judged at the end
.venv/bin/mypy &
mypy=$!
.venv/bin/ruff format --check .
.venv/bin/ruff check .
NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
# in their short form: whoever runs chosen tests does not wait for them
endured=0
if [ $# -eq 0 ]; then OMP_NUM_THREADS=1 .venv/bin/python -m tools.ci.endure < /dev/null || endured=$?; fi
# a process a core, each with one thread; a file's tests stay together, for the bundles they share,
# and files in the order of tests/conftest.py
tests=0
OMP_NUM_THREADS=1 .venv/bin/python -m pytest -m "not gpu" -rsfE --tb=short --durations=15 -n auto --maxprocesses 4 \
  --dist loadfile --no-loadscope-reorder --max-seconds 5 "$@" < /dev/null || tests=$?
wait "$mypy" || { echo "mypy found the errors above the tests' results" >&2; exit 1; }
[ "$endured" -eq 0 ] || { echo "fuzz, faults or a soak failed above the tests' results" >&2; exit 1; }
exit "$tests"
