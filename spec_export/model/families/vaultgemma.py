"""Describes VaultGemma: Gemma 2 without norms after attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from spec_export.model.families import gemma2

FAMILY = replace(gemma2.FAMILY, attention_post_norm=None, mlp_post_norm=None)
