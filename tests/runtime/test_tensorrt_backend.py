"""Tests the TensorRT backend: its decisions, the order of its calls, its one-line refusals.

The calls run against tests/fake_tensorrt.py, which computes with ONNX Runtime and raises where the
real ones would refuse; tests that execute a plan need a GPU.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_tensorrt as fake
import numpy as np
import pytest
from workshop import Workshop

import spec_runtime
from spec_runtime import bundle as bundles
from spec_runtime import cli
from spec_runtime.backends import BACKENDS, Runtime, open_graph, tensorrt_api
from spec_runtime.backends import tensorrt as backend
from spec_runtime.backends.cuda_api import Cuda
from spec_runtime.backends.shapes import LeastRecentlyUsed, axis_sizes, num_bytes
from spec_runtime.backends.tensorrt import TensorRTBackend
from spec_runtime.backends.tensorrt_api import TensorRT
from spec_runtime.bundle import BundleError, Graph, Plan, TensorSpec
from spec_runtime.kv import open_cache
from spec_runtime.mapping import from_mapping, to_json

DRAFTERS = ("parallelspec", "hydra")  # a cache; a cache in one graph and none in the other
PROMPTS = ("say abc, 3", "one two. one two. one")
PROFILES: tuple[dict[str, tuple[int, ...]], ...] = (
    {"N": (1, 1, 1), "A": (1, 1, 1)},
    {"N": (1, 8, 8), "A": (1, 2, 8)},
    {"N": (1, 64, 64), "A": (1, 1, 4)},
)


def plan(**changes: Any) -> Plan:
    fields: dict[str, Any] = {"file": "engines/x.plan", "flavour": "tensorrt_rtx"}
    fields |= {"version": "1.7.1.116", "compute_capability": "8.9", "key": "0" * 64}
    return Plan(**fields | {"profiles": PROFILES} | changes)


# ---- decisions ----


def test_the_first_profile_that_holds_all_sizes_is_taken() -> None:
    def chosen(n: int, a: int) -> int:
        return backend.choose_profile(PROFILES, {"N": n, "A": a})

    assert [chosen(1, 1), chosen(1, 2), chosen(8, 8), chosen(9, 1), chosen(64, 4)] == [
        0,
        1,
        1,
        2,
        2,
    ]
    for n, a in ((65, 1), (9, 5), (64, 8)):
        with pytest.raises(ValueError, match=r"built for .*'1 to 64'") as error:
            chosen(n, a)
        assert f"got rows {{'N': {n}, 'A': {a}}}" in str(error.value)


def test_free_axes_get_their_sizes_from_the_feeds() -> None:
    ids, mask = TensorSpec("ids", "int64", (1, "N")), TensorSpec("mask", "bool", ("N", 9))
    cache = TensorSpec("kv.0.k", "float16", (1, 2, 9, 4))
    graph = Graph("g.onnx", "contiguous", (ids, mask, cache), ())
    assert axis_sizes(graph, {"ids": (1, 5), "mask": (5, 9)}) == {"N": 5}
    for shapes in (
        {"ids": (1, 5), "mask": (4, 9)},
        {"ids": (1, 5), "mask": (5, 8)},
        {"ids": (5,), "mask": (5, 9)},
    ):
        with pytest.raises(ValueError, match=r"got (ids|mask) of shape"):
            axis_sizes(graph, shapes)


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("float32", ("N", 3), 64 * 3 * 4),
        ("bfloat16", (1, "A", 5), 8 * 5 * 2),
        ("bool", ("N", "A"), 64 * 8),
        ("int64", (7,), 56),
    ],
)
def test_a_buffer_holds_the_largest_shape_of_any_profile(
    dtype: str, shape: tuple[int | str, ...], expected: int
) -> None:
    assert num_bytes(TensorSpec("x", dtype, shape), PROFILES) == expected


def test_a_plan_must_be_of_this_flavour_version_and_gpu() -> None:
    plans = [plan(compute_capability=c) for c in ("8.0", "8.9")]
    assert backend.choose_plan(plans, "tensorrt_rtx", "1.7.1.116", "8.9") is plans[1]
    for flavour, version, capability in (
        ("tensorrt_rtx", "1.7.1.116", "9.0"),
        ("tensorrt_rtx", "1.8.0.1", "8.9"),
        ("tensorrt", "1.7.1.116", "8.9"),
    ):
        with pytest.raises(ValueError, match="no plan fits") as error:
            backend.choose_plan(plans, flavour, version, capability)
        assert f"got {flavour} {version} and a GPU of compute capability {capability}" in str(
            error.value
        )
        assert "the bundle has tensorrt_rtx 1.7.1.116 for 8.0, tensorrt_rtx" in str(error.value)
        assert f"--compute-capability {capability}" in str(error.value)


def test_recent_values_are_kept_and_the_others_closed() -> None:
    closed: list[str] = []
    recent: LeastRecentlyUsed[str] = LeastRecentlyUsed(2, closed.append)
    for key, expected in (
        ("a", []),
        ("b", []),
        ("a", []),
        ("c", ["B"]),
        ("a", ["B"]),
        ("b", ["B", "C"]),
    ):
        assert recent.get(key, key.upper) == key.upper()
        assert closed == expected, key
    recent.clear()
    assert sorted(closed) == ["A", "B", "B", "C"]


# ---- the manifest ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flavour": "tensorrt_lean"}, "got flavour 'tensorrt_lean', expected one of tensorrt,"),
        ({"version": "new"}, "got version 'new', expected numbers"),
        ({"compute_capability": "sm89"}, "got compute_capability 'sm89', expected one as 8.9"),
        ({"key": "xyz"}, "got key 'xyz', expected a sha256"),
        ({"profiles": ()}, r"got profiles \(\), expected at least one"),
        ({"profiles": ({"N": (1, 2)},)}, r"got profile sizes \[1, 2\], expected three, rising"),
        ({"profiles": ({"N": (1, 9, 8)},)}, r"got profile sizes \[1, 9, 8\], expected three"),
        ({"profiles": ({"N": (0, 1, 8)},)}, r"got profile sizes \[0, 1, 8\]"),
    ],
)
def test_a_plan_in_a_manifest_is_validated(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        plan(**changes)


def test_a_graphs_plans_have_its_axes_and_a_form_tensorrt_runs() -> None:
    inputs = (TensorSpec("x", "int64", ("N", "A")),)
    assert Graph("g.onnx", "contiguous", inputs, (), (plan(),)).free_axes == ("N", "A")
    with pytest.raises(BundleError, match="got plans with the slots form"):
        Graph("g.onnx", "slots", inputs, (), (plan(),))
    wrong = plan(profiles=({"N": (1, 1, 1)},))
    with pytest.raises(BundleError, match="got a profile of N, expected N, A"):
        Graph("g.onnx", "contiguous", inputs, (), (wrong,))


def test_manifests_without_plans_are_as_before() -> None:
    graph = Graph("g.onnx", "slots", (), ())
    data = to_json(graph)
    assert sorted(data) == ["file", "form", "inputs", "outputs"]
    assert from_mapping(Graph, data, "graph") == graph
    inputs = (TensorSpec("x", "int64", ("N", "A")),)
    graph = Graph("g.onnx", "contiguous", inputs, (), (plan(),))
    assert from_mapping(Graph, json.loads(json.dumps(to_json(graph))), "graph") == graph


# ---- running, over the fakes ----


@pytest.fixture(scope="module")
def folder(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds a float32 bundle for TensorRT, whose plans are a few bytes."""
    from spec_export import make_bundle
    from spec_export.graphs import tensorrt as tensorrt_build
    from spec_export.make_bundle import BuildOptions

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorrt_build, "import_tensorrt", fake.tensorrt)
        patch.setattr(tensorrt_build, "build_plan", lambda *_: b"a plan")
        return make_bundle.build(
            BuildOptions(
                str(workshop.llama()),
                drafter_checkpoints=[workshop.drafter(name) for name in DRAFTERS],
                out=tmp_path_factory.mktemp("tensorrt") / "bundle",
                backend="tensorrt",
                compute_capabilities=[fake.CAPABILITY],
            )
        )


