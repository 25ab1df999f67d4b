# Sourced by the other tools, in the repository root: make_venv EXTRAS makes or reuses .venv with
# the package and its EXTRAS ("cpu,export") in it. PYTHON names another interpreter than python3.

make_venv() {
  local extras=$1 python=${PYTHON:-python3} wanted stamp
  if ! .venv/bin/python -c "" 2>/dev/null; then
    if ! "$python" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null; then
      echo "error: $python is missing or older than 3.11; set PYTHON to a Python >= 3.11" >&2
      return 1
    fi
    "$python" -m venv --clear .venv
  fi
  # The folder counts too: an editable install points into it.
  wanted=$(.venv/bin/python - <<'PY'
import hashlib, os, pathlib

text = b"".join(pathlib.Path(name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
print(hashlib.sha256(text + os.getcwd().encode()).hexdigest())
PY
  )
  # Stamps are named by their extras; one that begins with those wanted will do.
  for stamp in .venv/specsplit-"$extras"*.stamp; do
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return 0; fi
  done
  echo "installing specsplit[$extras] into .venv (minutes, the first time)" >&2
  # What there is so far is compiled while pip installs the rest, and the remainder by all cores:
  # pip would compile by one, at the end
  local pip=(.venv/bin/python -m pip install -q --no-compile --disable-pip-version-check)
  "${pip[@]}" "torch==2.13.0" -c constraints.txt
  while kill -0 $$ 2>/dev/null; do compile_packages 1; done &
  "${pip[@]}" -c constraints.txt -e ".[$extras]"
  kill $! && wait $! 2>/dev/null || true
  compile_packages 0
  echo "$wanted" > ".venv/specsplit-$extras.stamp"
}

# Compiles what is installed in .venv, but tests of packages, with so many processes, 0 for one a
# core. A package may have files for another Python: nothing is said of them, as by pip.
compile_packages() { .venv/bin/python -m compileall -qq -x /tests/ -j "$1" .venv/lib || true; }
