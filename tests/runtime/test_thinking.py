"""A model's thinking is told from its answer, whole and in streams, and goes before a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from served import (
    CHAT,
    HELLO,
    MESSAGES,
    PERSON,
    RESPONSES,
    chunks_of,
    in_process,
    post,
    served,
    stream,
)
from small import known
from toy_engine import make_engine

from spec_runtime import Chunk, Engine, GenerationResult, Stats
from spec_runtime.cli.options import template_kwargs
from spec_runtime.cli.terminal import AnswerPrinter
from spec_runtime.dialogue.chat_template import ChatTemplate
from spec_runtime.dialogue.messages import plain_message
from spec_runtime.dialogue.reader import Part, ResponseReader, joined
from spec_runtime.dialogue.response_template import HARMONY, Tags, tags_of, template_of
from spec_runtime.dialogue.thinking_matcher import AnyText, ThinkingMatcher, ThinkingTokens
from spec_runtime.dialogue.tools import ToolCall
from spec_runtime.loop.answer import AnswerForm, form_of
from spec_runtime.loop.result import Piece
from spec_runtime.serve.ignored import HEADER

for module in ("tokenizers", "llguidance"):
    pytest.importorskip(module, reason=f"{module} is not installed")
from bpe_tokenizer import BpeTokenizer  # noqa: E402

# What the templates of Qwen3 and of DeepSeek-R1 do with thinking, and no more.
QWEN3 = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% if enable_thinking is defined and "
    "enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
R1 = (
    "{% for m in messages %}<{{ m.role }}>{% set content = m.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
EFFORT = "{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}"
# What gpt-oss's template does with messages.
CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}"
    "{{ '<|channel|>final' }}{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}<|channel|>commentary{% endif %}{% if 0 %}<|channel|>final<|message|>{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ANALYSIS, COMMENTARY, FINAL = (
    f"<|channel|>{each}<|message|>" for each in ("analysis", "commentary", "final")
)
CALL = "<|channel|>commentary to=functions.f{}<|message|>{{}}"
TAGS = Tags("<think>", "</think>")
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


def thinking_engine(template: str, *names: str) -> Engine:
    # tokens of their own, as Qwen's and DeepSeek's
    codec = BpeTokenizer(
        ChatTemplate(template), dict.fromkeys(names or ("<think>", "</think>"), False)
    )
    return make_engine("parallelspec", vocab_size=codec.vocab_size, max_length=600, tokenizer=codec)


# ---- reading ----


class Splitter:
    """Reads thinking and text, and calls in messages."""

    def __init__(self, tags: Tags | None, is_begun: bool = False) -> None:
        template, has_calls = template_of(tags, "harmony"), tags is HARMONY
        self._reader = ResponseReader(template, is_begun=is_begun, has_calls=has_calls)
        self.parts: list[Part] = []

    def push(self, text: str, is_end: bool = False) -> tuple[str, str]:
        parts = self._reader.push(text, is_end)
        self.parts += [part for part in parts if part.kind in ("call", "arguments")]
        thinking = "".join(part.text for part in parts if part.kind == "thinking")
        return thinking, joined(parts)[0]


@pytest.mark.parametrize(
    "thought",
    [
        {"reasoning_content": "Hm."},
        {"reasoning": "Hm."},
        {"thinking": "Hm."},
        {"reasoning_details": [{"type": "reasoning.text", "text": "H"}, {"summary": "m."}]},
        {"reasoning_content": "Hm.", "reasoning": "Oh."},
    ],
)
def test_thinking_is_taken_back_by_each_of_its_names(thought: dict[str, Any]) -> None:
    said = plain_message({"role": "assistant", "content": "Yes.", **thought})
    assert said["reasoning_content"] == "Hm."
    asked = plain_message({"role": "user", "content": "Yes.", **thought})
    assert asked.get("reasoning_content") == thought.get("reasoning_content")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "is_begun", "thinking", "said"),
    [
        ("<think>\nHm.\n\nYes \n</think>\n\nIt is.\n", False, "Hm.\n\nYes", "It is.\n"),
        (" \n<think>a < b </thin </think>c", False, "a < b </thin", "c"),
        ("Hm.\n</think>\nIt is.", True, "Hm.", "It is."),
        ("<think>\nHm.\n</think>\nIt is.", True, "Hm.", "It is."),
        ("<think>\n\n</think>\n\nIt is.", False, "", "It is."),
        ("Hm. </thi", True, "Hm. </thi", ""),
        ("<think>Hm.", False, "Hm.", ""),
        ("<thi", False, "", "<thi"),
        ("  It is <think>no</think>.", False, "", "  It is <think>no</think>."),
        ("", True, "", ""),
    ],
)
def test_thinking_is_split_off_however_the_text_comes(
    text: str, is_begun: bool, thinking: str, said: str, size: int
) -> None:
    reader = Splitter(TAGS, is_begun)
    pieces = [reader.push(text[i : i + size]) for i in range(0, len(text), size)]
    for before, after in pieces:
        assert thinking.startswith(before) or before in thinking
        assert after in said, "no part of a tag comes out"
    pieces.append(reader.push("", is_end=True))
    assert ["".join(each) for each in zip(*pieces, strict=True)] == [thinking, said]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 500])
@pytest.mark.parametrize(
    ("text", "thinking", "said"),
    [
        (f"{ANALYSIS}Hm.<|end|><|start|>assistant{FINAL}Yes <b>.", "Hm.", "Yes <b>."),
        (f"{FINAL}Yes.<|return|>", "", "Yes."),
        (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>", "a\nb", ""),
        (f"{COMMENTARY}First.<|end|><|start|>assistant{FINAL}Then.", "", "First.\nThen."),
        (f"{ANALYSIS}Hm.<|end|>\n<|start|>assistant{CALL.format('')}<|call|>", "Hm.", CALL),
        (f"<|start|>assistant{CALL.format(' <|constrain|>json')}<|call|>", "", CALL),
        ("<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}", "", CALL),
        (f" to=functions.f{COMMENTARY}{{}}<|call|>", "", CALL),
        (f"{ANALYSIS}Hm.{FINAL}Yes.", "Hm.", "Yes."),
        ("<|channel|>analysis to=python<|message|>1 + 1<|call|>", "1 + 1", ""),
        ("Plain < text <|en.", "", "Plain < text <|en."),
        ("<|channel|>anal", "", "<|channel|>anal"),
        (f"{ANALYSIS}Hm. <|en", "Hm. <|en", ""),
        ("", "", ""),
    ],
)
def test_messages_are_told_apart_however_the_text_comes(
    text: str, thinking: str, said: str, size: int
) -> None:
    reader = Splitter(HARMONY)
    pieces = [reader.push(text[i : i + size]) for i in range(0, len(text), size)]
    pieces.append(reader.push("", is_end=True))
    is_call = said is CALL
    assert joined(reader.parts)[1] == [ToolCall("f", "{}")] * is_call
    wanted = [thinking, "" if is_call else said]
    assert ["".join(each) for each in zip(*pieces, strict=True)] == wanted
    begun = Splitter(HARMONY, is_begun=True)
    assert begun.push(f"Hm.<|end|>{FINAL}Yes.", is_end=True) == ("Hm.", "Yes.")


def test_an_answer_of_messages_goes_back_without_its_thinking() -> None:
    """As a session keeps it. The template refuses an answer with marks."""
    refusing = "{% if '<|channel|>' in m.content %}{{ raise_exception('marks') }}{% endif %}"
    source = CHANNELS.replace("{{ m.content }}", refusing + "{{ m.content }}")
    said = f"{ANALYSIS}Hm.<|end|><|start|>assistant{FINAL}Yes."
    text = ChatTemplate(source).render([*HELLO, {"role": "assistant", "content": said}, *HELLO])
    assert f"<|start|>assistant{FINAL}Yes.<|end|>" in text
    assert "Hm." not in text


def test_without_tags_all_is_text() -> None:
    assert tags_of("</seed:think>") == Tags("<seed:think>", "</seed:think>")
    assert tags_of("[THINK]{{ part.thinking }}[/THINK]") == Tags("[THINK]", "[/THINK]")
    assert tags_of("<|channel>thought\n<channel|>") == Tags("<|channel>thought\n", "<channel|>")
    assert tags_of(CHANNELS) is HARMONY
    assert tags_of("{{ messages }}") is None
    assert Splitter(None).push("<think>a</think>b") == ("", "<think>a</think>b")


def test_how_an_answer_begins_is_read_from_its_prompt() -> None:
    codec = BpeTokenizer(ChatTemplate(QWEN3), {"<think>": False, "</think>": False})
    engine = make_engine(vocab_size=codec.vocab_size, max_length=600, tokenizer=codec)
    free = form_of(codec, engine.encode(HELLO))
    assert (free.is_begun, free.tokens is not None) == (False, True)
    off = form_of(codec, engine.encode(HELLO, template_kwargs={"enable_thinking": False}))
    assert (off.is_begun, off.tokens) == (False, None)
    begun = [*HELLO, {"role": "assistant", "content": "<think>\nHm."}]
    assert form_of(codec, engine.encode(begun, continue_final=True)).is_begun
    assert form_of(codec, engine.encode("hello", raw=True)).tokens is None
    closed = R1.replace("<think>\n", "{{ '<think>' if thinking else '</think>' }}")
    codec.template = ChatTemplate(closed)  # as DeepSeek-V3.1's, which closes what is not there
    assert form_of(codec, engine.encode(HELLO)).tokens is None
    asked = engine.encode(HELLO, template_kwargs={"thinking": True})
    assert form_of(codec, asked).is_begun
    plain = BpeTokenizer(ChatTemplate(R1))  # in which the tags are letters
    assert form_of(plain, plain.encode(plain.template.render(HELLO), False)).is_begun  # type: ignore[union-attr]


def test_an_answer_names_its_parts() -> None:
    text = "<think>\nHm.\n</think>\n\nIt is."
    ends = [7, 8, 11, 12, 20, 22, 24, 27, 28]
    result = GenerationResult(text, [0] * 9, "stop", Stats(), text_ends=ends, form=AnswerForm(TAGS))
    assert (result.text, result.reasoning, result.content) == (text, "Hm.", "It is.")
    assert result.tool_calls == []
    assert result.usage.reasoning_tokens == 5
    plain = GenerationResult("It is.", [0], "stop", Stats(), text_ends=[6], form=AnswerForm(TAGS))
    assert (plain.reasoning, plain.content, plain.usage.reasoning_tokens) == ("", "It is.", 0)


# ---- grammars ----


@pytest.mark.parametrize(
    ("template", "before"),
    [
        (CHANNELS, f"{ANALYSIS}Hm.<|end|><|start|>assistant{FINAL}"),
        (CHANNELS, FINAL),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}"
            "<|turn>model\n{% endif %}{% if 0 %}<|channel>thought\n<channel|>{% endif %}",
            "<|channel>thought\nHm.<channel|>",
        ),
    ],
)
def test_a_grammar_begins_after_messages_of_thinking(template: str, before: str) -> None:
    names = {f"<{each}>" for each in re.findall(r"<([^<>]+)>", template)}
    engine = thinking_engine(template, *sorted(names))
    prompt = engine.encode(HELLO)
    written = engine.tokenizer.encode(before, special_tokens=False)

    def think(tokens: Any, logits_V: Any) -> Any:
        if len(tokens) - len(prompt) < len(written):
            logits_V[written[len(tokens) - len(prompt)]] += 1000
        return logits_V

    options: dict[str, Any] = {"response_format": FORMAT, "max_new_tokens": 200}
    result = engine.generate(HELLO, **options, logits_processor=think)
    assert result.text.startswith(before)
    assert set(json.loads(result.content)) == {"name"}
    assert result.reasoning == ("Hm." if "Hm." in before else "")
    assert result.usage.reasoning_tokens == len(written)


@pytest.mark.parametrize("template", [QWEN3, R1])
def test_a_grammar_begins_after_the_thinking(template: str) -> None:
    engine = thinking_engine(template)
    opening, closing = engine.tokenizer.encode("<think></think>", special_tokens=False)
    wanted = {opening: 60.0, closing: 40.0}  # more than this, and the toy says nothing else

    def end_thinking(tokens: Any, logits_V: Any) -> Any:
        if opening in tokens[-12:]:
            logits_V[opening] = -100
            logits_V[closing] += 100 * (opening not in tokens[-4:])
        return logits_V

    options: dict[str, Any] = {"response_format": FORMAT, "max_new_tokens": 200}
    options |= {"logit_bias": wanted, "logits_processor": end_thinking}
    result = engine.generate(HELLO, **options)
    assert set(json.loads(result.content)) == {"name"}
    assert result.finish_reason == "stop"
    assert "</think>" in result.text
    for drafter in ("none", "prompt_lookup"):
        codec = engine.tokenizer
        plain = make_engine(drafter, vocab_size=codec.vocab_size, max_length=600, tokenizer=codec)  # type: ignore[attr-defined]
        assert plain.generate(HELLO, **options).token_ids == result.token_ids


class Word:
    """A grammar of two tokens, 5 and then 6."""

    def __init__(self) -> None:
        self.left = [5, 6]

    def advance(self, token: int) -> bool:
        is_next = self.left[:1] == [token]
        self.left = self.left[is_next:]
        return is_next

    def retreat(self, num_tokens: int) -> None:
        self.left = [5, 6][2 - len(self.left) - num_tokens :]

    def allowed(self) -> np.ndarray:
        return np.isin(np.arange(8), self.left[:1] or [0])

    def forced(self, most: int) -> list[int]:
        return self.left[:most]


def test_a_blank_may_stand_between_the_thinking_and_the_grammar() -> None:
    """1 opens the thinking, 2 closes it, 3 and 4 are blanks, and 0 is EOS."""
    matcher = ThinkingMatcher(Word(), ThinkingTokens(1, [2], [3, 4]), [0], 8)
    thinking = [*range(1, 8)]
    # tokens that are read, those that may come then, and those that have to
    steps: list[tuple[list[int], list[int], list[int]]] = [
        ([], [1, 5], []),
        ([1], thinking, []),
        ([7, 5], thinking, []),
        ([2], [3, 4, 5], []),
        ([4], [5], [5, 6]),
        ([5], [6], [6]),
    ]

    def require(allowed: list[int], forced: list[int]) -> None:
        assert np.flatnonzero(matcher.allowed()).tolist() == allowed
        assert matcher.forced(9) == forced

    for tokens, *expected in steps:
        assert all(map(matcher.advance, tokens))
        require(*expected)
        assert not matcher.advance(0), "EOS"
    for (tokens, *_), (_, *expected) in zip(steps[:0:-1], steps[-2::-1], strict=True):
        matcher.retreat(len(tokens))
        require(*expected)
    assert all(map(matcher.advance, [1, 7, 5, 2, 4, 5]))
    matcher.retreat(3)  # from the grammar into the thinking
    require(thinking, [])


def test_a_grammar_begins_at_once_where_nothing_is_thought() -> None:
    engine = thinking_engine(QWEN3)
    opening, closing = engine.tokenizer.encode("<think></think>", special_tokens=False)
    biased = {"logit_bias": {opening: 100.0, closing: 100.0}, "response_format": FORMAT}
    for prompt, more in (
        (HELLO, {"template_kwargs": {"enable_thinking": False}}),
        ("hello", {"raw": True}),
    ):
        result = engine.generate(prompt, max_new_tokens=200, **biased, **more)  # type: ignore[arg-type]
        assert json.loads(result.text)
        assert result.content == result.text
    biased["logit_bias"] = {opening: -100.0}
    assert json.loads(engine.generate(HELLO, max_new_tokens=200, **biased).text)  # type: ignore[arg-type]


def test_the_commands_print_thinking_beside_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    form = AnswerForm(TAGS)
    said = GenerationResult("<think>\nHm.\n</think>\n\nYes. No.", [], "stop", Stats(), form=form)
    cut = GenerationResult("<think>Hm", [], "length", Stats(), form=form)
    for size in (1, 4, 100):
        for result, out, err in ((said, "Yes. No.\n", "Hm.\n\n"), (cut, " …\n", "Hm\n")):
            printer = AnswerPrinter()
            for chunk in chunks_of(result, size):
                printer.print(chunk)
            printer.end(" …" if result is cut else "")
            assert capsys.readouterr() == (out, err)
    coloured = AnswerPrinter(is_coloured=True)
    coloured.print(Chunk("<think>Hm", pieces=(Piece("<think>", 0), Piece("Hm", 1))))
    assert capsys.readouterr() == ("<think>Hm", "")


@pytest.mark.parametrize("offered", [False, True])
def test_chunks_have_the_parts_of_the_result(offered: bool) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>'
    engine = thinking_engine(QWEN3)
    tools = [{"type": "function", "function": {"name": "f"}}] if offered else None
    prompt = engine.encode(HELLO, tools=tools)
    written = engine.tokenizer.encode(f"<think>\nHm.</think>\n\nIt is. {call}", False)

    def say(tokens: Any, logits_V: Any) -> Any:
        if len(tokens) - len(prompt) < len(written):
            logits_V[written[len(tokens) - len(prompt)]] += 1000
        return logits_V

    chunks = [*engine.chunks(HELLO, tools=tools, logits_processor=say, max_new_tokens=len(written))]
    result = chunks[-1].result
    assert result is not None
    parts = [part for chunk in chunks for part in chunk.parts]
    content, calls = joined(parts)
    assert (content, calls) == (result.content, result.tool_calls)
    assert content == ("It is." if offered else f"It is. {call}")
    assert calls == ([ToolCall("f", '{"a": "b"}')] if offered else [])
    thinking = [part.text for part in parts if part.kind == "thinking"]
    assert "".join(thinking) == result.reasoning == "Hm."
    assert sum(bool(chunk.parts) for chunk in chunks) > 5, "they come in the end"


def test_template_kwargs_are_an_object() -> None:
    assert template_kwargs('{"enable_thinking": false}') == {"enable_thinking": False}
    with pytest.raises(ValueError, match=r"got --template-kwargs no .*, expected a JSON object"):
        template_kwargs("no")


# ---- budgets ----


@pytest.mark.parametrize(
    ("template", "before", "ending"),
    [
        (R1, "", "</think>"),
        (QWEN3, "<think>", "</think>"),
        (CHANNELS, ANALYSIS, f"<|end|><|start|>assistant{FINAL}"),
    ],
)
@pytest.mark.parametrize("budget", [0, 9])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}])
@pytest.mark.parametrize("format", [None, FORMAT])
def test_a_budget_closes_the_thinking(
    template: str, before: str, ending: str, budget: int, sampling: Any, format: Any
) -> None:
    """Of a model that would never close it by itself, with drafts as without."""
    names = sorted({f"<{each}>" for each in re.findall(r"<([^<>]+)>", template)})
    codec = BpeTokenizer(ChatTemplate(template), dict.fromkeys(names, False))
    begun, closing = (codec.encode(each, special_tokens=False) for each in (before, ending))
    marks = [token for name in names for token in codec.encode(name, special_tokens=False)]
    options: dict[str, Any] = {"thinking_budget": budget, "response_format": format, **sampling}
    size, found = codec.vocab_size, []
    for drafter in ("none", "parallelspec", "prompt_lookup"):
        engine = make_engine(drafter, vocab_size=size, max_length=600, tokenizer=codec)
        length = len(engine.encode(HELLO))

        def think(tokens: Any, logits_V: Any, length: int = length) -> Any:
            logits_V[marks] = -1000
            logits_V[begun[len(tokens) - length :][:1]] = 1000
            return logits_V

        found.append(engine.generate(HELLO, max_new_tokens=120, logits_processor=think, **options))
    result, ids = found[0], found[0].token_ids
    assert all(each.token_ids == ids for each in found)
    at = max(len(begun), budget + bool(before))
    assert ids[: len(begun)] == begun
    assert ids[at : at + len(closing)] == closing
    assert bool(result.reasoning) == (budget > 0)
    assert result.content if format is None else json.loads(result.content).keys() == {"name"}


def test_a_budget_leaves_calls_and_answers_alone() -> None:
    """1 opens messages, [1, 2, 3] those of thinking and [1, 4, 3] the last one; 5 ends them."""
    tokens = ThinkingTokens(1, [1, 4, 3], (), [5, 1, 4, 3], [1, 2, 3])
    for read, due in (
        ([], []),
        ([1, 2, 3, 7], []),
        ([1, 2, 3, 7, 7], [5, 1, 4, 3]),
        ([1, 2, 3, 7, 7, 5], [1, 4, 3]),
        ([1, 2, 3, 7, 5, 1], [4, 3]),  # as it begins by itself
        ([1, 6, 3, 7, 7, 7, 7], []),  # a call
        ([1, 2, 3, 5, 6, 6, 7, 7], []),  # what no head of thinking follows
        ([1, 2, 3, 5, 1, 4, 3, 7, 7, 7], []),
        ([7, 7, 7, 7, 7], []),
    ):
        matcher = ThinkingMatcher(AnyText(8), tokens, [], 8, budget=4)
        assert all(map(matcher.advance, read)), read
        assert matcher.forced(9) == due
        assert np.flatnonzero(matcher.allowed()).tolist() == (due[:1] or [*range(8)])
        assert not due or not matcher.advance(7)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"thinking_budget": 5}),
        (CHAT, {"thinking_token_budget": 5}),
        (CHAT, {"reasoning": {"max_tokens": 5}}),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 5}}),
        (RESPONSES, {"reasoning": {"max_tokens": 5}}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 5}}),
    ],
)
def test_every_api_has_a_budget(path: str, body: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"messages": HELLO, "max_tokens": 40}
    if path == RESPONSES:
        asked = {"input": "hello", "max_output_tokens": 40}
    codec = BpeTokenizer(None, {"<think>": False, "</think>": False})
    marks = codec.encode("<think></think>", special_tokens=False)
    asked |= {"temperature": 0, "logit_bias": {str(each): -100 for each in marks}}
    engine = thinking_engine(R1)
    with in_process(engine) as client:
        post(client, path, **asked, **body)
        result = known(engine.last_result)
        bad = client.post(path, json={**asked, **json.loads(json.dumps(body).replace("5", "-1"))})
    assert result.usage.reasoning_tokens == 6  # and its end
    assert (bad.status_code, "-1" in bad.text) == (400, True)


def test_a_model_that_does_not_think_ignores_a_budget() -> None:
    engine = make_engine("parallelspec")
    found = [
        engine.generate([1, 2, 3], max_new_tokens=20, thinking_budget=each) for each in (None, 3)
    ]
    assert found[0].token_ids == found[1].token_ids


# ---- variables of the template ----


def test_variables_reach_the_template() -> None:
    engine = thinking_engine(QWEN3)
    codec = engine.tokenizer
    off = engine.encode(HELLO, template_kwargs={"enable_thinking": False})
    assert codec.spelled(off).endswith("<assistant>\n<think>\n\n</think>\n\n")
    assert codec.spelled(engine.encode("hello")).endswith("<assistant>\n")
    for bad, why in (
        ({"enable_thinkin": True}, "'enable_thinkin', which the chat template does not read"),
        ({"messages": []}, "expected enable_thinking$"),
        ({"enable_thinking": {1, 2}}, "a value that cannot be written as JSON"),
        ("no", "got template_kwargs 'no', expected a mapping of names to values"),
    ):
        with pytest.raises(ValueError, match=why):
            engine.encode(HELLO, template_kwargs=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got template_kwargs, expected them with messages"):
        engine.encode("hello", raw=True, template_kwargs={"enable_thinking": False})


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with served(thinking_engine(QWEN3)) as running, running.client() as made:
        yield made


def num_prompt_tokens(client: Any, path: str, **body: Any) -> int:
    said = {"input": "hello"} if path == RESPONSES else {"messages": HELLO}
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    usage = post(client, path, **said, **{limit: 1}, **body)["usage"]
    if path == MESSAGES:
        total = usage["input_tokens"] + usage["cache_read_input_tokens"]
        counted = post(client, f"{MESSAGES}/count_tokens", **said, **body)
        assert counted == {"input_tokens": total}
        return int(total)
    return int(usage["prompt_tokens" if path == CHAT else "input_tokens"])


def test_requests_switch_thinking_off(client: Any) -> None:
    """By the template's variable, and by each API's own field; an empty thought is longer."""
    codec = BpeTokenizer(ChatTemplate(QWEN3), {"<think>": False, "</think>": False})
    assert codec.template is not None
    on, off = (
        len(codec.encode(codec.template.render(HELLO, variables={"enable_thinking": each}), False))
        for each in (True, False)
    )
    assert off > on
    switch = {"chat_template_kwargs": {"enable_thinking": False}}
    for path, body, expected in (
        (CHAT, {}, on),
        (CHAT, switch, off),
        (CHAT, {"reasoning_effort": "none"}, off),
        (CHAT, {"reasoning_effort": "high"}, on),
        (
            CHAT,
            {"thinking": {"type": "enabled"}, "reasoning_effort": "none"},
            off,
        ),
        (CHAT, {"thinking": {"type": "disabled"}, "reasoning_effort": None}, off),
        (CHAT, {"reasoning": {"enabled": False}}, off),
        (CHAT, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, on),
        (RESPONSES, {}, on),
        (RESPONSES, switch, off),
        (RESPONSES, {"reasoning": {"effort": "none"}}, off),
        (MESSAGES, {}, off),
        (MESSAGES, {"thinking": {"type": "disabled"}}, off),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, on),
        (MESSAGES, {"thinking": {"type": "enabled"}, **switch}, off),
    ):
        assert num_prompt_tokens(client, path, **body) == expected, (path, body)


def test_variables_of_the_server_hold_where_a_request_sets_none(client: Any) -> None:
    off, on = ({"chat_template_kwargs": {"enable_thinking": each}} for each in (False, True))
    expected = [num_prompt_tokens(client, CHAT, **each) for each in (off, on)]
    assert expected[0] != expected[1]
    own = {"enable_thinking": False, "unread": 1}
    with in_process(thinking_engine(QWEN3), template_kwargs=own) as other:
        for path in (CHAT, RESPONSES):
            found = [num_prompt_tokens(other, path, **each) for each in ({}, on)]
            assert found == expected, path


def test_unread_variables_are_left_out_and_named(client: Any) -> None:
    unread = {"think": True, "enable_thinking": False}
    for path, body in (
        (CHAT, {"messages": HELLO}),
        (RESPONSES, {"input": "hello"}),
        (MESSAGES, {"messages": HELLO, "max_tokens": 2}),
    ):
        reply = client.post(path, json={**body, "chat_template_kwargs": unread})
        assert reply.status_code == 200
        assert reply.headers[HEADER] == "chat_template_kwargs.think"
    reply = client.post(CHAT, json={"messages": HELLO, "chat_template_kwargs": 3})
    assert reply.status_code == 400


def test_an_effort_is_read_by_templates_that_have_it() -> None:
    from spec_runtime.serve.openai.schemas import ChatRequest

    body = ChatRequest(messages=HELLO, reasoning_effort="low")  # type: ignore[arg-type]
    assert body.template_kwargs(ChatTemplate(EFFORT)) == {"reasoning_effort": "low"}
    assert body.template_kwargs(ChatTemplate("{{ messages }}")) == {}
    assert body.template_kwargs(None) == {}


def test_what_is_thought_is_streamed_and_counted(client: Any) -> None:
    """The toy goes on thinking until its tokens are spent; a bias opens its thoughts."""
    codec = BpeTokenizer(None, {"<think>": False, "</think>": False})
    opening, closing = codec.encode("<think></think>", special_tokens=False)
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 12}
    body |= {"logit_bias": {str(opening): 100, str(closing): -100}}
    found = post(client, CHAT, **body)
    (choice,) = found["choices"]
    assert choice["message"]["content"] == ""
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 12}
    events = stream(client, CHAT, **body)[:-1]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert not any(delta.get("content") for delta in deltas)
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert thought == choice["message"].get("reasoning_content", "") == 11 * "<think>"
