"""Tests how TensorRT plans are built: graphs, profiles, keys, and real builds by TensorRT-RTX.

TensorRT-RTX needs no GPU for these.
"""

import dataclasses
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host_tensorrt as host
import numpy as np
import onnx_ir as ir
import pytest
import torch
from graphs import Runner, graph_of
from small import Run
from tiny_backbone import backbone_of, tiny
from tiny_target import save_llama
from workshop import FluentWorkshop, Workshop

import spec_runtime
from spec_export import cli, drafters
from spec_export.build.drafters import load_module
from spec_export.build.writer import save_graph
from spec_export.cli.report import TerminalReport
from spec_export.graphs import tensorrt as build
from spec_export.graphs import trace
from spec_export.graphs.half import narrow
from spec_export.model import target
from spec_export.model.decoder import Backbone
from spec_export.training import checkpoint
from spec_runtime.backends.tensorrt.api import import_tensorrt
from spec_runtime.bundle import manifest as bundles
from spec_runtime.bundle.manifest import Bundle, Graph, TensorSpec
from spec_runtime.files.installed import install
from spec_runtime.loop.target import ARGMAX, TOP

CAPABILITIES = ("8.0", "8.9", "12.0")
SHARED_CACHE = "skip_layer"  # its runs would move rows of the target's cache
HALVES = pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16])


@pytest.fixture(scope="module")
def backbone(workshop: Workshop) -> Backbone:
    hf_model, _ = target.load(target.resolve(str(workshop.llama())))
    return Backbone.from_transformers(hf_model)


def drafter_graphs(workshop: Workshop, backbone: Backbone, name: str) -> dict[str, ir.Model]:
    """Exports a drafter's graphs in contiguous form, in float32."""
    saved = checkpoint.load_drafter(workshop.drafter(name))
    module = load_module(saved, backbone.config, target.ends(backbone))
    if module.shares_target_cache:
        return module.export_from_target(backbone)
    return module.export(backbone.config)


def no_build(*_: Any) -> bytes:
    raise AssertionError("it builds a plan it has")


# ---- graphs ----


def test_the_additive_mask_changes_no_result(backbone: Backbone, tmp_path: Path) -> None:
    """Runs two steps over a tree; only the mask's form differs, so float32 agrees to 1e-5."""
    results = []
    for adapted in (False, True):
        model = trace.export_backbone(backbone)
        if adapted:
            build.adapt(model, "fp32", backbone.config.rows)
            masks = [node.inputs[3] for node in model.graph if node.op_type == "Attention"]
            assert len(masks) == 2
            assert masks[0] is masks[1]
            assert masks[0] is not None
            assert masks[0].dtype == ir.DataType.FLOAT
            shapes = {each.name: each.shape for each in (*model.graph.inputs, *model.graph.outputs)}
            assert shapes["kv.0.k"] == shapes["kv.0.k.out"] == [1, 2, backbone.config.rows, 64]
            assert shapes["mask"] == [1, 1, "N", backbone.config.rows]
        runner = Runner(model, tmp_path / str(adapted), "contiguous", backbone.config.rows)
        first = runner.step([5, 6, 7, 8], [0, 0, 0, 1])
        runner.cache.commit([0, 2])
        results.append((first["logits"], runner.step([9, 10], [0, 0])["logits"]))
    for plain, additive in zip(*results, strict=True):
        assert np.abs(plain - additive).max() <= 1e-5
    assert np.abs(results[0][0][1] - results[0][0][2]).max() > 1e-2, "the mask matters"


def with_windows(dtype: torch.dtype = torch.float32) -> ir.Model:
    """Traces a target one of whose three layers sees the whole context, in contiguous form."""
    options = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    backbone = backbone_of(tiny("qwen2", **options).to(dtype))
    return trace.export_backbone(backbone)


def test_windows_have_an_additive_mask_of_their_own() -> None:
    model = build.adapt(with_windows(), "fp32", 64)
    whole, *windows = [node.inputs[3] for node in model.graph if node.op_type == "Attention"]
    assert windows == windows[:1] * 2 != [whole] * 2
    assert sum(node.op_type == "Where" for node in model.graph) == 2


