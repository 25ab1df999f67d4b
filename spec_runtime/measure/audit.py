"""Checks whether speculative decoding emits what the target says, and says why it parts from plain
decoding where it does.

Nothing here trusts the acceptance code:

1. Every emitted token is compared with what its own verify row says, and the rows with a path of
   the tree. A token that its row does not say is a fault at every precision.
2. Sampled rows of trees, and the row of each divergence, are compared with those of plain decoding
   on the same prefix.
3. Where the two texts part, a one-row replay of the common prefix gives the gap between the two
   tokens. It is a *near tie* up to 1e-4 of the row's range, which fp32's noise can decide. At
   reduced precisions it is *rounding* up to a limit that is measured for this model and precision
   (limits.py), and *real* above. On the demo target, 60 prompts, the limit is about 1.6 logits at
   int8 and 2.4 at int4, where the largest deviation of any logit is 3.8 and 6.1. At fp32 all
   beyond a near tie is real.

A sound audit is expected to call 0.01 divergences and 0.01 rows real by mistake; the figures say
how many exactly. With a temperature the gap is that of log p + Gumbel noise (sampling/sampler.py),
in the units of the logits. Acceptance by rejection shares no noise with plain decoding, so that
nothing can be compared token by token.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spec_runtime.errors import UserError
from spec_runtime.loop.stats import Stats, ratio
from spec_runtime.loop.target import NEAR_TIE, Target
from spec_runtime.measure import limits
from spec_runtime.measure.limits import ChainRow, Limits
from spec_runtime.sampling import Sampler, SamplingOptions, SamplingParams
from spec_runtime.trees.tree import TokenTree

if TYPE_CHECKING:
    from spec_runtime.engine import Engine
    from spec_runtime.measure.prompts import BenchPrompt

SAMPLED_ROWS = 16  # rows of each answer that are compared with those of plain decoding
CHAIN_ROWS = 16  # rows at each answer's end that are compared with those of a path of a tree
CLASSES = ("near tie", "rounding", "real")


@dataclass(frozen=True)
class Divergence:
    """The first difference between plain decoding and another way of decoding the same prompt.

    ``position`` counts generated tokens from 0. An id is None where that generation had ended;
    ``gap`` is then None too. Otherwise it is the target's logit of ``plain_id`` less that of
    ``id``. ``spread`` is the range of the logits there, to which a near tie is relative.
    """

    prompt: str | int
    position: int
    plain_id: int | None
    id: int | None
    gap: float | None
    spread: float = 0.0


@dataclass(frozen=True)
class Unjustified:
    """A token that its verify row does not say.

    ``expected_id`` is what the row says; None if the token has no row, because the rows kept before
    it are not a path of the tree that carries the emitted tokens.
    """

    prompt: str | int
    position: int
    is_plain: bool
    id: int
    expected_id: int | None


class RowDelta(NamedTuple):
    """The largest |Δlogit| between a tree's row and plain decoding's, and the range of the
    latter's logits."""

    prompt: str | int
    position: int
    delta: float
    spread: float


@dataclass(frozen=True)
class Answer:
    """One prompt decoded both ways."""

    prompt: str | int
    plain: list[int]
    speculative: list[int]
    stats: Stats
    divergence: Divergence | None


@dataclass
class AuditReport:
    """Holds what was found.

    ``rows`` compare trees with plain decoding, ``chain_rows`` paths through trees with the same
    rows one by one. ``skipped`` has the prompts that did not fit. The last three
    fields are counts and seconds of strict decoding.
    """

    precision: str
    answers: list[Answer] = field(default_factory=list)
    unjustified: list[Unjustified] = field(default_factory=list)
    rows: list[RowDelta] = field(default_factory=list)
    chain_rows: list[ChainRow] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    num_judged: int = 0
    num_redone: int = 0
    redo_seconds: float = 0.0


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Returns the index of the first differing token; None when the two are the same.

    >>> first_difference([7, 8, 9], [7, 8]), first_difference([7], [7])
    (2, None)
    """
    for position, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return position
    return None if len(plain) == len(other) else min(len(plain), len(other))


def compare(
    prompt: str | int,
    prompt_ids: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    target: Target,
) -> Divergence | None:
    """Returns the first divergence of two greedy generations, with the gap from a replay of the
    common prefix; None if they are the same.

    Overwrites the target's KV, so that no later generation can reuse a prefix.
    """
    position = first_difference(plain, other)
    if position is None:
        return None
    logits_V = replay(target, [*prompt_ids, *plain[:position]])
    return _divergence(prompt, position, plain, other, logits_V, logits_V)


def replay(target: Target, context: Sequence[int]) -> np.ndarray:
    """Returns the logits f32[V] after ``context``, whose last row is computed by itself; overwrites
    the target's KV."""
    with target.alone():
        if len(context) > 1:
            target.prefill(context[:-1])
        logits_V = target.verify(TokenTree.root(context[-1])).row(0).copy()
        target.commit([0])
    return logits_V


