"""Describes Mellum 2: Qwen3-MoE, with a list that says which layers have experts.

Layers with a window have a rotary table of their own.
"""

from __future__ import annotations

from dataclasses import replace

from spec_export.model.families import qwen3_moe

FAMILY = replace(
    qwen3_moe.FAMILY,
    layer_mlp=lambda raw, layer: "experts" if raw.mlp_layer_types[layer] == "sparse" else "gated",
)
