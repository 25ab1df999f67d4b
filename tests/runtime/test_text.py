"""Incremental text, stop strings, chat templates and prompts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from toy_backend import CHATML, ByteTokenizer

from spec_runtime.text.chat_template import ChatTemplate
from spec_runtime.text.prompt import encode_prompt
from spec_runtime.text.stream import TextStream

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
    out.append(stream.take())
    return out


def test_characters_come_whole() -> None:
    assert pieces("aé€😀b".encode()) == [
        *("a", "", "é", "", "", "€", "", "", "", "😀", "b"),
        "",
    ]


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    assert pieces("a€".encode()[:-1]) == ["a", "", "", "\ufffd"]


def test_bytes_that_are_no_text_do_not_lose_what_follows() -> None:
    data = b"a\xff\xfeb\xe2\x82c"
    assert "".join(pieces(data)) == data.decode("utf-8", errors="replace")


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


def test_special_tokens_inside_a_character() -> None:
    first, *rest = "€".encode()
    assert "".join(pieces([first, 257, *rest])) == "€"


class SpaceDecoder:
    """As SentencePiece: a word's space is dropped at the beginning of a list of ids."""

    def __call__(self, ids: Sequence[int]) -> str:
        return "".join(f" w{i}" for i in ids)[1:]


def test_decoders_that_strip_the_first_space() -> None:
    stream = TextStream(SpaceDecoder())
    out = []
    for token in (1, 2, 3, 4):
        stream.push(token)
        out.append(stream.take())
    assert out == ["w1", " w2", " w3", " w4"]


def test_stop_string_across_tokens_is_never_shown() -> None:
    assert pieces(b"abENDc", ["END"]) == ["a", "b", "", "", "", ""]
    # a false alarm is released with what disproves it
    assert pieces(b"aENx", ["END"]) == ["a", "", "", "ENx", ""]
    # and at the end of the text
    assert pieces(b"aEN", ["END"]) == ["a", "", "", "EN"]


def test_the_earliest_stop_string_ends_the_text() -> None:
    assert "".join(pieces(b"one two", ["two", "e t", "ne"])) == "o"


def test_stop_string_beginning_twice() -> None:
    assert "".join(pieces(b"aaab", ["aab"])) == "a"


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


def test_nothing_is_added_after_a_stop() -> None:
    stream = TextStream(BYTES.decode, ["b"])
    assert [stream.push(t) for t in b"ab"] == [False, True]
    assert stream.push(ord("c"))
    stream.finish()
    assert stream.text == "a"


def test_finish_twice_is_once() -> None:
    stream = TextStream(BYTES.decode, ["bc"])
    for token in b"ab":
        stream.push(token)
    stream.finish()
    stream.finish()
    assert stream.text == "ab"


def test_chat_template_renders_like_transformers() -> None:
    """Blocks are trimmed, loop controls work, tojson does not escape for HTML."""
    source = """
    {%- for m in messages %}
        {%- if m.role == 'skip' %}{% continue %}{% endif %}
        {{- bos_token + m.role + ': ' + (m.content | tojson) }}
    {%- endfor %}
    {%- if tools is not none %}TOOLS{% endif %}
    {%- if add_generation_prompt %}>{% endif %}"""
    template = ChatTemplate(source, bos_token="<s>")
    messages = [{"role": "skip", "content": ""}, {"role": "user", "content": "a<b é"}]
    assert template.render(messages) == '<s>user: "a<b é">'


def test_chat_template_is_sandboxed_and_its_errors_are_one_line() -> None:
    for source in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no system role') }}",
        "{{ nothing.there }}",
    ):
        with pytest.raises(ValueError, match="chat template") as caught:
            ChatTemplate(source).render([{"role": "user", "content": "x"}])
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="not valid"):
        ChatTemplate("{% if %}")


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


def test_raw_prompts_pass_as_they_are() -> None:
    template = ByteTokenizer(ChatTemplate(CHATML))
    for tokenizer, raw in ((template, True), (ByteTokenizer(), False)):
        assert encode_prompt(tokenizer, "hi", raw, None) == [256, *b"hi"]
        assert encode_prompt(tokenizer, [1, np.int64(2)], raw, None) == [1, 2]  # type: ignore[arg-type]
        # empty: BOS alone
        assert encode_prompt(tokenizer, "", raw, None) == [256]


def test_an_empty_raw_prompt_without_bos_is_refused() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.bos = None
    with pytest.raises(ValueError, match="empty prompt"):
        encode_prompt(tokenizer, "", True, None)


def test_an_empty_list_is_no_prompt() -> None:
    nothing: list[Any] = [[], (), np.array([], np.int64)]
    for prompt in nothing:
        for raw in (True, False):
            with pytest.raises(ValueError, match=r"got prompt \[\], expected at least one message"):
                encode_prompt(ByteTokenizer(), prompt, raw, None)


