"""Describes OLMo of 2024: Llama's layer with layer norms that have no weights."""

from __future__ import annotations

from spec_export.model.families.family import Family

FAMILY = Family(norm="layer", has_norm_weights=False, eps=1e-5)
