"""Manifests: types, sizes, depth, names and paths; whoever wrote them, the tokens stay right."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import mutations
from cases import Kind, Refused, Run, Wrong, refusing
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from shell import call, require_kept_promises

DRAFTERS = (None, "parallelspec", "medusa", "prompt_lookup", "lookahead", "none")
PROMPT = [97, 98, 99]


def cases() -> SearchStrategy[Any]:
    changes = st.fixed_dictionaries({"edits": mutations.edits()})
    damage = st.fixed_dictionaries({"damage": mutations.damages()})
    about = st.fixed_dictionaries(
        {"drafter": st.sampled_from(DRAFTERS), "show": st.sampled_from((False, False, True))}
    )
    return st.tuples(st.one_of(changes, changes, changes, damage), about).map(
        lambda pair: pair[0] | pair[1]
    )


def open_kind(folder: Path) -> Run:
    from tiny_bundle import Copy

    from spec_runtime import cli

    copy = Copy(folder)
    file = copy.folder / "manifest.json"
    logging.getLogger("spec_runtime").setLevel(logging.ERROR)

    def run(case: dict[str, Any]) -> None:
        if "edits" in case:
            text = mutations.dump(mutations.edited(copy.manifest, case["edits"]))
            file.write_text(text)
        else:
            whole = (copy.whole / "manifest.json").read_bytes()
            file.write_bytes(mutations.damaged(whole, case["damage"]))
        if case["show"]:
            printed = call(cli.main, ["show", "--bundle", str(copy.folder)])
            require_kept_promises(printed, prints_text=False)
        else:
            generate_as_plain(copy.folder, case["drafter"])

    return run


def generate_as_plain(folder: Path, drafter: str | None, verify: bool = True) -> None:
    """Loads a bundle and generates; raises Wrong if plain decoding says other tokens."""
    import spec_runtime

    with refusing():
        engine = spec_runtime.load(folder, drafter, threads=1, verify=verify)
        got = engine.generate(PROMPT, max_new_tokens=6).token_ids
    try:
        with refusing():
            expected = engine.with_drafter("none").generate(PROMPT, max_new_tokens=6).token_ids
    except Refused as refused:
        raise Wrong(f"plain decoding refuses what a drafter takes: {refused}") from refused
    if got != expected:
        raise Wrong(f"tokens differ from plain decoding: {got} and {expected}")


KIND = Kind(
    "manifest",
    "a manifest with changed values, types, names, paths, depth; load and generate, or show",
    cases,
    open_kind,
    weight=14,
)
