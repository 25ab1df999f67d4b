"""The audit finds what is wrong, and calls what is not by its name; strict decoding removes it."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import ToyOpener, known, small_manifest, target_of, write_small_bundle
from toy_backend import ByteTokenizer, ToyTarget
from toy_engine import make_proposer, random_prompt

import spec_runtime
from spec_runtime.bundle import manifest as bundle
from spec_runtime.engine import Engine
from spec_runtime.loop import generate
from spec_runtime.loop.proposer import OpenedDrafter
from spec_runtime.loop.target import NEAR_TIE, top_gap
from spec_runtime.measure import audit
from spec_runtime.measure.prompts import BenchPrompt
from spec_runtime.sampling import Sampler, SamplingOptions, SamplingParams
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.tree import TokenTree

GREEDY: SamplingOptions = {"max_new_tokens": 48, "ignore_eos": True}
FORMS = ["slots", "contiguous"]


class NoisyTarget(ToyTarget):
    """A toy whose logits lie on a grid, so that ties are common, plus noise that depends on how
    many rows a pass has. Like an engine it overwrites what it returned before."""

    def __init__(self, amplitude: float = 0.0, grid: float = 0.5, **toy: Any) -> None:
        super().__init__(**{"peak": 6.0, "noise": 4.0, "num_successors": 9, **toy})
        self._amplitude, self._grid = amplitude, grid
        self._returned: list[np.ndarray] = []

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        for array in self._returned:
            array.fill(np.nan)
        result = super().run(feeds, outputs)
        if "logits" in result:
            n, grid = feeds["input_ids"].shape[1], np.float32(self._grid)
            logits_MV = np.round(result["logits"] / grid) * grid
            for row, logits_V in zip(feeds["logit_rows"], logits_MV, strict=True):
                rng = np.random.default_rng((n, int(feeds["position_ids"][0, row])))
                logits_V += rng.uniform(0, self._amplitude, len(logits_V)).astype(np.float32)
            result["logits"] = logits_MV
        self._returned = list(result.values())
        return result


def make_engine(
    backend: ToyTarget,
    *,
    drafter: str = "parallelspec",
    strict_gap: float | None = None,
    budget: Budget | None = None,
    scratch: int = 32,
) -> Engine:
    target = target_of(backend, backend.capacity - scratch, strict_gap=strict_gap)

    class Opener(ToyOpener):
        def open(self, name: str | None, lookup: bool | None) -> OpenedDrafter:
            name = name or drafter
            proposer = make_proposer(name, backend, backend.form)
            return OpenedDrafter(name, proposer, budget or Budget(8))

    opener = Opener()
    return Engine(target, ByteTokenizer(), opener.open(None, None), opener)


def noisy_engine(amplitude: float, form: str = "slots", **options: Any) -> Engine:
    vocab_size = ByteTokenizer.vocab_size
    return make_engine(NoisyTarget(amplitude, vocab_size=vocab_size, form=form), **options)


def prompts(number: int = 4) -> list[BenchPrompt]:
    contents: list[Any] = [random_prompt(i) for i in range(number)]
    return [BenchPrompt(i, "all", content) for i, content in enumerate(contents)]


def figures(
    engine: Engine, precision: str = "fp32", options: SamplingOptions = GREEDY, number: int = 4
) -> dict[str, Any]:
    found = audit.summarise(audit.run(engine, prompts(number), options, precision))
    assert json.loads(json.dumps(found)) == found
    return found


def test_nothing_to_find_without_noise() -> None:
    sampled: SamplingOptions = {**GREEDY, "temperature": 0.3, "seed": 3}
    for options in (GREEDY, sampled):
        found = figures(noisy_engine(0.0), options=options)
        assert found["accepted_length"] > 1.3
        assert (found["identical"], found["real"], found["divergences"]) == (1.0, 0, [])
        assert found["tokens"] == found["tokens_compared"] == 4 * 48
        assert found["delta_logit"]["tree_rows"]["rows"] > 15
        assert found["delta_logit"]["tree_rows"]["maximum"] == 0
        assert found["delta_logit"]["chain_rows"] == {"rows": 64, "median": 0, "maximum": 0}


def test_noise_of_the_row_count_is_a_near_tie() -> None:
    """A tie that noise of 1e-4 decides, in a range of about 9: within 1e-4 of the range."""
    found = figures(noisy_engine(1e-4))
    assert found["counts"]["near tie"] == len(found["divergences"]) >= 2
    assert found["real"] == 0
    assert found["identical"] == 1 - len(found["divergences"]) / 4
    assert 0 < found["delta_logit"]["tree_rows"]["maximum"] <= 1e-4
    for row in found["divergences"]:
        assert row["class"] == "near tie"
        assert 0 < row["gap"] <= 1e-4
        assert row["plain_id"] != row["id"]
    compared = sum(row["position"] + 1 for row in found["divergences"])
    compared += 48 * (4 - len(found["divergences"]))
    assert found["tokens_compared"] == compared
    rate = 1000 * len(found["divergences"]) / compared
    assert found["divergences_per_1000_tokens"] == pytest.approx(rate)


def test_a_gap_beyond_the_noise_of_fp32_is_real_there_and_rounding_at_int8() -> None:
    engine = noisy_engine(0.4)
    found = figures(engine, "fp32")
    assert found["counts"]["real"] > 0
    assert found["deviating_rows"] != []
    assert found["real"] == found["counts"]["real"] + len(found["deviating_rows"])
    reduced = figures(engine, "int8")
    assert reduced["real"] == 0
    assert reduced["counts"]["rounding"] == found["counts"]["real"]
    assert 0.3 < reduced["rounding_limit"] <= 0.4
    assert all(abs(row["gap"]) <= 0.4 for row in reduced["divergences"])


class ScatteredTarget(ToyTarget):
    """Its logits depend on whether other rows lie between those that a row reads, as sums do whose
    blocks are others. A chain of any length gives what single rows give."""

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        result = super().run(feeds, outputs)
        for row, logits_V in zip(feeds["logit_rows"], result.get("logits", ()), strict=False):
            slots = np.flatnonzero(feeds["mask"][0, 0, row])
            if slots[-1] - slots[0] >= len(slots):
                rng = np.random.default_rng(slots)
                logits_V += rng.uniform(0, 0.1, len(logits_V)).astype(np.float32)
        return result


def test_rows_that_lie_apart_in_the_cache_round_in_their_own_way() -> None:
    """An H200 computed chains at fp16 bit for bit as single rows, but not trees: rounding too."""
    found = figures(make_engine(ScatteredTarget(vocab_size=ByteTokenizer.vocab_size)), "fp16")
    deltas = found["delta_logit"]
    assert 0 < deltas["tree_rows"]["maximum"] <= 0.1
    assert 0 < deltas["chain_rows"]["maximum"] <= 0.1
    assert (found["real"], found["deviating_rows"]) == (0, [])


class SwappingTarget(NoisyTarget):
    """Its unlikely tokens' logits depend much on how many rows a pass has, its likely ones' hardly.
    In rows of trees at every fifth position the two likeliest change places."""

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        result = super().run(feeds, outputs)
        n = feeds["input_ids"].shape[1]
        for row, logits_V in zip(feeds["logit_rows"], result.get("logits", ()), strict=False):
            position = int(feeds["position_ids"][0, row])
            rng = np.random.default_rng((n, position, 1))
            unlikely = np.flatnonzero(logits_V < 4)
            logits_V[unlikely] += rng.uniform(0, 3, len(unlikely)).astype(np.float32)
            if 1 < n <= 8 and position % 5 == 0:
                second, first = np.argsort(logits_V)[-2:]
                logits_V[[first, second]] = logits_V[[second, first]]
        return result


def test_a_wrong_token_within_the_noise_of_unlikely_ones_is_real() -> None:
    """Each token is what its row says, and rows deviate by less than 3 logits, which was the limit
    of rounding; but likely tokens move by 0.02 at most, so that a gap of 0.1 is real."""
    engine = make_engine(SwappingTarget(0.02, grid=1e-3, vocab_size=ByteTokenizer.vocab_size))
    found = figures(engine, "int8", number=8)
    assert found["unjustified"] == []
    assert found["delta_logit"]["chain_rows"]["maximum"] > 2.5
    assert 0 < found["rounding_limit"] < 0.1
    gaps = [abs(row["gap"]) for row in found["divergences"] if row["class"] == "real"]
    assert found["counts"]["real"] == len(gaps) >= 2
    assert sum(0.1 < gap < 2.5 for gap in gaps) >= 1, "none that the old limit let pass: no test"


def accept_the_first_child(tree: TokenTree, draw: Callable[[int], int]) -> tuple[list[int], int]:
    """Wrong: takes what was drafted unseen."""
    path = [0, *tree.children(0)[:1]]
    return path, draw(path[-1])


def add_one(tree: TokenTree, draw: Callable[[int], int]) -> tuple[list[int], int]:
    """Wrong: its bonus is the token after the target's."""
    return [0], (draw(0) + 1) % 256


