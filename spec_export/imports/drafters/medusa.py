"""Reads Medusa's heads: those of version 1 with output matrices of their own, those of version 2
without, those that lie in the files of a whole model, and vLLM's.

Head i has `{i}.{j}.linear.weight` and `.bias` for each block j, and in version 1 `{i}.{L}.weight`
after L blocks. Its blocks are one module that is run L times, so that a file may hold block 0 only.
vLLM's blocks differ, have biases only if the config says so, and may guess a part of the tokens.
"""

import re
from itertools import count
from typing import Any

import torch
from torch import Tensor

from spec_export.imports.drafters.folder import ForeignFolder, Reading
from spec_export.imports.drafters.parts import (
    require_known_keys,
    require_nothing_given,
    unsupported,
)
from spec_export.model.decoder import Backbone
from spec_export.model.deferred import real
from spec_runtime.errors import UserError

SHOWS = "Medusa (0.0.linear.weight, alone or behind medusa_head., or blocks.0.layers.0.weight)"
# vLLM's names: of a block's tensors, of a head's output matrix, of one matrix for all heads, and of
# the ids of the tokens that they guess, absent for all tokens.
VLLM_BLOCK, VLLM_HEAD = "blocks.{}.layers.{}.{}", "lm_heads.{}.weight"
VLLM_SHARED, VLLM_IDS = "lm_head.weight", "token_map"
# Keys that change the forward pass, with the values that ours has. Others are refused.
ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "logit_scale": (1,),
    "speculators_model_type": ("medusa",),
}
# Keys that are read, repeat what shapes tell, or are about trees and training.
KNOWN = (
    "medusa_num_heads",
    "medusa_num_layers",
    "version",
    "num_heads",
    "medusa_fc_bias",
    "original_lm_head",
    "truncated_vocab_size",
    "medusa_hidden_size",
    "medusa_vocab_size",
    "medusa_choices",
    "max_paths",
    "topk",
    "max_seq_len",
    "num_lookahead_tokens",
)
HEAD = re.compile(r"\d+\.\d+\.weight")


def matches(folder: ForeignFolder) -> bool:
    """Says whether a folder holds Medusa's heads, by its tensors' names."""
    return "0.0.linear.weight" in folder.tensors or is_vllms(folder)


def is_vllms(folder: ForeignFolder) -> bool:
    """Says whether the heads are named as vLLM names them."""
    return VLLM_BLOCK.format(0, 0, "weight") in folder.tensors