@HALVES
@pytest.mark.parametrize("name", ["parallelspec", "amphista", "redrafter"])
def test_half_a_drafter_keeps_its_signature_and_sums_in_float32(
    workshop: Workshop, backbone: Backbone, name: str, dtype: ir.DataType
) -> None:
    for model in drafter_graphs(workshop, backbone, name).values():
        before = graph_of(model, "contiguous")
        narrow(model, "fp16" if dtype == ir.DataType.FLOAT16 else "bf16")
        after = graph_of(model, "contiguous")
        for old, new in zip(
            (*before.inputs, *before.outputs), (*after.inputs, *after.outputs), strict=True
        ):
            is_cache = old.name.startswith("kv.")
            half = str(dtype.numpy())
            expected = dataclasses.replace(old, dtype=half) if is_cache else old
            assert new == expected
        weights = [value for value in model.graph.initializers.values() if value.uses()]
        # a sum in float32 may have float32 numbers in it
        large = [v for v in weights if v.const_value is not None and v.const_value.size > 1]
        assert {v.dtype for v in large} <= {dtype, ir.DataType.INT64}
        for node in model.graph:
            types = {v.dtype for v in node.inputs if v is not None and v.dtype is not None}
            floats = types & {ir.DataType.FLOAT, dtype}
            assert len(floats) <= 1, node
            if node.op_type in ("MatMul", "Gemm", "Attention"):
                assert floats == {dtype}, node
            if node.op_type in ("Softmax", "LogSoftmax", "TopK"):
                assert floats == {ir.DataType.FLOAT}, node


