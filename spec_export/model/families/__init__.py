"""Describes every family of models that is supported, each in a file of its own where
its layer differs from another's.

`FAMILIES` maps transformers' model_type to a family's table.
"""

from __future__ import annotations

from spec_export.model.families import (
    apertus,
    arcee,
    cohere,
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
    mellum,
    ministral3,
    mixtral,
    nemotron,
    olmo,
    olmo2,
    olmoe,
    phi3,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
    stablelm,
    starcoder2,
    vaultgemma,
)
from spec_export.model.families.family import EXPERTS as EXPERTS
from spec_export.model.families.family import FULL as FULL
from spec_export.model.families.family import SLIDING as SLIDING
from spec_export.model.families.family import Family as Family
from spec_export.model.families.family import LayerKind as LayerKind
from spec_export.model.families.family import Scale as Scale
from spec_export.model.families.family import capped as capped
from spec_export.model.families.family import has_tables_by_kind as has_tables_by_kind
from spec_runtime.errors import UnsupportedModelError
from spec_runtime.files.mapping import brief

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": llama.FAMILY,
    "qwen2": llama.FAMILY,
    "qwen3": qwen3.FAMILY,
    "phi3": phi3.FAMILY,
    "apertus": apertus.FAMILY,
    "arcee": arcee.FAMILY,
    "cohere": cohere.FAMILY,
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
    "mellum": mellum.FAMILY,
    "ministral": llama.FAMILY,
    "ministral3": ministral3.FAMILY,
    "mixtral": mixtral.FAMILY,
    "nemotron": nemotron.FAMILY,
    "olmo": olmo.FAMILY,
    "olmo2": olmo2.FAMILY,
    "olmo3": olmo2.FAMILY,
    "olmoe": olmoe.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "seed_oss": llama.FAMILY,
    "smollm3": smollm3.FAMILY,
    "stablelm": stablelm.FAMILY,
    "starcoder2": starcoder2.FAMILY,
    "vaultgemma": vaultgemma.FAMILY,
}
LATENT = "keys and values that are made from latent rows (MLA)"
RECURRENT = "layers with a recurrent state"
SIGMOID = "a router that chooses experts by sigmoids and a bias"
# What families that are not supported would need, by model_type, without "_text" at its end.
MISSING = {
    "afmoe": f"gates on attention and {SIGMOID}",
    "bitnet": "activations that are rounded to eight bits",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "minicpm3", "youtu"), LATENT),
    **dict.fromkeys(("falcon_h1", "nemotron_h", "qwen3_next", "qwen3_5", "qwen3_5_moe"), RECURRENT),
    "gemma3n": "embeddings in every layer and predicted residual streams",
    "gemma4": "embeddings in every layer, heads of two widths, and shared keys and values",
    **dict.fromkeys(("glm4_moe", "solar_open"), SIGMOID),
    "gpt2": "learned positions",
    "lfm3": "gates on attention and a rotation that skips frequencies",
    "llama4": "attention in chunks and experts whose inputs are scaled",
    "nanochat": "a norm over the embedding, norms without weights, and a rotation backwards",
    "phi": "a bias on the LM head",
}


def require_known(model_type: object) -> Family:
    """Returns the table of a family; raises UnsupportedModelError, which lists all, for others."""
    if str(model_type) not in FAMILIES:
        missing = MISSING.get(str(model_type).removesuffix("_text"))
        needs = f" (it needs {missing})" if missing else ""
        raise UnsupportedModelError(
            f"got a model of type '{brief(model_type, 40)}', which is not supported{needs}: "
            f"expected one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[str(model_type)]
