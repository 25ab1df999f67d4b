"""Constrained answers stay inside their grammar, and are constrained plain decoding's for every
drafter, token by token."""

import asyncio
import functools
import itertools
import json
import re
import sys
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic
import pytest
from bpe_tokenizer import ADDED, BOS, EOS, FIRST_MERGED, MERGES, BpeTokenizer, definition
from gates import calls_in
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import DRAFTERS, make_engine, random_prompt

pytest.importorskip("llguidance", reason="needs the extra `grammar`")

from small import known

from spec_runtime import AsyncEngine, Chunk
from spec_runtime.cli import main, options
from spec_runtime.engine import Engine, GenerationResult
from spec_runtime.errors import UserError
from spec_runtime.files.installed import install
from spec_runtime.grammar import json_schema, llguidance_matcher
from spec_runtime.grammar.base import read
from spec_runtime.grammar.formats import Grammar, read_format
from spec_runtime.grammar.llguidance_matcher import LlguidanceMatcher
from spec_runtime.grammar.path_masks import PathMasks
from spec_runtime.sampling import SamplingParams
from spec_runtime.trees.budget import Budget, Grown
from spec_runtime.trees.grow import TreeBuilder
from spec_runtime.trees.tree import Draws, TokenTree

TOKENIZER = BpeTokenizer()
NUM_LOGITS = TOKENIZER.vocab_size + 3  # more than there are tokens, as padded models have
SPECULATIVE = [name for name in DRAFTERS if name != "none"]
# short loops, and drafts that are right half the time
LOOPS: dict[str, Any] = {"num_successors": 4, "peak": 7.0, "noise": 4.0}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 3},
    "processed": {
        "temperature": 1.2,
        "seed": 4,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "logit_bias": {65: 20.0, 97: 2.0},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "fame": {"type": "boolean"},
        "n": {"type": "array", "items": {"enum": [1, 12, "ab"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "fame", "n"],
    "additionalProperties": False,
}


def as_regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "regex": pattern}


def as_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def new_engine(drafter: str, nodes: int = 8, form: str = "slots") -> Engine:
    """Returns an engine whose model is the same for all drafters."""
    return make_engine(
        drafter,
        vocab_size=NUM_LOGITS,
        tokenizer=TOKENIZER,
        form=form,
        budget=Budget(nodes, growth=Grown(0.01)),
        **LOOPS,
    )


engine = functools.cache(new_engine)


def answer(drafter: str, response_format: Any, **options: Any) -> GenerationResult:
    nodes, form = options.pop("nodes", 8), options.pop("form", "slots")
    prompt = random_prompt(options.pop("prompt", 1), 12)
    options = {"max_new_tokens": 60, "response_format": response_format, **options}
    return engine(drafter, nodes, form).generate(prompt, **options)


def matcher(grammar: Grammar | None) -> Any:
    assert grammar is not None
    return TOKENIZER.matcher(grammar, NUM_LOGITS)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("form", ["slots", "contiguous"])
def test_output_is_that_of_constrained_plain_decoding(sampling: str, form: str) -> None:
    """For a schema, a regex and a recursive grammar; the texts fit these, and the forced tokens
    make steps longer than the drafter by itself does."""
    nested = 'start: "a" b+ "!"\nb: "12" | "(" b ")"'
    for kind in (
        as_schema(SCHEMA),
        as_regex("(ab|name){3,9}!"),
        {"type": "ebnf", "grammar": nested},
    ):
        options: dict[str, Any] = {**SAMPLINGS[sampling], "prompt": 2}
        plain = answer("none", kind, **options)
        assert plain.stats.accepted_length == 1.0
        for drafter in SPECULATIVE:
            result = answer(drafter, kind, form=form, nodes=5, **options)
            assert result.token_ids == plain.token_ids, (kind, drafter)
            assert result.finish_reason == plain.finish_reason
            assert result.stats.accepted_length > 1.1
        if plain.finish_reason == "stop":
            assert plain.token_ids[-1] == EOS
            require_fit(plain.text, kind)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("form", ["slots", "contiguous"])
def test_free_text_with_triggers_is_that_of_plain_decoding(sampling: str, form: str) -> None:
    """Every character but a quotation mark is a trigger, after which one of two names follows."""
    trigger = {"regex": '[^"]', "schema": {"enum": ["ab", "name"]}}
    kind = {"type": "triggered_json", "triggers": [trigger]}
    options: dict[str, Any] = {**SAMPLINGS[sampling], "prompt": 2}
    options["logit_bias"] = {**options.get("logit_bias", {}), EOS: -90.0, BOS: -90.0}
    plain = answer("none", kind, **options)
    assert re.match(r'(?:"*[^"][ \n]?"(?:ab|name)"){3}', plain.text), plain.text
    for drafter in SPECULATIVE:
        result = answer(drafter, kind, form=form, nodes=5, **options)
        assert result.token_ids == plain.token_ids, drafter


def test_structural_tags_are_those_of_plain_decoding() -> None:
    """Two structures share a trigger, and one has another one."""
    found = [("ab", "ab", "!"), ("ac", "name", "?"), ("b", "x", "")]
    tags = [{"begin": a, "schema": {"const": b}, "end": c} for a, b, c in found]
    kind = {"type": "structural_tag", "structures": tags, "triggers": ["a", "b"]}
    bias = {EOS: -90.0, BOS: -90.0, ord("a"): 9.0, ord("b"): 9.0}
    plain = answer("none", kind, prompt=2, logit_bias=bias)
    assert re.match(r'([^ab]*(ab"ab"!|ac"name"\?|b"x")){2}', plain.text), plain.text
    for drafter in SPECULATIVE:
        assert answer(drafter, kind, prompt=2, logit_bias=bias).token_ids == plain.token_ids


def require_fit(text: str, kind: dict[str, Any]) -> None:
    if kind["type"] == "regex":
        assert re.fullmatch(kind["regex"], text), text
    if kind["type"] == "json_schema":
        value = json.loads(text)
        assert list(value) == ["name", "fame", "n"]
        assert isinstance(value["name"], str)
        assert isinstance(value["fame"], bool)
        assert {*value["n"]} <= {1, 12, "ab"}


@pytest.mark.parametrize("drafter", ["prompt_lookup", "lookahead"])
def test_rejection_without_drawn_children_gives_plain_rejections_tokens(drafter: str) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "seed": 8, "acceptance": "rejection"}
    for kind in (as_schema(SCHEMA), as_regex("(ab|name){3,9}!")):
        plain = answer("none", kind, **options)
        assert answer(drafter, kind, **options).token_ids == plain.token_ids


