"""Reads llama.cpp's GGUF files of EAGLE-3 drafters as if EAGLE's authors had written them.

Queries and keys of a file have both halves of a rotation side by side, and its map d2t holds ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_export.foreign.folder import ForeignFolder
from spec_export.loading import gguf_header, gguf_weights
from spec_export.loading.gguf_header import FREQS, GGUFTensor
from spec_runtime.errors import UnsupportedModelError, UserError

# A file's keys under eagle3. with the names that a config has, and those that tell nothing more.
KEYS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "rope.dimension_count": "rotary_dim",
    "extract_layers": "eagle_aux_hidden_state_layer_ids",
    "norm_before_residual": "norm_before_residual",
}
HARMLESS = (
    *("embedding_length", "target_hidden_size", "feed_forward_length", "context_length"),
    *("block_count", "vocab_size", "attention.key_length", "attention.value_length"),
)
NAMES = {
    "fc": "fc",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "blk.0.attn_norm": "layers.0.input_layernorm",
    "blk.0.attn_norm_2": "layers.0.hidden_norm",
    "blk.0.attn_q": "layers.0.self_attn.q_proj",
    "blk.0.attn_k": "layers.0.self_attn.k_proj",
    "blk.0.attn_v": "layers.0.self_attn.v_proj",
    "blk.0.attn_output": "layers.0.self_attn.o_proj",
    "blk.0.ffn_norm": "layers.0.post_attention_layernorm",
    "blk.0.ffn_gate": "layers.0.mlp.gate_proj",
    "blk.0.ffn_up": "layers.0.mlp.up_proj",
    "blk.0.ffn_down": "layers.0.mlp.down_proj",
}
ANY_LENGTH = 1 << 24  # tokens; no context is longer
PAIRED = {"blk.0.attn_q": "num_attention_heads", "blk.0.attn_k": "num_key_value_heads"}


def open_file(path: Path) -> ForeignFolder:
    """Returns what a GGUF file holds, by the names of a folder.

    Raises UserError if it is damaged, and UnsupportedModelError if it holds something else than an
    EAGLE-3 drafter, or a setting that is not known, which it names.
    """
    header = gguf_header.read(path)
    if header.architecture != "eagle3":
        raise UnsupportedModelError(
            f"{path}: got a GGUF file of architecture {header.architecture!r:.40}, expected a "
            "drafter's: eagle3"
        )
    config: dict[str, Any] = {}
    for key, value in header.values.items():
        name = key.removeprefix("eagle3.")
        if name in KEYS:
            config[KEYS[name]] = value
        elif name != key and name not in HARMLESS:
            raise UnsupportedModelError(f"{path}: got {key} {value!r:.40}: it is not supported")
    factors = dict(header.rope_factors)
    if FREQS in factors:
        config["rope_parameters"] = _scaled_rotation(factors.pop(FREQS))
    if factors:
        raise UnsupportedModelError(
            f"{path}: got {min(factors)}, factors that depend on the context's length, which are "
            "not supported: import the files that it was converted from"
        )
    tensors = {}
    for name, stored in header.tensors.items():
        if name == FREQS:
            continue
        stem = name.removesuffix(".weight")
        tensor = _read(stored)
        if stem in PAIRED:
            tensor = _unpaired(path, name, tensor, config.get(PAIRED[stem]))
            if config.get("rotary_dim") not in (None, len(tensor) // config[PAIRED[stem]]):
                raise UnsupportedModelError(
                    f"{path}: got eagle3.rope.dimension_count {config['rotary_dim']!r:.40}, "
                    "expected the size of a head: others are not supported"
                )
        tensors[f"{NAMES[stem]}.weight" if stem in NAMES else name] = tensor
    if FREQS in header.rope_factors:
        _require_factors(path, header.rope_factors[FREQS], config, tensors)
    return ForeignFolder(path, gguf_header.parts(path), config, tensors)


def _scaled_rotation(factors: list[float]) -> dict[str, Any]:
    """Returns rotary parameters by which each frequency is divided by its factor: longrope's with
    the same factors at every length."""
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": ANY_LENGTH,
        "attention_factor": 1.0,
    }


def _require_factors(
    path: Path, factors: list[float], config: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Raises UserError unless each pair of a head's numbers has a factor of more than 0."""
    rows = len(tensors.get("layers.0.self_attn.q_proj.weight", ()))
    expected = rows // config.get("num_attention_heads", 1) // 2
    if len(factors) != expected or not min(factors) > 0:
        raise UserError(
            f"{path}: got {len(factors)} factors from {min(factors, default=0)} in {FREQS}, "
            f"expected {expected} of more than 0"
        )


def _read(stored: GGUFTensor) -> Tensor:
    import gguf

    if stored.kind == gguf.GGMLQuantizationType.I64:
        ids = np.memmap(stored.path, "<i8", "r", stored.start, stored.shape)
        return torch.from_numpy(np.array(ids))
    return torch.from_numpy(np.require(gguf_weights.read(stored), np.float32, ["C", "W"]))


def _unpaired(path: Path, name: str, tensor: Tensor, num_heads: Any) -> Tensor:
    """Returns rows of heads with the halves of a rotation apart."""
    if type(num_heads) is not int or num_heads < 1 or len(tensor) % (2 * num_heads):
        raise UserError(
            f"{path}: got {num_heads!r:.40} heads for the {len(tensor)} rows of {name}, expected "
            "an even number of rows each"
        )
    return torch.from_numpy(gguf_weights.unpaired(tensor.numpy(), num_heads))
