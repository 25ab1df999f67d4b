"""Foretells what a training run takes: memory at its peak, and room on the disk."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from spec_export.training import disk
from spec_export.training.trainer import TrainingJob

LIBRARIES = 700_000_000  # torch, transformers and accelerate
PER_TRAINED_WEIGHT = 16  # the weight, its gradient and AdamW's two moments
PER_BATCH_NUMBER = 900  # bytes that a step keeps of each number of a batch's features


def say(
    job: TrainingJob,
    saved: nn.Module,
    trained: Iterable[nn.Parameter],
    target_weights: int,
    features: int,
    has_held_out: bool,
) -> None:
    """Reports what the run takes, its checkpoints among it.

    saved: the module whose tensors a checkpoint holds. trained: the parameters that the optimiser
    changes. target_weights: how many the target has. features: the bytes of the feature cache, 0
    where steps run the target.
    """
    settings = job.plan.train
    drafter = job.drafter
    num_trained = sum(parameter.numel() for parameter in trained)
    own = sum(tensor.nbytes for tensor in saved.state_dict().values())
    checkpoint = own + num_trained * (8 + 4 * (settings.ema > 0))  # moments, average
    kept = settings.keep_checkpoints + 1 + has_held_out  # one is written before another goes
    merged = 4 * target_weights if job.plan.joint else 0
    width = 2 if settings.precision == "bf16" and not merged else 4
    held = merged or (0 if features else width * target_weights)
    steps = of_steps(drafter, num_trained, settings.batch_tokens, held)
    parts = [f"{kept} checkpoints of {disk.shown(checkpoint)}"]
    if features:
        parts.insert(0, f"features of {disk.shown(features)}")
    if merged:
        parts.append(f"the merged target of {disk.shown(merged)}")
    disk.foretell(
        "training",
        LIBRARIES + max((width + 1) * target_weights, steps),  # while it is read: a byte for parts
        features + kept * checkpoint + merged + own,
        job.out,
        job.report,
        of=", ".join(parts),
    )


def of_steps(drafter: Any, num_trained: int, batch_tokens: int, held: int) -> int:
    """Returns the bytes that steps take, `held` of them for the target."""
    own = sum(tensor.nbytes for tensor in (*drafter.parameters(), *drafter.buffers()))
    batch = PER_BATCH_NUMBER * batch_tokens * int(drafter.dims.hidden_size)
    return held + PER_TRAINED_WEIGHT * num_trained + own + batch
