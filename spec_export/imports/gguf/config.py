"""Makes a GGUF file's metadata the fields that a folder's config.json has.

Every key under the architecture's name is read, known to change nothing, or refused by its name,
because a key that is dropped in silence may change the model's answers.
"""

import math
from typing import Any

from spec_export.imports.gguf.architectures import ARCHITECTURES, Architecture
from spec_export.imports.gguf.header import FREQS, LONG, SHORT, GGUFHeader
from spec_export.imports.gguf.keys import Keys
from spec_export.model import foreign_json
from spec_runtime.errors import UnsupportedModelError, UserError
from spec_runtime.files import mapping

SIZES = {  # fields of a transformers config by their keys
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
TOKENS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
OFF = (  # keys that change nothing where they are 0
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attn_logit_softcapping",
    "expert_count",
    "expert_used_count",
    "final_logit_softcapping",
    "nextn_predict_layers",
    "leading_dense_block_count",
    "pooling_type",
    "rope.scaling.yarn_log_multiplier",
)
SCALES = ("embedding_scale", "logit_scale", "residual_scale")  # llama.cpp takes 0 for "unset"


def architecture(header: GGUFHeader) -> Architecture:
    """Returns what the file's architecture stands for; raises UnsupportedModelError if unknown."""
    found = ARCHITECTURES.get(header.architecture)
    if found is None:
        raise UnsupportedModelError(
            f"got a GGUF file of architecture {header.architecture!r:.40}, which is not supported: "
            f"expected one of {', '.join(ARCHITECTURES)}"
        )
    return found


def config_fields(header: GGUFHeader) -> dict[str, Any]:
    """Returns the fields of the transformers config, `model_type` among them.

    Raises UserError, with the key's name, for a key that is missing, of another type or unknown,
    and for a value that the decoder does not support.
    """
    kind = architecture(header)
    keys = Keys(header)
    fields: dict[str, Any] = {"model_type": kind.family}
    fields |= {field: keys.size(name) for name, field in SIZES.items()}
    num_heads = fields["num_attention_heads"]
    kv_heads = keys.left.get("attention.head_count_kv")
    if isinstance(kv_heads, list) and 0 in kv_heads:  # layers without attention
        if kind.family != "lfm2":
            raise keys.refusal(
                "attention.head_count_kv", 0, "attention in every layer, none with another state"
            )
        keys.left["attention.head_count_kv"] = max(kv_heads)
    fields["num_key_value_heads"] = keys.size("attention.head_count_kv", num_heads)
    fields[kind.eps[1]] = keys.number(f"attention.{kind.eps[0]}")
    tokens = header.values.get("tokenizer.ggml.tokens")
    default = len(tokens) if isinstance(tokens, list) else None
    fields["vocab_size"] = keys.size("vocab_size", default)
    head_dim = keys.size("attention.key_length", fields["hidden_size"] // num_heads)
    keys.require("attention.value_length", (head_dim,))
    fields["head_dim"] = head_dim
    rope = _rope(keys, header, fields, kind)
    fields["rope_parameters"] = rope
    if kind.extra:
        kind.extra(keys, fields, header)
    window = keys.number("attention.sliding_window", 0)
    if window:
        # the Qwen families' classes heed a window only together with the other two
        fields |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    if kind.family == "phi3":  # whose class lets this field, 4096 by default, replace the mapping's
        original = rope.get("original_max_position_embeddings")
        fields["original_max_position_embeddings"] = original or fields["max_position_embeddings"]
    fields["tie_word_embeddings"] = "output.weight" not in header.tensors
    fields |= {field: header.values.get(key) for field, key in TOKENS.items()}

    scale = keys.number("attention.scale", 0)
    if scale and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-6):
        raise keys.refusal("attention.scale", scale, f"{head_dim**-0.5:g}")
    keys.require("attention.causal", (True,))
    for name in OFF:
        keys.require(name, (0,))
    for name in SCALES:
        keys.require(name, (0, 1))
    keys.require_none_left()
    mapping.require_types(foreign_json.CONFIG, fields, "the GGUF file: ")
    return fields


def _rope(
    keys: Keys, header: GGUFHeader, fields: dict[str, Any], architecture: Architecture
) -> dict[str, Any]:
    """Returns transformers' parameters of the rotary embedding.

    The factors of a tensor become those of longrope, also Llama 3's, whose file has one factor per
    frequency in place of the parameters they were computed from.
    """
    head_dim, context = fields["head_dim"], fields["max_position_embeddings"]
    rope: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    num_rotated = keys.size("rope.dimension_count", head_dim)
    if num_rotated != head_dim or architecture.partial:
        rope["partial_rotary_factor"] = num_rotated / head_dim
    kind = keys.left.pop("rope.scaling.type", "linear")  # as llama.cpp has it
    scale_linear = keys.number("rope.scale_linear", 0)  # the older name of the factor
    factor = keys.number("rope.scaling.factor", scale_linear) or 1.0
    original = keys.size("rope.scaling.original_context_length", context)
    attention_factor = float(keys.number("rope.scaling.attn_factor", 1.0))
    fast = keys.number("rope.scaling.yarn_beta_fast", 32.0)
    slow = keys.number("rope.scaling.yarn_beta_slow", 1.0)
    yarn_factor = keys.number("rope.scaling.yarn_attn_factor", 1.0)
    keys.require("rope.scaling.yarn_ext_factor", (1, -1))  # -1 is llama.cpp's "by the type"
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise keys.refusal("rope.scaling.type", kind, "none, linear, yarn or longrope")
    if factor <= 0:
        raise keys.refusal("rope.scaling.factor", factor, "more than 0")

    if header.rope_factors:
        if kind != "none" and factor != 1:
            raise keys.refusal("rope.scaling.factor", factor, "1 beside a tensor of factors")
        both = (header.rope_factors.get(FREQS),) * 2
        short, long = both if both[0] else map(header.rope_factors.get, (SHORT, LONG))
        for name, values in ((SHORT, short), (LONG, long)):
            if values is None or len(values) != num_rotated // 2 or not min(values) > 0:
                got = "none" if values is None else f"{len(values)} from {min(values)}"
                raise UserError(
                    f"got {got} in the tensor {FREQS if both[0] else name}, "
                    f"expected {num_rotated // 2} factors of more than 0"
                )
        return rope | {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": context if both[0] else original,
            "attention_factor": attention_factor,
        }
    if kind == "longrope":
        raise keys.refusal("rope.scaling.type", kind, f"the tensors {LONG} and {SHORT} with it")
    if kind == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": attention_factor * yarn_factor * (0.1 * math.log(factor) + 1.0),
            "beta_fast": fast,
            "beta_slow": slow,
        }
    elif attention_factor != 1:
        raise keys.refusal("rope.scaling.attn_factor", attention_factor, f"1 with type {kind}")
    elif kind == "linear" and factor != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    if fields["model_type"] == "phi3" and "rope_type" in rope:
        raise keys.refusal("rope.scaling.type", kind, "none or longrope in this architecture")
    return rope
