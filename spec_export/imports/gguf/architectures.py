"""Says how the models of each GGUF architecture become transformers models: one table.

An architecture needs a line that names the family, says how its file's tensors differ, and reads
the keys that no other architecture has. A key that is not read is refused by its name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from spec_export.imports.gguf.header import GGUFHeader
from spec_export.imports.gguf.keys import Keys

Fields = dict[str, Any]
RMS_EPS = ("layer_norm_rms_epsilon", "rms_norm_eps")
LAYER_EPS = ("layer_norm_epsilon", "layer_norm_eps")


@dataclass(frozen=True)
class Architecture:
    """Says what a file's architecture stands for.

    family: transformers' model_type. pairs: rows of queries and keys that are rotated together
    stand side by side. adds_one: norms hold one more than transformers' weights. weaves: the gates
    of experts alternate with what they gate, in transformers. partial: heads are rotated in part,
    where transformers has a default of its own. eps: the key of the norms' epsilon under
    "attention.", and the config's field. extra: reads further keys into the config's fields, which
    hold those of all architectures already.
    """

    family: str
    pairs: bool = False
    adds_one: bool = False
    weaves: bool = False
    partial: bool = False
    eps: tuple[str, str] = RMS_EPS
    extra: Callable[[Keys, Fields, GGUFHeader], None] | None = None


def _windows(keys: Keys, fields: Fields, period: int, width: int | None = None) -> None:
    """Reads the layers that have a sliding window, all but each `period`-th without a key."""
    count = fields["num_hidden_layers"]
    name = "attention.sliding_window_pattern"
    pattern = keys.left.pop(name, period)
    if type(pattern) is int and pattern > 0:
        pattern = [(layer + 1) % pattern != 0 for layer in range(count)]
    if not isinstance(pattern, list) or len(pattern) != count:
        raise keys.refusal(name, pattern, f"one value for each of {count} layers")
    fields["layer_types"] = [
        "sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern
    ]
    fields["sliding_window"] = keys.size("attention.sliding_window", width)


def _has_window(keys: Keys) -> bool:
    return keys.left.get("attention.sliding_window", 0) not in (0, None)


def _softcaps(keys: Keys, fields: Fields, attention: float | None, final: float | None) -> None:
    for name, default in (("attn_logit", attention), ("final_logit", final)):
        fields[f"{name}_softcapping"] = keys.number(f"{name}_softcapping", default or 0) or None


def _scale_of_gemma(fields: Fields, layers_of_27b: int) -> None:
    """Sets by what queries are scaled: only the model of 27 B does not take the head's width."""
    width = fields["hidden_size"] // fields["num_attention_heads"]
    is_27b = fields["num_hidden_layers"] == layers_of_27b
    fields["query_pre_attn_scalar"] = width if is_27b else fields["head_dim"]


def _rope_by_kind(keys: Keys, fields: Fields, sliding_base: float) -> None:
    """Gives layers with a window the rotary embedding without any scaling."""
    rope = fields["rope_parameters"]
    base = keys.number("rope.freq_base_swa", sliding_base)
    fields["rope_parameters"] = {
        "full_attention": {"rope_type": "default"} | rope,
        "sliding_attention": {"rope_type": "default", "rope_theta": base},
    }


def _same_rope(keys: Keys, fields: Fields) -> None:
    keys.require("rope.freq_base_swa", (fields["rope_parameters"]["rope_theta"],))


def _experts(keys: Keys, fields: Fields, name: str = "num_local_experts") -> None:
    """Reads how many experts there are, for the config's field `name`, and how many are chosen."""
    fields[name] = keys.size("expert_count")
    fields["num_experts_per_tok"] = keys.size("expert_used_count")


def _llama(keys: Keys, fields: Fields, _header: GGUFHeader) -> None:
    if keys.left.get("expert_count"):  # Mixtral's files name no architecture of their own
        fields["model_type"] = "mixtral"
        _experts(keys, fields)


def _gemma2(keys: Keys, fields: Fields, _header: GGUFHeader) -> None:
    _windows(keys, fields, 2, 4096)
    _softcaps(keys, fields, 50.0, 30.0)
    _scale_of_gemma(fields, 46)
    _same_rope(keys, fields)


