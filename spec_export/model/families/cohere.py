"""Describes Command R: Command R7B without windows, so that all layers rotate."""

from __future__ import annotations

from dataclasses import replace

from spec_export.model.families import cohere2
from spec_export.model.families.family import rope_everywhere

FAMILY = replace(cohere2.FAMILY, rope=rope_everywhere)
