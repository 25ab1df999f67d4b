"""Makes of a graph with a cache, a target's or a drafter's, one that runs several conversations in
one pass.

Each conversation has a lane: key/value caches, banks and a mask of its own. All products run once,
over the rows of all lanes together.
"""

import onnx_ir as ir

from spec_export.graphs.edit import GraphEditor, input_at, remove_dead
from spec_runtime.backends.shapes import KV
from spec_runtime.bundle.manifest import BANK, LANE_LOGITS, LANE_ROWS, lane_name

# Inputs that each lane has for itself, in addition to its caches.
OWN = ("mask", "slots", "seqlens_k", "write_index", "src", "perm")
# Operators at which rows of all lanes meet what a lane has for itself: the inputs that hold rows,
# and the axis along which these lie, in the inputs and in an attention's output; in a bank's, the
# first.
MEETINGS: dict[str, tuple[tuple[int, ...], int]] = {
    **{"ScatterND": ((2,), 1), "GroupQueryAttention": ((0, 1, 2), 1), "Attention": ((0,), 2)},
    "Concat": ((1,), 2),  # new rows of a cache behind those that move, in the contiguous form
}
ATTENTIONS = ("GroupQueryAttention", "Attention")


def to_lanes(model: ir.Model, num_lanes: int) -> ir.Model | None:
    """Rewrites a graph with a cache for `num_lanes` lanes, in place, and returns it.

    Inputs and outputs that hold rows, such as `input_ids` i64[1, N] and `logits` f32[M, V], take
    the rows of the lanes one after another; the new input `lane_rows` i64[num_lanes] says how many
    rows each lane has, at least one. The others there are once a lane, named by `lane_name`:
    caches and banks, `mask` bool[1, 1, N, S], `slots` i64[N], `seqlens_k` i32[1], and
    `position_ids` i64[1, N] where attention reads it, with the lane's own N and S. In the
    contiguous form `write_index`, `src` and `perm` are once a lane, too.

    What is computed of a lane's own values, up to its attention, is computed for each lane;
    everything else is shared. So is what a drafter computes of all its candidates, for outputs
    without rows such as `pair_log_probs` f32[K - 1, C, C], which there are once a lane; the new
    input `lane_logits` i64[num_lanes] then says how many of `logit_rows` are each lane's. Returns
    None for a graph where lanes and rows meet in other ways.
    """
    return model if _Lanes(model, num_lanes).rewrite() else None


