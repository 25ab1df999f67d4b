"""Describes Gemma 2: Gemma with norms on both sides, softcaps, and windows in every other layer."""

from __future__ import annotations

from spec_export.model.families.family import Family, Scale

FAMILY = Family(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    unit_offset=True,
    activation="hidden_activation",
    embedding_scale=Scale("hidden_size", 0.5),
    attention_scale=Scale("query_pre_attn_scalar", -0.5),
    attention_softcap="attn_logit_softcapping",
    final_softcap="final_logit_softcapping",
)
