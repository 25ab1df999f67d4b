#!/usr/bin/env bash
# Build the demo bundle and generate with it, from a bare clone with nothing but Python and pip.
# usage: bash tools/quickstart.sh [PROMPT]
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/venv.sh
make_venv cpu,export

bundle=bundles/smollm2-135m-instruct
prompt=${1:-"Explain to a child why the sea has tides."}
if [ ! -f "$bundle/manifest.json" ]; then
  .venv/bin/spec-export build --drafter parallelspec --out "$bundle"
fi

generate() {
  .venv/bin/spec-runtime generate --bundle "$bundle" --max-new-tokens 128 "$@" -- "$prompt"
}
echo "> $prompt"
generate
speculative=$(generate --json)
plain=$(generate --drafter none --json)

.venv/bin/python - "$plain" "$speculative" <<'PY'
import json, sys

plain, speculative = map(json.loads, sys.argv[1:])
fast, slow = speculative["tokens_per_second"], plain["tokens_per_second"]
print()
print(f"without a drafter  {slow:6.1f} tokens/s")
print(f"with the drafter   {fast:6.1f} tokens/s ({fast / slow:.2f} times as fast)")
print(f"accepted length    {speculative['accepted_length']:6.2f} tokens per target pass")
PY
