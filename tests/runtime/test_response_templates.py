"""How a model writes thinking and calls is data: models' own templates, and the table of those that
ship none. What a stranger's template asks for is bounded, and a bad one is refused in one line."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from gates import calls_in
from served import HELLO, chunks_of
from toy_engine import make_engine

from spec_runtime import GenerationResult, Stats
from spec_runtime.dialogue.chat_template import ChatTemplate
from spec_runtime.dialogue.patterns import MORE, NO, Pattern
from spec_runtime.dialogue.reader import ResponseReader, joined
from spec_runtime.dialogue.response_template import HARMONY, ResponseTemplate, Tags, template_of
from spec_runtime.dialogue.tools import ToolCall, checked_tools
from spec_runtime.errors import UserError
from spec_runtime.loop.answer import AnswerForm, form_of

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
from bpe_tokenizer import BpeTokenizer

THINK = Tags("<think>", "</think>")
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
TOOLS = checked_tools(
    [
        {"function": {"name": "get_weather", "parameters": {"properties": PROPERTIES}}},
        {"function": {"name": "now"}},
    ]
)
PARIS = ("get_weather", {"city": "Paris", "days": 3})
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'

TRANSCRIPTS = json.loads((Path(__file__).parent / "transcripts.json").read_text("utf-8"))


def read(
    template: ResponseTemplate, pieces: list[str], **options: Any
) -> tuple[str, str, list[tuple[str, Any]]]:
    """Returns thinking, text and calls of an answer that comes in these pieces."""
    reader = ResponseReader(template, TOOLS, **options)
    parts, answer = [], "".join(pieces)
    for number, piece in enumerate([*pieces, ""]):
        new = reader.push(piece, is_end=number == len(pieces))
        for part, (begin, end) in zip(new, reader.spans, strict=True):
            stands = answer[begin:end]
            assert part.kind in ("call", "arguments") or part.text in (stands, f"\n{stands}")
        parts += new
    thinking = "".join(part.text for part in parts if part.kind == "thinking")
    text, calls = joined(parts)
    return thinking, text, [(call.name, json.loads(call.arguments_json)) for call in calls]


def _tags(row: dict[str, Any]) -> Tags | None:
    is_harmony = row["family"] == "harmony"
    return HARMONY if is_harmony else Tags(*row["tags"]) if row["tags"] else None


@pytest.mark.parametrize("row", TRANSCRIPTS, ids=lambda row: row["model"])
def test_transcripts_are_read_whole_and_in_every_split(row: dict[str, Any]) -> None:
    template, answer = template_of(_tags(row), row["family"]), row["answer"]
    expected = row["thinking"], row["text"], [(name, value) for name, value in row["calls"]]
    assert read(template, [answer], streams=False) == expected
    for split in range(len(answer) + 1):
        assert read(template, [answer[:split], answer[split:]]) == expected, split
    for size in (1, 3):
        pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
        assert read(template, pieces) == expected, size


_ARGUMENTS = re.compile(r'(?:,\s*"(?:arguments|parameters)": )?\{"city": "Paris", "days": 3\}')
_UNMARKED = ("Llama 3.1 to 3.3 | bare", "Apertus | by name", "DeepSeek-R1, fenced")  # stay text


@pytest.mark.parametrize("row", TRANSCRIPTS, ids=lambda row: row["model"])
def test_marked_calls_may_leave_their_arguments_out(row: dict[str, Any]) -> None:
    answer, num_calls = _ARGUMENTS.subn("", row["answer"])
    if row["model"] in _UNMARKED:
        said, calls = answer.removeprefix(f"<think>{row['thinking']}</think>"), []
    else:
        said, calls = (
            row["text"],
            [(name, {} if num_calls else value) for name, value in row["calls"]],
        )
    for size in (1, 2, 3, 5, len(answer)):
        pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
        found = read(template_of(_tags(row), row["family"]), pieces, streams=size < len(answer))
        assert found == (row["thinking"], said, calls), size


@pytest.mark.parametrize(
    ("family", "answer", "reason", "calls"),
    [
        ("mistral", "[TOOL_CALLS]now", "stop", 1),
        ("mistral", "[TOOL_CALLS]now", "length", 0),  # its arguments were to come
        ("mistral", "[TOOL_CALLS]now[ARGS]", "timeout", 0),
        ("mistral", "[TOOL_CALLS]no", "stop", 0),
        ("mistral", "[TOOL_CALLS]now or never", "stop", 0),
        ("mistral", "now", "stop", 0),
        ("harmony", "<|channel|>commentary to=functions.now<|message|>", "stop", 1),
        ("harmony", "<|channel|>commentary to=functions.now<|message|>", "length", 0),
        ("llama3", '{"type": "function", "name": "now"}', "stop", 1),
        ("hermes", '{"name": "now"}', "stop", 0),  # may be an answer
        ("hermes", '<tool_call>{"name": "now"}', "length", 1),
    ],
)
def test_a_call_without_arguments_has_an_end_or_is_text(
    family: str, answer: str, reason: str, calls: int
) -> None:
    form = AnswerForm(family=family, tools=TOOLS)
    ends = [*range(1, len(answer) + 1)]
    result = GenerationResult(answer, ends, reason, Stats(), text_ends=ends, form=form)
    assert result.tool_calls == [ToolCall("now", "{}")] * calls
    assert result.content in ("", answer)
    *_, last = chunks_of(result, 4)
    assert sum(part.kind == "call" for part in last.parts) <= calls


# ---- models' own templates ----

PONDER: dict[str, Any] = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": "<bot>",
    "fields": {
        "thinking": {"open": "<ponder>", "close": "</ponder>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<do>\s*<(?P<name>[^>\n]+)>",
            "close_pattern": r"</do>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+):\s*(?P<value>.*?)\s*:>"},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"\s*(?:<end>|<stop>)", "content": "text"},
    },
}
WRITTEN = "<ponder>Hm.</ponder>\n\nI look.\n<do>\n<get_weather><city: Paris :><days: 3 :></do>"


def with_calls(**field: Any) -> dict[str, Any]:
    return {"fields": {"content": {}, "tool_calls": {"repeats": True, **field}}}


@pytest.mark.parametrize(
    ("spec", "answer"),
    [
        (PONDER, WRITTEN),
        (
            with_calls(open="<<", close=">>", content="json", transform={"function": "{content}"}),
            'I look. <<{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}>>',
        ),
        (
            with_calls(
                open=["<<call", "<<CALL"],
                content="json",
                transform={
                    "function": {"name": "{content.tool_name}", "arguments": "{content.parameters}"}
                },
            ),
            'I look.<<CALL {"tool_name": "get_weather", '
            '"parameters": {"city": "Paris", "days": 3}}',
        ),
        (
            with_calls(
                open_pattern=r"@(?P<name>\w+)",
                close="@",
                content="json",
                content_args={"unquoted_keys": True, "string_delims": [["~", "~"]]},
            ),
            "I look.@get_weather{city:~Paris~,days:3}@",
        ),
        (
            with_calls(open_pattern=r"!(?P<name>\w+)!\s*", content="json"),
            'I look. !get_weather! {"city": "Paris", "days": 3}',
        ),
    ],
)
def test_a_new_family_is_a_dictionary(spec: dict[str, Any], answer: str) -> None:
    """Nothing but its template says how it writes."""
    template = ResponseTemplate(spec)
    thinking = "Hm." if "ponder" in answer else ""
    expected = (thinking, "I look.", [PARIS])
    assert read(template, [answer], streams=False) == expected
    for split in range(len(answer) + 1):
        assert read(template, [answer[:split], answer[split:]]) == expected, split
    again = answer[len(thinking) and answer.index("I") :]
    assert read(template, [*f"{answer} {again}"])[2] == [PARIS] * 2
    assert read(template, [CALL]) == ("", "", [("now", {})]), "and as all others"


def test_a_template_reads_the_answers_of_its_model() -> None:
    template = ChatTemplate("{{ messages }}{{ tools }}", response_template=PONDER)
    assert template.tags == Tags("<ponder>", "</ponder>")
    codec = BpeTokenizer(template, {"<ponder>": False, "</ponder>": False})
    form = form_of(codec, [65], TOOLS)
    assert sorted(form.marks.values()) == ["</ponder>", "<ponder>"]
    assert form.read(WRITTEN).calls == [ToolCall("get_weather", '{"city": "Paris", "days": 3}')]


ANCHORS: list[dict[str, Any]] = [
    {"start_anchor": ["<bot>", "<tool>"]},
    {"start_anchor_pattern": r"<(?:bot|tool)\s?>"},
]


@pytest.mark.parametrize("anchor", ANCHORS)
def test_a_new_answer_does_not_think_on_where_an_earlier_one_was_cut(
    anchor: dict[str, Any],
) -> None:
    """As transformers reads a prompt: from where the last answer starts."""
    spec = {"fields": PONDER["fields"]} | anchor
    template = ChatTemplate("{{ messages }}{{ tools }}", response_template=spec)
    codec = BpeTokenizer(template, {"<ponder>": False, "</ponder>": False})
    for prompt, is_begun in (
        ("<bot><ponder>Hm.", True),
        ("<bot><ponder>Hm.<user>And?<bot>", False),
        ("<bot><ponder>Hm.<tool>3<bot><ponder>", True),
        ("<bot><ponder>Hm.</ponder><user>And?<tool>", False),
    ):
        assert form_of(codec, codec.encode(prompt, special_tokens=False)).is_begun == is_begun


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"fields": {}, "start_anchor_pattern": r"\w*"}, "expected texts before an answer"),
        ({"fields": {}, "start_anchor": ""}, "expected one text, a list, or an expression"),
        ([], "expected an object with `fields`"),
        ({"fields": {"content": {}}, "more": 1}, "got more in the response template, expected"),
        ({"version": 2, "fields": {}}, "got version 2"),
        ({"fields": {"citations": {}}}, "got the field 'citations'"),
        ({"fields": {"content": {"regex": "a"}}}, "as content in the response template"),
        ({"fields": {"thinking": {"close": "a"}}}, "got thinking without open"),
        (
            {"fields": {"thinking": {"open": "a"}, "reasoning": {"open": "b"}}},
            "one field of thinking",
        ),
        ({"fields": {"thinking": {"open": ["a", 3]}}}, "expected one text, a list, or an expr"),
        ({"fields": {"thinking": {"open": "a", "open_pattern": "b"}}}, "expected one text, a list"),
        ({"fields": {"thinking": {"open_pattern": "(?=a)(?!b)"}}}, "see character 6"),
        (
            {"fields": {"thinking": {"open_pattern": r"\w*"}}},
            "expected texts that open and close it",
        ),
        (
            {"fields": {"thinking": {"open": "a", "content": "int"}}},
            "got content 'int' of thinking",
        ),
        (with_calls(open="a", content="kv-lines"), "got content 'kv-lines' of tool_calls"),
        (with_calls(open="a", content="xml-inline"), "a capture `name` before the arguments"),
        (with_calls(open_pattern=r"(?P<name>\w+)", content="json"), "a text that opens them"),
        (with_calls(open_pattern="a(?P<name>b)", content="xml-inline"), "got tag_pattern 'None'"),
        (with_calls(open_pattern=r"(.*)*x(?P<name>b)", content="json"), "a text that opens them"),
        (with_calls(open_pattern="a" * 3000, content="json"), "got the expression"),
        (with_calls(open_pattern="(" * 1500, content="json"), "got the expression"),
    ],
)
def test_a_template_that_says_what_is_not_read_is_one_line(spec: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        ResponseTemplate(spec)


def test_expressions_of_strangers_never_go_back() -> None:
    """Nested repeats over 4,000 characters are some thousand steps, not 2 to the power of them."""
    for source in (
        "<x(?:(?:a{0,9}b?){0,9}c?)*>",
        "<x(?:(?:a|b|ab)*c?)*(?:(?=a)b)?>",
        "<x(?:(?:(?:ab?)*c)?a)*>",
    ):
        pattern = Pattern(source)
        work = calls_in(functools.partial(pattern.match, "<x" + "a" * 4000, 0))
        assert work < 60_000
    assert Pattern(r"<f(?:=|:)(?P<name>\w+)>").match("<f:now>", 0) == (7, {"name": "now"})
    assert Pattern("a(?:bc)?d").match("ab", 0)[0] == MORE
    assert Pattern("a(?:bc)?d").match("abd", 0)[0] == NO


# ---- reports of users (shared causes: judged as raw text; promised before it was known) ----


def says(text: str, tags: Tags | None = THINK, is_begun: bool = False) -> GenerationResult:
    form = AnswerForm(tags, is_begun, family="hermes", tools=TOOLS)
    return GenerationResult(text, [], "stop", Stats(), form=form)


def both(result: GenerationResult) -> tuple[str, str, list[ToolCall]]:
    """Returns thinking, text and calls, which are those of the stream, too."""
    whole = (result.reasoning, result.content, result.tool_calls)
    for size in (1, 5, 1000):
        parts = [part for chunk in chunks_of(result, size) for part in chunk.parts]
        thinking = "".join(part.text for part in parts if part.kind == "thinking")
        assert (thinking, *joined(parts)) == whole
    return whole


QWEN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if tools %}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if 0 %}<think></think>{% endif %}"
)


def answered(ids_or_texts: list[Any], **options: Any) -> tuple[Any, list[Any]]:
    """Returns the result and the chunks of an engine that says this, texts in ordinary letters."""
    names = {"<think>": False, "</think>": False}
    codec = BpeTokenizer(ChatTemplate(QWEN), names)
    plain = BpeTokenizer(None, {})
    written: list[int] = []
    for each in ids_or_texts:
        kind = codec if each in names else plain
        written += kind.encode(each, special_tokens=False)
    engine = make_engine(
        "parallelspec", vocab_size=codec.vocab_size, max_length=600, tokenizer=codec
    )
    prompt = engine.encode(HELLO)

    def say(tokens: Any, logits_V: Any) -> Any:
        at = len(tokens) - len(prompt)
        logits_V[written[at] if at < len(written) else codec.eos[0]] += 1000
        return logits_V

    chunks = [*engine.chunks(HELLO, logits_processor=say, max_new_tokens=200, **options)]
    return chunks[-1].result, chunks


@pytest.mark.parametrize("opening", ["<think>", "\n<think>"])
def test_stop_strings_do_not_fire_inside_thinking(opening: str) -> None:
    texts = [opening[:-7], "<think>", "Question: why?", "</think>", "\n\nSo it is. Question: next"]
    result, chunks = answered(texts, stop=["Question:", "\n\n"])
    assert (result.reasoning, result.content) == ("Question: why?", "So it is. ")
    assert (result.finish_reason, result.stop) == ("stop", "Question:")
    assert "".join(chunk.text for chunk in chunks) == result.text
    plain, _ = answered(["It is. Question: next"], stop=["Question:"])
    assert plain.content == "It is. "


def test_a_tag_in_letters_does_not_end_the_thinking() -> None:
    """The model's own mark is one token; its name in ordinary letters is what it thinks about."""
    result, chunks = answered(
        ["<think>", "It writes </think> here.", "</think>", "Yes. <think>a</think>"]
    )
    expected = ("It writes </think> here.", "Yes. <think>a</think>")
    assert (result.reasoning, result.content) == expected
    parts = [part for chunk in chunks for part in chunk.parts]
    assert "".join(part.text for part in parts if part.kind == "thinking") == expected[0]
    assert joined(parts)[0] == expected[1]
    assert result.usage.reasoning_tokens == len("It writes </think> here.") + 2
    stopped, _ = answered(["<think>", "a </think> b", "</think>", "Yes b."], stop=["b"])
    assert (stopped.reasoning, stopped.content) == ("a </think> b", "Yes ")


