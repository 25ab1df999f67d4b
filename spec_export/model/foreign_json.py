"""Reads the JSON files of other programs, whose known fields have to be of the declared types.

Fields that are not declared are left alone, and null stands for an absent one. A wrong value is one
line: "model/config.json: .rope_theta: got str '1e4', expected float or null".
"""

from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Len
from typing_extensions import TypedDict

from spec_runtime.errors import UserError
from spec_runtime.files import mapping
from spec_runtime.files.mapping import Must


def _fields(types: dict[str, Any]) -> Any:
    """Returns a TypedDict of these fields, each of which may be absent or null."""
    optional = {name: kind | None for name, kind in types.items()}
    return TypedDict("Fields", optional, total=False)  # type: ignore[operator]


def _is_line(text: str) -> bool:
    return len(text) <= 1000 and text.isprintable()


def _is_file_name(name: str) -> bool:
    return _is_line(name) and len(name) < 256 and Path(name).name == name


_all = dict.fromkeys
Text = Annotated[str, Must(_is_line, "one line of text")]  # which messages may repeat
FileName = Annotated[str, Must(_is_file_name, "a file's name, without folder")]
Size = Annotated[int, Ge(0), Le(1 << 24)]  # more than any model has of anything
Count = Annotated[int, Ge(1), Le(1 << 24)]
Rows = Annotated[int, Ge(1), Le(1024)]  # more layers, and rows of a block, than any model has
Id = Annotated[int, Ge(0)]
Above = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]
Pair = Annotated[list[Count], Len(2, 2)]

ROTATION: dict[str, Any] = {
    **_all(("rope_type", "type"), Text),
    **_all(("rope_theta", "factor", "attention_factor"), Above),
    **_all(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), Above),
    **_all(("mscale", "mscale_all_dim"), float),
    **_all(("truncate", "finetuned"), bool),
    **_all(("short_factor", "long_factor"), list[Above]),
    "original_max_position_embeddings": Count,
    "partial_rotary_factor": Share,
}
ROTATIONS = _fields(ROTATION | _all(("full_attention", "sliding_attention"), _fields(ROTATION)))
_VALUES = _fields({"type": Text, "num_bits": Count, "group_size": int, "block_structure": Pair})
_GROUP = _fields({"weights": _VALUES, "input_activations": _VALUES})
QUANTISATION = _fields(
    {
        **_all(("quant_method", "format", "version", "checkpoint_format", "mode"), Text),
        "bits": Count,
        "group_size": int,
        **_all(("load_in_4bit", "sym"), bool),
        "weight_block_size": Pair,
        "config_groups": dict[str, _GROUP],  # type: ignore[valid-type]
        "sparsity_config": _fields({"format": Text}),
    }
)
QUANTISATIONS = ("quantization_config", "quantization", "compression_config")  # of config.json
_MODEL: dict[str, Any] = {
    **_all(("model_type", "hidden_act", "hidden_activation", "position_embedding_type"), Text),
    **_all(("vocab_size", "hidden_size", "intermediate_size", "head_dim"), Count),
    **_all(("num_attention_heads", "num_key_value_heads", "max_position_embeddings"), Count),
    **_all(("decoder_sparse_step", "no_rope_layer_interval", "conv_L_cache"), Count),
    **_all(("moe_intermediate_size", "shared_intermediate_size", "max_window_layers"), Size),
    **_all(("shared_expert_intermediate_size", "sliding_window"), Size),
    **_all(("num_experts", "num_local_experts", "num_experts_per_tok"), Size),
    **_all(("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon"), Share),
    **_all(("attention_bias", "mlp_bias", "qkv_bias", "tie_word_embeddings"), bool),
    **_all(("use_sliding_window", "norm_topk_prob", "use_parallel_residual"), bool),
    **_all(("rope_scaling", "rope_parameters"), ROTATIONS),
    **_all(QUANTISATIONS, QUANTISATION),
    "num_hidden_layers": Rows,
    "layer_types": list[Text | bool],
    "mlp_only_layers": list[int],
    "rope_theta": Above,
    "partial_rotary_factor": Share,
}
_IDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")
_GUESSES = _fields({"speculative_tokens": Rows})
_DRAFTER: dict[str, Any] = {
    **_all(_IDS, list[int]),
    **_all(("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual"), bool),
    **_all(("shift_label", "sample_from_anchor", "is_causal", "causal", "bias"), bool),
    **_all(("sliding_window_non_causal", "medusa_fc_bias", "original_lm_head"), bool),
    **_all(("mask_token_id", "pard_token"), Id),
    **_all(("markov_rank", "selector_rank", "selector_top_k"), Size),
    **_all(("conv_kernel_size", "conv_group_size", "num_target_layers"), Count),
    "speculators_model_type": Text,
    "speculators_config": _fields({"proposal_methods": list[_GUESSES]}),  # type: ignore[valid-type]
    "block_size": Annotated[Rows, Ge(2)],
    "medusa_num_heads": Rows,
    "medusa_num_layers": Annotated[int, Ge(1), Le(16)],  # of one block, which is stored once
}
_PARTS = ("text_config", "transformer_layer_config", "eagle_config", "dflash_config")
CONFIG = _fields(_MODEL | _DRAFTER | _all(_PARTS, _fields(_MODEL | _DRAFTER)))
ADAPTER = _fields(
    {
        **_all(("peft_type", "base_model_name_or_path"), Text),
        "r": Count,
        "rank_pattern": dict[str, Count],
        "lora_alpha": float,
        "alpha_pattern": dict[str, float],
        "init_lora_weights": bool | Text,
        "use_rslora": bool,
    }
)
_IDS_OF_TOKENS: Any = Id | list[Id]  # type: ignore[operator]
GENERATION = _fields(_all(("eos_token_id", "bos_token_id", "pad_token_id"), _IDS_OF_TOKENS))
_TOKEN = str | _fields({"content": str})
_TEMPLATE = _fields({"name": str, "template": str})
TOKENIZER = _fields(
    {
        **_all(("bos_token", "eos_token", "unk_token", "pad_token"), _TOKEN),
        "chat_template": str | list[_TEMPLATE] | dict[str, str],  # type: ignore[valid-type]
        "tokenizer_class": Text,
    }
)
INDEX = _fields({"weight_map": dict[str, FileName]})
SEARCH = _fields(_all(("num_guesses", "max_width", "top_k"), Rows))  # of our own exports
# bitsandbytes' account of a matrix, which is stored as the bytes of a tensor
MATRIX = _fields(
    {**_all(("blocksize", "nested_blocksize"), Count), "nested_offset": float, "shape": list[Count]}
)


def read(path: Path, kind: Any) -> dict[str, Any]:
    """Returns what a JSON file says; raises UserError unless it is an object and fits `kind`."""
    value = read_object(path)
    mapping.require_types(kind, value, f"{path}: ")
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
