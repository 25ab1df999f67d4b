"""Measures the peak memory of generating with a bundle, beside the files it reads.

    python -m tools.measure.measure_memory --bundle DIR --json OUT

Each measurement is a fresh process, which reports three sizes of its own (Linux only, from /proc):

- import: resident after importing the runtime, ONNX Runtime and the tokenizer, before anything is
  loaded. `import spec_runtime` by itself is lighter, since it leaves the engine for later.
- peak: the largest resident size until the answer is out, imports and mapped files included.
- untouched: how much of the mapped files is not resident at the end. A drafter's file may hold a
  copy of the embedding table, for example, of which only the rows of drafted tokens are ever read.

The peak is set against the bytes read: the sizes of the files that the engine opens (each graph,
its external data, the tokenizer) less what of them stayed untouched. The KV caches, which are
allocated whole at the start, are computed from the manifest: for the target 2 (keys and values) x
layers x key/value heads x (max_length + scratch) x head width x bytes of a value, and so for each
cache of the drafter's graph.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from spec_runtime.bundle import manifest as bundles
from spec_runtime.proposers import BUILT_IN
from tools.figures import command_line, manifest_of, markdown, parse, run, write

PROMPT = "Explain to a child why the sea has tides, and why some places have higher ones."
# Runs in a process of its own: bundle, drafter and number of tokens in, sizes in bytes out.
WORKER = """
import json, sys
import spec_runtime, spec_runtime.load, spec_runtime.backends.cpu.backend, tokenizers

def size(name):
    with open("/proc/self/status") as lines:
        found = next(line for line in lines if line.startswith(name))
    return int(found.split()[1]) * 1024

def untouched(folder):
    total, is_ours = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if "-" in line.split()[0]:  # a mapping's head ends with its file
                is_ours = folder in line
            elif is_ours and line.startswith(("Size:", "Rss:")):
                sign = 1 if line.startswith("Size:") else -1
                total += sign * int(line.split()[1]) * 1024
    return total

folder, drafter, max_new_tokens, prompt = sys.argv[1:]
imported = size("VmRSS")
engine = spec_runtime.load(folder, drafter, profile=False)
engine.generate(prompt, max_new_tokens=int(max_new_tokens), ignore_eos=True)
print(json.dumps({"import": imported, "peak": size("VmHWM"), "untouched": untouched(folder)}))
"""


def sizes_of(folder: Path, drafter: str, max_new_tokens: int) -> dict[str, int]:
    """Returns {import, peak, untouched} in bytes, of a fresh process that generates."""
    arguments = [str(folder.resolve()), drafter, str(max_new_tokens), PROMPT]
    out = subprocess.run(
        [sys.executable, "-c", WORKER, *arguments], check=True, capture_output=True, text=True
    )
    sizes: dict[str, int] = json.loads(out.stdout.splitlines()[-1])
    return sizes


def cache_bytes(graph: bundles.Graph, slots: int) -> int:
    """Returns what a graph's KV caches take with this many slots."""
    total = 0
    for spec in graph.inputs:
        if spec.name.startswith("kv."):
            shape = [slots if isinstance(size, str) else size for size in spec.shape]
            total += int(np.prod(shape)) * np.dtype(spec.dtype).itemsize
    return total


def opened_files(
    folder: Path, manifest: bundles.Manifest, graphs: list[bundles.Graph]
) -> set[Path]:
    """Returns the graphs' files with whatever external data lies beside them, and the tokenizer."""
    found = {folder / manifest.tokenizer.file}
    for graph in graphs:
        found |= {file for file in (folder / graph.file).parent.iterdir() if file.is_file()}
    return found


def measure(folder: Path, drafter: str, max_new_tokens: int) -> dict[str, Any]:
    """Returns the sizes of one drafter, in bytes, and the peak over the bytes read."""
    manifest = manifest_of(folder)
    graphs = [manifest.graphs["target"]]
    if drafter not in BUILT_IN:
        graphs += manifest.drafter(drafter).graphs.values()
    slots = manifest.target.max_length + manifest.target.scratch
    file_bytes = sum(file.stat().st_size for file in opened_files(folder, manifest, graphs))
    sizes = sizes_of(folder, drafter, max_new_tokens)
    read_bytes = file_bytes - sizes["untouched"]
    return {
        "drafter": drafter,
        "precision": manifest.target.precision,
        "import_bytes": sizes["import"],
        "peak_bytes": sizes["peak"],
        "file_bytes": file_bytes,
        "read_bytes": read_bytes,
        "cache_bytes": sum(cache_bytes(graph, slots) for graph in graphs),
        "peak_over_read": sizes["peak"] / read_bytes,
    }


def main(words: list[str] | None = None) -> None:
    parser = command_line(__doc__, "--bundle", "--max-new-tokens", "--json", max_new_tokens=64)
    parser.add_argument("--drafter", action="append", help="default: all, and those built in")
    args = parse(parser, words)
    folder = args.bundle or bundles.find()
    manifest = manifest_of(folder)
    names = args.drafter or [*(each.name for each in manifest.drafters), *BUILT_IN]
    rows = [measure(folder, name, args.max_new_tokens) for name in names]
    sizes = ("import_bytes", "peak_bytes", "file_bytes", "read_bytes", "cache_bytes")
    cells = [
        [
            row["drafter"],
            *(f"{row[key] / 2**20:.1f}" for key in sizes),
            f"{row['peak_over_read']:.3f}",
        ]
        for row in rows
    ]
    head = ["MiB", "import", "peak", "files opened", "read of them", "KV cache", "peak / read"]
    print(markdown(head, cells))
    figures = {"max_new_tokens": args.max_new_tokens, "drafters": rows}
    write(args.json, figures, manifest=manifest)


if __name__ == "__main__":
    run(main)
