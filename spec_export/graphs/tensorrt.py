"""Builds TensorRT plans from a bundle's graphs, and names each by a hash of what shapes it.

TensorRT-RTX builds without a GPU, for any that it knows; no plan was ever executed.
Networks are strongly typed: every tensor has the type that the graph gives it.
"""

import hashlib
import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from spec_export.graphs.edit import MASKED, GraphEditor, input_at
from spec_export.graphs.half import narrow
from spec_export.model.config import POSITIONS
from spec_runtime.backends.cuda.api import open_cuda
from spec_runtime.backends.shapes import is_cache, shape_of
from spec_runtime.backends.tensorrt.api import DTYPES, TensorRT, import_tensorrt
from spec_runtime.bundle.manifest import Graph, Plan, TensorSpec, written_name
from spec_runtime.errors import UnsupportedModelError, UserError
from spec_runtime.files.writing import sha256
from spec_runtime.loop.target import PREFILL_ROWS
from spec_runtime.proposers.rows import CHUNK_ROWS

ENGINES = "engines"
# The version of what `build_plan` sets; raise it with every change, so that no old plan is kept.
SETTINGS = 2
FEW_ROWS = 4
Size = tuple[int, ...]  # the least, likeliest and largest size of an axis
Profile = dict[str, Size]  # by free axis


# ------------------------------------------------------------------------------- graphs


def adapt(model: ir.Model, precision: str, capacity: int) -> ir.Model:
    """Rewrites a graph of the contiguous form, or without a cache, for TensorRT, in place.

    Its caches get `capacity` slots, which TensorRT needs fixed, and Attention additive masks. If it
    was traced in float32, as drafters are, it also gets the type of the precision. Raises UserError
    for a model with convolutions: such plans were never tried.
    """
    if any(value.name == POSITIONS for value in model.graph.inputs):
        raise UnsupportedModelError(
            "got a model with convolution layers and backend tensorrt, expected attention only: "
            "build with --backend onnxruntime"
        )
    for value in [*model.graph.inputs, *(each for node in model.graph for each in node.outputs)]:
        if value.shape is not None:
            value.shape = ir.Shape([capacity if size == "S" else size for size in value.shape])
    return with_additive_masks(narrow(model, precision))


def with_additive_masks(model: ir.Model) -> ir.Model:
    """Makes every Attention of the contiguous form read an additive mask, in place.

    Each boolean mask is turned into one once, because TensorRT-RTX 1.7 builds one attention with a
    boolean mask, but no two that share such a mask. Raises UnsupportedModelError for softcaps on
    scores: whether a plan would apply them before the mask, as it must, was never tried.
    """
    edit, made = GraphEditor(model, "additive"), dict[ir.Value, ir.Value]()
    for node in [node for node in model.graph if node.op_type == "Attention"]:
        query, mask = input_at(node, 0), input_at(node, 3)
        assert query.dtype is not None
        softcap = node.attributes.get("softcap")
        if softcap is not None and softcap.as_float():
            raise UnsupportedModelError(
                f"got a softcap of {softcap.as_float():g} on attention scores, expected none with "
                "--backend tensorrt: build with --backend onnxruntime"
            )
        if mask not in made:
            dtype = query.dtype.numpy()
            zero, low = (edit.constant(np.array([n], dtype)) for n in (0, MASKED[query.dtype]))
            (bias,) = edit.add(node, "Where", [mask, zero, low])
            bias.shape, bias.type = mask.shape, ir.TensorType(query.dtype)
            made[mask] = bias
        node.replace_input_with(3, made[mask])
    return model


def profiles_for(graph: Graph, num_nodes: int, scratch: int) -> tuple[Profile, ...]:
    """Returns the optimisation profiles of a graph, from narrow to wide.

    They are for one row, as in plain decoding, or a few; for a tree of up to `num_nodes` nodes; and
    for a chunk of the prompt followed by up to `scratch` rows, into which any tree fits too.
    The first holds FEW_ROWS because TensorRT-RTX 1.7 stores each layer's weights a second time for
    a profile that holds one row only.

    Example, trees of 24 nodes: N is (1, 1, 4), then (1, 24, 24), then (1, 256, 384).
    """
    axes = graph.free_axes
    if not axes:
        return ({},)
    chunk = max(PREFILL_ROWS, CHUNK_ROWS)
    # By profile: sizes of the rows N, the rows of logits M and the rows moved A.
    widths: list[tuple[Size, Size, Size]] = [
        ((1, 1, FEW_ROWS), (1, 1, FEW_ROWS), (1, 1, FEW_ROWS)),
        ((1, num_nodes, num_nodes), (1, num_nodes, num_nodes), (1, 2, num_nodes)),
        ((1, chunk, chunk + scratch), (1, 1, scratch), (1, 1, scratch)),
    ]
    capacity = max((spec.shape[2] for spec in filter(is_cache, graph.inputs)), default=None)
    profiles = []
    for rows, logits, moved in widths:
        both = tuple(a + n for a, n in zip(moved, rows, strict=True))
        sizes = {"N": rows, "M": logits, "A": moved, "A+N": both}
        if isinstance(capacity, int):
            # An update must be shorter than the cache.
            sizes = {
                axis: tuple(min(size, capacity - 1) for size in three)
                for axis, three in sizes.items()
            }
        profiles.append({axis: sizes[axis] for axis in axes})
    return tuple(profiles)


