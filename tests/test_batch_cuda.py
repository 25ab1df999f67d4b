"""Tests that calls which share passes on a GPU get what each gets by itself.

Our code for CUDA drives ONNX Runtime's CPU provider here, see tests/host_cuda.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from contract import PROMPTS
from host_cuda import HostCuda, step_feeds
from tiny_target import save_llama
from workshop import FluentWorkshop

import spec_runtime
from spec_export.build import make_bundle
from spec_export.build.make_bundle import BuildOptions
from spec_runtime import backends
from spec_runtime.backends import GraphRun, shapes
from spec_runtime.backends.lanes import LanePasses
from spec_runtime.batch.batch import Batch, Found
from spec_runtime.bundle import manifest as bundles
from spec_runtime.loop.reading import read_result
from spec_runtime.loop.result import Chunk
from spec_runtime.loop.target import LOGITS, Asked, Target, Wants, verify_together
from spec_runtime.pace.shared import SharedPace
from spec_runtime.proposers.text_index import TextIndex
from spec_runtime.trees.tree import TokenTree

# One of each kind: a cache, states, no cache, the target's cache; tests/test_batch.py has them all.
TRAINED = ("parallelspec", "hydra", "medusa", "skip_layer")
DRAFTERS = (*TRAINED, "prompt_lookup", "none")
SAMPLING: tuple[Any, ...] = ({}, {"temperature": 0.8, "seed": 5})
NUM_LANES = 3
RUNS = ("eager", "captured", "launched")
# What a lane asks for: a tree; the same with the largest logits; the end of a chunk of a prompt,
# which is wider than what is captured.
TREE = TokenTree(np.array([5, 6, 7, 8, 9]), np.array([0, 0, 0, 1, 1]))
WIDE = TokenTree.chain([i % 90 for i in range(70)])
ASKED: dict[str, list[Asked]] = {
    "trees": [Asked(TREE), Asked(TokenTree.chain([4]))],
    "draws": [Asked(TREE), Asked(TREE, Wants(top=True))],
    "a chunk": [Asked(TREE, Wants(features=("features",))), Asked(WIDE, LOGITS, True)],
}


@pytest.fixture(scope="module")
def fluent_folder(fluent: FluentWorkshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns an fp32 bundle for CUDA with graphs for up to three lanes."""
    out = tmp_path_factory.mktemp("lanes") / "bundle"
    options: dict[str, Any] = {"device": "cuda", "precision": "fp32", "lanes": NUM_LANES}
    return fluent.build(out, *TRAINED, **options)


@pytest.mark.parametrize("name", DRAFTERS)
def test_each_answer_is_the_one_it_gets_by_itself(
    fluent_folder: Path, device: HostCuda, name: str
) -> None:
    engine = spec_runtime.load(fluent_folder, name, backend="cuda", threads=1)
    for sampling in SAMPLING:
        options = {"max_new_tokens": 16, "ignore_eos": True, **sampling}
        alone = [engine.generate(prompt, **options) for prompt in PROMPTS]
        together = engine.generate_many(PROMPTS, parallel=NUM_LANES, **options)
        assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert device.bound["mask.lane1"]


def test_drafts_of_lanes_are_in_flight_together(fluent_folder: Path, device: HostCuda) -> None:
    options: Any = {"backend": "cuda", "threads": 1, "lookup": False}
    engine = spec_runtime.load(fluent_folder, "parallelspec", **options)
    passes, num_busy = engine.lanes.passes, []
    assert passes is not None
    run_drafts = passes.run_drafts

    def noted(runs: Sequence[GraphRun]) -> None:
        num_busy.append((len(runs), sum(map(bool, device.queues.values()))))
        run_drafts(runs)

    passes.run_drafts = noted
    engine.generate_many(PROMPTS, parallel=NUM_LANES, max_new_tokens=24, ignore_eos=True)
    assert (NUM_LANES, NUM_LANES) in num_busy
    assert all(busy == num_runs for num_runs, busy in num_busy)


