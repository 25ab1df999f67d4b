"""Tool calls are read from answers as each family writes them, forced on request, and shown to the
model; what is not a whole call stays text."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bpe_tokenizer import BpeTokenizer
from gates import calls_in
from small import known
from toy_engine import make_engine

from spec_runtime.dialogue import tools
from spec_runtime.dialogue.chat_template import ChatTemplate
from spec_runtime.dialogue.families import FAMILIES
from spec_runtime.dialogue.reader import Part, ResponseReader, joined
from spec_runtime.dialogue.response_template import family_of, template_of
from spec_runtime.dialogue.tools import (
    ToolCall,
    answer_or_call,
    checked_tools,
    forced_call,
    format_of_choice,
    strict_calls,
)
from spec_runtime.errors import UserError
from spec_runtime.grammar.base import read
from spec_runtime.grammar.formats import read_format
from spec_runtime.text.prompt import encode_prompt


def parse_calls(text: str, family: str, tools: Any = None) -> tuple[str, list[ToolCall]]:
    """Returns the text of a whole answer without its calls, and the calls."""
    template = template_of(None, family)
    return joined(ResponseReader(template, tools, streams=False).push(text, is_end=True))


WEATHER = ToolCall("get_current_weather", '{"location": "San Francisco, CA"}')
TIME = ToolCall("get_time", '{"zone": "Europe/Zürich", "dst": true}')
BOTH = [WEATHER, TIME]
W, T = (f'"name": "{call.name}", "arguments": {call.arguments_json}' for call in BOTH)
LLAMA_W, LLAMA_T = (f"{{{each}}}".replace("arguments", "parameters") for each in (W, T))
IDS = '[TOOL_CALLS]a[CALL_ID]x9[ARGS]{}[TOOL_CALLS]b{"c": 1}'
TAGGED = [f"<tool_call>\n{{{each}}}\n</tool_call>" for each in (W, T)]

# Forms that models of every family fall into; W and T stand for the two calls.
FORMS: list[tuple[str, str | None, list[ToolCall]]] = [
    ("W", "", [WEATHER]),
    ("```json\nW\n```", "", [WEATHER]),
    ("Here you are:\n\n```json\n[W, T]\n```\nIs that all?", "Here you are:\nIs that all?", BOTH),
    ("```json\nW\n```\n```json\nT\n```", "", BOTH),
    ("```\nW\nT\n```", "", BOTH),
    ("<tool_call>\nW\n</tool_call>\n<tool_call>\nT\n</tool_call>", "", BOTH),
    ("```python\nprint(1)\n```", None, []),
    ('```json\n{"name": 3}\n```', None, []),
    ("I call W", None, []),
]
# (family, an answer as such models give it, its content, its calls)
ANSWERS: list[tuple[str, str, str | None, list[ToolCall]]] = [
    ("llama3", LLAMA_W, "", [WEATHER]),
    ("llama3", f'<|python_tag|>{{"type": "function", {W}}}', "", [WEATHER]),
    ("llama3", f"{LLAMA_W}; {LLAMA_T}", "", BOTH),
    ("llama3", f"\n{{{W}}}\n{{{T}}}\n", "", BOTH),
    ("llama3", f"I would call {{{W}}}", None, []),
    ("llama3", '{"name": "Ada", "born": 1815}', None, []),
    ("mistral", f"[TOOL_CALLS] [{{{W}}}]", "", [WEATHER]),
    ("mistral", f'[TOOL_CALLS][{{{W}, "id": "VvvODy9mT"}}, {{{T}}}]', "", BOTH),
    ("mistral", f"Let me look.[TOOL_CALLS][{{{W}}}]", "Let me look.", [WEATHER]),
    ("mistral", f" [{{{W}}}]", "", [WEATHER]),  # the marker is a special token
    ("mistral", '[TOOL_CALLS]now[ARGS]{"zone": "UTC"}', "", [ToolCall("now", '{"zone": "UTC"}')]),
    ("mistral", IDS, "", [ToolCall("a", "{}"), ToolCall("b", '{"c": 1}')]),
    ("mistral", "See [1] and [2].", None, []),
    ("hermes", TAGGED[0], "", [WEATHER]),
    ("hermes", "a <tool_car> and <tool_call> are no calls <", None, []),
    ("hermes", '{"arguments": {}, "name": "f"}', "", [ToolCall("f", "{}")]),
    ("hermes", "\n".join(TAGGED), "", BOTH),
    (
        "hermes",
        f"<think>\nhm\n</think>\n\n<tool_call>\n{{{W}}}",
        "<think>\nhm\n</think>",
        [WEATHER],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call> done',
        "done",
        [ToolCall("f", "{}")],
    ),
    ("phi", f"<|tool_call|>[{{{W}}}]<|/tool_call|>", "", [WEATHER]),
    ("phi", f"functools[{{{W}}}, {{{T}}}]", "", BOTH),
    ("phi", f"[{{{W}}}]", "", [WEATHER]),
    ("phi", f"<|tool_call|>{{{W}}}<|/tool_call|><|tool_call|>{{{T}}}<|/tool_call|>", "", BOTH),
    ("phi", f"{{{W}}}{{{T}}}", "", BOTH),
    ("phi", f"{{{W}}} is how", "is how", [WEATHER]),
    ("phi", f"Sure: functools[{{{W}}}]", "Sure:", [WEATHER]),
    ("smollm", f"<tool_call>[{{{W}}}]</tool_call>", "", [WEATHER]),
    ("smollm", f"<tool_call>[\n{{{W}}},\n{{{T}}}\n]</tool_call>", "", BOTH),
    ("smollm", "<tool_call>[]</tool_call>", None, []),
    ("hermes", f"\n{{{W}}}\n{{{T}}}\n", "", BOTH),  # the tags may be special tokens
    ("smollm", f"[{{{W}}}]", "", [WEATHER]),
    ("smollm", f"{{{W}}} is how", "is how", [WEATHER]),
    *(
        (family, text.replace("W", f"{{{W}}}").replace("T", f"{{{T}}}"), content, calls)
        for family in FAMILIES
        for text, content, calls in FORMS
    ),
]


MARKS = template_of(None, "hermes").marks


def CallReader(family: str, tools: Any = None, at_most: int | None = None) -> ResponseReader:
    return ResponseReader(template_of(None, family), tools, at_most)


GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "structured.md"
TRANSCRIPTS = [
    pytest.param(found[2].replace("⏎", "\n"), id=found[1])
    for found in re.finditer(
        r"^\| ([^|]+\| [^|]+) \| `+ ?(.*get_weather.*?) ?`+ \|$", GUIDE.read_text("utf-8"), re.M
    )
]
PARIS = ToolCall("get_weather", '{"city": "Paris", "days": 3}')
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
PARAMETERS = ["{", '"city": "Paris"', ', "days": 3}']  # as they come
GET_WEATHER = {"name": PARIS.name, "parameters": {"type": "object", "properties": PROPERTIES}}


@pytest.mark.parametrize("text", TRANSCRIPTS)
def test_every_familys_call_is_read(text: str) -> None:
    """The guide's table: alone, twice and after text, whole and character by character."""
    assert len(TRANSCRIPTS) == 30
    assert set(re.findall(r'<[|｜][^<>"]+>|\[[A-Z_]+\]', text)) <= MARKS, "may be special tokens"
    offered: list[dict[str, Any]] = [{"function": GET_WEATHER}, {"function": {"name": "get"}}]
    is_marked = not re.match(r"\{|\[\w+\(", text)
    said = f"Let me see.\n{text}" if is_marked else text
    for answer, content, calls in (
        (text, "", [PARIS]),
        (f"{text}\n{text}\n", "", [PARIS, PARIS]),
        (said, "Let me see." if is_marked else "", [PARIS]),
        (f"{text}\n\nSo < be it.", "So < be it.", [PARIS]),
    ):
        assert parse_calls(answer, "hermes", offered) == (content, calls), answer
        reader = CallReader("hermes", offered)
        parts, rest = parts_of(reader, answer, 1)
        assert joined(parts + rest) == (content, calls), answer
        pieces = [part.text for part in parts if part.kind == "arguments"]
        is_json = PARIS.arguments_json in text
        assert pieces == len(calls) * [*(PARIS.arguments_json if is_json else PARAMETERS)]
    assert parse_calls(said, "hermes", offered[1:]) == (said, [])
    for end in range(said.rindex("3") + 1):
        reader = ResponseReader(template_of(None, "hermes"), offered, streams=False)
        parts = reader.push(said[:end], is_end=True, is_cut=True)
        assert joined(parts) == (said[:end], []), end


