"""Joins verify, accept and draft into one graph, for one-pass drafters at temperature 0.

The graph of this *fused step* holds the target's graph and the drafter's (both in the slots form,
unchanged) and, around them, small standard operators. None of these is control flow, so that the
step is one captured launch on CUDA:

- before the target: positions and tree mask, from the tree and the committed slots;
- acceptance: y = argmax of each row; a node is right if its token is y of its parent; a path is
  accepted if all its nodes are right, so with A[n, m] = m is n or an ancestor of n,
  ok[n] = not any(A[n, m] and not right[m]); the deepest such node ends the accepted path;
- before the drafter: the accepted rows (feature, next token), padded to the deepest path there is,
  followed by the masks;
- after it: the most probable paths of its guesses, as trees.grow finds them, become the next tree.
  Each level keeps its best N − 1 paths, then the best of all are taken.

What the next step needs are outputs `state.….out`, which the runtime binds to its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from spec_export.graphs.edit import GraphEditor, fixed_size, remove_dead
from spec_runtime.bundle.manifest import BANK, DRAFT, FEATURE_ROWS, FEATURES
from spec_runtime.errors import UserError

BUFFERS = ("kv.", BANK)  # prefixes of inputs that are buffers on the device

INT, BOOL, REAL = (kind.value for kind in (ir.DataType.INT64, ir.DataType.BOOL, ir.DataType.FLOAT))


def fuse(
    target: ir.Model,
    drafter: ir.Model,
    *,
    num_nodes: int,
    features: Sequence[str] = (FEATURES,),
    mask_ids: Sequence[int] = (),
    repeat_feature: bool = False,
    mask_reads_token: bool = False,
    first_token: int = 1,
) -> ir.Model:
    """Returns the two graphs as one step over trees of N = `num_nodes` nodes; both are used up.

    features, mask_ids, repeat_feature, mask_reads_token (the root's token is added to mask_ids) and
    first_token (that of row 0) say what the drafter reads, as its manifest entry does. Its output
    pair_log_probs f32[D - 1, C, C], if there, conditions its guesses, see trees.guesses.Guesses. D
    is the number of guesses and so the depth of the deepest node. Each part of the state is an
    input `state.X` and an output `state.X.out`:

    token i64[N] (-1: no node), parent i64[N], depth i64[N], ancestor bool[N, N] (A above), slot
    i64[N] (where a node's KV row goes), taken bool[S] (slots of committed rows), counts i64[2]
    (committed rows; the first slot that was never used).

    taken covers as many slots as the mask is to be wide: where the graphs read whole buffers
    (attention "full_buffer"), all of them.

    KV inputs and outputs are the two graphs' own, the drafter's with `draft.` before the name.
    There are two more outputs. result i64[2D + 4] holds the D + 1 emitted tokens (the accepted
    ones, then the bonus) and the D + 1 nodes of their path, both filled up with -1, then 1 if the
    path's last node had a child, and the number of drafted nodes. path_features f32[D + 1, F] are
    the features of the path's nodes.

    Example, D = 2: one drafted token, 7, is accepted at node 3 and the bonus is 9, in a tree of
    four drafted nodes where node 3 has a child: result = [7, 9, -1, 0, 3, -1, 1, 4].

    Raises UserError for fewer than two nodes, or a drafter that does not guess in one pass.
    """
    if num_nodes < 2:
        raise UserError(f"got trees of {num_nodes} node to fuse, expected at least 2")
    inputs = {str(value.name) for value in drafter.graph.inputs}
    outputs = {str(value.name): value for value in drafter.graph.outputs}
    extra = {name for name in inputs if not name.startswith(BUFFERS)} - {
        "input_ids",
        "features",
        "position_ids",
        "mask",
        "logit_rows",
        "slots",
        "seqlens_k",
        FEATURE_ROWS,
    }
    if extra or not {"guess_ids", "guess_log_probs"} <= set(outputs):
        raise UserError(
            f"got a drafter with inputs {sorted(inputs)} and outputs {sorted(outputs)} to fuse, "
            "expected one that guesses in one pass"
        )
    fused = _FusedGraph(target, drafter)
    shape = outputs["guess_ids"].shape
    num_rows = None if shape is None else shape[0]  # a symbol if guesses are rows asked for
    num_guesses = num_rows if isinstance(num_rows, int) else 1 + len(mask_ids)
    num_candidates = fixed_size(outputs["guess_ids"], 1)
    fused.verify(num_nodes)
    fused.accept(num_guesses, features)
    fused.draft(mask_ids, repeat_feature, mask_reads_token, first_token)
    fused.grow(num_candidates)
    return fused.finish()


class _FusedGraph:
    """Holds the graph while it is put together; the methods are called in the order they stand in.

    Values have the names of the state. Those with the suffix P (`path_P`, `kept_P`) are over the
    D + 1 rows of the accepted path.
    """

    def __init__(self, target: ir.Model, drafter: ir.Model) -> None:
        self.model = target
        self.graph = target.graph
        self.edit = GraphEditor(target, "step")
        self.target_inputs = {str(value.name): value for value in self.graph.inputs}
        self.target_outputs = {str(value.name): value for value in self.graph.outputs}
        self.drafter_inputs = {str(value.name): value for value in drafter.graph.inputs}
        self.drafter_outputs = {str(value.name): value for value in drafter.graph.outputs}
        self._take_in(drafter)
        self.state: dict[str, ir.Value] = {}
        self.next: dict[str, ir.Value] = {}

    def verify(self, N: int) -> None:
        """Adds the state's inputs and feeds the tree to the target's graph."""
        self.N = N
        sizes: Any = (
            *((name, INT, [N]) for name in ("token", "parent", "depth", "slot")),
            ("ancestor", BOOL, [N, N]),
            ("taken", BOOL, ["S"]),
            ("counts", INT, [2]),
        )
        for name, dtype, shape in sizes:
            self.state[name] = self.edit.add_input(f"state.{name}", ir.DataType(dtype), shape)
        op, state = self.op, self.state
        self.length = op("Gather", state["counts"], [0])
        self.fresh = op("Gather", state["counts"], [1])
        shape_S = op("Shape", state["taken"])
        shape_NS = op("Concat", [N], shape_S, axis=0)
        slot_NN = op("Expand", state["slot"], [N, N])
        mask_NS = op("Expand", state["taken"], shape_NS)
        # The columns of the tree's own nodes are slots that are not taken yet.
        mask_NS = op("ScatterElements", mask_NS, slot_NN, state["ancestor"], axis=1)
        self.feed(
            self.target_inputs,
            input_ids=self.batch(op("Max", state["token"], [0])),
            position_ids=self.batch(op("Add", self.length, state["depth"])),
            mask=op("Unsqueeze", mask_NS, [0, 1]),
            logit_rows=self.edit.constant(np.arange(N)),
            slots=state["slot"],
            seqlens_k=self.int32(op("Sub", self.fresh, [1])),
        )

    def accept(self, D: int, features: Sequence[str]) -> None:
        """Finds the accepted path, and updates the slots and counts of the state."""
        op, state, N, P = self.op, self.state, self.N, D + 1
        self.P = P
        y_N = op("ArgMax", self.real(self.target_outputs["logits"]), axis=1, keepdims=0)
        right_N = op("Equal", state["token"], op("Gather", y_N, state["parent"]))
        right_N = op("Or", right_N, np.arange(N) == 0)
        wrong_NN = op("And", state["ancestor"], op("Not", right_N))
        ok_N = op("Equal", self.num_true(wrong_NN, 1), np.array([0], np.float32))
        reach_N = op("Where", ok_N, op("Add", state["depth"], [1]), [0])
        best = op(
            "ArgMax", self.real(reach_N), axis=0
        )  # i64[1]: the deepest right node; there is only one, since siblings have different tokens
        self.best, self.count = best, op("Gather", reach_N, best)
        on_path_N = op("Squeeze", op("Gather", state["ancestor"], best), [0])
        at_depth_PN = op("Equal", op("Unsqueeze", state["depth"], [0]), np.arange(P)[:, None])
        path_PN = op("And", at_depth_PN, on_path_N)
        path_P = op("ArgMax", self.real(path_PN), axis=1, keepdims=0)
        self.kept_P = op("Less", np.arange(P), self.count)
        self.bonus = op("Gather", y_N, best)
        self.emitted_P = op("Where", self.kept_P, op("Gather", y_N, path_P), [-1])
        is_node_N = op("GreaterOrEqual", state["token"], [0])
        below_N = op("Equal", state["depth"], self.count)
        below_N = op(
            "And", below_N, op("Squeeze", op("Gather", state["ancestor"], best, axis=1), [1])
        )
        num_children = self.num_true(op("And", below_N, is_node_N), 0, keep=1)
        has_child = op("Greater", num_children, np.array([0], np.float32))
        num_nodes = op("Cast", self.num_true(is_node_N, 0, keep=1), to=INT)
        self.result = op(
            "Concat",
            self.emitted_P,
            op("Where", self.kept_P, path_P, [-1]),
            op("Cast", has_child, to=INT),
            op("Sub", num_nodes, [1]),
            axis=0,
        )
        parts = [self.target_outputs[name] for name in features]
        self.F = sum(fixed_size(part, 1) for part in parts)
        joined = op("Concat", *parts, axis=1) if len(parts) > 1 else parts[0]
        self.features_NF = self.real(joined)
        self.path_P = path_P
        self.path_features_PF = op("Gather", self.features_NF, path_P)
        # The KV rows of the path stay; the slots of other nodes will be written again.
        ranks_N = op("CumSum", op("Cast", on_path_N, to=INT), self.edit.constant(np.array(0)))
        fresh_N = op("Add", self.fresh, op("Sub", ranks_N, [1]))
        self.next["slot"] = op("Where", on_path_N, fresh_N, state["slot"])
        taken = op("ScatterElements", state["taken"], state["slot"], on_path_N, axis=0)
        self.next["taken"] = taken
        self.next["counts"] = op("Add", state["counts"], self.count)

    def draft(
        self,
        mask_ids: Sequence[int],
        repeat_feature: bool,
        mask_reads_token: bool,
        first_token: int,
    ) -> None:
        """Feeds the drafter's graph: the path's rows as a chain, then the mask tokens."""
        op, P, K = self.op, self.P, len(mask_ids)
        banks = {name for name in self.drafter_inputs if name.startswith(BANK)}
        for name in banks:  # the drafter reads them as the target leaves them
            self.drafter_inputs[name].replace_all_uses_with(self.target_outputs[f"{name}.out"])
        best_slot = op("Gather", self.state["slot"], self.best)
        if "input_ids" not in self.drafter_inputs:  # the drafter reads the last feature only
            features = op("Gather", self.features_NF, self.best)
            self.feed(
                self.drafter_inputs,
                **({FEATURE_ROWS: best_slot} if banks else {"features": features}),
            )
            return
        n, P_and_masks = P + K, np.arange(P + K)
        # The path's tokens follow the root, whose own row is there if row t is token t.
        begin = self.length if first_token else op("Add", self.length, [1])
        ids_P = op("Max", self.emitted_P, [0])
        ahead_n = self.edit.constant(np.where(P_and_masks < P, P_and_masks, P_and_masks - P))
        is_mask_n = self.edit.constant(P_and_masks >= P)
        ahead_n = op("Add", ahead_n, op("Where", is_mask_n, self.count, [0]))
        slot_n = op("Add", begin, P_and_masks)
        # A row attends the kept rows before it, and itself.
        seen_n = op("Or", op("Less", P_and_masks, self.count), is_mask_n)
        seen_nn = op("Or", op("And", np.tri(n, dtype=np.bool_), seen_n), np.eye(n, dtype=np.bool_))
        size_S = op("Squeeze", op("Shape", self.state["taken"]), [0])
        zero, one = (self.edit.constant(np.array(value)) for value in (0, 1))
        taken_S = op("Less", op("Range", zero, size_S, one), begin)
        mask_nS = op("Expand", taken_S, op("Concat", [n], op("Shape", taken_S), axis=0))
        slot_nn = op("Expand", slot_n, [n, n])
        mask_nS = op("ScatterElements", mask_nS, slot_nn, seen_nn, axis=1)
        mask_K = self.edit.constant(np.array(mask_ids, np.int64))
        if mask_reads_token:
            mask_K = op("Add", mask_K, self.bonus)
        feeds = {
            "input_ids": self.batch(op("Concat", ids_P, mask_K, axis=0) if K else ids_P),
            "position_ids": self.batch(op("Add", begin, ahead_n)),
            "mask": op("Unsqueeze", mask_nS, [0, 1]),
            "logit_rows": op("Concat", op("Sub", self.count, [1]), P_and_masks[P:], axis=0)
            if K
            else op("Sub", self.count, [1]),
            "slots": slot_n,
            "seqlens_k": self.int32(op("Add", begin, [n - 1])),
        }
        if banks:
            behind = [best_slot] * K if repeat_feature else [np.full(K, -1)]
            slot_P = op("Gather", self.state["slot"], self.path_P)
            feeds[FEATURE_ROWS] = op("Concat", slot_P, *behind, axis=0) if K else slot_P
        if "features" in self.drafter_inputs:
            features_nF = self.path_features_PF
            if K and repeat_feature:
                last = op("Gather", self.features_NF, self.best)
                features_nF = op("Concat", features_nF, *[last] * K, axis=0)
            elif K:
                zeros_KF = np.zeros((K, self.F), np.float32)
                features_nF = op("Concat", features_nF, zeros_KF, axis=0)
            feeds["features"] = self.batch(features_nF)
        self.feed(self.drafter_inputs, **feeds)

    def grow(self, C: int) -> None:
        """Makes the next tree of the most probable paths of the guesses.

        Level k keeps the W_k best of its paths, which is exact because no child is likelier than
        its parent. Then the best of all R kept paths become nodes. Lists over levels hold, for each
        path kept: its log-probability, its last candidate's token, and the index of the path before
        it among all R (R for the root). Guesses may be conditioned in pairs; otherwise a candidate
        has the same log-probability after every other.
        """
        op, N, D = self.op, self.N, self.P - 1
        # Each log-probability is kept strictly below 0, so that no child comes before its parent.
        below = np.array([-1e-4], np.float32)
        log_prob = op("Min", self.real(self.drafter_outputs["guess_log_probs"]), below)
        ids = self.drafter_outputs["guess_ids"]
        rank = self.edit.constant(np.arange(min(N - 1, C)))
        widths = [min(N - 1, C)]
        scores = [op("Gather", op("Squeeze", op("Gather", log_prob, [0]), [0]), rank)]
        tokens = [op("Gather", op("Squeeze", op("Gather", ids, [0]), [0]), rank)]
        before: list[ir.Value] = []
        pair = self.drafter_outputs.get("pair_log_probs")
        if pair is not None and D > 1:
            pair = op("Min", self.real(pair), below)
        for k in range(1, D):
            first, width = sum(widths[:-1]), widths[-1]
            if pair is None:
                pair_WC = op("Gather", log_prob, [k])  # [1, C]
            else:
                pair_WC = op("Gather", op("Squeeze", op("Gather", pair, [k - 1]), [0]), rank)
            score = op("Add", op("Unsqueeze", scores[-1], [1]), pair_WC)
            widths.append(min(N - 1, width * C))
            best = self.outputs(
                "TopK", op("Reshape", score, [-1]), [widths[-1]], num_outputs=2, sorted=1, axis=0
            )
            parent = op("Div", best[1], [C])
            rank = op("Sub", best[1], op("Mul", parent, [C]))
            scores.append(best[0])
            tokens.append(op("Gather", op("Squeeze", op("Gather", ids, [k]), [0]), rank))
            before.append(op("Add", parent, [first]))
        R = root = sum(widths)
        taken = min(N - 1, R)
        missing = N - 1 - taken  # trees of fewer paths than nodes
        score_R = op("Concat", *scores, axis=0) if D > 1 else scores[0]
        best_R = self.outputs("TopK", score_R, [taken], num_outputs=2, sorted=1, axis=0)[1]
        none = [np.arange(R + 1, R + 1 + missing)] if missing else []
        chosen_N = op("Concat", [root], best_R, *none, axis=0)
        # After the R paths stand the root and, for trees of fewer paths than nodes, no node.
        token = op("Concat", *tokens, self.bonus, np.full(missing, -1), axis=0)
        roots = [np.full(widths[0], root), *before, np.full(1 + missing, root)]
        parent_R = op("Concat", *roots, axis=0)
        depth_R = [k for k, width in enumerate(widths, 1) for _ in range(width)]
        parent_N = op("Gather", parent_R, chosen_N)
        is_parent = op("Equal", op("Unsqueeze", parent_N, [1]), chosen_N)
        self.next["token"] = op("Gather", token, chosen_N)
        self.next["parent"] = op("ArgMax", self.real(is_parent), axis=1, keepdims=0)
        self.next["depth"] = op("Gather", np.array(depth_R + [0] * (1 + missing)), chosen_N)
        # Every node is an ancestor of itself; a level's are its own and those of its parents.
        ancestor = self.edit.constant(np.eye(N, dtype=np.bool_))
        for _ in range(min(D, N - 1)):
            above = op("Gather", ancestor, self.next["parent"])
            ancestor = op("Or", np.eye(N, dtype=np.bool_), above)
        self.next["ancestor"] = ancestor

    def finish(self) -> ir.Model:
        """Sets the inputs and outputs of the whole graph and returns the model."""
        graph, outputs = self.graph, []
        for name, before in self.state.items():
            outputs.append(self.named(self.next[name], f"state.{name}.out", before))
        D = self.P - 1
        outputs.append(self.named(self.result, "result", shape=[2 * D + 4], dtype=INT))
        shape = [D + 1, self.F]
        outputs.append(self.named(self.path_features_PF, "path_features", shape=shape, dtype=REAL))
        ours = (*BUFFERS, f"{DRAFT}kv.")
        kv = [v for v in graph.inputs if str(v.name).startswith(ours)]
        kv_out = [v for v in graph.outputs if str(v.name).startswith(ours)]
        graph.inputs[:] = [*self.state.values(), *kv]
        graph.outputs[:] = [*outputs, *kv_out]
        remove_dead(graph)  # nodes that made outputs of the two graphs which are none here
        graph.sort()
        return self.model

    # ---- helpers ---------------------------------------------------------------------------------

    def _take_in(self, drafter: ir.Model) -> None:
        """Moves the drafter's nodes, weights, cache inputs and cache outputs into this graph."""
        source = drafter.graph
        nodes, weights = list(source), list(source.initializers.values())
        inputs, outputs = list(source.inputs), list(source.outputs)
        source.inputs.clear()
        source.outputs.clear()
        source.initializers.clear()
        source.remove(nodes)
        for node in nodes:
            node.name = f"{DRAFT}{node.name}"
        made = [value for node in nodes for value in node.outputs if value.name]
        for value in {id(v): v for v in (*weights, *inputs, *made)}.values():
            value.name = f"{DRAFT}{value.name}"
        for value in weights:
            self.graph.register_initializer(value)
        self.graph.extend(nodes)
        self.graph.inputs.extend(v for v in inputs if str(v.name).startswith(f"{DRAFT}kv."))
        self.graph.outputs.extend(v for v in outputs if str(v.name).startswith(f"{DRAFT}kv."))
        for domain, version in drafter.opset_imports.items():
            assert self.model.opset_imports.setdefault(domain, version) == version, domain

    def op(self, op_type: str, *inputs: Any, **attributes: int) -> ir.Value:
        """Appends a node with one output and returns that; see `outputs`."""
        return self.outputs(op_type, *inputs, **attributes)[0]

    def outputs(
        self, op_type: str, *inputs: Any, num_outputs: int = 1, **attributes: int
    ) -> Sequence[ir.Value]:
        """Appends a node and returns its outputs; lists and arrays become constants."""
        values = [
            value if isinstance(value, ir.Value) else self.edit.constant(np.asarray(value))
            for value in inputs
        ]
        node = ir.node(op_type, values, attributes or None, num_outputs=num_outputs)
        for value in node.outputs:
            value.name = self.edit.name(op_type.lower())
        self.graph.append(node)
        return node.outputs

    def batch(self, value: ir.Value) -> ir.Value:
        """Returns the value with a batch axis of size 1 in front."""
        return self.op("Unsqueeze", value, [0])

    def int32(self, value: ir.Value) -> ir.Value:
        """Returns the value as int32."""
        return self.op("Cast", value, to=ir.DataType.INT32.value)

    def real(self, value: ir.Value) -> ir.Value:
        """Returns the value as float32, which every provider's ArgMax takes."""
        if value.dtype == ir.DataType.FLOAT:
            return value
        result = self.op("Cast", value, to=REAL)
        result.shape = value.shape
        return result

    def num_true(self, value: ir.Value, axis: int, keep: int = 0) -> ir.Value:
        """Returns how many entries along `axis` of a boolean value are true, as float32.

        It is a sum of floats because CUDA has no kernel of its own for a maximum, nor for a sum of
        integers: for those ONNX Runtime wants cuDNN.
        """
        return self.op("ReduceSum", self.real(value), [axis], keepdims=keep)

    def feed(self, inputs: dict[str, ir.Value], **values: ir.Value) -> None:
        """Puts these values in the place of the inputs of these names: all but the buffers.

        Values that the graph has no input for are left out: each attention reads some of them.
        """
        wanted = {name for name in inputs if not name.startswith(BUFFERS)}
        assert wanted <= set(values), (sorted(values), sorted(wanted))
        for name, value in values.items():
            if name not in wanted:
                continue
            dtype = inputs[name].dtype
            if name == "features" and dtype not in (None, ir.DataType.FLOAT):
                value = self.op("Cast", value, to=dtype.value)
            inputs[name].replace_all_uses_with(value)

    def named(
        self,
        value: ir.Value,
        name: str,
        like: ir.Value | None = None,
        shape: Sequence[Any] = (),
        dtype: int = INT,
    ) -> ir.Value:
        """Returns the value under this name, after an Identity: it may be an output already.

        The output has the shape and type of `like`, if that is given.
        """
        (result,) = self.outputs("Identity", value)
        result.name = name
        result.shape = ir.Shape(shape) if like is None else like.shape
        result.type = ir.TensorType(ir.DataType(dtype)) if like is None else like.type
        return result