@pytest.mark.parametrize("wrong", [accept_the_first_child, add_one])
@pytest.mark.parametrize("options", [GREEDY, {**GREEDY, "temperature": 0.8, "seed": 3}])
def test_a_wrong_acceptance_is_real(
    monkeypatch: pytest.MonkeyPatch, wrong: Any, options: Any
) -> None:
    """At int8 too, where a gap of any size may be called rounding."""
    engine = noisy_engine(8.0)
    right = generate.by_target_sampling

    def sometimes(tree: TokenTree, draw: Callable[[int], int]) -> tuple[list[int], int]:
        # in trees only: plain decoding stays right
        return right(tree, draw) if tree.num_nodes == 1 else wrong(tree, draw)

    monkeypatch.setattr(generate, "by_target_sampling", sometimes)
    found = figures(engine, "int8", options)
    assert found["real"] >= len(found["unjustified"]) > 0
    assert not any(row["is_plain"] for row in found["unjustified"])
    assert all(row["id"] != row["expected_id"] for row in found["unjustified"])


def test_plain_decoding_is_judged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "by_target_sampling", add_one)
    found = figures(noisy_engine(0.0), number=1)
    both = [row["is_plain"] for row in found["unjustified"]]
    assert (both.count(True), both.count(False)) == (47, 47)
    assert found["divergences"] == []  # both are wrong in the same way


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_wrong_rows_kept_are_real(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Tokens that are what their rows say, on key/value rows of a rejected branch."""
    engine = noisy_engine(1e-4 if precision == "fp32" else 0.4)
    commit = engine.target._cache.commit

    def keep_another(path: Sequence[int]) -> None:
        placed = len(engine.target._cache._placed_N)  # type: ignore[attr-defined]
        is_tree = 1 < placed <= 8
        commit([*path[:-1], placed - 1] if is_tree and len(path) > 1 else path)

    monkeypatch.setattr(engine.target._cache, "commit", keep_another)
    # the chains that measure rounding have 16 rows, prompts have 12: both stay as they are
    found = figures(engine, precision)
    assert found["unjustified"] == []
    assert len(found["deviating_rows"]) > 0
    assert found["real"] > 0


def test_an_impossible_path_is_real() -> None:
    """A path that leaves the tree's branches: its rows are of other tokens than those emitted."""
    engine = noisy_engine(0.0)
    steps = engine.steps

    def bent(prompt: Any, **options: Any) -> Any:
        for step in steps(prompt, **options):
            if len(step.path) > 1:
                step = dataclasses.replace(step, path=[0, *[n + 1 for n in step.path[1:]]])
            yield step

    engine.steps = bent  # type: ignore[method-assign]
    found = figures(engine, number=1)
    assert found["real"] > 0
    assert {row["expected_id"] for row in found["unjustified"]} == {None}


def test_scores_are_what_the_sampler_maximises() -> None:
    params = SamplingParams(temperature=0.7, seed=5, top_k=40)
    sampler = Sampler(params, 64)
    rng = np.random.default_rng(0)
    for position in range(200):
        logits_V = rng.normal(0, 3, 64).astype(np.float32)
        score_V = audit.scores(sampler, logits_V, position)
        assert int(score_V.argmax()) == sampler(logits_V, position)
        assert np.isneginf(score_V).sum() == 24
        # in logits: a shift of one moves its score by as much
        id = int(score_V.argmax())
        moved_V = logits_V.copy()
        moved_V[id] += 0.25
        moved = audit.scores(sampler, moved_V, position)[id] - score_V[id]
        assert moved == pytest.approx(0.25, abs=1e-5)


def test_a_divergence_with_a_temperature_has_the_gap_of_the_scores() -> None:
    options: SamplingOptions = {**GREEDY, "temperature": 0.8, "seed": 3}
    engine = noisy_engine(0.4)
    report = audit.run(engine, prompts(), options, "int8")
    found = audit.summarise(report)
    assert found["real"] == 0
    assert found["counts"]["rounding"] > 0
    answer = next(answer for answer in report.answers if answer.divergence is not None)
    divergence = known(answer.divergence)
    position, ids = divergence.position, (divergence.plain_id, divergence.id)
    assert ids[0] is not None
    assert ids[1] is not None
    prompt_ids = random_prompt(int(answer.prompt))
    context = [*prompt_ids, *answer.plain[:position]]
    fresh = noisy_engine(0.4).target
    fresh.prefill(context[:-1])
    logits_V = fresh.verify(TokenTree.root(context[-1])).row(0)
    sampler = Sampler(SamplingParams(**options), len(logits_V))

    def score(token: int) -> float:
        v = (float(sampler.hash_bits(len(context), np.array([token]))[0]) + 0.5) / 2**32
        return float(logits_V[token]) / 0.8 - math.log(-math.log1p(-v))

    assert divergence.gap == pytest.approx(0.8 * (score(ids[0]) - score(ids[1])), abs=1e-4)


@pytest.mark.parametrize(
    ("gap", "kind"),
    [
        *((0.0, "near tie"), (-0.1, "near tie"), (0.3, "rounding"), (-0.5, "rounding")),
        *((0.6, "real"), (None, "real")),  # None: one of the two had ended
    ],
)
def test_classes(gap: float | None, kind: str) -> None:
    assert audit.classify(gap, near_tie=0.1, limit=0.5) == kind


@pytest.mark.parametrize("form", FORMS)
def test_strict_removes_near_ties(form: str) -> None:
    loose = figures(noisy_engine(1e-4, form))
    assert loose["counts"]["near tie"] > 0
    assert loose["strict"]["redone"] == loose["strict"]["rows"] == 0
    engine = noisy_engine(1e-4, form, strict_gap=NEAR_TIE)
    strict = figures(engine)
    assert (strict["divergences"], strict["real"]) == ([], 0)
    assert strict["accepted_length"] > 1.3
    counts = strict["strict"]
    assert 0 < counts["redone"] < counts["rows"]
    assert counts["share"] == counts["redone"] / counts["rows"]
    assert counts["seconds"] > 0
    assert counts["share_of_decoding"] > 0
    # every token but the prompts' was decided by a tree's row, or by a root alone
    assert counts["rows"] <= strict["tokens"] - 4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("drafter", ["parallelspec", "lookahead"])
def test_strict_with_every_row_redone_fills_the_context(form: str, drafter: str) -> None:
    """The largest tree and its extra row fit up to the last token, and features stay the tree's:
    the toy drafter checks them."""

    def engine(**options: Any) -> Engine:
        backend = NoisyTarget(0.5, vocab_size=258, capacity=72, form=form)
        scratch = 10 if form == "slots" else 11
        return make_engine(backend, scratch=scratch, drafter=drafter, **options)

    options: dict[str, Any] = {"max_new_tokens": 500, "ignore_eos": True}
    plain = engine().with_drafter("none").generate(random_prompt(1), **options)
    strict = engine(strict_gap=1.0, budget=Budget(9))
    result = strict.generate(random_prompt(1), **options)
    assert result.token_ids == plain.token_ids
    assert result.finish_reason == "length"
    target = strict.target
    assert target.num_redone == target.num_judged > 10
    assert target.run_seconds > target.redo_seconds > 0
    loose = engine(budget=Budget(9)).generate(random_prompt(1), **options)
    assert loose.token_ids != plain.token_ids, "without noise no test"


@pytest.mark.parametrize("form", FORMS)
def test_a_row_first_read_after_the_commit_stays_the_trees(form: str) -> None:
    """Its place may be taken by then."""
    target = noisy_engine(0.5, form, strict_gap=1.0).target
    target.prefill([1, 2])
    verified = target.verify(TokenTree.chain([3, 4]))
    verified.row(0)
    target.commit([0])
    verified.row(1)
    assert (target.num_judged, target.num_redone, target.length) == (1, 1, 3)


def test_a_strict_tree_leaves_room_for_the_extra_row() -> None:
    with pytest.raises(ValueError, match=r"got trees of 32 nodes, expected at most .* 31"):
        noisy_engine(0.0, strict_gap=NEAR_TIE, budget=Budget(32))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {1: 2.0}},
        {"logits_processor": lambda tokens, logits_V: logits_V},
    ],
)
def test_strict_reads_raw_logits(options: dict[str, Any]) -> None:
    engine = noisy_engine(0.0, strict_gap=NEAR_TIE)
    with pytest.raises(ValueError, match=r"a logit bias, .* with strict, expected none"):
        engine.generate([1, 2], **options)


