"""Tests the TensorRT backend: its decisions, what it generates and copies, its one-line refusals.

Plans run only on a GPU. Elsewhere tests/host_tensorrt.py takes their place, which computes with
ONNX Runtime.
"""

import gc
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_tensorrt as host
import numpy as np
import pytest
from host_cuda import CAPABILITY, HostCuda, step_feeds, view
from workshop import Workshop

import spec_runtime
from spec_runtime import cli
from spec_runtime.backends import BACKENDS, Runtime, open_graph
from spec_runtime.backends.cuda.api import Cuda
from spec_runtime.backends.layout import Layout
from spec_runtime.backends.shapes import axis_sizes, num_bytes, shape_of
from spec_runtime.backends.tensorrt import api as tensorrt_api
from spec_runtime.backends.tensorrt import backend
from spec_runtime.backends.tensorrt.api import TensorRT
from spec_runtime.backends.tensorrt.backend import TensorRTBackend
from spec_runtime.bundle import manifest as bundles
from spec_runtime.bundle.manifest import BundleError, Graph, Plan, TensorSpec
from spec_runtime.files.installed import install
from spec_runtime.files.mapping import from_mapping, to_json
from spec_runtime.loop.kv import open_cache
from spec_runtime.loop.target import ARGMAX

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
    for (n, a), expected in {(1, 1): 0, (1, 2): 1, (8, 8): 1, (9, 1): 2, (64, 4): 2}.items():
        assert backend.choose_profile(PROFILES, {"N": n, "A": a}) == expected
    assert backend.choose_profile([{"N": (2, 4, 8)}, {"N": (1, 8, 64)}], {"N": 1}) == 1
    for n, a in ((65, 1), (9, 5), (64, 8)):
        message = rf"got rows {{'N': {n}, 'A': {a}}}.* built for .*'1 to 64'"
        with pytest.raises(ValueError, match=message):
            backend.choose_profile(PROFILES, {"N": n, "A": a})


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


def test_a_plan_must_be_of_this_flavour_version_and_gpu() -> None:
    plans = [plan(compute_capability=c) for c in ("8.0", "8.9")]
    assert backend.choose_plan(plans, "tensorrt_rtx", "1.7.1.116", "8.9") is plans[1]
    for flavour, version, capability in (
        ("tensorrt_rtx", "1.7.1.116", "9.0"),
        ("tensorrt_rtx", "1.8.0.1", "8.9"),
    ):
        message = (
            f"no plan fits: got {flavour} {version} and a GPU of compute capability {capability}, "
            "the bundle has tensorrt_rtx 1.7.1.116 for 8.0, tensorrt_rtx.*"
            f"--compute-capability {capability}"
        )
        with pytest.raises(ValueError, match=message):
            backend.choose_plan(plans, flavour, version, capability)


