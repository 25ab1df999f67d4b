"""Describes Qwen3: Llama's layer, with a norm over each query and key head."""

from __future__ import annotations

from spec_export.model.families.family import Family

FAMILY = Family(
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    reads=("use_qk_norm", "qk_layernorm"),
)
