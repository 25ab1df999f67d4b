"""Machine profiles: a damaged one is dropped and measured anew, and none changes a token."""

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mutations
from cases import Kind, Run, Wrong
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

PROMPT = [97, 98, 99]
MEASURED = {"nodes": 3.5, "expected_speedup": 1.2, "tokens_per_second": 120.0, "speedup": 1.3}
MEASURED |= {"accepted_length": 1.8}
RATES = MEASURED | {"sampled_gain": {"accepted_length": 1.6, "speedup": 1.2}, "sampled_trust": 0.8}
NO_RATES: dict[str, Any] = dict.fromkeys(RATES) | {"sampled_trust": 1.0}
GROWN = {"max_nodes": 4, "min_probability": 0.01, "reliability": [[0.1, 0.1], [0.5, 0.4]]}
GROWN |= {"paths": None}
STATIC = GROWN | {"max_nodes": 5, "paths": [[0], [1], [0, 0]]}
# A profile with all that one can have; its key is that of the bundle. The first candidate is taken.
DOCUMENT: dict[str, Any] = {
    "key": {},
    "costs": {
        "verify": [[1.0, 1.0], [4.0, 1.5]],
        "draft": 0.5,
        "level": 0.1,
        "host": 0.1,
        "plain": 1.1,
        "prefill": 0.1,
        "context": 20,
        "far": {"context": 60, "verify": [[1.0, 2.0], [4.0, 2.5]], "plain": 2.1, "spread": 1.0},
        "spread": 1.1,
    },
    "curve": "run",
    "candidates": [
        {"name": "chosen", "trees": GROWN} | RATES,
        {"name": "plain", "trees": None} | NO_RATES,
    ],
    "chosen": "chosen",
    "takes": 1,
}


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the place of each value within `value`, see mutations.place."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*at, key)
        if isinstance(item, dict | list):
            yield from _places(item, (*at, key))


def _field_edits() -> SearchStrategy[list[dict[str, Any]]]:
    """Draws other values, mostly numbers, for one or two of all fields."""
    at = st.sampled_from([*_places(DOCUMENT)]).map(list)
    value = mutations.numbers() | mutations.numbers() | mutations.values()
    edit = st.fixed_dictionaries({"do": st.just("set"), "at": at, "value": value})
    return st.lists(edit, min_size=1, max_size=2)


def _trees() -> SearchStrategy[list[dict[str, Any]]]:
    """Draws the paths of a static tree, of any ranks."""
    rank = st.integers(-1, 4) | st.sampled_from((10**9, 2**62))
    paths = st.lists(st.lists(rank, max_size=3), max_size=5)
    at = st.just(["candidates", 0, "trees", "paths"])
    return st.tuples(st.fixed_dictionaries({"do": st.just("set"), "at": at, "value": paths})).map(
        list
    )


def cases() -> SearchStrategy[Any]:
    about = st.fixed_dictionaries(
        {"is_static": st.booleans(), "temperature": st.sampled_from((0.0, 0.7, 1.0))}
    )
    change = st.one_of(
        st.fixed_dictionaries({"edits": mutations.edits()}),
        st.fixed_dictionaries({"edits": _field_edits()}),
        st.fixed_dictionaries({"edits": _field_edits()}),
        st.fixed_dictionaries({"edits": _trees()}),
        st.fixed_dictionaries({"damage": mutations.damages()}),
        st.fixed_dictionaries({"stands": st.sampled_from(("a folder", "a link", "a pipe"))}),
    )
    return st.tuples(change, about).map(lambda pair: pair[0] | pair[1])


def open_kind(folder: Path) -> Run:
    import tiny_bundle

    import spec_runtime
    from spec_runtime.bundle import manifest as bundles
    from spec_runtime.files import mapping
    from spec_runtime.pace import first_use, profile

    logging.getLogger("spec_runtime").setLevel(logging.ERROR)
    first_use.PASS_SECONDS = 0.0
    bundle = tiny_bundle.write(folder / "bundle")
    key = profile.key_of(bundles.read(bundle), "medusa", 1)
    whole = DOCUMENT | {"key": mapping.to_json(key)}
    file = profile.write(mapping.from_mapping(profile.Profile, whole, "profile"))
    if not spec_runtime.load(bundle, "medusa", threads=1).is_tuned:
        raise Wrong("the whole profile is not found")
    plain = spec_runtime.load(bundle, "none", threads=1)

    def run(case: dict[str, Any]) -> None:
        document = whole
        if case["is_static"]:
            candidate = whole["candidates"][0] | {"trees": STATIC}
            document = whole | {"candidates": [candidate]}
        content = mutations.dump(document).encode()
        if "edits" in case:
            content = mutations.dump(mutations.edited(document, case["edits"])).encode()
        elif "damage" in case:
            content = mutations.damaged(content, case["damage"])
        _put(file, content, case.get("stands"))
        options = {"max_new_tokens": 12, "temperature": case["temperature"], "seed": 1}
        got = spec_runtime.load(bundle, "medusa", threads=1).generate(PROMPT, **options).token_ids
        expected = plain.generate(PROMPT, **options).token_ids
        if got != expected:
            raise Wrong(f"tokens differ from plain decoding: {got} and {expected}")
        if "stands" not in case and profile.find(key) is None:
            raise Wrong("a damaged profile was not replaced")

    return run


def _put(file: Path, content: bytes, stands: str | None) -> None:
    """Writes the file, or puts something else in its place."""
    if file.is_dir():
        shutil.rmtree(file)
    file.unlink(missing_ok=True)
    if stands == "a folder":
        (file / "x").mkdir(parents=True)
    elif stands == "a link":
        file.symlink_to(file)
    elif stands == "a pipe":
        os.mkfifo(file)
    else:
        file.write_bytes(content)


KIND = Kind("machine profile", cases, open_kind, weight=10)