def test_half_a_drafter_guesses_as_the_whole_one(
    workshop: Workshop, backbone: Backbone, tmp_path: Path
) -> None:
    """ParallelSpec in float16 on the CPU. 5e-2 on log-probabilities down to -10: 2^-11 a product of
    random weights, through one layer and a head (measures 5e-3)."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((1, 3, 64), np.float32).repeat(2, axis=2)
    outputs = ("guess_ids", "guess_log_probs")
    results = []
    for precision in ("fp32", "fp16"):
        model = drafter_graphs(workshop, backbone, "parallelspec")["drafter"]
        build.adapt(model, precision, backbone.config.rows)
        runner = Runner(model, tmp_path / precision, "contiguous", backbone.config.rows)
        results.append(runner.step([5, 6, 7], [0, 0, 1], outputs, features=features))
    whole, half = results
    assert np.abs(whole["guess_log_probs"] - half["guess_log_probs"]).max() <= 5e-2
    assert (whole["guess_ids"][:, 0] == half["guess_ids"][:, 0]).all()
    assert (whole["guess_log_probs"] != half["guess_log_probs"]).any(), "nothing was narrowed"


# ---- decisions ----


def step_graph(capacity: int) -> Graph:
    """Returns a graph with the free axes of a step over a cache."""
    names = ("N", "M", "A", "A+N")
    inputs = [TensorSpec(f"input.{name}", "int64", (name,)) for name in names]
    inputs.append(TensorSpec("kv.0.k", "float16", (1, 2, capacity, 16)))
    return Graph("g.onnx", "contiguous", tuple(inputs), ())


@pytest.mark.parametrize(
    ("capacity", "scratch", "expected"),
    [
        (
            2176,
            128,
            (
                {"N": (1, 1, 4), "M": (1, 1, 4), "A": (1, 1, 4), "A+N": (2, 2, 8)},
                {"N": (1, 24, 24), "M": (1, 24, 24), "A": (1, 2, 24), "A+N": (2, 26, 48)},
                {"N": (1, 256, 384), "M": (1, 1, 128), "A": (1, 1, 128), "A+N": (2, 257, 512)},
            ),
        ),
        # no profile writes more rows than the cache has
        (100, 60, ({"N": (1, 99, 99), "M": (1, 1, 60), "A": (1, 1, 60), "A+N": (2, 99, 99)},)),
    ],
)
def test_profiles_run_from_one_row_to_a_chunk_of_the_prompt(
    capacity: int, scratch: int, expected: tuple[build.Profile, ...]
) -> None:
    profiles = build.profiles_for(step_graph(capacity), 24, scratch)
    assert len(profiles) == 3
    assert profiles[-len(expected) :] == expected


def test_a_graph_without_free_axes_has_one_profile() -> None:
    fixed = Graph("g.onnx", "stateless", (TensorSpec("features", "float32", (1, 64)),), ())
    assert build.profiles_for(fixed, 24, 128) == ({},)
    free = Graph("g.onnx", "stateless", (TensorSpec("input_ids", "int64", ("N",)),), ())
    assert [p["N"][2] for p in build.profiles_for(free, 24, 128)] == [4, 24, 384]


def test_compute_capabilities_are_named_or_the_gpus() -> None:
    trt, known = host.tensorrt(), ["8.0", "8.9"]
    assert build.choose_capabilities(trt, ["8.9,8.0", "8.9"], known) == ("8.9", "8.0")
    for wanted in (["9.0"], ["89"], ["8.9,"]):
        with pytest.raises(ValueError, match=r"got compute capability .* one of 8\.0, 8\.9: for"):
            build.choose_capabilities(trt, wanted, known)
    with pytest.raises(ValueError, match=r"got no --compute-capability and no GPU .* 8\.9$"):
        build.choose_capabilities(trt, [], known)
    assert build._known(trt) == known


def test_a_plans_key_depends_on_all_that_shapes_it(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trt = host.tensorrt()
    profile: build.Profile = {"N": (1, 2, 3)}
    keys = [
        build.plan_key("a", trt, "8.9", [profile]),
        build.plan_key("b", trt, "8.9", [profile]),
        build.plan_key("a", trt._replace(version="2.0"), "8.9", [profile]),
        build.plan_key("a", trt, "8.0", [profile]),
        build.plan_key("a", trt, "8.9", [{"N": (1, 2, 4)}]),
    ]
    assert build.plan_key("a", trt, "8.9", [dict(profile)]) == keys[0]
    monkeypatch.setattr(build, "SETTINGS", build.SETTINGS + 1)
    keys.append(build.plan_key("a", trt, "8.9", [profile]))
    assert len(set(keys)) == len(keys)

    path = tmp_path / "graph.onnx"
    trace.save(trace.export_backbone(backbone), path)
    before, weights = build.hash_graph(path), path.with_suffix(".bin")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert build.hash_graph(path) != before, "weights beside the graph count"


# ---- refusals ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backend", "tensorrt", "--precision", "int8"], "got precision int8 with the contig"),
        (["--compute-capability", "8.9"], "got a compute capability with onnxruntime, expected -"),
        (["--backend", "tensorrt"], "got no --compute-capability and no GPU to take it from"),
        (
            ["--backend", "tensorrt", "--compute-capability", "9.0"],
            "got compute capability '9.0', expected one of 8.0, 8.9",
        ),
    ],
)
def test_what_cannot_be_built_is_one_line(
    workshop: Workshop,
    tmp_path: Path,
    options: list[str],
    message: str,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "import_tensorrt", host.tensorrt)
    monkeypatch.setattr(build, "open_cuda", lambda: host.cuda(None)[0])
    model, out = workshop.llama(), tmp_path / "bundle"
    code, _, err = run("build", "--model", model, "--out", out, *options, main=cli.main)
    assert code == 2
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert not out.exists()


def test_without_tensorrt_it_says_what_to_install(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings", None)
    with pytest.raises(
        ValueError, match=r"TensorRT-RTX is not installed.* run .*pip install"
    ) as error:
        workshop.build(tmp_path / "bundle", backend="tensorrt")
    assert install("tensorrt-rtx") in str(error.value)


def test_a_drafter_on_the_targets_cache_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got drafter skip_layer with the tensorrt backend"):
        workshop.build(tmp_path / "bundle", SHARED_CACHE, backend="tensorrt")


# ---- real builds ----


@pytest.fixture(scope="module")
def rtx() -> Any:
    try:
        return import_tensorrt()
    except ValueError as error:
        pytest.skip(str(error))


def built(workshop: Workshop, out: Path, precision: str, *names: str, **options: Any) -> Path:
    known = {"backend": "tensorrt", "precision": precision, "compute_capabilities": ["8.9"]}
    return workshop.build(out, *names, **known | options)


def plans_of(bundle: Bundle) -> dict[str, list[bundles.Plan]]:
    """Returns the plans by graph, and asserts that all are of the right size, kind and name."""
    manifest = bundle.manifest
    graphs = {"target": manifest.graphs["target"]}
    for info in manifest.drafters:
        graphs |= {f"{info.name}-{role}": graph for role, graph in info.graphs.items()}
    trt = import_tensorrt()
    for name, graph in graphs.items():
        for plan in graph.plans:
            file = bundle.file(plan.file)
            assert file.stat().st_size > 100_000, plan.file
            assert plan.file in manifest.files
            number = plan.compute_capability.replace(".", "")
            expected = rf"engines/{name}-sm{number}-tensorrt_rtx-{trt.version}-{plan.key[:12]}.plan"
            assert re.fullmatch(expected, plan.file)
            assert (plan.flavour, plan.version) == ("tensorrt_rtx", trt.version)
            assert len(plan.profiles) == (3 if graph.free_axes else 1)
    return {name: list(graph.plans) for name, graph in graphs.items()}


@pytest.fixture(scope="module")
def fp16(rtx: Any, workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(workshop, tmp_path_factory.mktemp("fp16") / "bundle", "fp16")


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_target_of_two_layers_is_built(
    rtx: Any, workshop: Workshop, fp16: Path, tmp_path: Path, precision: str
) -> None:
    folder = fp16 if precision == "fp16" else built(workshop, tmp_path / "bundle", precision)
    bundle = bundles.read(folder)
    plans = plans_of(bundle)
    assert [plan.compute_capability for plan in plans["target"]] == ["8.9"]
    caches = {
        spec.dtype
        for spec in bundle.manifest.graphs["target"].inputs
        if spec.name.startswith("kv.")
    }
    assert caches == {{"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}[precision]}
    outputs = {spec.name: spec for spec in bundle.manifest.graphs["target"].outputs}
    assert outputs[ARGMAX] == TensorSpec(ARGMAX, "int64", ("M",))
    assert not outputs.keys() & set(TOP), "a greedy step pays only for what it reads"


def test_a_plan_holds_its_weights_once(rtx: Any, tmp_path: Path) -> None:
    """For a profile of only one row, TensorRT-RTX 1.7 would store a layer's weights twice."""
    wide: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 1}
    wide |= {"num_attention_heads": 16, "num_key_value_heads": 16}
    hf_model, _ = target.load(target.resolve(str(save_llama(tmp_path / "llama", **wide))))
    decoder = Backbone.from_transformers(hf_model.half(), (), 64).eval()
    model = build.adapt(trace.export_backbone(decoder), "fp16", decoder.config.rows)
    graph = save_graph(model, "contiguous", tmp_path, "graph.onnx")
    profiles = build.profiles_for(graph, 24, 128)
    plan = build.build_plan(rtx, tmp_path / "graph.onnx", graph, profiles, "8.9")
    num_weights = (tmp_path / "graph.bin").stat().st_size
    assert 20e6 < num_weights < len(plan) < 1.5 * num_weights


