"""Measures what verifying a draft costs in models whose layers keep a recurrent state.

    python -m tools.measure.recurrent_states --json recurrent.json

There is no such model to run: the products of one pass and the mixers' recurrences are measured as
ONNX graphs of random weights, at the shapes of released models, and summed over the layers. Three
ways of verifying N nodes are compared for the recurrence:

- snapshots: nodes one after the other, each reading its parent's state and writing one of its own;
- chain: one state is carried along, and recomputed from the accepted inputs after the pass;
- tree: all nodes at once against the committed state, masked by ancestors. Only the rows that a
  node adds to the state are kept; those of the accepted path are added before the next pass.

The first and the last are compared node by node, along every path of a random tree, before anything
is timed. See docs/architecture/recurrent-states.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from spec_export.graphs.edit import GraphEditor
from spec_export.graphs.quantize import quantize
from spec_runtime.backends.session import ort
from spec_runtime.machine import default_threads
from spec_runtime.trees.tree import tree_shape
from tools.figures import command_line, markdown, parse, run, write

NODES = (1, 4, 6, 8, 12)
LAYERS_IN_GRAPH = 4  # enough weights to leave the CPU's caches between two runs


@dataclass(frozen=True)
class Model:
    """The shape of a released model.

    A recurrent layer has `heads` states of [key_width, value_width]; `is_delta` tells Gated
    DeltaNet from Mamba-2, whose keys and queries all heads of a layer share. `products` are the
    weights [in, out] of one recurrent layer with its MLP, `other_products` those of one attention
    layer.
    """

    name: str
    recurrent_layers: int
    attention_layers: int
    heads: int
    key_width: int
    value_width: int
    conv_width: int
    is_delta: bool
    vocab: int
    hidden: int
    products: tuple[tuple[int, int], ...]
    other_products: tuple[tuple[int, int], ...] = ()
    kv_floats: int = 0  # of one token in one attention layer

    @property
    def state_bytes(self) -> int:
        """Bytes of all layers' states in float32, the convolutions' three rows included."""
        matrix = self.heads * self.key_width * self.value_width
        return 4 * self.recurrent_layers * (matrix + 3 * self.conv_width)

    @property
    def row_bytes(self) -> int:
        """Bytes of what the tree's way keeps of one node: what it adds to the states."""
        keys = self.heads * self.key_width if self.is_delta else self.key_width
        row = keys + self.heads * self.value_width + self.heads + self.conv_width
        return 4 * self.recurrent_layers * row


def _mlp(hidden: int, width: int) -> tuple[tuple[int, int], ...]:
    return (hidden, 2 * width), (width, hidden)


MODELS = (
    Model(
        *("Qwen3.5-0.8B", 18, 6, 16, 128, 128, 6144, True, 248320, 1024),
        products=((1024, 8224), (2048, 1024), *_mlp(1024, 3584)),
        other_products=((1024, 5120), (2048, 1024), *_mlp(1024, 3584)),
        kv_floats=2 * 2 * 256,
    ),
    Model(
        *("Granite 4 H 1B", 36, 4, 48, 128, 64, 3328, False, 100352, 1536),
        products=((1536, 6448), (3072, 1536), *_mlp(1536, 4096)),
        other_products=((1536, 2560), (1536, 1536), *_mlp(1536, 4096)),
        kv_floats=2 * 4 * 128,
    ),
    Model(
        *("Falcon H1 0.5B", 36, 36, 24, 128, 64, 1792, False, 32784, 1024),
        products=((1024, 3352), (1536, 1024), (1024, 768), (512, 1024), *_mlp(1024, 2048)),
        kv_floats=2 * 2 * 64,
    ),
)


