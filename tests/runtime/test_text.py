"""Incremental text, stop strings, chat templates and prompts."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from toy_backend import CHATML, ByteTokenizer

from spec_runtime.dialogue.chat_template import ChatTemplate
from spec_runtime.dialogue.stream import TextStream
from spec_runtime.errors import UserError
from spec_runtime.text.prompt import encode_prompt

BYTES = ByteTokenizer()


def pieces(tokens: Sequence[int], stops: Sequence[str] = ()) -> list[str]:
    stream = TextStream(BYTES.decode, stops)
    out = []
    for token in tokens:
        stopped = stream.push(token)
        out.append(stream.take())
        if stopped:
            break
    stream.finish()
    stream.finish()  # twice is once
    out.append(stream.take())
    return out


FIRST_BYTE, *OTHER_BYTES = "€".encode()


@pytest.mark.parametrize(
    ("tokens", "stops", "expected"),
    [
        ("aé€😀b".encode(), [], ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]),
        ("a€".encode()[:-1], [], ["a", "", "", "\ufffd"]),
        ([FIRST_BYTE, 257, *OTHER_BYTES], [], ["", "", "", "€", ""]),  # 257 is a special token
        # three bytes may be the beginning of a character, and no more wait for one
        (b"\xff" * 5, [], ["", "", "", "\ufffd", "\ufffd", "\ufffd" * 3]),
        (b"\xff" * 3 + "😀".encode(), [], ["", "", "", "\ufffd", "\ufffd", "\ufffd", "😀", ""]),
        (b"abENDc", ["END"], ["a", "b", "", "", "", ""]),
        # a false alarm is released with what disproves it, and at the end of the text
        (b"aENx", ["END"], ["a", "", "", "ENx", ""]),
        (b"aEN", ["END"], ["a", "", "", "EN"]),
        # the whole text
        (b"a\xff\xfeb\xe2\x82c", [], "a\ufffd\ufffdb\ufffdc"),
        (b"one two", ["two", "e t", "ne"], "o"),  # the earliest ends the text
        (b"aaab", ["aab"], "a"),  # which begins twice
    ],
)
def test_characters_come_whole_and_stop_strings_never(
    tokens: Sequence[int], stops: list[str], expected: list[str] | str
) -> None:
    found = pieces(tokens, stops)
    assert ("".join(found) if isinstance(expected, str) else found) == expected


@pytest.mark.parametrize("seed", range(20))
def test_pieces_join_to_the_whole_text(seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = bytes(
        rng.choice(np.frombuffer("aé€😀 \xff".encode("latin-1", "ignore") or b"a", "u1"), 9)
    )
    data += "".join(rng.choice(list("aé€😀b "), 30)).encode()
    tokens = list(data)
    tokens.insert(int(rng.integers(0, len(tokens))), 257)  # a special token has no text
    assert "".join(pieces(tokens)) == BYTES.decode(tokens)


def test_bytes_without_end_are_not_kept() -> None:
    stream = TextStream(BYTES.decode)
    tokens = list("aé".encode()) + [0x80] * 500
    pieces = []
    for count, token in enumerate(tokens, 1):
        stream.push(token)
        pieces += stream.take_pieces()
        assert len(stream.text) >= len(BYTES.decode(tokens[:count])) - 3
    stream.finish()
    pieces += stream.take_pieces()
    assert "".join(text for _, text in pieces) == stream.text == BYTES.decode(tokens)
    assert [number for number, _ in pieces] == sorted(number for number, _ in pieces)


class SpaceDecoder:
    """As SentencePiece: a word's space is dropped at the beginning of a list of ids; 0 is a control
    token."""

    def __call__(self, ids: Sequence[int]) -> str:
        return "".join(f" w{i}" for i in ids if i)[1:]


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([], "w1 w2"),
        ([5], " w1 w2"),
        ([0, 5], " w1 w2"),
        ([5, 0], "w1 w2"),
        ([*range(99)], " w1 w2"),
    ],
)
def test_a_first_word_has_its_space_after_another(prompt: list[int], text: str) -> None:
    stream = TextStream(SpaceDecoder(), prompt=prompt)
    assert not stream.push(1)
    stream.push(2)
    stream.settle()
    assert (stream.text, stream.ends) == (text, [text.index(" w2"), len(text)])
    assert TextStream(SpaceDecoder(), [" w1"], prompt).push(1) == text.startswith(" ")


@pytest.mark.parametrize("stops", [[], ["END"]])
def test_most_tokens_are_decoded_once(stops: list[str]) -> None:
    """And none before its text is taken, unless it may end a stop string."""
    decoded: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return "".join(chr(97 + i) for i in ids)

    stream = TextStream(decode, stops)
    before = len(decoded)
    for i in range(96):
        stream.push(i % 20)
        assert (len(decoded) > before) == bool(stops)
    stream.settle()
    assert len(decoded) - before <= 96 * 9 / 8
    assert max(decoded) <= 9
    stream.finish()
    assert stream.text == "".join(chr(97 + i % 20) for i in range(96))


def test_decoders_that_strip_the_first_space() -> None:
    stream = TextStream(SpaceDecoder())
    out = []
    for token in (1, 2, 3, 4):
        stream.push(token)
        out.append(stream.take())
    assert out == ["w1", " w2", " w3", " w4"]


@pytest.mark.parametrize("seed", range(30))
def test_stop_strings_against_str_find(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text = "".join(rng.choice(list("abc"), 40))
    stops = ["".join(rng.choice(list("abc"), rng.integers(1, 6))) for _ in range(2)]
    # the first to be complete wins, so cut at each end in turn
    ends = [text.find(s) + len(s) for s in stops if s in text]
    seen = text[: min(ends)] if ends else text
    wanted = seen[: min(seen.find(s) for s in stops if s in seen)] if ends else text
    assert "".join(pieces(text.encode(), stops)) == wanted


def test_the_stop_string_that_comes_first_in_the_text_ends_it() -> None:
    stream = TextStream(lambda ids: "aXbY" * len(ids), ["Y", "X"])
    assert stream.push(1)
    assert (stream.text, stream.stop) == ("a", "X")


def test_nothing_is_added_after_a_stop() -> None:
    stream = TextStream(BYTES.decode, ["b"])
    assert [stream.push(t) for t in b"abc"] == [False, True, True]
    stream.finish()
    assert stream.text == "a"


def test_chat_template_renders_like_transformers() -> None:
    """Blocks are trimmed, loop controls work, tojson does not escape for HTML."""
    source = """
    {%- for m in messages %}
        {%- if m.role == 'skip' %}{% continue %}{% endif %}
        {{- bos_token + m.role + ': ' + (m.content | tojson) }}
    {%- endfor %}
    {%- if tools is not none %}TOOLS{% endif %}
    {%- if add_generation_prompt %}>{% endif %}"""
    template = ChatTemplate(source, {"bos_token": "<s>"})
    messages = [{"role": "skip", "content": ""}, {"role": "user", "content": "a<b é"}]
    assert template.render(messages) == '<s>user: "a<b é">'


def chat(prompt: Any, raw: bool = False, system: str | None = None) -> str:
    tokenizer = ByteTokenizer(ChatTemplate(CHATML))
    ids = encode_prompt(tokenizer, prompt, raw, system)
    assert 256 not in ids, "the template has its own BOS"
    return tokenizer.decode(ids)


def test_strings_and_messages_go_through_the_template() -> None:
    assert chat("hi") == "<user>hi</>\n<assistant>"
    assert chat("") == "<user></>\n<assistant>"
    assert chat("hi", system="be brief") == "<system>be brief</>\n<user>hi</>\n<assistant>"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert chat(messages) == "<user>a</>\n<assistant>b</>\n<assistant>"
    assert chat(messages, system="s").startswith("<system>s</>")


@pytest.mark.parametrize("raw", [True, False])
def test_raw_prompts_pass_as_they_are(raw: bool) -> None:
    tokenizer = ByteTokenizer(ChatTemplate(CHATML) if raw else None)
    assert encode_prompt(tokenizer, "hi", raw, None) == [256, *b"hi"]
    assert encode_prompt(tokenizer, [1, np.int64(2)], raw, None) == [1, 2]  # type: ignore[arg-type]
    for dtype in (np.int64, np.int32, np.uint8):
        ids = encode_prompt(tokenizer, np.array([1, 2], dtype), raw, None)
        assert (ids, type(ids[0])) == ([1, 2], int)


@pytest.mark.parametrize(
    ("prompt", "raw", "source"),
    [("", True, None), ("", False, None), ("", True, CHATML), ("hi", False, "{# nothing #}")],
)
def test_an_empty_prompt_is_bos_or_refused(prompt: str, raw: bool, source: str | None) -> None:
    tokenizer = ByteTokenizer(ChatTemplate(source) if source else None)
    assert encode_prompt(tokenizer, prompt, raw, None) == [256]
    tokenizer.bos = None
    with pytest.raises(ValueError, match="got an empty prompt"):
        encode_prompt(tokenizer, prompt, raw, None)


def _join(words: Sequence[str], ids: Sequence[int]) -> str:
    return "".join(words[i] for i in ids)


def test_every_split_of_a_stop_string_over_tokens() -> None:
    """Tokens of several characters: the stop string may begin and end inside one."""
    text, stop = "xxSTOPyy", "STOP"
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        words, last = [], 0
        for i, cut in enumerate(cuts, 1):
            if cut:
                words.append(text[last:i])
                last = i
        words.append(text[last:])
        stream = TextStream(partial(_join, words), [stop])
        for i in range(len(words)):
            stream.push(i)
        stream.finish()
        assert stream.stopped
        assert stream.text == "xx"


# ---- prompts of other kinds


USER = [{"role": "user", "content": "x"}]
EMPTY: list[Any] = [[], (), np.array([], np.int64)]
BOTH = (True, False)  # with a chat template and without


@pytest.mark.parametrize(
    ("prompt", "raw", "system", "templates", "why"),
    [
        (USER, True, None, [True], "raw is set"),
        (USER, False, None, [False], "no chat template"),
        ("x", True, "s", [True], "system prompt"),
        ("x", False, "s", [False], "system prompt"),
        ([1], False, "s", [True], "system prompt"),
        ([{"role": "system", "content": "x"}], False, "s", [True], "two system prompts"),
        ("hi", False, 5, [True], "got system prompt 5, expected a string"),
        ("hi", False, "\ud800", [True], "half a surrogate pair at character 0 of the system"),
        *[
            (empty, raw, None, BOTH, r"got prompt \[\], expected at least one message")
            for empty in EMPTY
            for raw in (True, False)
        ],
        *[
            (prompt, False, None, BOTH, why)
            for prompt, why in (
                (b"hi", r"got prompt bytes b'hi', expected a string, a list of messages, or a li"),
                (bytearray(b"hi"), "got prompt bytearray"),
                (memoryview(b"hi"), "got prompt memoryview"),
                (None, "got prompt NoneType None"),
                (5, "got prompt int 5"),
                (USER[0], "got prompt dict"),
                ({5: 6}, "got prompt dict"),
                ((i for i in (1, 2)), "got prompt generator"),
                ({1, 2}, "got prompt set"),
                (np.ones((2, 2), np.int64), r"got prompt an array of int64 and shape \[2, 2\]"),
                (np.ones(2), "got prompt an array of float64"),
                (np.array(["a"]), "got prompt an array of <U1"),
                ([np.array([1, 2])], "expected all token ids"),
                ([1, "x"], "expected all token ids"),
                ([1.5], "expected all token ids"),
                ([True], "expected all token ids"),
                ([None], "expected all token ids"),
                ([*USER, 5], "expected all token ids"),
                ("a\ud800b", "got half a surrogate pair at character 1 of the prompt"),
            )
        ],
        *[
            ([{"role": "user", "content": content}], False, None, [True], why)
            for content, why in (
                ("\udfff", "got half a surrogate pair at character 0 of a"),
                (None, "got content None in a message of 'user', expected a"),
                (5, "got content 5 in a message of 'user'"),
                ({"a": 1}, "got content .*'a': 1.* in a message"),
                (["x"], r"got content \['x'\] in a message"),
                ([{"type": "image_url"}], "got content part .*image_url"),
                ([{"type": "text", "text": 5}], "got content part"),
            )
        ],
        *[
            ([message], False, None, [True], why)
            for message, why in (
                ({"content": "x"}, "expected a role"),
                ({"role": "user"}, "expected a role"),
                ({"role": None, "content": "x"}, "expected a role"),
                ({"role": "x" * 9999, "content": None}, "got content None"),
                ({"role": "assistant", "content": None, "tool_calls": []}, "got content None"),
            )
        ],
    ],
)
def test_what_is_no_prompt_is_one_clear_line(
    prompt: Any, raw: bool, system: Any, templates: Sequence[bool], why: str
) -> None:
    for has_template in templates:
        tokenizer = ByteTokenizer(ChatTemplate(CHATML) if has_template else None)
        with pytest.raises(ValueError, match=why) as caught:
            encode_prompt(tokenizer, prompt, raw, system)
        assert len(str(caught.value)) < 400


def test_text_parts_are_joined_and_tool_calls_need_no_content() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat([{"role": "user", "content": parts}]) == chat("ab")
    assert chat([{"role": "user", "content": []}]) == chat("")
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    template = ChatTemplate("{{ messages[0].content is none and messages[0].tool_calls[0].name }}")
    assert encode_prompt(ByteTokenizer(template), [call], False, None) == [*b"f"]
    with pytest.raises(ValueError, match=r"got tool call .*, expected a function with a name"):
        encode_prompt(ByteTokenizer(ChatTemplate("{{ messages[0] }}")), [call], False, None)


def test_an_answer_that_has_begun_goes_on() -> None:
    codec = ByteTokenizer(ChatTemplate(CHATML))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello, "}]
    ids = encode_prompt(codec, messages, raw=False, system="be kind", continue_final=True)
    assert bytes(ids).decode() == "<system>be kind</>\n<user>hi</>\n<assistant>Hello, "


@pytest.mark.parametrize(
    "prompt",
    [
        "hi",
        [1, 2, 3],
        [{"role": "user", "content": "hi"}],
        [{"role": "assistant", "content": "Hello, "}],
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}],
    ],
)
def test_only_an_answer_that_has_begun_goes_on(prompt: Any) -> None:
    codec = ByteTokenizer(ChatTemplate(CHATML))
    with pytest.raises(UserError, match="got continue_final, expected messages"):
        encode_prompt(codec, prompt, raw=False, system=None, continue_final=True)
