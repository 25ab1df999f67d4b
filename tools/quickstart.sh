#!/usr/bin/env bash
# Build the demo bundle, generate with it, and measure what its drafter gains, from a bare clone with
# nothing but Python and pip.
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

echo "> $prompt"
.venv/bin/spec-runtime generate --bundle "$bundle" --max-new-tokens 128 -- "$prompt"
.venv/bin/python - "$bundle" <<'PY'
import statistics
import sys

import spec_runtime
from spec_export import reference
from spec_runtime.measure import bench
from spec_runtime.measure.prompts import BenchPrompt

prompts = [BenchPrompt(n, "all", text) for n, text in enumerate(reference.prompts()[:8])]
[report] = bench.run([spec_runtime.load(sys.argv[1])], prompts, max_new_tokens=128)
ways = [(pair.turns[0].plain.stats, pair.turns[0].speculative.stats) for pair in report.pairs]


def shown(values):
    return f"{statistics.median(values):6.2f} ({min(values):.2f} to {max(values):.2f})"


print(f"\nmedian and range of {len(ways)} prompts, each answered without and with the drafter in turns")
print("tokens/s without", shown([plain.tokens_per_second for plain, _ in ways]))
print("tokens/s with   ", shown([fast.tokens_per_second for _, fast in ways]))
print("speed-up        ", shown([b.tokens_per_second / a.tokens_per_second for a, b in ways]))
print("accepted length ", shown([fast.accepted_length for _, fast in ways]))
PY
cat <<EOT

The programs are in .venv/bin. To go on:
  .venv/bin/spec-runtime chat --bundle $bundle
  .venv/bin/pip install -e '.[serve]' && .venv/bin/spec-runtime serve --bundle $bundle
EOT