def test_strict_judges_no_row_that_is_computed_by_itself() -> None:
    engine = noisy_engine(0.0, strict_gap=1.0, drafter="none")
    engine.generate(random_prompt(1), max_new_tokens=9)
    assert (engine.target.num_judged, engine.target.num_redone) == (0, 0)


def test_strict_refuses_low_precisions(tmp_path: Path) -> None:
    folder = write_small_bundle(tmp_path)
    manifest = small_manifest()
    target = dataclasses.replace(manifest.target, precision="int8")
    bundle.write_manifest(folder, dataclasses.replace(manifest, target=target))
    with pytest.raises(ValueError, match="got strict with int8, expected fp32 or fp16"):
        spec_runtime.load(folder, strict=True)


def test_top_gap() -> None:
    assert top_gap(np.array([1.0, 5.0, 4.0])) == 0.25
    assert top_gap(np.array([5.0, 5.0, 1.0])) == 0.0
    assert top_gap(np.array([0.0, 4.0])) == 1.0
    assert top_gap(np.array([2.0, 2.0])) == 0.0
    rng = np.random.default_rng(0)
    for _ in range(50):
        logits_V = rng.normal(size=9)
        ordered = np.sort(logits_V)
        wanted = (ordered[-1] - ordered[-2]) / (ordered[-1] - ordered[0])
        assert top_gap(logits_V) == pytest.approx(wanted)


def test_prompts_that_do_not_fit_are_skipped() -> None:
    engine = noisy_engine(0.0)
    contents: list[Any] = [[1] * 300, [1] * engine.target.max_length, [1, 2, 3]]
    reasons: list[str] = []
    report = audit.run(
        engine,
        [BenchPrompt(i, "all", content) for i, content in enumerate(contents)],
        GREEDY,
        "fp32",
        on_skip=reasons.append,
    )
    assert [answer.prompt for answer in report.answers] == [2]
    assert [row["prompt"] for row in report.skipped] == [0, 1]
    assert "leave no room" in reasons[1]


def test_what_cannot_be_audited_token_by_token() -> None:
    engine = noisy_engine(0.0)
    rejection: SamplingOptions = {"temperature": 1.0, "seed": 1, "acceptance": "rejection"}
    with pytest.raises(ValueError, match="got acceptance rejection, expected target_sampling"):
        audit.run(engine, prompts(1), rejection, "fp32")
    with pytest.raises(ValueError, match="without a seed"):
        audit.run(engine, prompts(1), {"temperature": 1.0}, "fp32")
    with pytest.raises(ValueError, match="got no answer of 3 tokens"):
        audit.run(engine, prompts(1), {"max_new_tokens": 2}, "int8")