@pytest.mark.parametrize("between", ["\n", "", "\nSo.\n"])
def test_a_second_block_of_thinking_is_no_content(between: str) -> None:
    text = f"<think>a</think>{between}<think>b</think>Yes."
    content = f"{between.strip()}\nYes." if between.strip() else "Yes."
    assert both(says(text)) == ("a\nb", content, [])
    assert both(says("It says <think>a</think>."))[1] == "It says <think>a</think>."
    assert both(says("<think>a</think>Write <think> first."))[1] == "Write <think> first."
    by_tokens, _ = answered(["<think>", "a", "</think>", "So ", "<think>", "b", "</think>", "Yes."])
    assert (by_tokens.reasoning, by_tokens.content) == ("a\nb", "So\nYes.")


@pytest.mark.parametrize("tags", [THINK, HARMONY])
def test_a_call_at_the_end_of_unclosed_thinking_is_a_call(tags: Tags) -> None:
    opening = "<|channel|>analysis<|message|>" if tags is HARMONY else "<think>"
    thinking, text, calls = both(says(f"{opening}I look. {CALL}\n", tags))
    assert (thinking, text) == (f"I look. {CALL}", "")
    assert calls == [ToolCall("now", "{}")]
    assert both(says(f"{opening}As {CALL} is no good, I", tags))[2] == []
    assert both(says(f"<think>As {CALL}</think>Yes."))[1:] == ("Yes.", [])
    assert both(says(f"{opening}I {CALL[:-20]}", tags))[2] == []