def test_rejection_of_drawn_children_keeps_the_constrained_distribution() -> None:
    """Children outside the grammar are drawn and refused; what is left follows plain decoding's
    law. Counts of all answers of two letters from 250 seeds of each; chi-square's upper 1e-6."""
    kind = as_regex("[a-d][abx]")
    counts: dict[str, dict[str, int]] = {"none": {}, "parallelspec": {}}
    for drafter, found in counts.items():
        for seed in range(250):
            options: dict[str, Any] = {"temperature": 2.5, "seed": seed, "acceptance": "rejection"}
            result = answer(drafter, kind, draw_widths=(2, 2), **options)
            found[result.text] = found.get(result.text, 0) + 1
    plain, drafted = counts["none"], counts["parallelspec"]
    assert drafted != plain, "the drafter changes no draw: no test"
    texts = ["".join(pair) for pair in itertools.product("abcd", "abx")]
    assert {*plain, *drafted} <= {*texts}
    total = [(plain.get(text, 0), drafted.get(text, 0)) for text in texts]
    statistic = sum((a - b) ** 2 / (a + b) for a, b in total if a + b)
    assert statistic < 55, total  # 11 degrees of freedom


def test_typical_acceptance_keeps_to_the_grammar() -> None:
    options: dict[str, Any] = {"temperature": 1.2, "seed": 2, "acceptance": "typical"}
    for drafter in DRAFTERS:
        kind = as_regex("(ab|name){3,9}!")
        require_fit(answer(drafter, kind, typical_epsilon=0.01, **options).text, kind)


# Small grammars at random: regular expressions whose letters and words are partly merged tokens.
_WORDS = st.sampled_from(["a", "b", "ab", "12", "name", "true", '{"', "x", *ADDED])
_REGEXES = st.recursive(
    _WORDS.map(re.escape),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["?", "{1,3}", "+"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
    ),
    max_leaves=6,
)
_SCHEMAS = st.recursive(
    st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "integer", "minimum": 0, "maximum": 120}),
        st.just({"type": "string", "maxLength": 4}),
        st.lists(_WORDS, min_size=1, max_size=3, unique=True).map(lambda words: {"enum": words}),
    ),
    lambda inner: st.one_of(
        inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2}),
        st.dictionaries(st.sampled_from(["name", "ab", "x"]), inner, min_size=1).map(
            lambda parts: {
                "type": "object",
                "properties": parts,
                "required": [*parts],
                "additionalProperties": False,
            }
        ),
    ),
    max_leaves=3,
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.one_of(_REGEXES.map(as_regex), _SCHEMAS.map(as_schema)),
    st.sampled_from(SPECULATIVE),
    st.integers(0, 5),
    st.integers(2, 9),
    st.sampled_from([*SAMPLINGS]),
)
def test_any_small_grammar_gives_plain_decodings_tokens(
    kind: dict[str, Any], drafter: str, prompt: int, nodes: int, sampling: str
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 24, "prompt": prompt, **SAMPLINGS[sampling]}
    plain = answer("none", kind, **options)
    result = answer(drafter, kind, nodes=nodes, **options)
    assert result.token_ids == plain.token_ids
    assert result.text == plain.text
    assert result.finish_reason == plain.finish_reason
    if plain.finish_reason == "stop" and kind["type"] == "regex":
        assert re.fullmatch(kind["regex"], plain.text), (plain.text, kind)
    elif plain.finish_reason == "stop":
        json.loads(plain.text)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(_REGEXES, st.lists(st.lists(st.integers(0, NUM_LOGITS - 1), max_size=4), max_size=8))
