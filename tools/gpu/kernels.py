"""The part of tools/gpu/check.py that times kernels by themselves, on which predictions stand."""

import statistics
import time
from collections.abc import Callable

import numpy as np

from spec_runtime.backends.session import PROVIDERS, ort
from tools.gpu.job import Check, needed
from tools.gpu.report import Findings, LeftOut

CHAIN = 1000  # kernels that depend on one another, captured as one graph
SCATTERS = 20  # ScatterND one after another, captured as one graph
SLOTS = 2048
ROWS = (1, 8, 16, 32, 64)


def kernels(check: Check, found: Findings) -> None:
    """Times a copy, a chain of kernels that do nothing, and ScatterND by row and by value."""
    for what, measure in {"copy, GB/s": copy_speed, "a kernel of a chain, µs": chain_step}.items():
        value = found.attempt(what, measure, check)
        if value is not None:
            found.add({"what": what, "value": value})
    for heads, width in check.sizes.scattered:
        for by in ("row", "value"):
            for n in ROWS:
                what = f"ScatterND by {by}, {n} x {heads} x {width}, µs"
                value = found.attempt(what, scatter_step, check, by, n, heads, width)
                if value is not None:
                    found.add({"what": what, "value": value})
    rows = found.tables.get("measured", [])
    found.figure = "; ".join(f"{row['what']}: {row['value']:.4g}" for row in rows[:2])


def _torch_cuda(check: Check) -> object:
    torch = needed("torch")
    if check.device == "cpu" or not torch.cuda.is_available():
        raise LeftOut("torch has no GPU here")
    return torch


def copy_speed(check: Check) -> float:
    """Returns how many bytes a copy of 4 GB in device memory reads and writes, in GB/s."""
    torch = _torch_cuda(check)
    source = torch.zeros(4 << 30, dtype=torch.uint8, device="cuda")
    there = torch.empty_like(source)

    def copy() -> None:
        there.copy_(source)
        torch.cuda.synchronize()

    return 2 * source.nbytes / 1e9 / median_s(copy, check.sizes.repeats)


def chain_step(check: Check) -> float:
    """Returns the microseconds of one of CHAIN captured kernels that add 1 to one number."""
    torch = _torch_cuda(check)
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
    index = np.stack(np.indices(axes), -1)[None]
    index = np.concatenate([np.zeros_like(index[..., :1]), index], -1)
    nodes = [f"x{i + 1} = ScatterND(x{i}, index, rows)" for i in range(SCATTERS)]
    shape = f"float16[1,{heads},{SLOTS},{width}]"
    size = str(index.shape)[1:-1]
    rows = f"float16[1,{heads},{n},{width}]"
    text = (
        f'<ir_version: 8, opset_import: ["": 18]> g ({shape} x0, int64[{size}] index, {rows} rows)'
        f" => ({shape} x{SCATTERS}) {{{' '.join(nodes)}}}"
    )
    options, provider = ort.SessionOptions(), PROVIDERS[check.device]
    settings = [{"enable_cuda_graph": "1"}] if check.device == "cuda" else None
    model = parser.parse_model(text).SerializeToString()
    session = ort.InferenceSession(model, options, [provider], settings)
    binding = session.io_binding()
    feeds = {
        "x0": np.zeros((1, heads, SLOTS, width), np.float16),
        "index": index,
        "rows": np.ones((1, heads, n, width), np.float16),
    }
    for name, array in feeds.items():
        value = ort.OrtValue.ortvalue_from_numpy(array, check.device, 0)
        binding.bind_ortvalue_input(name, value)
    out = ort.OrtValue.ortvalue_from_shape_and_type(feeds["x0"].shape, np.float16, check.device, 0)
    binding.bind_ortvalue_output(f"x{SCATTERS}", out)
    step_s = median_s(lambda: session.run_with_iobinding(binding), check.sizes.repeats)
    return 1e6 * step_s / SCATTERS


def median_s(run: Callable[[], None], repeats: int) -> float:
    """Returns the median time of a run in seconds; three runs warm up and capture."""
    seconds = []
    for _ in range(3 + repeats):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[3:])
