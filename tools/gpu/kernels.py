"""The part of tools/gpu/check.py that times kernels by themselves, on which predictions stand."""

from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np

from spec_runtime.backends.session import PROVIDERS, ort
from tools.gpu.job import Check, needed, torch_on
from tools.gpu.report import Findings
from tools.measure.step_costs import median_s

CHAIN = 1000  # kernels that depend on one another, captured as one graph
SCATTERS = 20  # ScatterND one after another, captured as one graph
SLOTS = 2048
ROWS = (1, 8, 16, 32, 64)


def kernels(check: Check, found: Findings) -> None:
    """Times a copy, a chain of kernels that do nothing, and ScatterND by row and by value."""
    pieces: dict[str, Callable[[Check], float]] = {
        "copy, GB/s": copy_speed,
        "a kernel of a chain, µs": chain_step,
    }
    for (heads, width), by, n in product(check.sizes.scattered, ("row", "value"), ROWS):
        what = f"ScatterND by {by}, {n} x {heads} x {width}, µs"
        pieces[what] = partial(scatter_step, by=by, n=n, heads=heads, width=width)
    for what, measure in pieces.items():
        value = found.attempt(what, measure, check)
        if value is not None:
            found.add({"what": what, "value": value})
    rows = found.tables.get("measured", [])
    found.figure = "; ".join(f"{row['what']}: {row['value']:.4g}" for row in rows[:2])


def copy_speed(check: Check) -> float:
    """Returns how many bytes a copy of 4 GB in device memory reads and writes, in GB/s."""
    torch = torch_on("cuda")
    source = torch.zeros(4 << 30, dtype=torch.uint8, device="cuda")
    there = torch.empty_like(source)

    def copy() -> None:
        there.copy_(source)
        torch.cuda.synchronize()

    return 2 * source.nbytes / 1e9 / median_s(copy, check.sizes.repeats)


def chain_step(check: Check) -> float:
    """Returns the microseconds of one of CHAIN captured kernels that add 1 to one number."""
    torch = torch_on("cuda")
    x, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    x.add_(1)
    with torch.cuda.graph(graph):
        for _ in range(CHAIN):
            x.add_(1)

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return 1e6 * median_s(replay, check.sizes.repeats) / CHAIN


def scatter_step(check: Check, by: str, n: int, heads: int, width: int) -> float:
    """Returns the microseconds of one of SCATTERS captured ScatterND that write n rows."""
    parser = needed("onnx.parser")
    axes = (heads, n, width) if by == "value" else (heads, n)
    index = np.stack([np.zeros(axes, int), *np.indices(axes)], -1)[None]
    nodes = [f"x{i + 1} = ScatterND(x{i}, index, rows)" for i in range(SCATTERS)]
    shape, size = f"float16[1,{heads},{SLOTS},{width}]", str(index.shape)[1:-1]
    inputs = f"{shape} x0, int64[{size}] index, float16[1,{heads},{n},{width}] rows"
    head = f'<ir_version: 8, opset_import: ["": 18]> g ({inputs}) => ({shape} x{SCATTERS})'
    settings = [{"enable_cuda_graph": "1"}] if check.device == "cuda" else None
    model = parser.parse_model(f"{head} {{{' '.join(nodes)}}}").SerializeToString()
    session = ort.InferenceSession(model, None, [PROVIDERS[check.device]], settings)
    binding = session.io_binding()
    feeds = {
        "x0": np.zeros((1, heads, SLOTS, width), np.float16),
        "index": index,
        "rows": np.ones((1, heads, n, width), np.float16),
    }
    for name, array in feeds.items():
        on_device = ort.OrtValue.ortvalue_from_numpy(array, check.device, 0)
        binding.bind_ortvalue_input(name, on_device)
    out = ort.OrtValue.ortvalue_from_shape_and_type(feeds["x0"].shape, np.float16, check.device, 0)
    binding.bind_ortvalue_output(f"x{SCATTERS}", out)
    step_s = median_s(lambda: session.run_with_iobinding(binding), check.sizes.repeats)
    return 1e6 * step_s / SCATTERS