def test_masks_depend_on_the_path_alone(pattern: str, paths: Sequence[Sequence[int]]) -> None:
    """However the matcher came to a path, the mask is that of a matcher which read it at once; and
    a token is read where the mask allows it, and only there."""
    masks = PathMasks(matcher(Grammar("regex", pattern)), TOKENIZER.eos)
    likely = [97, 98, 120, EOS, *range(258, TOKENIZER.vocab_size)]
    for path in paths:
        tokens = [likely[token % len(likely)] for token in path]
        fresh = matcher(Grammar("regex", pattern))
        allowed = tokens[: read(fresh, tokens)]
        expected_V = fresh.allowed() if EOS not in allowed else None
        if expected_V is not None:
            np.testing.assert_array_equal(masks.after(allowed), expected_V)
            for token in likely:
                assert fresh.advance(token) == bool(expected_V[token]), token
                fresh.retreat(int(expected_V[token]))
        forced = fresh.forced(5)
        assert read(fresh, forced) == len(forced) <= 5


def test_a_tree_is_pruned_and_gets_what_the_grammar_determines() -> None:
    """See the example of PathMasks.restrict; here the draft is below a root that forces nothing."""
    masks = PathMasks(matcher(Grammar("regex", "(yes|no)!")), TOKENIZER.eos)
    builder = TreeBuilder(7)
    for letters in ("y", "n", "x", "na"):
        node = 0
        for letter in letters:
            node = builder.add(node, ord(letter))
    tree = masks.restrict(builder.build(), max_nodes=12, max_depth=9, room=32)
    assert paths_of(tree) == ["n", "no", "no!", "no!$", "y", "ye", "yes", "yes!", "yes!$"]
    small = masks.restrict(builder.build(), max_nodes=5, max_depth=2, room=32)
    assert paths_of(small) == ["n", "no", "y", "ye"]
    unchanged = TokenTree.chain([7, *b"yes!"])
    assert masks.restrict(unchanged, max_nodes=5, max_depth=4, room=32) is unchanged


def test_the_forced_chain_of_the_root_is_beyond_the_budget() -> None:
    """It costs no node of the draft, but keeps to the depth and to the target's room."""
    masks = PathMasks(matcher(Grammar("regex", "12true(a|b)x")), TOKENIZER.eos)
    root = TokenTree.root(7)
    one_two, true = (258 + MERGES.index(pair) for pair in ("1 2", "tr ue"))
    assert masks.restrict(root, max_nodes=1, max_depth=9, room=9).token_N.tolist() == [
        7,
        one_two,
        true,
    ]
    assert masks.restrict(root, max_nodes=1, max_depth=1, room=9).num_nodes == 2
    assert masks.restrict(root, max_nodes=1, max_depth=9, room=2).num_nodes == 2
    drafted = masks.restrict(
        TokenTree.chain([7, one_two, true, 97]), max_nodes=2, max_depth=9, room=9
    )
    assert drafted.token_N.tolist() == [7, one_two, true, 97]  # two of the draft, two forced
    masks.commit([one_two, true, 98])
    assert masks.restrict(root, max_nodes=1, max_depth=9, room=9).token_N.tolist() == [7, 120, EOS]


def test_children_keep_their_draws_where_the_nodes_get_other_numbers() -> None:
    """The draft is 7 -> {x, y, n}, of which x is outside the grammar, and y -> e."""
    masks = PathMasks(matcher(Grammar("regex", "(yes|no)!")), TOKENIZER.eos)
    at_root, at_y = (
        Draws(np.array(ids), np.full(len(ids), 1 / len(ids)), (0,), with_replacement=True)
        for ids in ([*b"xyn"], [*b"e"])
    )
    tree = TokenTree(
        np.array([7, *b"xyne"]), np.array([0, 0, 0, 0, 2]), None, {0: at_root, 2: at_y}
    )
    restricted = masks.restrict(tree, max_nodes=4, max_depth=9, room=9)
    assert restricted.token_N.tolist() == [7, *b"yne"]
    assert restricted.draws == {0: at_root, 1: at_y}


def paths_of(tree: TokenTree) -> list[str]:
    """Returns the texts of all paths below the root, sorted; "$" is EOS."""
    texts = []
    for node in range(1, tree.num_nodes):
        tokens = tree.token_N[tree.path(node)[1:]].tolist()
        texts.append("".join("$" if token == EOS else chr(token) for token in tokens))
    return sorted(texts)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_token_outside_the_grammar_is_verified(drafter: str) -> None:
    kind = as_schema(SCHEMA)
    text: list[int] = []
    sizes = set()
    for step in new_engine(drafter).steps(
        random_prompt(1, 12), max_new_tokens=40, response_format=kind
    ):
        if text:
            tree = known(step.tree)
            sizes.add(tree.num_nodes)
            for node in range(tree.num_nodes):
                path = [*text, *tree.token_N[tree.path(node)[1:]].tolist()]
                assert read(matcher(read_format(kind)), path) == len(path), path
        text += step.tokens
    assert (sizes == {1}) == (drafter == "none")


def test_the_grammars_end_and_max_new_tokens() -> None:
    for drafter in DRAFTERS:
        result = answer(drafter, as_regex("ab"))
        assert (result.text, result.finish_reason, result.token_ids[-1]) == ("ab", "stop", EOS)
        result = answer(drafter, as_regex("true!{40}"), max_new_tokens=11)
        assert (result.finish_reason, len(result.token_ids)) == ("length", 11)
        assert re.fullmatch("true!*", result.text)
        assert result.stats.accepted_length > 3 or drafter == "none"
        assert answer(drafter, as_regex("true!{9}"), stop="!!").text == "true"


