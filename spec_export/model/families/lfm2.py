"""Describes LFM2 and LFM2.5: most layers have a short convolution in place of attention."""

from __future__ import annotations

from spec_export.model.families.family import Family

FAMILY = Family(
    out="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    final_norm="embedding_norm",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    eps="norm_eps",
    activation=None,
    layer_mixer=lambda raw, layer: (
        "convolution" if raw.layer_types[layer] == "conv" else "attention"
    ),
)
