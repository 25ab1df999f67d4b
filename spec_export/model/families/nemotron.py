"""Describes Nemotron: layer norms stored less 1, a plain MLP, half of each head rotated."""

from __future__ import annotations

from spec_export.model.families.family import Family

FAMILY = Family(
    mlp="plain",
    up=("mlp.up_proj",),
    norm="layer",
    unit_offset=True,
    eps="norm_eps",
    rotates_part=True,
)