@pytest.fixture
def runtime(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake.Runtime]:
    """Puts a fake of CUDA's runtime under every backend that is opened, and returns it."""
    cuda, runtime = fake.cuda()
    manifest = bundles.read(folder).manifest
    graphs = [*manifest.graphs.values()]
    graphs += [graph for info in manifest.drafters for graph in info.graphs.values()]
    by_file = {graph.plans[0].file: graph for graph in graphs}

    def deserialise(trt: TensorRT, path: Path) -> fake.Engine:
        assert path.read_bytes() == b"a plan"
        graph = by_file[path.relative_to(folder).as_posix()]
        return fake.Engine(folder / graph.file, graph, graph.plans[0], runtime)

    monkeypatch.setattr(backend, "import_tensorrt", lambda flavours: fake.tensorrt())
    monkeypatch.setattr(backend, "open_cuda", lambda: cuda)
    monkeypatch.setattr(backend, "_deserialise", deserialise)
    yield runtime
    gc.collect()
    assert not runtime.device, "device memory is left"
    assert not runtime.host, "pinned memory is left"
    assert not runtime.executables, "CUDA graphs are left"


def open_target(folder: Path) -> tuple[TensorRTBackend, Graph, fake.Engine]:
    opened = bundles.read(folder)
    graph = opened.manifest.graphs["target"]
    capacity = opened.manifest.target.max_length + 128
    made = open_graph(opened, graph, capacity, Runtime("tensorrt"))
    assert isinstance(made, TensorRTBackend)
    return made, graph, made._engine


