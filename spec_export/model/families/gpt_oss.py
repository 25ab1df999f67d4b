"""Describes gpt-oss: attention sinks, and experts with biases and a clamped activation."""

from __future__ import annotations

from spec_export.model.families.family import ExpertsTable, Family

FAMILY = Family(
    sinks="self_attn.sinks",
    mlp="experts",
    experts=ExpertsTable(
        router="mlp.router",
        is_turned=True,
        sharpness="swiglu_alpha",
        limit="swiglu_limit",
        shift=1.0,
    ),
)
