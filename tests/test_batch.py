"""Tests that calls which are decoded together get what each gets by itself: with every drafter,
greedy and seeded, whatever joins and leaves."""

import random
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

from contract import PROMPTS
from gates import PATIENCE, wait_until
from small import raising
from tiny_target import save_llama
from workshop import FluentWorkshop

import spec_runtime
from spec_export import drafters
from spec_export.build import make_bundle
from spec_export.build.make_bundle import BuildOptions
from spec_runtime.backends import GraphRun
from spec_runtime.backends.cpu import backend as cpu
from spec_runtime.backends.cpu.joint_runs import JointRuns
from spec_runtime.batch.batch import Batch, Pass
from spec_runtime.bundle import manifest as bundles
from spec_runtime.bundle.manifest import Bundle, Graph, lanes_name
from spec_runtime.errors import UserError
from spec_runtime.kernels.library import WANTED, library
from spec_runtime.loop.generate import PromptScores
from spec_runtime.loop.options import CallOptions
from spec_runtime.pace.shared import SharedPace
from spec_runtime.sampling import token_logprob
from spec_runtime.trees.tree import TokenTree

DRAFTERS = [*drafters.trainable(), "prompt_lookup", "lookahead", "none"]
PROFILED = ("parallelspec", "eagle", "prompt_lookup")  # which pause, and have their trees cut
SAMPLING: list[CallOptions] = [{}, {"temperature": 0.8, "seed": 6, "top_k": 20, "top_p": 0.9}]
OPTIONS: list[CallOptions] = [
    {"max_new_tokens": 24, "ignore_eos": True, **sampling} for sampling in SAMPLING
]
Answers = list[list[spec_runtime.GenerationResult]]
# Drafters whose graphs take the rows of one conversation only.
BY_THEMSELVES = ("medusa", "amphista", "dflash")
# Five calls on three lanes: two begin where others have ended.
MANY = [*PROMPTS, "say abc, 3 say"]
NUM_LANES = 3
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 5}


@pytest.fixture(scope="module")
def folder(fluent: FluentWorkshop) -> Path:
    """Returns an fp32 bundle with every drafter and graphs for up to three lanes."""
    return fluent.every(lanes=NUM_LANES)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Answers:
    """Returns what plain decoding answers to each of MANY by itself, by each sampling."""
    engine = spec_runtime.load(folder, "none", threads=1)
    return [[engine.generate(prompt, **each) for prompt in MANY] for each in OPTIONS]


