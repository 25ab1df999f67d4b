"""The loop is lossless and ends where it should, in tokens, KV and metrics."""

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from small import known, raising
from toy_engine import DRAFTERS, make_engine, random_prompt

from spec_runtime import GenerationResult
from spec_runtime.engine import Engine
from spec_runtime.loop import generate
from spec_runtime.loop.stats import Stats
from spec_runtime.loop.step import Ending, Step, count_step
from spec_runtime.loop.target import PREFILL_ROWS, Wants
from spec_runtime.proposers.merged import MergedProposer
from spec_runtime.sampling import Sampler
from spec_runtime.trees.budget import Budget, Grown
from spec_runtime.trees.tree import TokenTree

SPECULATIVE = [name for name in DRAFTERS if name != "none"]
# short loops, so that prompt lookup finds something, and drafts that are right half the time
LOOPS: dict[str, Any] = {"num_successors": 4, "peak": 7.0, "noise": 4.0}
# which take its loops from the target, but not all of them
PENALTIES: dict[str, Any] = {
    "min_p": 0.02,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.1,
    "logit_bias": {2: 1.5, 200: 3.0},
}


def run(engine: Engine, prompt: list[int], **sampling: Any) -> tuple[list[int], list[Step]]:
    steps = list(engine.steps(prompt, **sampling))
    return [token for step in steps for token in step.tokens], steps


@cache
def plain_answers(seed: int) -> list[tuple[dict[str, Any], GenerationResult]]:
    """Returns options, greedy and sampled, each with plain decoding's answer of a random model."""
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": seed},
        {"temperature": 1.3, "seed": seed, "top_k": 20, "top_p": 0.9, **PENALTIES},
    ]
    found = []
    for sampling in samplings:
        options = {"max_new_tokens": 70, "ignore_eos": True, **sampling}
        plain = make_engine("none", seed=seed, **LOOPS)
        found.append((options, plain.generate(random_prompt(seed, 3 + seed), **options)))
    return found


@pytest.mark.parametrize("form", ["slots", "contiguous"])
@pytest.mark.parametrize("drafter", SPECULATIVE)
@pytest.mark.parametrize("seed", range(8))
def test_output_is_that_of_plain_decoding(form: str, drafter: str, seed: int) -> None:
    """Greedy and sampled, over random models, prompts and trees: token by token the same."""
    for options, plain in plain_answers(seed):
        engine = make_engine(
            drafter,
            form=form,
            taps=(3, 5) if seed % 2 else (),
            budget=Budget(2 + seed, growth=Grown(0.01)),
            seed=seed,
            **LOOPS,
        )
        result = engine.generate(random_prompt(seed, 3 + seed), **options)
        assert result.token_ids == plain.token_ids
        assert len(result.token_ids) == 70
        assert (plain.stats.accepted_length, plain.stats.acceptance_by_depth) == (1.0, [])
        if options["temperature"] == 0 and seed > 2:
            assert result.stats.accepted_length > 1.1, "the draft was never right: no test"


@pytest.mark.parametrize("drafter", SPECULATIVE)
@pytest.mark.parametrize("acceptance", ["target_sampling", "rejection", "typical"])
def test_greedy_is_greedy_by_every_rule(drafter: str, acceptance: str) -> None:
    prompt, options = random_prompt(4), {"max_new_tokens": 60, "ignore_eos": True, **PENALTIES}
    plain = make_engine("none", **LOOPS).generate(prompt, **options)
    without = make_engine("none", **LOOPS).generate(prompt, max_new_tokens=60, ignore_eos=True)
    assert plain.token_ids != without.token_ids, "the penalties do nothing"
    result = make_engine(drafter, **LOOPS).generate(prompt, acceptance=acceptance, **options)
    assert result.token_ids == plain.token_ids
    assert (result.acceptance, result.preserves_distribution) == ("greedy", True)