def test_chunks_say_that_forced_tokens_were_drafted() -> None:
    """Also under asyncio, and if the sampling comes as one object."""
    params = SamplingParams(response_format=as_regex("[ab]true!12"), max_new_tokens=20)
    chunks = list(engine("prompt_lookup").chunks("x", params=params))
    letter, forced, _ = chunks
    assert (letter.depths, forced.text, forced.depths) == ((0,), "true!12", (1, 2, 3, 4))

    async def read() -> list[Chunk]:
        async with AsyncEngine(new_engine("prompt_lookup")) as shared:
            return [chunk async for chunk in shared.stream("x", params=params)]

    assert "".join(chunk.text for chunk in asyncio.run(read())) == letter.text + forced.text


CALL, SPECIAL_CALL = (FIRST_MERGED + len(MERGES) + place for place in range(len(ADDED)))


@pytest.mark.parametrize(
    ("response_format", "text", "tokens"),
    [
        (as_regex("<call>12"), "<call>12", [CALL]),
        (as_regex("a<\\|call\\|>b"), "a<|call|>b", []),
        (as_schema({"const": "<call> <|call|>"}), '"<call> <|call|>"', []),
        (as_schema({"enum": ["<call>"]}), '"<call>"', [CALL]),
        ({"type": "ebnf", "grammar": 'start: "<call>" "ab"'}, "<call>ab", [CALL]),
        ({"type": "ebnf", "grammar": 'start: "<|call|>" "ab"'}, "<|call|>ab", []),
        ({"type": "ebnf", "grammar": '# "\nstart: <call> <|call|> "ab"'}, "<call>ab", "both"),
        (
            {"type": "ebnf", "grammar": f'start: <[{CALL}]> <[{SPECIAL_CALL}]> "ab"'},
            "<call>ab",
            "both",
        ),
    ],
)
def test_names_of_added_tokens_in_a_grammar(response_format: Any, text: str, tokens: Any) -> None:
    """A special token is what a grammar names as a token; where a text has its name, the name is
    written in letters. Other added tokens are how the tokenizer writes their texts."""
    tokens = [CALL, SPECIAL_CALL] if tokens == "both" else tokens
    for drafter in ("none", "prompt_lookup"):
        result = answer(drafter, response_format)
        assert (result.text, result.finish_reason) == (text, "stop")
        assert [token for token in result.token_ids if token >= CALL] == tokens


@pytest.mark.parametrize(
    ("names", "token"),
    [
        *(("<[65]>", 65), (f"<[{FIRST_MERGED}]>", FIRST_MERGED), ("<call>", CALL)),
        *((f"<[{FIRST_MERGED}-{FIRST_MERGED}]>", FIRST_MERGED), ("<[60-70,65]>", 65)),
        *((f"<[{BOS}]>", BOS), ("<|call|>", SPECIAL_CALL), ("<[*]>", FIRST_MERGED)),
    ],
)
def test_tokens_that_a_grammar_names_are_taken_back_whole(names: str, token: int) -> None:
    grammar = Grammar("ebnf", f'start: "xab" {names} "y"')
    require_no_trace(grammar, [*TOKENIZER.encode("xab", False), token, ord("y")])


def test_free_text_with_triggers_has_special_tokens_outside_of_json() -> None:
    trigger = {"regex": "ab=", "schema": {"type": "boolean"}}
    grammar = known(read_format({"type": "triggered_json", "triggers": [trigger]}))
    before, call = TOKENIZER.encode("x", False), TOKENIZER.encode("ab=true", False)
    tokens = [SPECIAL_CALL, *before, BOS, *call, SPECIAL_CALL, *before]
    follower = matcher(grammar)
    assert read(follower, [*tokens, EOS]) == len(tokens) + 1
    follower.retreat(len(tokens) + 1)
    assert read(follower, tokens[:5]) == 5
    assert not follower.allowed()[[SPECIAL_CALL, EOS]].any()
    require_no_trace(grammar, tokens)


def test_a_special_token_that_is_a_trigger_is_not_free() -> None:
    name = "<|call|>"
    tag = {"begin": f"{name}f", "schema": {"type": "boolean"}, "end": "!"}
    kind = {"type": "structural_tag", "structures": [tag], "triggers": [name]}
    before, after = (TOKENIZER.encode(each, False) for each in ("xf", "ftrue!x"))
    tokens = [*before, BOS, SPECIAL_CALL, *after, EOS]
    follower = matcher(read_format(kind))
    assert read(follower, tokens) == len(tokens)
    follower.retreat(len(tokens))
    assert read(follower, [SPECIAL_CALL, *before]) == 1
    late = {**kind, "structures": [{**tag, "begin": "see <|call|>"}], "triggers": ["see <|call|>"]}
    with pytest.raises(UserError, match="special token is not at the start of 'see "):
        matcher(read_format(late))


def require_no_trace(grammar: Grammar, tokens: list[int]) -> None:
    """Requires that tokens taken back, from everywhere to everywhere, change no later mask."""

    def read_up_to(number: int) -> Any:
        found = matcher(grammar)
        assert all(map(found.advance, tokens[:number])), tokens
        return found

    for number in range(len(tokens) + 1):
        for back in range(number + 1):
            found = read_up_to(number)
            found.retreat(back)
            expected = read_up_to(number - back).allowed()
            assert (found.allowed() == expected).all(), (number, back)


