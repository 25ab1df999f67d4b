"""Describes every family of models that is supported, one table each.

`FAMILIES` maps transformers' model_type to a family's table. A family is added by its table and by
a line in `FAMILIES`. Where families have one layer in common, they have one table.
"""

from dataclasses import replace
from typing import Any

from spec_export.model.families.family import SLIDING, ExpertsTable, Family, Scale, rope_everywhere
from spec_runtime.errors import UnsupportedModelError
from spec_runtime.files.mapping import brief

# Llama, whose layer is the one that all tables start from. Several families are Llama under
# another name, with biases or windows by their configs.
LLAMA = Family()
# ERNIE 4.5 and Helium: Llama's layer, with neighbours rotated instead of halves.
ERNIE4_5 = Family(interleaved=True)
# Arcee (AFM): Llama's attention with a plain MLP.
ARCEE = Family(mlp="plain", up=("mlp.up_proj",))
# Ministral 3: Llama's layer, with queries that grow past the original context.
MINISTRAL3 = Family(query_growth="llama_4_scaling_beta", reads=("max_position_embeddings",))
# Mixtral: Llama's layer with experts.
MIXTRAL = Family(mlp="experts", experts=ExpertsTable())
# Phi-3 and Phi-4: Llama's layer with fused products. In Phi-4-mini a part of each head is rotated.
PHI3 = Family(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",), rotates_part=True)
# StarCoder2: layer norms and a plain MLP, all with biases.
STARCODER2 = Family(
    mlp="plain", up=("mlp.c_fc",), down="mlp.c_proj", norm="layer", eps="norm_epsilon"
)
# StableLM: layer norms, a part of each head rotated, parallel blocks in some models.
STABLELM = Family(
    norm="layer", eps="layer_norm_eps", parallel="use_parallel_residual", rotates_part=True
)
# OLMo of 2024: Llama's layer with layer norms that have no weights.
OLMO = Family(norm="layer", has_norm_weights=False, eps=1e-5)
# SmolLM3: Llama's layer, every fourth one without rotation.
SMOLLM3 = Family(rope=lambda raw, layer: bool(raw.no_rope_layers[layer]), reads=("no_rope_layers",))
# Hunyuan: Llama's layer, with a norm over each head after the rotation.
HUNYUAN_V1_DENSE = Family(
    q_norm="self_attn.query_layernorm",
    k_norm="self_attn.key_layernorm",
    qk_norm="head_after",
    reads=("use_qk_norm", "alpha"),
)
# Nemotron: layer norms stored less 1, a plain MLP, half of each head rotated.
NEMOTRON = Family(
    mlp="plain",
    up=("mlp.up_proj",),
    norm="layer",
    unit_offset=True,
    eps="norm_eps",
    rotates_part=True,
)
# LFM2 and LFM2.5: most layers have a short convolution in place of attention.
LFM2 = Family(
    out="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    final_norm="embedding_norm",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    eps="norm_eps",
    activation=None,
    layer_mixer=lambda raw, layer: (
        "convolution" if raw.layer_types[layer] == "conv" else "attention"
    ),
)
# gpt-oss: attention sinks, and experts with biases and a clamped activation.
GPT_OSS = Family(
    sinks="self_attn.sinks",
    mlp="experts",
    experts=ExpertsTable(
        router="mlp.router",
        is_turned=True,
        sharpness="swiglu_alpha",
        limit="swiglu_limit",
        shift=1.0,
    ),
)
# Qwen3: Llama's layer, with a norm over each query and key head.
QWEN3 = Family(
    q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", reads=("use_qk_norm", "qk_layernorm")
)
# Apertus: Qwen3's attention, and a plain MLP whose activation has learned numbers.
APERTUS = replace(
    QWEN3,
    attention_norm="attention_layernorm",
    mlp_norm="feedforward_layernorm",
    mlp="plain",
    up=("mlp.up_proj",),
)


def dense_or_experts(raw: Any, layer: int) -> str:
    """Returns the kind of a layer's MLP in the Qwen families."""
    is_dense = layer in raw.mlp_only_layers or (layer + 1) % raw.decoder_sparse_step != 0
    return "gated" if is_dense or not raw.num_experts else "experts"


# Qwen3-MoE: Qwen3's layer with experts, in some layers a dense MLP.
QWEN3_MOE = replace(
    QWEN3, experts=ExpertsTable(normalizes="norm_topk_prob"), layer_mlp=dense_or_experts
)
SHARED = "mlp.shared_expert"
# Qwen1.5-MoE and Qwen2-MoE: experts beside a gated MLP that every row goes through.
QWEN2_MOE = Family(
    experts=ExpertsTable(
        normalizes="norm_topk_prob",
        shared=(f"{SHARED}.gate_proj", f"{SHARED}.up_proj", f"{SHARED}.down_proj"),
        shared_gate="mlp.shared_expert_gate",
    ),
    layer_mlp=dense_or_experts,
)
# Mellum 2: Qwen3-MoE, with a list that says which layers have experts. Layers with a window have a
# rotary table of their own.
MELLUM = replace(
    QWEN3_MOE,
    layer_mlp=lambda raw, layer: "experts" if raw.mlp_layer_types[layer] == "sparse" else "gated",
)
# Granite 3: Llama's layer with four scales.
GRANITE = Family(
    embedding_scale=Scale("embedding_multiplier"),
    attention_scale=Scale("attention_multiplier"),
    residual_scale=Scale("residual_multiplier"),
    logit_scale=Scale("logits_scaling", -1),
)
# Granite 3 MoE: Granite's scales with experts.
GRANITEMOE = replace(
    GRANITE,
    mlp="experts",
    experts=ExpertsTable(
        router="block_sparse_moe.router",
        gate_up="block_sparse_moe.experts.gate_up_proj",
        down="block_sparse_moe.experts.down_proj",
    ),
)
# Granite 4, the dense models: Granite 3 with a fused MLP, some without rotation.
GRANITEMOEHYBRID = replace(
    GRANITE,
    up=("shared_mlp.input_linear",),
    down="shared_mlp.output_linear",
    width="shared_intermediate_size",
    rope=lambda raw, layer: raw.position_embedding_type == "rope",
)
# Gemma: scaled embeddings, and norms whose weights are stored less 1.
GEMMA = Family(unit_offset=True, embedding_scale=Scale("hidden_size", 0.5))
# Gemma 2: Gemma with norms on both sides, softcaps, and windows in every other layer.
GEMMA2 = Family(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    unit_offset=True,
    activation="hidden_activation",
    embedding_scale=Scale("hidden_size", 0.5),
    attention_scale=Scale("query_pre_attn_scalar", -0.5),
    attention_softcap="attn_logit_softcapping",
    final_softcap="final_logit_softcapping",
)
# Gemma 3's text model: Gemma 2 with a norm over each query and key head. Layers with a window have
# a rotary table of their own.
GEMMA3_TEXT = replace(
    GEMMA2,
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    attention_softcap=None,  # transformers' class ignores it, so that a model with one is refused
)
# VaultGemma: Gemma 2 without norms after attention and MLP.
VAULTGEMMA = replace(GEMMA2, attention_post_norm=None, mlp_post_norm=None)
# OLMo 2 and 3: norms only after attention and MLP, and over all heads at once.
OLMO2 = Family(
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
    qk_norm="whole",
    reads=("use_qk_norm",),
)
# EXAONE 4: OLMo 2 with norms over each query and key head. Where some layers have a window, only
# these rotate.
EXAONE4 = replace(
    OLMO2,
    qk_norm="head",
    rope=lambda raw, layer: raw.sliding_window is None or raw.layer_types[layer] == SLIDING,
    reads=(),
)
# OLMoE: norms over all query and all key heads at once, and experts.
OLMOE = Family(
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    qk_norm="whole",
    mlp="experts",
    experts=ExpertsTable(normalizes="norm_topk_prob"),
)
# GLM-4 of 2024: fused gate and up, with neighbours of a part of each head rotated.
GLM = Family(up=("mlp.gate_up_proj",), rotates_part=True, interleaved=True)
# GLM-4 of 2025: its predecessor with norms on both sides.
GLM4 = replace(
    GLM, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"
)
# Command R7B: one layer norm before attention and MLP side by side. Layers without a window do not
# rotate.
COHERE2 = Family(
    mlp_norm=None,
    norm="layer",
    eps="layer_norm_eps",
    parallel=True,
    interleaved=True,
    logit_scale=Scale("logit_scale"),
    rope=lambda raw, layer: raw.layer_types[layer] == SLIDING,
)
# Command R: Command R7B without windows, so that all layers rotate.
COHERE = replace(COHERE2, rope=rope_everywhere)

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": QWEN3,
    "phi3": PHI3,
    "apertus": APERTUS,
    "arcee": ARCEE,
    "cohere": COHERE,
    "cohere2": COHERE2,
    "cwm": LLAMA,
    "ernie4_5": ERNIE4_5,
    "exaone4": EXAONE4,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3_TEXT,
    "glm": GLM,
    "glm4": GLM4,
    "gpt_oss": GPT_OSS,
    "granite": GRANITE,
    "granitemoe": GRANITEMOE,
    "granitemoehybrid": GRANITEMOEHYBRID,
    "helium": ERNIE4_5,
    "hunyuan_v1_dense": HUNYUAN_V1_DENSE,
    "internlm3": LLAMA,
    "iquestcoder": LLAMA,
    "lfm2": LFM2,
    "mellum": MELLUM,
    "ministral": LLAMA,
    "ministral3": MINISTRAL3,
    "mixtral": MIXTRAL,
    "nemotron": NEMOTRON,
    "olmo": OLMO,
    "olmo2": OLMO2,
    "olmo3": OLMO2,
    "olmoe": OLMOE,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "seed_oss": LLAMA,
    "smollm3": SMOLLM3,
    "stablelm": STABLELM,
    "starcoder2": STARCODER2,
    "vaultgemma": VAULTGEMMA,
}
LATENT = "keys and values that are made from latent rows (MLA)"
RECURRENT = "layers with a recurrent state"
GEMMA4 = (
    "heads of two widths, norms on values, and in E2B and E4B embeddings in every layer and keys "
    "and values that layers share"
)
SIGMOID = "a router that chooses experts by sigmoids and a bias"
# What families that are not supported would need, by model_type, without "_text" at its end.
MISSING = {
    "afmoe": f"gates on attention and {SIGMOID}",
    "bitnet": "activations that are rounded to eight bits",
    **dict.fromkeys(("bloom", "mpt"), "biases on attention by distance (ALiBi)"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash"), LATENT),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), f"{LATENT} and attention to chosen rows"),
    **dict.fromkeys(("minicpm3", "youtu"), LATENT),
    **dict.fromkeys(("bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear"), RECURRENT),
    **dict.fromkeys(("mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid"), RECURRENT),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "recurrent_gemma"), RECURRENT),
    **dict.fromkeys(("rwkv", "xlstm", "zamba", "zamba2"), RECURRENT),
    **dict.fromkeys(("dots1", "ernie4_5_moe", "exaone_moe", "minimax_m2"), SIGMOID),
    "gemma3n": "embeddings in every layer and predicted residual streams",
    **dict.fromkeys(("gemma4", "gemma4_unified"), GEMMA4),
    **dict.fromkeys(("glm4_moe", "solar_open"), SIGMOID),
    **dict.fromkeys(("gpt2", "gpt_neo", "opt"), "learned positions"),
    **dict.fromkeys(("gpt_neox", "falcon"), "queries, keys and values fused by groups of heads"),
    "lfm3": "gates on attention and a rotation that skips frequencies",
    "llama4": "attention in chunks and experts whose inputs are scaled",
    "nanochat": "a norm over the embedding, norms without weights, and a rotation backwards",
    "paligemma": "attention in both directions over the prompt",
    **dict.fromkeys(("phi", "phimoe"), "a bias on the LM head"),
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
