"""Describes Command R7B: one layer norm before attention and MLP side by side.

Layers without a window do not rotate.
"""

from __future__ import annotations

from spec_export.model.families.family import SLIDING, Family, Scale

FAMILY = Family(
    mlp_norm=None,
    norm="layer",
    eps="layer_norm_eps",
    parallel=True,
    interleaved=True,
    logit_scale=Scale("logit_scale"),
    rope=lambda raw, layer: raw.layer_types[layer] == SLIDING,
)
