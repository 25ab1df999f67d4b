"""Traces a module into an ONNX model of standard operators (opset 24) and writes it to disk.

The result is the contiguous form of a graph; `slots` makes the form that ONNX Runtime runs from it.
"""

import contextlib
import hashlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes
from torch import Tensor, nn

from spec_export.model.config import DecoderConfig
from spec_export.model.decoder import Backbone
from spec_export.model.deferred import is_deferred, real, replaced, stand_in
from spec_runtime.bundle.manifest import FUSED, feature_names
from spec_runtime.errors import UserError

OPSET = 24
# IR 11 is what TensorRT's parser reads; nothing newer is used.
IR_VERSION = 11
# Tensors of up to this size stay in the graph's file: ONNX Runtime reads shapes only from there.
SMALL_BYTES = 256


@dataclass(frozen=True)
class GraphInput:
    """Describes one input of a graph: its name, a tensor to trace with, and its symbolic axes.

    Over all inputs of a graph, axes have the same name if and only if they have the same size, and
    sizes are 2 or more: the tracer tells axes apart by size and takes 0 and 1 for constants. A name
    may be a sum, such as "A+N".
    """

    name: str
    example: Tensor
    axes: dict[int, str]

    def __post_init__(self) -> None:
        if any(not 0 <= axis < self.example.dim() for axis in self.axes):
            raise UserError(
                f"got axes {sorted(self.axes)} for input {self.name}, "
                f"expected axes of a {self.example.dim()}-D tensor"
            )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporter's notes (absent torchvision, renamed axes), which do not concern us."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


class _Flat(nn.Module):
    """Calls a module with a flat argument list, so that each input gets one name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        return self.module(*args)


def export(
    module: nn.Module, inputs: Sequence[GraphInput], outputs: Sequence[str], name: str
) -> ir.Model:
    """Traces `module(*inputs)` into a model with exactly the given input and output names.

    The weights stay shared with the module: nothing is copied, and what is deferred is not read,
    until the model is written. Raises UserError if the examples' sizes do not tell the axes apart,
    see `GraphInput`.
    """
    _check_sizes(inputs)
    shapes = tuple(dict.fromkeys(given.axes, torch.export.Dim.DYNAMIC) for given in inputs)
    with _quiet(), torch.no_grad(), replaced(module, stand_in):
        program = torch.onnx.export(
            _Flat(module),
            tuple(given.example for given in inputs),
            dynamo=True,
            opset_version=OPSET,
            input_names=[given.name for given in inputs],
            output_names=list(outputs),
            dynamic_shapes=(shapes,),
            verbose=False,
        )
    assert program is not None
    model = program.model
    model.ir_version, model.graph.name = IR_VERSION, name
    model.producer_name, model.producer_version = "specsplit", None
    _name_axes(model.graph, inputs)
    _name_weights(model.graph, module)
    _drop_flat_reshapes(model.graph)
    passes.RemoveUnusedNodesPass()(model)
    passes.ClearMetadataAndDocStringPass()(model)
    return model


def _check_sizes(inputs: Sequence[GraphInput]) -> None:
    """Raises UserError unless axes of equal names, and no others, have equal sizes above 1."""
    sizes: dict[str, int] = {}
    for given in inputs:
        for axis, name in given.axes.items():
            size = given.example.shape[axis]
            if size < 2 or sizes.setdefault(name, size) != size:
                raise UserError(
                    f"got size {size} for axis {name} of input {given.name}, "
                    f"expected {sizes.get(name, 'at least 2')}"
                )
    if len(set(sizes.values())) != len(sizes):
        raise UserError(f"got axes of equal size among {sizes}, expected all sizes to differ")


def _name_axes(graph: ir.Graph, inputs: Sequence[GraphInput]) -> None:
    """Replaces the tracer's symbols (s2, s77, ...) by the given axis names, in all values."""
    names: dict[str | None, str] = {}
    for value, given in zip(graph.inputs, inputs, strict=True):
        assert value.name == given.name, (value.name, given.name)
        assert value.shape is not None, value.name
        for axis, name in given.axes.items():
            symbol = value.shape[axis]
            assert isinstance(symbol, ir.SymbolicDim), (given.name, axis, symbol)
            names[symbol.value] = name
    values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    for value in values:
        if value.shape is not None:
            # A sum the tracer wrote in its own symbols becomes an unknown size.
            value.shape = ir.Shape(
                [names.get(d.value) if isinstance(d, ir.SymbolicDim) else d for d in value.shape]
            )