@pytest.mark.parametrize("num_lanes", [1, NUM_LANES])
def test_text_and_index_are_made_while_the_device_runs(
    fluent_folder: Path, device: HostCuda, num_lanes: int
) -> None:
    """The text of a pass while the next one runs, and the index of lookup while the drafter does;
    only what ends an answer comes after all passes."""
    engine = spec_runtime.load(fluent_folder, "parallelspec", backend="cuda", threads=1)
    options: Any = {"max_new_tokens": 24, "ignore_eos": True}
    expected = [engine.generate(prompt, **options).text for prompt in PROMPTS[:num_lanes]]
    calls = [engine.prepare(prompt, reuse=False, **options) for prompt in PROMPTS[:num_lanes]]
    extend, decode = TextIndex.extend, engine.tokenizer.decode
    indexed, decoded, given = list[bool](), list[bool](), dict[int, list[bool]]()

    def noted_extend(index: TextIndex, tokens: Sequence[int]) -> None:
        if tokens and engine.target.length:  # it has begun
            indexed.append(device.is_busy)
        extend(index, tokens)

    def noted_decode(ids: Sequence[int]) -> str:
        decoded.append(device.is_busy)
        return decode(ids)

    def give(found: Found) -> None:
        number, chunk = found
        assert isinstance(chunk, Chunk)
        given.setdefault(number, []).append(device.is_busy)
        texts[number] += chunk.text

    batch, texts = Batch(engine, num_lanes), [""] * num_lanes
    with pytest.MonkeyPatch.context() as patch:
        for number, call in enumerate(calls):
            batch.begin(batch._lanes[number], number, call)
            patch.setattr(call.text, "_decode", noted_decode)
        patch.setattr(TextIndex, "extend", noted_extend)
        while batch.num_active:
            batch.turn(give)
    assert texts == expected
    assert all(sum(busy) >= len(busy) - 2 > 1 for busy in given.values())
    assert sum(indexed) > len(indexed) / 2  # while drafting pauses nothing runs
    assert sum(decoded) > len(decoded) / 2
    decoded.clear()
    alone = engine.prepare(PROMPTS[0], reuse=False, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alone.text, "_decode", noted_decode)
        read_result(engine.answering(alone))
    assert sum(decoded) > len(decoded) / 2


