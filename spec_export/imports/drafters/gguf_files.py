"""Reads llama.cpp's GGUF files of drafters as if their authors had written them.

Files of the architecture `eagle3` have both halves of a rotation side by side in queries and keys.
Those of `dflash` hold DFlash, DSpark, which is DFlash with the tables of a Markov head, or DFlash2;
early ones of DSpark are called `dspark`. A map d2t holds ids, and layers' ids are inputs in all.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_export.imports.drafters.folder import ForeignFolder
from spec_export.imports.gguf import header as gguf_header
from spec_export.imports.gguf import weights as gguf_weights
from spec_export.imports.gguf.header import FREQS, GGUFTensor
from spec_export.model import foreign_json
from spec_runtime.errors import UnsupportedModelError, UserError
from spec_runtime.files import mapping

# A file's keys under its architecture's name with the names that a config has, and those that tell
# nothing more.
KEYS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "rope.dimension_count": "rotary_dim",
}
HARMLESS = (
    "embedding_length",
    "target_hidden_size",
    "feed_forward_length",
    "context_length",
    "block_count",
    "vocab_size",
    "attention.key_length",
    "attention.value_length",
    "has_confidence_head",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
MASK_TOKEN = "tokenizer.ggml.mask_token_id"
# Tensors' names without .weight, and those of the layers behind blk.i., with their names elsewhere.
NAMES = {"fc": "fc", "token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PAIRED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}  # of eagle3


@dataclass(frozen=True)
class _Architecture:
    """What an architecture's files have in addition to KEYS, NAMES and LAYER_NAMES."""

    keys: dict[str, str]
    names: dict[str, str]
    layer_names: dict[str, str]
    paired: dict[str, str]


_BLOCKS = _Architecture(
    keys={
        **{"target_layers": "aux_hidden_state_layer_ids", "block_count": "num_hidden_layers"},
        **{"attention.causal": "is_causal", "logit_scale": "output_multiplier"},
        **{name: name for name in ("block_size", "sample_from_anchor", "final_logit_softcapping")},
        **{name: name for name in ("markov_rank", "markov_head_type", "selector_rank")},
        **{name: name for name in ("selector_top_k", "conv_kernel_size", "conv_group_size")},
        "attention.sliding_window": "sliding_window",
        "attention.sliding_window_pattern": "layer_types",  # true for a layer with a window
    },
    names={
        "enc.output_norm": "hidden_norm",
        "selector_predecessor": "candidate_selector.predecessor_codebook",
        "selector_successor": "candidate_selector.successor_codebook",
        "selector_hidden": "candidate_selector.hidden_projection",
    },
    layer_names={
        **{"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
        "attn_conv_base": "attention_conv.base_kernel",
        "attn_conv_proj": "attention_conv.kernel_projection",
        "ffn_conv_base": "mlp_conv.base_kernel",
        "ffn_conv_proj": "mlp_conv.kernel_projection",
    },
    paired={},
)
ARCHITECTURES = {
    "eagle3": _Architecture(
        keys={
            **dict.fromkeys(
                ("extract_layers", "target_layers"), "eagle_aux_hidden_state_layer_ids"
            ),
            **{name: name for name in ("norm_before_residual", "norm_before_fc")},
        },
        names={"enc.output_norm": "input_norm"},
        layer_names={"attn_norm_2": "hidden_norm"},
        paired=PAIRED,
    ),
    "dflash": _BLOCKS,
    "dspark": _BLOCKS,
}
ANY_LENGTH = 1 << 24  # tokens; no context is longer


def open_file(path: Path) -> ForeignFolder:
    """Returns what a GGUF file holds, by the names of a folder.

    Raises UserError if it is damaged, and UnsupportedModelError if it holds something else than a
    drafter of ARCHITECTURES, or a setting that is not known, which it names.
    """
    header = gguf_header.read(path)
    kind = header.architecture
    if kind not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: got a GGUF file of architecture {kind!r:.40}, expected a drafter's: "
            f"{', '.join(ARCHITECTURES)}"
        )
    known = ARCHITECTURES[kind]
    keys = KEYS | known.keys
    config: dict[str, Any] = {"rope_theta": 10000.0}
    for key, value in header.values.items():
        name = key.removeprefix(f"{kind}.")
        if name in keys:
            config[keys[name]] = value
        elif key == MASK_TOKEN:
            config["mask_token_id"] = value
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
        tensor, block = _read(stored), stem.split(".", 2)
        if len(block) == 3 and block[0] == "blk":
            found = (LAYER_NAMES | known.layer_names).get(block[2])
            if block[2] in known.paired:
                tensor = _unpaired(path, name, tensor, config.get(known.paired[block[2]]))
            theirs = found and f"layers.{block[1]}.{found}"
        else:
            theirs = (NAMES | known.names).get(stem)
        tensors[theirs + name[len(stem) :] if theirs else name] = tensor
    mapping.require_types(foreign_json.CONFIG, config, f"{path}: ")
    pairs = _head_dim(config, tensors) // 2
    if config.get("rotary_dim") not in (None, 2 * pairs):
        raise UnsupportedModelError(
            f"{path}: got {kind}.rope.dimension_count {config['rotary_dim']!r:.40}, expected the "
            "size of a head: others are not supported"
        )
    if FREQS in header.rope_factors:
        _require_factors(path, header.rope_factors[FREQS], pairs)
    return ForeignFolder(path, gguf_header.parts(path), config, tensors)


def _head_dim(config: dict[str, Any], tensors: dict[str, Tensor]) -> int:
    """Returns the columns of a head of queries, 0 where the file has no sound number of heads."""
    rows, heads = (
        len(tensors.get("layers.0.self_attn.q_proj.weight", ())),
        config.get(PAIRED["attn_q"]),
    )
    return rows // heads if type(heads) is int and heads > 0 else 0


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


def _require_factors(path: Path, factors: list[float], expected: int) -> None:
    """Raises UserError unless each pair of a head's numbers has a factor."""
    if len(factors) != expected:
        raise UserError(
            f"{path}: got {len(factors)} factors in {FREQS}, expected {expected}, one for each "
            "frequency of a head"
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
