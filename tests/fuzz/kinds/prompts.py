"""Prompts of all types: strings, messages, token ids and what is none of them."""

from pathlib import Path
from typing import Any

import mutations
from cases import Kind, Run, Wrong, refusing
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy


def cases() -> SearchStrategy[Any]:
    ids = st.lists(st.integers(0, 300) | mutations.values(), max_size=8)
    good_ids = st.lists(st.integers(0, 257), min_size=1, max_size=40)
    content = st.one_of(mutations.texts(20), mutations.texts(20), _parts(), mutations.values())
    role = st.sampled_from(("user", "assistant", "system")) | mutations.values()
    message = st.fixed_dictionaries(
        {}, optional={"role": role, "content": content, "name": mutations.values()}
    )
    messages = st.lists(message, max_size=4)
    special = st.one_of(
        st.builds(lambda data: {"$": "bytes", "hex": data.hex()}, st.binary(max_size=6)),
        st.builds(lambda items: {"$": "tuple", "items": items}, good_ids),
        st.builds(lambda items: {"$": "array", "items": items}, good_ids),
        st.just({"$": "set"}),
        st.just({"$": "iterator"}),
    )
    long = st.builds(
        lambda text, times: {"$": "repeat", "text": text, "times": times},
        st.sampled_from(("a", "ab ", "é")),
        st.sampled_from((50, 90, 96, 97, 1000, 100_000)),
    )
    prompt = st.one_of(
        mutations.texts(40), mutations.texts(40), good_ids, ids, messages, messages, special, long
    )
    return st.fixed_dictionaries(
        {"prompt": prompt | mutations.values()},
        optional={
            "raw": st.booleans(),
            "system": mutations.texts() | mutations.values(),
            "reuse": st.booleans(),
        },
    )


def _parts() -> SearchStrategy[Any]:
    """Draws contents in parts, as OpenAI's messages have them."""
    part = st.one_of(
        st.builds(lambda text: {"type": "text", "text": text}, mutations.texts()),
        st.just({"type": "image_url", "image_url": {"url": "http://x"}}),
        mutations.values(),
    )
    return st.lists(part, max_size=3)


def _expand(value: Any) -> Any:
    if isinstance(value, dict) and value.get("$") in ("bytes", "tuple", "array", "set", "iterator"):
        import numpy as np

        return {
            "bytes": lambda: bytes.fromhex(value["hex"]),
            "tuple": lambda: tuple(value["items"]),
            "array": lambda: np.array(value["items"], np.int32),
            "set": lambda: {97, 98},
            "iterator": lambda: iter([97, 98]),
        }[value["$"]]()
    return mutations.expand(value)


def open_kind(folder: Path) -> Run:
    import tiny_bundle

    import spec_runtime

    bundle = tiny_bundle.write(folder / "bundle")
    engine = spec_runtime.load(bundle, "medusa", threads=1)
    plain = engine.with_drafter("none")

    def run(case: dict[str, Any]) -> None:
        options = {key: _expand(value) for key, value in case.items() if key != "prompt"}
        with refusing():
            got = engine.generate(_expand(case["prompt"]), max_new_tokens=5, **options)
        pieces = "".join(engine.stream(_expand(case["prompt"]), max_new_tokens=5, **options))
        expected = plain.generate(_expand(case["prompt"]), max_new_tokens=5, **options)
        if not got.token_ids == expected.token_ids or pieces != expected.text:
            raise Wrong(f"answers differ: {got.token_ids}, {expected.token_ids}, {pieces!r}")

    return run


KIND = Kind("prompt", cases, open_kind, weight=12)
