"""The law of the output is the target's: for each rule of acceptance, tree shape and temperature.

The whole loop runs on a target of four tokens whose logits depend on the last two, against exact
enumeration of the first four tokens. Rules known to be biased fail the same test. By target
sampling a seed gives the same tokens with any tree, so that one tree's law is that of all.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from small_trees import budget_of

from spec_runtime.loop import generate
from spec_runtime.loop.accept import _pick
from spec_runtime.loop.proposer import WithoutRuns
from spec_runtime.loop.stats import Stats
from spec_runtime.loop.step import Ending, Step
from spec_runtime.sampling import ACCEPTANCES, MIN_TEMPERATURE, SamplingParams
from spec_runtime.trees.budget import Budget, Drawn
from spec_runtime.trees.grow import TreeBuilder, grow, grow_by_levels
from spec_runtime.trees.guesses import Guesses
from spec_runtime.trees.tree import Draws, TokenTree

V, C = 4, 3  # tokens; candidates of the drafter
NUM_TOKENS = 4  # whose law is tested
NUM_SAMPLES = 2000
PROMPT = [0, 1]
Z_ALPHA = 4.753  # of a normal's upper 1e-6; seeds are fixed, so that it cannot flake


class Toy(WithoutRuns):
    """Target, what it says, and a drafter that is wrong in its own way, in one object."""

    vocab_size, run_seconds, wants_features = V, 0.0, False
    strict_gap = None

    def __init__(self, kind: str = "by levels", spread: float = 1.0) -> None:
        rng = np.random.default_rng(5)
        self.logits_VVV = rng.normal(0, 1.3, (V, V, V)).astype(np.float32)
        self.guess_VVV = 0.5 * self.logits_VVV + rng.normal(0, 1, (V, V, V)).astype(np.float32)
        if spread != 1:  # logits as large as real ones, and so close to each other
            self.logits_VVV = (20 + spread * self.logits_VVV).astype(np.float32)
            self.guess_VVV = spread * self.guess_VVV.astype(np.float64)
        self.kind = kind  # by levels | one pass | pairs
        self._candidates = functools.cache(self._best_guesses)
        self.text: list[int] = []
        self.tree = TokenTree.root(0)  # last verified
        self.is_prompt = False

    @property
    def length(self) -> int:
        return len(self.text)

    def top(self, node: int) -> None:
        """Whole rows alone."""

    def verify(self, tree: TokenTree, features: bool, last_only: bool, meanwhile: Any) -> "Toy":
        if last_only:  # the whole prompt
            self.text = []
        self.tree, self.is_prompt = tree, last_only
        return self

    def best(self, node: int) -> None:
        """Not known without its row."""

    def row(self, node: int) -> np.ndarray:
        tokens = self.text
        if not self.is_prompt:
            tokens = [*tokens[-1:], *self.tree.token_N[self.tree.path(node)].tolist()]
        return self.logits_VVV[tokens[-2], tokens[-1]]

    def commit(self, kept: Any) -> None:
        if isinstance(kept, list | range):  # the target's; the drafter's is a step
            self.text += self.tree.token_N[kept].tolist()

    def start(self, prompt: Sequence[int], features_TF: None, reused: int) -> None:
        pass

    def propose(self, token: int, budget: Budget) -> TokenTree:
        if self.kind != "by levels":  # guesses at depth 2 and 3 do not know that at depth 1
            rows = [self._candidates(self.text[-1], token, shift) for shift in range(3)]
            ids, log_probs = map(np.array, zip(*rows, strict=True))
            pairs = self._pairs(ids) if self.kind == "pairs" else None
            return grow(token, Guesses(ids, log_probs, pairs), budget)

        def expand(nodes: TreeBuilder, first: int) -> tuple[np.ndarray, np.ndarray]:
            rows = []
            for node in range(first, len(nodes)):
                before = nodes.tokens[nodes.parents[node]] if node else self.text[-1]
                rows.append(self._candidates(before, nodes.tokens[node]))
            ids, log_probs = zip(*rows, strict=True)
            return np.array(ids), np.array(log_probs)

        return grow_by_levels(token, expand, budget, num_levels=3, max_width=8)

    def _best_guesses(self, a: int, b: int, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """The C best of the drafter's softmax."""
        guess_V = self.guess_VVV[a, (b + shift) % V].astype(np.float64)
        ids = np.argsort(-guess_V)[:C]
        return ids, (guess_V - np.log(np.exp(guess_V).sum()))[ids]

    def _pairs(self, id_KC: np.ndarray) -> np.ndarray:
        """The drafter's softmax behind each candidate, of those at the next depth."""
        guess_VV = self.guess_VVV[self.text[-1]].astype(np.float64)
        guess_VV = guess_VV - np.log(np.exp(guess_VV).sum(1, keepdims=True))
        return np.stack([guess_VV[a][:, b] for a, b in itertools.pairwise(id_KC)])


