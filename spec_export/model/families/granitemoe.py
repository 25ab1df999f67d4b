"""Describes Granite 3 MoE: Granite's scales with experts."""

from __future__ import annotations

from dataclasses import replace

from spec_export.model.families import granite
from spec_export.model.families.family import ExpertsTable

FAMILY = replace(
    granite.FAMILY,
    mlp="experts",
    experts=ExpertsTable(
        router="block_sparse_moe.router",
        gate_up="block_sparse_moe.experts.gate_up_proj",
        down="block_sparse_moe.experts.down_proj",
    ),
)
