"""Scores texts under a target, which is told each token and asked how likely it was (teacher
forcing)."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from spec_runtime.bundle.manifest import Manifest
from spec_runtime.errors import UserError
from spec_runtime.loop.target import Target
from spec_runtime.trees.tree import TokenTree

SCORED_ROWS = 32  # tokens that are scored in one pass, which returns all their logits


def check_reference(audited: Manifest, reference: Manifest) -> None:
    """Raises UserError unless ``reference`` can judge the answers of ``audited``: it is fp32, has
    the same tokenizer and no shorter context."""
    if reference.target.precision != "fp32":
        raise UserError(f"got a reference of {reference.target.precision}, expected an fp32 one")
    if reference.tokenizer.sha256 != audited.tokenizer.sha256:
        raise UserError(
            f"got reference {reference.name} with another tokenizer than {audited.name}, expected "
            "the same target in fp32"
        )
    if reference.target.max_length < audited.target.max_length:
        raise UserError(
            f"got a reference with a context of {reference.target.max_length}, expected "
            f"{audited.target.max_length} or more, as {audited.name} has"
        )


def answer_rows(
    target: Target, prompt_ids: Sequence[int], output: Sequence[int]
) -> Iterator[np.ndarray]:
    """Yields the logits f32[V] before each token of ``output``, after the prompt and the tokens
    before it; overwrites the target's KV. A row is valid until the next one, and the target is
    taken until the last."""
    context = [prompt_ids[-1], *output[:-1]]
    with target.alone():
        if len(prompt_ids) > 1:
            target.prefill(prompt_ids[:-1])
        for begin in range(0, len(output), SCORED_ROWS):
            chunk = TokenTree.chain(context[begin : begin + SCORED_ROWS])
            verified = target.verify(chunk)
            for row in range(chunk.num_nodes):
                yield verified.row(row)
            target.commit(range(chunk.num_nodes))


def log_prob(target: Target, prompt_ids: Sequence[int], output: Sequence[int]) -> float:
    """Returns the log-likelihood of ``output`` after the prompt, in nats; overwrites the target's
    KV."""
    rows = answer_rows(target, prompt_ids, output)
    return sum(float(log_softmax(row)[token]) for token, row in zip(output, rows, strict=True))


def log_softmax(row_V: np.ndarray) -> np.ndarray:
    """Returns log-probabilities f64[V] of logits."""
    logits_V = row_V.astype(np.float64)
    logits_V -= logits_V.max()
    return logits_V - math.log(np.exp(logits_V).sum())
