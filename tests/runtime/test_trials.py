"""A grammar that does not end, or that crashes the library, costs nothing but its own request."""

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from bpe_tokenizer import BpeTokenizer, definition
from test_async_engine import in_loop
from toy_backend import ByteTokenizer
from toy_engine import make_engine

pytest.importorskip("llguidance", reason="needs the extra `grammar`")

from spec_runtime import AsyncEngine, Engine, UserError
from spec_runtime.grammar.formats import Grammar
from spec_runtime.grammar.trials import GrammarTrials, TrialLimits
from spec_runtime.interruption import Interrupted, Interruption

# Its compilation takes minutes and gigabytes; those of the limits are never reached below.
BOMB = {"type": "string", "allOf": [{"pattern": f"(.*a.{{{n}}})"} for n in range(10, 26)]}
PATIENT = TrialLimits(seconds=600, megabytes=4096)
NUM_LOGITS = BpeTokenizer.vocab_size


def as_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def new_engine(limits: TrialLimits, drafter: str = "none") -> Engine:
    tokenizer = BpeTokenizer(limits=limits)
    return make_engine(drafter, vocab_size=NUM_LOGITS, tokenizer=tokenizer)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with new_engine(PATIENT) as engine:
        yield engine


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


@pytest.mark.parametrize(
    ("grammar", "limits", "message"),
    [
        (schema(BOMB), TrialLimits(0.1, 4096), "takes more than 0.1 s"),
        (schema({"a": 1, **BOMB}), TrialLimits(600, 32), "takes more than 32 MB, or crashes"),
    ],
)
def test_a_grammar_that_does_not_end_is_refused_once_and_for_all(
    grammar: Grammar, limits: TrialLimits, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = BpeTokenizer(limits=limits)
    with pytest.raises(UserError, match=message) as caught:
        tokenizer.matcher(grammar, NUM_LOGITS)
    assert caught.value.param == "response_format"
    tokenizer.close()
    good = BpeTokenizer()
    good.matcher(Grammar("regex", "ab"), NUM_LOGITS)
    good.close()
    # Both are remembered: no further process is needed for them.
    monkeypatch.setattr(subprocess, "Popen", None)
    good.matcher(Grammar("regex", "ab"), NUM_LOGITS)
    with pytest.raises(UserError, match=message):
        tokenizer.matcher(grammar, NUM_LOGITS)


# What the library gives up on after some tokens, when it makes out more of the grammar.
MANY = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(900)}}
STATES = {"anyOf": [{"type": "string", "pattern": f".*a.{{{i}}}"} for i in range(500, 1500)]}


@pytest.mark.parametrize(
    ("grammar", "why"), [(MANY, "Current row has 3599 items"), (STATES, "too many expressions")]
)
def test_what_fails_in_mid_answer_is_refused_before_it(
    engine: Engine, grammar: dict[str, Any], why: str
) -> None:
    with pytest.raises(UserError, match=f"it cannot be followed: .*{why}") as caught:
        engine.prepare("abc", response_format=as_format(grammar))
    assert caught.value.param == "response_format"


def test_without_a_process_grammars_are_followed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(UserError, match="it cannot be followed"):
        BpeTokenizer().matcher(schema(STATES), NUM_LOGITS)


def test_a_crash_of_the_library_ends_another_process() -> None:
    """A schema that the library ends its process for, were it not refused before."""
    trials = GrammarTrials(definition((), {}), (257,), 258, TrialLimits(seconds=60))
    grammar = json.dumps({"grammars": [{"json_schema": {"const": -9223372036854775808}}]})
    fault = trials.fault(grammar, Interruption())
    trials.close()
    assert fault is not None
    assert "or crashes llguidance" in fault


def test_a_grammar_after_one_that_was_ended_is_compiled() -> None:
    tokenizer = ByteTokenizer()
    for number in range(2):
        with pytest.raises(UserError, match="expected a simpler one"):
            tokenizer.matcher(schema({"title": str(number), **BOMB}), 258)
        matcher = tokenizer.matcher(Grammar("regex", f"[ab]{number}"), 258)
        assert matcher.allowed().nonzero()[0].tolist() == [*b"ab"]


def test_a_grammar_that_takes_long_makes_room_for_others() -> None:
    tokenizer = BpeTokenizer(limits=TrialLimits(600, 4096, processes=1, shared_seconds=0.2))
    tokenizer.matcher(Grammar("regex", "a"), NUM_LOGITS)  # opens its only compiler
    with ThreadPoolExecutor(1) as pool:
        bomb = pool.submit(tokenizer.matcher, schema(BOMB), NUM_LOGITS)
        number = 0
        while not bomb.done():  # it would take minutes
            number += 1
            matcher = tokenizer.matcher(Grammar("regex", f"a{{{number}}}"), NUM_LOGITS)
            assert matcher.allowed().nonzero()[0] == [97]
        with pytest.raises(UserError, match=r"takes more than 0.2 s, while others wait"):
            bomb.result()
    with pytest.raises(Interrupted):  # alone it is tried again, for longer
        tokenizer.matcher(schema(BOMB), NUM_LOGITS, Interruption(timeout=0.3))


