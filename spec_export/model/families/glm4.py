"""Describes GLM-4 of 2025: its predecessor with norms on both sides."""

from __future__ import annotations

from dataclasses import replace

from spec_export.model.families import glm

FAMILY = replace(
    glm.FAMILY,
    attention_post_norm="post_self_attn_layernorm",
    mlp_post_norm="post_mlp_layernorm",
)