def tokens_of(
    toy: Toy, params: SamplingParams, budget: Budget, num_tokens: int = NUM_TOKENS
) -> list[int]:
    tokens: list[int] = []
    target: Any = toy
    ending = Ending(num_tokens + 2)
    run = generate.Decoding(target, target, budget, PROMPT, params, ending, Stats())
    for step in steps_of(run):
        tokens += step.tokens
        if len(tokens) >= num_tokens:
            break
    return tokens[:num_tokens]


def steps_of(decoding: generate.Decoding) -> Iterator[Step]:
    while decoding.goes_on():
        assert generate.take_pass([decoding]) == {}
        if decoding.step is not None:
            yield decoding.step


def reference(logits: np.ndarray, answer: Sequence[int], params: SamplingParams) -> np.ndarray:
    """p as the options define it, without any of the runtime's shortcuts."""
    x = [float(value) + params.logit_bias.get(i, 0.0) for i, value in enumerate(logits)]
    for i in {*PROMPT, *answer}:
        x[i] = x[i] / params.repetition_penalty if x[i] > 0 else x[i] * params.repetition_penalty
    for i in set(answer):
        x[i] -= params.presence_penalty + params.frequency_penalty * list(answer).count(i)
    order = sorted(range(V), key=lambda i: -x[i])[: params.top_k]
    scaled = [(x[i] - max(x)) / params.temperature for i in range(V)]
    weight = [math.exp(scaled[i]) if i in order else 0.0 for i in range(V)]
    p = np.array(weight) / sum(weight)
    nucleus, mass = [], 0.0
    for i in order:
        nucleus.append(i)
        mass += p[i]
        if mass >= (params.top_p or 1.0):
            break
    is_kept = [i in nucleus and p[i] >= (params.min_p or 0.0) * p.max() for i in range(V)]
    return p * is_kept / (p * is_kept).sum()


def law(params: SamplingParams, spread: float = 1.0) -> np.ndarray:
    """Probabilities f64[V ** NUM_TOKENS] of the first tokens."""
    toy = Toy(spread=spread)

    def behind(answer: tuple[int, ...]) -> list[float]:
        if len(answer) == NUM_TOKENS:
            return [1.0]
        last = [*PROMPT, *answer][-2:]
        p_V = reference(toy.logits_VVV[last[0], last[1]], answer, params)
        return [p_V[i] * p for i in range(V) for p in behind((*answer, i))]

    return np.array(behind(()))


def excess(
    params: dict[str, Any], budget: Budget, kind: str = "by levels", spread: float = 1.0
) -> float:
    """Chi-square of the sampled first tokens, less its quantile at alpha: above 0 is a refusal."""
    toy, p = Toy(kind, spread), law(SamplingParams(**params), spread)
    count = np.zeros(len(p))
    for seed in range(NUM_SAMPLES):
        tokens = tokens_of(toy, SamplingParams(**params, seed=seed), budget)
        count[np.ravel_multi_index(tuple(tokens), [V] * NUM_TOKENS)] += 1
    assert count[p == 0].sum() == 0, "an impossible token"
    expected = p * NUM_SAMPLES
    is_rare = expected < 5  # pooled
    observed = np.append(count[~is_rare], count[is_rare].sum())
    expected = np.append(expected[~is_rare], max(expected[is_rare].sum(), 1e-9))
    statistic = ((observed - expected) ** 2 / expected).sum()
    df = len(expected) - 1
    part = 2 / (9 * df)  # Wilson and Hilferty's approximation of the quantile
    return float(statistic - df * (1 - part + Z_ALPHA * math.sqrt(part)) ** 3)