@pytest.mark.parametrize("how", ["timeout", "cancelled"])
def test_a_call_ends_while_its_grammar_is_tried(engine: Engine, how: str) -> None:
    event = threading.Event()
    timer = threading.Timer(0.1, event.set)
    timer.start()
    early: dict[str, Any] = {"timeout": 0.1} if how == "timeout" else {"cancel": event}
    result = engine.generate("abc", response_format=as_format(BOMB), **early)
    assert (result.finish_reason, result.token_ids) == (how, [])
    timer.join()
    event.clear()
    assert engine.generate("abc", response_format={"type": "regex", "regex": "ab"}).text == "ab"


def test_ctrl_c_ends_the_trial_of_a_grammar(engine: Engine) -> None:
    timer = threading.Timer(0.2, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate("abc", response_format=as_format(BOMB))
    timer.join()
    assert engine.generate("abc", response_format={"type": "regex", "regex": "ab"}).text == "ab"


def interrupt() -> None:
    import _thread

    _thread.interrupt_main()


@in_loop
async def test_other_calls_overtake_one_whose_grammar_is_tried() -> None:
    async with AsyncEngine(new_engine(PATIENT)) as engine:
        held = asyncio.create_task(engine.generate("a", response_format=as_format(BOMB)))
        for grammar in (None, {"type": "regex", "regex": "ab"}):
            await engine.generate("b", max_new_tokens=5, response_format=grammar)
        assert engine.num_waiting == 0
        assert not held.done()
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        last = asyncio.create_task(engine.generate("a", response_format=as_format(BOMB)))
        await engine.generate("b", max_new_tokens=5)
        await engine.close()
        with pytest.raises(RuntimeError, match="closed before the call's turn came"):
            await last


def test_a_call_ends_between_the_masks_of_a_step() -> None:
    """The event is set in the middle of a step, of which nothing is committed then; what comes
    after is as in a fresh engine."""
    options: dict[str, Any] = {
        "max_new_tokens": 20,
        "response_format": {"type": "regex", "regex": "[a-d]{30}"},
    }
    event, texts = threading.Event(), []

    def end_at_third(tokens: Sequence[int], logits_V: np.ndarray) -> np.ndarray:
        texts.append(list(tokens))
        if len(texts) == 3:
            event.set()
        return logits_V

    with new_engine(PATIENT, "parallelspec") as engine:
        whole = engine.generate("abc", logits_processor=lambda _, logits_V: logits_V, **options)
        result = engine.generate("abc", logits_processor=end_at_third, cancel=event, **options)
        assert len(texts) == 3
        assert result.finish_reason == "cancelled"
        num_tokens = len(result.token_ids)
        assert 0 < num_tokens < 3
        assert result.token_ids == whole.token_ids[:num_tokens]
        assert engine.generate("abc", **options).token_ids == whole.token_ids


@pytest.mark.parametrize("executable", ["", "/dev/null"])
def test_where_no_process_can_start_a_warning_says_so(
    executable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    tokenizer = BpeTokenizer()
    with caplog.at_level(logging.WARNING, "spec_runtime"):
        for text in ("ab", "abc"):
            tokenizer.matcher(Grammar("regex", text), NUM_LOGITS)
    (record,) = caplog.records
    assert "which no limit of time or memory ends" in record.message


def test_a_process_that_died_while_it_waited_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Process(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Process)
    tokenizer = BpeTokenizer()
    for number in range(1, 4):
        tokenizer.matcher(Grammar("regex", "a" * number), NUM_LOGITS)
        assert len(started) == number
        if number == 1:
            started[0].kill()
            started[0].wait()
        else:
            tokenizer.close()
            assert started[-1].returncode is not None


def test_few_grammars_are_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that passed their trial are compiled again in this process, where nothing ends them."""
    tokenizer = ByteTokenizer()
    compiler: Any = tokenizer.open_compiler(258)
    compiler.matcher(Grammar("regex", "a"))
    library, now, most, lock = compiler._library, 0, 0, threading.Lock()
    make, are_many = library.LLMatcher, threading.Event()

    class Slow:
        grammar_from_regex = staticmethod(make.grammar_from_regex)

        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
            if now > TrialLimits().processes:
                are_many.set()
            are_many.wait(0.3)  # so that others come meanwhile
            with lock:
                now -= 1
            return make(*arguments, **options)

    monkeypatch.setattr(library, "LLMatcher", Slow)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda n: compiler.matcher(Grammar("regex", f"a{{{n}}}")), range(1, 7)))
    assert most == TrialLimits().processes
