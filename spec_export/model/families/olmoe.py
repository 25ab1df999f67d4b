"""Describes OLMoE: norms over all query and all key heads at once, and experts."""

from __future__ import annotations

from spec_export.model.families.family import ExpertsTable, Family

FAMILY = Family(
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    qk_norm="whole",
    mlp="experts",
    experts=ExpertsTable(normalizes="norm_topk_prob"),
)
