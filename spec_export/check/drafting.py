"""Measures a drafter that is being trained as it will be served: in a bundle, by the runtime."""

from collections.abc import Sequence
from pathlib import Path

from spec_export.build.make_bundle import build
from spec_export.build.options import BuildOptions
from spec_export.training.recipe import Recipe
from spec_runtime import load
from spec_runtime.loop.stats import Stats


def accepted_length(
    plan: Recipe, drafter: Path, questions: Sequence[tuple[Sequence[int], int]]
) -> float:
    """Returns the tokens per step of greedy answers with the drafter in this folder.

    questions: the tokens of each prompt, and the most that are answered. The bundle, of the
    recipe's target in float32, is built beside the drafter, in place of an earlier one.
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
        answers = [engine.generate(ids, max_new_tokens=most) for ids, most in questions]
    return Stats.total(answer.stats for answer in answers).accepted_length