class Graph:
    """An ONNX graph that is built node by node and run with ONNX Runtime."""

    def __init__(self) -> None:
        graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="measured")
        self.model = ir.Model(graph, ir_version=11)
        self.edit = GraphEditor(self.model, "m")
        self.feeds: dict[str, np.ndarray] = {}
        self._session: Any = None
        self._binding: Any = None
        self._fed: Any = None

    def given(self, name: str, array: np.ndarray) -> ir.Value:
        self.feeds[name] = array
        return self.edit.add_input(name, ir.tensor(array).dtype, array.shape)

    def op(self, kind: str, *inputs: ir.Value | np.ndarray, **attributes: Any) -> ir.Value:
        values = [x if isinstance(x, ir.Value) else self.edit.constant(x) for x in inputs]
        (made,) = self.edit.add(None, kind, values, **attributes)
        return made

    def returns(self, *values: ir.Value) -> None:
        for value in values:
            value.type = ir.TensorType(ir.DataType.FLOAT)
            self.model.graph.outputs.append(value)

    def run(self, threads: int) -> list[np.ndarray]:
        if self._session is None:
            options = ort.SessionOptions()
            options.intra_op_num_threads, options.log_severity_level = threads, 4
            proto = ir.to_proto(self.model).SerializeToString()
            self._session = ort.InferenceSession(proto, options, ["CPUExecutionProvider"])
            self._binding = self._session.io_binding()
        for name, array in self.feeds.items():
            self._binding.bind_cpu_input(name, array)
        if self._fed is not self.feeds:  # outputs of these shapes are made once
            self._fed = self.feeds
            for output in self._session.get_outputs():
                self._binding.bind_output(output.name)
        self._session.run_with_iobinding(self._binding)
        return [value.numpy() for value in self._binding.get_outputs()]

    def ms(self, threads: int, runs: int) -> float:
        """Returns the least time of a run: other processes only add to it."""
        seconds = []
        for _ in range(2 + runs):
            begin = time.perf_counter()
            self.run(threads)
            seconds.append(time.perf_counter() - begin)
        return 1000 * min(seconds[2:])


# ------------------------------------------------------------------------------- recurrences


@dataclass(frozen=True)
class Rows:
    """Random inputs of one recurrent layer for N nodes; `decay` and `beta` are [H, N, 1]."""

    state: np.ndarray  # [H, Dk, Dv]
    key: np.ndarray  # [H or 1, N, Dk]
    query: np.ndarray
    value: np.ndarray  # [H, N, Dv]
    decay: np.ndarray
    beta: np.ndarray


def random_rows(model: Model, n: int) -> Rows:
    rng = np.random.default_rng(n)
    H, Dk, Dv = model.heads, model.key_width, model.value_width
    shared = H if model.is_delta else 1

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    key = normal(shared, n, Dk)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    decay = np.exp(-rng.random((H, n, 1))).astype(np.float32)
    beta = rng.random((H, n, 1)).astype(np.float32)
    return Rows(normal(H, Dk, Dv), key, normal(shared, n, Dk), normal(H, n, Dv), decay, beta)


def one_by_one(graph: Graph, model: Model, rows: Rows, parent_N: np.ndarray) -> list[ir.Value]:
    """Adds the nodes one after the other; returns their outputs [H, N, Dv] and all N states."""
    states, outputs = [], []
    start = graph.given("state", rows.state)
    for n, parent in enumerate(parent_N):
        at = np.s_[:, n : n + 1]
        key, value = rows.key[at], rows.value[at]
        state = graph.op("Mul", states[parent] if n else start, rows.decay[at])
        add: ir.Value | np.ndarray = value * rows.beta[at]
        if model.is_delta:
            seen = graph.op("MatMul", graph.given(f"key{n}", key), state)
            add = graph.op("Mul", graph.op("Sub", value, seen), rows.beta[at])
        update = graph.op("MatMul", np.swapaxes(key, 1, 2), add)
        states.append(graph.op("Add", state, update))
        outputs.append(graph.op("MatMul", graph.given(f"query{n}", rows.query[at]), states[-1]))
    return [graph.op("Concat", *outputs, axis=1), *states]


