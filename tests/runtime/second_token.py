"""Tests by chi-square whether the second token of answers follows the target's own distribution.

This is for acceptance by rejection, which shares no random stream with plain decoding. The first
token of an answer comes before any draft; given the first, the second one, which acceptance
decides, has to follow p(. | prompt, first), which one row of the target tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spec_runtime.engine import Engine
from spec_runtime.measure.audit import replay
from spec_runtime.sampling import Sampler, SamplingOptions, SamplingParams

MIN_COUNT = 25  # seeds that have to share a first token


class SecondToken(NamedTuple):
    """`common` of the seeds had one of the `firsts` common first tokens. In `drafted` of these the
    second token was drafted, in `accepted` it was taken from the draft."""

    common: int
    firsts: int
    drafted: int
    accepted: int
    p_value: float


def check_second_token(
    engine: Engine, prompt_ids: list[int], options: SamplingOptions, draws: int
) -> SecondToken:
    """Compares the second tokens of the seeds 0 to `draws` with the target's distribution."""
    second_ids: dict[int, Counter[int]] = {}
    drafted, accepted = Counter[int](), Counter[int]()
    for seed in range(draws):
        # four tokens, so that the tree under the second one has somewhere to go
        each: SamplingOptions = {**options, "seed": seed, "max_new_tokens": 4, "ignore_eos": True}
        steps = engine.steps(prompt_ids, **each)
        first, second = next(steps).tokens[0], next(steps)
        steps.close()
        second_ids.setdefault(first, Counter())[second.tokens[0]] += 1
        assert second.verified is not None
        drafted[first] += second.verified.tree.num_nodes > 1
        accepted[first] += second.num_accepted > 0
    common = {first: counts for first, counts in second_ids.items() if counts.total() >= MIN_COUNT}
    groups = []
    for first, counts in common.items():
        context = [*prompt_ids, first]
        sampler = Sampler(SamplingParams(**options), engine.target.vocab_size, context)
        logits_V = replay(engine.target, context)
        groups.append((counts, sampler.probabilities(logits_V, len(context))))
    return SecondToken(
        sum(counts.total() for counts in common.values()),
        len(common),
        sum(drafted[first] for first in common),
        sum(accepted[first] for first in common),
        chi_square(groups)[1],
    )


def chi_square(groups: Sequence[tuple[Counter[int], np.ndarray]]) -> tuple[float, float]:
    """Returns the statistic of counted ids against a distribution p f64[V], each group with its
    own, and its p-value: the share of 10,000 simulated experiments that are at least as far off.

    Ids that are expected fewer than 5 times share one bin of their group.
    """
    rng = np.random.default_rng(0)
    found, simulated = 0.0, np.zeros(10_000)
    for counts, p_V in groups:
        n = counts.total()
        ids = np.flatnonzero(n * p_V >= 5)
        p_B = np.append(p_V[ids], max(1e-12, 1 - p_V[ids].sum()))  # finite for an impossible id
        count_B = np.array([counts[i] for i in ids.tolist()], float)
        count_B = np.append(count_B, n - count_B.sum())
        found += float(((count_B - n * p_B) ** 2 / (n * p_B)).sum())
        drawn_SB = rng.multinomial(n, p_B / p_B.sum(), len(simulated))
        simulated += ((drawn_SB - n * p_B) ** 2 / (n * p_B)).sum(1)
    return found, (1 + int((simulated >= found - 1e-9).sum())) / (1 + len(simulated))
