"""Manifests: types, sizes, depth, names and paths; whoever wrote them, the tokens stay right."""

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


# Values that much depends on, and others that they may be set to.
SENSITIVE: dict[tuple[Any, ...], SearchStrategy[Any]] = {
    ("target", "max_length"): st.sampled_from((1, 2, 5, 10**10, 10**18)),
    ("target", "scratch"): st.sampled_from((1, 2, 5, 10**10, 10**18)),
    ("target", "dims", "vocab_size"): st.integers(1, 300),
    ("target", "taps"): st.lists(st.integers(-2, 3), max_size=2),
    ("target", "precision"): st.sampled_from(("fp16", "int8", "int4", "")),
    ("graphs", "target", "form"): st.sampled_from(("slots", "contiguous", "stateless")),
    ("graphs", "target", "attention"): st.sampled_from(("bias", "full_buffer", "chain")),
    ("graphs", "target", "inputs", 0, "dtype"): st.sampled_from(("int32", "float32", "bool")),
    ("graphs", "target", "inputs", 2, "shape"): st.sampled_from(([1, "N"], [1, 1, "S", "N"], [])),
    ("graphs", "target", "inputs", 6, "shape"): st.sampled_from(([1, 1, "S", 5], [1, 1, 9, 4])),
    ("graphs", "target", "outputs", 0, "shape"): st.sampled_from(([1, "M"], ["M", 9], ["Q", 258])),
    ("graphs", "target", "outputs", 1, "dtype"): st.sampled_from(("float16", "int64", "bfloat16")),
    ("drafters", 0, "config", "num_masks"): st.integers(-2, 40) | mutations.values(),
    ("drafters", 0, "config", "mask_token_base"): st.integers(-2, 300) | mutations.values(),
    ("drafters", 0, "config", "inputs"): st.sampled_from(("tokens", "features", "")),
    ("drafters", 0, "config", "features"): st.lists(
        st.sampled_from(("features", "taps.1", "logits", "")), max_size=2
    ),
    ("drafters", 0, "config", "taps"): st.lists(st.integers(-2, 3), max_size=2),
    ("drafters", 0, "draft_token_ids"): st.sampled_from(("tokenizer.json", "x")),
    ("drafters", 0, "name"): st.sampled_from(("hydra", "eagle", "skip_layer", "draft_model")),
    ("drafters", 0, "trees", "max_nodes"): st.integers(-2, 40) | mutations.values(),
    ("drafters", 0, "trees", "min_probability"): st.floats(0, 1) | mutations.values(),
    ("drafters", 0, "trees", "lookup_nodes"): st.integers(-2, 40) | mutations.values(),
    ("drafters", 1, "trees"): st.fixed_dictionaries(
        {"paths": st.lists(st.lists(st.integers(-1, 4), max_size=3), max_size=5)}
    ),
    ("drafters", 0, "calibration", "reliability"): st.lists(st.lists(st.floats(0, 1), max_size=3)),
    ("drafters", 1, "calibration", "accuracy"): st.lists(st.lists(st.floats(0, 1), max_size=3)),
    ("tokenizer", "special_ids", "eos"): st.lists(st.integers(-1, 300) | mutations.values()),
    ("tokenizer", "special_ids", "bos"): st.integers(-1, 300) | mutations.values(),
    ("tokenizer", "chat_template"): st.sampled_from(("tokenizer.json", None, "../x")),
}


def _sensitive() -> SearchStrategy[Any]:
    edit = st.sampled_from(list(SENSITIVE)).flatmap(
        lambda at: st.fixed_dictionaries(
            {"do": st.just("set"), "at": st.just(list(at)), "value": SENSITIVE[at]}
        )
    )
    return st.lists(edit, min_size=1, max_size=2)


def cases() -> SearchStrategy[Any]:
    changes = st.fixed_dictionaries({"edits": mutations.edits() | _sensitive()})
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


KIND = Kind("manifest", cases, open_kind, weight=14)
