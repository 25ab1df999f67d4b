"""Machine profiles: a damaged one is ignored with a warning, and none changes a token."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import mutations
from cases import Kind, Run, Wrong, refusing
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

PROMPT = [97, 98, 99]


def cases() -> SearchStrategy[Any]:
    return st.one_of(
        st.fixed_dictionaries({"edits": mutations.edits()}),
        st.fixed_dictionaries({"edits": mutations.edits()}),
        st.fixed_dictionaries({"damage": mutations.damages()}),
    )


def open_kind(folder: Path) -> Run:
    import tiny_bundle

    import spec_runtime
    from spec_runtime.bundle import manifest as bundles
    from spec_runtime.pace import profile
    from spec_runtime.trees.budget import Budget, Grown, Static

    logging.getLogger("spec_runtime").setLevel(logging.ERROR)
    path = tiny_bundle.write(folder / "bundle")
    costs = profile.Costs(((1.0, 1.0), (4.0, 1.5)), 0.5, 0.1, 0.1, 1.1, 0.1)
    candidates = (
        profile.Candidate("plain", None, tokens_per_second=100.0, speedup=1.0),
        profile.Candidate("4 nodes", Budget(4, growth=Grown(0.1)), 3.5, 1.2, 120.0, 1.3, 1.8),
        profile.Candidate("static", Budget(3, growth=Static(((0,), (1,)))), 3.0, 1.1),
    )
    key = profile.key_of(bundles.read(path), "medusa", 1)
    file = profile.write(profile.Profile(key, costs, "run", candidates, "4 nodes"))
    whole = file.read_bytes()
    document = profile.to_json(profile.Profile(key, costs, "run", candidates, "4 nodes"))
    engine = spec_runtime.load(path, "medusa", threads=1)
    if not engine.is_tuned:
        raise Wrong("the whole profile is not found")
    expected = engine.with_drafter("none").generate(PROMPT, max_new_tokens=12).token_ids

    def run(case: dict[str, Any]) -> None:
        if "edits" in case:
            file.write_text(mutations.dump(mutations.edited(document, case["edits"])))
        else:
            file.write_bytes(mutations.damaged(whole, case["damage"]))
        with refusing():
            tuned = engine.with_drafter("medusa")
            got = tuned.generate(PROMPT, max_new_tokens=12).token_ids
        if got != expected:
            raise Wrong(f"tokens differ from plain decoding: {got} and {expected}")

    return run


KIND = Kind(
    "machine profile",
    "a profile with changed values, types, keys, bytes; load and generate",
    cases,
    open_kind,
    weight=10,
)