OPTIONAL = {"type": ["string", "null"]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, " a</parameter>\nb\n", " a</parameter>\nb\n"),
        ({"type": "integer"}, "5", 5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "TRUE", True),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "number"}, "5.5", 5.5),
        ({"type": ["null", "boolean"]}, "NULL", None),
        ({"type": ["string", "boolean"]}, "TRUE", "TRUE"),
        ({}, "TRUE", "TRUE"),
        ({"type": "array"}, '["a", 1]', ["a", 1]),
        ({"type": "object"}, "{no", "{no"),
        ({"type": "array"}, "['a', None]", ["a", None]),
        ({"type": "object"}, "{'a': True}", {"a": True}),
        ({"type": "object"}, "{1, 2}", "{1, 2}"),
        ({}, "5", 5),
        ({}, "five", "five"),
        (None, "5", 5),
        (OPTIONAL, "5", "5"),
        (OPTIONAL, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "string"}, {}]}, "5", 5),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 1}, "1", 1),
        ({"$ref": "#/$defs/Id"}, "7", "7"),
        ({"$ref": "#/$defs/a~1b"}, "7", "7"),
        ({"allOf": [{"$ref": "#/$defs/Id"}]}, "7", "7"),
        ({"allOf": [{"minLength": 1}, OPTIONAL]}, "7", "7"),
        ({"allOf": [{}]}, "7", 7),
        ({"$ref": "#/$defs/Loop"}, "7", 7),
    ],
)
def test_parameters_are_read_by_their_schema(schema: Any, text: str, value: Any) -> None:
    name = {"type": "string"}
    definitions = {"Id": name, "a/b": name, "Loop": {"$ref": "#/$defs/Loop"}}
    properties = {"v": schema} if schema is not None else {}
    parameters = {"properties": properties, "$defs": definitions}
    answer = f"<tool_call><function=f><parameter=v>\n{text}\n</parameter></function></tool_call>"
    content, [call] = parse_calls(
        answer, "hermes", [{"function": {"name": "f", "parameters": parameters}}]
    )
    assert (content, call.name, json.loads(call.arguments_json)) == ("", "f", {"v": value})


