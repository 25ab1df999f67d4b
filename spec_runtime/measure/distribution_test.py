"""Tests by chi-square, over many seeds, whether a token follows the target's own distribution.

This is for acceptance by rejection, which shares no random stream with plain decoding, so that
answers cannot be compared token by token. The first token of an answer comes before any draft. The
second one is the first that acceptance decides; given the first, its distribution has to be
p(. | prompt, first), which one row of the target tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from spec_runtime.errors import UserError
from spec_runtime.measure.audit import replay
from spec_runtime.sampling import Sampler, SamplingOptions, SamplingParams

if TYPE_CHECKING:
    from spec_runtime.engine import Engine

SIGNIFICANCE = 1e-3
MIN_COUNT = 25  # seeds that have to share a first token


@dataclass(frozen=True)
class DistributionTest:
    """The chi-square test of the second token of a prompt's answers, given the first.

    ``count`` of ``draws`` seeds had one of the ``firsts`` first tokens that were common enough. In
    ``drafted`` of these the second token was drafted, in ``accepted`` it was taken from the draft.
    """

    prompt: str | int
    draws: int
    count: int
    firsts: int
    drafted: int
    accepted: int
    bins: int
    statistic: float
    p_value: float

    @property
    def is_real(self) -> bool:
        """Says whether the distribution differs: a sound one does in one test of 1,000."""
        return self.p_value < SIGNIFICANCE


def check_second_token(
    engine: Engine,
    prompt: str | int,
    prompt_ids: list[int],
    options: SamplingOptions,
    draws: int,
    on_draw: Callable[[], None] = lambda: None,
) -> DistributionTest:
    """Tests the second token over ``draws`` seeds against the target's processed distribution.

    The seeds count up from that of ``options``. Calls ``on_draw`` after each. Raises UserError if
    two tokens do not fit after the prompt, if no first token came often enough, or if none was
    followed by a draft.
    """
    most = engine.target.max_length - 2
    if len(prompt_ids) > most:
        raise UserError(
            f"got a prompt of {len(prompt_ids)} tokens, expected at most {most}, so that two more "
            "fit into the context"
        )
    seed = options["seed"] or 0
    second_ids: dict[int, Counter[int]] = {}
    drafted: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for i in range(draws):
        each: SamplingOptions = {
            **options,
            "seed": seed + i,
            "max_new_tokens": 4,  # the tree under the second token has somewhere to go
            "ignore_eos": True,
        }
        steps = engine.steps(prompt_ids, **each)
        first, second = next(steps).tokens[0], next(steps)
        steps.close()
        second_ids.setdefault(first, Counter())[second.tokens[0]] += 1
        assert second.verified is not None
        drafted[first] += second.verified.tree.num_nodes > 1
        accepted[first] += second.num_accepted > 0
        on_draw()
    common = {first: counts for first, counts in second_ids.items() if counts.total() >= MIN_COUNT}
    if not common:
        raise UserError(
            f"got no first token {MIN_COUNT} times in {draws} draws, expected one; take more "
            "draws, a lower temperature or another prompt"
        )
    if not any(drafted[first] for first in common):
        raise UserError(
            f"got no draft after the first token in {draws} draws, expected some; take another "
            "prompt or drafter"
        )
    groups = []
    for first, counts in common.items():
        context = [*prompt_ids, first]
        sampler = Sampler(SamplingParams(**options), engine.target.vocab_size, context)
        logits_V = replay(engine.target, context)
        groups.append((counts, sampler.probabilities(logits_V, len(context))))
    return DistributionTest(
        prompt,
        draws,
        count=sum(counts.total() for counts in common.values()),
        firsts=len(common),
        drafted=sum(drafted[first] for first in common),
        accepted=sum(accepted[first] for first in common),
        **chi_square(groups)._asdict(),
    )


class ChiSquare(NamedTuple):
    """Holds the result of `chi_square`."""

    bins: int
    statistic: float
    p_value: float


def chi_square(groups: Sequence[tuple[Counter[int], np.ndarray]]) -> ChiSquare:
    """Compares counted ids with a distribution p f64[V], each group with its own.

    Ids that are expected fewer than 5 times share one bin of their group. The p-value is the share
    of 10,000 simulated experiments that are at least as far from p.
    """
    rng = np.random.default_rng(0)
    num_bins, found, simulated = 0, 0.0, np.zeros(10_000)
    for counts, p_V in groups:
        n = counts.total()
        ids = np.flatnonzero(n * p_V >= 5)
        # The floor keeps the statistic finite where an impossible id came.
        p_B = np.append(p_V[ids], max(1e-12, 1 - p_V[ids].sum()))
        count_B = np.array([counts[i] for i in ids.tolist()], float)
        count_B = np.append(count_B, n - count_B.sum())
        num_bins += len(p_B)
        found += float(((count_B - n * p_B) ** 2 / (n * p_B)).sum())
        drawn_SB = rng.multinomial(n, p_B / p_B.sum(), len(simulated))
        simulated += ((drawn_SB - n * p_B) ** 2 / (n * p_B)).sum(1)
    at_least = int((simulated >= found - 1e-9).sum())
    return ChiSquare(num_bins, found, (1 + at_least) / (1 + len(simulated)))
