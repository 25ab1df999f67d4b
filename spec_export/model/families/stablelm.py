"""Describes StableLM: layer norms, a part of each head rotated, parallel blocks in some models."""

from __future__ import annotations

from spec_export.model.families.family import Family

FAMILY = Family(
    norm="layer",
    eps="layer_norm_eps",
    parallel="use_parallel_residual",
    rotates_part=True,
)