CHAIN = ((0,), (0, 0), (0, 0, 0))
WIDE = ((0,), (1,), (2,))
DRAWN = {"chain": (1, 1, 1), "wide": (4,), "deep": (3, 2, 1)}
GIVEN = {"chain": budget_of(CHAIN), "wide": budget_of(WIDE), "deep": Budget(16)}
RULES: dict[str, dict[str, Any]] = {
    "target_sampling": {},
    "without_replacement": {"acceptance": "rejection"},
    "with_replacement": {"acceptance": "rejection", "draw_with_replacement": True},
}
DRAWING_RULES = [rule for rule in RULES if rule != "target_sampling"]
PROCESSED: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 3,
    "top_p": 0.95,
    "min_p": 0.2,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.4,
    "logit_bias": {2: 0.7},
}


def case(rule: str, shape: str, processing: dict[str, Any]) -> tuple[dict[str, Any], Budget]:
    params = {**RULES[rule], **processing}
    if rule == "target_sampling":
        return params, GIVEN[shape]
    return {**params, "draw_widths": DRAWN[shape]}, Budget(24)


@pytest.mark.parametrize("shape", ["chain", "wide", "deep"])
@pytest.mark.parametrize("rule", DRAWING_RULES)
def test_output_follows_the_target(rule: str, shape: str) -> None:
    assert excess(*case(rule, shape, {"temperature": 0.7})) < 0


@pytest.mark.parametrize("rule", RULES)
def test_output_follows_the_target_at_the_lowest_temperature(rule: str) -> None:
    """Logits of about 20 that lie as close together as the temperature is low."""
    processing = {"temperature": MIN_TEMPERATURE}
    assert excess(*case(rule, "deep", processing), spread=MIN_TEMPERATURE) < 0


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("temperature", [9e-7, 1e-30, 1e-40, 5e-324])
def test_below_the_lowest_temperature_all_rules_are_greedy(
    acceptance: str, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, acceptance=acceptance, seed=1)
    assert params.rule == "greedy"
    assert params == SamplingParams(acceptance=acceptance, seed=1)
    greedy = tokens_of(Toy(), SamplingParams(), Budget(1), 20)
    assert tokens_of(Toy(), params, Budget(16), 20) == greedy


@pytest.mark.parametrize("rule", RULES)
def test_output_follows_the_processed_distribution(rule: str) -> None:
    """Truncated, biased and with penalties that differ from node to node."""
    assert excess(*case(rule, "deep", PROCESSED)) < 0


@pytest.mark.parametrize("max_nodes", [3, 8])
def test_a_tree_cut_by_its_budget_is_still_exact(max_nodes: int) -> None:
    """One-pass guesses; equal draws leave room, so that the tree's size hangs on what is drawn."""
    params, _ = case("with_replacement", "deep", {"temperature": 1.0})
    assert excess(params, Budget(max_nodes), "one pass") < 0


@pytest.mark.parametrize("rule", DRAWING_RULES)
def test_output_follows_the_target_behind_guesses_in_pairs(rule: str) -> None:
    assert excess(*case(rule, "deep", {"temperature": 1.0}), "pairs") < 0


def best_instead_of_drawn(
    self: Drawn, id_C: np.ndarray, log_prob_C: np.ndarray, num_draws: int
) -> Draws:
    """The best candidates, passed off as draws from q."""
    q_C = np.exp(log_prob_C / self.temperature)
    order = tuple(range(min(num_draws, len(q_C))))
    return Draws(id_C, q_C / q_C.sum(), order, self.with_replacement)


