"""Describes EXAONE 4: norms only after attention and MLP.

Where some layers have a window, only these rotate.
"""

from __future__ import annotations

from spec_export.families.family import SLIDING, Family

FAMILY = Family(
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
    rope=lambda raw, layer: raw.sliding_window is None or raw.layer_types[layer] == SLIDING,
)