def test_text_that_the_tokenizer_would_normalize_is_written_as_the_grammar_has_it() -> None:
    normalizing = json.loads(definition()) | {"normalizer": {"type": "NFC"}}
    compiler = llguidance_matcher.GrammarCompiler(json.dumps(normalizing), [EOS], NUM_LOGITS)
    decomposed = "ab e\u0301"
    follower = compiler.matcher(Grammar("regex", decomposed))
    forced = follower.forced(9)
    assert read(follower, forced) == len(forced)
    assert TOKENIZER.decode(forced) == decomposed


def test_a_grammar_that_names_eos_does_not_end_before_its_end() -> None:
    any_two = {"type": "ebnf", "grammar": "start: <[*]> <[*]>"}
    result = answer("prompt_lookup", any_two, logit_bias={EOS: 99.0})
    assert (len(result.token_ids), result.finish_reason) == (3, "stop")
    with pytest.raises(ValueError, match="the grammar asks for EOS in the middle"):
        answer("prompt_lookup", {"type": "ebnf", "grammar": f'start: "a" <[{EOS}]> "b"'})


class Fickle(LlguidanceMatcher):
    """Reads no token of its own masks."""

    def advance(self, token: int) -> bool:
        return False


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup"])
def test_a_matcher_that_refuses_what_it_allowed_ends_the_request_in_one_line(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llguidance_matcher, "LlguidanceMatcher", Fickle)
    with pytest.raises(UserError, match="the grammar refuses token 97, which it allowed before"):
        answer(drafter, as_regex("ab|ac"))


def test_free_text_and_any_object() -> None:
    free = answer("parallelspec", {"type": "text"})
    assert free.token_ids == answer("parallelspec", None).token_ids
    result = answer("prompt_lookup", {"type": "json_object"}, logit_bias={123: 99.0, 125: 9.0})
    assert json.loads(result.text) == {}


def test_constraints_and_sampling_are_refused_where_they_cannot_go() -> None:
    with pytest.raises(ValueError, match="got ignore_eos with response_format, expected one"):
        SamplingParams(response_format=as_regex("a"), ignore_eos=True)
    assert not SamplingParams(response_format=as_regex("a")).is_plainly_greedy
    assert not SamplingParams(logits_processor=lambda tokens, row: row).is_plainly_greedy
    assert SamplingParams(response_format={"type": "text"}).is_plainly_greedy


INTEGER: dict[str, Any] = {"type": "integer"}