@pytest.mark.parametrize(
    ("prompt", "raw", "system", "template", "why"),
    [
        ([{"role": "user", "content": "x"}], True, None, True, "raw is set"),
        ([{"role": "user", "content": "x"}], False, None, False, "no chat template"),
        ("x", True, "s", True, "system prompt"),
        ("x", False, "s", False, "system prompt"),
        ([1], False, "s", True, "system prompt"),
        ([{"role": "system", "content": "x"}], False, "s", True, "two system prompts"),
        ([{"content": "x"}], False, None, True, "expected a role"),
        ([{"role": "user"}], False, None, True, "expected a role"),
        ([1, "x"], False, None, True, "expected all token ids"),
        ([1.5], False, None, True, "expected all token ids"),
        ([True], False, None, True, "expected all token ids"),
    ],
)
def test_bad_prompts_are_one_clear_line(
    prompt: Any, raw: bool, system: str | None, template: bool, why: str
) -> None:
    tokenizer = ByteTokenizer(ChatTemplate(CHATML) if template else None)
    with pytest.raises(ValueError, match=why) as caught:
        encode_prompt(tokenizer, prompt, raw, system)
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (b"hi", r"got prompt bytes b'hi', expected a string, a list of messages, or a list or 1-D"),
        (bytearray(b"hi"), "got prompt bytearray"),
        (memoryview(b"hi"), "got prompt memoryview"),
        (None, "got prompt NoneType None"),
        (5, "got prompt int 5"),
        ({"role": "user", "content": "x"}, "got prompt dict"),
        ({5: 6}, "got prompt dict"),
        ((i for i in (1, 2)), "got prompt generator"),
        ({1, 2}, "got prompt set"),
        (np.ones((2, 2), np.int64), r"got prompt an array of int64 and shape \[2, 2\]"),
        (np.ones(2), "got prompt an array of float64"),
        (np.array(["a"]), "got prompt an array of <U1"),
        ([np.array([1, 2])], "expected all token ids"),
        ([None], "expected all token ids"),
        ([{"role": "user", "content": "x"}, 5], "expected all token ids"),
        ("a\ud800b", "got half a surrogate pair at character 1 of the prompt"),
        ([{"role": "user", "content": "\udfff"}], "got half a surrogate pair at character 0 of a"),
        (
            [{"role": "user", "content": None}],
            "got content None in a message of 'user', expected a",
        ),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "got content None"),
        ([{"role": "user", "content": 5}], "got content 5 in a message of 'user'"),
        ([{"role": "user", "content": {"a": 1}}], "got content .*'a': 1.* in a message"),
        ([{"role": "user", "content": ["x"]}], r"got content \['x'\] in a message"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "got content part .*image_url"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "got content part"),
        ([{"role": None, "content": "x"}], "expected a role"),
        ([{"role": "x" * 9999, "content": None}], "got content None"),
    ],
)
def test_what_is_no_prompt_is_named(prompt: Any, why: str) -> None:
    for template in (ChatTemplate(CHATML), None):
        is_chat = isinstance(prompt, list) and isinstance(prompt[0], dict) and len(prompt) == 1
        if is_chat and template is None:
            continue
        with pytest.raises(ValueError, match=why) as caught:
            encode_prompt(ByteTokenizer(template), prompt, False, None)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400


def test_integer_arrays_are_token_ids() -> None:
    for dtype in (np.int64, np.int32, np.uint8):
        ids = encode_prompt(ByteTokenizer(), np.array([1, 2], dtype), False, None)
        assert (ids, type(ids[0])) == ([1, 2], int)


def test_text_parts_are_joined_and_tool_calls_need_no_content() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat([{"role": "user", "content": parts}]) == chat("ab")
    assert chat([{"role": "user", "content": []}]) == chat("")
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    template = ChatTemplate("{{ messages[0].content is none and messages[0].tool_calls[0].name }}")
    assert encode_prompt(ByteTokenizer(template), [call], False, None) == [*b"f"]
    with pytest.raises(ValueError, match=r"got tool call .*, expected a function with a name"):
        encode_prompt(ByteTokenizer(ChatTemplate("{{ messages[0] }}")), [call], False, None)


def test_a_template_that_writes_nothing_is_an_empty_prompt() -> None:
    tokenizer = ByteTokenizer(ChatTemplate("{# nothing #}"))
    assert encode_prompt(tokenizer, "hi", False, None) == [256]
    tokenizer.bos = None
    with pytest.raises(ValueError, match="got an empty prompt"):
        encode_prompt(tokenizer, "hi", False, None)


def test_a_system_prompt_is_a_string() -> None:
    system: Any = 5
    with pytest.raises(ValueError, match="got system prompt 5, expected a string"):
        chat("hi", system=system)
    with pytest.raises(ValueError, match="half a surrogate pair at character 0 of the system"):
        chat("hi", system="\ud800")


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
    with pytest.raises(ValueError, match="got continue_final, expected messages") as caught:
        encode_prompt(codec, prompt, raw=False, system=None, continue_final=True)
    assert "\n" not in str(caught.value)
