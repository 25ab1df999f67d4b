"""Brings all feeds of a run to the device with one copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from spec_runtime.backends.copies import Copies
from spec_runtime.backends.session import empty_value

ALIGNMENT = 256  # bytes; every feed begins at a multiple, as an allocation of its own would


class PackedFeeds:
    """One buffer on the device for the feeds of one shape each, all at addresses of their own.

    Example: a bool[5] and a float16[5] begin at bytes 0 and 256 of 512.
    """

    def __init__(self, feeds: Mapping[str, np.ndarray], device: str, copies: Copies) -> None:
        self.first: dict[str, int] = {}  # where each feed begins, in bytes
        end = 0
        for name, feed in feeds.items():
            self.first[name] = end
            end += -(-feed.nbytes // ALIGNMENT) * ALIGNMENT
        self._bytes = copies.host(max(end, 1))
        self._value = empty_value(self._bytes.shape, "uint8", device)
        self._ticket = -1
        self._device, self._copies = device, copies
        self._feeds = {
            name: self._bytes[self.first[name] :][: feed.nbytes]
            .view(feed.dtype)
            .reshape(feed.shape)
            for name, feed in feeds.items()
        }

    def bind(self, binding: Any) -> None:
        """Binds every feed as an input, at its address on the device."""
        base = self._value.data_ptr()
        for name, feed in self._feeds.items():
            address = base + self.first[name]
            binding.bind_input(name, self._device, 0, feed.dtype, feed.shape, address)

    def update(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Starts the copy of new feeds, once the last copy is done."""
        self._copies.claim(self._ticket)
        for name, feed in self._feeds.items():
            feed[...] = feeds[name]
        self._ticket = self._copies.send(self._bytes, self._value)