def an_object(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", **keywords}


def an_integer(**keywords: Any) -> dict[str, Any]:
    return {**INTEGER, **keywords}


def within(schema: Any, **definitions: Any) -> dict[str, Any]:
    return {**schema, "$defs": definitions}


def refer(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


ONE_NAME = an_object(properties={"a": INTEGER})
NEXT_NAMED = an_object(properties={"b": INTEGER}, required=["b"])
NODE = an_object(properties={"next": refer("node")}, required=["next"])
NODE_OR_NULL = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
LETTERS = {"enum": ["a", "b"], "title": "letters", "type": "string"}
# Numbers that llguidance writes otherwise; it crashes at some of the negative ones.
BEYOND_EXACT = [
    as_schema({"const": 2**53 + 1}),
    as_schema({"const": -(2**63)}),
    as_schema({"items": {"enum": ["a", [{"b": -(2**63) + 1}]]}, "type": "array"}),
    as_schema({"$ref": "#/components/x", "components": {"x": {"const": -1e19}}}),
    {"type": "tagged_json", "begin": "a", "schema": {"const": -(2**63)}, "end": "b"},
    {"type": "ebnf", "grammar": 'start: "a" x\nx: %json {"const": -9223372036854775808}'},
]
ENDLESS = [
    {"$ref": "#"},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    within(an_object(properties={"a": refer("node")}), node=NODE),
    within({"anyOf": [INTEGER, refer("node")]}, node={"allOf": [NODE]}),
    within({"items": refer("a")}, a=refer("b"), b=refer("a")),
]
# What llguidance finds out after the comma.
NAMELESS = [
    an_object(**each, additionalProperties=False)
    for each in (
        {"properties": {"a": INTEGER}, "patternProperties": {"^a$": INTEGER}},
        {"properties": {"a": INTEGER, "b": INTEGER}, "patternProperties": {"^(a|b)$": True}},
        {"required": ["a"], "patternProperties": {"^a$": INTEGER}},
        {"properties": {"a": {}}, "patternProperties": {"^a$": {}, "^b": False}},
    )
]


@dataclass
class Point:
    x: int
    y: int = 0


class Named(pydantic.BaseModel):
    points: list[Point] = pydantic.Field(max_length=1)
    name: Literal["a", "b"] | None = None


# Formats, with texts that fit them and others. llguidance does not read some of the schemas, and
# reads some wrongly: they are rewritten before.
FORMATS: list[tuple[Any, list[str], list[str]]] = [
    (Point, ['{"x": 1, "y": 2}', '{"x": 1}'], ['{"y": 1}', '{"x": 1, "z": 2}']),
    (Named, ['{"points": [{"x": 1}], "name": null}'], ['{"points": [], "name": "c"}']),
    (ONE_NAME, ['{"a": 1}'], ['{"b": 1}', "1"]),
    ({"anyOf": [INTEGER, {"type": "null"}]}, ["null", "3"], ["true"]),
    ({"type": ["integer", "boolean"]}, ["true", "3"], ["null"]),
    (
        {"type": "any_of", "formats": [as_regex(r"a/b|c\/"), ONE_NAME, {"type": "json_object"}]},
        ["a/b", "c/", '{"a": 1}', '{"c": 1}'],
        ["a", "[1]", "a/bc/"],
    ),
]
INEXACT = 2**53
SCHEMAS: list[tuple[Any, list[str], list[str]]] = [
    (True, ["[1, {}]", '"a"'], ["[1,"]),
    (an_integer(minimum=-(2**63), maximum=2**63 - 1), ["-999", "9" * 17], ["1" * 20]),
    ({"type": "number", "minimum": -(2**63), "maximum": 1e300}, ["-1.5"], ["1" * 20]),
    (an_integer(minimum=INEXACT + 1, maximum=INEXACT + 3), [str(INEXACT + 2)], [str(INEXACT)]),
    (an_integer(exclusiveMinimum=INEXACT), [str(INEXACT + 9)], [str(INEXACT), "1"]),
    (an_integer(exclusiveMaximum=-INEXACT), [str(-INEXACT - 9)], [str(-INEXACT), "1"]),
    (an_integer(multipleOf=1000, maximum=10**15), ["3000"], ["3001"]),
    ({"type": "string", "format": "password"}, ['"ab"'], ["1"]),
    ({"type": "array", "items": INTEGER, "uniqueItems": False}, ["[1, 1]"], ["1"]),
    (an_object(propertyNames=True), ['{"ab": 1}'], ["1"]),
    (an_object(propertyNames={"type": "string"}), ['{"ab": 1}'], ["1"]),
    (
        an_object(propertyNames={"pattern": "^[ab]+$"}, additionalProperties=INTEGER),
        ['{"ab": 1, "a": 2}', "{}"],
        ['{"ab": "a"}', '{"abc": 1}'],
    ),
    (an_object(propertyNames={"maxLength": 2}), ['{"ab": 1}'], ['{"abc": 1}']),
    (
        within(
            an_object(propertyNames=refer("letters"), additionalProperties=INTEGER), letters=LETTERS
        ),
        ['{"a": 1, "b": 2}', '{"b": 1}', "{}"],
        ['{"c": 1}', '{"a": "b"}'],
    ),
    (
        an_object(propertyNames={"const": "b"}, properties={"a": {}, "b": INTEGER}),
        ['{"b": 1}'],
        ['{"a": 1}', '{"b": "a"}'],
    ),
    (
        an_object(**NAMELESS[0] | {"patternProperties": {"^[ab]$": True}}),
        ['{"a": 1, "b": "a"}', "{}"],
        ['{"a": "a"}', '{"c": 1}'],
    ),
    (
        an_object(properties={"a": INTEGER, "next": NODE_OR_NULL}, required=["next"]),
        ['{"a": 1, "next": {"next": null}}'],
        ['{"a": 1}'],
    ),
    (  # names of keywords are names of properties, too
        an_object(properties={"const": INTEGER, "format": {"const": "password"}}),
        ['{"const": 1, "format": "password"}'],
        ['{"const": "a"}', '{"format": "a"}'],
    ),
    # Objects that name properties are closed, at every depth.
    (
        {"type": "array", "items": ONE_NAME},
        ['[{"a": 1}, {}]'],
        ['[{"b": 1}]', '[{"a": 1, "b": 1}]'],
    ),
    ({**ONE_NAME, "additionalProperties": True}, ['{"a": 1, "b": 1}'], ['{"a": "b"}']),
    ({**ONE_NAME, "additionalProperties": INTEGER}, ['{"b": 1}'], ['{"b": "c"}']),
    ({"type": "object"}, ['{"b": 1}'], ["1"]),
    ({**ONE_NAME, "required": ["b"]}, ['{"a": 1, "b": 1}'], ['{"a": 1}']),
    (within(refer("one"), one=ONE_NAME), ['{"a": 1}'], ['{"b": 1}']),
    ({"anyOf": [ONE_NAME, INTEGER]}, ['{"a": 1}', "7"], ['{"b": 1}']),
    ({"allOf": [ONE_NAME]}, ['{"a": 1}'], ['{"b": 1}']),
    # But for those that are parts of one object.
    (
        within({"allOf": [NEXT_NAMED, refer("one")]}, one=ONE_NAME),
        ['{"b": 2, "a": 1}'],
        ['{"a": "b"}'],
    ),
    (
        an_object(properties={"a": INTEGER}, anyOf=[NEXT_NAMED, {}]),
        ['{"a": 1, "b": 1}'],
        ['{"a": "b"}'],
    ),
]
FORMATS += [(as_schema(schema), fitting, others) for schema, fitting, others in SCHEMAS]


@pytest.mark.parametrize(("response_format", "fitting", "others"), FORMATS)
def test_which_texts_fit_a_format(
    response_format: Any, fitting: list[str], others: list[str]
) -> None:
    follower = matcher(read_format(response_format))
    for text in (*fitting, *others):
        tokens = [*TOKENIZER.encode(text, special_tokens=False), EOS]
        num_read = read(follower, tokens)
        assert (num_read == len(tokens)) == (text in fitting), text
        follower.retreat(num_read)
    assert SamplingParams(response_format=response_format).grammar is not None


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("response_format", "message"),
    [
        ("json", "got response_format 'json', expected a mapping"),
        ({"type": "xml"}, "got response_format of type 'xml', expected one of text, json_object"),
        ({}, "got response_format of type None"),
        ({"type": "regex", "pattern": "a"}, "got response_format with 'pattern', expected type"),
        ({"type": "regex"}, "got regex None, expected a string"),
        ({"type": "json_schema"}, "got json_schema None, expected a mapping"),
        (as_schema(None), "got schema None, expected a JSON schema, which is an object or true"),
        (as_schema(False), "got schema False, expected a JSON schema"),
        (as_schema({"enum": [{1}]}), "got a schema that cannot be written as JSON"),
        (as_schema({"enum": [float("nan")]}), "got a schema that cannot be written as JSON"),
        (as_schema({"allOf": 5}), "expected a"),
        (as_schema({"allOf": None}), "expected a"),
        (as_schema({"properties": {"a": {"not": 1}}}), "expected a"),
        (as_schema({"type": "foo"}), 'got JSON schema {"type": "foo"}: Invalid type: foo'),
        (as_schema({"type": "array", "uniqueItems": True}), "Unimplemented keys"),
        (as_schema(nested(300)), "got JSON schema .*: recursion limit exceeded"),
        (as_schema(nested(30_000)), "got a schema that cannot be written as JSON"),
        (as_schema({"$ref": "file:///etc/passwd"}), "is not present in a registry"),
        *((schema, "beyond ±2\\^53, where numbers lose digits") for schema in BEYOND_EXACT),
        *((as_schema(schema), "every value of .* holds another one") for schema in ENDLESS),
        *((as_schema(schema), "leaves no names but those of prop") for schema in NAMELESS),
        (as_schema(an_integer(minimum=2**63)), "minimum 9.* leaves no number of less"),
        (as_schema(an_integer(maximum=-1e19)), "maximum -1e\\+19 leaves no number"),
        (as_schema({"multipleOf": 9973, "maximum": 10**15}), "multipleOf 9973 beside bounds"),
        (as_schema({"propertyNames": {"format": "uuid"}}), 'Unimplemented keys: ."propertyNames"'),
        (as_regex("a(b"), r"got regex a\(b: .*unclosed group"),
        (as_regex(r"[^\s\S]"), "no text fits it"),
        ({"type": "ebnf", "grammar": "start: nothing"}, "got grammar start: nothing: .*unknown"),
        ({"type": "ebnf", "grammar": "root ::= ("}, r"got grammar root ::= \("),
        ({"type": "any_of"}, "got formats None, expected a list of at least one"),
        ({"type": "any_of", "formats": [{"type": "text"}]}, "of type 'text' as one of several"),
        (
            {"type": "any_of", "formats": [{"type": "ebnf", "grammar": "root ::= 'a'"}]},
            "of type 'ebnf' as one of several, or beside tools; expected JSON or a regex there",
        ),
        (threading.Thread, "got class Thread as response_format .*, such as a pydantic model"),
    ],
)
def test_a_wrong_format_is_one_line(response_format: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        answer("none", response_format)


def test_a_missing_library_is_one_line_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match=r"^llguidance is not installed") as error:
        BpeTokenizer().matcher(Grammar("regex", "a"), NUM_LOGITS)
    assert error.value.hint == f"run {install('grammar')}", "which the command prints too"


def test_the_command_takes_a_schema_a_regex_or_a_grammar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "open_engine", lambda *given: new_engine("prompt_lookup"))

    def run(*flags: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["generate", "--raw", "--max-new-tokens", "60", *map(str, flags), "name"])
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int | None)
        return end.value.code or 0, out, err

    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text('start: "12" "ab"')
    code, out, err = run("--json-schema", schema)
    assert (code, err.rpartition(" ")[2]) == (0, "stop\n")
    require_fit(out, as_schema(SCHEMA))
    assert run("--regex", "true!")[:2] == (0, "true!\n")
    assert run("--grammar", grammar)[:2] == (0, "12ab\n")
    schema.write_bytes(b'{"a": \xff}')
    for flags, line in {
        ("--regex", "a(b"): "got regex a(b: ",
        ("--regex", "a", "--grammar", grammar): "got --regex and --grammar, expected one of them",
        ("--regex", "a", "--ignore-eos"): "got ignore_eos with response_format",
        ("--json-schema", grammar): f"{grammar}: got no JSON (",
        ("--json-schema", schema): f"{schema}: got bytes that are not UTF-8",
        ("--grammar", tmp_path / "none"): "No such file",
    }.items():
        code, out, err = run(*flags)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert line in err


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_logits_processor_sees_the_path_of_its_row(sampling: str) -> None:
    """A processor that forbids the token before the last makes the same answers with any drafter;
    what it is told is always the prompt and a beginning of some text."""
    prompt = random_prompt(5, 6)

    def forbid(tokens: Sequence[int], logits_V: np.ndarray) -> np.ndarray:
        assert [*tokens[:6]] == prompt
        logits_V[tokens[-2]] = -np.inf
        logits_V[(sum(tokens) + len(tokens)) % NUM_LOGITS] += 5.0
        return logits_V

    options: dict[str, Any] = {"max_new_tokens": 40, **SAMPLINGS[sampling], "ignore_eos": True}
    plain = engine("none").generate(prompt, logits_processor=forbid, **options)
    free = engine("none").generate(prompt, **options)
    assert plain.token_ids != free.token_ids
    text = [*prompt, *plain.token_ids]
    assert all(a != c for a, _, c in zip(text[4:], text[5:], text[6:], strict=False))
    for drafter in SPECULATIVE:
        result = engine(drafter).generate(prompt, logits_processor=forbid, **options)
        assert result.token_ids == plain.token_ids
    both = engine("parallelspec").generate(
        prompt, logits_processor=lambda _, row: row[::-1], response_format=as_regex("(ab|12)+!")
    )
    assert re.fullmatch("(ab|12)+!?", both.text)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "acceptance": "rejection"}])
