"""Describes Hunyuan: Llama's layer, with a norm over each head after the rotation."""

from __future__ import annotations

from spec_export.model.families.family import Family

FAMILY = Family(
    q_norm="self_attn.query_layernorm",
    k_norm="self_attn.key_layernorm",
    qk_norm="head_after",
    reads=("use_qk_norm",),
)
