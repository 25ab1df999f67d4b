"""Hands out a model's tensors by transformers' names, and knows which were never asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

SMALL = 4096  # weights; tensors of up to this size, and all vectors, are never deferred


class Weights(Protocol):
    """Where a backbone's tensors come from."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the embedding, which is the whole model's."""

    def shape(self, name: str) -> torch.Size | None:
        """Returns the shape of a tensor by its name, None if there is none."""

    def get(self, name: str) -> Tensor | None:
        """Returns the tensor of this name in transformers' state dict, None if there is none.

        Names that share a tensor, as those of a tied head, get one object.
        """

    def joined(self, names: Sequence[str]) -> Tensor:
        """Returns the tensors of these names joined along the first axis; all must be there."""

    def unread(self) -> list[str]:
        """Names the tensors that were never read."""


class Stored(Protocol):
    """Tensors by name, read anew each time; their shapes are known without reading."""

    shapes: Mapping[str, torch.Size]

    def __getitem__(self, name: str) -> Tensor: ...


class ModelWeights:
    """Hands out the tensors of a transformers model, which share its memory."""

    def __init__(self, model: Any) -> None:
        self._tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self.dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        self._read: set[str] = set()

    def shape(self, name: str) -> torch.Size | None:
        found = self._tensors.get(name)
        return None if found is None else found.shape

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


class StoredWeights:
    """Hands out the tensors of a mapping that reads them anew each time, in one type.

    The outline of such weights has matrices without memory, on torch's meta device.
    """

    def __init__(
        self, tensors: Stored, dtype: torch.dtype = torch.float32, *, is_outline: bool = False
    ) -> None:
        self._tensors, self.dtype, self._is_outline = tensors, dtype, is_outline
        self._read: set[str] = set()

    def outline(self) -> StoredWeights:
        """Returns these weights with matrices without memory."""
        return StoredWeights(self._tensors, self.dtype, is_outline=True)

    def to(self, dtype: torch.dtype) -> StoredWeights:
        """Returns these weights in another type."""
        return StoredWeights(self._tensors, dtype)

    def shape(self, name: str) -> torch.Size | None:
        return self._tensors.shapes.get(name)

    def get(self, name: str) -> Tensor | None:
        self._read.add(name)
        shape = self.shape(name)
        if shape is None:
            return None
        if self._is_outline and len(shape) > 1 and shape.numel() > SMALL:
            return torch.empty(shape, dtype=self.dtype, device="meta")
        return self._tensors[name].to(self.dtype)

    def joined(self, names: Sequence[str]) -> Tensor:
        parts = [part for name in names if (part := self.get(name)) is not None]
        if any(part.is_meta for part in parts):
            parts = [part.to("meta") for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def unread(self) -> list[str]:
        return sorted(self._tensors.shapes.keys() - self._read)