@pytest.mark.parametrize(
    "name", [*DRAFTERS, *(pytest.param(each, marks=pytest.mark.profiled) for each in PROFILED)]
)
def test_each_answer_is_the_one_it_gets_by_itself(folder: Path, plain: Answers, name: str) -> None:
    engine = spec_runtime.load(folder, name, threads=1)
    for options, alone in zip(OPTIONS, plain, strict=True):
        together = engine.generate_many(MANY, parallel=NUM_LANES, **options)
        assert [each.token_ids for each in together] == [each.token_ids for each in alone]
        assert [each.text for each in together] == [each.text for each in alone]
        if name in drafters.trainable():
            assert max(each.stats.accepted_length for each in together) > 1


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_below_fp32_answers_are_those_of_plain_decoding(
    fluent: FluentWorkshop, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With native operators, whose rows depend on no other rows and on no slots."""
    if library() is None:
        pytest.skip("no C compiler here")
    monkeypatch.setenv(WANTED, "1")
    out = fluent.build(tmp_path / "bundle", "parallelspec", precision=precision, lanes=NUM_LANES)
    prompts = [10 * MANY[0], *MANY]  # one of several chunks
    plain = spec_runtime.load(out, "none", threads=1)
    expected = [[plain.generate(each, **some).token_ids for each in prompts] for some in OPTIONS]
    for name in ("none", "parallelspec", "prompt_lookup"):
        engine = spec_runtime.load(out, name, threads=2)
        for options, answers in zip(OPTIONS, expected, strict=True):
            alone = [engine.generate(prompt, **options) for prompt in prompts]
            together = engine.generate_many(prompts, parallel=NUM_LANES, **options)
            assert [each.token_ids for each in alone] == answers
            assert [each.token_ids for each in together] == answers
        if name == "parallelspec":
            assert max(each.stats.accepted_length for each in together) > 1


@pytest.mark.parametrize("name", drafters.trainable())
def test_drafters_run_together_and_each_gets_its_own(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, names, joints = set[int](), set[str](), set[JointRuns]()
    run_together = JointRuns._run_together

    def compare(joint: JointRuns, runs: Sequence[GraphRun]) -> None:
        run_together(joint, runs)
        found = [{name: rows.copy() for name, rows in run.results.items()} for run in runs]
        for run, got in zip(runs, found, strict=True):
            run.run()  # writes the same rows again
            assert [*got] == [*run.outputs]
            for name, rows in run.results.items():
                np.testing.assert_allclose(got[name], rows, rtol=1e-4, atol=1e-4, err_msg=name)
        joints.add(joint)
        numbers.add(len(runs))
        names.update(run.outputs if len(runs) > 1 else ())

    monkeypatch.setattr(JointRuns, "_run_together", compare)
    engine = spec_runtime.load(folder, name, threads=1)
    engine.generate_many(MANY, parallel=NUM_LANES, max_new_tokens=12, ignore_eos=True)
    for thread in [each for joint in joints for each in joint.opening.values()]:
        thread.join()
    engine.generate_many(MANY, parallel=NUM_LANES, max_new_tokens=12, ignore_eos=True)
    assert max(numbers) == (1 if name in BY_THEMSELVES else NUM_LANES)
    assert ("pair_log_probs" in names) == (name in ("parallelspec", "peagle", "pard"))


def test_calls_of_all_kinds_join_and_leave_at_any_time(folder: Path) -> None:
    """Some end early, by stop strings, limits and events; some before they begin."""
    engine = spec_runtime.load(folder, "parallelspec", threads=1)
    rng = random.Random(0)
    calls, expected = [], []
    for i in range(24):
        prompt = rng.choice(MANY)
        options: dict[str, Any] = {"max_new_tokens": rng.choice([1, 5, 17, 40])}
        if i % 3 == 0:
            options |= {"temperature": 0.7, "seed": i}
        if i % 4 == 1:
            options["stop"] = "a"
        if i % 5 == 2:
            options["logprobs"] = 2
        if i % 8 == 3:
            options["presence_penalty"] = 0.5
        expected.append(engine.generate(prompt, **options))
        if i % 6 == 5:
            event = threading.Event()
            event.set()
            options["cancel"] = event
        calls.append(engine.prepare(prompt, **options))
    batch, passes = Batch(engine, NUM_LANES), list[Pass]()
    batch.on_pass = passes.append
    results: dict[int, Any] = {}
    texts = [""] * len(calls)
    for number, chunk in batch.answer(calls):
        texts[number] += chunk.text
        if chunk.result is not None:
            results[number] = chunk.result
    assert sorted(results) == list(range(len(calls)))
    for i, result in results.items():
        assert texts[i] == result.text
        if i % 6 == 5:
            assert (result.finish_reason, result.token_ids) == ("cancelled", [])
        else:
            assert result.token_ids == expected[i].token_ids, i
            assert result.finish_reason == expected[i].finish_reason
    assert sum(each.rows for each in passes) > 2 * len(passes)  # they did share passes


def test_prompts_are_scored_in_passes_that_others_share(folder: Path) -> None:
    """Each prompt's log-probabilities are those of a pass by itself, and the answers too."""
    engine = spec_runtime.load(folder, "parallelspec", threads=1)
    options: CallOptions = {"max_new_tokens": 20, "ignore_eos": True, "reuse": False}
    calls = [engine.prepare(prompt, **options) for prompt in MANY]
    expected = [engine.generate(prompt, **options).token_ids for prompt in MANY]
    for call in calls[::2]:
        call.scores = PromptScores(1)
    batch, passes = Batch(engine, NUM_LANES), list[Pass]()
    batch.on_pass = passes.append
    tokens: list[list[int]] = [[] for _ in calls]
    for number, chunk in batch.answer(calls):
        tokens[number] += chunk.token_ids
    assert tokens == expected
    assert sum(each.rows for each in passes) > 2 * len(passes)  # they did share passes
    for call in calls[::2]:
        with engine.target.alone():
            verified = engine.target.verify(TokenTree.chain(call.prompt))
            ours = [
                token_logprob(verified.row(row), token, 1).logprob
                for row, token in enumerate(call.prompt[1:])
            ]
        assert call.scores is not None
        assert [each.logprob for each in call.scores.entries] == pytest.approx(ours, abs=1e-4)


def test_nobody_waits_for_a_graph_that_is_being_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes run by themselves until the graph for two is open, then two by two, and so on."""
    may_open = {lanes_name(n): threading.Event() for n in (2, 3)}
    open_lanes = cpu.open_lanes

    def open_late(bundle: Bundle, graph: Graph, *arguments: Any) -> Any:
        known = bundle.manifest.graphs
        name = next(name for name in may_open if known[name].file == graph.file)
        assert may_open[name].wait(PATIENCE)
        return open_lanes(bundle, graph, *arguments)

    monkeypatch.setattr(cpu, "open_lanes", open_late)
    engine = spec_runtime.load(folder, "none", threads=1)
    batch, passes = Batch(engine, 3), list[Pass]()
    batch.on_pass = passes.append
    batch.open_beside(lambda: None)
    batch.open_passes_beside()
    options: CallOptions = {"max_new_tokens": 6, "ignore_eos": True}
    alone = [engine.generate(prompt, **options).token_ids for prompt in PROMPTS[:3]]

    def is_open(most: int) -> bool:
        passes_of = engine.lanes.passes
        return passes_of is not None and passes_of.most_open == most

    for most in (1, 2, 3):
        if most > 1:
            may_open[lanes_name(most)].set()
            wait_until(partial(is_open, most))
        passes.clear()
        calls = [engine.prepare(prompt, **options) for prompt in PROMPTS[:3]]
        found = {n: chunk.result for n, chunk in batch.answer(calls) if chunk.result}
        assert [found[n].token_ids for n in range(3)] == alone
        assert max(each.lanes for each in passes) == most
    batch.end_opening()


def test_nodes_that_do_not_pay_are_cut_before_the_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedPace, "sizes", lambda self, worths, *others: [1] * len(worths))
    engine = spec_runtime.load(folder, "parallelspec", threads=1)
    options: CallOptions = {"max_new_tokens": 12, "ignore_eos": True}
    expected = [engine.generate(prompt, **options).token_ids for prompt in MANY[:NUM_LANES]]
    batch, passes = Batch(engine, NUM_LANES), list[Pass]()
    batch.on_pass = passes.append
    calls = [engine.prepare(prompt, **options) for prompt in MANY[:NUM_LANES]]
    results = {n: chunk.result for n, chunk in batch.answer(calls) if chunk.result}
    assert [results[n].token_ids for n in range(NUM_LANES)] == expected
    shared = [each for each in passes if each.lanes > 1]
    assert sum(each.drafted for each in shared) > 0
    assert {each.granted for each in shared} == {0}


def test_a_graph_that_cannot_be_opened_fails_no_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "open_lanes", raising(UserError("no room")))
    engine = spec_runtime.load(folder, "none", threads=1)
    batch = Batch(engine, 2)
    batch.open_beside(lambda: None)
    batch.open_passes_beside()
    calls = [engine.prepare(prompt, max_new_tokens=4) for prompt in PROMPTS[:2]]
    results = [chunk.result for _, chunk in batch.answer(calls) if chunk.result]
    batch.end_opening()
    assert len(results) == 2
    assert "fewer answers are decoded together than could be: no room" in caplog.text


def test_a_batch_that_is_left_can_be_used_again(folder: Path) -> None:
    engine = spec_runtime.load(folder, "eagle", threads=1)
    options: CallOptions = {"max_new_tokens": 30, "ignore_eos": True}
    expected = [engine.generate(prompt, **options).token_ids for prompt in MANY]
    batch = Batch(engine, NUM_LANES)
    for length in (0, 1, 7):
        answers = batch.answer([engine.prepare(prompt, **options) for prompt in MANY])
        for _ in range(length):
            next(answers)
        answers.close()
        many = engine.generate_many(MANY, parallel=NUM_LANES, **options)
        assert [each.token_ids for each in many] == expected
    assert engine.generate(MANY[0], **options).token_ids == expected[0]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("ministral", WINDOW | {"head_dim": 8}),
        ("gpt_oss", EXPERTS | {"sliding_window": 8, "head_dim": 8}),
        ("gemma3_text", WINDOW | {"head_dim": 8}),
        ("qwen3_moe", EXPERTS | {"moe_intermediate_size": 24}),
        ("ministral3", {"head_dim": 8}),
    ],
)
def test_windows_sinks_and_experts_have_lanes(
    tmp_path: Path, family: str, sizes: dict[str, Any]
) -> None:
    model = save_llama(tmp_path / "model", family=family, **sizes)
    options = BuildOptions(str(model), ["prompt_lookup"], out=tmp_path / "bundle", lanes=2)
    engine = spec_runtime.load(make_bundle.build(options), threads=1)
    assert bundles.lanes_name(2) in bundles.read(tmp_path / "bundle").manifest.graphs
    for asked in OPTIONS:
        together = engine.generate_many(MANY[:3], parallel=2, **asked)
        for prompt, each in zip(MANY, together, strict=False):
            assert each.token_ids == engine.generate(prompt, **asked).token_ids


@pytest.mark.slow
def test_a_target_that_cannot_share_passes_runs_one_by_one(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"layer_types": ["conv", "full_attention"]}
    model = save_llama(tmp_path / "model", family="lfm2", block_auto_adjust_ff_dim=False, **sizes)
    options = BuildOptions(str(model), ["prompt_lookup"], out=tmp_path / "bundle", lanes=2)
    engine = spec_runtime.load(make_bundle.build(options), threads=1)
    assert [*bundles.read(tmp_path / "bundle").manifest.graphs] == ["target"]
    together = engine.generate_many(MANY, parallel=2, max_new_tokens=20)
    for prompt, each in zip(MANY, together, strict=True):
        assert each.token_ids == engine.generate(prompt, max_new_tokens=20).token_ids


@pytest.mark.parametrize("lanes", [0, 9])
def test_too_many_lanes_are_refused(lanes: int) -> None:
    with pytest.raises(spec_runtime.UserError, match=f"got {lanes} lanes, expected 1 to 8"):
        BuildOptions(lanes=lanes)
