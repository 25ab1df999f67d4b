"""The engine: text, stop strings, streams closed early, reuse of the common prefix, bad input."""

from typing import Any

import numpy as np
import pytest
from small import known
from toy_backend import CHATML, ByteTokenizer
from toy_engine import DRAFTERS, MODEL, engine_of, make_engine, random_prompt

from spec_runtime.dialogue.chat_template import ChatTemplate
from spec_runtime.engine import Engine
from spec_runtime.errors import ContextLengthError, UserError
from spec_runtime.loop.proposer import PlainProposer
from spec_runtime.loop.step import Step
from spec_runtime.proposers.merged import MergedProposer


def chat_engine(drafter: str, **options: Any) -> Engine:
    tokenizer = ByteTokenizer(ChatTemplate(CHATML))
    return make_engine(drafter, tokenizer=tokenizer, max_length=600, **MODEL, **options)


def printable(engine: Engine) -> Engine:
    """Makes the target write letters only, so that stop strings have something to match."""
    table = engine.target._backend.table_VV  # type: ignore[attr-defined]
    table[...] = 97 + table % 8  # in place: the toy drafter shares it
    return engine


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_stop_string_across_tokens_and_steps(drafter: str) -> None:
    """Each pair and triple of bytes of the free text, wherever steps happen to end."""
    prompt = random_prompt(0)
    free = printable(engine_of(drafter)).generate(prompt, max_new_tokens=40)
    engine = printable(engine_of(drafter))
    boundaries = 0
    for length in (2, 3):
        for at in range(0, 30, 3):
            stop = free.text[at : at + length]
            steps: list[Step] = list(engine.steps(prompt, max_new_tokens=40, stop=stop))
            result = known(engine.last_result)
            end = free.text.index(stop)
            assert result.text == free.text[:end]
            assert result.finish_reason == "stop"
            # tokens up to the one that completes it, and KV and metrics likewise
            assert result.token_ids == free.token_ids[: end + length]
            assert engine.target.length == len(prompt) + end + length - 1
            assert result.stats.committed_tokens == end + length - 1
            boundaries += 0 < len(steps[-1].tokens) < length
    assert boundaries > 0, "no stop string spanned two steps"


def test_the_stream_never_shows_a_part_of_a_stop_string() -> None:
    prompt = random_prompt(0)
    free = printable(engine_of()).generate(prompt, max_new_tokens=40)
    stop = free.text[17:22]
    engine = printable(engine_of())
    shown = ""
    for piece in engine.stream(prompt, max_new_tokens=40, stop=(stop, "never")):
        assert piece
        shown += piece
        assert free.text[: free.text.index(stop)].startswith(shown)
    assert shown == free.text[: free.text.index(stop)]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("seed", range(5))
def test_stream_joins_to_the_generated_text(drafter: str, seed: int) -> None:
    """Random bytes: characters split across tokens and steps, and bytes that are none."""
    prompt = random_prompt(seed)
    options: dict[str, Any] = {"max_new_tokens": 80, "temperature": 1.0, "seed": seed}
    engine = make_engine(drafter, seed=seed)
    pieces = list(engine.stream(prompt, **options))
    whole = make_engine(drafter, seed=seed).generate(prompt, **options)
    assert "".join(pieces) == whole.text == known(engine.last_result).text
    assert known(engine.last_result).token_ids == whole.token_ids
    assert whole.text == ByteTokenizer().decode(whole.token_ids)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("num_pieces", [1, 4])
def test_a_stream_closed_early_leaves_the_engine_usable(drafter: str, num_pieces: int) -> None:
    prompt = random_prompt(1)
    engine = printable(engine_of(drafter))
    fresh = printable(engine_of(drafter)).generate(prompt, max_new_tokens=40)
    stream = engine.stream(prompt, max_new_tokens=40)
    shown = "".join(next(stream) for _ in range(num_pieces))
    stream.close()
    cancelled = known(engine.last_result)
    assert cancelled.finish_reason == "cancelled"
    assert cancelled.text == shown
    assert fresh.text.startswith(shown)
    assert cancelled.token_ids == fresh.token_ids[: len(cancelled.token_ids)]
    again = engine.generate(prompt, max_new_tokens=40)
    assert again.token_ids == fresh.token_ids
    assert again.stats.reused_tokens == len(prompt) - 1