class _Lanes:
    """Rewrites one graph; see `to_lanes`."""

    def __init__(self, model: ir.Model, num_lanes: int) -> None:
        self.graph, self.edit = model.graph, GraphEditor(model, "lanes")
        self.lanes = range(num_lanes)
        self._inputs = [v for v in self.graph.inputs if v.name in OWN or _is_cache(v)]
        self.sizes = self.edit.add_input(LANE_ROWS, ir.DataType.INT64, [num_lanes])
        self.positions = next(v for v in self.graph.inputs if v.name == "position_ids")
        self._own: dict[ir.Value, list[ir.Value]] = {}  # the lanes' values in place of one
        self._parts: dict[ir.Value, list[ir.Value]] = {}  # of rows, by lane
        self._followed: dict[ir.Value, list[ir.Value]] = {}  # what follows from positions, by lane
        self._with_rows: set[ir.Value] = set()  # values that depend on the rows of a step
        for value in self.graph.inputs:
            if value.name != LANE_ROWS and value not in self._inputs:
                self._with_rows.add(value)
        for node in self.graph:
            if any(value in self._with_rows for value in node.inputs if value is not None):
                self._with_rows.update(node.outputs)

    def rewrite(self) -> bool:
        """Rewrites the graph; returns False if it cannot be."""
        if not self._copy_tails():
            return False
        for value in self._inputs:
            self._own[value] = self._inputs_of_lanes(value)
        for node in list(self.graph):
            is_own = any(value in self._own for value in node.inputs if value is not None)
            if is_own and not self._copy(node):
                return False
        for i, output in reversed(list(enumerate(self.graph.outputs))):
            if output in self._own:
                del self.graph.outputs[i]
                for k in self.lanes:
                    value = self._own[output][k]
                    value.name, value.shape = lane_name(str(output.name), k), output.shape
                    value.type = output.type
                    self.graph.outputs.append(value)
        remove_dead(self.graph)
        assert not any(value.uses() for value in self._inputs), self._inputs
        for value in (*self._inputs, self.positions):
            if not value.uses():
                self.graph.inputs.remove(value)
        self.graph.sort()
        return True

    def _copy_tails(self) -> bool:
        """Makes what leads from the candidates to outputs without rows once a lane; returns False
        if such an output follows from anything else."""
        tails = [v for v in self.graph.outputs if not _is_cache(v) and not _has_rows(v)]
        wanted, nodes, cuts = list(tails), set[ir.Node](), dict[ir.Value, None]()
        while wanted:
            value = wanted.pop()
            node = value.producer()
            if node is None:  # a feed
                return False
            if node.op_type == "TopK" and any(
                v.is_graph_output() and _has_rows(v) for v in node.outputs
            ):
                cuts[value] = None
            elif node not in nodes:
                nodes.add(node)
                wanted += [v for v in node.inputs if v in self._with_rows]
        if not tails:
            return True
        sizes = self.edit.add_input(LANE_LOGITS, ir.DataType.INT64, [len(self.lanes)])
        found: dict[ir.Value, list[ir.Value]] = {}
        for node in [each for each in self.graph if each in nodes]:
            for cut in [v for v in node.inputs if v in cuts and v not in found]:
                found[cut] = self.edit.add(node, "Split", [cut, sizes], len(self.lanes), axis=0)
            copies = [
                self._clone(node, [found[v][k] if v in found else v for v in node.inputs], node)
                for k in self.lanes
            ]
            for i, output in enumerate(node.outputs):
                found[output] = [copy[i] for copy in copies]
        self._own |= {value: found[value] for value in tails}
        return True

    def _inputs_of_lanes(self, value: ir.Value) -> list[ir.Value]:
        """Adds an input of each lane in place of an input of all."""
        assert value.dtype is not None, value
        assert value.shape is not None, value
        return [
            self.edit.add_input(
                lane_name(str(value.name), k),
                value.dtype,
                [
                    size
                    if isinstance(size, int) or _is_cache(value)
                    else lane_name(str(size.value), k)
                    for size in value.shape
                ],
            )
            for k in self.lanes
        ]

    def _copy(self, node: ir.Node) -> bool:
        """Makes the node once a lane; returns False if that cannot be."""
        meetings, axis = MEETINGS.get(node.op_type, ((), 0))
        if str(input_at(node, 0).name).startswith(BANK):
            axis = 0
        copies = []
        for k in self.lanes:
            inputs: list[ir.Value | None] = []
            for i, value in enumerate(node.inputs):
                if value is None or value in self._own or value not in self._with_rows:
                    inputs.append(self._own[value][k] if value in self._own else value)
                elif i in meetings:
                    inputs.append(self._rows(node, value, axis)[k])
                elif self._follow_positions(value):
                    inputs.append(self._followed[value][k])
                else:
                    return False
            copies.append(self._clone(node, inputs, before=node))
        if node.op_type in ATTENTIONS:
            (joined,) = self.edit.add(node, "Concat", [copy[0] for copy in copies], axis=axis)
            self.edit.replace(node.outputs[0], joined)
            self._with_rows.add(joined)
        for i, output in enumerate(node.outputs):
            if i or node.op_type not in ATTENTIONS:
                self._own[output] = [copy[i] for copy in copies]
        return True

    def _clone(
        self, node: ir.Node, inputs: list[ir.Value | None], before: ir.Node
    ) -> list[ir.Value]:
        copy = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            list(node.attributes.values()),
            num_outputs=len(node.outputs),
        )
        for output in copy.outputs:
            output.name = self.edit.name(node.op_type.lower())
        self.graph.insert_before(before, copy)
        return list(copy.outputs)

    def _rows(self, node: ir.Node, rows: ir.Value, axis: int) -> list[ir.Value]:
        """Returns the rows of each lane."""
        if rows not in self._parts:
            split = self.edit.add(node, "Split", [rows, self.sizes], len(self.lanes), axis=axis)
            self._parts[rows] = split
        return self._parts[rows]

    def _follow_positions(self, value: ir.Value) -> bool:
        """Makes a value that follows from `position_ids` alone once a lane; returns False if it
        follows from other rows."""
        if value in self._followed:
            return True
        node = value.producer()
        if node is None:
            if value is self.positions:
                self._followed[value] = self._inputs_of_lanes(value)
            return value is self.positions
        read = [each for each in node.inputs if each in self._with_rows]
        if not all(each is not None and self._follow_positions(each) for each in read):
            return False
        copies = [
            self._clone(
                node,
                [self._followed[v][k] if v in self._followed else v for v in node.inputs],
                node,
            )
            for k in self.lanes
        ]
        for i, output in enumerate(node.outputs):
            self._followed[output] = [copy[i] for copy in copies]
        return True


def _has_rows(output: ir.Value) -> bool:
    """Says whether the first axis of an output is that of rows."""
    return output.shape is not None and not isinstance(output.shape[0], int)


def _is_cache(value: ir.Value) -> bool:
    return str(value.name).startswith((KV, BANK))
