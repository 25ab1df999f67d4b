"""Tokenizers: structural changes of tokenizer.json, and components that blow texts up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mutations
from cases import Kind, Run, Wrong, refusing
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

TEXTS = ("", "hello", "a" * 60, "grüß € 😀", "<s></s> <s", "\x00\u2028\t", " " * 30)


def _components() -> SearchStrategy[Any]:
    """Draws normalizers, pre-tokenizers, decoders and post-processors, fitting or not."""
    patterns = st.sampled_from(
        ({"String": "a"}, {"String": ""}, {"Regex": "(a+)+$"}, {"Regex": "("}, {"Regex": ".*"})
    )
    contents = st.sampled_from(("", "aa", "a" * 1000, "\x00", "é"))
    replace = st.fixed_dictionaries(
        {"type": st.just("Replace"), "pattern": patterns, "content": contents}
    )
    split = st.fixed_dictionaries(
        {
            "type": st.just("Split"),
            "pattern": patterns,
            "behavior": st.sampled_from(("Removed", "Isolated", "MergedWithNext", "no")),
            "invert": st.booleans(),
        }
    )
    plain = st.sampled_from(
        [
            {"type": name}
            for name in (
                *("NFC", "NFKD", "Lowercase", "StripAccents", "Nmt", "BertNormalizer", "Prepend"),
                *("Whitespace", "WhitespaceSplit", "Digits", "Punctuation", "Metaspace", "Fuse"),
                *("ByteFallback", "WordPiece", "BPEDecoder", "Strip", "CTC", "ByteLevel", "x"),
                *("TemplateProcessing", "RobertaProcessing", "BertProcessing"),
            )
        ]
    )
    fuller = st.sampled_from(
        [
            {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            },
            {"type": "Prepend", "prepend": "a" * 1000},
            {"type": "Strip", "content": "a", "start": 2**40, "stop": 5},
            {"type": "CTC", "pad_token": "a", "word_delimiter_token": "b", "cleanup": True},
            {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
            {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            },
            {
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 40,
                "pair": [{"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {},
            },
            {"type": "RobertaProcessing", "sep": ["</s>", 9999], "cls": ["<s>", -1]},
        ]
    )
    one = st.one_of(replace, split, plain, fuller)
    many = st.lists(one, min_size=1, max_size=3)
    keys = ("normalizers", "pretokenizers", "decoders", "processors")
    times = st.sampled_from((1, 1, 1, 10, 40))
    in_turn = st.builds(
        lambda key, items, times: {"type": "Sequence", key: items * times},
        st.sampled_from(keys),
        many,
        times,
    )
    return one | in_turn


def cases() -> SearchStrategy[Any]:
    sections = st.sampled_from(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    set_to = st.dictionaries(sections, _components(), min_size=1, max_size=2)
    about = {"text": st.sampled_from(TEXTS) | mutations.texts(40), "ids": _ids()}
    return st.one_of(
        st.fixed_dictionaries({"edits": mutations.edits(), **about}),
        st.fixed_dictionaries({"set": set_to, **about}),
        st.fixed_dictionaries({"set": set_to, "edits": mutations.edits(1), **about}),
    )


def _ids() -> SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 257), max_size=8)


def open_kind(folder: Path) -> Run:
    from tiny_bundle import Copy

    import spec_runtime
    from spec_runtime.text import TextStream

    copy = Copy(folder)
    file = copy.folder / "tokenizer.json"
    document = json.loads(file.read_text())

    def run(case: dict[str, Any]) -> None:
        changed = document | case.get("set", {})
        file.write_text(mutations.dump(mutations.edited(changed, case.get("edits", []))))
        with refusing():
            engine = spec_runtime.load(copy.folder, "medusa", threads=1, verify=False)
            ids = engine.encode(case["text"])
            result = engine.generate(ids, max_new_tokens=4, stop=("zz",))
            engine.generate(case["text"], raw=True, max_new_tokens=2)
            whole = engine.tokenizer.decode(case["ids"])
            stream = TextStream(engine.tokenizer.decode)
            for token in case["ids"]:
                stream.push(token)
            stream.finish()
        if not isinstance(whole, str) or not isinstance(result.text, str):
            raise Wrong(f"decoding gives {whole!r}, not text")

    return run


KIND = Kind(
    "tokenizer",
    "tokenizer.json with changed structure and odd components; encode, generate, decode",
    cases,
    open_kind,
    weight=10,
)
