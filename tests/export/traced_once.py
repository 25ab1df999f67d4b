"""Lets the tests of one run trace equal modules once, whichever of them comes first."""

from __future__ import annotations

import hashlib
import io
import marshal
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnx_ir as ir
import torch
from filelock import FileLock
from torch import Tensor, nn

MAX_BYTES = 2**24  # of weights: those of a real model would fill the disk


class _Digester(pickle.Pickler):
    """Pickles what a trace depends on, tensors by their content and not by their address."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.seen: dict[int, int] = {}  # tied weights are one tensor, and are traced as such

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        content = obj.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        place = self.seen.setdefault(id(obj), len(self.seen))
        about = (str(obj.dtype), tuple(obj.shape), obj.stride(), obj.requires_grad, place)
        return "tensor", *about, hashlib.sha256(content).hexdigest()


def _digest(module: nn.Module, args: object, options: object) -> str | None:
    """Returns what names the trace of a module, None where it is large or cannot be pickled."""
    tensors = [*module.parameters(), *module.buffers()]
    if sum(tensor.nbytes for tensor in tensors) > MAX_BYTES:
        return None
    # A module of a test's own file may have the name of another one.
    code = [marshal.dumps(type(part).forward.__code__) for part in module.modules()]
    file = io.BytesIO()
    try:
        _Digester(file).dump((module, args, options, code))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    return hashlib.sha256(file.getvalue()).hexdigest()


class TracedOnce:
    """Stands in for `torch.onnx.export`; what it traces lies in a folder that processes share.

    All that the product does with a trace is still done in each build.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.export = folder, torch.onnx.export

    def __call__(self, module: nn.Module, args: Any, **options: Any) -> Any:
        digest = _digest(module, args, options)
        if digest is None:
            return self.export(module, args, **options)
        file = self.folder / f"{digest}.onnx"
        with FileLock(file.with_suffix(".lock")):
            if not file.exists():
                program = self.export(module, args, **options)
                assert program is not None
                file.write_bytes(ir.to_proto(program.model).SerializeToString())
        return SimpleNamespace(model=ir.from_proto(onnx.load(file)))