# ---- the manifest ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flavour": "tensorrt_lean"}, "flavour: got str 'tensorrt_lean', expected one of"),
        ({"version": "new"}, "version: got str 'new', expected numbers"),
        ({"compute_capability": "sm89"}, "compute_capability: got str 'sm89', expected one as"),
        ({"key": "xyz"}, "key: got str 'xyz', expected 64 hexadecimal digits"),
        ({"profiles": ()}, "profiles: got tuple .*, expected 1 or more items"),
        ({"profiles": ({"N": (1, 2)},)}, "got tuple .1, 2., expected three sizes, rising"),
        ({"profiles": ({"N": (1, 9, 8)},)}, "got tuple .1, 9, 8., expected three sizes"),
        ({"profiles": ({"N": (0, 1, 8)},)}, "got tuple .0, 1, 8., expected three sizes"),
    ],
)
def test_a_plan_in_a_manifest_is_validated(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        from_mapping(Plan, vars(plan()) | changes, "plan", BundleError)


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


# ---- running ----


@pytest.fixture(scope="module")
def folder(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds a float32 bundle for TensorRT, whose plans are a few bytes."""
    from spec_export.graphs import tensorrt as build

    out = tmp_path_factory.mktemp("tensorrt") / "bundle"
    options: Any = {"backend": "tensorrt", "compute_capabilities": [CAPABILITY]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "import_tensorrt", host.tensorrt)
        patch.setattr(build, "build_plan", lambda *_: b"a plan")
        return workshop.build(out, *DRAFTERS, **options)


@pytest.fixture
def runtime(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostCuda]:
    """Puts the host under every backend that is opened; no memory is left behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cuda, runtime = host.cuda()
    manifest = bundles.read(folder).manifest
    graphs = [*manifest.graphs.values()]
    graphs += [graph for info in manifest.drafters for graph in info.graphs.values()]
    by_file = {graph.plans[0].file: graph for graph in graphs}

    def deserialise(trt: TensorRT, path: Path) -> host.Engine:
        assert path.read_bytes() == b"a plan"
        graph = by_file[path.relative_to(folder).as_posix()]
        return host.Engine(folder / graph.file, graph, runtime)

    monkeypatch.setattr(backend, "import_tensorrt", lambda: host.tensorrt())
    monkeypatch.setattr(backend, "open_cuda", lambda: cuda)
    monkeypatch.setattr(backend, "_deserialise", deserialise)
    yield runtime
    gc.collect()
    assert not runtime.memory, "memory is left"
    assert not runtime.graphs, "CUDA graphs are left"


def open_target(folder: Path) -> tuple[TensorRTBackend, Graph, host.Engine]:
    opened = bundles.read(folder)
    graph = opened.manifest.graphs["target"]
    capacity = opened.manifest.target.max_length + 128
    made = open_graph(opened, graph, capacity, Runtime("tensorrt"))
    assert isinstance(made, TensorRTBackend)
    return made, graph, made._maker._engine


def run_rows(target: TensorRTBackend, *widths: int) -> Iterator[None]:
    """Runs steps of these widths, one after the other, each after one more committed row."""
    cache = open_cache("contiguous", target.capacity)
    for width in widths:
        target.run(step_feeds(cache, [5] * width, [0] * width), [ARGMAX])
        cache.commit([0])
        yield


@pytest.mark.parametrize("name", [*DRAFTERS, "none"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_it_generates_what_onnx_runtime_generates(
    folder: Path, runtime: HostCuda, name: str, cuda_graphs: bool
) -> None:
    """Both run the same graphs, so tokens, steps and accepted drafts are the same."""
    lookup = None if name == "none" else False
    expected = spec_runtime.load(folder, name, threads=1, lookup=lookup)
    engine = spec_runtime.load(
        folder, name, lookup=lookup, backend="tensorrt", cuda_graphs=cuda_graphs
    )
    for prompt in PROMPTS:
        right = expected.generate(prompt, max_new_tokens=40, ignore_eos=True)
        result = engine.generate(prompt, max_new_tokens=40, ignore_eos=True)
        assert result.token_ids == right.token_ids
        assert result.stats.steps == right.stats.steps
    counts = runtime.counts
    assert counts["enqueued"] > 0
    assert (counts["launched"] >= counts["captured"] > 0) == cuda_graphs


def test_a_shape_is_enqueued_then_captured_then_replayed(folder: Path, runtime: HostCuda) -> None:
    target, _, _ = open_target(folder)
    kinds = ("enqueued", "captured", "launched")
    counts = [
        tuple(runtime.counts[kind] for kind in kinds) for _ in run_rows(target, 1, 1, 1, 2, 1, 2, 2)
    ]
    assert counts == [(1, 0, 0), (1, 1, 1), (1, 1, 2), (2, 1, 2), (2, 1, 3), (2, 2, 4), (2, 2, 5)]


def test_what_cannot_be_captured_is_enqueued(folder: Path, runtime: HostCuda) -> None:
    target, _, engine = open_target(folder)
    engine.is_capturable = False
    assert len([*run_rows(target, 1, 1, 1)]) == runtime.counts["enqueued"] == 3
    assert runtime.counts["captured"] == 0


def test_a_step_writes_its_kv_in_place_and_nothing_else(folder: Path, runtime: HostCuda) -> None:
    """The buffers are zero at first, although the memory was full of junk."""
    target, graph, _ = open_target(folder)
    cache = open_cache("contiguous", target.capacity)
    spec = next(spec for spec in graph.inputs if spec.name == "kv.1.v")
    address = target._buffers["kv.1.v"]
    shape = tuple(int(size) for size in spec.shape)
    target._cuda.wait()
    assert not view(address, shape, spec.dtype).any()
    target.run(step_feeds(cache, [5, 6, 7, 8], [0, 0, 1, 1]), ["logits"])
    rows = view(address, shape, spec.dtype)[0, 0]
    assert np.flatnonzero(rows.any(axis=1)).tolist() == [0, 1, 2, 3]
    assert target._buffers["kv.1.v.out"] == address


def test_too_wide_a_step_says_so(folder: Path, runtime: HostCuda) -> None:
    target, _, _ = open_target(folder)
    with pytest.raises(ValueError, match=r"got rows .*'M': 200.* the plan was built for"):
        next(run_rows(target, 200))


def test_an_engine_that_is_not_the_manifests_is_refused(
    folder: Path, runtime: HostCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method, got, message in (
        ("get_aliased_input_tensor", None, r"input of kv\.0\.k\.out: got None"),
        (
            *("get_tensor_dtype", SimpleNamespace(name="HALF")),
            "type of input_ids: got float16, expected int64",
        ),
        ("get_tensor_profile_shape", [(1, 1)] * 3, "profile 0 of input_ids: got"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(host.Engine, method, lambda *_, got=got: got)
            with pytest.raises(ValueError, match=message):
                open_target(folder)
    opened = bundles.read(folder)
    with pytest.raises(ValueError, match=r"rows of kv\.0\.k: got 384, expected 512"):
        open_graph(opened, opened.manifest.graphs["target"], 512, Runtime("tensorrt"))


# ---- what crosses between host and device ----


def test_arrays_lie_side_by_side() -> None:
    layout = Layout.of({"a": 5, "b": 256, "c": 10})
    assert (layout.first, layout.num_bytes) == ({"a": 0, "b": 256, "c": 512}, 768)
    assert layout.pieces({"c": 10, "a": 5, "b": 100}) == [(0, 522)]
    assert layout.pieces({"a": 5, "c": 10}) == [(0, 5), (512, 522)]
    assert layout.pieces({"b": 9}) == [(256, 265)]
    assert layout.pieces({}) == []
    assert Layout.of({}).num_bytes > 0, "CUDA allocates nothing of no size"
    assert num_bytes(TensorSpec("x", "bfloat16", (1, "A", 5)), {"A": 8}) == 80


def test_a_greedy_run_sends_one_piece_and_fetches_eight_bytes_a_node(
    folder: Path, runtime: HostCuda
) -> None:
    engine = spec_runtime.load(folder, "none", backend="tensorrt")
    result = engine.generate(PROMPTS[0], max_new_tokens=20, ignore_eos=True)
    counts = runtime.counts
    num_runs = counts["enqueued"] + counts["launched"]
    assert counts["up"] == counts["down"] == num_runs == len(result.token_ids)
    backend: Any = engine.target.lend()[0]
    assert backend.bytes_to_host == counts["bytes down"] == 8 * len(result.token_ids)


def test_results_that_lie_side_by_side_come_back_with_one_copy(
    folder: Path, runtime: HostCuda
) -> None:
    target, graph, engine = open_target(folder)
    cache = open_cache("contiguous", target.capacity)
    feeds = step_feeds(cache, [5, 6, 7], [0, 0, 1])
    names = [spec.name for spec in graph.outputs if not spec.name.startswith("kv.")]
    caches = [spec for spec in graph.inputs if spec.name.startswith("kv.")]
    zeros = {spec.name: np.zeros(shape_of(spec, {}), spec.dtype) for spec in caches}
    right = dict(zip(names, engine.session.run(names, feeds | zeros), strict=True))
    for wanted in ([ARGMAX, "features"], ["logits"], names):
        before = runtime.counts["down"]
        results = target.run(feeds, wanted)
        assert list(results) == wanted
        for name in wanted:
            assert np.abs(results[name] - right[name]).max() <= 1e-5, name
        if "logits" not in wanted:
            assert runtime.counts["down"] == before + 1


def test_sampling_fetches_the_rows_it_visits(folder: Path, runtime: HostCuda) -> None:
    engine = spec_runtime.load(folder, "none", backend="tensorrt")
    expected = spec_runtime.load(folder, "none", threads=1)
    options: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    options |= {"temperature": 1.0, "seed": 3}
    result = engine.generate(PROMPTS[0], **options)
    assert result.token_ids == expected.generate(PROMPTS[0], **options).token_ids
    row = 4 * engine.target.vocab_size
    assert runtime.counts["bytes down"] == (8 + row) * len(result.token_ids)


def test_a_target_without_its_argmax_is_read_as_before(
    folder: Path, runtime: HostCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bundles of older versions have no such output."""
    options: dict[str, Any] = {"max_new_tokens": 10, "ignore_eos": True}
    right = spec_runtime.load(folder, "none", backend="tensorrt").generate(PROMPTS[0], **options)
    monkeypatch.setattr(TensorRTBackend, "has_output", lambda self, name: False)
    engine = spec_runtime.load(folder, "none", backend="tensorrt")
    assert engine.generate(PROMPTS[0], **options).token_ids == right.token_ids


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


def test_a_bundle_without_plans(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = str(shutil.copytree(folder, tmp_path / "bundle"))
    manifest = json.loads((folder / bundles.MANIFEST).read_text())
    assert manifest["graphs"]["target"].pop("plans")
    (tmp_path / "bundle" / bundles.MANIFEST).write_text(json.dumps(manifest))
    message = refusal(["--bundle", bundle, "--backend", "tensorrt"], capsys)
    assert "got a bundle without a TensorRT plan for target/target.onnx, expected one" in message
    assert "spec-export build --backend tensorrt, or choose --backend onnxruntime" in message
    message = refusal(["--bundle", bundle, "--backend", "cudnn"], capsys)
    assert f"got backend 'cudnn', expected one of {', '.join(BACKENDS)}" in message


@pytest.mark.parametrize(
    ("module", "open_cuda", "parts"),
    [
        (
            *("tensorrt_rtx_bindings", None),
            ("got no tensorrt_rtx_bindings", f"run {install('tensorrt-rtx')}\n"),
        ),
        (
            *("cuda.bindings", Cuda.open),
            ("CUDA's Python bindings are not installed", "pip install cuda-bindings"),
        ),
        (
            *("", lambda: host.cuda(None)[0]),
            (
                "got no CUDA device (CUDA driver version is insufficient), expected an NVIDIA GPU",
                "or choose --backend onnxruntime",
            ),
        ),
        (
            *("", lambda: host.cuda("9.0")[0]),
            ("compute capability 9.0, the bundle has tensorrt_rtx 1.7.1.116 for 8.9",),
        ),
    ],
)
def test_what_the_machine_lacks_is_one_line(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    open_cuda: Any,
    parts: tuple[str, ...],
) -> None:
    if module:
        monkeypatch.setitem(sys.modules, module, None)
    if open_cuda is not None:
        monkeypatch.setattr(backend, "import_tensorrt", lambda: host.tensorrt())
        monkeypatch.setattr(backend, "open_cuda", open_cuda)
    message = refusal(["--bundle", str(folder), "--backend", "tensorrt"], capsys)
    assert all(part in message for part in parts), message


def test_a_plan_tensorrt_cannot_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trt = host.tensorrt()
    trt.logger.errors.append("wrong magic number")
    nothing = SimpleNamespace(deserialize_cuda_engine=lambda data: None)
    monkeypatch.setattr(backend, "_runtime", lambda trt: nothing)
    (tmp_path / "x.plan").write_bytes(b"a plan")
    with pytest.raises(ValueError, match=r"cannot load x\.plan: wrong magic number; build"):
        backend._deserialise(trt, tmp_path / "x.plan")


# ---- the real modules, as far as they go without a GPU ----


def test_the_real_cuda_has_the_names_we_use() -> None:
    runtime: Any = pytest.importorskip("cuda.bindings.runtime")
    names = [name for name in dir(HostCuda) if name.startswith("cuda")]
    assert len(names) > 15
    for name in names:
        assert hasattr(runtime, name), name
        for member in vars(getattr(HostCuda, name, object())) if name[4] in "MD" else ():
            if member.startswith("cuda"):
                assert hasattr(getattr(runtime, name), member), member
    assert isinstance(runtime.cudaDeviceProp().name, bytes)
    assert runtime.cudaStreamNonBlocking == HostCuda.cudaStreamNonBlocking
    assert runtime.cudaGetDeviceCount()[0] == 0 or "CUDA" in cuda_refusal()


def test_the_real_tensorrt_rtx_has_the_names_we_use() -> None:
    """The fakes have no names of their own but those of their attributes."""
    trt: Any = pytest.importorskip("tensorrt_rtx_bindings")
    for fake_type, real_type in (
        (host.Engine, trt.ICudaEngine),
        (host.Context, trt.IExecutionContext),
        (host.IRuntimeConfig, trt.IRuntimeConfig),
    ):
        names = [name for name in vars(fake_type) if not name.startswith("_")]
        for name in {*names} - {"strategy"}:
            assert hasattr(real_type, name), (real_type, name)
    for name in ("num_io_tensors", "num_optimization_profiles"):
        assert hasattr(trt.ICudaEngine, name)
    for name in ("cuda_graph_strategy", "dynamic_shapes_kernel_specialization_strategy"):
        assert getattr(trt.IRuntimeConfig, name).fset is not None, "it can be set"
    assert "(self: tensorrt_rtx_bindings.tensorrt_rtx.ICudaEngine, runtime_config: " in (
        trt.ICudaEngine.create_execution_context.__doc__
    )
    for kind, members in vars(host.tensorrt().module).items():
        for member in vars(members):
            if not member.startswith("_"):
                assert hasattr(getattr(trt, kind), member), (kind, member)
    assert hasattr(trt.Runtime, "deserialize_cuda_engine")


def test_the_real_tensorrt_rtx_reads_mapped_plans(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    (tmp_path / "x.plan").write_bytes(bytes(5000))
    with pytest.raises(ValueError, match=r"tensorrt_rtx .* cannot load x\.plan: "):
        backend._deserialise(tensorrt_api.import_tensorrt(), tmp_path / "x.plan")


def cuda_refusal() -> str:
    with pytest.raises(ValueError, match="got no CUDA device") as error:
        Cuda.open()
    return str(error.value)


@pytest.mark.gpu
def test_a_plan_generates_on_this_gpu(workshop: Workshop, tmp_path: Path) -> None:
    """Compares float32 with ONNX Runtime on the CPU; only near ties may part the two."""
    folder = workshop.build(tmp_path / "bundle", *DRAFTERS, backend="tensorrt")
    for name in (*DRAFTERS, "none"):
        expected = spec_runtime.load(folder, name, threads=1)
        for cuda_graphs in (True, False):
            engine = spec_runtime.load(folder, name, backend="tensorrt", cuda_graphs=cuda_graphs)
            for prompt in PROMPTS:
                right = expected.generate(prompt, max_new_tokens=40, ignore_eos=True)
                result = engine.generate(prompt, max_new_tokens=40, ignore_eos=True)
                assert result.token_ids == right.token_ids, (name, cuda_graphs, prompt)
