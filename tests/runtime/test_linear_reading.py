"""An answer is read in time with its length, in every form of a call and of thinking: the reader
runs in the thread that answers all clients.

Work is counted: the functions that Python calls, and the bytes that it allocates. What regular
expressions do inside is neither, so that some answers, which took minutes, have a bound of time.
"""

import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from gates import calls_in

from spec_runtime import GenerationResult, Stats
from spec_runtime.dialogue.reader import joined
from spec_runtime.dialogue.response_template import HARMONY, Tags
from spec_runtime.dialogue.stream import TextStream
from spec_runtime.dialogue.tools import checked_tools
from spec_runtime.loop.answer import AnswerForm
from spec_runtime.loop.call import Call
from spec_runtime.loop.options import Request
from spec_runtime.loop.reading import ChunkReader
from spec_runtime.loop.result import Chunk
from spec_runtime.loop.step import Step

TOOLS = checked_tools([{"type": "function", "function": {"name": "f"}}])
CALLS = AnswerForm(family="hermes", tools=TOOLS)
NAMED = AnswerForm(family="mistral", tools=TOOLS)
THINKING = AnswerForm(Tags("<think>", "</think>"), family="hermes", tools=TOOLS)
MESSAGES = AnswerForm(HARMONY, family="harmony", tools=TOOLS)
CALL = '<tool_call>{"name": "f", "arguments": {}}'

# How the answer is written; its begin, what it repeats, and its end.
ANSWERS: dict[str, tuple[AnswerForm, str, str, str]] = {
    "text": (CALLS, "Hello", " word", ""),
    "spaces": (CALLS, "", "        ", "a"),
    "spaces after text": (CALLS, "a", "        ", "a"),
    "json": (CALLS, '<tool_call>{"name": "f", "arguments": {"a": "', "word ", '"}}</tool_call>'),
    "json items": (CALLS, '<tool_call>{"name": "f", "arguments": {"a": [1', ", 123", "]}}"),
    "arguments first": (CALLS, '<tool_call>{"arguments": {"a": "', "word ", '"}, "name": "f"}'),
    "named": (NAMED, '[TOOL_CALLS]f[ARGS]{"a": "', "word ", '"}'),
    "python text": (CALLS, '<|tool_call_start|>[f(a="', "word ", '")]'),
    "python items": (CALLS, "<|tool_call_start|>[f(a=[1", ", 123", "])]"),
    "python parameters": (CALLS, "<|tool_call_start|>[f(a=1", ", a=1", ")]"),
    "gemma text": (CALLS, '<|tool_call>call:f{a:<|"|>', "word ", '<|"|>}'),
    "gemma items": (CALLS, "<|tool_call>call:f{a:[1", ", 123", "]}"),
    "gemma bare": (CALLS, "<|tool_call>call:f{a:", "words", "}"),
    "gemma parameters": (CALLS, "<|tool_call>call:f{a:1", ", a:1", "}"),
    "tags": (CALLS, "<function=f><parameter=a>", "word ", "</parameter></function>"),
    "tags inside": (CALLS, '<invoke name="f"><parameter name="a">', "</parameter> ", "</invoke>"),
    "tags begun inside": (CALLS, "<function=f><parameter=a>", "<parameter=b>", "</parameter>"),
    "tags of parameters": (CALLS, "<function=f>", "<parameter=a>1</parameter>", "</function>"),
    "calls begun inside": (CALLS, "", "<function=f><parameter=a><parameter=b>x</parameter>", ""),
    "spaces between tags": (
        CALLS,
        "<function=f><parameter=a>1</parameter>",
        "        ",
        "</function>",
    ),
    "keys and values": (
        CALLS,
        "<tool_call>f<arg_key>a</arg_key><arg_value>",
        "word ",
        "</arg_value>",
    ),
    "a name": (CALLS, '{"name": "', "word ", ""),
    "marks": (CALLS, "", "<tool_call>", ""),
    "marks in text": (CALLS, "a", "functools", ""),
    "a fence": (CALLS, "a ```", "words", ""),
    "brackets": (CALLS, "", "<<[{<", ""),
    "spaces in a call": (CALLS, "<tool_call>", "        ", ""),
    "words in a head": (CALLS, "<|tool_call:begin|>", "words", ""),
    "calls": (CALLS, "", CALL, ""),
    "ends": (CALLS, CALL, "}}}}}", ""),
    "spaces between": (CALLS, CALL, "        ", ""),
    "a comma and spaces": (CALLS, CALL + ",", "        ", ""),
    "members": (CALLS, CALL[:-1], ', "a": 1', "}"),
    "a long member": (CALLS, CALL[:-1] + ', "a": "', "word ", '"}'),
    "thinking": (THINKING, "<think>", "word ", "</think>a"),
    "spaces in thinking": (THINKING, "<think>a", "        ", "</think>a"),
    "spaces before thinking": (THINKING, "", "        ", "<think>a</think>"),
    "broken tags": (THINKING, "<think>", "</thin", "</think>a"),
    "messages": (MESSAGES, "", "<|channel|>analysis<|message|>a<|end|>", ""),
    "a message": (MESSAGES, "<|channel|>analysis<|message|>", "word ", ""),
    "spaces before a message": (MESSAGES, "", "        ", ""),
    "ends of messages": (MESSAGES, "", "<|end|>a", ""),
}
NUM_PUSHES, REPEATS = 400, 4  # of pieces, and of each: a stream of 8,000 characters and more
SLOW = ("python text", "gemma text", "python items", "gemma items", "a name", "members")


