"""Reads arrays from a safetensors file, of which nothing is trusted: every size is compared with
what the file has before it is used. The runtime needs no package for this."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

DTYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "U8": np.dtype(np.uint8),
}
MAX_HEADER_BYTES = 1 << 20


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the file's header and its arrays by name, which are views of its bytes.

    Raises ValueError, KeyError or TypeError for a file that is none, or has arrays of other types
    than DTYPES, and OSError if it cannot be read.
    """
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes")
        header = json.loads(file.read(size))
        if not isinstance(header, dict):
            raise ValueError("a header that is no object")
        content = np.frombuffer(file.read(), np.uint8)
    arrays = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        sizes = [begin, end, *shape]
        if not all(type(number) is int and number >= 0 for number in sizes):
            raise ValueError(f"{name} of shape {shape} at {begin} to {end}")
        if end > len(content) or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} of shape {shape} at {begin} to {end}")
        arrays[name] = content[begin:end].view(dtype).reshape(shape)
    return header, arrays