def test_the_pace_learns_from_replayed_passes_only(
    fluent_folder: Path, device: HostCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_slow, learnt = [False], []
    run, add = LanePasses.run, SharedPace.add

    def noted_run(*arguments: Any) -> Any:
        before = device.counts["eager"] + device.counts["captured"]
        found = run(*arguments)
        is_slow.append(device.counts["eager"] + device.counts["captured"] > before)
        return found

    def noted_add(pace: SharedPace, num_requests: int, *more: Any) -> None:
        learnt.extend([is_slow[-1]] * (num_requests > 1))
        add(pace, num_requests, *more)

    monkeypatch.setattr(LanePasses, "run", noted_run)
    monkeypatch.setattr(SharedPace, "add", noted_add)
    engine = spec_runtime.load(fluent_folder, "hydra", backend="cuda", threads=1)
    engine.generate_many(PROMPTS, parallel=NUM_LANES, max_new_tokens=32, ignore_eos=True)
    assert any(is_slow)
    assert learnt
    assert not any(learnt)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns a bundle in each precision, whose targets have windows beside whole layers."""
    folder = tmp_path_factory.mktemp("targets")
    windows: dict[str, Any] = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
    }
    saved = save_llama(folder / "model", family="ministral", head_dim=8, **windows)
    return {
        precision: make_bundle.build(
            BuildOptions(
                str(saved),
                ["prompt_lookup"],
                precision=precision,
                max_length=200,
                device="cuda",
                out=folder / precision,
                lanes=2,
            )
        )
        for precision in ("fp16", "fp32")
    }


def open_targets(folder: Path, cuda_graphs: bool) -> list[Target]:
    """Returns two targets that have read prompts of different lengths."""
    options: Any = {"threads": 1, "backend": "cuda", "cuda_graphs": cuda_graphs}
    targets = [spec_runtime.load(folder, "none", **options).target for _ in range(2)]
    for target, length in zip(targets, (9, 33), strict=True):
        target.prefill([i % 90 for i in range(length)])
    return targets


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("what", ASKED)
def test_a_shared_pass_says_what_each_lanes_own_says(
    folders: dict[str, Path],
    device: HostCuda,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    cuda_graphs: bool,
    what: str,
) -> None:
    monkeypatch.setattr(shapes, "MIN_MASK", 16)  # so that masks have several widths
    targets, asked = open_targets(folders[precision], cuda_graphs), ASKED[what]
    bundle = bundles.read(folders[precision])
    runtime = backends.Runtime("cuda", 1, cuda_graphs)
    passes = backends.open_lanes(bundle, runtime)
    tolerance = 2e-2 if precision == "fp16" else 1e-5
    counts = []
    for _ in range(4):
        before = device.counts.copy()
        verified = verify_together(passes, targets, asked)
        counts.append([device.counts[what] - before[what] for what in RUNS])
        found = read(verified, asked)
        alone = [target.verify(*each) for target, each in zip(targets, asked, strict=True)]
        expected = read(alone, asked)
        for got, right in zip(found, expected, strict=True):
            assert got.keys() == right.keys()
            for name in got:
                assert got[name] == pytest.approx(right[name], abs=tolerance), name
    is_captured = cuda_graphs and what != "a chunk"
    own = sorted(each.tree.num_nodes for each in asked)
    capacity = 200 + bundle.manifest.target.scratch
    seen = capacity if precision == "fp32" else {"a chunk": 128}.get(what, 64)
    masks = zip(device.bound["mask.lane0"], device.bound["mask.lane1"], strict=True)
    for each in masks:  # lanes come in an order of their own
        assert sorted(each) == [(1, 1, 16 if is_captured else n, seen) for n in own]
    kinds = 2 if what == "draws" else 1  # the pass, and the graph of the largest logits
    if is_captured:
        assert counts == [[kinds, 0, 0], [0, kinds, kinds], [0, 0, kinds], [0, 0, kinds]]
    else:
        assert counts == [[kinds, 0, 0]] * 4


def test_a_shared_pass_waits_for_what_lanes_have_on_their_streams(
    folders: dict[str, Path], device: HostCuda
) -> None:
    targets, asked = open_targets(folders["fp32"], True), ASKED["trees"]
    passes = backends.open_lanes(bundles.read(folders["fp32"]), backends.Runtime("cuda", 1))
    for target in targets:
        backend, cache = target.lend()
        backend.run(step_feeds(cache, [7, 8], [0, 0]), [])
        cache.commit([0, 1])
    assert device.is_busy
    found = read(verify_together(passes, targets, asked), asked)
    alone = [target.verify(*each) for target, each in zip(targets, asked, strict=True)]
    for got, right in zip(found, read(alone, asked), strict=True):
        assert got["logits"] == pytest.approx(right["logits"], abs=1e-5)


def read(verified: Sequence[Any], asked: Sequence[Asked]) -> list[dict[str, np.ndarray]]:
    """Returns copies of what each lane was told."""
    found = []
    for each, (tree, wants, last_only, _) in zip(verified, asked, strict=True):
        rows = range(1 if last_only else tree.num_nodes)
        told = {"logits": np.array([each.row(i) for i in rows])}
        told["best"] = np.array([each.best(i) or -1 for i in rows])
        if wants.features:
            told["features"] = each.features(rows)
        if wants.top:
            told["logsumexp"] = np.array([each.top(i).logsumexp for i in rows])
            told["ids"] = np.array([each.top(i).id_K[0] for i in rows])
        found.append(told)
    return found


def test_only_ids_come_to_the_host(folders: dict[str, Path], device: HostCuda) -> None:
    targets = open_targets(folders["fp16"], True)
    passes = backends.open_lanes(bundles.read(folders["fp16"]), backends.Runtime("cuda", 1))
    before = device.counts["bytes down"]
    first, second = verify_together(passes, targets, ASKED["trees"])
    assert first.argmax_N.shape == (5,)
    assert second.argmax_N.shape == (1,)
    assert device.counts["bytes down"] - before == 2 * 16 * 8, "sixteen ids a lane"
    first.row(3)
    assert device.counts["bytes down"] - before == 2 * 16 * 8 + 4 * targets[0].vocab_size
    verify_together(passes, targets, ASKED["trees"])
    with pytest.raises(AssertionError, match="read after the backend's next run"):
        first.row(1)


def test_tensorrt_has_no_shared_passes(folders: dict[str, Path]) -> None:
    bundle = bundles.read(folders["fp32"])
    assert backends.open_lanes(bundle, backends.Runtime("tensorrt", 1)) is None
