"""Rewrites traced graphs as a build asks for them and writes them to the bundle's folder."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import onnx_ir as ir

from spec_export.build.options import BuildOptions
from spec_export.graphs import tensorrt, trace
from spec_export.graphs.half import narrow
from spec_export.graphs.lanes import to_lanes
from spec_export.graphs.quantize import quantize, tables_of
from spec_export.graphs.rounding import Rounding
from spec_export.graphs.slots import has_sinks, to_slots
from spec_runtime.bundle.manifest import Graph, TensorSpec, lanes_name

TARGET = "target/target.onnx"


class GraphWriter:
    """Writes the graphs of one build into one folder, each in the form that the options ask for.

    capacity: how many slots its caches have. rounding: what quantising has changed in the target's
    layers.
    """

    def __init__(self, options: BuildOptions, folder: Path, capacity: int) -> None:
        self.options, self.folder, self.capacity = options, folder, capacity
        self.rounding, self.attention = Rounding(), options.attention

    def write(
        self,
        model: ir.Model,
        file: str,
        *,
        add_banks: Callable[[ir.Model], ir.Model] | None = None,
        lender: Graph | None = None,
        precision: str | None = None,
    ) -> Graph:
        """Rewrites a traced graph in place, saves it as `file`, and returns its manifest entry.

        The steps are: narrow the types, bring it into the form of its cache, add banks, adapt it to
        TensorRT, and quantise; each only where the options ask for it.

        add_banks: the rewrite that keeps features and states on the device.
        lender: a graph already written, whose weights this one shares instead of storing its own.
        precision: of a drafter's weights, if not the target's, see `BuildOptions.precision_of`.
        """
        options = self.options
        precision = precision or options.target_precision
        has_cache = any(value.name == "position_ids" for value in model.graph.inputs)
        if options.device == "cuda":
            narrow(model, precision)
        if has_cache and options.graph_form == "slots":
            if options.device == "cuda" and has_sinks(model.graph):
                # CUDA's GroupQueryAttention takes no sinks beside a bias. The target comes first,
                # so that all graphs of the bundle are alike.
                self.attention = "full_buffer"
            to_slots(model, self.attention, by_value=options.device == "cuda")
        if add_banks is not None and options.has_banks:
            add_banks(model)
        if options.backend == "tensorrt":
            tensorrt.adapt(model, precision, self.capacity)
        # Beside a target of another precision an int8 drafter is accepted more often so.
        reduce_range = precision != options.target_precision
        rounding = self.rounding if file == TARGET else None
        shared = () if lender is None else tables_of(self.folder / lender.file)
        quantize(model, precision, reduce_range, rounding, options.int4_block, shared)
        form = options.graph_form if has_cache else "stateless"
        lenders = () if lender is None else (lender,)
        graph = save_graph(model, form, self.folder, file, lenders)
        return replace(graph, attention=self.attention) if has_cache else graph

    def write_lanes(self, graph: Graph, name: str = "target") -> dict[str, Graph]:
        """Derives the graphs for several lanes from a graph with a cache, and saves them in its
        folder without weights of their own. Returns them by their names in the manifest.

        There are none where the options ask for none, and where the graph cannot have them.
        """
        written: dict[str, Graph] = {}
        for num_lanes in self.options.lane_numbers:
            model = to_lanes(ir.load(self.folder / graph.file), num_lanes)
            if model is None:  # the number changes nothing in that
                break
            own = lanes_name(num_lanes, name)
            file = (PurePosixPath(graph.file).parent / f"{own}.onnx").as_posix()
            lanes = save_graph(model, "slots", self.folder, file, (graph,))
            written[own] = replace(lanes, attention=graph.attention)
        return written


def save_graph(
    model: ir.Model, form: str, folder: Path, file: str, lenders: Sequence[Graph] = ()
) -> Graph:
    """Saves a graph as it is to `folder`/`file` and returns its manifest entry.

    lenders: graphs of the same folder whose weights are shared.
    """
    if lenders:
        trace.save_beside(model, folder / file, [folder / lender.file for lender in lenders])
    else:
        trace.save(model, folder / file)
    return Graph(file, form, _specs(model.graph.inputs), _specs(model.graph.outputs))


def _specs(values: Iterable[ir.Value]) -> tuple[TensorSpec, ...]:
    """Returns names, types and shapes of a graph's inputs or outputs, as the manifest has them."""
    return tuple(_spec(value) for value in values)


def _spec(value: ir.Value) -> TensorSpec:
    assert value.name is not None
    assert value.dtype is not None, value.name
    assert value.shape is not None, value.name
    sizes = (size if isinstance(size, int) else str(size.value) for size in value.shape)
    return TensorSpec(value.name, str(value.dtype.numpy()), tuple(sizes))
