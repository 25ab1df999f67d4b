"""Describes every family of models that is supported, each in a file of its own where
its layer differs from another's.

`FAMILIES` maps transformers' model_type to a family's table.
"""

from __future__ import annotations

from pathlib import Path

from spec_export.families import (
    arcee,
    cohere2,
    ernie4_5,
    exaone4,
    gemma,
    gemma2,
    gemma3_text,
    glm,
    glm4,
    gpt_oss,
    granite,
    granitemoe,
    granitemoehybrid,
    hunyuan_v1_dense,
    lfm2,
    llama,
    ministral3,
    mixtral,
    nemotron,
    olmo2,
    olmoe,
    phi3,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
    stablelm,
    starcoder2,
    wrappers,
)
from spec_export.families.family import EXPERTS as EXPERTS
from spec_export.families.family import FULL as FULL
from spec_export.families.family import SLIDING as SLIDING
from spec_export.families.family import Family as Family
from spec_export.families.family import LayerKind as LayerKind
from spec_export.families.family import Scale as Scale
from spec_export.families.family import has_tables_by_kind as has_tables_by_kind
from spec_runtime.errors import UnsupportedModelError
from spec_runtime.mapping import parse_json

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": llama.FAMILY,
    "qwen2": llama.FAMILY,
    "qwen3": qwen3.FAMILY,
    "phi3": phi3.FAMILY,
    "arcee": arcee.FAMILY,
    "cohere2": cohere2.FAMILY,
    "cwm": llama.FAMILY,
    "ernie4_5": ernie4_5.FAMILY,
    "exaone4": exaone4.FAMILY,
    "gemma": gemma.FAMILY,
    "gemma2": gemma2.FAMILY,
    "gemma3_text": gemma3_text.FAMILY,
    "glm": glm.FAMILY,
    "glm4": glm4.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "granite": granite.FAMILY,
    "granitemoe": granitemoe.FAMILY,
    "granitemoehybrid": granitemoehybrid.FAMILY,
    "helium": ernie4_5.FAMILY,
    "hunyuan_v1_dense": hunyuan_v1_dense.FAMILY,
    "internlm3": llama.FAMILY,
    "iquestcoder": llama.FAMILY,
    "lfm2": lfm2.FAMILY,
    "ministral": llama.FAMILY,
    "ministral3": ministral3.FAMILY,
    "mixtral": mixtral.FAMILY,
    "nemotron": nemotron.FAMILY,
    "olmo2": olmo2.FAMILY,
    "olmo3": olmo2.FAMILY,
    "olmoe": olmoe.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "seed_oss": llama.FAMILY,
    "smollm3": smollm3.FAMILY,
    "stablelm": stablelm.FAMILY,
    "starcoder2": starcoder2.FAMILY,
}


def require_known(model_type: object) -> Family:
    """Returns the table of a family; raises UnsupportedModelError, which lists all, for others."""
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"got a model of type '{model_type!s:.40}', which is not supported: "
            f"expected one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[str(model_type)]


def require_known_folder(folder: Path) -> None:
    """Raises UnsupportedModelError if a folder's config.json names a family that is not supported.

    Whatever else is wrong with the folder is left to those who read it. A model with code of its
    own has a refusal of its own.
    """
    try:
        fields = parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return
    if isinstance(fields, dict) and "auto_map" not in fields:
        model_type = wrappers.model_type(fields)
        if isinstance(model_type, str):
            require_known(model_type)