@pytest.mark.parametrize("acceptance", ["rejection", "typical"])
def test_other_rules_run_with_every_proposer(acceptance: str) -> None:
    """Repeatable by the seed, with drafts accepted; only trained drafters' children are drawn."""
    options: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True, "temperature": 0.5}
    options |= {"seed": 3, "acceptance": acceptance}
    for drafter in DRAFTERS:
        engine = make_engine(drafter, **LOOPS)
        if drafter == "parallelspec":  # and lookup beside it, for the greedy and the typical
            engine = engine.observed(lambda proposer: MergedProposer(proposer, 4))
        _, steps = run(engine, random_prompt(2), **options)
        trees = [step.tree for step in steps if step.tree is not None]
        result = known(engine.last_result)
        again = engine.generate(random_prompt(2), reuse=False, **options)
        assert again.token_ids == result.token_ids
        assert result.acceptance == acceptance
        assert result.preserves_distribution == (acceptance == "rejection")
        assert result.stats.accepted_length > 1.05 or drafter == "none"
        drawn = [bool(tree.draws) for tree in trees if tree.num_nodes > 1]
        assert any(drawn) == (drafter == "parallelspec" and acceptance == "rejection")
        for tree in trees:
            if tree.draws:  # lookup adds nothing: every inner node is a drawn one
                assert {*tree.draws} == {n for n in range(tree.num_nodes) if tree.children(n)}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_logprobs_are_the_targets_own_and_cut_like_the_tokens(drafter: str) -> None:
    prompt = random_prompt(3)
    options: dict[str, Any] = {"temperature": 0.8, "seed": 1, "logit_bias": {5: 2.0}}
    free = make_engine(drafter, peak=9.0).generate(prompt, max_new_tokens=40, **options)
    assert free.logprobs is None
    end = free.token_ids[20]
    engine = make_engine(drafter, peak=9.0)
    result = engine.generate(prompt, stop_token_ids=(end,), logprobs=2, **options)
    assert result.token_ids == free.token_ids[: free.token_ids.index(end) + 1]
    assert [each.token_id for each in known(result.logprobs)] == result.token_ids
    for position, each in enumerate(known(result.logprobs)):
        target = make_engine("none", peak=9.0).target
        logits_V = target.prefill(prompt + result.token_ids[:position])[0].row(0)
        log_prob_V = logits_V - np.log(np.exp(logits_V.astype(np.float64)).sum())
        assert each.logprob == pytest.approx(log_prob_V[each.token_id], abs=1e-9)
        best = np.argsort(-log_prob_V, kind="stable")[:2].tolist()
        assert [token for token, _ in each.top] == best
        assert [value for _, value in each.top] == pytest.approx(log_prob_V[best], abs=1e-9)
    none_asked = known(engine.generate(prompt, max_new_tokens=3, logprobs=0).logprobs)
    assert [each.top for each in none_asked] == [[], [], []]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_committed_rows_are_the_tokens_less_one(drafter: str) -> None:
    """At every step, also the one that ends in the middle of an accepted path."""
    engine = make_engine(drafter, **LOOPS)
    prompt, num_tokens = random_prompt(1), 0
    for step in engine.steps(prompt, max_new_tokens=41, ignore_eos=True):
        num_tokens += len(step.tokens)
        assert engine.target.length == len(prompt) + num_tokens - 1
        assert num_tokens == 1 or len(step.path) == len(step.tokens)


def drafted_in_the_middle(steps: list[Step]) -> int:
    """A token, first seen as a drafted one with another accepted one behind it."""
    seen: set[int] = set()
    for step in steps:
        for i, token in enumerate(step.tokens):
            if token not in seen and i + 1 < step.num_accepted:
                return token
            seen.add(token)
    raise AssertionError("no such token: choose another seed")