# ------------------------------------------------------------------------------- building


@dataclass(frozen=True)
class BuiltPlan:
    """Holds a plan and what it cost in bytes and seconds (0.0 if an older bundle had the plan)."""

    plan: Plan
    num_bytes: int
    seconds: float


class PlanBuilder:
    """Builds the plans of one bundle.

    compute_capabilities: of the GPUs, such as "8.9"; none means the GPU here.
    previous: paths of plans by file name; such a plan is copied instead of built again.
    Raises UserError if TensorRT is not installed, if no GPU is named and none is here, or if
    TensorRT does not build for a GPU named.
    """

    def __init__(
        self, compute_capabilities: Sequence[str] = (), previous: Mapping[str, Path] | None = None
    ) -> None:
        self._trt = import_tensorrt()
        self._previous = previous or {}
        wanted = compute_capabilities or _gpu_here()
        self.compute_capabilities = choose_capabilities(self._trt, wanted, _known(self._trt))

    def add_plans(
        self, root: Path, name: str, graph: Graph, profiles: tuple[Profile, ...]
    ) -> tuple[Graph, list[BuiltPlan]]:
        """Writes plans to `root`/engines as `name`-sm89-….plan; returns the graph with them."""
        graph_hash = hash_graph(root / graph.file)
        built = [
            self._build(root, name, graph, graph_hash, profiles, capability)
            for capability in self.compute_capabilities
        ]
        return replace(graph, plans=tuple(each.plan for each in built)), built

    def _build(
        self,
        root: Path,
        name: str,
        graph: Graph,
        graph_hash: str,
        profiles: tuple[Profile, ...],
        capability: str,
    ) -> BuiltPlan:
        trt = self._trt
        key = plan_key(graph_hash, trt, capability, profiles)
        number = capability.replace(".", "")
        file = f"{ENGINES}/{name}-sm{number}-{trt.flavour}-{trt.version}-{key[:12]}.plan"
        plan = Plan(file, trt.flavour, trt.version, capability, key, profiles)
        path, begin = root / file, time.perf_counter()
        path.parent.mkdir(exist_ok=True)
        if path.name in self._previous:
            shutil.copyfile(self._previous[path.name], path)
            return BuiltPlan(plan, path.stat().st_size, 0.0)
        data = build_plan(trt, root / graph.file, graph, profiles, capability)
        path.write_bytes(data)
        return BuiltPlan(plan, len(data), time.perf_counter() - begin)


def choose_capabilities(
    trt: TensorRT, wanted: Sequence[str], known: Sequence[str]
) -> tuple[str, ...]:
    """Returns the compute capabilities to build for, each once.

    wanted: entries such as "8.9" or "8.0,8.9". known: those that this TensorRT builds for here.
    Raises UserError if none is wanted, or one is not known.

    Example: wanted ["8.0,8.9", "8.9"] gives ("8.0", "8.9").
    """
    found = [part.strip() for entry in wanted for part in entry.split(",")]
    for capability in found:
        if capability not in known:
            raise UserError(
                f"got compute capability {capability!r}, expected one of {', '.join(known)}: for "
                f"these {trt.flavour} {trt.version} builds here"
            )
    if not found:
        raise UserError(
            "got no --compute-capability and no GPU to take it from, expected one: name that of "
            "the GPU the bundle is for, as in --compute-capability 8.9"
        )
    return tuple(dict.fromkeys(found))