def test_processors_that_leave_no_token_are_one_line(sampling: Any) -> None:
    def forbid(tokens: Sequence[int], logits_V: np.ndarray) -> np.ndarray:
        logits_V[ord("a")] = -np.inf
        return logits_V

    with pytest.raises(ValueError, match="got no token at position 3 that logits_processor and"):
        engine("parallelspec").generate(
            [1, 2, 3], logits_processor=forbid, response_format=as_regex("a"), **sampling
        )


@pytest.mark.parametrize("result", [np.zeros(3), np.full(NUM_LOGITS, -np.inf), np.full(1, np.nan)])
def test_a_logits_processors_bad_result_is_refused(result: np.ndarray) -> None:
    with pytest.raises(ValueError, match="from logits_processor, expected"):
        engine("none").generate([1], logits_processor=lambda tokens, row: result)
    with pytest.raises(ValueError, match="got logits_processor 3, expected a function"):
        SamplingParams(logits_processor=3)  # type: ignore[arg-type]


# ---- schemas of strangers ----


def names_in_names(depth: int, names: Sequence[str]) -> dict[str, Any]:
    """Returns a schema of objects in each other, each of these names alone."""
    schema: dict[str, Any] = INTEGER
    for _ in range(depth):
        schema = an_object(propertyNames=refer("names"), additionalProperties=schema)
    return within(schema, names={"enum": [*names]})


