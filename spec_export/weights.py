"""Hands out a model's tensors by transformers' names, and knows which were never asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Weights(Protocol):
    """Where a backbone's tensors come from."""

    def get(self, name: str) -> Tensor | None:
        """Returns the tensor of this name in transformers' state dict, None if there is none.

        Names that share a tensor, as those of a tied head, get one object.
        """

    def joined(self, names: Sequence[str]) -> Tensor:
        """Returns tensors of these names, all of which are there, joined along the first axis."""

    def unread(self) -> list[str]:
        """Returns the names of the tensors that nobody has asked for."""


class ModelWeights:
    """Hands out the tensors of a transformers model, which share its memory."""

    def __init__(self, model: Any) -> None:
        self._tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self._read: set[str] = set()

    def get(self, name: str) -> Tensor | None:
        self._read.add(name)
        return self._tensors.get(name)

    def joined(self, names: Sequence[str]) -> Tensor:
        """Joins the tensors of a fused product, which needs its parts side by side.

        They are copied once, and the model's own parameters become views of the copy: the model
        keeps working and memory does not grow.
        """
        self._read.update(names)
        parts = [self._tensors[name] for name in names]
        if len(parts) == 1:
            return parts[0].detach()
        whole = torch.cat([part.detach() for part in parts])
        for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = view
        return whole

    def unread(self) -> list[str]:
        return sorted(set(self._tensors) - self._read)