@pytest.mark.parametrize("as_eos", [True, False])
def test_eos_inside_an_accepted_path_truncates_everything(as_eos: bool) -> None:
    prompt = random_prompt(3)
    free, steps = run(make_engine("parallelspec", peak=9.0), prompt, max_new_tokens=60)
    end = drafted_in_the_middle(steps)
    wanted = free[: free.index(end) + 1]

    engine = make_engine("parallelspec", peak=9.0)
    if as_eos:
        engine.tokenizer.eos = (end,)
        result = engine.generate(prompt, max_new_tokens=60)
    else:
        result = engine.generate(prompt, max_new_tokens=60, stop_token_ids=(end,))
    assert result.token_ids == wanted
    assert result.finish_reason == "stop"
    # KV: all but the last token. Metrics: tokens after truncation, without the prompt's one.
    assert engine.target.length == len(prompt) + len(wanted) - 1
    assert result.stats.committed_tokens == len(wanted) - 1
    totals = itertools.accumulate(len(step.tokens) for step in steps)
    full = [step for step, total in zip(steps, totals, strict=True) if total <= len(wanted)]
    assert result.stats.steps == len(full)  # full steps, the prompt's apart, and the cut one
    assert result.stats.accepted_length == (len(wanted) - 1) / len(full)
    # the cut step counts as accepted down to EOS and says nothing of the depths below
    depth = len(wanted) - sum(len(step.tokens) for step in full)
    accepts = [
        sum(step.num_accepted > d for step in full[1:]) + (depth > d)
        for d in range(len(result.stats.depth_accepts))
    ]
    assert result.stats.depth_accepts == accepts


def test_ignore_eos_goes_on_and_stop_ids_do_not_care() -> None:
    prompt = random_prompt(3)
    free, _ = run(make_engine("parallelspec"), prompt, max_new_tokens=30)
    engine = make_engine("parallelspec")
    engine.tokenizer.eos = (free[5],)
    on, _ = run(engine, prompt, max_new_tokens=30, ignore_eos=True)
    assert on == free
    cut, _ = run(engine, prompt, max_new_tokens=30, ignore_eos=True, stop_token_ids=(free[5],))
    assert cut == free[: free.index(free[5]) + 1]


@pytest.mark.parametrize("drafter", ["parallelspec", "lookahead"])
@pytest.mark.parametrize("more", [{}, {"temperature": 0.7, "acceptance": "rejection"}])
def test_no_rows_are_drafted_after_an_end(drafter: str, more: dict[str, Any]) -> None:
    """Ends that the answer does not have; lookahead reads the rows that it does not draft."""
    options = {"max_new_tokens": 60, "ignore_eos": True, "seed": 5, **more}
    free, steps = run(make_engine(drafter, **LOOPS), random_prompt(4), **options)

    def inner(steps: list[Step]) -> list[int]:
        trees = [step.tree for step in steps if step.tree is not None]
        return [int(tree.token_N[node]) for tree in trees for node in tree.parent_N if node > 0]

    ends = {*inner(steps)} - {*free}
    options["stop_token_ids"] = tuple(ends)
    again, steps_again = run(make_engine(drafter, **LOOPS), random_prompt(4), **options)
    assert again == free or more
    if drafter != "lookahead":
        assert ends.isdisjoint(inner(steps_again))
        num_rows = [sum(step.num_drafted for step in each) for each in (steps, steps_again)]
        assert (ends and num_rows[0] > num_rows[1]) or more


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_max_tokens_is_exact(drafter: str) -> None:
    prompt = random_prompt(2)
    longer = make_engine(drafter, peak=9.0).generate(prompt, max_new_tokens=20)
    for max_new_tokens in range(1, 12):
        engine = make_engine(drafter, peak=9.0)
        result = engine.generate(prompt, max_new_tokens=max_new_tokens)
        assert result.token_ids == longer.token_ids[:max_new_tokens]
        assert len(result.token_ids) == max_new_tokens
        assert result.finish_reason == "length"
        assert result.stats.committed_tokens == max_new_tokens - 1
        assert engine.target.length == len(prompt) + max_new_tokens - 1