XML = '<parameter name="a">1</parameter>\n<parameter name="b">\n</parameter>'
QWEN_CALL = "<function=f>\n{}</function>", "<parameter={}>\n{}\n</parameter>\n"
GLM_CALL = "<tool_call>f\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>"
XML_CALL = '<invoke name="f">{}</invoke>', '<parameter name="{}">{}</parameter>'


@pytest.mark.parametrize(
    ("forms", "value"),
    [
        (QWEN_CALL, "<parameter=b>\n1\n</parameter>\n<parameter=c>\n</parameter>\n</function>"),
        (QWEN_CALL, "<parameter=b>\n<parameter=c>\n2\n</parameter>\n</parameter>"),
        (QWEN_CALL, "<parameter=b>\n<parameter=c>\n2\n</parameter>"),
        (QWEN_CALL, "its <parameter=b> is never closed"),
        (QWEN_CALL, "a </parameter> b"),
        (GLM_CALL, "<arg_key>b</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
        (XML_CALL, f"<config>{XML}</config>\n{XML}\n</invoke>"),
    ],
)
def test_values_may_hold_calls(forms: tuple[str, str], value: str) -> None:
    """Whole, and in pieces; text and a second call come after it."""
    whole, each = forms
    last = each.format("n", 7)
    answer = f"{whole.format(each.format('a', value) + last)} So.\n{whole.format(last)}"
    offered = tool({"properties": {"a": {"type": "string"}, "n": {"type": "integer"}}})
    for size in (1, 7, len(answer)):
        parts, rest = parts_of(CallReader("hermes", offered), answer, size)
        content, calls = joined(parts + rest)
        found = [json.loads(call.arguments_json) for call in calls]
        assert (content, found) == ("So.", [{"a": value, "n": 7}, {"n": 7}]), size


QUOTED = '<|"|>it\'s "so, then}"<|"|>'


@pytest.mark.parametrize(
    ("form", "arguments", "expected"),
    [
        ("python", "", {}),
        ("python", "a=1, b='x, (y)', c=\"it's\"", {"a": 1, "b": "x, (y)", "c": "it's"}),
        ("python", "a=[1, [2, {'b': None}]],b=-0.5", {"a": [1, [2, {"b": None}]], "b": -0.5}),
        ("python", 'a={"b": true}, c=False', {"a": {"b": True}, "c": False}),
        ("python", "a='\\n\\''", {"a": "\n'"}),
        ("gemma", "", {}),
        ("gemma", f"a:{QUOTED},b:-0.5", {"a": 'it\'s "so, then}"', "b": -0.5}),
        ("gemma", 'a:[<|"|>x<|"|>,1,true],b:{c:null}', {"a": ["x", 1, True], "b": {"c": None}}),
        ("gemma", 'a:{d_e:<|"|>y: z<|"|>}', {"a": {"d_e": "y: z"}}),
        ("gemma", 'a:<|"|><|"|>, b:plain', {"a": "", "b": "plain"}),
    ],
)
def test_calls_that_are_no_json_are_read(form: str, arguments: str, expected: Any) -> None:
    """Alone, and as the first of two, whole and character by character."""
    for rest in ([], [ToolCall("g", '{"x": 1}')]):
        if form == "python":
            begin, end = ("<|tool_call_start|>[", ", g(x=1)]") if rest else ("[", "]")
            answer = f"{begin}f({arguments}){end}"
        else:
            answer = f"<|tool_call>call:f{{{arguments}}}<tool_call|>"
            answer += "<|tool_call>call:g{x:1}<tool_call|>" if rest else ""
        content, calls = parse_calls(answer, "hermes")
        parts, last = parts_of(CallReader("hermes"), answer, 1)
        assert (content, calls) == joined(parts + last)
        assert (content, calls[0].name, json.loads(calls[0].arguments_json)) == ("", "f", expected)
        assert calls[1:] == rest


BEGUN = '<tool_call>{"name": "f", "arguments": {"a": "b}'


def tool(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def test_types_are_read_once_whatever_refers_to_what() -> None:
    """A type that is an alternative of itself says nothing; those beside it are as they were."""
    itself, other = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}
    chain = {f"c{i}": {"$ref": f"#/$defs/c{i + 1}"} for i in range(500)}
    for definitions in (
        {"a": {"anyOf": [itself] * 40}},
        {"a": {"anyOf": [other] * 40}, "b": {"oneOf": [itself] * 40}},
        {"a": {"anyOf": [{"anyOf": [itself] * 10}] * 10}},
        {"a": {"$ref": "#/$defs/a"}},
        {"a": {"$ref": "#/$defs/c0"}, **chain},
        {"a": {"enum": [*range(1000)]}},
    ):
        properties = {**{f"p{i}": itself for i in range(40)}, "text": {"type": "string"}}
        tools = tool({"type": "object", "properties": properties, "$defs": definitions})
        text = "<function=f><parameter=p1>5</parameter><parameter=text>5</parameter></function>"
        arguments = (text, "hermes", tools)
        work = calls_in(functools.partial(parse_calls, *arguments))
        assert parse_calls(*arguments) == ("", [ToolCall("f", '{"p1": 5, "text": "5"}')])
        assert work < 20_000


def test_tools_are_checked_once() -> None:
    checked = checked_tools(tool({"type": "object"}))
    assert checked_tools(checked) is checked


def test_broken_parameters_end_a_stream() -> None:
    for text, content, arguments in (
        ("<function=f><no></function>", "<no></function>", "{}"),
        ("<function=f><parameter=a>1</parameter><parameter=b>2</para", "", '{"a": 1'),
        (BEGUN, "", '{"a": "b}'),
        (f"{BEGUN}\\", "", '{"a": "b}\\'),
    ):
        parts, rest = parts_of(CallReader("hermes"), text, 1)
        assert joined(parts + rest) == (content, [ToolCall("f", arguments)])
    text = """<tool_call>{"name": "f", "arguments": {'a': 1}}</tool_call> Oh."""
    assert joined(CallReader("hermes").push(text, is_end=True)) == (text, []), "no JSON at once"


def test_white_space_at_the_end_stays_where_nothing_is_called() -> None:
    assert parse_calls("Yes. \n", "hermes") == ("Yes. \n", [])
    called = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert parse_calls(f"Look: {called} Done. \n", "hermes")[0] == "Look:\nDone."


def test_calls_of_tools_that_were_not_offered_stay_text() -> None:
    """So do those after them in a list; the answer's other calls are read."""
    offered = [{"function": {"name": WEATHER.name}}]
    for family, text, _, calls in ANSWERS:
        if TIME not in calls and WEATHER in calls:
            assert parse_calls(text, family, offered) == parse_calls(text, family)
            assert parse_calls(text, family, []) == (text, [])
    for family, text, content in (
        ("llama3", f"{LLAMA_W}; {LLAMA_T}", LLAMA_T),
        ("mistral", f"[TOOL_CALLS][{{{W}}}, {{{T}}}]", f"{{{T}}}]"),
        ("smollm", f"<tool_call>[{{{T}}}, {{{W}}}]</tool_call>", None),
    ):
        expected = (text, []) if content is None else (content, [WEATHER])
        assert parse_calls(text, family, offered) == expected
        parts, rest = parts_of(CallReader(family, offered), text, 1)
        assert joined(parts + rest) == expected
    assert parse_calls("\n".join(TAGGED), "hermes", offered) == (TAGGED[1], [WEATHER])


def parts_of(reader: ResponseReader, text: str, size: int) -> tuple[list[Part], list[Part]]:
    """Returns the parts that come with the pieces of an answer, and those at its end."""
    parts = [part for i in range(0, len(text), size) for part in reader.push(text[i : i + size])]
    return parts, reader.push("", is_end=True)


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_streams_give_the_same_calls_piece_by_piece(size: int) -> None:
    for family, text, content, calls in ANSWERS:
        reader = CallReader(family)
        expected = text if content is None else content, calls
        parts, rest = parts_of(reader, text, size)
        assert joined(parts + rest) == expected == parse_calls(text, family), text
        only, rest = parts_of(CallReader(family, at_most=1), text, size)
        assert joined(only + rest)[1] == calls[:1], text
        is_read_whole = '"arguments": "' in text or text.startswith('{"arguments"')
        if size == 1 and calls and not is_read_whole:
            begun = sum(part.kind == "call" for part in parts)
            assert begun == len(calls), "a call waits for the end"
            assert max(len(part.text) for part in parts if part.kind == "arguments") == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_broken_calls_stay_text(family: str) -> None:
    whole = {each: text for each, text, _, calls in reversed(ANSWERS) if calls == [WEATHER]}[family]
    for end in range(whole.index("{") + 1, whole.rindex("}")):
        assert parse_calls(whole[:end], family) == (whole[:end], []), end
    for text in (
        "",
        "Hello.",
        '{"name": 3, "arguments": {}}',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f"',
        '[TOOL_CALLS][{"name": "f", "arguments": "no JSON"}]',
        "<tool_call>" * 50 + "[" * 3000,
        "functools" + "[" * 100_000,
        "functools" * 50_000,
        '<tool_call>{"name": "f", "arguments": "' + "[" * 100_000 + '"}</tool_call>',
        "[TOOL_CALLS]f[ARGS]{",
        *("[f(1)]", "[f](x=1)", "[f(a='b)]", "[f(a=1", "f(a=1)", "[f(a=)]"),
        *("<function=f>1</function>", "<function=f><parameter=a>1</parameter>", "<tool_call>f<b>"),
        '<invoke name="f"><parameter name="a">1</invoke>',
    ):
        assert parse_calls(text, family) == (text, []), text[:50]


def test_families_are_told_by_their_chat_templates() -> None:
    assert family_of(None) == family_of("{{ messages }}") == "smollm"
    assert family_of("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert family_of("{{ tools }} [AVAILABLE_TOOLS]") == "mistral"
    assert family_of("{% if builtin_tools or tools %}<|python_tag|>{% endif %}") == "llama3"
    assert family_of("<|tool|>{{ message['tools'] }}<|/tool|>") == "phi"
    assert family_of("{{ tools }}<|channel|>commentary json<|message|>") == "harmony"


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "description": "Tells the time",
            "parameters": {
                "type": "object",
                "properties": {"zone": {"$ref": "#/$defs/Zone"}},
                "required": ["zone"],
                "$defs": {"Zone": {"enum": ["UTC", "CET"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]


TAGS: list[dict[str, bool]] = [
    {"<tool>": False, "</tool>": False},  # of which no family knows
    {"<tool_call>": False, "</tool_call>": False},  # as Qwen's
    {"<tool_call>": True, "</tool_call>": True},
]


@pytest.mark.parametrize("name", ["3d_render", "_", "-x", "mcp__a.b-c", "été", "a" * 128])
def test_a_name_that_keeps_to_the_rule_is_taken_and_read_back(name: str) -> None:
    offered = checked_tools([{"type": "function", "function": {"name": name}}])
    answers = (
        f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>',
        f"<tool_call>\n<function={name}>\n</function>\n</tool_call>",
        f"[TOOL_CALLS]{name}[ARGS]{{}}",
        f"<|tool_call_start|>[{name}()]<|tool_call_end|>",
    )
    for text in answers:
        assert parse_calls(text, "hermes", offered)[1] == [ToolCall(name, "{}")], text


@pytest.mark.parametrize("name", ["", ".a", "a" * 129, "a b", "a/b", "a\n"])
def test_a_name_that_does_not_keep_to_the_rule_is_refused_by_the_rule(name: str) -> None:
    rule = "a name of 1 to 128 letters, digits, '_', '-' and, after the first, '.'"
    with pytest.raises(UserError, match=re.escape(rule)):
        checked_tools([{"type": "function", "function": {"name": name}}])


@pytest.mark.parametrize("tags", TAGS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [None, "get_time", "stop"])
def test_a_forced_call_is_read_back(family: str, name: str | None, tags: dict[str, bool]) -> None:
    """Whatever the model would say: the toy knows nothing of tools. Tags that are tokens of the
    tokenizer are written as these tokens."""
    pytest.importorskip("llguidance", reason="needs the extra `grammar`")
    codec = BpeTokenizer(added=tags)
    engine = make_engine("prompt_lookup", vocab_size=codec.vocab_size, tokenizer=codec)
    kind = forced_call(TOOLS, family, name)
    bias = {ord("}"): 50.0, ord('"'): 9.0}
    result = engine.generate([65], response_format=kind, max_new_tokens=150, logit_bias=bias)
    assert result.finish_reason == "stop"
    content, [call] = parse_calls(result.text, family, TOOLS)
    assert content == ""
    is_tagged = family in ("hermes", "smollm") and "<tool_call>" in tags
    first_tag = codec.vocab_size - len(tags)
    found = [token for token in result.token_ids if token >= first_tag]
    assert found == ([first_tag, first_tag + 1] if is_tagged else [])
    assert name in (None, call.name)
    if call.name == "get_time":
        assert json.loads(call.arguments_json)["zone"] in ("UTC", "CET")


def follows(kind: dict[str, Any], text: str) -> bool:
    """Says whether a whole answer follows the grammar of this response_format."""
    codec = BpeTokenizer()
    grammar = known(read_format(kind))
    matcher = codec.matcher(grammar, codec.vocab_size)
    ids = [*codec.encode(text, special_tokens=False), *codec.eos]
    return read(matcher, ids) == len(ids)


PARTS: dict[str, Any] = {
    "v": {"type": "integer"},
    "next": {"$ref": "#"},
    "w": {"$ref": "#/properties/v"},
}
# A name like a keyword's, and a value like a reference.
PARTS |= {"enum": {"$ref": "#/properties/v"}, "same": {"const": {"$ref": "#"}}}
NODE = {"type": "object", "properties": PARTS}


@pytest.mark.parametrize("family", ["llama3", "hermes", "smollm"])
def test_parameters_refer_to_themselves(family: str) -> None:
    """To their root and to their other parts, as schemas made of types do; a value refers to
    nothing."""
    pytest.importorskip("llguidance", reason="needs the extra `grammar`")
    tools = [{"function": {"name": name, "parameters": NODE}} for name in ("f", "g.h")]
    kind = forced_call(tools, family)
    key = "parameters" if family == "llama3" else "arguments"

    def answer(arguments: str) -> str:
        call = f'{{"name": "g.h", "{key}": {arguments}}}'
        call = f"[{call}]" if family == "smollm" else call
        return f"{kind['begin']}{call}{kind['end']}"

    assert follows(kind, answer('{"v": 1, "next": {"v": 2, "next": {"w": 3}}}'))
    assert not follows(kind, answer('{"next": {"name": "f"}}'))
    assert not follows(kind, answer('{"w": "a"}'))
    assert follows(kind, answer('{"enum": 4, "same": {"$ref": "#"}}'))
    assert not follows(kind, answer('{"enum": "a"}'))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_or_a_call(family: str) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `grammar`")
    schema = {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"]}
    kind = answer_or_call(schema, TOOLS[1:], family)
    call = f'{{"name": "stop", "{"parameters" if family == "llama3" else "arguments"}": {{}}}}'
    if family in ("mistral", "phi", "smollm"):
        call = f"[{call}]"
    forced = kind["formats"][1]
    assert follows(kind, f"{forced['begin']}{call}{forced['end']}")
    assert follows(kind, '{"v": 1}')
    assert not follows(kind, '{"w": 1}')


STRICT: list[dict[str, Any]] = [
    {"function": {"strict": True, **GET_WEATHER}},
    {"function": {"name": "weather", "parameters": {"required": ["place"]}}},
]


def test_arguments_of_a_strict_tool_are_exact_in_free_text() -> None:
    """In all forms of the guide in which they are JSON; those of other tools and texts are free."""
    pytest.importorskip("llguidance", reason="needs the extra `grammar`")
    assert strict_calls(TOOLS) is strict_calls([]) is None
    codec, grammar = BpeTokenizer(), read_format(strict_calls(STRICT))
    assert grammar is not None
    matcher = codec.matcher(grammar, codec.vocab_size)

    def is_free(text: str) -> bool:
        ids = [*codec.encode(text, special_tokens=False), *codec.eos]
        num_read = read(matcher, ids)
        matcher.retreat(num_read)
        return num_read == len(ids)

    for transcript in TRANSCRIPTS:
        (text,) = transcript.values
        said = f"It is 3.\n{text}\n{text}\nSo be it: get_weather {{3}}"
        assert is_free(said), said
        if "<function=" in str(text):
            continue  # what follows the name may be parameters between tags
        for wrong in ('"days": "3"', '"days": 3, "more": 4', '"hours": 3'):
            changed = said.replace('"days": 3', wrong)
            assert is_free(changed) == (changed == said), changed
        assert is_free(said.replace("get_weather", "weather").replace('"days": 3', "2"))


def test_a_strict_call_is_exact_in_a_form_that_a_row_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in one that only a thinking model writes, which has an end that may be left out."""
    pytest.importorskip("llguidance", reason="needs the extra `grammar`")
    name = r"(?P<name>[\w-][\w.-]{0,127})"
    form = {"open_pattern": rf"<\|use:{name}(?: now)?\s*", "content": "json"}
    listed = {"open_pattern": rf"@\{{{name}=", "next_pattern": rf"\{{{name}=", "content": "json"}
    thinking = {"reasoning_content": {"open": "<", "close": "|end|"}, "tool_calls": form}
    monkeypatch.setattr(tools, "CALLS", (*tools.CALLS, listed))
    monkeypatch.setattr(tools, "THINKING", {**tools.THINKING, "|end|": thinking})
    function = {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}
    kind = strict_calls([{"function": {"strict": True, **function}}])
    assert kind is not None
    for text in (
        '<|use:f now{"n": @}',
        '@{f={"n": 1}}, {g={"n": "3"}}',
        '@{f={"n": 1}}, {f={"n": @}}',
    ):
        assert follows(kind, text.replace("@}", "3}"))
        assert follows(kind, text.replace("@}", '"3"}')) == ("@}" not in text)
    assert follows(kind, '<|use:g now{"n": "3"}'), "another tool"


def test_a_strict_call_is_exact_whatever_is_drafted() -> None:
    """The processor begins a call, and the toy goes on with what it likes."""
    pytest.importorskip("llguidance", reason="needs the extra `grammar`")
    codec = BpeTokenizer()
    begun = codec.encode('So. {"name": "get_time", "arguments":', special_tokens=False)

    def begin_call(tokens: Any, logits_V: Any) -> Any:
        if len(tokens) <= len(begun):
            logits_V[begun[len(tokens) - 1]] += 1000
        return logits_V

    kind = strict_calls([{"function": {"strict": True, **TOOLS[0]["function"]}}])
    found = []
    for drafter in ("none", "prompt_lookup", "parallelspec"):
        engine = make_engine(drafter, vocab_size=codec.vocab_size, max_length=200, tokenizer=codec)
        options: dict[str, Any] = {"response_format": kind, "logits_processor": begin_call}
        found.append(engine.generate([65], max_new_tokens=100, **options))
    text = found[0].text.partition('"arguments":')[2].lstrip()
    arguments, end = json.JSONDecoder().raw_decode(text)
    assert arguments["zone"] in ("UTC", "CET")
    assert len(text) > end, "free text follows"
    assert all(each.token_ids == found[0].token_ids for each in found)


@pytest.mark.parametrize("definitions", [[1], "x", 1.5])
def test_bad_definitions_are_one_line(definitions: Any) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `grammar`")
    parameters = {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": definitions}
    kind = forced_call([{"function": {"name": "f", "parameters": parameters}}], "hermes")
    grammar = known(read_format(kind))
    with pytest.raises(ValueError, match=r"got JSON schema .* expected a valid one"):
        BpeTokenizer().matcher(grammar, BpeTokenizer.vocab_size)


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([{"function": {"name": "f", "parameters": nested(300)}}], "nested too deeply"),
        ("get_time", "got tools 'get_time', expected a list of functions"),
        ([{"name": "f"}], "got tool .*, expected type 'function' and a function with a name"),
        ([{"type": "function", "function": {"name": "a b"}}], "expected type 'function'"),
        ([{"type": "code", "function": {"name": "f"}}], "expected type 'function'"),
        ([{"function": {"name": "f", "parameters": []}}], r"got parameters \[\] of tool f"),
        ([{"function": {"name": "f", "parameters": {"a": {1}}}}], "cannot be written as JSON"),
        (lambda: forced_call(TOOLS, "hermes", "now"), "'now', expected one of get_time, stop"),
        (lambda: forced_call([], "hermes"), "got no tools, expected at least one"),
        (lambda: parse_calls("", "gpt"), "got tool family 'gpt', expected one of llama3"),
        (lambda: parse_calls("", "hermes", "now"), "got tools 'now', expected a list of functions"),
    ],
)
def test_what_cannot_be_offered_or_forced_is_refused(tools: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tools() if callable(tools) else checked_tools(tools)


def test_openais_choices_of_a_tool() -> None:
    for free in (None, "none", "auto"):
        assert format_of_choice(TOOLS, free, "hermes") is None
    named = {"type": "function", "function": {"name": "stop"}}
    assert format_of_choice(TOOLS, named, "phi") == forced_call(TOOLS, "phi", "stop")
    assert format_of_choice(TOOLS, "required", "phi") == forced_call(TOOLS, "phi")
    wrong_ones: list[Any] = ["any", {"type": "function"}, 3, [], {"function": {"name": 4}}]
    for wrong in wrong_ones:
        with pytest.raises(ValueError, match=r"got tool_choice .*, expected none, auto, required"):
            format_of_choice(TOOLS, wrong, "hermes")


CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "What time is it?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "get_time", "arguments": '{"zone": "UTC"}'}}
        ],
    },
    {"role": "tool", "content": "12:30"},
]
# What Qwen 2.5's template does with tools, calls and results.
QWEN = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}{% for call in m.tool_calls %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] + '' }}{% endfor %}"


@pytest.mark.parametrize("nothing", [None, [], (), {}])
def test_keys_that_say_nothing_are_not_there_for_a_template(nothing: Any) -> None:
    """Clients that send back what they got as they have it write null for what was not there."""
    source = (
        "{% for m in messages %}{% if 'tool_calls' in m or m.refusal is defined %}(called)"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    codec = BpeTokenizer(ChatTemplate(source))
    answered = {"role": "assistant", "content": "12", "tool_calls": nothing, "refusal": nothing}
    ids = encode_prompt(codec, [answered, CHAT[0]], raw=False, system=None)
    assert codec.decode(ids) == "12What time is it?"


def test_a_template_that_knows_tools_gets_them() -> None:
    text = ChatTemplate(QWEN).render(CHAT, TOOLS)
    assert text.startswith('<tools>{"type": "function", "function": {"name": "get_time"')
    assert text.endswith(
        "[user]What time is it?[assistant]"
        '<tool_call>{"name": "get_time", "arguments": {"zone": "UTC"}}</tool_call>[tool]12:30'
    )
    assert "<tools>" not in ChatTemplate(QWEN).render(CHAT)


def test_a_template_without_tools_gets_them_as_text() -> None:
    template = ChatTemplate(PLAIN)
    assert template.tool_family == "smollm"
    text = template.render([{"role": "system", "content": "Be brief."}, *CHAT], TOOLS)
    assert text.startswith("[system]Be brief.\n\nYou can call functions.")
    assert '<tools>[{"type": "function", "function": {"name": "get_time"' in text
    assert text.endswith(
        '[assistant]<tool_call>[{"name": "get_time", "arguments": {"zone": "UTC"}}]</tool_call>'
        "[user]<tool_response>\n12:30\n</tool_response>"
    )
    again = template.render([*CHAT, {"role": "tool", "content": "5 C"}])
    assert again.endswith("\n12:30\n</tool_response>\n<tool_response>\n5 C\n</tool_response>")
    assert again.count("[user]") == 2, "templates may refuse two in turn"
    assert template.render(CHAT, TOOLS).startswith("[system]You can call functions.")
    assert template.render(CHAT).startswith("[user]What time is it?")


@pytest.mark.parametrize("arguments", [{"zone": "UTC"}, '{"zone": "UTC"}'])
def test_a_template_that_joins_arguments_gets_them_as_text(arguments: Any) -> None:
    """As DeepSeek-R1's does."""
    source = (
        "{% for m in messages %}{% for tool in m['tool_calls'] %}{{'[' + tool['function']['name'] "
        "+ '\n' + tool['function']['arguments'] + '\n' + ']'}}{% endfor %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "get_time", "arguments": arguments}}
    messages = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert ChatTemplate(source).render(messages) == '[get_time\n{"zone": "UTC"}\n]'


CALLED = "{% for c in m.tool_calls %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>"
READS_CONTENT = f"{CALLED}{{% endfor %}}{{{{ m.content }}}};"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (READS_CONTENT, '<get_time {"zone": "UTC"}>;'),  # as GLM-4.6: not "None"
        ("{% if 'a' in m.content %}{% endif %}" + READS_CONTENT, '<get_time {"zone": "UTC"}>;'),
        (  # as DeepSeek-R1
            "{% if m.tool_calls and m.content is none %}" + CALLED + "{% endfor %}{% else %}"
            "{{ m.content }}{% endif %};",
            '<get_time {"zone": "UTC"}>;',
        ),
        (  # no `+`
            CALLED.replace("}}>", "}}>").replace(" | tojson", "") + "{% endfor %};",
            '<get_time {"zone": "UTC"}>;',
        ),
    ],
)
def test_calls_without_content_are_shown_as_the_template_reads_them(
    body: str, expected: str
) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + body + "{% endif %}{% endfor %}"
    )
    assert ChatTemplate(source).render(CHAT) == expected
    said = [{**CHAT[1], "content": "So."}]
    if "is none" not in source:
        assert ChatTemplate(source).render(said).startswith('<get_time {"zone": "UTC"}>')


def test_a_template_gets_the_description_and_the_name_that_it_needs() -> None:
    """As Hermes 2 Pro and gpt-oss need the one, and Gemma 4 the other."""
    source = (
        "{% for t in tools or [] %}{{ '# ' + t.function.description }}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'tool' %}{{ '(' + m.name + ')' }}{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}"
    )
    bare = {"type": "function", "function": {"name": "get_time"}}
    called = {**CHAT[1], "tool_calls": [{**CHAT[1]["tool_calls"][0], "id": "a1"}]}
    messages = [CHAT[0], called, {**CHAT[2], "tool_call_id": "a1"}]
    assert ChatTemplate(source).render(messages, [bare]) == '# {"zone": "UTC"}(get_time)'
    assert ChatTemplate(source).render(messages, TOOLS).startswith("# Tells the time")
    shows_all = "{{ tools | tojson }}"
    assert json.loads(ChatTemplate(shows_all).render(CHAT[:1], [bare])) == [bare]


def test_a_template_that_shows_one_call_a_message_gets_them_one_by_one() -> None:
    """As Llama 3's, which refuses several, and gpt-oss's, which shows the first."""
    refuses = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
    shows = (
        "{% for m in messages %}{% if m.tool_calls %}CHECK[{{ m.content or '' }}"
        "{{ m.tool_calls[0].function.arguments.zone }}{{ m.tool_calls[0].function.arguments.key }}]"
        "{% elif m.role == 'tool' %}({{ m.content }}){% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    zones = {"a": '{"zone": "UTC"}', "b": '{"zone": "CET"}', "c": '{"zone": "EST"}'}
    calls = [
        {"id": each, "type": "function", "function": {"name": "get_time", "arguments": zone}}
        for each, zone in zones.items()
    ]
    results = [{"role": "tool", "tool_call_id": each, "content": each} for each in "bac"]
    messages = [CHAT[0], {"role": "assistant", "content": "So: ", "tool_calls": calls}, *results]
    for check in ("", refuses):
        source = shows.replace("CHECK", check)
        text = ChatTemplate(source).render([*messages, CHAT[0]])
        assert text == "What time is it?[So: UTC](a)[CET](b)[EST](c)What time is it?"
        assert ChatTemplate(source).render(messages[:2]).endswith("[So: UTC][CET][EST]")


@pytest.mark.parametrize("ids", [("call_0123456789ab", "toolu_1"), ("fc-1", None), ("abcdefghi",)])
def test_a_template_that_wants_ids_of_nine_letters_gets_them(ids: tuple[str | None, ...]) -> None:
    """As Mistral's, to which a server's own ids were errors; results keep their calls."""
    wants = "{% if ID is not defined or ID is not string or ID | length != 9 %}"
    wants += "{{ raise_exception('nine, please') }}{% endif %}({{ ID }})"
    source = (
        "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
        + wants.replace("ID", "c.id")
        + "{{ c.function.arguments }}{% endfor %}{% elif m.role == 'tool' %}"
        + wants.replace("ID", "m.tool_call_id")
        + "{% endif %}{% endfor %}"
    )
    calls = [{**CHAT[1]["tool_calls"][0], "id": each} for each in ids]
    results = [{"role": "tool", "tool_call_id": each, "content": "x"} for each in reversed(ids)]
    messages = [CHAT[0], {**CHAT[1], "tool_calls": calls}, *results]
    text = ChatTemplate(source).render(messages)
    shown = re.findall(r"\((\w{9})\)", text)
    assert shown == [*shown[: len(ids)], *shown[: len(ids)][::-1]]
    assert len(set(shown)) == len(ids)
    assert text == ChatTemplate(source).render(messages), "what was read before is not read again"
    if len(ids) == 1:
        assert shown == ["abcdefghi"] * 2
    shows = source.replace("| length != 9", "| length < 1")
    plain = {"call_0123456789ab", "toolu_1"}
    if plain == set(ids):
        assert plain <= set(re.findall(r"\((\w+)\)", ChatTemplate(shows).render(messages)))


def test_thinking_before_a_call_is_shown_to_gpt_oss() -> None:
    source = (
        "{% for message in messages %}{% if message.tool_calls %}"
        "{% if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}"
        "[{{ message.thinking }}]{{ message.tool_calls[0].function.arguments }}{% endif %}"
        "{% endfor %}"
    )
    thought = {**CHAT[1], "reasoning_content": "Hm."}
    assert ChatTemplate(source).render([CHAT[0], thought]) == '[Hm.]{"zone": "UTC"}'
    assert ChatTemplate(source).render([{**thought, "content": "So."}]).startswith("[]")


def test_a_template_that_refuses_the_system_gets_tools_in_the_first_message() -> None:
    """As Gemma 2's does."""
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    text = ChatTemplate(source).render(CHAT, TOOLS)
    assert text.startswith("[user]What time is it?\n\nYou can call functions.")


def test_phi_reads_tools_from_the_system_message() -> None:
    """As Phi-4 mini's template does."""
    phi = (
        "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message %}"
        "{{ message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}"
        "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endif %}{% endfor %}"
    )
    template = ChatTemplate(phi)
    assert template.tool_family == "phi"
    text = template.render(CHAT, TOOLS)
    assert text.startswith('<|tool|>[{"type": "function", "function": {"name": "get_time"')
    assert "<|/tool|><|user|>What time is it?<|assistant|><tool_call>[" in text


def test_the_engine_passes_tools_on() -> None:
    codec = BpeTokenizer(ChatTemplate(PLAIN))
    engine = make_engine("none", vocab_size=codec.vocab_size, tokenizer=codec, max_length=900)
    assert "get_time" in codec.decode(engine.encode("Now?", tools=TOOLS))
    for call in (engine.stream, engine.steps):
        assert next(iter(call("Now?", tools=TOOLS, max_new_tokens=2))) is not None
    result = engine.generate(CHAT, tools=TOOLS, max_new_tokens=1)
    assert result.stats.prompt_tokens > 300
    assert (result.tool_calls, result.content) == ([], result.text)
    said = replace(result, text=f"So be it. <tool_call>[{{{T}}}]</tool_call>")
    assert (said.tool_calls, said.content) == ([TIME], "So be it.")
    for prompt, raw in (([1, 2], False), ("Now?", True), ([], False)):
        with pytest.raises(ValueError, match="got tools, expected them with messages"):
            engine.encode(prompt, raw, tools=TOOLS)