@pytest.mark.slow
def test_a_rebuilt_bundle_takes_over_what_has_not_changed(
    rtx: Any, workshop: Workshop, fp16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(shutil.copytree(fp16, tmp_path / "bundle"))
    (first,) = plans_of(bundles.read(out))["target"]
    data = (out / first.file).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(build, "build_plan", no_build)
        built(workshop, out, "fp16")
        (second,) = plans_of(bundles.read(out))["target"]
        assert second == first
        assert (out / second.file).read_bytes() == data
        with pytest.raises(AssertionError, match="it builds a plan"):
            built(workshop, out, "fp16", max_length=100)
    (out / second.file).write_bytes(data[:-1])  # damaged: not taken
    built(workshop, out, "fp16")
    assert len((out / second.file).read_bytes()) == len(data)


@pytest.mark.slow
def test_the_bundle_also_runs_on_onnx_runtime(
    rtx: Any, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapted contiguous float32 graphs give the tokens of the slots form."""
    name = "parallelspec"
    monkeypatch.setattr(build, "build_plan", lambda *_: b"a plan")  # which is not read here
    folder = built(workshop, tmp_path / "bundle", "fp32", name)
    results = [
        spec_runtime.load(path, name, threads=1, lookup=False).generate(
            "say abc, 3", max_new_tokens=60, ignore_eos=True
        )
        for path in (folder, workshop.bundle(name))
    ]
    assert results[0].token_ids == results[1].token_ids
    assert results[0].stats.steps == results[1].stats.steps < 59


@pytest.fixture(scope="module")
def adapted(backbone: Backbone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the file of the target's graph, adapted in float32."""
    path = tmp_path_factory.mktemp("adapted") / "graph.onnx"
    trace.save(build.adapt(trace.export_backbone(backbone), "fp32", backbone.config.rows), path)
    return path


def refusal(rtx: Any, path: Path, graph: Graph) -> str:
    """Returns what is said of a network that is not the manifest's `graph`."""
    profiles = build.profiles_for(graph, 8, 128)
    with pytest.raises(ValueError, match=r"graph\.onnx as TensorRT parsed it: ") as error:
        build.build_plan(rtx, path, graph, profiles, "8.9")
    return str(error.value).partition("parsed it: ")[2]


def test_a_network_that_is_not_the_manifests_is_refused(rtx: Any, adapted: Path) -> None:
    graph = graph_of(ir.load(adapted), "contiguous")
    first, *others = graph.inputs
    for change, message in (
        ({"dtype": "int32"}, "type of input_ids: got int64, expected int32"),
        ({"shape": (1, 8)}, "shape of input_ids: got (1, -1), expected (1, 8)"),
    ):
        wrong = dataclasses.replace(first, **change)
        changed = dataclasses.replace(graph, inputs=(wrong, *others))
        assert refusal(rtx, adapted, changed) == message
    less = dataclasses.replace(graph, outputs=graph.outputs[1:])
    assert refusal(rtx, adapted, less).startswith("outputs: got [")


def test_a_cache_written_twice_is_not_in_place(rtx: Any, adapted: Path, tmp_path: Path) -> None:
    """A layer's values are scattered into its keys' cache, so no output can be that update."""
    model = ir.load(adapted)
    keys, values = [node for node in model.graph if node.op_type == "TensorScatter"][:2]
    values.replace_input_with(0, keys.inputs[0])
    trace.save(model, tmp_path / "graph.onnx")
    told = refusal(rtx, tmp_path / "graph.onnx", graph_of(model, "contiguous"))
    assert re.match(r"updates in place: got .*\('kv\.0\.k', 'kv\.0\.v\.out", told)


def test_what_tensorrt_cannot_parse_is_one_line(
    rtx: Any, backbone: Backbone, tmp_path: Path
) -> None:
    """The graph's capacity is left open."""
    model = trace.export_backbone(backbone)
    trace.save(model, tmp_path / "graph.onnx")
    with pytest.raises(ValueError, match=r"does not parse graph\.onnx: .*static sequence") as error:
        build.build_plan(rtx, tmp_path / "graph.onnx", graph_of(model, "contiguous"), ({},), "8.9")
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "capabilities"),
    [
        ([name for name in drafters.trainable() if name != SHARED_CACHE], CAPABILITIES[1:2]),
        ([], CAPABILITIES[::2]),
    ],
    ids=["all drafters", "two other GPUs"],
)
def test_target_and_drafters_are_built(
    rtx: Any,
    fluent: FluentWorkshop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
    names: list[str],
    capabilities: tuple[str, ...],
) -> None:
    options = {"compute_capabilities": [",".join(capabilities)], "report": TerminalReport()}
    out = built(fluent, tmp_path / "bundle", "fp16", *names, **options)
    plans = plans_of(bundles.read(out))
    assert {name.partition("-")[0] for name in plans} == {"target", *names}
    for name, each in plans.items():
        assert [plan.compute_capability for plan in each] == list(capabilities), name
    table = capsys.readouterr().err
    record_property("shown", table[table.index("┏") :])
    for name in plans:
        row = rf"│ {name} +│ (?:8\.0|8\.9|12\.0) +│ +\d+\.\d +│ +\d+\.\d +│"
        assert len(re.findall(row, table)) == len(capabilities), name


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_the_other_graphs_and_precisions_are_built(
    rtx: Any, workshop: Workshop, backbone: Backbone, tmp_path: Path, precision: str
) -> None:
    """Builds a target with windows in every precision, a drafter on the target's layers, which no
    bundle here has, and in the precisions without a bundle of drafters one of the others."""
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    models = {"windows": with_windows(dtypes[precision])}
    name = SHARED_CACHE if precision == "fp16" else "parallelspec"
    for role, model in drafter_graphs(workshop, backbone, name).items():
        models[f"{name}-{role}"] = model
    for name, model in models.items():
        build.adapt(model, precision, backbone.config.rows)
        path = tmp_path / f"{name}.onnx"
        trace.save(model, path)
        graph = graph_of(model, "contiguous")
        profiles = build.profiles_for(graph, 24, 32)
        assert len(build.build_plan(rtx, path, graph, profiles, "8.9")) > 100_000
