"""Describes Qwen1.5-MoE and Qwen2-MoE: experts, and a gated MLP that every row goes through."""

from __future__ import annotations

from spec_export.model.families.family import ExpertsTable, Family
from spec_export.model.families.qwen3_moe import dense_or_experts

SHARED = "mlp.shared_expert"
FAMILY = Family(
    experts=ExpertsTable(
        normalizes="norm_topk_prob",
        shared=(f"{SHARED}.gate_proj", f"{SHARED}.up_proj", f"{SHARED}.down_proj"),
        shared_gate="mlp.shared_expert_gate",
    ),
    layer_mlp=dense_or_experts,
)