def _gemma3(keys: Keys, fields: Fields, _header: GGUFHeader) -> None:
    if _has_window(keys):
        _windows(keys, fields, 6)
    else:
        fields["layer_types"] = ["full_attention"] * fields["num_hidden_layers"]
    _softcaps(keys, fields, None, None)
    _scale_of_gemma(fields, 62)
    _rope_by_kind(keys, fields, 10000.0)


def _granite(keys: Keys, fields: Fields, _header: GGUFHeader) -> None:
    """Reads Granite's scales.

    Dense models of Granite 4 are plain Granites but for the keys of a hybrid without state space
    layers, under the architecture "granite" or "granitehybrid".
    """
    for name in [name for name in keys.left if name.startswith("ssm.")]:
        del keys.left[name]
    if not keys.left.get("expert_count"):
        keys.left.pop("expert_used_count", None)
    keys.require("expert_shared_feed_forward_length", (fields["intermediate_size"],))
    keys.require("rope.scaling.finetuned", (True,))  # false means no rotation at all
    fields["logits_scaling"] = keys.number("logit_scale")
    fields["embedding_multiplier"] = keys.number("embedding_scale", 0) or 1.0
    fields["residual_multiplier"] = keys.number("residual_scale", 0) or 1.0
    scale = keys.number("attention.scale", 0)
    fields["attention_multiplier"] = scale or fields["head_dim"] ** -0.5


def _granitemoe(keys: Keys, fields: Fields, header: GGUFHeader) -> None:
    keys.require("expert_shared_feed_forward_length", (0,))
    _experts(keys, fields)
    _granite(keys, fields, header)


def _olmo(keys: Keys, fields: Fields, _header: GGUFHeader) -> None:
    if fields["layer_norm_eps"] != np.float32(1e-5):
        raise keys.refusal("attention.layer_norm_epsilon", fields["layer_norm_eps"], "1e-05")
    fields["clip_qkv"] = keys.number("attention.clamp_kqv", 0) or None


def _olmo2(keys: Keys, fields: Fields, _header: GGUFHeader) -> None:
    if _has_window(keys):
        fields["model_type"] = "olmo3"
        _windows(keys, fields, 4)
        _rope_by_kind(keys, fields, fields["rope_parameters"]["rope_theta"])


def _mistral3(keys: Keys, fields: Fields, _header: GGUFHeader) -> None:
    beta = keys.number("attention.temperature_scale", 0)
    if beta:
        fields["model_type"] = "ministral3"
        mscale = keys.number("rope.scaling.yarn_log_multiplier", 0)
        rope = fields["rope_parameters"]
        del rope["attention_factor"]  # which transformers computes from both scales
        rope |= {"llama_4_scaling_beta": beta, "mscale": 1.0, "mscale_all_dim": mscale}


