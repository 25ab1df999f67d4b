"""Audit: where two generations of one prompt part, and how near a tie the target was there.

It compares token ids and asks the target again; it does not know how the tokens came about.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from spec_runtime.target import Target


@dataclass(frozen=True)
class Divergence:
    """The first difference between plain decoding and another way of decoding the same prompt.

    ``position`` counts generated tokens from 0. An id is None where that generation had ended, and
    then so is ``gap``; else ``gap`` is the target's logit of ``plain_id`` less that of ``id``.
    """

    prompt: str | int
    position: int
    plain_id: int | None
    id: int | None
    gap: float | None


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first differing token; None when the two are the same.

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
    """The first divergence, its gap computed by one prefill of the common prefix.

    The target's KV is overwritten, so whatever a prefix reuse relied on is gone.
    """
    position = first_difference(plain, other)
    if position is None:
        return None
    plain_id = plain[position] if position < len(plain) else None
    other_id = other[position] if position < len(other) else None
    gap = None
    if plain_id is not None and other_id is not None:
        target.holder = None
        target.truncate(0)
        verified, _ = target.prefill([*prompt_ids, *plain[:position]])
        logits_V = verified.row(0)
        gap = float(logits_V[plain_id] - logits_V[other_id])
    return Divergence(prompt, position, plain_id, other_id, gap)
