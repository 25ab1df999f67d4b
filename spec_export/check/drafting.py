"""Measures a drafter that is being trained as it will be served: in a bundle, by the runtime."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from spec_export.build.make_bundle import build
from spec_export.build.options import BuildOptions
from spec_export.training.recipe import Recipe
from spec_runtime import load
from spec_runtime.loop.stats import Stats

ANSWER_TOKENS = 128  # the most that are asked for


def accepted_length(
    plan: Recipe, drafter: Path, sequences: Sequence[tuple[Tensor, Tensor]]
) -> float:
    """Returns the tokens per step of greedy answers with the drafter in this folder, to what is
    before the first answer of each sequence, given as token i64[T] and loss bool[T].

    The bundle, of the recipe's target in float32, is built beside the drafter, in place of an
    earlier one.
    """
    bundle = build(
        BuildOptions(
            plan.model,
            base=plan.base,
            drafter_checkpoints=(drafter,),
            max_length=plan.data.max_length,
            out=drafter.with_name("bundle"),
            lanes=1,
        )
    )
    with load(bundle, lookup=False, verify=False, profile=False) as engine:
        parts = []
        for token_T, loss_T in sequences:
            start = max(1, int(loss_T.int().argmax()))
            most = min(ANSWER_TOKENS, len(token_T) - start)
            parts.append(engine.generate(token_T[:start].tolist(), max_new_tokens=most).stats)
    return Stats.total(parts).accepted_length
