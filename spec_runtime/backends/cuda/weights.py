"""Holds weights on the device once, however many sessions read them.

ONNX Runtime copies a graph's weights to the device for each session. Here every weight that lies in
a file is copied there once and lent to all sessions whose graphs name the same bytes, such as those
for one lane and for several.
"""

import math
import threading
import weakref
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np

from spec_runtime.backends.cuda.api import Cuda
from spec_runtime.backends.cuda.copies import StreamCopies
from spec_runtime.backends.layout import ALIGNMENT
from spec_runtime.backends.session import Viewer
from spec_runtime.bundle.onnx_file import ExternalWeight, read_outline
from spec_runtime.errors import OutOfMemoryError, UserError
from spec_runtime.files.mapping import brief
from spec_runtime.files.writing import file_state

# Bytes of an element, by the number that ONNX has for its type. Weights of other types are left to
# ONNX Runtime.
ITEM_BYTES = {1: 4, 2: 1, 3: 1, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 16: 2, 17: 1}
UINT8 = 2
STAGING_BYTES = 64 << 20  # sent at a time


class _Placed:
    """A weight's address on the device; `block` keeps the memory that it lies in."""

    def __init__(self, address: int, block: Any) -> None:
        self.address, self.block = address, block


class _Block:
    """Memory on the device, from `address` on, for as long as this object lives.

    It is CUDA's own: ONNX Runtime's allocator would take up to twice as much. Raises UserError if
    the device has no room for it.
    """

    def __init__(self, num_bytes: int, cuda: Cuda) -> None:
        try:
            self.address = cuda.malloc(num_bytes)
        except OutOfMemoryError as error:
            raise UserError(
                f"got no room on the GPU for {num_bytes / 1e6:.0f} MB of weights "
                f"({brief(error, 200)}): end other programs there, or build with a lower precision"
            ) from error
        weakref.finalize(self, cuda.free, self.address).atexit = False


_placed: weakref.WeakValueDictionary[Hashable, _Placed] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class DeviceWeights:
    """The weights of the graph at `path` that lie in files, on the device.

    `values` holds them as OrtValues by name, for SessionOptions. They are views of memory that goes
    with this object, which therefore has to live as long as the session.
    """

    def __init__(self, path: Path, device: str, copies: StreamCopies) -> None:
        self.values: dict[str, Any] = {}
        viewer = Viewer(device)
        contents: dict[str, np.ndarray] = {}
        keys: dict[str, Hashable] = {}
        weights = [weight for weight in read_outline(path).weights if _fits(weight, path.parent)]
        for weight in weights:
            file = path.parent / weight.location
            if weight.location not in contents:
                contents[weight.location] = np.memmap(file, np.uint8, "r")
            keys[weight.name] = (*file_state(file), weight.offset, weight.length, device)
        with _lock:
            self._held = {key: there for key in keys.values() if (there := _placed.get(key))}
            new = {key: w for w in weights if (key := keys[w.name]) not in self._held}
            made = _place(new, contents, viewer, copies)
            self._held |= made
            _placed.update(made)
        self.values = {
            w.name: viewer.view(self._held[keys[w.name]].address, w.shape, w.element_type)
            for w in weights
        }


def _fits(weight: ExternalWeight, folder: Path) -> bool:
    """Returns whether the weight is where it says; ONNX Runtime refuses one that is not."""
    file = folder / weight.location
    num_bytes = math.prod(weight.shape) * ITEM_BYTES.get(weight.element_type, -1)
    is_inside = file.is_file() and weight.offset + weight.length <= file.stat().st_size
    return weight.length > 0 and num_bytes == weight.length and is_inside


def _place(
    weights: dict[Hashable, ExternalWeight],
    contents: dict[str, np.ndarray],
    viewer: Viewer,
    copies: StreamCopies,
) -> dict[Hashable, _Placed]:
    """Copies these weights into one new block on the device, each at an address of its own."""
    if not weights:
        return {}
    sizes = [-(-weight.length // ALIGNMENT) * ALIGNMENT for weight in weights.values()]
    block = _Block(sum(sizes), copies.cuda)
    staging = copies.host(min(max(sizes), STAGING_BYTES))
    placed, address = {}, block.address
    for (key, weight), size in zip(weights.items(), sizes, strict=True):
        content = contents[weight.location][weight.offset :][: weight.length]
        for begin in range(0, len(content), len(staging)):
            part = staging[: len(content) - begin]
            part[:] = content[begin : begin + len(part)]
            copies.upload(part, viewer.view(address + begin, part.shape, UINT8)).start()
            copies.settle()
        placed[key] = _Placed(address, block)
        address += size
    return placed
