"""Tests padding: new rows stay in their places, and nobody reads the padding."""

from typing import Any

import numpy as np
import pytest

from spec_runtime.backends.pad_rows import (
    WIDTHS,
    PaddedRows,
    padded_sizes,
    padded_width,
    plan_padding,
)
from spec_runtime.backends.shapes import shape_of
from spec_runtime.bundle.manifest import Graph, TensorSpec
from spec_runtime.loop.kv import ContiguousCache, SlotCache, open_cache
from spec_runtime.trees.tree import chain_parents

CAPACITY = 40
SHAPES: dict[str, tuple[str, tuple[int | str, ...]]] = {
    "input_ids": ("int64", (1, "N")),
    "position_ids": ("int64", (1, "N")),
    "mask": ("bool", (1, 1, "N", "S")),
    "logit_rows": ("int64", ("M",)),
    "features": ("float32", (1, "N", 2)),
    "slots": ("int64", ("N",)),
    "seqlens_k": ("int32", (1,)),
    "write_index": ("int64", (1,)),
    "src": ("int64", ("A",)),
    "perm": ("int64", ("A+N",)),
}
COMMON = ("input_ids", "position_ids", "logit_rows", "features")
OWN = {
    ("slots", "append"): ("mask", "seqlens_k"),
    ("slots", "full_buffer"): ("mask", "slots"),
    ("contiguous", "bias"): ("mask", "write_index", "src", "perm"),
}
forms = pytest.mark.parametrize(("form", "attention"), OWN)


def graph_of(form: str, attention: str = "bias") -> Graph:
    inputs = tuple(TensorSpec(n, *SHAPES[n]) for n in (*COMMON, *OWN[form, attention]))
    return Graph("g.onnx", form, inputs, (), attention=attention)


def feeds_of(graph: Graph, cache: Any, parent_N: np.ndarray) -> tuple[Any, dict[str, int]]:
    n = len(parent_N)
    feeds = cache.place(parent_N)
    feeds["input_ids"] = np.arange(n)[None] + 5
    feeds["logit_rows"] = np.arange(n)
    feeds["features"] = np.arange(2 * n, dtype=np.float32).reshape(1, n, 2)
    sizes = {"N": n, "M": n, "S": CAPACITY}
    if graph.form == "contiguous":
        sizes |= {"A": len(feeds["src"]), "A+N": len(feeds["perm"])}
    return feeds, sizes