def all_at_once(graph: Graph, model: Model, rows: Rows, parent_N: np.ndarray) -> list[ir.Value]:
    """Adds the nodes of a tree in one go; returns their outputs [H, N, Dv] and the rows that they
    add to the state.

    A node sees the committed state, decayed along its path, and what its ancestors add. In Gated
    DeltaNet what a node adds depends on what its ancestors added: (1 + A) u = w, with A strictly
    below the diagonal. A to the power of N is 0, so (1 - A)(1 + A²)(1 + A⁴)… is the inverse.
    """
    n = len(parent_N)
    depth_N, ancestor_NN = tree_shape(parent_N)
    log = np.log(rows.decay[..., 0])  # [H, N]
    along = np.exp(np.einsum("ij,hj->hi", ancestor_NN.astype(np.float32), log))[..., None]
    ratio = np.where(ancestor_NN, along / along.swapaxes(1, 2), 0).astype(np.float32)  # [H, N, N]
    along = along.astype(np.float32)
    both = graph.given("both", np.concatenate([rows.key, rows.query], axis=1))
    # Decays are inputs in a model; given here, they are not folded away either.
    along_value, ratio_value = graph.given("along", along), graph.given("ratio", ratio)
    key_t = graph.given("key_t", np.ascontiguousarray(np.swapaxes(rows.key, 1, 2)))
    state = graph.given("state", rows.state)
    from_state = graph.op("MatMul", both, state)  # keys and queries read the state once
    products = graph.op("MatMul", both, key_t)
    halves = np.array([n, n])
    of_key, of_query = graph.edit.add(
        None, "Split", [from_state, graph.edit.constant(halves)], 2, axis=1
    )
    key_key, query_key = graph.edit.add(
        None, "Split", [products, graph.edit.constant(halves)], 2, axis=1
    )
    beta, value = graph.given("beta", rows.beta), graph.given("value", rows.value)
    if model.is_delta:
        eye = np.eye(n, dtype=np.float32)[None]
        strict = graph.op("Mul", ratio_value, 1 - eye)
        power = graph.op("Neg", graph.op("Mul", graph.op("Mul", strict, key_key), beta))
        inverse = graph.op("Add", power, eye)
        reach = 2
        while reach <= int(depth_N.max()):
            power = graph.op("MatMul", power, power)
            inverse = graph.op("MatMul", inverse, graph.op("Add", power, eye))
            reach *= 2
        wanted = graph.op("Sub", value, graph.op("Mul", along_value, of_key))
        added = graph.op("MatMul", inverse, graph.op("Mul", wanted, beta))
    else:
        added = graph.op("Mul", value, beta)
    seen = graph.op("MatMul", graph.op("Mul", ratio_value, query_key), added)
    return [graph.op("Add", graph.op("Mul", along_value, of_query), seen), added]


def fold(graph: Graph, model: Model, rows: Rows, num_accepted: int) -> ir.Value:
    """Adds accepted rows to the state, as the next pass does first."""
    P = num_accepted
    state = graph.given("old", rows.state)
    key_t = graph.given("kept", np.ascontiguousarray(np.swapaxes(rows.key[:, :P], 1, 2)))
    update = graph.op("MatMul", key_t, graph.given("added", rows.value[:, :P]))
    return graph.op("Add", graph.op("Mul", state, rows.decay[:, :1]), update)


def largest_difference(model: Model, threads: int) -> float:
    """Returns how far the two ways of verifying a random tree differ, over the largest output."""
    rng, n = np.random.default_rng(0), 12
    parent_N = np.array([0, *(int(rng.integers(i)) for i in range(1, n))])
    rows, found = random_rows(model, n), []
    for build in (one_by_one, all_at_once):
        graph = Graph()
        graph.returns(build(graph, model, rows, parent_N)[0])
        found.append(graph.run(threads)[0])
    return float(np.abs(found[0] - found[1]).max() / np.abs(found[0]).max())


