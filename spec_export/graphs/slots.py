"""Rewrites a traced graph (contiguous form) into the slots form that ONNX Runtime runs.

In each layer {Gather, Concat, Gather, TensorScatter} ×2 + Attention becomes one of three, see
`to_slots`. No KV row is ever moved. Two more changes make a step cheaper: activations stay
[1, N, D], so that no reshape stands between layers, and Add + RMSNormalization become one node. The
patterns looked for are those that a trace of model/decoder.py leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir

from spec_export.graphs.edit import (
    MASKED,
    MS,
    GraphEditor,
    fixed_size,
    input_at,
    producer,
    remove_dead,
)
from spec_export.model.config import POSITIONS
from spec_runtime.bundle.manifest import is_feature


def to_slots(model: ir.Model, attention: str = "bias", by_value: bool = False) -> ir.Model:
    """Rewrites `model` in place from the contiguous to the slots form and returns it.

    The inputs write_index, src and perm go; `slots` i64[N] comes, with "bias" `seqlens_k` i32[1],
    and where layers have sliding windows the cache `kv.positions`, see `_windows_by_position`.
    `attention` is one of manifest.ATTENTIONS:

    - bias: ScatterND ×2 into the slots, then com.microsoft.GroupQueryAttention in borrow mode:
      empty key and value, the cache as past, no present outputs, causal=0, the tree mask as
      attention_bias, only rows up to `seqlens_k` read.
    - append: GroupQueryAttention as in "bias", which also cuts q, k and v from their product,
      rotates them and writes the new rows behind all others: they have to be the last N of the rows
      up to `seqlens_k`. What it cannot take in is done before it. A mask is wider than N unless the
      N rows are the first.
    - full_buffer: ScatterND ×2, then the standard Attention-24 over the whole buffers with the
      boolean mask; no seqlens_k. Its cost grows with the length of the buffers, all of whose values
      have to be finite. On CUDA its memory-efficient kernel, which half precision takes and float32
      if there are as many key/value heads as query heads, first copies all key/value rows once per
      query head where these are more; the provider option sdpa_kernel=16 (unfused only, ONNX
      Runtime's AttentionBackend::MATH) keeps it off for one session, and backends/session.py sets
      it for such a graph.

    `by_value` gives ScatterND an index for each value in place of each row: CUDA's copies what an
    index stands for with one thread, value after value. On a CPU an index a row is quicker.
    """
    graph, edit = model.graph, GraphEditor(model, "slots")
    model.opset_imports[MS] = 1
    inputs = {value.name: value for value in graph.inputs}
    shared = _SharedValues(edit, inputs["mask"], by_value)
    for node in [node for node in graph if node.op_type == "Attention"]:
        _rewrite_attention(edit, node, attention, shared)
    for node in [node for node in graph if node.op_type == "TensorScatter"]:
        if node.outputs[0].is_graph_output():  # no attention's
            _rewrite_other_write(edit, node, shared)
    _windows_by_position(edit, shared, inputs["position_ids"])
    _keep_rank_three(edit)
    _fuse_norms(edit)
    for name in ("write_index", "src", "perm"):
        graph.inputs.remove(inputs[name])
    remove_dead(graph)
    for value in (shared.slots, shared.seqlens):
        if not value.uses():
            graph.inputs.remove(value)
    graph.sort()
    return model


def has_sinks(graph: ir.Graph) -> bool:
    """Says whether attention in a traced graph has sinks, see `Attention._with_sinks`."""
    masks = [input_at(node, 3).producer() for node in graph if node.op_type == "Attention"]
    return any(node is not None and node.op_type == "Concat" for node in masks)


class _SharedValues:
    """Makes the values that several layers read, each once, before `first`, the graph's first node,
    and the inputs `slots` and `seqlens_k`.

    Layers may have masks of their own; each has its bias.
    """

    def __init__(self, edit: GraphEditor, mask: ir.Value, by_value: bool) -> None:
        """mask: the graph's input bool[1, 1, N, S]. by_value: see `to_slots`."""
        self.edit, self.by_value, self.first = edit, by_value, next(iter(edit.graph))
        self.slots = edit.add_input("slots", ir.DataType.INT64, ["N"])
        self.seqlens = edit.add_input("seqlens_k", ir.DataType.INT32, [1])  # the last slot in use
        (width,) = edit.add(self.first, "Shape", [mask], start=3, end=4)
        (self.width,) = edit.add(self.first, "Cast", [width], to=ir.DataType.INT32.value)
        self._made: dict[tuple[Any, ...], ir.Value] = {}

    def bias(self, mask: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Returns a mask bool[1, 1, N, S] as numbers that are added to scores."""
        if ("bias", mask) not in self._made:
            edit, kind = self.edit, dtype.numpy()
            zero = edit.constant(np.zeros(1, dtype=kind), "zero")
            masked = edit.constant(np.array([MASKED[dtype]], dtype=kind))
            (self._made["bias", mask],) = edit.add(self.first, "Where", [mask, zero, masked])
        return self._made["bias", mask]

    def seen(self, cache: ir.Value) -> ir.Value:
        """Returns the rows of a cache [1, G, S, Dh] that masks have columns for: a step's mask may
        be narrower than the cache."""
        if ("seen", cache) not in self._made:
            start, axis = (self.edit.constant(np.array([n], np.int32)) for n in (0, 2))
            cut = [cache, start, self.width, axis]
            (self._made["seen", cache],) = self.edit.add(self.first, "Slice", cut)
        return self._made["seen", cache]

    def write(self, before: ir.Node, past: ir.Value, new: ir.Value) -> ir.Value:
        """Inserts the write of new rows [1, N, G·Dh] into their slots of a cache [1, G, S, Dh];
        returns the cache after it."""
        sizes = self.edit.constant(np.array([1, -1, fixed_size(past, 1), fixed_size(past, 3)]))
        (rows,) = self.edit.add(before, "Reshape", [new, sizes])
        return self.edit.add(before, "ScatterND", [past, self.indices(past), rows])[0]

    def indices(self, cache: ir.Value) -> ir.Value:
        """Returns where new rows of a cache [1, G, S, Dh] go, for ScatterND, i64[1, N, G, 3], or
        by value i64[1, N, G, Dh, 4].

        Value d of row n of head g goes to (0, g, slots[n], d).
        """
        sizes = (fixed_size(cache, 1), fixed_size(cache, 3))[: 1 + self.by_value]
        if ("indices", sizes) not in self._made:
            shape, order = (1, 1, *sizes), (0, 2, 1, 3)[: 2 + len(sizes)]
            made = self.edit.places(self.first, self.slots, shape, order, axis=1)
            self._made["indices", sizes] = made
        return self._made["indices", sizes]


class _LayerValues(NamedTuple):
    """Holds what one layer's attention reads.

    node: the traced Attention. rows: query, key and value as traced, [1, heads, N, Dh], of which
    `flat` makes [1, N, heads·Dh]. past: the caches before the step, [1, G, S, Dh] each. mask
    bool[1, 1, N, S]. sinks [1, H, 1, 1], of a layer that has them.
    """

    edit: GraphEditor
    shared: _SharedValues
    node: ir.Node
    rows: list[ir.Value]
    flat: _Flat
    past: list[ir.Value]
    mask: ir.Value
    num_heads: int
    sinks: ir.Value | None

    @property
    def attributes(self) -> dict[str, Any]:
        """Those of the node's attributes that change its scores."""
        known = {name: self.node.attributes.get(name) for name in ("scale", "softcap")}
        return {
            name: value.as_float()
            for name, value in known.items()
            if value is not None and value.as_float()
        }

    def written(self) -> tuple[ir.Value, list[ir.Value]]:
        """Inserts the writes of the new rows; returns the query [1, N, H·Dh] and the caches."""
        query, *new = map(self.flat.value, self.rows)
        pairs = zip(self.past, new, strict=True)
        return query, [self.shared.write(self.node, past, rows) for past, rows in pairs]

    def packed(self) -> tuple[list[ir.Value | None], ir.Node | None]:
        """Returns query, key and value [1, N, heads·Dh], or their product and twice None, and the
        rotation that is left to do, if it is one that GroupQueryAttention has."""
        (q, k, v), rotary = self.rows, None
        before = _whole(q, k)  # the rotation
        node = None if before is None else before.producer()
        if node is not None and node.op_type == "RotaryEmbedding":
            width, Dh = fixed_size(input_at(node, 1), 1), fixed_size(self.past[0], 3)
            if width % 8 == 0 and Dh % 16 == 0:
                before, rotary = input_at(node, 0), node
                node = before.producer()
        if before is not None and (product := _whole(before, v)) is not None:
            return [self.flat.value(product), None, None], rotary
        if rotary is not None and node is not None and node.op_type == "Concat":  # of normed ones
            q, k = (input_at(node, i) for i in range(2))
            return [*map(self.flat.value, (q, k, v))], rotary
        return [*map(self.flat.value, self.rows)], None


def _whole(*parts: ir.Value) -> ir.Value | None:
    """Returns what is split into just these parts, if anything is."""
    node = parts[0].producer()
    is_split = node is not None and node.op_type == "Split" and list(node.outputs) == list(parts)
    return node.inputs[0] if node is not None and is_split else None


def _attend_with_bias(layer: _LayerValues) -> list[ir.Value]:
    """Inserts the attention "bias"."""
    query, caches = layer.written()
    cache = layer.past[0]
    assert cache.dtype is not None
    rows = np.zeros((1, 0, fixed_size(cache, 1) * fixed_size(cache, 3)), cache.dtype.numpy())
    empty = layer.edit.constant(rows, "empty")
    return [*_attend_queries(layer, [query, empty, empty, *caches]), *caches]


def _attend_and_append(layer: _LayerValues) -> list[ir.Value]:
    """Inserts the attention "append"."""
    rows, rotary = layer.packed()
    return _attend_queries(layer, [*rows, *layer.past], 3, rotary)


def _attend_queries(
    layer: _LayerValues,
    inputs: list[ir.Value | None],
    num_outputs: int = 1,
    rotary: ir.Node | None = None,
) -> list[ir.Value]:
    """Inserts a GroupQueryAttention whose first inputs are given; returns its outputs."""
    edit, shared, cache = layer.edit, layer.shared, layer.past[0]
    assert cache.dtype is not None
    inputs = [*inputs, shared.seqlens, shared.width]
    inputs += [None] * 3 if rotary is None else rotary.inputs[1:4]
    inputs += [shared.bias(layer.mask, cache.dtype)]
    attributes = layer.attributes
    if rotary is not None:
        interleaved = rotary.attributes.get("interleaved", ir.AttrInt64("interleaved", 0))
        attributes |= {"do_rotary": 1, "rotary_interleaved": interleaved.as_int()}
    if layer.sinks is not None:
        inputs += edit.add(layer.node, "Reshape", [layer.sinks, edit.constant(np.array([-1]))])
    return edit.add(
        layer.node,
        "GroupQueryAttention",
        inputs,
        num_outputs,
        domain=MS,
        num_heads=layer.num_heads,
        kv_num_heads=fixed_size(cache, 1),
        causal=0,
        **attributes,
    )


def _attend_whole_buffers(layer: _LayerValues) -> list[ir.Value]:
    """Inserts the attention "full_buffer"."""
    edit, node, (query, caches) = layer.edit, layer.node, layer.written()
    H, Dh = layer.num_heads, fixed_size(layer.past[0], 3)
    (q,) = edit.add(node, "Reshape", [query, edit.constant(np.array([1, -1, H, Dh]))])
    (q,) = edit.add(node, "Transpose", [q], perm=[0, 2, 1, 3])
    keys_values, mask = caches, layer.mask
    if layer.sinks is not None:  # one slot of zeros more, which the traced mask has the score of
        zeros = input_at(producer(node.inputs[1], "Concat"), 1)
        keys_values = [edit.add(node, "Concat", [c, zeros], axis=2)[0] for c in caches]
        mask = input_at(node, 3)
    (mixed,) = edit.add(node, "Attention", [q, *keys_values, mask], **layer.attributes)
    (mixed,) = edit.add(node, "Transpose", [mixed], perm=[0, 2, 1, 3])
    mixed_rows = edit.add(node, "Reshape", [mixed, edit.constant(np.array([1, -1, H * Dh]))])
    return [*mixed_rows, *caches]


# By attention: inserts one; returns the mixed rows [1, N, H·Dh] and the caches after the step.
ATTEND = {
    **{"bias": _attend_with_bias, "full_buffer": _attend_whole_buffers},
    "append": _attend_and_append,
}


def _rewrite_attention(
    edit: GraphEditor, attention: ir.Node, kind: str, shared: _SharedValues
) -> None:
    """Replaces one layer's attention by the given kind."""
    read, mask, sinks = attention.inputs[1:3], input_at(attention, 3), None
    joined = mask.producer()
    if joined is not None and joined.op_type == "Concat":  # see `Attention._with_sinks`
        read = [input_at(producer(value, "Concat"), 0) for value in read]
        added, score = (producer(value, "Expand") for value in joined.inputs)
        mask = input_at(producer(added.inputs[0], "Where"), 0)
        sinks = input_at(score, 0)
    scatters = [producer(value, "TensorScatter") for value in read]
    past = [input_at(scatter, 0) for scatter in scatters]
    rows = [input_at(attention, 0), *map(_new_rows, scatters)]
    flat = _Flat(edit, attention, fixed_size(past[0], 3))
    H = fixed_size(rows[0], 1)
    layer = _LayerValues(edit, shared, attention, rows, flat, past, mask, H, sinks)
    mixed, *caches = ATTEND[kind](layer)
    for scatter, cache in zip(scatters, caches, strict=True):
        edit.replace(scatter.outputs[0], cache)
    (transpose,) = (use.node for use in attention.outputs[0].uses())
    (reshape,) = (use.node for use in transpose.outputs[0].uses())
    assert (transpose.op_type, reshape.op_type) == ("Transpose", "Reshape"), (transpose, reshape)
    edit.replace(reshape.outputs[0], mixed)


def _rewrite_other_write(edit: GraphEditor, scatter: ir.Node, shared: _SharedValues) -> None:
    """Replaces the write of a cache [1, 1, S, W] of model/modules/convolution.py."""
    past = input_at(scatter, 0)
    cache = shared.write(scatter, past, _new_rows(scatter))
    edit.replace(scatter.outputs[0], cache)
    if past.name == POSITIONS:
        for node, index in list(cache.uses()):
            node.replace_input_with(index, shared.seen(cache))


def _new_rows(scatter: ir.Node) -> ir.Value:
    """Returns the rows [1, G, N, Dh] that a step appends to a cache: see `write_rows`."""
    joined = producer(producer(scatter.inputs[1], "Gather").inputs[0], "Concat")
    return input_at(joined, 1)


def _windows_by_position(edit: GraphEditor, shared: _SharedValues, position_ids: ir.Value) -> None:
    """Has sliding windows compare positions where the trace counts keys (see `window_mask` and
    `key_positions`): slots are in no order.

    The position of each slot's row is kept as keys and values are, in the cache `kv.positions`
    i64[1, 1, S, 1], which models with convolutions have anyway.
    """
    graph, first = edit.graph, shared.first
    counts = [node for node in graph if node.op_type == "CumSum"]
    if not counts:
        return
    kept = next((value for value in graph.outputs if value.name == f"{POSITIONS}.out"), None)
    if kept is None:
        past = edit.add_input(POSITIONS, ir.DataType.INT64, [1, 1, "S", 1])
        kept = shared.write(first, past, position_ids)
        kept.name, kept.shape, kept.type = f"{POSITIONS}.out", past.shape, past.type
        graph.outputs.append(kept)
    of_slots, of_rows = (
        edit.add(first, "Reshape", [value, edit.constant(np.array(shape))])[0]
        for value, shape in ((shared.seen(kept), [1, 1, 1, -1]), (position_ids, [1, 1, -1, 1]))
    )
    for count in counts:
        for use in list(count.outputs[0].uses()):
            if use.node.op_type == "Slice":  # the number of keys that each row sees
                edit.replace(use.node.outputs[0], of_rows)
            elif use.node.op_type == "Sub" and use.idx == 0:  # see `key_positions`
                edit.replace(use.node.outputs[0], of_slots)
            else:
                use.node.replace_input_with(use.idx, of_slots)


class _Flat:
    """Makes values of the trace, which holds heads as [1, heads, N, Dh], anew with the heads side
    by side, [1, N, heads·Dh].

    It walks back from a value to the product that the heads were cut from, node by node; each node
    is made once.
    """

    def __init__(self, edit: GraphEditor, before: ir.Node, Dh: int) -> None:
        """New nodes stand before `before`. Dh: the width of a head."""
        self.edit, self.before, self.Dh = edit, before, Dh
        self._made: dict[ir.Value, ir.Value] = {}

    def value(self, value: ir.Value) -> ir.Value:
        """Returns the value [1, heads, N, Dh] of the trace as [1, N, heads·Dh]."""
        if value not in self._made:
            node = value.producer()
            assert node is not None, value
            made = self._MAKE[node.op_type](self, node)
            self._made.update(zip(node.outputs, made, strict=True))
        return self._made[value]

    def _split(self, node: ir.Node) -> list[ir.Value]:
        whole = self.value(input_at(node, 0))
        sizes = np.array([fixed_size(part, 1) * self.Dh for part in node.outputs])
        inputs = [whole, self.edit.constant(sizes)]
        return self.edit.add(self.before, "Split", inputs, len(sizes), axis=-1)

    def _concat(self, node: ir.Node) -> list[ir.Value]:
        parts = [self.value(input_at(node, i)) for i in range(len(node.inputs))]
        return self.edit.add(self.before, "Concat", parts, axis=-1)

    def _cut(self, node: ir.Node) -> list[ir.Value]:
        """Takes back the Reshape and the Transpose that cut heads from a product."""
        return [input_at(producer(node.inputs[0], "Reshape"), 0)]

    def _rotary(self, node: ir.Node) -> list[ir.Value]:
        x, heads = input_at(node, 0), fixed_size(input_at(node, 0), 1)
        inputs = [self.value(x), *node.inputs[1:]]
        kept: dict[str, Any] = {"rotary_embedding_dim": 0}  # the whole head
        kept |= {name: value.as_int() for name, value in node.attributes.items()}
        return self.edit.add(self.before, "RotaryEmbedding", inputs, **kept | {"num_heads": heads})

    def _norm(self, node: ir.Node) -> list[ir.Value]:
        """Makes a norm over each head."""
        edit, heads = self.edit, fixed_size(input_at(node, 0), 1)
        epsilon = node.attributes["epsilon"].as_float()
        cut = edit.constant(np.array([1, -1, heads, self.Dh]))
        (x,) = edit.add(self.before, "Reshape", [self.value(input_at(node, 0)), cut])
        (x,) = edit.add(self.before, node.op_type, [x, *node.inputs[1:]], axis=-1, epsilon=epsilon)
        joined = edit.constant(np.array([1, -1, heads * self.Dh]))
        return edit.add(self.before, "Reshape", [x, joined])

    def _scale(self, node: ir.Node) -> list[ir.Value]:
        """Makes a product with a factor [1, 1, N, 1] for each row."""
        shape = self.edit.constant(np.array([1, -1, 1]))
        (factor,) = self.edit.add(self.before, "Reshape", [node.inputs[1], shape])
        return self.edit.add(self.before, "Mul", [self.value(input_at(node, 0)), factor])

    _MAKE: ClassVar[dict[str, Callable[[_Flat, ir.Node], list[ir.Value]]]] = {
        "Split": _split,
        "Concat": _concat,
        "Mul": _scale,
        "Transpose": _cut,
        "RotaryEmbedding": _rotary,
        "RMSNormalization": _norm,
        "LayerNormalization": _norm,
    }


def _keep_rank_three(edit: GraphEditor) -> None:
    """Keeps activations [1, N, D] from the embedding to the outputs.

    The Reshape that flattens the token ids goes, and outputs are squeezed to [N, D] at the end.
    """
    graph = edit.graph
    ids = next(value for value in graph.inputs if value.name == "input_ids")
    for use in list(ids.uses()):
        if use.node.op_type == "Reshape":
            edit.replace(use.node.outputs[0], ids)
            ids.name, ids.shape = "input_ids", ir.Shape([1, "N"])
    for node in graph:
        if node.op_type == "Split" and node.attributes["axis"].as_int() == 1:
            node.attributes["axis"] = ir.AttrInt64("axis", -1)
        picks_rows = (
            node.op_type == "Gather"
            and node.inputs[1] is not None
            and node.inputs[1].name == "logit_rows"
        )
        if picks_rows and node.attributes["axis"].as_int() == 0:
            # The rows asked for lose the batch axis: [1, N, D] -> [N, D] -> [M, D].
            (flat,) = edit.add(node, "Squeeze", [node.inputs[0], edit.constant(np.array([0]))])
            node.replace_input_with(0, flat)
    for i, output in enumerate(graph.outputs):
        if is_feature(str(output.name)):
            node = ir.node("Squeeze", [output, edit.constant(np.array([0]))], num_outputs=1)
            graph.append(node)
            flat = node.outputs[0]
            flat.shape, flat.type = output.shape, output.type
            name = output.name
            output.name, flat.name = edit.name(f"{name}.batch"), name
            graph.outputs[i] = flat
    for node in [node for node in graph if node.op_type == "MoE"]:
        # The router's logits lose the batch axis too; experts take rows [1, N, D] as they are.
        logits = input_at(node, 1)
        uses = list(logits.uses())
        (flat,) = edit.add(uses[0].node, "Squeeze", [logits, edit.constant(np.array([0]))])
        for use in uses:
            use.node.replace_input_with(use.idx, flat)
    for value in [v for node in graph for v in node.outputs]:
        if value not in graph.outputs:
            value.shape = None  # the ranks have changed; ONNX Runtime infers them anew


def _fuse_norms(edit: GraphEditor) -> None:
    """Replaces Add and the RMSNormalization after it by one SkipSimplifiedLayerNormalization.

    The fourth output of that node is the sum.
    """
    for norm in [node for node in edit.graph if node.op_type == "RMSNormalization"]:
        x, gamma = input_at(norm, 0), input_at(norm, 1)
        add = x.producer()
        if (
            add is None
            or add.op_type != "Add"
            or any(v is None or v.is_initializer() for v in add.inputs)
        ):
            continue
        epsilon = norm.attributes["epsilon"].as_float()
        outputs = edit.add(
            norm, "SkipSimplifiedLayerNormalization", [*add.inputs, gamma], 4, MS, epsilon=epsilon
        )
        for unused in outputs[1:3]:
            unused.name = ""
        edit.replace(norm.outputs[0], outputs[0])
        edit.replace(x, outputs[3])