def test_names_are_written_out_within_a_bound() -> None:
    """Names in names are their product; names that many objects refer to are theirs, too."""
    many = {"names": {"enum": [str(number) for number in range(20_000)]}}
    long = {"names": {"pattern": "a" * 100_000}}
    keys = {"names": dict.fromkeys(map(str, range(20_000)), 1)}
    named = {"type": "object", "propertyNames": {"$ref": "#/$defs/names"}}
    for schema in (
        names_in_names(6, "abcdefgh"),
        names_in_names(12, "abcdefgh"),
        *({"anyOf": [{**named} for _ in range(60)], "$defs": each} for each in (many, long, keys)),
    ):
        message = "more than 1,000,000 characters with its propertyNames written as properties"
        tracemalloc.start()
        try:
            with pytest.raises(UserError, match=message):
                answer("none", as_schema(schema))
            assert tracemalloc.get_traced_memory()[1] < 20e6
        finally:
            tracemalloc.stop()
    follower = matcher(read_format(as_schema(names_in_names(3, "ab"))))
    text = '{"a": {"a": {"b": 1}, "b": {}}}'
    tokens = [*TOKENIZER.encode(text, special_tokens=False), EOS]
    assert read(follower, tokens) == len(tokens)


@pytest.mark.parametrize(
    "schema_of",
    [
        lambda n: names_in_names(60, ["a"] * n),
        lambda n: {"anyOf": [{"$ref": "#/$defs" + "/a" * n} for _ in range(n)]},
        lambda n: {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * n}}, "$ref": "#/$defs/a"},
        lambda n: {"type": "object", "properties": {str(each): {} for each in range(n)},
                   "propertyNames": {"enum": [str(each) for each in range(n)]}},
        lambda n: {"type": "object", "properties": {str(each): {} for each in range(n)},
                   "required": [str(each) for each in range(n)], "patternProperties": {"^a": {}}},
    ],
)  # fmt: skip
def test_a_schema_is_read_in_time_with_its_length(schema_of: Callable[[int], Any]) -> None:
    """What is a list or an object in Python has a length that its walk cannot hide."""

    def prepare(schema: Any) -> None:
        with suppress(ValueError):  # of those that are refused in the end
            json_schema.prepared(schema)

    schemas = [schema_of(n) for n in (200, 400, 800)]
    work = [calls_in(functools.partial(prepare, schema)) for schema in schemas]
    assert work[2] - work[1] < 3 * (work[1] - work[0]) + 500, "twice the length"


def test_a_schema_in_a_text_of_a_schema_is_text() -> None:
    grammar = 'start: "a" x\nx: %json {"const": "%json {}"}'
    assert answer("none", {"type": "ebnf", "grammar": grammar}).text == 'a"%json {}"'