def _qwen2moe(keys: Keys, fields: Fields, header: GGUFHeader) -> None:
    _experts(keys, fields, "num_experts")
    width = fields["intermediate_size"]
    chosen = fields["num_experts_per_tok"]
    fields["moe_intermediate_size"] = keys.size("expert_feed_forward_length", width // chosen)
    shared = keys.size("expert_shared_feed_forward_length", width)
    fields["shared_expert_intermediate_size"] = shared
    fields["norm_topk_prob"] = False  # as llama.cpp has it for all of them
    fields["qkv_bias"] = _has_bias(header)


def _qwen3moe(keys: Keys, fields: Fields, _header: GGUFHeader) -> None:
    _experts(keys, fields, "num_experts")
    fields["moe_intermediate_size"] = keys.size("expert_feed_forward_length")
    fields["norm_topk_prob"] = True  # as llama.cpp has it for all of them


def _olmoe(keys: Keys, fields: Fields, _header: GGUFHeader) -> None:
    _experts(keys, fields, "num_experts")
    keys.require("expert_feed_forward_length", (fields["intermediate_size"],))
    fields["norm_topk_prob"] = False


def _gpt_oss(keys: Keys, fields: Fields, _header: GGUFHeader) -> None:
    _experts(keys, fields)
    keys.require("expert_feed_forward_length", (fields["intermediate_size"],))
    _windows(keys, fields, 2)
    _same_rope(keys, fields)
    if fields["rope_parameters"].get("rope_type") == "yarn":
        fields["rope_parameters"]["truncate"] = False


def _lfm2(keys: Keys, fields: Fields, header: GGUFHeader) -> None:
    counts = header.values[f"{header.architecture}.attention.head_count_kv"]
    if isinstance(counts, list):
        fields["layer_types"] = ["full_attention" if each else "conv" for each in counts]
    fields["conv_L_cache"] = keys.size("shortconv.l_cache")
    fields["block_auto_adjust_ff_dim"] = False  # the file has the width that was adjusted


def _exaone4(keys: Keys, fields: Fields, _header: GGUFHeader) -> None:
    if _has_window(keys):
        _windows(keys, fields, 4)
    else:
        fields["sliding_window"] = None
        fields["layer_types"] = ["full_attention"] * fields["num_hidden_layers"]
    _same_rope(keys, fields)


def _nemotron(keys: Keys, fields: Fields, _header: GGUFHeader) -> None:
    keys.left.pop("attention.layer_norm_rms_epsilon", None)  # written twice, under both names


def _command_r(keys: Keys, fields: Fields, header: GGUFHeader) -> None:
    fields["logit_scale"] = keys.number("logit_scale")
    fields["use_qk_norm"] = "blk.0.attn_q_norm.weight" in header.tensors


def _cohere2(keys: Keys, fields: Fields, _header: GGUFHeader) -> None:
    _windows(keys, fields, 4)
    _same_rope(keys, fields)
    fields["logit_scale"] = keys.number("logit_scale")


def _stablelm(keys: Keys, fields: Fields, header: GGUFHeader) -> None:
    keys.left.pop("use_parallel_residual", None)  # llama.cpp goes by the tensors
    fields["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in header.tensors
    fields["qk_layernorm"] = "blk.0.attn_q_norm.weight" in header.tensors
    fields["use_qkv_bias"] = _has_bias(header)


def _attention_bias(_keys: Keys, fields: Fields, header: GGUFHeader) -> None:
    fields["attention_bias"] = _has_bias(header)


def _has_bias(header: GGUFHeader) -> bool:
    return bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & header.tensors.keys())


# Names as the files have them. An architecture that is not listed is refused.
ARCHITECTURES = {
    "llama": Architecture("llama", pairs=True, extra=_llama),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "phi3": Architecture("phi3"),
    "gemma": Architecture("gemma", adds_one=True),
    "gemma2": Architecture("gemma2", adds_one=True, extra=_gemma2),
    "gemma3": Architecture("gemma3_text", adds_one=True, extra=_gemma3),
    "smollm3": Architecture("smollm3", pairs=True),
    "granite": Architecture("granite", pairs=True, extra=_granite),
    "granitehybrid": Architecture("granite", pairs=True, extra=_granite),
    "granitemoe": Architecture("granitemoe", pairs=True, extra=_granitemoe),
    "olmo": Architecture("olmo", pairs=True, eps=LAYER_EPS, extra=_olmo),
    "olmo2": Architecture("olmo2", extra=_olmo2),
    "mistral3": Architecture("mistral", pairs=True, extra=_mistral3),
    "olmoe": Architecture("olmoe", extra=_olmoe),
    "qwen2moe": Architecture("qwen2_moe", extra=_qwen2moe),
    "qwen3moe": Architecture("qwen3_moe", extra=_qwen3moe),
    "gpt-oss": Architecture("gpt_oss", weaves=True, extra=_gpt_oss),
    "lfm2": Architecture("lfm2", eps=("layer_norm_rms_epsilon", "norm_eps"), extra=_lfm2),
    "arcee": Architecture("arcee", pairs=True),
    "nemotron": Architecture(
        "nemotron",
        adds_one=True,
        partial=True,
        eps=("layer_norm_epsilon", "norm_eps"),
        extra=_nemotron,
    ),
    "starcoder2": Architecture("starcoder2", eps=("layer_norm_epsilon", "norm_epsilon")),
    "ernie4_5": Architecture("ernie4_5"),
    "exaone4": Architecture("exaone4", extra=_exaone4),
    "command-r": Architecture("cohere", eps=LAYER_EPS, extra=_command_r),
    "cohere2": Architecture("cohere2", eps=LAYER_EPS, extra=_cohere2),
    "seed_oss": Architecture("seed_oss", extra=_attention_bias),
    "chatglm": Architecture("glm", partial=True, extra=_attention_bias),
    "glm4": Architecture("glm4", partial=True, extra=_attention_bias),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", extra=_attention_bias),
    "stablelm": Architecture("stablelm", partial=True, eps=LAYER_EPS, extra=_stablelm),
}
