"""Describes StarCoder2: layer norms and a plain MLP, all with biases."""

from __future__ import annotations

from spec_export.model.families.family import Family

FAMILY = Family(
    mlp="plain",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    norm="layer",
    eps="norm_epsilon",
)
