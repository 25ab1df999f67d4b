"""Lets the tests of one run trace modules of equal make once, whichever of them comes first."""

import hashlib
import io
import json
import marshal
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnx_ir as ir
import torch
from filelock import FileLock
from torch import Tensor, nn


def _content(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return hashlib.sha256(data).hexdigest()


class _Digester(pickle.Pickler):
    """Pickles what a trace depends on, in the same way in each process: tensors by their content
    and not by their address, weights by neither, for a trace reads their shapes alone, sets in one
    order, and equal texts and tuples alike, whether they are one object or two."""

    def __init__(self, file: io.BytesIO, weights: Iterable[Tensor]) -> None:
        super().__init__(file, protocol=5)
        self.weights = {id(each) for each in weights}
        self.seen: dict[int, int] = {}  # tied weights are one tensor, and are traced as such

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, str):
            return obj.encode()
        if isinstance(obj, set | frozenset):
            return sorted(map(repr, obj))
        if type(obj) is tuple:
            return list(obj)
        if type(obj).__name__ == "GenerationConfig":  # has Python's hash of a text; none is traced
            return ["generation"]
        if not isinstance(obj, Tensor):
            return None
        content = "" if id(obj) in self.weights else _content(obj)
        place = self.seen.setdefault(id(obj), len(self.seen))
        about = (str(obj.dtype), tuple(obj.shape), obj.stride(), obj.requires_grad, place)
        return "tensor", *about, content


def _digest(module: nn.Module, args: object, options: object) -> str | None:
    """Returns what names the trace of a module, None where it cannot be pickled."""
    # A module of a test's own file may have the name of another one.
    code = [marshal.dumps(type(part).forward.__code__, 2) for part in module.modules()]
    file = io.BytesIO()
    try:
        _Digester(file, _weights(module).values()).dump((module, args, options, code))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    return hashlib.sha256(file.getvalue()).hexdigest()


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and the buffers of floats, such as what a drafter borrows."""
    buffers = module.named_buffers(remove_duplicate=False)
    borrowed = {name: each for name, each in buffers if each.is_floating_point()}
    return dict(module.named_parameters(remove_duplicate=False)) | borrowed


def _read_by_the_exporter(program: Any, module: nn.Module) -> list[str]:
    """Returns the names of the weights whose numbers may be in a trace under another name.

    Those are the ones that are read and are no weight of the graph. If the exporter computed a
    weight of its own, or took one of them for a weight that is equal, all are.
    """
    weights, written = _weights(module), program.model.graph.initializers
    traced = program.exported_program
    signature = traced.graph_signature
    names = signature.inputs_to_parameters | signature.inputs_to_buffers
    read = [names[node.name] for node in traced.graph.nodes if node.name in names and node.users]
    read = [name for name in read if name in weights]
    kept = [weights[name] for name in weights if name in written]
    left = [name for name in read if all(weights[name] is not each for each in kept)]
    known = {name for name, _ in module.named_buffers()} | weights.keys()
    made = [
        value.name
        for value in written.values()
        if value.name not in known
        and value.const_value.size > 1
        and value.const_value.dtype.is_floating_point()
    ]
    contents = {_content(each) for each in kept} if left else set()
    is_merged = any(_content(weights[name]) in contents for name in left)
    return read if made or is_merged else left


class TracedOnce:
    """Stands in for `torch.onnx.export`; what it traces lies in a folder that processes share.

    A trace of a module of the same make gets the module's own weights. All that the product
    does with a trace is still done in each build.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.export = folder, torch.onnx.export

    def __call__(self, module: nn.Module, args: Any, **options: Any) -> Any:
        digest = _digest(module, args, options)
        if digest is None:
            return self.export(module, args, **options)
        weights = _weights(module)
        with FileLock(self.folder / f"{digest}.lock"):
            file = self._find(digest, weights)
            if file is None:
                program = self.export(module, args, **options)
                assert program is not None
                names = _read_by_the_exporter(program, module)
                (self.folder / f"{digest}.json").write_text(json.dumps(names))
                file = self._file(digest, names, weights)
                for name, value in program.model.graph.initializers.items():
                    if name in weights:  # not kept: those of a real model would fill the disk
                        value.const_value = ir.tensor([0.0], name=name)
                file.write_bytes(ir.to_proto(program.model).SerializeToString())
        model = ir.from_proto(onnx.load(file))
        for name, value in model.graph.initializers.items():
            if name in weights:
                tensor = ir.tensor(weights[name].detach(), name=name)
                value.const_value, value.dtype = tensor, tensor.dtype
                value.shape = ir.Shape(weights[name].shape)
        return SimpleNamespace(model=model)

    def _find(self, digest: str, weights: Mapping[str, Tensor]) -> Path | None:
        names = self.folder / f"{digest}.json"
        if not names.exists():
            return None
        file = self._file(digest, json.loads(names.read_text()), weights)
        return file if file.exists() else None

    def _file(self, digest: str, names: Iterable[str], weights: Mapping[str, Tensor]) -> Path:
        contents = "".join(_content(weights[name]) for name in names)
        return self.folder / f"{digest}-{hashlib.sha256(contents.encode()).hexdigest()}.onnx"
