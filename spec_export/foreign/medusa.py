"""Reads Medusa's heads: those of version 1 with output matrices of their own, those of version 2
without, and those that lie in the files of a whole model.

Head i has `{i}.{j}.linear.weight` and `.bias` for each block j, and in version 1 `{i}.{L}.weight`
after L blocks. Its blocks are one module that is run L times, so that a file may hold block 0 only.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from spec_export.decoder import Backbone
from spec_export.foreign.folder import ForeignFolder, Reading
from spec_export.foreign.parts import require_nothing_given
from spec_runtime.errors import UserError

SHOWS = "Medusa (0.0.linear.weight, alone or behind medusa_head.)"
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")


def matches(folder: ForeignFolder) -> bool:
    """Says whether a folder holds Medusa's heads, by its tensors' names."""
    return "0.0.linear.weight" in folder.tensors


def read(folder: ForeignFolder, backbone: Backbone, given: dict[str, Any]) -> Reading:
    """Returns the heads' config and weights for this target.

    Raises UserError if they do not fit each other or the target, and UnsupportedModelError for
    tensors that such heads do not have. How many there are is counted: published configs say 2 of
    5.
    """
    require_nothing_given(folder, given, "Medusa")
    config = folder.config
    blocks, heads = (_indices(pattern, folder) for pattern in (_BLOCK, _HEAD))
    num_heads = max(i for i, _ in blocks) + 1
    num_layers = max([*(j + 1 for _, j in blocks), *(j for _, j in heads)])
    if type(config.get("medusa_num_layers")) is int:  # of one and the same block, stored once
        num_layers = max(num_layers, config["medusa_num_layers"])
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
            weight, bias = folder.take(f"{name}.weight"), folder.take(f"{name}.bias")
            if weight.shape != (D, D) or len(bias) != D:
                raise UserError(
                    f"{folder.path}: got {name} of shape {list(weight.shape)}, expected the "
                    f"target's hidden size of {D}: it was trained for another target"
                )
            state[f"blocks.{i}.{j}.weight"], state[f"blocks.{i}.{j}.bias"] = weight.T, bias
        if heads:
            state[f"output_heads.{i}"] = folder.take(f"{i}.{num_layers}.weight")[:V]
    folder.require_all_read(())
    fields: dict[str, Any] = {"num_heads": num_heads, "num_layers": num_layers, "bias": True}
    fields |= {"heads": "own" if heads else "shared"}
    found = Reading("version 1" if heads else "version 2", "medusa", fields, state)
    rows = {len(state[f"output_heads.{i}"]) for i in range(num_heads if heads else 0)}
    if len(rows) > 1:
        raise UserError(f"{folder.path}: got heads of {sorted(rows)} tokens, expected one number")
    if rows and min(rows) < V:
        found.draft_token_ids = torch.arange(min(rows))
    found.said.append(
        f"{num_heads} heads of {num_layers} {'block' if num_layers == 1 else 'blocks'}"
    )
    found.said.append("output matrices of their own" if heads else "the target's head")
    if config.get("medusa_num_heads") not in (None, num_heads):
        found.said.append(f"the config speaks of {config['medusa_num_heads']!r:.20} heads")
    return found


def _indices(pattern: re.Pattern[str], folder: ForeignFolder) -> list[tuple[int, int]]:
    """Returns the numbers of head and block in each tensor's name that matches."""
    matches = (pattern.fullmatch(name) for name in folder.tensors)
    return [(int(match[1]), int(match[2])) for match in matches if match]
