"""Cases that are JSON schemas, regular expressions and grammars, bombs among them.

A bomb is short and takes minutes or gigabytes to compile, or crashes the library that does. What is
accepted is followed for some tokens: its masks always allow one, and the tokens it forces.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bpe_tokenizer import EOS, BpeTokenizer
from cases import Kind, Wrong, refusing
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from spec_runtime.grammar.formats import read_format
from spec_runtime.grammar.trials import TrialLimits

LIMITS = TrialLimits(seconds=1.0, megabytes=64)
ATOMS = ("a", ".", "[^a]", r"\w", "(a|b)", "(a|aa)", "é", r"\p{L}", "(?i:k)", "", "^", "$", "\\")
REPEATS = ("", "*", "+", "?", "{3}", "{0,400}", "{25}", "{1000000}", "{2,1}")
RULES = (
    "s s",
    "s s s",
    '"a"',
    "/[a-z]{1,3}/",
    "",
    "<eos>",
    "<[258]>",
    "s?",
    "%json {}",
    "(s | x)*",
)


def cases() -> SearchStrategy[Any]:
    formats = st.one_of(
        _schemas().map(_as_schema),
        _patterns().map(lambda text: {"type": "regex", "regex": text}),
        _larks().map(lambda text: {"type": "ebnf", "grammar": text}),
        _bombs(),
    )
    draws = st.lists(st.integers(0, 999), min_size=4, max_size=12)
    return st.fixed_dictionaries({"format": formats, "draws": draws})


def _as_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _patterns() -> SearchStrategy[str]:
    part = st.tuples(st.sampled_from(ATOMS), st.sampled_from(REPEATS)).map("".join)
    nested = st.recursive(
        part,
        lambda inner: st.tuples(inner, st.sampled_from(REPEATS)).map(lambda p: f"({p[0]}){p[1]}"),
    )
    return st.lists(nested, min_size=1, max_size=4).map("".join)


def _larks() -> SearchStrategy[str]:
    rules = st.lists(st.sampled_from(RULES), min_size=1, max_size=5).map(" | ".join)
    return rules.map(lambda rule: f'start: s\ns: {rule}\nx: "x" s')


def _schemas() -> SearchStrategy[Any]:
    numbers = st.one_of(st.integers(-3, 70), st.sampled_from([2**53 + 1, -(2**63), 1e308, 0.1]))
    kinds = st.sampled_from(["string", "integer", "number", "object", "array", "null", "boolean"])
    leaf = st.one_of(
        kinds.map(lambda kind: {"type": kind}),
        numbers.map(lambda number: {"const": number}),
        numbers.map(lambda number: {"type": "integer", "minimum": number}),
        numbers.map(lambda number: {"type": "string", "minLength": number}),
        _patterns().map(lambda text: {"type": "string", "pattern": text}),
        st.sampled_from(["date", "uri", "uuid", "password"]).map(
            lambda name: {"type": "string", "format": name}
        ),
        st.sampled_from([True, {}, {"$ref": "#"}, {"enum": []}, {"enum": ["a", 1, None]}]),
    )

    def larger(inner: SearchStrategy[Any]) -> SearchStrategy[Any]:
        several = st.lists(inner, min_size=1, max_size=3)
        named = st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        return st.one_of(
            st.tuples(st.sampled_from(["allOf", "anyOf", "oneOf"]), several).map(
                lambda p: {p[0]: p[1]}
            ),
            named.map(lambda each: {"type": "object", "properties": each, "required": list(each)}),
            named.map(lambda each: {"type": "object", "patternProperties": each}),
            inner.map(lambda each: {"type": "array", "items": each, "minItems": 2}),
            inner.map(lambda each: {"not": each}),
        )

    return st.recursive(leaf, larger, max_leaves=6)


def _bombs() -> SearchStrategy[Any]:
    """Returns schemas, expressions and grammars of which each is known to be dangerous to some
    reader."""
    size = st.integers(1, 30)
    return st.one_of(
        size.map(
            lambda n: _as_schema(
                {"allOf": [{"pattern": f"(.*a.{{{i}}})"} for i in range(10, 10 + n)]}
            )
        ),
        size.map(lambda n: {"type": "regex", "regex": f"(a|b)*a(a|b){{{n}}}" * 3}),
        size.map(lambda n: {"type": "regex", "regex": "(" * n * 50 + "a" + "){1,9}" * n * 50}),
        size.map(
            lambda n: {
                "type": "ebnf",
                # only a token, whose name is in capitals, may be an intersection
                "grammar": "start: X\nX: " + " & ".join(f"/.*a.{{{i}}}/" for i in range(n)),
            }
        ),
        size.map(lambda n: {"levels": 30 * n}),
        size.map(lambda n: _as_schema({"type": "array", "minItems": 10**n % (2**62)})),
    )


def open_kind(_: Path) -> Callable[[Any], None]:
    tokenizer = BpeTokenizer(limits=LIMITS)

    def run(case: dict[str, Any]) -> None:
        with refusing():
            grammar = read_format(_expanded(case["format"]))
            assert grammar is not None, "no case is free text"
            matcher = tokenizer.matcher(grammar, tokenizer.vocab_size)
            for number in case["draws"]:
                tokens = matcher.allowed().nonzero()[0].tolist()
                if not tokens:
                    raise Wrong("no token is allowed, not even the end")
                for forced in matcher.forced(4)[:1]:
                    if forced not in tokens:
                        raise Wrong(f"the forced token is not allowed: {forced}")
                token = tokens[number % len(tokens)]
                if not matcher.advance(token):
                    raise Wrong(f"an allowed token is not read: {token}")
                if token == EOS:
                    break

    return run


def _expanded(response_format: dict[str, Any]) -> dict[str, Any]:
    """Returns a format, made of its number of levels if it is too deep to be stored."""
    levels = response_format.get("levels", 0)
    schema: Any = {}
    for _ in range(levels):
        schema = {"items": schema}
    return _as_schema(schema) if levels else response_format


KIND = Kind("grammar", cases, open_kind, weight=2, seconds=20)
