"""Describes Mixtral: Llama's layer with experts."""

from __future__ import annotations

from spec_export.model.families.family import ExpertsTable, Family

FAMILY = Family(mlp="experts", experts=ExpertsTable())