def _name_weights(graph: ir.Graph, module: nn.Module) -> None:
    """Gives initializers the module's parameter names, a shared tensor the first of its names.

    Deferred parameters take the places of their stand-ins.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    renamed = {name: first.setdefault(id(each), name) for name, each in parameters.items()}
    for value in list(graph.initializers.values()):
        assert value.name is not None
        name = value.name.removeprefix("module.")
        value.name = renamed.get(name, name)
        parameter = parameters.get(value.name)
        if parameter is not None and is_deferred(parameter):
            tensor = value.const_value
            assert tensor is not None
            value.const_value = ir.LazyTensor(
                partial(_read, parameter), tensor.dtype, ir.Shape(parameter.shape), name=value.name
            )


def _read(parameter: Tensor) -> ir.TensorProtocol:
    return ir.tensor(real(parameter))


def _drop_flat_reshapes(graph: ir.Graph) -> None:
    """Removes the Reshape(index, [-1]) that `index_select` puts before Gather, for flat indices."""
    for node in list(graph):
        if node.op_type != "Reshape" or node.inputs[0] is None or node.inputs[1] is None:
            continue
        index, target = node.inputs[0], node.inputs[1].const_value
        flat = index.shape is not None and index.shape.rank() == 1
        if flat and target is not None and target.numpy().tolist() == [-1]:
            ir.convenience.replace_all_uses_with(node.outputs[0], index)
            graph.remove(node, safe=True)


def step_inputs(config: DecoderConfig, dtype: torch.dtype) -> list[GraphInput]:
    """Returns the inputs of one step over a cache (contiguous form), in order.

    The target and the drafters with a cache share them.
    """
    # Sizes that all differ; the tracer would take 0 and 1 for constants.
    N, M, A, S = 5, 3, 2, 16
    index = torch.zeros(A + N, dtype=torch.int64)
    inputs = [
        GraphInput("input_ids", index[None, :N], {1: "N"}),
        GraphInput("position_ids", index[None, :N], {1: "N"}),
        GraphInput("mask", torch.ones(1, 1, N, S, dtype=torch.bool), {2: "N", 3: "S"}),
        GraphInput("logit_rows", index[:M], {0: "M"}),
        GraphInput("write_index", index[:1], {}),
        GraphInput("src", index[:A], {0: "A"}),
        GraphInput("perm", index, {0: "A+N"}),
    ]
    caches = config.empty_caches(S, dtype)
    return inputs + [GraphInput(name, cache, {2: "S"}) for name, cache in caches.items()]


def export_backbone(backbone: Backbone) -> ir.Model:
    """Traces the backbone into its contiguous form, with the names that the runtime expects."""
    config = backbone.config
    inputs = step_inputs(config, backbone.dtype)
    caches = [given.name for given in inputs if given.name.startswith("kv.")]
    outputs = [
        "logits",
        *feature_names(config.taps),
        *(f"{FUSED}{name}" for name in backbone.fusions),
        *(f"{c}.out" for c in caches),
    ]
    return export(backbone, inputs, outputs, config.family)


def save(model: ir.Model, path: Path) -> None:
    """Writes the graph to `path` and its weights, each once, to the .bin file of the same name,
    unless all of them are small.

    The model itself does not change: its tensors stay in memory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    external = path.with_suffix(".bin")
    ir.save(model, path, external_data=external.name, size_threshold_bytes=SMALL_BYTES)
    if external.stat().st_size == 0:  # all weights are small and lie in the graph's own file
        external.unlink()


def save_beside(model: ir.Model, path: Path, lenders: Sequence[Path]) -> None:
    """Writes the graph to `path` and shares the weights that it has in common with `lenders`.

    These are graphs in the same folder. Weights that they have stay only in their files; the
    others go to the .bin file of this graph. The model's tensors become references to these files.
    """
    assert all(lender.parent == path.parent for lender in lenders), "it reads no other folder"
    there = [
        value.const_value
        for lender in lenders
        for value in ir.load(lender).graph.initializers.values()
        if isinstance(value.const_value, ir.ExternalTensor)
    ]
    files = {tensor.path for tensor in there}
    alike: dict[tuple[object, ...], list[ir.ExternalTensor]] = {}  # only these are compared
    for each in there:
        alike.setdefault(_form(each), []).append(each)
    content = cache(_content)
    own = []
    for value in model.graph.initializers.values():
        tensor = value.const_value
        assert tensor is not None, value.name
        if tensor.nbytes <= SMALL_BYTES:
            continue
        if isinstance(tensor, ir.ExternalTensor) and tensor.path in files:
            continue
        others = alike.get(_form(tensor), [])
        digest = _content(tensor) if others else b""
        found = next((each for each in others if content(each) == digest), None)
        if found is None:
            own.append(value)
            continue
        value.const_value = ir.ExternalTensor(
            found.location,
            found.offset,
            found.length,
            tensor.dtype,
            shape=found.shape,
            name=str(value.name),
            base_dir=path.parent,
        )
    if own:
        written = ir.external_data.convert_tensors_to_external(
            [value.const_value for value in own if value.const_value is not None],
            path.parent,
            path.with_suffix(".bin").name,
        )
        for value, tensor in zip(own, written, strict=True):
            value.const_value = tensor
    ir.save(model, path)


def _form(tensor: ir.TensorProtocol) -> tuple[object, ...]:
    """Returns the type and the shape of a tensor."""
    return tensor.dtype, tuple(tensor.shape.numpy())


def _content(tensor: ir.TensorProtocol) -> bytes:
    """Returns bytes that two tensors of one form have in common only if they hold the same."""
    return hashlib.sha256(tensor.tobytes()).digest()
