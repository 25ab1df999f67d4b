"""Describes Qwen3-MoE: Qwen3's layer with experts, in some layers a dense MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spec_export.model.families import qwen3
from spec_export.model.families.family import ExpertsTable


def dense_or_experts(raw: Any, layer: int) -> str:
    """Returns the kind of a layer's MLP in the Qwen families."""
    is_dense = layer in raw.mlp_only_layers or (layer + 1) % raw.decoder_sparse_step != 0
    return "gated" if is_dense or not raw.num_experts else "experts"


FAMILY = replace(
    qwen3.FAMILY,
    experts=ExpertsTable(normalizes="norm_topk_prob"),
    layer_mlp=dense_or_experts,
)