def step(cache: Any, tokens: list[int], parents: list[int]) -> dict[str, np.ndarray]:
    feeds = cache.place(np.array(parents, np.int64))
    feeds["input_ids"] = np.array(tokens, np.int64)[None]
    feeds["logit_rows"] = np.arange(len(tokens), dtype=np.int64)
    return feeds


@pytest.mark.parametrize("name", [*DRAFTERS, "none"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_it_generates_what_onnx_runtime_generates(
    folder: Path, runtime: fake.Runtime, name: str, cuda_graphs: bool
) -> None:
    """Both run the same graphs, so tokens, steps and accepted drafts are the same."""
    expected = spec_runtime.load(folder, name, threads=1, lookup=False if name != "none" else None)
    lookup = False if name != "none" else None
    engine = spec_runtime.load(
        folder, name, lookup=lookup, backend="tensorrt", cuda_graphs=cuda_graphs
    )
    for prompt in PROMPTS:
        right = expected.generate(prompt, max_new_tokens=40, ignore_eos=True)
        result = engine.generate(prompt, max_new_tokens=40, ignore_eos=True)
        assert result.token_ids == right.token_ids
        assert result.stats.steps == right.stats.steps
    assert runtime.num_enqueued > 0
    if cuda_graphs:
        assert runtime.num_launched >= runtime.num_captured > 0
    else:
        assert runtime.num_launched == runtime.num_captured == 0


def test_a_shape_is_enqueued_then_captured_then_replayed(
    folder: Path, runtime: fake.Runtime
) -> None:
    target, _, _ = open_target(folder)
    cache = open_cache("contiguous", target.capacity)
    counts = []
    for tokens in ([5], [6], [7], [8, 9], [10], [11, 12], [13, 14]):
        parents = list(range(-1, len(tokens) - 1))
        target.run(step(cache, tokens, [max(p, 0) for p in parents]), ["logits"])
        cache.commit(range(len(tokens)))
        counts.append((runtime.num_enqueued, runtime.num_captured, runtime.num_launched))
    assert counts == [(1, 0, 0), (1, 1, 1), (1, 1, 2), (2, 1, 2), (2, 1, 3), (2, 2, 4), (2, 2, 5)]


def test_what_cannot_be_captured_is_enqueued(folder: Path, runtime: fake.Runtime) -> None:
    target, _, engine = open_target(folder)
    engine.is_capturable = False
    cache = open_cache("contiguous", target.capacity)
    for _ in range(3):
        target.run(step(cache, [5], [0]), ["logits"])
    assert (runtime.num_enqueued, runtime.num_captured) == (3, 0)


def test_shapes_long_unused_give_up_their_contexts(
    folder: Path, runtime: fake.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "MAX_SHAPES", 2)
    target, _, _ = open_target(folder)
    cache = open_cache("contiguous", target.capacity)
    for width in (1, 1, 3, 4, 5, 8, 1):  # filled up to 1, 4 and 8
        target.run(step(cache, [5] * width, [0] * width), ["logits"])
        cache.commit(range(1))
    assert len(runtime.executables) == 1  # of width 8: that of 1 is new again
    assert (runtime.num_enqueued, runtime.num_captured) == (4, 3)


def test_a_step_writes_its_kv_in_place_and_nothing_else(
    folder: Path, runtime: fake.Runtime
) -> None:
    """The buffers are zero at first, although the memory was full of junk."""
    target, graph, _ = open_target(folder)
    cache = open_cache("contiguous", target.capacity)
    spec = next(spec for spec in graph.inputs if spec.name == "kv.1.v")
    address = target._addresses["kv.1.v"]
    shape = tuple(int(size) for size in spec.shape)
    runtime.cudaStreamSynchronize(fake.STREAM)
    assert not fake.view(address, shape, spec.dtype).any()
    target.run(step(cache, [5, 6, 7, 8], [0, 0, 1, 1]), ["logits"])
    rows = fake.view(address, shape, spec.dtype)[0, 0]
    assert np.flatnonzero(rows.any(axis=1)).tolist() == [0, 1, 2, 3]
    assert target._addresses["kv.1.v.out"] == address


def test_too_wide_a_step_says_so(folder: Path, runtime: fake.Runtime) -> None:
    target, _, _ = open_target(folder)
    cache = open_cache("contiguous", target.capacity)
    with pytest.raises(ValueError, match=r"got rows .*'M': 200.* the plan was built for"):
        target.run(step(cache, [5] * 200, [0] * 200), ["logits"])


def test_an_engine_that_is_not_the_manifests_is_refused(
    folder: Path, runtime: fake.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_alias(self: fake.Engine, name: str) -> None:
        return None

    def other_types(self: fake.Engine, name: str) -> SimpleNamespace:
        return SimpleNamespace(name="HALF")

    def wider(self: fake.Engine, name: str, profile: int) -> list[tuple[int, ...]]:
        return [(1, 1)] * 3

    for method, replacement, message in (
        ("get_aliased_input_tensor", no_alias, r"input of kv\.0\.k\.out: got None"),
        ("get_tensor_dtype", other_types, "type of input_ids: got float16, expected int64"),
        ("get_tensor_profile_shape", wider, "profile 1 of input_ids: got"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(fake.Engine, method, replacement)
            with pytest.raises(ValueError, match=message):
                open_target(folder)
    opened = bundles.read(folder)
    with pytest.raises(ValueError, match=r"rows of kv\.0\.k: got 384, expected 512"):
        open_graph(opened, opened.manifest.graphs["target"], 512, Runtime("tensorrt"))


# ---- one clear line ----


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()  # what building the bundle printed
    with pytest.raises(SystemExit) as end:
        cli.main(["generate", "hello", "--max-new-tokens", "2", *arguments])
    captured = capsys.readouterr()
    assert (end.value.code, captured.out) == (2, "")
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_bundle_without_plans(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = str(workshop.bundle("parallelspec"))
    message = refusal(["--bundle", bundle, "--backend", "tensorrt"], capsys)
    assert "got a bundle without a TensorRT plan for target/target.onnx, expected one" in message
    assert "spec-export build --backend tensorrt, or choose --backend onnxruntime" in message
    message = refusal(["--bundle", bundle, "--backend", "cudnn"], capsys)
    assert f"got backend 'cudnn', expected one of {', '.join(BACKENDS)}" in message


def test_tensorrt_that_is_not_installed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings", None)
    message = refusal(["--bundle", str(folder), "--backend", "tensorrt"], capsys)
    assert "TensorRT is not installed: got no tensorrt_rtx_bindings" in message
    assert "run pip install 'specsplit[tensorrt-rtx]'" in message
    assert "specsplit[tensorrt]" not in message, "the bundle's plans are of the other flavour"


def test_an_old_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="10.9.0"))  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"tensorrt \(version 10\.9\.0, expected 11 or later\)"):
        tensorrt_api.import_tensorrt(["tensorrt"])


def test_cuda_python_that_is_not_installed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "import_tensorrt", lambda flavours: fake.tensorrt())
    monkeypatch.setattr(backend, "open_cuda", Cuda.open)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    message = refusal(["--bundle", str(folder), "--backend", "tensorrt"], capsys)
    assert "CUDA's Python bindings are not installed" in message
    assert "pip install cuda-bindings" in message


def test_a_machine_without_a_gpu(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "import_tensorrt", lambda flavours: fake.tensorrt())
    monkeypatch.setattr(backend, "open_cuda", lambda: fake.cuda(None)[0])
    message = refusal(["--bundle", str(folder), "--backend", "tensorrt"], capsys)
    assert "got no CUDA device (CUDA driver version is insufficient), expected an NVIDIA GPU" in (
        message
    )
    assert "or choose --backend onnxruntime" in message


def test_a_gpu_the_bundle_has_no_plan_for(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "import_tensorrt", lambda flavours: fake.tensorrt())
    monkeypatch.setattr(backend, "open_cuda", lambda: fake.cuda("9.0")[0])
    message = refusal(["--bundle", str(folder), "--backend", "tensorrt"], capsys)
    assert "a GPU of compute capability 9.0, the bundle has tensorrt_rtx 1.7.1.116 for 8.9" in (
        message
    )


def test_a_plan_tensorrt_cannot_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trt = fake.tensorrt()
    trt.logger.errors.append("wrong magic number")
    nothing = SimpleNamespace(deserialize_cuda_engine=lambda data: None)
    monkeypatch.setattr(backend, "_runtime", lambda trt: nothing)
    (tmp_path / "x.plan").write_bytes(b"a plan")
    with pytest.raises(ValueError, match=r"cannot load x\.plan: wrong magic number; build"):
        backend._deserialise(trt, tmp_path / "x.plan")


# ---- the real modules, as far as they go without a GPU ----


def test_the_real_cuda_has_the_names_we_use() -> None:
    runtime: Any = pytest.importorskip("cuda.bindings.runtime")
    names = [name for name in dir(fake.Runtime) if name.startswith("cuda")]
    assert len(names) > 15
    for name in names:
        assert hasattr(runtime, name), name
        for member in vars(getattr(fake.Runtime, name, object())) if name[4] in "MD" else ():
            if member.startswith("cuda"):
                assert hasattr(getattr(runtime, name), member), member
    assert runtime.cudaStreamNonBlocking == fake.Runtime.cudaStreamNonBlocking
    assert runtime.cudaGetDeviceCount()[0] == 0 or "CUDA" in cuda_refusal()


def cuda_refusal() -> str:
    with pytest.raises(ValueError, match="got no CUDA device") as error:
        Cuda.open()
    return str(error.value)


@pytest.mark.gpu
def test_a_plan_generates_on_this_gpu(workshop: Workshop, tmp_path: Path) -> None:
    """Compares float32 with ONNX Runtime on the CPU; only near ties may part the two."""
    from spec_export import make_bundle
    from spec_export.make_bundle import BuildOptions

    folder = make_bundle.build(
        BuildOptions(
            str(workshop.llama()),
            drafter_checkpoints=[workshop.drafter(name) for name in DRAFTERS],
            out=tmp_path / "bundle",
            backend="tensorrt",
        )
    )
    for name in (*DRAFTERS, "none"):
        expected = spec_runtime.load(folder, name, threads=1)
        for cuda_graphs in (True, False):
            engine = spec_runtime.load(folder, name, backend="tensorrt", cuda_graphs=cuda_graphs)
            for prompt in PROMPTS:
                right = expected.generate(prompt, max_new_tokens=40, ignore_eos=True)
                result = engine.generate(prompt, max_new_tokens=40, ignore_eos=True)
                assert result.token_ids == right.token_ids, (name, cuda_graphs, prompt)