def test_a_stream_never_begun_changes_nothing() -> None:
    engine = make_engine("parallelspec")
    engine.stream([1, 2, 3]).close()
    assert engine.target.length == 0
    assert engine.last_result is None


def test_all_but_one_token_of_the_answer_is_reused() -> None:
    """The next prompt continues with the very tokens generated: only the boundary is redone."""
    engine = engine_of()
    prompt = random_prompt(7)
    first = engine.generate(prompt, max_new_tokens=30)
    held = len(prompt) + len(first.token_ids) - 1  # the last token has no row yet
    longer = [*prompt, *first.token_ids, 1, 2, 3]
    second = engine.generate(longer, max_new_tokens=30)
    assert second.stats.reused_tokens == held - 1
    fresh = engine_of().generate(longer, max_new_tokens=30)
    assert second.token_ids == fresh.token_ids


@pytest.mark.parametrize("form", ["slots", "contiguous"])
@pytest.mark.parametrize("temperature", [0, 0.6])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_prompts_that_share_any_prefix(form: str, temperature: float, drafter: str) -> None:
    options: Any = {"max_new_tokens": 20, "temperature": temperature, "seed": 3}
    rng = np.random.default_rng(0)
    engine = engine_of(drafter, form=form)
    text: list[int] = random_prompt(0)
    for _ in range(8):
        prompt = text[: int(rng.integers(1, len(text) + 1))][:100] + random_prompt(
            int(rng.integers(1000)), int(rng.integers(0, 4))
        )
        result = engine.generate(prompt, **options)
        fresh = engine_of(drafter, form=form).generate(prompt, **options)
        assert result.token_ids == fresh.token_ids
        text = prompt + result.token_ids


def test_reuse_can_be_switched_off() -> None:
    engine = make_engine("parallelspec")
    results = [engine.generate([1, 2, 3, 4], max_new_tokens=9, reuse=False) for _ in range(2)]
    assert results[1].stats.reused_tokens == 0
    assert results[0].token_ids == results[1].token_ids


def test_engines_that_share_a_target_do_not_share_its_kv() -> None:
    prompt = random_prompt(2)
    first = engine_of()
    plain = first.observed(lambda _: PlainProposer())
    engines = [first, plain, first.observed(lambda _: MergedProposer(PlainProposer()))]
    results = [
        engine.generate(prompt, max_new_tokens=20) for engine in (*engines, *reversed(engines))
    ]
    assert all(result.token_ids == results[0].token_ids for result in results)
    # only where the same engine came twice in a row
    assert [r.stats.reused_tokens > 0 for r in results] == [False] * 3 + [True] + [False] * 2


def test_empty_prompts() -> None:
    engine = chat_engine("parallelspec")
    chat = engine.generate("", max_new_tokens=4)
    assert chat.stats.prompt_tokens == len(b"<user></>\n<assistant>")
    raw = engine.generate("", raw=True, max_new_tokens=4)
    assert raw.stats.prompt_tokens == 1
    assert raw.token_ids == chat_engine("none").generate([256], max_new_tokens=4).token_ids
    engine.tokenizer.bos = None
    with pytest.raises(ValueError, match="empty prompt"):
        engine.generate("", raw=True)


def test_bad_prompts_fail_before_anything_runs() -> None:
    engine = make_engine("none", max_length=20)
    for prompt, why in (
        ([1] * 21, "21 tokens, expected at most 20"),
        ([1, 258], "from 1 to 258, expected 0 to 257"),
        ([-1], "expected 0 to 257"),
    ):
        for call in (engine.generate, engine.stream, engine.steps):
            with pytest.raises(UserError, match=why) as caught:
                call(prompt)  # type: ignore[operator]
            assert caught.value.param == "prompt"
            is_too_long = isinstance(caught.value, ContextLengthError)
            assert is_too_long == (caught.value.code == "context_length_exceeded")
            assert is_too_long == (len(prompt) == 21)
    assert engine.target._backend.num_runs == 0  # type: ignore[attr-defined]


def test_an_engine_without_a_bundle_has_one_drafter() -> None:
    with pytest.raises(ValueError, match="one drafter"):
        make_engine("none").with_drafter("prompt_lookup")
