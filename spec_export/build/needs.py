"""Foretells what a build takes: memory at its peak, and room on the disk."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from spec_export.build.drafters import LoadedDrafter
from spec_export.build.options import BuildOptions
from spec_export.model.decoder import Backbone
from spec_export.report import Report
from spec_export.training import disk
from spec_export.training.checkpoint import SavedDrafter

# Bytes of memory for each weight of the largest table (embedding or head) or of the largest layer;
# a build works on one of them at a time. Measured: up to 7, and 9.9 with int8's smoothed head.
PER_WEIGHT, PER_SMOOTHED_WEIGHT = 8, 10
LIBRARIES = 700_000_000  # torch, transformers, and graphs without weights
# Bytes of a weight in the bundle, with its block's scales: in layers, the embedding and the head.
# That of int4 is with minima; with zero points it is 0.64.
STORED = {
    "fp32": (4.0, 4.0, 4.0),
    "fp16": (2.0, 2.0, 2.0),
    "bf16": (2.0, 2.0, 2.0),
    "int8": (1.0, 1.125, 1.0),
    "int4": (0.75, 1.125, 1.125),
    "fp8": (1.03, 2.0, 1.03),
}


@dataclass(frozen=True)
class Needs:
    """The bytes of memory that a build takes at its peak, and those that it writes to the disk."""

    memory: float
    disk: float


def foretell(
    options: BuildOptions,
    backbone: Backbone,
    saved: Sequence[SavedDrafter],
    draft_models: Sequence[LoadedDrafter],
) -> Needs:
    """Returns what the build of a target and its drafters takes, TensorRT plans aside.

    Reads no weights. saved: the trained drafters, which borrow the target's tables in float32.
    """
    models = [(backbone, options.target_precision)]
    models += [(each.module.backbone, options.precision_of(each.module)) for each in draft_models]
    memory = LIBRARIES + max(_worked_on(model, precision) for model, precision in models)
    written = sum(_stored(model, precision) for model, precision in models)
    V, D = backbone.embedding.weight.shape
    if saved:
        memory += 4.0 * V * D * len({backbone.embedding, backbone.head})
    for each in saved:
        own = sum(tensor.numel() for tensor in each.state.values())
        if each.draft_token_ids is None:
            rows = V
        else:
            rows = len(each.draft_token_ids)
            memory += 4 * rows * D
        memory += 4 * own
        written += 4 * (own + (V + rows) * D)
    return Needs(memory, written)


def _worked_on(backbone: Backbone, precision: str) -> float:
    """Returns the bytes that the largest part takes while it is read and quantised."""
    tables = [backbone.embedding.weight.numel(), backbone.head.weight.numel()]
    largest = max(*tables, *(_count(layer) for layer in backbone.layers))
    return (PER_SMOOTHED_WEIGHT if precision == "int8" else PER_WEIGHT) * largest


def _stored(backbone: Backbone, precision: str) -> float:
    """Returns the bytes of a model's weights in a bundle."""
    in_layers, embedding, head = STORED[precision]
    if backbone.head is backbone.embedding and embedding == in_layers:
        head = 0  # tied tables are stored once, unless they are quantised
    return (
        in_layers * _count(backbone.layers)
        + embedding * backbone.embedding.weight.numel()
        + head * backbone.head.weight.numel()
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def say(needs: Needs, out: Path, report: Report) -> None:
    """Reports what the build takes and what is free, as a warning where that is less."""
    disk.foretell("the build", needs.memory, needs.disk, out, report)
