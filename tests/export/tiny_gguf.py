"""Writes a target small enough for tests, or only a tokenizer, as a GGUF file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# The sizes of `write_model`'s models, as transformers' configs have them.
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Places of the float16 scales in the blocks of types that the package gguf does not write.
SCALES_AT = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
KINDS = {str: "STRING", bool: "BOOL", int: "UINT32", float: "FLOAT32"}


def bytewise_tokens() -> list[str]:
    """Returns the 256 tokens of one byte, those of printable characters first."""
    printable = [chr(i) for i in [*range(33, 127), *range(161, 173), *range(174, 256)]]
    return printable + [chr(256 + i) for i in range(256 - len(printable))]


def write_tokenizer(
    path: Path,
    tokens: Sequence[tuple[str, int]],
    architecture: str = "llama",
    templates: dict[str, str] | None = None,
    **values: Any,
) -> Path:
    """Writes a GGUF file without any weights.

    tokens: texts and kinds (1 normal, 2 unknown, 3 control, 4 user-defined, 6 a byte). `values` are
    further metadata, by what follows "tokenizer.ggml." in their keys; `templates` go by name.
    """
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    if templates is not None:
        named = [{"name": name, "template": source} for name, source in templates.items()]
        writer.add_chat_template(named)
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
    for key, value in values.items():
        add.get(type(value), writer.add_array)(f"tokenizer.ggml.{key}", value)
    _write(writer)
    return path


def write_model(
    path: Path,
    architecture: str,
    tensors: Mapping[str, np.ndarray],
    keys: Mapping[str, Any],
    mask_token_id: int | None = None,
) -> None:
    """Writes a model of SIZES without a tokenizer, but for the id of a mask token if there is one.

    `keys` are further ones under the architecture's name, or replace those of all architectures;
    None removes one.
    """
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, architecture)
    common = {
        "context_length": SIZES["max_position_embeddings"],
        "embedding_length": SIZES["hidden_size"],
        "block_count": SIZES["num_hidden_layers"],
        "feed_forward_length": SIZES["intermediate_size"],
        "attention.head_count": SIZES["num_attention_heads"],
        "attention.head_count_kv": SIZES["num_key_value_heads"],
        "attention.key_length": SIZES["head_dim"],
        "attention.value_length": SIZES["head_dim"],
        "attention.layer_norm_rms_epsilon": SIZES["rms_norm_eps"],
        "rope.freq_base": SIZES["rope_parameters"]["rope_theta"],
        "vocab_size": SIZES["vocab_size"],
    }
    for key, value in (common | dict(keys)).items():
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
        elif value is not None:
            kind = gguf.GGUFValueType[KINDS[type(value)]]
            writer.add_key_value(f"{architecture}.{key}", value, kind)
    for name in ("bos", "eos"):
        getattr(writer, f"add_{name}_token_id")(SIZES[f"{name}_token_id"])
    if mask_token_id is not None:
        writer.add_mask_token_id(mask_token_id)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    _write(writer)


def quantised_rows(values: np.ndarray, kind: Any) -> np.ndarray:
    """Returns a matrix in a type of GGUF's; of types that the package gguf only reads, random bytes
    with small scales in their place."""
    import gguf

    if kind.name not in SCALES_AT:
        packed: np.ndarray = gguf.quantize(values, kind)
        return packed
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (values.size // size, num_bytes), dtype=np.uint8)
    for start in SCALES_AT[kind.name]:
        scale = rng.uniform(0.001, 0.003, len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = scale[:, None].view(np.uint8)
    return blocks.reshape(len(values), -1)


def _write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    path: Path,
    rename: dict[str, str] | None = None,
    fill: dict[str, Any] | None = None,
    extra: dict[str, tuple[int, ...]] | None = None,
    architecture: str = "llama",
    keys: dict[str, Any] | None = None,
    eot: int | None = None,
    tensors_per_part: int = 0,
    whole_numbers: str = "",
    kind: str = "Q4_1",
    sizes: tuple[int, int] = (64, 96),
) -> None:
    """Writes a tiny Llama of Q4_1 matrices, a byte-level vocabulary and a chat template.

    `rename` gives tensors another name, `fill` the same numbers everywhere; `extra` are further
    tensors. `architecture` may be phi3 too. `keys` replace those under the architecture's name;
    None removes one. `eot` is the id of the token that ends a turn. `tensors_per_part` splits the
    file; `whole_numbers` names a tensor of integers. `kind` is the type of the matrices, `sizes`
    are the widths of the model and of its MLP.
    """
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_part)
    (width, inner), heads, kv_heads = sizes, 2, 1
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytewise_tokens(), "ab"]
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(2 if add != writer.add_bos_token_id else 1)
    writer.add_unk_token_id(0)
    if eot is not None:
        writer.add_eot_token_id(eot)
    writer.add_add_bos_token(False)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for key, value in (keys or {}).items():
        writer.kv_data[0].pop(f"{architecture}.{key}", None)
        if value is not None:
            value_kind = gguf.GGUFValueType[KINDS[type(value)]]
            writer.add_key_value(f"{architecture}.{key}", value, value_kind)
    shapes = {"token_embd": (len(tokens), width), "output_norm": (width,)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.attn_norm": (width,),
            f"blk.{layer}.attn_q": (width, width),
            f"blk.{layer}.attn_k": (width // heads * kv_heads, width),
            f"blk.{layer}.attn_v": (width // heads * kv_heads, width),
            f"blk.{layer}.attn_output": (width, width),
            f"blk.{layer}.ffn_norm": (width,),
            f"blk.{layer}.ffn_gate": (inner, width),
            f"blk.{layer}.ffn_up": (inner, width),
            f"blk.{layer}.ffn_down": (width, inner),
        }
        if architecture == "phi3":
            for part in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"):
                del shapes[f"blk.{layer}.{part}"]
            rows = width // heads * (heads + 2 * kv_heads)
            shapes[f"blk.{layer}.attn_qkv"] = (rows, width)
            shapes[f"blk.{layer}.ffn_up"] = (2 * inner, width)
    for name, shape in (shapes | (extra or {})).items():
        # Lopsided on purpose: offsets that are no multiple of the scale.
        values = rng.normal(0.03, 0.3, shape).astype(np.float32) + (len(shape) == 1)
        if fill and name in fill:
            values[:] = fill[name]
        name = (rename or {}).get(name, name)
        if name == whole_numbers:
            writer.add_tensor(f"{name}.weight", values.astype(np.int32))
        elif name.startswith("blk") and len(shape) == 2:
            raw_kind = gguf.GGMLQuantizationType[kind]
            packed = quantised_rows(values, raw_kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=raw_kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    _write(writer)
