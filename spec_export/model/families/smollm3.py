"""Describes SmolLM3: Llama's layer, every fourth one without rotation."""

from __future__ import annotations

from spec_export.model.families.family import Family, layer_window

FAMILY = Family(
    rope=lambda raw, layer: bool(raw.no_rope_layers[layer]),
    window=lambda raw, layer: layer_window(raw, layer) if raw.use_sliding_window else None,
    reads=("no_rope_layers",),
)