@pytest.mark.parametrize(
    ("arguments", "read_as"),
    [
        ('{"city": "a\nb\tc"}', {"city": "a\nb\tc"}),
        ('{"city": "\\"\n\\""}', {"city": '"\n"'}),
        ("{'city': 1}", None),
        ("{city: 1}", None),
        ("[1]", None),
        ("null", None),
        ('{"days": NaN}', ...),
    ],
)
def test_arguments_of_a_stream_are_json_or_no_call(arguments: str, read_as: Any) -> None:
    text = f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>'
    if read_as is ...:  # found out too late for a stream; the whole answer has no call
        assert says(text).tool_calls == []
        return
    _, content, calls = both(says(text, None))
    if read_as is None and arguments != "null":
        assert (content, calls) == (text, [])
    else:
        assert [json.loads(call.arguments_json) for call in calls] == [read_as or {}]


@pytest.mark.parametrize("arguments", ["[1]", "null", '{"a": "b', "{", "", "no JSON", [1], None, 3])
def test_a_broken_call_is_taken_back(arguments: Any) -> None:
    """A client sends back what it got; a template that walks through arguments reads it."""
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% for k, v in "
        "c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"
    )
    function = {"name": "now", "arguments": arguments}
    messages: list[dict[str, Any]] = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "failed"},
    ]
    nothing = arguments in (None, "", "null")
    expected = "" if nothing else f"arguments={arguments};"
    assert ChatTemplate(source).render(messages) == expected
