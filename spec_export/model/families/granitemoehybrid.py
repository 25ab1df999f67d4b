"""Describes the dense models of Granite 4: Granite 3 with a fused MLP, some without rotation."""

from __future__ import annotations

from dataclasses import replace

from spec_export.model.families import granite

FAMILY = replace(
    granite.FAMILY,
    up=("shared_mlp.input_linear",),
    down="shared_mlp.output_linear",
    width="shared_intermediate_size",
    rope=lambda raw, layer: raw.position_embedding_type == "rope",
)
