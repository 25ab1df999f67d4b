"""Tokenizers: structural changes of tokenizer.json, and components that blow texts up."""

import json
from pathlib import Path
from typing import Any

import mutations
from cases import Kind, Run, Wrong, refusing
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

TEXTS = ("", "hello", "a" * 60, "grüß € 😀", "<s></s> <s", "\x00\u2028\t", " " * 30)


PATTERNS = st.sampled_from(
    ({"String": "a"}, {"String": ""}, {"Regex": "(a+)+$"}, {"Regex": "("}, {"Regex": ".*"})
)
REPLACE = st.fixed_dictionaries(
    {
        "type": st.just("Replace"),
        "pattern": PATTERNS,
        "content": st.sampled_from(("", "aa", "a" * 1000, "\x00", "é")),
    }
)
SPLIT = st.fixed_dictionaries(
    {
        "type": st.just("Split"),
        "pattern": PATTERNS,
        "behavior": st.sampled_from(("Removed", "Isolated", "MergedWithNext", "no")),
        "invert": st.booleans(),
    }
)
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
METASPACE = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}
COMPONENTS: dict[str, tuple[str, SearchStrategy[Any]]] = {
    "normalizer": (
        "normalizers",
        REPLACE
        | st.sampled_from(
            (
                *({"type": name} for name in ("NFC", "NFKD", "Lowercase", "StripAccents", "Nmt")),
                {"type": "Prepend", "prepend": "a" * 1000},
                {"type": "Strip", "strip_left": True, "strip_right": True},
                {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
                {"type": "BertNormalizer"},
            )
        ),
    ),
    "pre_tokenizer": (
        "pretokenizers",
        SPLIT
        | st.sampled_from(
            (
                *({"type": name} for name in ("Whitespace", "WhitespaceSplit", "UnicodeScripts")),
                {"type": "Digits", "individual_digits": True},
                {"type": "Punctuation", "behavior": "Isolated"},
                BYTES,
                METASPACE,
                {"type": "no"},
            )
        ),
    ),
    "post_processor": (
        "processors",
        st.sampled_from(
            (
                BYTES,
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
                {
                    "type": "RobertaProcessing",
                    "sep": ["</s>", 9999],
                    "cls": ["<s>", 0],
                    "trim_offsets": True,
                    "add_prefix_space": True,
                },
                {"type": "BertProcessing", "sep": ["</s>", -1], "cls": ["<s>", 0]},
            )
        ),
    ),
    "decoder": (
        "decoders",
        REPLACE
        | st.sampled_from(
            (
                *({"type": name} for name in ("Fuse", "ByteFallback")),
                {"type": "Strip", "content": "a", "start": 2**40, "stop": 5},
                {"type": "CTC", "pad_token": "a", "word_delimiter_token": "b", "cleanup": True},
                {"type": "WordPiece", "prefix": "##", "cleanup": True},
                {"type": "BPEDecoder", "suffix": "a"},
                BYTES,
                METASPACE,
            )
        ),
    ),
}


def _sections() -> SearchStrategy[dict[str, Any]]:
    """Draws sections of tokenizer.json: a component each, or several in turn, up to 120."""

    def section(name: str) -> SearchStrategy[Any]:
        key, component = COMPONENTS[name]
        in_turn = st.builds(
            lambda items, times: {"type": "Sequence", key: items * times},
            st.lists(component, min_size=1, max_size=3),
            st.sampled_from((1, 1, 1, 10, 40)),
        )
        return component | in_turn

    return st.sampled_from(list(COMPONENTS)).flatmap(
        lambda name: section(name).map(lambda made: {name: made})
    )


def cases() -> SearchStrategy[Any]:
    set_to = _sections() | st.builds(lambda a, b: a | b, _sections(), _sections())
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
    from spec_runtime.dialogue.stream import TextStream

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


KIND = Kind("tokenizer", cases, open_kind, weight=10)
