"""Describes Gemma 3's text model: Gemma 2 with a norm over each query and key head.

Layers with a window have a rotary table of their own.
"""

from __future__ import annotations

from dataclasses import replace

from spec_export.model.families import gemma2

FAMILY = replace(
    gemma2.FAMILY,
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    attention_softcap=None,  # transformers' class ignores it, so that a model with one is refused
)
