#!/usr/bin/env python3
"""Peak memory of generating with a bundle, over weights plus KV cache.

usage: measure_memory.py [--bundle DIR] [--drafter NAME]... [--max-new-tokens 64] [--json OUT]

Each measurement is a fresh process: its VmHWM after generating, less that of one that only imports
spec_runtime. Weights are the graphs' files; KV is computed from the manifest: for the target
2 (keys, values) × layers × key/value heads × (max_length + scratch) × head width × 4 bytes, and so
for each cache of the drafter's graph. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from spec_runtime import bundle
from spec_runtime.proposers import BUILT_IN

PEAK = "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
PROMPT = "Explain to a child why the sea has tides, and why some places have higher ones."


def peak_bytes(code: str) -> int:
    """VmHWM of a fresh interpreter that has run `code`."""
    out = subprocess.run(
        [sys.executable, "-c", f"{code}\n{PEAK}"], check=True, capture_output=True, text=True
    )
    return int(out.stdout.split()[-2]) * 1024


def cache_bytes(graph: bundle.Graph, slots: int) -> int:
    total = 0
    for spec in graph.inputs:
        if spec.name.startswith("kv."):
            shape = [slots if isinstance(size, str) else size for size in spec.shape]
            total += int(np.prod(shape)) * np.dtype(spec.dtype).itemsize
    return total


def weight_bytes(folder: Path, graph: bundle.Graph) -> int:
    """The graph's external data and the graph file, which holds small weights."""
    return sum(file.stat().st_size for file in (folder / graph.file).parent.iterdir())


def measure(folder: Path, drafter: str, max_new_tokens: int, floor: int) -> dict[str, Any]:
    manifest = bundle.read(folder, verify=False).manifest
    graphs = [manifest.graphs["target"]]
    if drafter not in BUILT_IN:
        graphs += manifest.drafter(drafter).graphs.values()
    slots = manifest.target.max_length + manifest.target.scratch
    weights = sum(weight_bytes(folder, graph) for graph in graphs)
    caches = sum(cache_bytes(graph, slots) for graph in graphs)
    peak = peak_bytes(
        f"import spec_runtime; engine = spec_runtime.load({str(folder)!r}, {drafter!r}); "
        f"engine.generate({PROMPT!r}, max_new_tokens={max_new_tokens}, ignore_eos=True)"
    )
    return {
        "drafter": drafter,
        "precision": manifest.target.precision,
        "peak_bytes": peak,
        "import_bytes": floor,
        "weight_bytes": weights,
        "cache_bytes": caches,
        "ratio": (peak - floor) / (weights + caches),
    }


def main() -> int:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--drafter", action="append", help="default: the bundle's own and built in")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the result here too")
    args = parser.parse_args()
    try:
        folder = args.bundle or bundle.find()
        manifest = bundle.read(folder, verify=False).manifest
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    floor = peak_bytes("import spec_runtime")
    results = [
        measure(folder, drafter, args.max_new_tokens, floor)
        for drafter in args.drafter or [*(each.name for each in manifest.drafters), *BUILT_IN]
    ]
    for each in results:
        above, owed = each["peak_bytes"] - floor, each["weight_bytes"] + each["cache_bytes"]
        print(
            f"{each['drafter']:14} peak above import {above / 2**20:7.1f} MiB, weights + KV "
            f"{owed / 2**20:7.1f} MiB, ratio {each['ratio']:.3f} (bound 1.25)"
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