def recurrence_ms(model: Model, n: int, threads: int, runs: int) -> dict[str, float]:
    """Returns the milliseconds of all recurrent layers, by way of verifying."""
    chain, rows, found = np.maximum(np.arange(n) - 1, 0), random_rows(model, n), {}
    for name in ("snapshots", "chain", "tree"):
        graph = Graph()
        if name == "tree":
            output, added = all_at_once(graph, model, rows, chain)
            graph.returns(output, added, fold(graph, model, rows, max(1, n // 2)))
        else:
            output, *states = one_by_one(graph, model, rows, chain)
            graph.returns(output, *(states if name == "snapshots" else states[-1:]))
        found[name] = model.recurrent_layers * graph.ms(threads, runs)
    # A chain that was accepted in part goes through the recurrence again, up to there.
    graph = Graph()
    again = one_by_one(graph, model, random_rows(model, max(1, n // 2)), chain[: max(1, n // 2)])
    graph.returns(again[-1])
    found["chain"] += model.recurrent_layers * graph.ms(threads, runs) * (n > 1)
    return found


# ------------------------------------------------------------------------------- products


def products_ms(model: Model, precision: str, threads: int, runs: int) -> dict[int, float]:
    """Returns the milliseconds of all products of a pass by its number of rows."""
    total = dict.fromkeys(NODES, 0.0)
    parts = [
        (model.recurrent_layers / LAYERS_IN_GRAPH, LAYERS_IN_GRAPH * model.products),
        (model.attention_layers / LAYERS_IN_GRAPH, LAYERS_IN_GRAPH * model.other_products),
        (1.0, ((model.hidden, model.vocab),)),
    ]
    for share, shapes in parts:
        graph, rng = Graph(), np.random.default_rng(0)
        widths = sorted({K for K, _ in shapes})
        inputs = {K: graph.edit.add_input(f"x{K}", ir.DataType.FLOAT, [1, "N", K]) for K in widths}
        for K, N in shapes:
            x = graph.op("Neg", inputs[K])  # an input of its own, to be quantised anew
            graph.returns(graph.op("MatMul", x, rng.standard_normal((K, N), np.float32)))
        quantize(graph.model, precision)
        for n in NODES if shapes else ():
            graph.feeds = {f"x{K}": rng.standard_normal((1, n, K), np.float32) for K in widths}
            total[n] += share * graph.ms(threads, runs)
    return total


def main(words: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, "--threads", "--json")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--precisions", nargs="+", default=["int8", "int4"])
    arguments = parse(parser, words)
    threads = arguments.threads or default_threads()
    figures: dict[str, Any] = {"threads": threads, "models": {}}
    for model in MODELS:
        difference = largest_difference(model, threads)
        products = {
            precision: products_ms(model, precision, threads, arguments.runs)
            for precision in arguments.precisions
        }
        rows: list[dict[str, Any]] = []
        for n in NODES:
            found = recurrence_ms(model, n, threads, arguments.runs)
            rows.append(
                {
                    "nodes": n,
                    "recurrence_ms": found,
                    "products_ms": {name: ms[n] for name, ms in products.items()},
                }
            )
        figures["models"][model.name] = {
            "state_bytes": model.state_bytes,
            "row_bytes": model.row_bytes,
            "kv_bytes": 4 * model.attention_layers * model.kv_floats,
            "difference": difference,
            "passes": rows,
        }
        print(
            f"\n{model.name}: {model.state_bytes / 1e6:.1f} MB of states, a row of "
            f"{model.row_bytes / 1e3:.0f} kB, the ways differ by {difference:.1e}\n"
        )
        table = [
            (
                str(row["nodes"]),
                *(f"{ms:.1f}" for ms in row["recurrence_ms"].values()),
                *(f"{ms:.1f}" for ms in row["products_ms"].values()),
            )
            for row in rows
        ]
        print(markdown(("nodes", *rows[0]["recurrence_ms"], *arguments.precisions), table))
    write(arguments.json, figures, threads=arguments.threads, note="random weights; no model")


if __name__ == "__main__":
    run(main)
