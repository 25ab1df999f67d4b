"""Describes EXAONE 4: OLMo 2 with norms over each query and key head.

Where some layers have a window, only these rotate.
"""

from __future__ import annotations

from dataclasses import replace

from spec_export.model.families import olmo2
from spec_export.model.families.family import SLIDING

FAMILY = replace(
    olmo2.FAMILY,
    qk_norm="head",
    rope=lambda raw, layer: raw.sliding_window is None or raw.layer_types[layer] == SLIDING,
    reads=(),
)