def answered(name: str, num_pushes: int, repeats: int = 1) -> Iterator[Chunk]:
    """Yields the chunks of a model that writes this answer, a piece a step."""
    form, begin, piece, end = ANSWERS[name]
    pieces = [begin, piece * repeats, end]
    text = TextStream(lambda ids: "".join(pieces[each] for each in ids))
    reader = ChunkReader(Call([], Request(), text, form, frozenset()))
    for token in [0, *[1] * num_pushes, 2]:
        text.push(token)
        yield reader.chunk(Step([token], num_accepted=0))
    text.finish()
    yield reader.last(GenerationResult(text.text, [], "stop", Stats(), form=form))


def calls_so_far(name: str) -> list[int]:
    """Returns how many functions were called, those in C too, before each step of an answer."""
    counts, so_far = list[int](), [0]

    def read() -> None:
        counts.extend(so_far[0] for _ in answered(name, NUM_PUSHES, REPEATS))

    calls_in(read, so_far)
    return counts


def bytes_so_far(name: str) -> list[int]:
    """Returns how many bytes were allocated before each step, of each step the most at once."""
    sums = [0]
    tracemalloc.start()
    try:
        for _ in answered(name, NUM_PUSHES, REPEATS):
            now, most = tracemalloc.get_traced_memory()
            sums.append(sums[-1] + most - now)
            tracemalloc.reset_peak()
    finally:
        tracemalloc.stop()
    return sums


@pytest.mark.parametrize("work_of", [calls_so_far, bytes_so_far])
@pytest.mark.parametrize("name", ANSWERS)
def test_later_steps_are_no_more_work(name: str, work_of: Callable[[str], list[int]]) -> None:
    """What may wait for more text is bounded, so that the first quarter does not count. Threads
    that other tests left may allocate meanwhile, and not each time."""

    def is_linear() -> bool:
        work = work_of(name)
        return work[NUM_PUSHES] - work[200] < 3 * (work[200] - work[100])

    assert any(is_linear() for _ in range(3)), "twice the steps; the square were four times"


@pytest.mark.parametrize("name", SLOW)
def test_a_long_answer_takes_no_minute(name: str) -> None:
    begin = time.thread_time()
    *_, last = answered(name, 8000)
    assert last.result is not None
    assert last.result.text.startswith(ANSWERS[name][1])
    assert time.thread_time() - begin < 5


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("num_pushes", [3, 700])
def test_a_stream_says_what_the_whole_answer_says(name: str, num_pushes: int) -> None:
    *_, last = chunks = [*answered(name, num_pushes)]
    assert last.result is not None
    parts = [part for chunk in chunks for part in chunk.parts]
    text, calls = joined(parts)
    assert "".join(part.text for part in parts if part.kind == "thinking") == last.result.reasoning
    whole = [(call.name, call.arguments_json) for call in last.result.tool_calls]
    if len(whole) == len(calls):  # a call that breaks off is no call of the whole answer
        assert text == last.result.content
        assert [tuple(call) for call in calls] == whole
    else:
        assert len(calls) == len(whole) + 1
