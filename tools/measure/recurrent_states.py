"""Measures what verifying a draft costs in models whose layers keep a recurrent state.

    python -m tools.measure.recurrent_states [--threads N]

There is no such model to run: the recurrences of one pass are ONNX graphs of random numbers, at the
shapes of released models, summed over the layers. Three ways of verifying N nodes are compared,
first on a random tree for their results, then on a chain for their times:

- snapshots: nodes one after the other, each reading its parent's state and writing one of its own;
- chain: one state is carried along, and recomputed from the accepted inputs after the pass;
- tree: all nodes at once against the committed state, to which the rows that were accepted in the
  pass before are added first.

See docs/architecture/recurrent-states.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx

from spec_runtime.backends.session import ort
from spec_runtime.files.machine import default_threads
from spec_runtime.trees.tree import tree_shape
from tools.figures import command_line, markdown, run

NODES, RUNS = (1, 4, 8, 12), 25
HEADER = '<ir_version: 11, opset_import: ["" : 23]> measured'


class Model(NamedTuple):
    """How many recurrent layers a model has, each with `heads` states of [key, value]; is_delta
    tells Gated DeltaNet from Mamba-2, whose heads share keys and queries."""

    layers: int
    heads: int
    key: int
    value: int
    is_delta: bool


MODELS = {
    "Qwen3.5-0.8B": Model(18, 16, 128, 128, True),
    "Granite 4 H 1B": Model(36, 48, 128, 64, False),
    "Falcon H1 0.5B": Model(36, 24, 128, 64, False),
}


class Graph:
    """A graph of lines in ONNX's text form, its inputs' arrays, and outputs of three axes."""

    def __init__(self, feeds: dict[str, np.ndarray], lines: list[str], outputs: list[str]) -> None:
        given = [f"float[{', '.join(map(str, a.shape))}] {name}" for name, a in feeds.items()]
        made = [f"float[{name}0, {name}1, {name}2] {name}" for name in outputs]
        text = f"{HEADER} ({', '.join(given)}) => ({', '.join(made)}) {{ {' '.join(lines)} }}"
        self.feeds, self.model = (
            feeds,
            onnx.parser.parse_model(text.replace(";", "")).SerializeToString(),
        )

    def run(self, threads: int, runs: int = 1) -> tuple[list[np.ndarray], float]:
        """Returns the outputs and the least milliseconds: other processes only add to them."""
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 4
        session = ort.InferenceSession(self.model, options)
        binding, seconds = session.io_binding(), []
        for name, array in self.feeds.items():
            binding.bind_cpu_input(name, array)
        for output in session.get_outputs():
            binding.bind_output(output.name)
        for _ in range(2 + runs):
            begin = time.perf_counter()
            session.run_with_iobinding(binding)
            seconds.append(time.perf_counter() - begin)
        return [value.numpy() for value in binding.get_outputs()], 1000 * min(seconds[2:])


def random_rows(model: Model, n: int) -> dict[str, np.ndarray]:
    """Returns a state and what N nodes bring: k, q, v, the update's share b and the decay d."""
    rng, shared = np.random.default_rng(n), model.heads if model.is_delta else 1
    key = rng.standard_normal((shared, n, model.key), np.float32)
    return {
        "state": rng.standard_normal((model.heads, model.key, model.value), np.float32),
        "k": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "q": rng.standard_normal((shared, n, model.key), np.float32),
        "v": rng.standard_normal((model.heads, n, model.value), np.float32),
        "b": rng.random((model.heads, n, 1), np.float32),
        "d": np.exp(-rng.random((model.heads, n, 1), np.float32)),
    }


def one_by_one(model: Model, parent_N: np.ndarray, keeps_all: bool = True) -> Graph:
    rows, lines = random_rows(model, len(parent_N)), list[str]()
    feeds = {"state": rows.pop("state")}
    for n, parent in enumerate(parent_N):
        at = {name: np.ascontiguousarray(array[:, n : n + 1]) for name, array in rows.items()}
        feeds |= {f"{name}{n}": array for name, array in at.items()}
        feeds[f"t{n}"] = np.ascontiguousarray(at["k"].swapaxes(1, 2))
        before = f"s{parent}" if n else "state"
        seen = f"e{n} = MatMul(k{n}, a{n})  f{n} = Sub(v{n}, e{n})  " if model.is_delta else ""
        lines += [
            f"a{n} = Mul({before}, d{n})  {seen}u{n} = Mul({'f' if seen else 'v'}{n}, b{n})",
            f"w{n} = MatMul(t{n}, u{n})  s{n} = Add(a{n}, w{n})  o{n} = MatMul(q{n}, s{n})",
        ]
    nodes = range(len(parent_N))
    lines.append(f"out = Concat<axis = 1>({', '.join(f'o{n}' for n in nodes)})")
    return Graph(feeds, lines, ["out", *(f"s{n}" for n in nodes if keeps_all or n == nodes[-1])])


