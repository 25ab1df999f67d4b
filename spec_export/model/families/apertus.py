"""Describes Apertus: Qwen3's attention, and a plain MLP whose activation has learned numbers."""

from __future__ import annotations

from dataclasses import replace

from spec_export.model.families import qwen3

FAMILY = replace(
    qwen3.FAMILY,
    attention_norm="attention_layernorm",
    mlp_norm="feedforward_layernorm",
    mlp="plain",
    up=("mlp.up_proj",),
)