def plan_key(
    graph_hash: str, trt: TensorRT, compute_capability: str, profiles: Sequence[Profile]
) -> str:
    """Returns the SHA-256, in hex, of everything that shapes a plan."""
    parts = [SETTINGS, graph_hash, trt.flavour, trt.version, compute_capability, list(profiles)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def hash_graph(path: Path) -> str:
    """Returns the SHA-256, in hex, of the ONNX file together with the files of its weights."""
    model = ir.load(path)
    tensors = [value.const_value for value in model.graph.initializers.values()]
    files = {str(t.location) for t in tensors if isinstance(t, ir.ExternalTensor)}
    hashes = [sha256(path), *(sha256(path.parent / file) for file in sorted(files))]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def build_plan(
    trt: TensorRT, path: Path, graph: Graph, profiles: Sequence[Profile], compute_capability: str
) -> memoryview:
    """Returns the serialised engine, which is as large as the weights and is not copied.

    Raises UserError if TensorRT does not parse or build the graph, or if what it parsed differs
    from what the manifest says.
    """
    module = trt.module
    trt.logger.errors.clear()
    builder = module.Builder(trt.logger)
    network = builder.create_network(0)
    parser = module.OnnxParser(network, trt.logger)
    if not parser.parse_from_file(str(path)):  # by path: its weights are in the same folder
        told = [" ".join(parser.get_error(i).desc().split()) for i in range(parser.num_errors)]
        raise UserError(f"{trt.flavour} does not parse {path.name}: {'; '.join(told)[:400]}")
    check_network(module, network, graph, path.name)
    for attention in _attentions(module, network):
        attention.decomposable = True  # for fp32, and for shapes without a fused kernel
    config = builder.create_builder_config()
    config.clear_flag(module.BuilderFlag.TF32)  # fp32 keeps all its bits
    # Otherwise x - x may become 0 for a NaN too, which `add_argmax` tells by that difference.
    config.set_flag(module.BuilderFlag.STRICT_NANS)
    config.num_compute_capabilities = 1
    number = compute_capability.replace(".", "")  # "8.9" is SM89
    config.set_compute_capability(getattr(module.ComputeCapability, f"SM{number}"), 0)
    # The runtime brings the memory, because capturing a CUDA graph needs that.
    config.set_flag(module.BuilderFlag.REQUIRE_USER_ALLOCATION)
    for sizes in profiles:
        profile = builder.create_optimization_profile()
        for spec in graph.inputs:
            shapes = [
                shape_of(spec, {axis: three[which] for axis, three in sizes.items()})
                for which in range(3)
            ]
            profile.set_shape(spec.name, *shapes)
            taken = [tuple(shape) for shape in profile.get_shape(spec.name)]
            _require(path.name, f"profile of {spec.name}", taken, shapes)
        config.add_optimization_profile(profile)
    _require(path.name, "profiles", config.num_optimization_profiles, len(profiles))
    plan = builder.build_serialized_network(network, config)
    if plan is None or plan.nbytes == 0:
        raise UserError(
            f"{trt.flavour} {trt.version} does not build {path.name} for {compute_capability}: "
            f"{trt.reason}"
        )
    return memoryview(plan)


def check_network(module: Any, network: Any, graph: Graph, file: str) -> None:
    """Raises UserError unless the parsed network is the graph that the manifest describes.

    Compared are its tensors with their types and free axes. Each layer must have one attention and
    two updates in place, each from a network input kv.… to the output kv.….out.
    """
    for kind, number, get, specs in (
        ("input", network.num_inputs, network.get_input, graph.inputs),
        ("output", network.num_outputs, network.get_output, graph.outputs),
    ):
        tensors = {tensor.name: tensor for tensor in map(get, range(number))}
        _require(file, f"{kind}s", sorted(tensors), sorted(spec.name for spec in specs))
        for spec in specs:
            tensor = tensors[spec.name]
            _require(file, f"type of {spec.name}", DTYPES.get(tensor.dtype.name), spec.dtype)
            _require(file, f"shape of {spec.name}", tuple(tensor.shape), _open_shape(spec))
    caches = [spec.name for spec in filter(is_cache, graph.inputs)]
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    updates = [layer for layer in layers if layer.type == module.LayerType.KV_CACHE_UPDATE]
    pairs = [(update.get_input(0).name, update.get_output(0).name) for update in updates]
    _require(file, "updates in place", sorted(pairs), sorted((c, written_name(c)) for c in caches))
    is_in = [update.get_input(0).is_network_input for update in updates]
    is_out = [update.get_output(0).is_network_output for update in updates]
    _require(file, "updates of the network's own tensors", all(is_in + is_out), True)
    _require(file, "attentions", 2 * len(_attentions(module, network)), len(caches))
    scatters = [layer.name for layer in layers if layer.type == module.LayerType.SCATTER]
    _require(file, "copies of a cache", scatters, [])


def _require(file: str, what: str, got: Any, expected: Any) -> None:
    """Raises UserError if TensorRT parsed something else than expected."""
    if got != expected:
        raise UserError(f"{file} as TensorRT parsed it: {what}: got {got}, expected {expected}")


def _open_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Returns the shape as TensorRT writes it, with -1 for free axes."""
    return tuple(-1 if isinstance(axis, str) else axis for axis in spec.shape)


def _attentions(module: Any, network: Any) -> list[Any]:
    """Returns the network's attentions, found by the layer at the end of each."""
    layers = (network.get_layer(i) for i in range(network.num_layers))
    borders = [layer for layer in layers if layer.type == module.LayerType.ATTENTION_OUTPUT]
    for border in borders:
        border.__class__ = module.IAttentionOutputLayer  # this is how these bindings cast
    return [border.attention for border in borders]


# ------------------------------------------------------------------------------- this machine


def _gpu_here() -> list[str]:
    """Returns the compute capability of the GPU here, or nothing without one."""
    try:
        return [open_cuda().compute_capability]
    except ValueError:
        return []


def _known(trt: TensorRT) -> list[str]:
    """Returns the compute capabilities that this TensorRT can build for, ascending."""
    names = (
        re.fullmatch(r"SM(\d+)(\d)", name) for name in trt.module.ComputeCapability.__members__
    )
    numbers = sorted((int(found[1]), int(found[2])) for found in names if found)
    return [f"{major}.{minor}" for major, minor in numbers]
