"""Both caches against a plain list of what should be there."""

from itertools import pairwise

import numpy as np
import pytest

from spec_runtime.loop import kv
from spec_runtime.loop.kv import Cache, ContiguousCache, SlotCache, open_cache
from spec_runtime.trees.tree import TokenTree, ancestors, chain_parents, depths

CAPACITY = 48


class Buffer:
    """The rows a graph would hold: one label a slot."""

    def __init__(self) -> None:
        self.label_S = np.full(CAPACITY, -1)

    def open(self, form: str) -> Cache:
        """Returns the cache of a graph that writes here."""
        is_moved = form == "append"
        return SlotCache(CAPACITY, self.move) if is_moved else open_cache(form, CAPACITY)

    def move(self, slot_T: np.ndarray) -> None:
        self.label_S = np.append(self.label_S[slot_T], np.full(CAPACITY - len(slot_T), -1))

    def run(self, feeds: dict[str, np.ndarray], labels: np.ndarray) -> None:
        if "slots" in feeds:
            self.label_S[feeds["slots"]] = labels
        else:
            rows = np.concatenate([self.label_S[feeds["src"]], labels])[feeds["perm"]]
            begin = feeds["write_index"][0]
            assert begin + len(rows) <= CAPACITY
            self.label_S[begin : begin + len(rows)] = rows


def random_parents(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.array([0] + [int(rng.integers(0, i)) for i in range(1, n)])


@pytest.mark.parametrize("form", ["slots", "contiguous"])
def test_the_nodes_of_a_block_attend_each_other_and_no_sibling_before_it(form: str) -> None:
    feeds = open_cache(form, CAPACITY).place(np.zeros(4, np.int64), block=2)
    slots = feeds["slots"] if form == "slots" else np.arange(4)
    attended = feeds["mask"][0, 0][:, slots].astype(int)
    assert attended.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 1], [1, 0, 1, 1]]