@pytest.mark.parametrize("form", ["slots", "contiguous"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_context_is_used_up_exactly(form: str, drafter: str) -> None:
    engine = make_engine(drafter, form=form, max_length=40, scratch=8, peak=9.0)
    prompt = random_prompt(4, 12)
    result = engine.generate(prompt, max_new_tokens=500, ignore_eos=True)
    assert result.finish_reason == "length"
    assert len(prompt) + len(result.token_ids) == 40
    roomy = make_engine("none", peak=9.0).generate(prompt, max_new_tokens=28, ignore_eos=True)
    assert result.token_ids == roomy.token_ids
    # once more on the full cache, and with a prompt that leaves no room at all
    again = engine.generate(prompt, max_new_tokens=500, ignore_eos=True)
    assert again.token_ids == result.token_ids
    full = engine.generate(random_prompt(4, 40))
    assert (full.token_ids, full.finish_reason, full.text) == ([], "length", "")
    assert full.stats.steps == 0


def test_every_step_says_what_was_drafted() -> None:
    engine = make_engine("parallelspec", peak=9.0)
    tokens, steps = run(engine, random_prompt(5), max_new_tokens=50, ignore_eos=True)
    assert (steps[0].num_accepted, steps[0].path) == (0, [])
    for step in steps[1:-1]:
        assert step.num_accepted == len(step.tokens) - 1
    assert any(step.num_accepted >= 2 for step in steps)
    result = known(engine.last_result)
    assert result.token_ids == tokens
    assert result.stats.steps == len(steps) - 1
    assert result.stats.drafted_tokens >= sum(step.num_accepted for step in steps)
    assert 0 < result.stats.engine_seconds < result.stats.decode_seconds
    for d, accepts in enumerate(result.stats.depth_accepts):
        assert accepts == sum(step.num_accepted > d for step in steps)
    # at depth 1 every step with a draft was a trial
    assert result.stats.depth_trials[0] >= result.stats.steps - 1


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_noise_is_keyed_by_absolute_position(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token is drawn once, with the noise of its own place in the whole text."""
    asked: list[int] = []

    class Spy(Sampler):
        def __call__(self, logits_V: np.ndarray, position: int, path: Any = ()) -> int:
            asked.append(position)
            return super().__call__(logits_V, position, path)

    monkeypatch.setattr(generate, "Sampler", Spy)
    engine = make_engine(drafter, **LOOPS)
    for prompt in (random_prompt(1, 12), random_prompt(1, 12)[:9]):  # the second reuses
        asked.clear()
        engine.generate(prompt, max_new_tokens=30, temperature=0.5, seed=1, ignore_eos=True)
        assert asked[:30] == list(range(len(prompt), len(prompt) + 30))


@pytest.mark.parametrize("drafter", SPECULATIVE)
def test_no_node_is_deeper_than_what_may_still_be_said(drafter: str) -> None:
    engine = make_engine(drafter, num_masks=5, peak=20.0, num_successors=2)
    depths, left = [], 40
    for step in engine.steps(random_prompt(0), max_new_tokens=40, ignore_eos=True):
        if step.tree is not None:
            depths.append(int(step.tree.depth_N.max()))
            assert depths[-1] <= left - 1
        left -= len(step.tokens)
    assert max(depths) >= 3, "nothing was drafted"


def test_what_counts_as_a_trial() -> None:
    # root ─┬─ 1 ── 3
    #       └─ 2
    tree = TokenTree(np.array([0, 1, 2, 3]), np.array([0, 0, 0, 1]))
    for step, trials, accepts in (
        (Step([7], 0, [0]), [1], [0]),  # both children refused
        (Step([1, 7], 1, [0, 1]), [1, 1], [1, 0]),
        (Step([2, 7], 1, [0, 2]), [1], [1]),  # a leaf: nothing was tried below it
        (Step([1, 3, 7], 2, [0, 1, 3]), [1, 1], [1, 1]),
        (Step([1], 1, [0]), [1], [1]),  # ended by a drafted EOS: nothing was refused
        (Step([1, 3], 2, [0, 1]), [1, 1], [1, 1]),
    ):
        stats = Stats()
        count_step(stats, replace(step, num_drafted=3), bool(tree.children(step.path[-1])))
        assert (stats.depth_trials, stats.depth_accepts) == (trials, accepts)
        assert (stats.steps, stats.committed_tokens) == (1, len(step.tokens))
        assert stats.drafted_tokens == 3


def test_features_are_copied_only_for_those_who_want_them() -> None:
    asked: set[tuple[str, str]] = set()
    for drafter in DRAFTERS:
        engine = make_engine(drafter, taps=(2,))
        backend = engine.target._backend
        inner = backend.run

        def spy(feeds: Any, outputs: Any, inner: Any = inner, drafter: str = drafter) -> Any:
            asked.update((drafter, name) for name in outputs)
            return inner(feeds, outputs)

        backend.run = spy  # type: ignore[method-assign]
        engine.generate([1, 2, 3], max_new_tokens=5)
    assert {drafter for drafter, name in asked if name != "logits"} == {"parallelspec"}
    assert ("parallelspec", "taps.2") in asked


def test_a_prompt_of_several_chunks_has_the_features_of_all_its_tokens() -> None:
    target = make_engine(max_length=PREFILL_ROWS + 60).target
    prompt = random_prompt(1, length=PREFILL_ROWS + 20)
    _, features = target.prefill(prompt, Wants(("features",)))
    assert features is not None
    assert features[:, :2].tolist() == [[token, place] for place, token in enumerate(prompt)]


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_no_row_of_a_prompt_is_computed_by_itself(num_chunks: int) -> None:
    """A graph computes it in another form than rows among others."""
    prompt = random_prompt(1, length=num_chunks * PREFILL_ROWS + 1)
    engine = make_engine("none", max_length=len(prompt) + 8)
    backend: Any = engine.target._backend
    sizes, inner = [], backend.run

    def spy(feeds: Any, outputs: Any) -> Any:
        sizes.append(feeds["input_ids"].shape[1])
        return inner(feeds, outputs)

    backend.run = spy
    engine.generate(prompt, max_new_tokens=1)
    assert sizes == [*[PREFILL_ROWS] * (num_chunks - 1), PREFILL_ROWS - 1, 2]


@pytest.mark.parametrize("is_between", [False, True])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rows_are_relied_on_unless_a_step_was_broken_off(drafter: str, is_between: bool) -> None:
    engine, prompt = make_engine(drafter, peak=9.0), random_prompt(2)
    expected = make_engine(drafter, peak=9.0).generate(prompt, max_new_tokens=20).token_ids
    backend: Any = engine.target._backend
    inner, steps = backend.run, engine.steps(prompt, max_new_tokens=20)
    seen = [next(steps), next(steps)]

    if is_between:
        steps.close()
    else:
        backend.run = raising(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            next(steps)
        backend.run = inner
    again = engine.generate([*prompt, *seen[0].tokens], max_new_tokens=20 - len(seen[0].tokens))
    assert again.token_ids == expected[len(seen[0].tokens) :]
    assert again.usage.reused_tokens == (len(prompt) if is_between else 0)


@pytest.mark.parametrize(
    ("tokens", "kept", "reason", "remaining"),
    [
        ([1, 2, 3], [1, 2, 3], None, 2),
        ([1, 9, 3], [1, 9], "stop", 3),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5], "length", 0),
        ([1, 2, 3, 4, 9, 6], [1, 2, 3, 4, 9], "stop", 0),  # EOS as the last one allowed
    ],
)
def test_where_a_generation_ends(
    tokens: list[int], kept: list[int], reason: str | None, remaining: int
) -> None:
    seen: list[int] = []  # by what looks for stop strings: every token that is kept

    def see(token: int) -> bool:
        seen.append(token)
        return False

    ending = Ending(5, frozenset({9}), see)
    assert ending.cut(tokens) == kept == seen
    assert (ending.finish_reason, ending.remaining) == (reason, remaining)
    assert Ending(0).finish_reason == "length"
