"""Reads the drafters of EAGLE-1 and EAGLE-2, which have the same files.

Their fc reads the embedding before the feature, ours after it. Layer 0 has no input norm, and
nothing is normed behind the last one; embedding and head are the target's.
"""

from typing import Any

import torch
from torch import Tensor

from spec_export.imports.drafters.folder import ForeignFolder, Reading
from spec_export.imports.drafters.parts import (
    layer_sizes,
    require_known_keys,
    require_nothing_given,
    rotary_parameters,
    take_layer,
    unsupported,
)
from spec_export.model.decoder import Backbone
from spec_export.model.deferred import real
from spec_runtime.errors import UnsupportedModelError, UserError

SHOWS = "EAGLE-1 or EAGLE-2 (fc.weight and layers.0.self_attn.*)"
# Keys that change the forward pass, with the values that ours has. Others are refused.
ONLY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), (False,)),
    "hidden_act": ("silu",),
}
# Beginnings of tensors' names that change nothing: derived ones.
HARMLESS = ("rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq")
REFUSED = {
    "layers.0.input_layernorm.weight": "a norm before the first layer, which EAGLE does not have",
    "norm.weight": "a norm after the last layer",
    "hidden_norm.weight": "a norm of the features",
    "lm_head.weight": "a head of its own",
}
ROUNDING = 2.0**-7  # of embeddings that were stored as bfloat16 on one side


def matches(folder: ForeignFolder) -> bool:
    """Says whether a folder holds such a drafter, by its tensors' names and fc's shape."""
    fc = folder.tensors.get("fc.weight")
    return (
        "layers.0.self_attn.q_proj.weight" in folder.tensors
        and fc is not None
        and fc.dim() == 2
        and fc.shape[1] == 2 * len(fc)
    )


def read(folder: ForeignFolder, backbone: Backbone, given: dict[str, Any]) -> Reading:
    """Returns a drafter's config and weights for this target.

    Raises UserError if the files do not fit each other or the target, and UnsupportedModelError,
    which names it, for whatever changes the forward pass and is not known.
    """
    require_nothing_given(folder, given, "EAGLE-1 or EAGLE-2")
    config, D = folder.config, backbone.config.hidden_size
    for name, values in ONLY.items():
        if config.get(name) is not None and config[name] not in values:
            raise unsupported(folder, name, config[name], " or ".join(map(str, values)))
    require_known_keys(folder, config, {*ONLY, "bias", "qkv_bias", "rope_theta", "rope_scaling"})
    for name, what in REFUSED.items():
        if name in folder.tensors:
            raise UnsupportedModelError(f"{folder.path}: got {name}, {what}: not supported")
    fc = folder.take("fc.weight")
    if len(fc) != D:
        raise UserError(
            f"{folder.path}: got fc of {len(fc)} rows, expected the target's hidden size of {D}: "
            "it was trained for another target"
        )
    has_bias = _has(folder, "bias", "fc.bias")
    has_qkv_bias = _has(folder, "qkv_bias", "layers.0.self_attn.q_proj.bias")
    of_token, of_feature = fc.chunk(2, -1)
    # theirs reads the target's embedding as it is stored, ours with the target's scale
    scale = backbone.embedding.embedding_scale
    of_token = of_token / scale
    state: dict[str, Tensor] = {"fc": torch.cat((of_feature, of_token), -1).T}
    state["fc_bias"] = folder.take("fc.bias") if has_bias else torch.zeros(D)
    count = 1
    while f"layers.{count}.input_layernorm.weight" in folder.tensors:
        count += 1
    fields: dict[str, Any] = {"layers": count, "input_norm": False, "qkv_bias": has_qkv_bias}
    fields |= layer_sizes(folder, config.get("num_attention_heads"))
    for i in range(count):
        take_layer(folder, i, {"attention_norm": ("input_layernorm",)} if i else {}, state)
        if has_qkv_bias:
            biases = [folder.take(f"layers.{i}.self_attn.{part}_proj.bias") for part in "qkv"]
            state[f"layers.{i}.qkv_bias"] = torch.cat(biases)
    rope = rotary_parameters(folder, config)
    fields |= {"rope": rope, "norm_eps": float(config.get("rms_norm_eps") or 1e-6)}
    _require_targets_embedding(folder, backbone)
    folder.require_all_read(HARMLESS)
    said = [f"layers: {count}", f"fc {'with' if has_bias else 'without'} a bias"]
    if has_qkv_bias:
        said.append("biases of queries, keys and values")
    if scale != 1:
        said.append("the target's embedding without its scale")
    said.append(f"rotary base {rope['rope_theta']:g}, {rope['rope_type']}")
    return Reading("EAGLE-1 or EAGLE-2", "eagle", fields, state, said=said)


def _has(folder: ForeignFolder, flag: str, name: str) -> bool:
    """Says whether a tensor is there; raises UserError if the config's flag says otherwise."""
    is_there, said = name in folder.tensors, folder.config.get(flag)
    if said is not None and bool(said) != is_there:
        raise UserError(
            f"{folder.path}: got {flag} {said} in the config, and weights "
            f"{'with' if is_there else 'without'} {name}: they are not of one drafter"
        )
    return is_there


def _require_targets_embedding(folder: ForeignFolder, backbone: Backbone) -> None:
    """Takes the file's copy of the target's embedding, if it has one; raises UserError if it is
    that of another model."""
    if "embed_tokens.weight" not in folder.tensors:
        return
    own, table = folder.take("embed_tokens.weight"), backbone.embedding
    theirs = real(table.weight).float()
    own = own[: len(theirs)]
    if own.shape != theirs.shape or bool(
        ((own - theirs).abs() > ROUNDING * theirs.abs() + 1e-6).any()
    ):
        raise UserError(
            f"{folder.path}: got embed_tokens.weight that is not the target's embedding, expected "
            "a copy of it: it was trained for another target"
        )