def read(folder: ForeignFolder, backbone: Backbone, given: dict[str, Any]) -> Reading:
    """Returns the heads' config and weights for this target.

    Raises UserError if they do not fit each other or the target, and UnsupportedModelError for
    tensors that such heads do not have. How many there are is counted: published configs say 2 of
    5.
    """
    require_nothing_given(folder, given, "Medusa")
    config, is_own, ids = folder.config, not is_vllms(folder), None
    if not folder.is_whole_model:  # whose config is the target's
        for name, values in ONLY.items():
            if config.get(name) is not None and config[name] not in values:
                raise unsupported(folder, name, config[name], str(values[0]))
        require_known_keys(folder, config, {*ONLY, *KNOWN})
    if not is_own:
        ids = _rename_vllms(folder, backbone)
    has_bias = is_own or bool(config.get("medusa_fc_bias"))
    tensors = folder.tensors
    num_heads = next(i for i in count() if f"{i}.0.linear.weight" not in tensors)
    stored_layers = next(j for j in count() if f"0.{j}.linear.weight" not in tensors)
    # of one and the same block, which may be stored once
    num_layers = max(stored_layers, config.get("medusa_num_layers") or 1)
    heads = any(HEAD.fullmatch(name) for name in tensors)
    V, D = backbone.config.vocab_size, backbone.config.hidden_size
    state: dict[str, Tensor] = {}
    for i in range(num_heads):
        for j in range(num_layers):
            stored = j if f"{i}.{j}.linear.weight" in folder.tensors else 0
            if j and not stored:
                for part in ("weight", "bias"):
                    state[f"blocks.{i}.{j}.{part}"] = state[f"blocks.{i}.0.{part}"]
                continue
            name = f"{i}.{j}.linear"
            weight = folder.take(f"{name}.weight")
            bias = folder.take(f"{name}.bias") if has_bias else torch.zeros(D)
            if weight.shape != (D, D) or len(bias) != D:
                raise UserError(
                    f"{folder.path}: got {name} of shape {list(weight.shape)}, expected the "
                    f"target's hidden size of {D}: it was trained for another target"
                )
            state[f"blocks.{i}.{j}.weight"] = weight.T
            if has_bias:
                state[f"blocks.{i}.{j}.bias"] = bias
        if heads:
            state[f"output_heads.{i}"] = folder.take(f"{i}.{num_layers}.weight")[:V]
    folder.require_all_read(())
    fields: dict[str, Any] = {"num_heads": num_heads, "num_layers": num_layers, "bias": has_bias}
    fields |= {"heads": "own" if heads else "shared"}
    version = ("version 1" if heads else "version 2") if is_own else "vLLM"
    found = Reading(version, "medusa", fields, state)
    rows = {len(state[f"output_heads.{i}"]) for i in range(num_heads if heads else 0)}
    if len(rows) > 1:
        raise UserError(f"{folder.path}: got heads of {sorted(rows)} tokens, expected one number")
    if rows and min(rows) < V and ids is None:
        ids = torch.arange(min(rows))
    found.draft_token_ids = ids
    found.said.append(
        f"{num_heads} heads of {num_layers} {'block' if num_layers == 1 else 'blocks'}"
    )
    found.said.append("output matrices of their own" if heads else "the target's head")
    if config.get("medusa_num_heads") not in (None, num_heads):
        found.said.append(f"the config speaks of {config['medusa_num_heads']!r:.20} heads")
    return found


def _rename_vllms(folder: ForeignFolder, backbone: Backbone) -> Tensor | None:
    """Gives vLLM's tensors the names of Medusa's own, and returns the ids of the tokens that the
    heads guess, rising, None for all. One matrix for all heads is left out if it is the target's.
    """
    config, tensors, V = folder.config, folder.tensors, backbone.config.vocab_size
    first = VLLM_HEAD.format(0)
    if config.get("original_lm_head") and first in tensors:
        tensors[VLLM_SHARED] = tensors.pop(first)
    shared, ids = tensors.pop(VLLM_SHARED, None), tensors.pop(VLLM_IDS, None)
    order = torch.arange(V if shared is None else min(V, len(shared)))
    if ids is not None:
        ids, order = ids.flatten().long().sort()
    elif len(order) < V:
        ids = order
    kept = torch.arange(V) if ids is None else ids
    if not len(kept) or kept[0] < 0 or kept[-1] >= V or bool((kept.diff() == 0).any()):
        raise UserError(
            f"{folder.path}: got {VLLM_IDS} with ids that repeat or are not among the target's "
            f"{V} tokens: it was trained for another target"
        )

    def rows(head: Tensor) -> Tensor:
        if ids is None:
            return head[:V]
        if len(head) < len(ids):
            raise UserError(
                f"{folder.path}: got heads of {len(head)} tokens, and ids of {len(ids)}"
            )
        return head[ids if len(head) > len(ids) else order]

    if shared is not None:
        theirs = real(backbone.head.weight).float() * backbone.logit_scale
        if torch.equal(rows(shared).float(), theirs[kept]):
            shared = None
    i = 0
    while VLLM_BLOCK.format(i, 0, "weight") in tensors:
        j = 0
        while VLLM_BLOCK.format(i, j, "weight") in tensors:
            for part in ("weight", "bias"):
                if (name := VLLM_BLOCK.format(i, j, part)) in tensors:
                    tensors[f"{i}.{j}.linear.{part}"] = tensors.pop(name)
            j += 1
        head = tensors.pop(VLLM_HEAD.format(i), shared)
        if head is not None:
            tensors[f"{i}.{j}.weight"] = rows(head)
        i += 1
    return ids