def pad_rows(
    graph: Graph, feeds: Any, sizes: Any, capacity: int, most: Any = None
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Returns padded feeds in arrays of their own, and their sizes."""
    given, sizes, wider = plan_padding(graph, feeds, sizes, capacity, most)
    arrays = {
        spec.name: np.empty(shape_of(spec, wider), given[spec.name].dtype) for spec in graph.inputs
    }
    PaddedRows(graph, sizes, wider, arrays).write(given)
    return arrays, wider


def written(feeds: Any, rows_S: np.ndarray) -> np.ndarray:
    """Returns the cache as a run would leave it, with a token for each row."""
    rows_S, new_N = rows_S.copy(), feeds["input_ids"][0]
    if "perm" in feeds:
        rows = np.concatenate([rows_S[feeds["src"]], new_N])[feeds["perm"]]
        begin = int(feeds["write_index"][0])
        rows_S[begin : begin + len(rows)] = rows
    elif "slots" in feeds:
        rows_S[feeds["slots"]] = new_N
    else:
        end = feeds["seqlens_k"][0] + 1
        rows_S[end - len(new_N) : end] = new_N
    return rows_S


@forms
def test_new_rows_and_those_kept_are_where_they_were(form: str, attention: str) -> None:
    rng, kept_S = (
        np.random.default_rng(0),
        {"exact": np.zeros(CAPACITY), "filled": np.zeros(CAPACITY)},
    )

    def move(slot_T: np.ndarray) -> None:
        for name, rows_S in kept_S.items():
            kept_S[name] = np.append(rows_S[slot_T], np.zeros(CAPACITY - len(slot_T)))

    graph, cache = graph_of(form, attention), open_cache(form, CAPACITY)
    if attention == "append":
        cache = SlotCache(CAPACITY, move)
    for n in (3, 6, 1, 2, 5, 1):
        parents = [int(rng.integers(i)) for i in range(1, n)]
        parent_N = np.array([0, *parents])
        feeds, sizes = feeds_of(graph, cache, parent_N)
        got, wider = pad_rows(graph, feeds, sizes, CAPACITY)
        assert wider["N"] == wider["M"] == padded_width(n, 64, WIDTHS)
        for name in OWN[form, attention] + COMMON:
            axes = SHAPES[name][1]
            expected = [wider[axis] if isinstance(axis, str) else axis for axis in axes]
            assert list(got[name].shape) == expected, name
        given = {name: feeds[name] for name in got}
        kept_S["exact"] = exact_S = written(given, kept_S["exact"])
        kept_S["filled"] = filled_S = written(got, kept_S["filled"])
        end = n - 1
        assert (got["features"][0, end:] == feeds["features"][0, end]).all()
        path = [n - 1]
        while path[0] > 0:
            path.insert(0, int(parent_N[path[0]]))
        cache.commit(path)
        attended = got["mask"][0, 0].any(axis=0)
        assert (exact_S[attended] == filled_S[attended]).all()
        assert (got["mask"][0, 0, :n] == feeds["mask"][0, 0]).all()


def test_the_example() -> None:
    cache = ContiguousCache(CAPACITY)
    graph = graph_of("contiguous")
    feeds_of(graph, cache, chain_parents(9))
    cache.commit(range(8))
    feeds_of(graph, cache, np.array([0, 0]))
    cache.commit([1])
    feeds, sizes = feeds_of(graph, cache, chain_parents(5))
    assert (feeds["src"].tolist(), feeds["perm"].tolist()) == ([9], [0, 1, 2, 3, 4, 5])
    got, _ = pad_rows(graph, feeds, sizes, CAPACITY)
    assert (got["src"].tolist(), got["perm"].tolist()) == ([9], [*range(17)])
    two = feeds | {"src": np.array([9, 11]), "perm": np.arange(7)}
    moved, _ = pad_rows(graph, two, sizes | {"A": 2, "A+N": 7}, CAPACITY)
    assert moved["src"].tolist() == [9, *[11] * 15]
    assert moved["perm"].tolist() == [0, 1, *range(16, 21), *range(2, 16), *range(21, 32)]


@pytest.mark.parametrize(("form", "attention"), [*OWN][1:])
def test_what_has_no_room_stays_as_it_is(form: str, attention: str) -> None:
    graph, cache = graph_of(form, attention), open_cache(form, CAPACITY)
    feeds_of(graph, cache, chain_parents(33))
    cache.commit(range(33))
    feeds, sizes = feeds_of(graph, cache, chain_parents(5))
    got, wider = pad_rows(graph, feeds, sizes, CAPACITY)
    fits = form == "slots"  # the same slots again
    assert wider["N"] == (16 if fits else 5)
    assert fits or all((got[name] == feeds[name]).all() for name in feeds)
    _, wider = pad_rows(graph, feeds, sizes, CAPACITY, {"N": 6, "M": 8})
    assert wider["N"] == 5
    wide, _ = pad_rows(graph, *feeds_of(graph, open_cache(form, 99), chain_parents(70)), 99)
    assert wide["input_ids"].shape == (1, 70)


def test_a_graph_without_a_cache() -> None:
    inputs = (TensorSpec("state", "float32", ("N", 3)), TensorSpec("level", "int64", (1,)))
    graph = Graph("g.onnx", "stateless", inputs, ())
    feeds = {"state": np.arange(6.0).reshape(2, 3), "level": np.array([2])}
    got, wider = pad_rows(graph, feeds, {"N": 2}, 1)
    assert got["state"].tolist() == [[0, 1, 2], *[[3, 4, 5]] * 15]
    assert (got["level"].tolist(), wider) == ([2], {"N": 16})
    assert padded_sizes(graph, {"N": 2}, 1, precision="fp8") == {"N": 8}
