"""Builds TensorRT-RTX plans of a few layers of large targets, and says what all layers would take.

    python -m tools.gpu.plans [--model NAME]... [--layers 1,2] [--context 2048] [--json OUT]

The targets have the shapes of known models, random float16 weights, each layer and the LM head its
own. Tracing and building are two processes; of the building one, the seconds and the largest
resident size are shown (Linux only, from /proc). The whole model's figures are not measured: the
difference between the first two numbers of layers is taken for every layer. No GPU is needed, and
nothing is executed.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from spec_runtime.bundle import manifest as bundles
from spec_runtime.files.mapping import from_mapping, parse_json, to_json
from tools.figures import command_line, write
from tools.gpu.graphs import Shape, random_backbone

T = TypeVar("T")
PACKAGE = "tensorrt-rtx-cu13-libs"
COMPUTE_CAPABILITY, NUM_NODES, NUM_LAYERS = "8.9", 24, 32
# vocabulary, hidden, MLP, layers, heads, key/value heads, head dimension
SHAPES = {
    "Llama-2-7B": Shape("Llama-2-7B", 32_000, 4096, 11_008, 1, 32, 32, 128, 1),
    "Llama-3-8B": Shape("Llama-3-8B", 128_256, 4096, 14_336, 1, 32, 8, 128, 1),
}


def trace(shape: Shape, context: int, folder: Path) -> None:
    """Writes the target's graph for TensorRT, and what the manifest would say of it."""
    from spec_export.build.writer import save_graph
    from spec_export.graphs.banks import add_argmax
    from spec_export.graphs.tensorrt import adapt
    from spec_export.graphs.trace import export_backbone
    from spec_export.model.decoder import VocabularyTable

    backbone = random_backbone(dataclasses.replace(shape, num_layers=1), context, "fp16")
    for num_rows in range(1, shape.num_layers):
        layer = copy.deepcopy(backbone.layers[0])
        for weight in layer.parameters():  # another tensor with other numbers: none is stored once
            weight.data = weight.data.roll(num_rows, 0)
        backbone.layers.append(layer)
    backbone.config = dataclasses.replace(backbone.config, num_layers=shape.num_layers)
    backbone.head = VocabularyTable(backbone.embedding.weight.data.roll(1, 0))
    traced = add_argmax(export_backbone(backbone, capacity_symbolic=False))
    graph = save_graph(adapt(traced, "fp16"), "contiguous", folder, "target.onnx")
    (folder / "graph.json").write_text(json.dumps(to_json(graph)))


def build(folder: Path) -> dict[str, Any]:
    """Builds the plan of what `trace` wrote; returns its size and what building it took."""
    from spec_export.graphs.tensorrt import build_plan, profiles_for
    from spec_runtime.backends.tensorrt.api import import_tensorrt

    graph = from_mapping(bundles.Graph, parse_json((folder / "graph.json").read_bytes()), "graph")
    trt = import_tensorrt(["tensorrt_rtx"])
    begin = time.process_time()
    profiles = profiles_for(graph, NUM_NODES, 128)
    plan = build_plan(trt, folder / "target.onnx", graph, profiles, COMPUTE_CAPABILITY)
    (folder / "target.plan").write_bytes(plan)
    return {
        "plan_mb": len(plan) / 1e6,
        "weights_mb": (folder / "target.bin").stat().st_size / 1e6,
        "cpu_seconds": time.process_time() - begin,
        "peak_mb": _largest_resident(),
    }


def whole(rows: list[dict[str, Any]], num_layers: int) -> dict[str, float]:
    """Returns the figures of so many layers, if every further layer takes what the last ones took.

    Example: 1.5 GB for one layer and 1.9 GB for two are 13.9 GB for 32.
    """
    first, last = rows[0], rows[-1]
    found = {}
    for name in ("weights_mb", "plan_mb", "cpu_seconds", "peak_mb"):
        a_layer = (last[name] - first[name]) / (last["layers"] - first["layers"])
        found[name] = last[name] + (num_layers - last["layers"]) * a_layer
    return found


def measure(shape: Shape, layers: list[int], context: int) -> list[dict[str, Any]]:
    """Returns a row of figures for each number of layers, each from processes of its own."""
    rows = []
    for num_layers in layers:
        with tempfile.TemporaryDirectory() as folder:
            some = dataclasses.replace(shape, num_layers=num_layers)
            _in_process(trace, some, context, Path(folder))
            rows.append({"layers": num_layers} | _in_process(build, Path(folder)))
        print(f"{shape.name}: {rows[-1]}", file=sys.stderr)
    return rows


def _in_process(work: Callable[..., T], *arguments: Any) -> T:
    """Returns what a function returns in a new process, whose memory is its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def _largest_resident() -> float:
    """Returns the largest resident size of this process so far, in MB."""
    with open("/proc/self/status") as lines:
        found = next(line for line in lines if line.startswith("VmHWM"))
    return int(found.split()[1]) * 1024 / 1e6


def main() -> None:
    parser = command_line(__doc__, "--json")
    parser.add_argument("--model", action="append", choices=SHAPES)
    parser.add_argument("--layers", default="1,2", help="two or more numbers, rising")
    parser.add_argument("--context", type=int, default=2048)
    arguments = parser.parse_args()
    layers = [int(part) for part in arguments.layers.split(",")]
    if len(layers) < 2:
        parser.error(f"got --layers {arguments.layers}, expected two numbers or more, as 1,2")
    models = {}
    for name in arguments.model or SHAPES:
        rows = measure(SHAPES[name], layers, arguments.context)
        models[name] = {"built": rows, "all_layers": whole(rows, NUM_LAYERS)}
    found = write(arguments.json, {"models": models}, packages=(PACKAGE,))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
