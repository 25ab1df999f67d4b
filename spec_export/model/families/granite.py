"""Describes Granite 3: Llama's layer with four scales."""

from __future__ import annotations

from spec_export.model.families.family import Family, Scale

FAMILY = Family(
    embedding_scale=Scale("embedding_multiplier"),
    attention_scale=Scale("attention_multiplier"),
    residual_scale=Scale("residual_multiplier"),
    logit_scale=Scale("logits_scaling", -1),
)
