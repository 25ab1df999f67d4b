"""Tests ONNX Runtime's CUDA backend without a GPU.

Here our code for CUDA drives ONNX Runtime's CPU provider (tests/host_cuda.py), so that answers can
be compared. tests/test_cuda_runs.py runs the CUDA provider itself, and counts what it does.
"""

import ctypes
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_cuda import HostCuda, step_feeds
from onnx_text import model_of, session_of
from workshop import Workshop

import spec_runtime
from spec_runtime.backends import DeviceBackend, Runtime, open_graph, pad_rows, shapes
from spec_runtime.backends.cpu import backend as cpu
from spec_runtime.backends.cpu.backend import CpuBackend
from spec_runtime.backends.cuda import device_runs
from spec_runtime.backends.session import OrtBackend
from spec_runtime.bundle import manifest as bundles
from spec_runtime.bundle.manifest import Graph, TensorSpec
from spec_runtime.errors import UserError
from spec_runtime.loop.kv import Cache, open_cache
from spec_runtime.loop.proposer import Drafting
from spec_runtime.loop.target import STRICT_GAPS, TOP, Target
from spec_runtime.pace import warm_up
from spec_runtime.pace.warm_up import capture_shapes
from spec_runtime.proposers.wrapper import ProposerWrapper
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.tree import TokenTree

onnx = pytest.importorskip("onnx")

# a cache; a cache in one graph and none in the other; a cache and features of its own; that, after
# taps that the target fuses; no cache in one graph, in two
DRAFTERS = ("parallelspec", "hydra", "eagle", "eagle3", "medusa", "semi_autoregressive")
IN_TARGETS_CACHE = "skip_layer"
PROMPTS = ("say abc, 3", "one two. one two. one")
BUILDS = {"fp16": "append", "fp32": "full_buffer"}  # the attention of each precision
OPTIONS: Any = {"max_new_tokens": 40, "ignore_eos": True}
SAMPLINGS: tuple[Any, ...] = ({}, {"temperature": 0.8, "seed": 5}, {"repetition_penalty": 1.3}, {})


@pytest.fixture(scope="module")
def folders(workshop: Workshop) -> dict[str, Path]:
    """Returns a bundle for CUDA in each precision."""
    return {precision: workshop.lanes(precision) for precision in BUILDS}


def load(folder: Path, backend: str = "cuda", **options: Any) -> spec_runtime.Engine:
    return spec_runtime.load(folder, backend=backend, threads=1, **options)


def on_cpu(folder: Path, **options: Any) -> spec_runtime.Engine:
    return load(folder, "onnxruntime", **options)


def open_target(
    folder: Path, how: str = "cuda", cuda_graphs: bool = True
) -> tuple[OrtBackend, Cache]:
    opened = bundles.read(folder)
    graph = opened.manifest.graphs["target"]
    capacity = opened.manifest.target.max_length + 128
    backend = open_graph(opened, graph, capacity, Runtime(how, 1, cuda_graphs))
    assert isinstance(backend, OrtBackend)
    return backend, open_cache(graph.form, capacity, backend)


# ---- the same tokens ----


@pytest.mark.parametrize("precision", BUILDS)
@pytest.mark.parametrize(
    ("name", "cuda_graphs"),
    [
        *((name, True) for name in (*DRAFTERS, IN_TARGETS_CACHE, "none")),
        *((name, False) for name in ("hydra", "none")),
    ],
)
def test_it_generates_what_the_cpu_generates(
    folders: dict[str, Path],
    device: HostCuda,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    name: str,
    cuda_graphs: bool,
) -> None:
    """Both run the same graphs, so tokens and accepted drafts are the same."""
    monkeypatch.setattr(shapes, "MIN_MASK", 16)  # so that the width of masks changes on the way
    expected = on_cpu(folders[precision], drafter=name)
    engine = load(folders[precision], drafter=name, cuda_graphs=cuda_graphs)
    for prompt, sampling in zip(PROMPTS * 2, SAMPLINGS, strict=True):
        right = expected.generate(prompt, **OPTIONS, **sampling)
        result = engine.generate(prompt, **OPTIONS, **sampling)
        assert result.token_ids == right.token_ids
        # a padded pass has a wider mask, over which fp16 rounds drafts otherwise
        assert abs(result.stats.steps - right.stats.steps) <= (precision == "fp16")
    widths = {shape[3] for shape in device.bound["mask"]}
    assert len(widths) > 1 if precision == "fp16" else widths == {256 + 128}
    if cuda_graphs:
        assert device.counts["launched"] > device.counts["captured"] > 0
    else:
        assert device.counts["launched"] == device.counts["captured"] == 0


