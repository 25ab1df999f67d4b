"""Describes OLMo 2 and 3: norms only after attention and MLP, and over all heads at once."""

from __future__ import annotations

from spec_export.model.families.family import Family

FAMILY = Family(
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
    qk_norm="whole",
    reads=("use_qk_norm",),
)
