"""Reads the JSON files of other programs, whose known fields have to be of the declared types.

Fields that are not declared are left alone, and null stands for an absent one. A wrong value is one
line: "model/config.json at .rope_theta: got str '1e4', expected more than 0 or null".
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Len
from typing_extensions import TypedDict

from spec_runtime import mapping
from spec_runtime.errors import UserError
from spec_runtime.mapping import Must

Size = Annotated[int, Ge(0), Le(1 << 24)]  # more than any model has of anything
Count = Annotated[int, Ge(1), Le(1 << 24)]
Rows = Annotated[int, Ge(1), Le(1024)]  # more layers, and rows of a block, than any model has
Id = Annotated[int, Ge(0)]
Above = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]
Pair = Annotated[list[Count], Len(2, 2)]


def _fields(types: dict[str, Any]) -> Any:
    """Returns a TypedDict of these fields, each of which may be absent or null."""
    optional = {name: kind | None for name, kind in types.items()}
    return TypedDict("Fields", optional, total=False)  # type: ignore[operator]


def _is_file_name(name: str) -> bool:
    return len(name) < 256 and name.isprintable() and Path(name).name == name


ROTATION: dict[str, Any] = {
    **{"rope_type": str, "type": str, "rope_theta": Above, "partial_rotary_factor": Share},
    **{"factor": Above, "original_max_position_embeddings": Count, "attention_factor": Above},
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), Above),
    **dict.fromkeys(("mscale", "mscale_all_dim"), float),
    **dict.fromkeys(("truncate", "finetuned"), bool),
    **dict.fromkeys(("short_factor", "long_factor"), list[Above]),
}
ROTATIONS = _fields(
    ROTATION | dict.fromkeys(("full_attention", "sliding_attention"), _fields(ROTATION))
)
_VALUES = _fields({"type": str, "num_bits": Count, "group_size": int, "block_structure": Pair})
_GROUP = _fields({"weights": _VALUES, "input_activations": _VALUES})
QUANTISATION = _fields(
    {
        **dict.fromkeys(("quant_method", "format", "version", "checkpoint_format", "mode"), str),
        **{"bits": Count, "group_size": int, "load_in_4bit": bool, "weight_block_size": Pair},
        **{"config_groups": dict[str, _GROUP], "sparsity_config": _fields({"format": str})},
    }
)
QUANTISATIONS = ("quantization_config", "quantization", "compression_config")  # of config.json
_MODEL: dict[str, Any] = {  # fields of a config.json, which may be a part of another one
    **{"model_type": str, "architectures": list[str], "num_hidden_layers": Rows},
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "head_dim"), Count),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), Count),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size"), Size),
    **dict.fromkeys(("max_position_embeddings", "decoder_sparse_step", "conv_L_cache"), Count),
    **dict.fromkeys(("shared_expert_intermediate_size", "sliding_window"), Size),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), Size),
    **dict.fromkeys(("no_rope_layer_interval", "num_target_layers"), Count),
    "max_window_layers": Size,
    **{"layer_types": list[str | bool], "mlp_only_layers": list[int]},
    **dict.fromkeys(("hidden_act", "hidden_activation", "position_embedding_type"), str),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon"), Share),
    **{"rope_theta": Above, "rope_scaling": ROTATIONS, "rope_parameters": ROTATIONS},
    "partial_rotary_factor": Share,
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "tie_word_embeddings"), bool),
    **dict.fromkeys(("use_sliding_window", "norm_topk_prob", "use_parallel_residual"), bool),
    **dict.fromkeys(QUANTISATIONS, QUANTISATION),
}
_IDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")
_DRAFTER: dict[str, Any] = {  # fields of a drafter's config, wherever they stand in it
    "speculators_model_type": str,
    **dict.fromkeys(_IDS, list[int]),
    **dict.fromkeys(("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual"), bool),
    **dict.fromkeys(("shift_label", "sample_from_anchor", "is_causal", "causal", "bias"), bool),
    **dict.fromkeys(("sliding_window_non_causal", "medusa_fc_bias", "original_lm_head"), bool),
    **{"mask_token_id": Id, "pard_token": Id, "block_size": Annotated[Rows, Ge(2)]},
    **dict.fromkeys(("markov_rank", "selector_rank", "selector_top_k"), Size),
    **dict.fromkeys(("conv_kernel_size", "conv_group_size"), Count),
    **{"medusa_num_heads": Rows, "medusa_num_layers": Annotated[int, Ge(1), Le(16)]},
    "speculators_config": _fields(
        {"proposal_methods": list[_fields({"speculative_tokens": Rows})]}  # type: ignore[misc]
    ),
}
PARTS = ("text_config", "transformer_layer_config", "eagle_config", "dflash_config")
CONFIG = _fields(_MODEL | _DRAFTER | dict.fromkeys(PARTS, _fields(_MODEL | _DRAFTER)))
ADAPTER = _fields(
    {
        **{"peft_type": str, "base_model_name_or_path": str, "use_rslora": bool},
        **{"lora_alpha": float, "alpha_pattern": dict[str, float], "init_lora_weights": bool | str},
        **{"r": Count, "rank_pattern": dict[str, Count]},
    }
)
GENERATION = _fields(
    dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), Id | list[Id])  # type: ignore[operator]
)
_TOKEN = str | _fields({"content": str})
TOKENIZER = _fields(
    {
        "chat_template": str
        | list[_fields({"name": str, "template": str})]  # type: ignore[misc]
        | dict[str, str],
        "tokenizer_class": str,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), _TOKEN),
    }
)
INDEX = _fields(
    {"weight_map": dict[str, Annotated[str, Must(_is_file_name, "a file's name, without folder")]]}
)
# bitsandbytes' account of a matrix, which is stored as the bytes of a tensor
MATRIX = _fields(
    {
        **{"blocksize": Count, "nested_blocksize": Count, "nested_offset": float},
        "shape": list[Count],
    }
)


def read(path: Path, kind: Any) -> dict[str, Any]:
    """Returns what a JSON file says; raises UserError unless it is an object and fits `kind`."""
    value = read_object(path)
    mapping.require_types(kind, value, f"{path} at ")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Returns what a JSON file says; raises UserError unless it is an object."""
    try:
        value = mapping.parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {mapping.brief(error)}; restore the file") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: got {type(value).__name__}, expected an object")
    return value