def _divergence(
    prompt: str | int,
    position: int,
    plain: Sequence[int],
    other: Sequence[int],
    score_V: np.ndarray,
    logits_V: np.ndarray,
) -> Divergence:
    plain_id = plain[position] if position < len(plain) else None
    other_id = other[position] if position < len(other) else None
    gap = None
    if plain_id is not None and other_id is not None:
        gap = float(score_V[plain_id] - score_V[other_id])
    return Divergence(prompt, position, plain_id, other_id, gap, float(np.ptp(logits_V)))


def scores(sampler: Sampler, logits_V: np.ndarray, position: int) -> np.ndarray:
    """Returns the scores f[V] whose argmax is the token at ``position``.

    They are the logits or, with a temperature T, T (log p + Gumbel noise) up to a constant, and
    -inf where p is 0.
    """
    temperature = sampler.params.temperature
    if temperature == 0:
        return logits_V
    ids, log_p = sampler.survivors(logits_V)
    v = (sampler.hash_bits(position, ids) + 0.5) * 2.0**-32
    score_V = np.full(len(logits_V), -np.inf)
    score = temperature * (log_p - np.log(-np.log1p(-v)))
    # The largest log_p is 0: with the largest logit the scores are the logits plus T times noise.
    score_V[slice(None) if ids is None else ids] = logits_V.max() + score
    return score_V


def run(
    engine: Engine,
    prompts: Iterable[BenchPrompt],
    options: SamplingOptions,
    precision: str,
    on_prompt: Callable[[], None] = lambda: None,
    on_skip: Callable[[str], None] = lambda reason: None,
) -> AuditReport:
    """Decodes each prompt (its first turn) plainly and speculatively and checks both.

    ``options`` are greedy, or target sampling with a seed. Calls ``on_prompt`` after each prompt; a
    prompt longer than the context is skipped, and ``on_skip`` gets the reason. Raises UserError
    for options that cannot be judged token by token, and when all answers at a reduced precision
    are too short to measure its rounding.
    """
    _check_options(engine, SamplingParams(**options))
    report = AuditReport(precision)
    auditor = _Auditor(engine, options, report)
    for prompt in prompts:
        try:
            prompt_ids = engine.encode(prompt.content)
            if len(prompt_ids) == engine.target.max_length:
                raise UserError(f"{len(prompt_ids)} tokens leave no room in the context")
        except UserError as error:
            report.skipped.append({"prompt": prompt.id, "reason": str(error)})
            on_skip(f"prompt {prompt.id} skipped: {error}")
        else:
            report.answers.append(auditor.answer(prompt.id, prompt_ids))
        on_prompt()
    if precision != "fp32" and report.answers and not report.chain_rows:
        raise UserError("got no answer of 3 tokens, expected one to measure the rounding with")
    return report


def _check_options(engine: Engine, params: SamplingParams) -> None:
    if params.rule not in ("greedy", "target_sampling"):
        raise UserError(
            f"got acceptance {params.rule}, expected target_sampling: only its tokens can be "
            "compared one by one with those of plain decoding"
        )
    if params.temperature > 0 and params.seed is None:
        raise UserError(f"got temperature {params.temperature} without a seed, expected one")
    if params.has_penalties or params.logit_bias:
        raise UserError("got penalties or a logit bias, expected none: gaps are of the raw logits")


class _Emitted(NamedTuple):
    """A token, the verify row that decided it and what that row says.

    ``logits_V`` is valid until the next token is asked for. It and ``expected_id`` are None for the
    prompt's own token, whose ``num_nodes`` is 0, and for a token off the paths of the tree.
    """

    id: int
    logits_V: np.ndarray | None
    expected_id: int | None
    num_nodes: int


