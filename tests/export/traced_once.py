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
    """Pickles what a trace depends on, tensors by their content and not by their address, and
    parameters by neither: a trace reads their shapes alone."""

    def __init__(self, file: io.BytesIO, parameters: Iterable[Tensor]) -> None:
        super().__init__(file, protocol=5)
        self.parameters = {id(each) for each in parameters}
        self.seen: dict[int, int] = {}  # tied weights are one tensor, and are traced as such

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        content = "" if id(obj) in self.parameters else _content(obj)
        place = self.seen.setdefault(id(obj), len(self.seen))
        about = (str(obj.dtype), tuple(obj.shape), obj.stride(), obj.requires_grad, place)
        return "tensor", *about, content


def _digest(module: nn.Module, args: object, options: object) -> str | None:
    """Returns what names the trace of a module, None where it cannot be pickled."""
    # A module of a test's own file may have the name of another one.
    code = [marshal.dumps(type(part).forward.__code__) for part in module.modules()]
    file = io.BytesIO()
    try:
        _Digester(file, module.parameters()).dump((module, args, options, code))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    return hashlib.sha256(file.getvalue()).hexdigest()


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters(remove_duplicate=False))


def _read_by_the_exporter(program: Any, module: nn.Module) -> list[str]:
    """Returns the names of the parameters whose numbers may be in a trace under another name.

    Those are the ones that are read and are no weight of the graph. If the exporter computed a
    weight of its own, or took one of them for a weight that is equal, all are.
    """
    parameters, weights = _parameters(module), program.model.graph.initializers
    traced = program.exported_program
    names = traced.graph_signature.inputs_to_parameters
    read = [names[node.name] for node in traced.graph.nodes if node.name in names and node.users]
    kept = [parameters[name] for name in parameters if name in weights]
    left = [name for name in read if all(parameters[name] is not each for each in kept)]
    known = {name for name, _ in module.named_buffers()} | parameters.keys()
    made = [
        value.name
        for value in weights.values()
        if value.name not in known
        and value.const_value.size > 1
        and value.const_value.dtype.is_floating_point()
    ]
    contents = {_content(each) for each in kept} if left else set()
    is_merged = any(_content(parameters[name]) in contents for name in left)
    return read if made or is_merged else left


class TracedOnce:
    """Stands in for `torch.onnx.export`; what it traces lies in a folder that processes share.

    A trace of a module of the same make gets the module's own parameters. All that the product
    does with a trace is still done in each build.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.export = folder, torch.onnx.export

    def __call__(self, module: nn.Module, args: Any, **options: Any) -> Any:
        digest = _digest(module, args, options)
        if digest is None:
            return self.export(module, args, **options)
        parameters = _parameters(module)
        with FileLock(self.folder / f"{digest}.lock"):
            file = self._find(digest, parameters)
            if file is None:
                program = self.export(module, args, **options)
                assert program is not None
                names = _read_by_the_exporter(program, module)
                (self.folder / f"{digest}.json").write_text(json.dumps(names))
                file = self._file(digest, names, parameters)
                for name, value in program.model.graph.initializers.items():
                    if name in parameters:  # not kept: those of a real model would fill the disk
                        value.const_value = ir.tensor([0.0], name=name)
                file.write_bytes(ir.to_proto(program.model).SerializeToString())
        model = ir.from_proto(onnx.load(file))
        for name, value in model.graph.initializers.items():
            if name in parameters:
                tensor = ir.tensor(parameters[name].detach(), name=name)
                value.const_value, value.dtype = tensor, tensor.dtype
                value.shape = ir.Shape(parameters[name].shape)
        return SimpleNamespace(model=model)

    def _find(self, digest: str, parameters: Mapping[str, Tensor]) -> Path | None:
        names = self.folder / f"{digest}.json"
        if not names.exists():
            return None
        file = self._file(digest, json.loads(names.read_text()), parameters)
        return file if file.exists() else None

    def _file(self, digest: str, names: Iterable[str], parameters: Mapping[str, Tensor]) -> Path:
        contents = "".join(_content(parameters[name]) for name in names)
        return self.folder / f"{digest}-{hashlib.sha256(contents.encode()).hexdigest()}.onnx"
