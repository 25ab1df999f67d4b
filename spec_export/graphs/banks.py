"""Makes GPU outputs: argmax, largest logits, and buffers that stay on the device ("banks").

They keep the number of values small that are copied to the host. A bank is a buffer [R, W] of
rows. One graph writes rows in place; others, or the next run of the same graph, read them. Features
of the target lie in banks by the slot of their KV row (R = S), states and hidden rows of a drafter
by node.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from spec_export.graphs.edit import GraphEditor, fixed_size
from spec_export.graphs.trace import IR_VERSION, OPSET
from spec_runtime.bundle.manifest import (
    BANK,
    BANK_ROWS,
    FEATURE_ROWS,
    FEATURES,
    STATE_ROWS,
    is_feature,
)
from spec_runtime.loop.target import ARGMAX, LOGSUMEXP, TOP_IDS, TOP_LOGITS

MOST_TOP = 128  # how many logits of a row the sampling graph finds


def add_argmax(model: ir.Model) -> ir.Model:
    """Adds the output `argmax_ids` i64[M] to a target's graph, in place, and returns the graph.

    It holds the argmax of each row of `logits` f32[M, V], the first of equal logits, or -1 where
    the largest logit is not finite, so that the host notices a NaN.
    """
    graph, edit = model.graph, GraphEditor(model, "argmax")
    logits = next(value for value in graph.outputs if value.name == "logits")
    assert logits.dtype == ir.DataType.FLOAT, logits  # CUDA's ArgMax takes no bfloat16
    before = list(graph)[-1]
    (ids,) = edit.add(before, "ArgMax", [logits], axis=1, keepdims=1)
    (best,) = edit.add(before, "GatherElements", [logits, ids], axis=1)
    (zero,) = edit.add(before, "Sub", [best, best])  # NaN for NaN and for an infinity
    (is_finite,) = edit.add(before, "Equal", [zero, edit.constant(np.zeros(1, np.float32))])
    (ids,) = edit.add(before, "Where", [is_finite, ids, edit.constant(np.array([-1]))])
    (ids,) = edit.add(before, "Squeeze", [ids, edit.constant(np.array([1]))])
    ids.name, ids.type = ARGMAX, ir.TensorType(ir.DataType.INT64)
    ids.shape = ir.Shape(["M"])
    graph.outputs.append(ids)
    graph.sort()
    return model


def sampling_graph(vocab_size: int, most: int = MOST_TOP) -> ir.Model:
    """Returns the graph that finds what a sampler mostly needs of `logits` f32[M, V].

    It is a graph of its own because ONNX Runtime computes every output of a graph, asked for or
    not: greedy decoding would pay for it. V = `vocab_size`. `top_ids` i64[M, K] and `top_logits`
    f32[M, K] are the K = `most` largest logits of each row (all V, if there are fewer), largest
    first. `logsumexp` f32[M] is over the whole row; it is not finite where a logit is NaN or +inf,
    whatever TopK makes of such a row, since each logit is a term of the sum. How CUDA's TopK orders
    NaN and equal logits is not documented. ReduceMax is avoided because it would need cuDNN.
    """
    K, REAL = min(most, vocab_size), ir.DataType.FLOAT
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="sampling")
    model = ir.Model(graph, ir_version=IR_VERSION)
    edit = GraphEditor(model, "top")
    logits = edit.add_input("logits", REAL, ["M", vocab_size])
    zero, one, size = (edit.constant(np.array([number])) for number in (0, 1, K))
    top, ids = edit.add(None, "TopK", [logits, size], axis=1, num_outputs=2)
    (largest,) = edit.add(None, "Slice", [top, zero, one, one])
    (below,) = edit.add(None, "Sub", [logits, largest])
    (weight,) = edit.add(None, "Exp", [below])
    (total,) = edit.add(None, "ReduceSum", [weight, one], keepdims=0)
    (log_total,) = edit.add(None, "Log", [total])
    (largest,) = edit.add(None, "Squeeze", [largest, one])
    (whole,) = edit.add(None, "Add", [log_total, largest])
    for value, name, dtype in (
        (ids, TOP_IDS, ir.DataType.INT64),
        (top, TOP_LOGITS, REAL),
        (whole, LOGSUMEXP, REAL),
    ):
        value.name, value.type = name, ir.TensorType(dtype)
        graph.outputs.append(value)
    ids.shape, top.shape, whole.shape = ir.Shape(["M", K]), ir.Shape(["M", K]), ir.Shape(["M"])
    return model


def write_banks(
    model: ir.Model, outputs: Sequence[str], num_rows: int | str, rows: str = BANK_ROWS
) -> ir.Model:
    """Makes a graph also write each of these outputs `X` [N, W] to a bank, in place.

    The bank is the input `bank.X` [num_rows, W] and comes out as `bank.X.out`; if X itself ends in
    `.out`, that ending is dropped from the bank's name. The input called `rows`, i64[N], says which
    rows are written; it is added if the graph has none. Values are indexed as in `to_slots`.
    """
    graph, edit = model.graph, GraphEditor(model, "banks")
    inputs = {value.name: value for value in graph.inputs}
    values = {value.name: value for value in graph.outputs}
    places: dict[int, ir.Value] = {}  # by width
    for output in outputs:
        value, name = values[output], f"{BANK}{output.removesuffix('.out')}"
        assert value.shape is not None, output
        if rows not in inputs:
            inputs[rows] = edit.add_input(rows, ir.DataType.INT64, [value.shape[0]])
        bank = inputs.get(name) or _add_bank(edit, name, value, num_rows)
        before = list(graph)[-1]
        width = fixed_size(value, 1)
        if width not in places:
            places[width] = edit.places(before, inputs[rows], (1, width), (0, 1), axis=0)
        (written,) = edit.add(before, "ScatterND", [bank, places[width], value])
        written.name, written.shape, written.type = f"{name}.out", bank.shape, bank.type
        graph.outputs.append(written)
    graph.sort()
    return model


def read_features(
    model: ir.Model, target: ir.Model, features: Sequence[str] = (FEATURES,), num_rows: int = 1
) -> ir.Model:
    """Makes a drafter's graph read features from banks, in place.

    The input `feature_rows` i64[N] takes the place of `features` [1, N, F] (or [1, F], with N = 1).
    A row r >= 0 is row r of the target's banks of these outputs. A row r < 0 is row -1 - r of the
    bank of `hidden` [num_rows, F], which an earlier run wrote, or zeros if the graph has no such
    output. Example: rows [7, -1, -3] read slot 7 of the target's banks and
    rows 0 and 2 of the drafter's own bank.
    """
    graph, edit = model.graph, GraphEditor(model, "bank_features")
    old = next(value for value in graph.inputs if value.name == "features")
    assert old.shape is not None
    assert old.dtype is not None
    rows = edit.add_input(FEATURE_ROWS, ir.DataType.INT64, [old.shape[-2]])
    kept = {value.name: value for value in target.graph.outputs}
    before, parts = next(iter(graph)), []
    zero, last = (edit.constant(np.array([row])) for row in (0, -1))
    (theirs,) = edit.add(before, "Max", [rows, zero])
    for name in features:
        bank = _add_bank(edit, f"{BANK}{name}", kept[name], "S")
        parts += edit.add(before, "Gather", [bank, theirs], axis=0)
    read = parts[0] if len(parts) == 1 else edit.add(before, "Concat", parts, axis=1)[0]
    (read,) = edit.add(before, "Cast", [read], to=old.dtype.value)
    own = edit.constant(np.zeros(1, old.dtype.numpy()))
    if hidden := [value for value in graph.outputs if value.name == "hidden"]:
        write_banks(model, ["hidden"], num_rows)
        bank = next(value for value in graph.inputs if value.name == f"{BANK}hidden")
        (row,) = edit.add(before, "Sub", [last, rows])
        (row,) = edit.add(before, "Max", [row, zero])
        (own,) = edit.add(before, "Gather", [bank, row], axis=0)
        if hidden[0].dtype != old.dtype:
            (own,) = edit.add(before, "Cast", [own], to=old.dtype.value)
    (is_own,) = edit.add(before, "Less", [rows, zero])
    (is_own,) = edit.add(before, "Unsqueeze", [is_own, edit.constant(np.array([1]))])
    (read,) = edit.add(before, "Where", [is_own, own, read])
    if old.shape.rank() == 3:
        (read,) = edit.add(before, "Unsqueeze", [read, edit.constant(np.array([0]))])
    old.replace_all_uses_with(read)
    graph.inputs.remove(old)
    graph.sort()
    return model


def read_states(model: ir.Model, num_rows: int) -> ir.Model:
    """Makes the step graph of a sequential drafter keep its states in a bank, in place.

    The input `state_rows` i64[N], rows of the bank of states [num_rows, W], takes the place of
    `state` [N, W]; the states that the step makes are written to the same bank.
    """
    graph, edit = model.graph, GraphEditor(model, "bank_states")
    old = next(value for value in graph.inputs if value.name == "state")
    assert old.shape is not None
    rows = edit.add_input(STATE_ROWS, ir.DataType.INT64, [old.shape[0]])
    bank = _add_bank(edit, f"{BANK}state", old, num_rows)
    (read,) = edit.add(next(iter(graph)), "Gather", [bank, rows], axis=0)
    old.replace_all_uses_with(read)
    graph.inputs.remove(old)
    graph.sort()
    return write_banks(model, ["state.out"], num_rows)


def keep_target(model: ir.Model) -> ir.Model:
    """Makes a target's graph, in the slots form, keep its features in banks, in place.

    The feature of the token in KV slot s goes to row s.
    """
    outputs = [str(value.name) for value in model.graph.outputs]
    return write_banks(model, [name for name in outputs if is_feature(name)], "S", "slots")


def keep_drafter(
    model: ir.Model, target: ir.Model, config: Mapping[str, Any], scratch: int
) -> ir.Model:
    """Makes any graph of a drafter keep its features and states in banks, in place.

    target: the target's graph, whose features are read. config: the drafter's, as in its manifest
    entry. scratch: the most nodes of a tree that is given instead of grown.
    """
    # Rows for the root, its parent, and the nodes that are expanded in a tree, grown or given.
    num_rows = 2 + max(scratch, config.get("num_guesses", 1) * config.get("max_width", 1))
    inputs = {value.name for value in model.graph.inputs}
    outputs = {value.name for value in model.graph.outputs}
    if "features" in inputs:
        read_features(model, target, config.get("features", (FEATURES,)), num_rows)
    if "state" in inputs:
        read_states(model, num_rows)
    if "state" in outputs:
        write_banks(model, ["state"], num_rows)
    return model


def _add_bank(edit: GraphEditor, name: str, like: ir.Value, num_rows: int | str) -> ir.Value:
    """Adds an input for a bank whose rows are as wide and of the same type as those of `like`."""
    assert like.dtype is not None
    return edit.add_input(name, like.dtype, [num_rows, fixed_size(like, 1)])