class _Auditor:
    """Decodes prompts plainly and speculatively, and adds what it finds to `report`."""

    def __init__(self, engine: Engine, options: SamplingOptions, report: AuditReport) -> None:
        self._engine, self._options, self._report = engine, options, report
        self._params = SamplingParams(**options)

    def answer(self, prompt: str | int, prompt_ids: list[int]) -> Answer:
        """Decodes one prompt both ways and returns the answers."""
        target, report = self._engine.target, self._report
        plain, kept, last = self._decode_plainly(prompt, prompt_ids)
        speculative, parting_V = self._decode_speculatively(prompt, prompt_ids, plain, kept)
        assert self._engine.last_result is not None
        stats = self._engine.last_result.stats
        report.chain_rows += _chain_rows(target, prompt_ids, plain[:-1], last)
        divergence = None
        position = first_difference(plain, speculative)
        if position is not None:
            logits_V = replay(target, [*prompt_ids, *plain[:position]])
            sampler = Sampler(self._params, target.vocab_size, prompt_ids)
            score_V = scores(sampler, logits_V, len(prompt_ids) + position)
            divergence = _divergence(prompt, position, plain, speculative, score_V, logits_V)
            if parting_V is not None and position not in kept:
                report.rows.append(_row_delta(prompt, position, parting_V, logits_V))
        return Answer(prompt, plain, speculative, stats, divergence)

    def _decode_plainly(
        self, prompt: str | int, prompt_ids: list[int]
    ) -> tuple[list[int], dict[int, np.ndarray], list[np.ndarray]]:
        """Returns the tokens, the sampled rows by position, and the last rows."""
        stride = max(1, self._params.max_new_tokens // SAMPLED_ROWS)
        plain: list[int] = []
        kept: dict[int, np.ndarray] = {}
        num_teeth = (self._engine.target.max_nodes + 1) // 2
        last: deque[np.ndarray] = deque(maxlen=min(CHAIN_ROWS, num_teeth))
        tokens = self._emitted(self._engine.with_drafter("none"), prompt_ids)
        for position, token in enumerate(tokens):
            self._judge(prompt, position, token, is_plain=True)
            plain.append(token.id)
            if token.logits_V is not None:
                last.append(token.logits_V.copy())
                if position % stride == 0:
                    kept[position] = last[-1]
        return plain, kept, list(last)

    def _decode_speculatively(
        self,
        prompt: str | int,
        prompt_ids: list[int],
        plain: list[int],
        kept: dict[int, np.ndarray],
    ) -> tuple[list[int], np.ndarray | None]:
        """Returns the tokens and the tree's row that decided the first one unlike ``plain``'s
        (None: there is none). Up to there, compares rows of trees with those ``kept`` of plain
        decoding."""
        target, report = self._engine.target, self._report
        judged, redone, seconds = target.num_judged, target.num_redone, target.redo_seconds
        speculative: list[int] = []
        is_same, parting_V = True, None
        for position, token in enumerate(self._emitted(self._engine, prompt_ids)):
            self._judge(prompt, position, token, is_plain=False)
            speculative.append(token.id)
            if not is_same:
                continue
            is_same = plain[position : position + 1] == [token.id]
            if token.logits_V is not None and token.num_nodes > 1:
                if position in kept:
                    report.rows.append(_row_delta(prompt, position, token.logits_V, kept[position]))
                if not is_same:
                    parting_V = token.logits_V.copy()
        report.num_judged += target.num_judged - judged
        report.num_redone += target.num_redone - redone
        report.redo_seconds += target.redo_seconds - seconds
        return speculative, parting_V

    def _emitted(self, engine: Engine, prompt_ids: list[int]) -> Iterator[_Emitted]:
        """Yields the tokens of one answer with the rows that decided them."""
        sampler = Sampler(self._params, engine.target.vocab_size, prompt_ids)
        position = len(prompt_ids)
        for step in engine.steps(prompt_ids, reuse=False, **self._options):
            tree = None if step.verified is None else step.verified.tree
            node: int | None = 0
            for place, token in enumerate(step.tokens):
                if step.verified is None or tree is None:
                    yield _Emitted(token, None, None, 0)
                elif node is None or step.path[place : place + 1] != [node]:
                    node = None
                    yield _Emitted(token, None, None, tree.num_nodes)
                else:
                    logits_V = step.verified.row(node)
                    yield _Emitted(token, logits_V, sampler(logits_V, position), tree.num_nodes)
                    node = tree.child(node, token)
                position += 1

    def _judge(self, prompt: str | int, position: int, token: _Emitted, is_plain: bool) -> None:
        if token.num_nodes and token.id != token.expected_id:
            found = Unjustified(prompt, position, is_plain, token.id, token.expected_id)
            self._report.unjustified.append(found)


def _row_delta(
    prompt: str | int, position: int, tree_V: np.ndarray, alone_V: np.ndarray
) -> RowDelta:
    delta = float(np.abs(tree_V - alone_V).max())
    return RowDelta(prompt, position, delta, float(np.ptp(alone_V)))


def _chain_rows(
    target: Target, prompt_ids: Sequence[int], answer: Sequence[int], row_NV: Sequence[np.ndarray]
) -> list[ChainRow]:
    """Computes an answer's rows again, as paths of trees, and compares the last of them with
    ``row_NV``, which were computed one by one."""
    n = len(row_NV)
    if n < 2:
        return []
    context = [*prompt_ids, *answer]
    first = len(context) - max(1, len(answer) // n) * n  # whole trees, of the last rows at least
    rows: list[ChainRow] = []
    with target.alone():
        target.prefill(context[:first])
        for begin in range(first, len(context), n):
            tree, path = _comb(context[begin : begin + n], target.vocab_size)
            verified = target.verify(tree)
            if begin + n == len(context):
                pairs = zip(row_NV, path, strict=True)
                rows = [limits.chain_row(row_V, verified.row(node)) for row_V, node in pairs]
            target.commit(path)
    return rows


def _comb(tokens: Sequence[int], vocab_size: int) -> tuple[TokenTree, list[int]]:
    """Returns a tree with a path of n tokens and a leaf before each of them but the first, and the
    nodes of the path.

    So other rows lie in the cache between those of the path, as in the trees of drafts. Tokens
    5, 7, 9 give the tokens [5, 8, 7, 10, 9], the parents [0, 0, 0, 2, 2] and the path 0, 2, 4.
    """
    num_nodes = 2 * len(tokens) - 1
    token_N = np.repeat(np.asarray(tokens, np.int64), 2)[1:]
    token_N[1::2] = (token_N[1::2] + 1) % vocab_size
    parent_N = np.maximum(np.arange(num_nodes) - 1, 0) // 2 * 2
    return TokenTree(token_N, parent_N), [*range(0, num_nodes, 2)]


def summarise(report: AuditReport) -> dict[str, Any]:
    """Returns the figures of a report, ready for JSON.

    ``real`` counts real divergences, unjustified tokens and deviating rows: anything but 0 is a
    fault. ``rounding_limit`` is the gap above which a divergence is real at this precision,
    ``row_limit`` the |Δlogit| above which a tree's row deviates (both: or a near tie's share of the
    row's range, if that is more), and ``expected_false_alarms`` says how many of either a sound
    audit has to expect.
    """
    compared = sum(
        len(answer.speculative) if answer.divergence is None else answer.divergence.position + 1
        for answer in report.answers
    )
    allowed = limits.EXACT
    if report.precision != "fp32":
        allowed = limits.derive(report.chain_rows, compared, len(report.rows))
    divergences = _classified(report, allowed)
    deviating = [row for row in report.rows if row.delta > max(NEAR_TIE * row.spread, allowed.row)]
    counts = Counter(each["class"] for each in divergences)
    stats = Stats.total(answer.stats for answer in report.answers)
    return {
        "prompts": len(report.answers),
        "tokens": sum(len(answer.speculative) for answer in report.answers),
        "accepted_length": stats.accepted_length,
        "identical": ratio(len(report.answers) - len(divergences), len(report.answers)),
        "counts": {name: counts[name] for name in CLASSES},
        "unjustified": [dataclasses.asdict(each) for each in report.unjustified],
        "deviating_rows": [row._asdict() for row in deviating],
        "real": counts["real"] + len(report.unjustified) + len(deviating),
        "tokens_compared": compared,  # of each answer, up to the divergence
        "divergences_per_1000_tokens": 1000 * ratio(len(divergences), compared),
        "near_tie_limit": NEAR_TIE,  # as a share of the row's range
        "rounding_limit": allowed.gap,
        "row_limit": allowed.row,
        "expected_false_alarms": {"divergences": allowed.false_gaps, "rows": allowed.false_rows},
        "delta_logit": {
            "tree_rows": _spread_of([row.delta for row in report.rows]),
            "chain_rows": _spread_of([row.delta for row in report.chain_rows]),
        },
        "divergences": divergences,
        "strict": _strict(report, stats),
        "skipped": report.skipped,
    }


def _classified(report: AuditReport, allowed: Limits) -> list[dict[str, Any]]:
    """Returns each answer's divergence with its class."""
    return [
        {
            **dataclasses.asdict(answer.divergence),
            "class": classify(
                answer.divergence.gap, NEAR_TIE * answer.divergence.spread, allowed.gap
            ),
        }
        for answer in report.answers
        if answer.divergence is not None
    ]


def _strict(report: AuditReport, stats: Stats) -> dict[str, Any]:
    return {
        "rows": report.num_judged,
        "redone": report.num_redone,
        "share": ratio(report.num_redone, report.num_judged),
        "seconds": report.redo_seconds,
        "share_of_decoding": ratio(report.redo_seconds, stats.decode_seconds),
    }


def classify(gap: float | None, near_tie: float, limit: float) -> str:
    """Returns "near tie", "rounding" or "real", by the gap between two tokens at a divergence.

    A gap of None, where one generation had ended, is real.
    """
    if gap is None:
        return "real"
    if abs(gap) <= near_tie:
        return "near tie"
    return "rounding" if abs(gap) <= limit else "real"


def _spread_of(deltas: Sequence[float]) -> dict[str, Any]:
    if not deltas:
        return {"rows": 0, "median": None, "maximum": None}
    return {"rows": len(deltas), "median": float(np.median(deltas)), "maximum": max(deltas)}