def test_a_bundle_for_cuda_runs_on_the_cpu(
    folders: dict[str, Path], workshop: Workshop, tmp_path: Path
) -> None:
    """That of float32 is in tests/test_attention.py, with all drafters."""
    plain = on_cpu(workshop.build(tmp_path / "bundle", precision="fp16"), drafter="none")
    for name in (DRAFTERS[0], "none"):
        engine = load(folders["fp16"], "onnxruntime", drafter=name)
        for prompt in PROMPTS:
            expected = plain.generate(prompt, **OPTIONS).token_ids
            assert engine.generate(prompt, **OPTIONS).token_ids == expected


def test_near_ties_are_redone_on_the_device(
    folders: dict[str, Path], device: HostCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strict decoding looks at the rows, whatever the graph found."""
    monkeypatch.setitem(STRICT_GAPS, "fp32", 0.05)
    expected = on_cpu(folders["fp32"], drafter="parallelspec", strict=True)
    engine = load(folders["fp32"], drafter="parallelspec", strict=True)
    right = expected.generate(PROMPTS[0], **OPTIONS)
    assert engine.generate(PROMPTS[0], **OPTIONS).token_ids == right.token_ids
    assert engine.target.num_redone == expected.target.num_redone > 0
    assert engine.target.num_judged == expected.target.num_judged


# ---- what crosses to the host ----


def test_feeds_are_not_written_again_while_they_are_being_read(
    folders: dict[str, Path], device: HostCuda
) -> None:
    """Runs whose results nobody reads are not waited for, but before their feeds change."""
    rng = np.random.default_rng(3)
    chunks = [rng.integers(2, 90, 4).tolist() for _ in range(4)]
    logits = []
    for cuda_graphs in (True, False):
        backend, cache = open_target(folders["fp16"], cuda_graphs=cuda_graphs)
        for tokens in chunks:
            backend.run(step_feeds(cache, tokens, [0, 0, 1, 2]), [])
            assert device.is_busy
            cache.commit(range(4))
            if not cuda_graphs:
                backend.copies.settle()
        logits.append(backend.run(step_feeds(cache, [7], [0]), ["logits"])["logits"].copy())
    assert np.array_equal(logits[0], logits[1])


@pytest.mark.parametrize("num_top", [4, 64])
def test_draws_mostly_fetch_the_largest_logits(
    workshop: Workshop,
    device: HostCuda,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    num_top: int,
) -> None:
    """Where those do not settle a draw, the whole row is fetched; tokens are the same."""
    from spec_export.build import make_bundle

    sampling_graph = partial(make_bundle.sampling_graph, most=num_top)
    monkeypatch.setattr(make_bundle, "sampling_graph", sampling_graph)
    folder = workshop.build(tmp_path / "bundle", precision="fp16", device="cuda")
    engine, expected = load(folder, drafter="none"), on_cpu(folder, drafter="none")
    num_rows = num_tokens = 0
    for seed in range(4):
        for sampling in ({}, {"top_k": 3}, {"temperature": 0.3, "top_p": 0.5}):
            options = OPTIONS | {"temperature": 1.0, "seed": seed} | sampling
            before, result = device.counts["bytes down"], engine.generate(PROMPTS[0], **options)
            assert result.token_ids == expected.generate(PROMPTS[0], **options).token_ids
            tokens = len(result.token_ids)
            rows = device.counts["bytes down"] - before - (12 * num_top + 4) * tokens
            assert rows % (4 * engine.target.vocab_size) == 0
            num_rows += rows // (4 * engine.target.vocab_size)
            num_tokens += tokens
    assert 0 < num_rows < num_tokens


def test_a_verified_tree_is_read_row_by_row(folders: dict[str, Path], device: HostCuda) -> None:
    tree = TokenTree(np.array([5, 6, 7, 8]), np.array([0, 0, 0, 1]))
    info = bundles.read(folders["fp16"]).manifest.target
    verified = []
    for how in ("onnxruntime", "cuda"):
        backend, cache = open_target(folders["fp16"], how)
        target = Target(backend, cache, vocab_size=info.dims.vocab_size, max_length=info.max_length)
        target.prefill([2, 3, 4])
        verified.append(target.verify(tree))
    right, got = verified
    before = device.counts["bytes down"]
    assert np.array_equal(got.row(2), right.row(2))
    assert np.array_equal(got.row(2), right.row(2))
    assert device.counts["bytes down"] - before == 4 * info.dims.vocab_size, "once"
    assert got.argmax_N.tolist() == right.argmax_N.tolist()
    assert device.counts["bytes down"] - before == 4 * info.dims.vocab_size, "the ids were there"
    assert [got.best(node) for node in range(4)] == right.argmax_N.tolist()
    assert right.best(0) is None
    target.verify(tree)
    with pytest.raises(AssertionError, match="read after the backend's next run"):
        got.row(1)


def test_a_bundle_not_built_for_cuda_has_its_logits_read(
    workshop: Workshop, device: HostCuda
) -> None:
    """A bundle in fp16, without a drafter in float32, runs and fetches rows."""
    folder = workshop.bundle("parallelspec", "fp16")
    expected = on_cpu(folder, drafter="none").generate(PROMPTS[1], **OPTIONS)
    engine = load(folder, drafter="none")
    before, result = device.counts["bytes down"], engine.generate(PROMPTS[1], **OPTIONS)
    assert result.token_ids == expected.token_ids
    row = 4 * engine.target.vocab_size
    assert device.counts["bytes down"] - before == row * len(result.token_ids)
    tree = TokenTree.chain([4, 5])
    assert engine.target.verify(tree).argmax_N.shape == (2,)


def test_logits_that_are_not_finite_are_an_error(
    folders: dict[str, Path], device: HostCuda
) -> None:
    engine = load(folders["fp16"], drafter="none")
    backend: Any = engine.target.lend()[0]
    engine.generate(PROMPTS[0], max_new_tokens=2)
    cache = backend.buffers["kv.0.v"]
    cache.update_inplace(np.full(cache.shape(), np.nan, np.float16))
    with pytest.raises(FloatingPointError, match="logits are not finite at position"):
        engine.generate(PROMPTS[0] + "x", max_new_tokens=8)


class Watched(ProposerWrapper):
    """A proposer that keeps tokens and parents of each tree."""

    def __init__(self, proposer: Any) -> None:
        super().__init__(proposer)
        self.trees: list[tuple[list[int], list[int]]] = []

    def drafting(self, token: int, budget: Budget) -> Drafting:
        tree = yield from super().drafting(token, budget)
        self.trees.append((tree.token_N.tolist(), tree.parent_N.tolist()))
        return tree


@pytest.fixture(scope="module")
def without_banks(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds a bundle for CUDA whose features and states go by the host."""
    from spec_export.build import make_bundle

    with pytest.MonkeyPatch.context() as patch:
        for name in ("keep_target", "keep_drafter"):
            patch.setattr(make_bundle, name, lambda model, *rest, **named: model)
        out = tmp_path_factory.mktemp("without") / "b"
        return workshop.build(out, *DRAFTERS, device="cuda")


@pytest.mark.parametrize("name", DRAFTERS)
def test_features_and_states_stay_on_the_device(
    folders: dict[str, Path],
    without_banks: Path,
    device: HostCuda,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """Guesses are those made by way of the host, over several requests of which each goes on from
    the one before."""
    real, fetched = device_runs.DeviceRuns.start, set()

    def run(self: Any, feeds: Any, outputs: Any, kept: Any) -> Any:
        fetched.update(outputs)
        assert "features" not in feeds
        assert "state" not in feeds
        return real(self, feeds, outputs, kept)

    by_host, banked = on_cpu(without_banks, drafter=name), load(folders["fp16"], drafter=name)
    assert by_host.proposer.wants_features
    assert not banked.proposer.wants_features
    expected, engine = by_host.observed(Watched), banked.observed(Watched)
    monkeypatch.setattr(device_runs.DeviceRuns, "start", run)
    prompt = PROMPTS[0]
    for _ in range(3):
        right, result = (each.generate(prompt, **OPTIONS) for each in (expected, engine))
        assert result.token_ids == right.token_ids
        assert result.stats.reused_tokens == right.stats.reused_tokens
        prompt += right.text + PROMPTS[1]
    assert engine.proposer.trees == expected.proposer.trees  # type: ignore[attr-defined]
    assert max(len(tokens) for tokens, _ in engine.proposer.trees) > 4  # type: ignore[attr-defined]
    assert right.stats.reused_tokens > 0
    pairs = {"pair_log_probs"} & fetched  # of a drafter whose guesses know each other
    assert fetched - pairs == {"argmax_ids", "guess_ids", "guess_log_probs"}


# ---- CUDA graphs ----


@pytest.mark.parametrize("precision", BUILDS)
def test_a_capture_leaves_all_rows_as_they_are(
    folders: dict[str, Path], device: HostCuda, precision: str
) -> None:
    """Nothing runs meanwhile, and padding rows must not be anything new."""
    captured = open_target(folders[precision])
    eager = open_target(folders[precision], cuda_graphs=False)
    rng = np.random.default_rng(0)
    for _ in range(6):
        tokens, path = rng.integers(2, 90, 6).tolist(), [0, 2, 3, 5]
        logits = []
        for backend, cache in (captured, eager):
            outputs = backend.run(
                step_feeds(cache, tokens, [0, 0, 0, 2, 3, 3]), ["logits", "features"]
            )
            logits.append((outputs["logits"], outputs["features"]))
            cache.commit(path)
        assert all(np.array_equal(a, b) for a, b in zip(*logits, strict=True))
        for name, value in captured[0].buffers.items():
            rows = eager[0].buffers[name].numpy()
            n = captured[1].length - len(path) + len(tokens)
            used = np.s_[:, :, :n] if name.startswith("kv.") else np.s_[:n]
            assert np.array_equal(value.numpy()[used], rows[used]), name
    assert device.counts["captured"] > 0


def test_a_run_is_started_and_waited_for_apart(folders: dict[str, Path], device: HostCuda) -> None:
    backend, cache = open_target(folders["fp16"])
    assert isinstance(backend, DeviceBackend)
    feeds = step_feeds(cache, [5, 6], [0, 0])
    expected = backend.run(feeds, ["logits"])["logits"].copy()
    for _ in range(3):
        finish = backend.start(feeds, ["logits"])
        assert device.is_busy
        assert np.array_equal(finish()[0]["logits"], expected)
        assert not device.is_busy


def test_few_shapes_are_captured_however_wide_the_trees_are(
    folders: dict[str, Path], device: HostCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So most runs are replays, in the same number of steps."""
    replayed = []
    for widths in (pad_rows.WIDTHS, tuple(range(1, 65))):
        monkeypatch.setattr(pad_rows, "WIDTHS", widths)
        device.bound.clear()
        device.counts.clear()
        engine = load(folders["fp16"], drafter="eagle")
        results = [engine.generate(prompt, **OPTIONS) for prompt in PROMPTS]
        replays, eager = device.counts["launched"], device.counts["eager"]
        replayed.append(replays / (replays + eager))
        rows = {shape[1] for shape in device.bound["input_ids"]}
        assert {n for n in rows if n <= 64} <= set(widths)
        replayed.append(sum(result.stats.steps for result in results))
    few, steps, many, same_steps = replayed
    assert steps == same_steps
    assert 1 - few < 0.6 * (1 - many), "not fewer eager runs"


@pytest.mark.parametrize("name", ["parallelspec", "eagle", "none"])
def test_what_requests_replay_is_captured_while_the_bundle_opens(
    folders: dict[str, Path],
    device: HostCuda,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    monkeypatch.setattr(shapes, "MIN_MASK", 128)  # for a context of 256 tokens
    monkeypatch.setattr(warm_up, "LONG", 90)
    monkeypatch.setattr(warm_up, "capture_shapes", capture_shapes)
    with caplog.at_level("INFO", "spec_runtime"):
        engine = load(folders["fp16"], drafter=name)
    assert caplog.messages[-1].startswith("captured CUDA graphs in ")
    assert device.counts["captured"] >= 4
    device.counts.clear()
    results = [engine.generate(prompt, **OPTIONS) for prompt in PROMPTS]
    assert device.counts["launched"] >= sum(result.stats.steps for result in results)
    assert device.counts["eager"] == device.counts["captured"] == 0
    on_host = [on_cpu(folders["fp16"], drafter=name).generate(p, **OPTIONS) for p in PROMPTS]
    assert [each.token_ids for each in results] == [each.token_ids for each in on_host]


# ---- masks no wider than they need be ----


def test_masks_are_cut_to_widths_that_double(folders: dict[str, Path], device: HostCuda) -> None:
    widths = [shapes.mask_width(n, 2176) for n in (1, 256, 257, 512, 513, 2048, 2049, 2176)]
    assert widths == [256, 256, 512, 512, 1024, 2048, 2176, 2176]
    assert shapes.mask_width(7, 100) == 100
    backend, cache = open_target(folders["fp16"])
    for length in (192, 63, 1, 1):
        backend.run(step_feeds(cache, [5] * length, [max(i - 1, 0) for i in range(length)]), [])
        cache.commit(range(length))
    backend.copies.settle()
    assert [shape[3] for shape in device.bound["mask"]] == [256, 256, 256, 384]


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_narrow_mask_changes_nothing(
    workshop: Workshop, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GroupQueryAttention then reads fewer rows than the cache has. Tested on the CPU."""
    opened = bundles.read(workshop.bundle("parallelspec", precision))
    graph = opened.manifest.graphs["target"]
    backend = CpuBackend(opened.path / graph.file, graph, 384, 1)
    cache, names, cut = open_cache("slots", 384), ["logits", "features"], []

    def width_of(num_slots: int, capacity: int) -> int:
        cut.append(num_slots)
        return num_slots if is_narrow else capacity

    monkeypatch.setattr(cpu, "mask_width", width_of)
    for n in (20, 4, 9, 30):
        feeds = step_feeds(cache, list(range(2, 2 + n)), [max(i // 2 - 1, 0) for i in range(n)])
        is_narrow = False
        expected = {name: array.copy() for name, array in backend.run(feeds, names).items()}
        is_narrow = True
        got = backend.run(feeds, names)
        assert all(np.array_equal(got[name], expected[name]) for name in names)
        assert cut[-1] == int(feeds["seqlens_k"][0]) + 1 < 384
        cache.commit([0, n // 2])


# ---- what a build for CUDA writes ----


def test_all_graphs_are_in_the_form_and_type_that_cuda_has_kernels_for(
    folders: dict[str, Path], workshop: Workshop
) -> None:
    on_cpu = bundles.read(workshop.bundle("parallelspec", "fp16")).manifest.graphs["target"]
    assert "argmax_ids" not in [spec.name for spec in on_cpu.outputs]
    for precision, attention in BUILDS.items():
        manifest = bundles.read(folders[precision]).manifest
        graphs = [manifest.graphs["target"]]
        for info in manifest.drafters:
            graphs += info.graphs.values() if info.name in DRAFTERS else ()
        cached = [graph for graph in graphs if graph.form != "stateless"]
        assert {(graph.form, graph.attention) for graph in cached} == {("slots", attention)}
        types = {s.dtype for graph in cached for s in graph.inputs if s.name.startswith("kv.")}
        assert types == {"float16" if precision == "fp16" else "float32"}
        assert len(cached) == 5
        assert TensorSpec("argmax_ids", "int64", ("M",)) in graphs[0].outputs
        assert not {"top_ids", "logsumexp"} & {spec.name for spec in graphs[0].outputs}
        sampling = manifest.graphs["sampling"]
        assert [spec.name for spec in sampling.inputs] == ["logits"]
        assert TensorSpec("logsumexp", "float32", ("M",)) in sampling.outputs


NEGATED = "negated (float[M, 4] x) => (float[M, 4] logits) { logits = Neg(x) }"


def test_the_graph_finds_the_first_largest(folders: dict[str, Path]) -> None:
    """It returns -1 where there is none."""
    import onnx_ir as ir

    from spec_export.graphs.banks import add_argmax

    session = session_of(ir.to_proto(add_argmax(ir.from_proto(model_of(NEGATED)))))
    inf, nan = np.inf, np.nan
    x = [[3, 1, 2, 1], [0, 0, 0, 0], [1, 2, -inf, 3], [inf] * 4, [1, 2, 3, -7], [nan] * 4]
    logits, ids = session.run(["logits", "argmax_ids"], {"x": np.array(x, np.float32)})
    assert ids.tolist() == [1, 0, -1, -1, 3, -1]
    assert logits.shape == (6, 4)


def test_the_graph_finds_the_largest_and_the_whole() -> None:
    import onnx_ir as ir

    from spec_export.graphs.banks import sampling_graph

    inf, nan = np.inf, np.nan
    rows = [[-3, 1, -2, 4], [-900, 900, 0, 0], [-inf, 2, -inf, 1]]
    broken = [[nan, 1, 2, 3], [1, 2, 3, nan], [inf, 1, 2, 3], [nan, inf, 1, 2], [-inf] * 4]
    for most in (2, 9):
        session = session_of(ir.to_proto(sampling_graph(4, most)))
        ids, top, whole = session.run(TOP, {"logits": np.array(rows + broken, np.float32)})
        assert ids.shape == top.shape == (8, min(most, 4))
        assert ids[:3, :2].tolist() == [[3, 1], [1, 2], [1, 3]]
        assert top[:3, :2].tolist() == [[4, 1], [900, 0], [2, 1]]
        sums = [np.log(np.exp(logits).sum()) for logits in ([-3.0, 1, -2, 4], [2.0, 1])]
        assert whole[:3] == pytest.approx([sums[0], 900, sums[1]])
        assert not np.isfinite(whole[3:]).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "int8"], "got precision int8 with device cuda, expected fp16, bf16 or"),
        (["--precision", "int4"], "got precision int4 with device cuda, expected fp16, bf16 or"),
        (["--backend", "tensorrt"], "got device cuda with backend tensorrt, expected onnxruntime"),
    ],
)
def test_what_cuda_does_not_run_is_not_built(
    workshop: Workshop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    from spec_export import cli

    capsys.readouterr()
    out = tmp_path / "bundle"
    known = ["--model", str(workshop.llama()), "--device", "cuda", "--out", str(out)]
    with pytest.raises(SystemExit) as end:
        cli.main(["build", *known, *arguments])
    captured = capsys.readouterr()
    assert (end.value.code, captured.out, out.exists()) == (2, "", False)
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1


# ---- details ----


@pytest.mark.parametrize("lent", [(), ("share",), ("share", "banks")])
def test_rows_are_moved_in_the_buffers_of_ones_own(tmp_path: Path, lent: tuple[str, ...]) -> None:
    """Of every type and width; a bank that is not by slot stays."""
    shapes_of: dict[str, tuple[str, tuple[int | str, ...]]] = {
        "kv.0.k": ("float16", (1, 2, "S", 6)),
        "kv.positions": ("int64", (1, 1, "S", 1)),
        "bank.features": ("float32", ("S", 3)),
        "bank.hidden": ("float32", (9, 3)),
    }
    specs = tuple(TensorSpec(name, *shapes_of[name]) for name in shapes_of)
    inputs = ", ".join(f'{s.dtype}{[*s.shape]} "{s.name}"' for s in specs).replace("'", "")
    text = f"g ({inputs}, int64[N] x) => (int64[N] y) {{ y = Identity(x) }}"
    text = text.replace("float32", "float")
    onnx.save(model_of(text), tmp_path / "g.onnx")
    x, y = (TensorSpec(name, "int64", ("N",)) for name in "xy")
    graph = Graph("g.onnx", "slots", (*specs, x), (y,), attention="append")
    lender = CpuBackend(tmp_path / "g.onnx", graph, 9, 1)
    backend = CpuBackend(tmp_path / "g.onnx", graph, 9, 1, **dict.fromkeys(lent, lender))
    before = {}
    for seed, (name, value) in enumerate(backend.buffers.items()):
        drawn = np.random.default_rng(seed).integers(1, 99, value.shape())
        before[name] = drawn.astype(value.numpy().dtype)
        value.update_inplace(type(value).ortvalue_from_numpy(before[name]))
    backend.move_rows(np.array([1, 4, 5, 8]))
    for name, value in backend.buffers.items():
        is_lent = ("share" if name.startswith("kv.") else "banks") in lent
        stays = is_lent or name == "bank.hidden"
        rows = slice(None) if stays else [1, 4, 5, 8]
        expected = before[name][..., rows, :]
        assert np.array_equal(value.numpy()[..., : expected.shape[-2], :], expected), name


def test_a_bfloat16_cache_starts_at_zero(tmp_path: Path) -> None:
    """numpy has no such type, so the buffer is made in another way."""
    cache = "bfloat16[1, 1, S, 3]"
    step = '{ "kv.0.k.out" = Identity("kv.0.k") }'
    model = model_of(f'g ({cache} "kv.0.k") => ({cache} "kv.0.k.out") {step}')
    onnx.save(model, tmp_path / "g.onnx")
    specs = [TensorSpec(name, "bfloat16", (1, 1, "S", 3)) for name in ("kv.0.k", "kv.0.k.out")]
    graph = Graph("g.onnx", "slots", (specs[0],), (specs[1],))
    value = CpuBackend(tmp_path / "g.onnx", graph, 5, 1).buffers["kv.0.k"]
    assert (value.data_type(), value.shape()) == ("tensor(bfloat16)", [1, 1, 5, 3])
    assert ctypes.string_at(value.data_ptr(), 30) == bytes(30)


def test_lanes_and_buffers_are_sized_by_the_devices_memory(
    folders: dict[str, Path], device: HostCuda
) -> None:
    engine = load(folders["fp16"], drafter="none")
    lane = engine.lanes.bytes("none")
    device.free_bytes = 2 * lane
    assert engine.most_parallel == 2
    device.free_bytes = lane // 2
    assert engine.most_parallel == 1
    with pytest.raises(UserError, match=r"expected at most the .* free on the GPU; take a shorter"):
        load(folders["fp16"], drafter="none")