@pytest.mark.parametrize("shape", DRAWN)
def test_best_candidates_tested_as_draws_are_found_out(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """min(1, p / q) with softmax q on top-k children is biased, and the test says so."""
    monkeypatch.setattr(Drawn, "draw", best_instead_of_drawn)
    assert excess(*case("without_replacement", shape, {"temperature": 1.0})) > 0


def longest_beam(
    tree: TokenTree, p: Callable[[int], np.ndarray], uniform: Callable[[], float]
) -> tuple[list[int], int]:
    """Each beam tested alone, each rightly; then the longest accepted one is taken."""
    best: tuple[list[int], np.ndarray] | None = None
    for leaf in range(tree.num_nodes):
        if tree.children(leaf):
            continue
        path, left_V = [0], p(0)
        for node in tree.path(leaf)[1:]:
            q_V, draws = np.zeros(V), tree.draws[path[-1]]
            q_V[draws.id_C] = draws.q_C
            token = tree.token_N[node]
            if not uniform() * q_V[token] < left_V[token]:
                left_V = np.maximum(0, left_V - q_V)
                break
            path.append(node)
            left_V = p(node)
        if best is None or len(path) > len(best[0]):
            best = path, left_V
    assert best is not None
    return best[0], _pick(best[1] / best[1].sum(), uniform())


@pytest.mark.parametrize("shape", ["chain", "deep"])
def test_longest_beam_wins_is_found_out(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But on a chain, which is but one beam: there the rule is Leviathan's."""
    monkeypatch.setattr(generate, "by_rejection", longest_beam)
    assert (excess(*case("with_replacement", shape, {"temperature": 1.0})) > 0) == (shape == "deep")


@functools.cache
def plain_tokens(is_processed: bool) -> list[tuple[SamplingParams, list[int]]]:
    """Returns plain decoding's tokens by 40 seeds."""
    processing = PROCESSED if is_processed else {"temperature": 1.0}
    every = [SamplingParams(seed=seed, **processing) for seed in range(40)]
    return [(params, tokens_of(Toy(), params, Budget(1), 24)) for params in every]


@pytest.mark.parametrize("shape", GIVEN)
@pytest.mark.parametrize("kind", ["by levels", "one pass", "pairs"])
@pytest.mark.parametrize("is_processed", [False, True])
def test_a_seed_gives_the_tokens_of_plain_decoding(
    shape: str, kind: str, is_processed: bool
) -> None:
    toy = Toy(kind)
    for params, plain in plain_tokens(is_processed):
        assert tokens_of(toy, params, GIVEN[shape], 24) == plain


@pytest.mark.parametrize("shape", GIVEN)
def test_greedy_tokens_with_penalties_are_those_of_plain_decoding(shape: str) -> None:
    processing = {**PROCESSED, "temperature": 0.0}
    plain = tokens_of(Toy(), SamplingParams(**processing), Budget(1), 30)
    assert plain != tokens_of(Toy(), SamplingParams(), Budget(1), 30), "the penalties do nothing"
    for acceptance in ("target_sampling", "rejection", "typical"):
        params = SamplingParams(**processing, acceptance=acceptance)
        assert tokens_of(Toy(), params, GIVEN[shape], 30) == plain


def test_typical_acceptance_is_not_the_targets_law() -> None:
    """Its output does not even depend on the seed."""
    outputs = []
    for seed in range(3):
        params = SamplingParams(temperature=1.0, acceptance="typical", seed=seed)
        outputs.append(tokens_of(Toy(), params, Budget(16), 20))
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0] != tokens_of(Toy(), SamplingParams(), Budget(16), 20)


def test_steps_are_longer_with_more_draws() -> None:
    """What the rule is for: drafted tokens are accepted, more of them from a wider tree."""
    lengths = []
    for widths in ((1, 1, 1), (3, 2, 1)):
        params = SamplingParams(
            max_new_tokens=400, temperature=1.0, seed=0, acceptance="rejection", draw_widths=widths
        )
        target, stats = Toy(), Stats()
        any_target: Any = target
        run = generate.Decoding(
            any_target, any_target, Budget(24), PROMPT, params, Ending(400), stats
        )
        steps: list[Step] = list(steps_of(run))
        assert sum(len(step.tokens) for step in steps) == 400
        lengths.append(stats.accepted_length)
    assert 1.3 < lengths[0] < lengths[1]