@pytest.mark.parametrize("form", ["slots", "append", "contiguous"])
@pytest.mark.parametrize("seed", range(15))
def test_against_a_list(form: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node attends exactly the committed rows, its ancestors and itself, whatever was
    accepted, left over or truncated before."""
    if seed % 2:  # rows are moved when there is no room, not at each hole
        monkeypatch.setattr(kv, "WIDTHS", (1,))
    rng, buffer = np.random.default_rng(seed), Buffer()
    cache = buffer.open(form)
    committed: list[int] = []
    label = 0
    for _ in range(120):
        if len(committed) > CAPACITY - 16 or (committed and rng.random() < 0.1):
            length = int(rng.integers(0, len(committed) + 1))
            cache.truncate(length)
            del committed[length:]
        n = int(rng.integers(1, 9))
        parent_N = random_parents(rng, n)
        labels = np.arange(label, label + n)
        label += n
        feeds = cache.place(parent_N)
        buffer.run(feeds, labels)

        assert cache.length == len(committed)
        assert (feeds["position_ids"] == len(committed) + depths(parent_N)).all()
        assert feeds["mask"].shape == (1, 1, n, CAPACITY)
        for node, attended_S in enumerate(feeds["mask"][0, 0]):
            wanted = committed + labels[ancestors(parent_N)[node]].tolist()
            assert sorted(buffer.label_S[attended_S]) == sorted(wanted)
        in_use = np.isin(buffer.label_S, [*committed, *labels])
        if form == "append":
            assert feeds["slots"].tolist() == [*range(feeds["seqlens_k"][0] + 1)][-n:]
        if form != "contiguous":
            assert feeds["seqlens_k"].tolist() == [np.flatnonzero(in_use).max()]
        else:
            assert buffer.label_S[: len(committed)].tolist() == committed, "not compacted"

        if rng.random() < 0.9:  # else: interrupted between place and commit
            path = TokenTree(labels, parent_N).path(int(rng.integers(0, n)))
            path = path[: int(rng.integers(0, len(path) + 1))]
            cache.commit(path)
            committed += labels[path].tolist()


def random_forest(rng: np.random.Generator, n: int) -> np.ndarray:
    """Several roots, anywhere in the order: each its own parent."""
    return np.array([0] + [int(rng.integers(0, i + 1)) for i in range(1, n)])


@pytest.mark.parametrize("form", ["slots", "append", "contiguous"])
@pytest.mark.parametrize("seed", range(15))
def test_levels_of_a_forest_against_one_placement(form: str, seed: int) -> None:
    """What each node attends, its position and its slot do not depend on the levels' borders."""
    rng, buffer, whole_buffer = np.random.default_rng(seed), Buffer(), Buffer()
    cache, whole = buffer.open(form), whole_buffer.open(form)
    committed: list[int] = []
    label = 0
    for _ in range(60):
        if len(committed) > CAPACITY - 20 or rng.random() < 0.1:
            length = int(rng.integers(0, len(committed) + 1))
            cache.truncate(length)
            whole.truncate(length)
            del committed[length:]
        n = int(rng.integers(2, 12))
        parent_N = random_forest(rng, n)
        labels = np.arange(label, label + n)
        label += n
        borders = [0, *sorted({int(b) for b in rng.integers(1, n, 3)}), n]
        once = whole.place(parent_N)
        whole_buffer.run(once, labels)
        root_N = np.array([node == parent for node, parent in enumerate(parent_N.tolist())])
        assert (once["position_ids"][0, root_N] == len(committed)).all()
        for first, end in pairwise(borders):
            feeds = cache.place(parent_N[:end], first)
            buffer.run(feeds, labels[first:end])
            assert cache.length == len(committed)
            assert (feeds["position_ids"] == once["position_ids"][:, first:end]).all()
            assert (feeds["mask"][0, 0] == once["mask"][0, 0, first:end]).all()
            for node, attended_S in enumerate(feeds["mask"][0, 0], first):
                path = [node]
                while parent_N[path[-1]] != path[-1]:
                    path.append(int(parent_N[path[-1]]))
                wanted = committed + labels[path].tolist()
                assert sorted(buffer.label_S[attended_S]) == sorted(wanted)
            if form != "contiguous":
                assert (feeds["slots"] == once["slots"][first:end]).all()
                assert feeds["seqlens_k"][0] >= np.flatnonzero(feeds["mask"].any((0, 1, 2))).max()
        used_S = once["mask"][0, 0].any(0)
        assert (buffer.label_S[used_S] == whole_buffer.label_S[used_S]).all()
        if rng.random() < 0.7:  # else: the levels are forgotten
            path = sorted({int(node) for node in rng.integers(0, n, 3)})
            cache.commit(path)
            whole.commit(path)
            committed += labels[path].tolist()


@pytest.mark.parametrize("kind", [SlotCache, ContiguousCache])
def test_a_level_needs_the_levels_before_it(kind: type) -> None:
    cache: Cache = kind(16)
    forest = np.array([0, 1, 0, 1])
    with pytest.raises(AssertionError):
        cache.place(forest, 2)
    for wrong in (1, 3):
        cache.place(forest[:2])
        with pytest.raises(AssertionError):
            cache.place(forest, wrong)
    cache.place(forest[:2])
    cache.place(forest, 2)
    cache.commit([0, 2])
    with pytest.raises(AssertionError):
        cache.place(forest, 2)
    assert cache.length == 2


def test_mask_grid_of_a_forest_level_by_level() -> None:
    for cache in (SlotCache(9), ContiguousCache(9)):
        cache.place(chain_parents(2))
        cache.commit([0, 1])
        forest = np.array([0, 1, 0, 1, 3])  # two roots, a child each, a grandchild
        rows, positions = [], []
        for first, end in ((0, 2), (2, 4), (4, 5)):
            feeds = cache.place(forest[:end], first)
            rows += ["".join("x" if c else "." for c in row) for row in feeds["mask"][0, 0]]
            positions += feeds["position_ids"][0].tolist()
        assert rows == ["xxx......", "xx.x.....", "xxx.x....", "xx.x.x...", "xx.x.xx.."]
        assert positions == [2, 2, 3, 3, 4]


def test_slots_never_move_and_the_lowest_free_are_taken() -> None:
    cache = SlotCache(10)
    assert cache.place(chain_parents(3))["slots"].tolist() == [0, 1, 2]
    cache.commit([0, 1, 2])
    # tree of 4 in slots 3..6; nodes 0 and 2 stay, in slots 3 and 5
    assert cache.place(np.array([0, 0, 0, 1]))["slots"].tolist() == [3, 4, 5, 6]
    cache.commit([0, 2])
    feeds = cache.place(np.array([0, 0]))
    assert feeds["slots"].tolist() == [4, 6]
    assert feeds["seqlens_k"].tolist() == [6]
    assert feeds["position_ids"].tolist() == [[5, 6]]
    rows = ["".join("x" if cell else "." for cell in row) for row in feeds["mask"][0, 0]]
    assert rows == [
        "xxxxxx....",  # the root is in slot 4, a hole refilled
        "xxxxxxx...",
    ]
    cache.commit([0])
    cache.truncate(4)  # rows 4 and 5 were in slots 5 and 4
    feeds = cache.place(np.array([0]))
    assert feeds["slots"].tolist() == [4]
    assert feeds["seqlens_k"].tolist() == [4]


def test_appended_rows_move_together_before_holes_make_a_mask_wider() -> None:
    moved: list[list[int]] = []
    cache = SlotCache(600, lambda slot_T: moved.append(slot_T.tolist()))
    cache.place(chain_parents(100))
    cache.commit(range(100))
    for step in range(13):  # of eight nodes, of which the first and the last stay
        assert not moved
        feeds = cache.place(np.zeros(8, np.int64))
        if step < 12:
            assert feeds["slots"].tolist() == [*range(100 + 8 * step, 108 + 8 * step)]
            cache.commit([0, 7])
    # a padded tree would have ended behind slot 255, and without holes it does not
    kept = [slot for step in range(12) for slot in (100 + 8 * step, 107 + 8 * step)]
    assert moved == [[*range(100), *kept]]
    assert feeds["slots"].tolist() == [*range(124, 132)]
    assert cache.slots(122, 124).tolist() == [122, 123]
    # levels that were placed before are moved, too
    cache.commit([7])
    cache.place(chain_parents(40))
    cache.commit([39])
    cache.place(chain_parents(24))
    feeds = cache.place(chain_parents(26), first=24)
    assert len(moved) == 2
    assert feeds["slots"].tolist() == [150, 151]
    assert feeds["mask"][0, 0].sum(1).tolist() == [151, 152]


def test_tree_mask_grid_behind_a_prefix() -> None:
    for cache in (SlotCache(9), ContiguousCache(9)):
        cache.place(chain_parents(2))
        cache.commit([0, 1])
        mask = cache.place(np.array([0, 0, 0, 1, 2]))["mask"][0, 0]
        assert ["".join("x" if cell else "." for cell in row) for row in mask] == [
            "xxx......",
            "xxxx.....",
            "xxx.x....",
            "xxxx.x...",
            "xxx.x.x..",
        ]


def test_contiguous_folds_the_move_into_the_next_write() -> None:
    cache = ContiguousCache(16)
    feeds = cache.place(chain_parents(4))
    assert feeds["write_index"].tolist() == [0]
    # nothing to move: one dummy row, written after the new ones
    assert feeds["src"].tolist() == [0]
    assert feeds["perm"].tolist() == [1, 2, 3, 4, 0]
    cache.commit([0, 1, 2, 3])
    cache.place(np.array([0, 0, 0, 2]))  # slots 4..7
    cache.commit([0, 2, 3])
    assert cache.length == 7
    feeds = cache.place(chain_parents(2))
    assert feeds["write_index"].tolist() == [5]
    assert feeds["src"].tolist() == [6, 7]
    assert feeds["perm"].tolist() == [0, 1, 2, 3]
    assert feeds["position_ids"].tolist() == [[7, 8]]


def test_contiguous_truncates_rows_that_wait_to_be_moved() -> None:
    cache = ContiguousCache(16)
    cache.place(np.array([0, 0, 0, 2]))
    cache.commit([0, 2, 3])
    cache.truncate(2)
    feeds = cache.place(chain_parents(1))
    assert (feeds["write_index"].tolist(), feeds["src"].tolist()) == ([1], [2])


@pytest.mark.parametrize("kind", [SlotCache, ContiguousCache])
def test_feed_types(kind: type) -> None:
    cache: Cache = kind(8)
    feeds = cache.place(np.array([0, 0]))
    int32 = {"seqlens_k"}
    for name, value in feeds.items():
        wanted = np.bool_ if name == "mask" else np.int32 if name in int32 else np.int64
        assert value.dtype == wanted, name


@pytest.mark.parametrize("kind", [SlotCache, ContiguousCache])
def test_misuse_is_noticed(kind: type) -> None:
    cache: Cache = kind(4)
    with pytest.raises(AssertionError):
        cache.commit([0])
    with pytest.raises(AssertionError):
        cache.place(chain_parents(5))
    with pytest.raises(AssertionError):
        cache.truncate(1)


@pytest.mark.parametrize("form", ["slots", "contiguous"])
def test_an_unplaced_node_gives_its_slot_back(form: str) -> None:
    cache = open_cache(form, 16)
    tree = np.array([0, 0, 1])
    cache.place(tree)
    again = []
    for parent in (1, 3):
        again.append(cache.place(np.append(tree, parent), first=3))
        cache.unplace(3)
    assert [feeds["position_ids"].tolist() for feeds in again] == [[[2]], [[0]]]
    attended = [np.flatnonzero(feeds["mask"]).tolist() for feeds in again]
    assert attended == [[0, 1, 3], [3]]
    cache.commit([0, 2])
    assert cache.length == 2
    for wrong in (0, 4):
        cache.place(tree)
        with pytest.raises(AssertionError):
            cache.unplace(wrong)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(KeyError):
        open_cache("stateless", 4)
