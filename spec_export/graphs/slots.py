"""Rewrites a traced graph (contiguous form) into the slots form that ONNX Runtime runs.

In each layer {Gather, Concat, Gather, TensorScatter} ×2 + Attention becomes one of ATTENTIONS, see
`to_slots`. No KV row is ever moved. Two more changes make a step cheaper: activations stay
[1, N, D], so that no reshape stands between layers, and Add + RMSNormalization become one node. The
patterns looked for are those that a trace of decoder.py leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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
from spec_runtime.bundle.manifest import ATTENTIONS as ATTENTIONS
from spec_runtime.errors import UserError


def to_slots(model: ir.Model, attention: str = "bias") -> ir.Model:
    """Rewrites `model` in place from the contiguous to the slots form and returns it.

    The inputs write_index, src and perm go; `slots` i64[N] comes, and with "bias" `seqlens_k`
    i32[1]. `attention` is one of ATTENTIONS:

    - bias: ScatterND ×2 into the slots, then com.microsoft.GroupQueryAttention in borrow mode:
      empty key and value, the cache as past, no present outputs, causal=0, the tree mask as
      attention_bias, only rows up to `seqlens_k` read. On CUDA a bias takes its unfused kernels.
    - full_buffer: ScatterND ×2, then the standard Attention-24 over the whole buffers with the
      boolean mask; no seqlens_k. Its cost grows with the length of the buffers, all of whose values
      have to be finite. On CUDA its memory-efficient kernel, which half precision takes and float32
      if there are as many key/value heads as query heads, first copies all key/value rows once per
      query head where these are more; the provider option sdpa_kernel=16 (unfused only, ONNX
      Runtime's AttentionBackend::MATH) keeps it off for one session, and backends/session.py sets
      it for such a graph.

    Raises UserError for an unknown `attention`.
    """
    if attention not in ATTENTIONS:
        raise UserError(f"got attention {attention!r}, expected one of {', '.join(ATTENTIONS)}")
    graph, edit = model.graph, GraphEditor(model, "slots")
    model.opset_imports[MS] = 1
    inputs = {value.name: value for value in graph.inputs}
    slots = edit.add_input("slots", ir.DataType.INT64, ["N"])
    seqlens = edit.add_input("seqlens_k", ir.DataType.INT32, [1])
    nodes = [node for node in graph if node.op_type == "Attention"]
    first = next(iter(graph))
    cache = input_at(producer(nodes[0].inputs[1], "TensorScatter"), 0)
    shared = _shared_inputs(edit, first, inputs["mask"], slots, seqlens, cache)
    for node in nodes:
        _rewrite_attention(edit, node, attention, shared, inputs["position_ids"])
    _keep_rank_three(edit)
    _fuse_norms(edit)
    for name in ("write_index", "src", "perm"):
        graph.inputs.remove(inputs[name])
    remove_dead(graph)
    if not seqlens.uses():
        graph.inputs.remove(seqlens)
    graph.sort()
    return model


class _SharedValues(NamedTuple):
    """Holds the values that every layer may read.

    indices: where new rows go, for ScatterND, i64[1, N, G, 3]. mask bool[1, 1, N, S], and bias, the
    same to be added to scores. width: of the mask, i32[1]. seqlens: the last slot in use, i32[1].
    empty: a key without rows, [1, 0, G·Dh].
    """

    indices: ir.Value
    mask: ir.Value
    bias: ir.Value
    width: ir.Value
    seqlens: ir.Value
    empty: ir.Value


def _shared_inputs(
    edit: GraphEditor,
    first: ir.Node,
    mask: ir.Value,
    slots: ir.Value,
    seqlens: ir.Value,
    cache: ir.Value,
) -> _SharedValues:
    """Inserts the nodes that make the shared values before `first`, the graph's first node."""
    G, Dh = fixed_size(cache, 1), fixed_size(cache, 3)
    assert cache.dtype is not None
    dtype = cache.dtype.numpy()
    zero = edit.constant(np.zeros(1, dtype=dtype), "zero")
    (bias,) = edit.add(
        first, "Where", [mask, zero, edit.constant(np.array([MASKED[cache.dtype]], dtype=dtype))]
    )
    (width,) = edit.add(first, "Shape", [mask], start=3, end=4)
    (width,) = edit.add(first, "Cast", [width], to=ir.DataType.INT32.value)
    # Row n of head g goes to (0, g, slots[n]).
    (column,) = edit.add(first, "Reshape", [slots, edit.constant(np.array([1, -1, 1, 1]))])
    batch_and_head = np.zeros((1, 1, G, 3), dtype=np.int64)
    batch_and_head[..., 1] = np.arange(G)
    (spread,) = edit.add(
        first, "Mul", [column, edit.constant(np.array([0, 0, 1]).reshape(1, 1, 1, 3))]
    )
    (indices,) = edit.add(first, "Add", [spread, edit.constant(batch_and_head)])
    empty = edit.constant(np.zeros((1, 0, G * Dh), dtype=dtype), "empty")
    return _SharedValues(indices, mask, bias, width, seqlens, empty)


class _LayerValues(NamedTuple):
    """Holds what one layer's attention reads.

    node: the traced Attention. query [1, N, H·Dh]; new: key and value [1, N, G·Dh]. past: the
    caches before the step, [1, G, S, Dh] each.
    """

    node: ir.Node
    query: ir.Value
    new: tuple[ir.Value, ir.Value]
    past: tuple[ir.Value, ir.Value]
    num_heads: int

    @property
    def scale(self) -> dict[str, Any]:
        """The node's attribute `scale`, if it has one."""
        scale = self.node.attributes.get("scale")
        return {} if scale is None else {"scale": scale.as_float()}


def _write(edit: GraphEditor, layer: _LayerValues, shared: _SharedValues) -> list[ir.Value]:
    """Inserts the writes of the new rows into their slots; returns both caches after them."""
    rows = edit.constant(
        np.array([1, -1, fixed_size(layer.past[0], 1), fixed_size(layer.past[0], 3)])
    )
    caches = []
    for past, new in zip(layer.past, layer.new, strict=True):
        (row,) = edit.add(layer.node, "Reshape", [new, rows])
        caches += edit.add(layer.node, "ScatterND", [past, shared.indices, row])
    return caches


def _attend_with_bias(
    edit: GraphEditor, layer: _LayerValues, shared: _SharedValues
) -> list[ir.Value]:
    """Inserts the attention "bias"; returns the mixed rows [1, N, H·Dh] and both caches."""
    caches = _write(edit, layer, shared)
    inputs = [layer.query, shared.empty, shared.empty, *caches, shared.seqlens, shared.width]
    mixed = edit.add(
        layer.node,
        "GroupQueryAttention",
        [*inputs, None, None, None, shared.bias],
        domain=MS,
        num_heads=layer.num_heads,
        kv_num_heads=fixed_size(layer.past[0], 1),
        causal=0,
        **layer.scale,
    )
    return [*mixed, *caches]


def _attend_whole_buffers(
    edit: GraphEditor, layer: _LayerValues, shared: _SharedValues
) -> list[ir.Value]:
    """Inserts the attention "full_buffer"; returns the mixed rows [1, N, H·Dh] and both caches."""
    node, caches = layer.node, _write(edit, layer, shared)
    H, Dh = layer.num_heads, fixed_size(layer.past[0], 3)
    (q,) = edit.add(node, "Reshape", [layer.query, edit.constant(np.array([1, -1, H, Dh]))])
    (q,) = edit.add(node, "Transpose", [q], perm=[0, 2, 1, 3])
    (mixed,) = edit.add(node, "Attention", [q, *caches, shared.mask], **layer.scale)
    (mixed,) = edit.add(node, "Transpose", [mixed], perm=[0, 2, 1, 3])
    flat = edit.constant(np.array([1, -1, H * Dh]))
    return [*edit.add(node, "Reshape", [mixed, flat]), *caches]


ATTEND = {"bias": _attend_with_bias, "full_buffer": _attend_whole_buffers}


def _rewrite_attention(
    edit: GraphEditor,
    attention: ir.Node,
    kind: str,
    shared: _SharedValues,
    position_ids: ir.Value,
) -> None:
    """Replaces one layer's attention by the given kind.

    The trace holds heads as [1, heads, N, Dh]; here they stay side by side, [1, N, heads·Dh].
    """
    scatters = [producer(attention.inputs[i], "TensorScatter") for i in (1, 2)]
    G, Dh = fixed_size(input_at(scatters[0], 0), 1), fixed_size(input_at(scatters[0], 0), 3)
    split_qk = producer(attention.inputs[0], "Split")
    rotary = producer(split_qk.inputs[0], "RotaryEmbedding")
    H = fixed_size(input_at(rotary, 0), 1) - G
    cos, sin = rotary.inputs[1], rotary.inputs[2]
    source = input_at(rotary, 0).producer()
    assert source is not None
    if source.op_type == "Split":  # heads split as [q and k, v]
        heads = _flat_source(source)
        qk, v = edit.add(
            attention, "Split", [heads, edit.constant(np.array([(H + G) * Dh, G * Dh]))], 2, axis=-1
        )
    else:  # with q/k norms: heads split as [q, k, v], normed over Dh, then concatenated
        assert source.op_type == "Concat", source
        norms = [producer(value, "RMSNormalization") for value in source.inputs]
        heads = _flat_source(producer(norms[0].inputs[0], "Split"))
        sizes = edit.constant(np.array([H * Dh, G * Dh, G * Dh]))
        *parts, v = edit.add(attention, "Split", [heads, sizes], 3, axis=-1)
        qk = _head_norms(edit, attention, parts, norms, (H, G), Dh)
    width = rotary.attributes.get("rotary_embedding_dim")  # absent or 0 means the whole head
    (turned,) = edit.add(
        attention,
        "RotaryEmbedding",
        [qk, cos, sin, position_ids],
        num_heads=H + G,
        rotary_embedding_dim=0 if width is None else width.as_int(),
    )
    q, k = edit.add(
        attention, "Split", [turned, edit.constant(np.array([H * Dh, G * Dh]))], 2, axis=-1
    )
    past = input_at(scatters[0], 0), input_at(scatters[1], 0)
    mixed, *caches = ATTEND[kind](edit, _LayerValues(attention, q, (k, v), past, H), shared)
    for scatter, cache in zip(scatters, caches, strict=True):
        edit.replace(scatter.outputs[0], cache)
    (transpose,) = (use.node for use in attention.outputs[0].uses())
    (reshape,) = (use.node for use in transpose.outputs[0].uses())
    assert (transpose.op_type, reshape.op_type) == ("Transpose", "Reshape"), (transpose, reshape)
    edit.replace(reshape.outputs[0], mixed)


def _flat_source(split: ir.Node) -> ir.Value:
    """Returns the QKV product that reaches `split` through a Reshape and a Transpose."""
    reshape = producer(producer(split.inputs[0], "Transpose").inputs[0], "Reshape")
    return input_at(reshape, 0)


def _head_norms(
    edit: GraphEditor,
    before: ir.Node,
    parts: Sequence[ir.Value],
    norms: Sequence[ir.Node],
    heads: tuple[int, int],
    Dh: int,
) -> ir.Value:
    """Inserts the norms of queries and keys over each head; returns both side by side."""
    normed = []
    for part, norm, count in zip(parts, norms, heads, strict=True):
        (x,) = edit.add(before, "Reshape", [part, edit.constant(np.array([1, -1, count, Dh]))])
        epsilon = norm.attributes["epsilon"].as_float()
        (x,) = edit.add(before, "RMSNormalization", [x, norm.inputs[1]], axis=-1, epsilon=epsilon)
        normed += edit.add(before, "Reshape", [x, edit.constant(np.array([1, -1, count * Dh]))])
    return edit.add(before, "Concat", normed, axis=-1)[0]


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
        if output.name in ("features",) or str(output.name).startswith("taps."):
            node = ir.node("Squeeze", [output, edit.constant(np.array([0]))], num_outputs=1)
            graph.append(node)
            flat = node.outputs[0]
            flat.shape, flat.type = output.shape, output.type
            name = output.name
            output.name, flat.name = edit.name(f"{name}.batch"), name
            graph.outputs[i] = flat
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