def all_at_once(model: Model, parent_N: np.ndarray) -> Graph:
    """In Gated DeltaNet what a node adds depends on what its ancestors add: (1 + A) u = w, with A
    strictly below the diagonal. A to the power of N is 0: (1 - A)(1 + A²)(1 + A⁴)… is the inverse.
    """
    rows, n = random_rows(model, len(parent_N)), len(parent_N)
    depth_N, ancestor_NN = tree_shape(parent_N)
    along = np.exp(ancestor_NN.astype(np.float32) @ np.log(rows["d"]))  # decays from the root on
    ratio = np.where(ancestor_NN, along / along.swapaxes(1, 2), 0).astype(np.float32)
    eye, kept = np.eye(n, dtype=np.float32)[None], max(1, n // 2)
    turned = np.ascontiguousarray(rows["k"].swapaxes(1, 2))
    feeds = {name: rows[name] for name in ("state", "v", "b")} | {
        "both": np.concatenate([rows["k"], rows["q"]], axis=1),
        "turned": turned,
        "along": along,
        "ratio": ratio,
        "lower": ratio * (1 - eye),
        "eye": eye,
        "old": rows["state"],
        "shrink": rows["d"][:, :1],
        "old_k": np.ascontiguousarray(turned[:, :, :kept]),
        "old_u": np.ascontiguousarray(rows["v"][:, :kept]),
    }
    lines = [
        "read = MatMul(both, state)  met = MatMul(both, turned)",
        "of_key, of_query = Split<axis = 1, num_outputs = 2>(read)",
        "key_key, query_key = Split<axis = 1, num_outputs = 2>(met)",
        "u = Mul(v, b)",
    ]
    if model.is_delta:
        powers = max(0, int(depth_N.max()).bit_length() - 1)
        lines[-1:] = [
            "c = Mul(lower, key_key)  d = Mul(c, b)  p0 = Neg(d)  i0 = Add(p0, eye)",
            *(
                f"p{i + 1} = MatMul(p{i}, p{i})  j{i} = Add(p{i + 1}, eye)  "
                f"i{i + 1} = MatMul(i{i}, j{i})"
                for i in range(powers)
            ),
            "g = Mul(along, of_key)  w = Sub(v, g)  x = Mul(w, b)",
            f"u = MatMul(i{powers}, x)",
        ]
    lines += [
        "m = Mul(ratio, query_key)  y = MatMul(m, u)  z = Mul(along, of_query)  out = Add(z, y)",
        "less = Mul(old, shrink)  more = MatMul(old_k, old_u)  folded = Add(less, more)",
    ]
    return Graph(feeds, lines, ["out", "u", "folded"])


def largest_difference(model: Model, threads: int) -> float:
    """Returns how far both ways differ on a random tree, over the largest output."""
    rng = np.random.default_rng(0)
    tree = np.array([0, *(int(rng.integers(i)) for i in range(1, NODES[-1]))])
    first, other = (way(model, tree).run(threads)[0][0] for way in (one_by_one, all_at_once))
    return float(np.abs(first - other).max() / np.abs(first).max())


def recurrence_ms(model: Model, n: int, threads: int) -> dict[str, float]:
    chain = np.maximum(np.arange(n) - 1, 0)
    graphs = {
        "snapshots": one_by_one(model, chain),
        "chain": one_by_one(model, chain, keeps_all=False),
        "again": one_by_one(model, chain[: max(1, n // 2)], keeps_all=False),
        "tree": all_at_once(model, chain),
    }
    found = {name: model.layers * graph.run(threads, RUNS)[1] for name, graph in graphs.items()}
    again = found.pop("again")  # a chain that was accepted in part is computed again, up to there
    found["chain"] += again if n > 1 else 0
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, "--threads")
    arguments = parser.parse_args(words)
    threads = arguments.threads or default_threads()
    for name, model in MODELS.items():
        print(f"\n{name}: the ways differ by {largest_difference(model, threads):.1e}\n")
        passes = {n: recurrence_ms(model, n, threads) for n in NODES}
        table = [(str(n), *(f"{each:.1f}" for each in ms.values())) for n, ms in passes.items()]
        print(markdown(("nodes", *passes[1]), table))


if __name__ == "__main__":
    run(main)
