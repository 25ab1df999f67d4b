"""Describes GLM-4 of 2024: fused gate and up, with neighbours of a part of each head rotated."""

from __future__ import annotations

from spec_export.model.families.family import Family

FAMILY = Family(
    up=("mlp.gate_up_proj",),
    rotates_part=True,
    interleaved=True,
)
