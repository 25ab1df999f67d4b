"""Describes Arcee (AFM): Llama's attention with a plain MLP."""

from __future__ import annotations

from spec_export.model.families.family import Family

FAMILY = Family(mlp="plain", up=("mlp.up_proj",))
