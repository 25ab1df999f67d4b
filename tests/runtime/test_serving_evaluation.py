"""Tests what evaluation tools ask a server for: how likely the tokens of prompts are."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import small
from served import COMPLETIONS, choice_of, in_process, metrics, post, stream, toy_engine

from spec_runtime import Engine, TokenLogprob
from spec_runtime.batch.batch import Batch, Pass
from spec_runtime.loop.generate import PromptScores
from spec_runtime.loop.target import PREFILL_ROWS
from spec_runtime.sampling import token_logprob
from spec_runtime.trees.tree import TokenTree

LONG = "the quick brown fox jumps " * 11
GREEDY = {"temperature": 0, "echo": True}


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with in_process() as made:
        yield made


def scored(engine: Engine, ids: list[int], num_top: int) -> list[TokenLogprob]:
    """Returns how likely the engine's target says each token is but the first, a row at a time."""
    entries = []
    target = engine.target
    with target.alone():
        for token, after in pairwise(ids):
            verified = target.verify(TokenTree.root(token))
            entries.append(token_logprob(verified.row(0), after, num_top))
            target.commit([0])
    return entries


# ---- how likely a prompt is ----


@pytest.mark.parametrize("prompt", ["hello", LONG], ids=["short", "chunks"])
@pytest.mark.parametrize("max_tokens", [0, 1, 7])
def test_the_prompts_log_probabilities_are_the_targets(
    client: Any, prompt: str, max_tokens: int
) -> None:
    engine = toy_engine()
    ids = engine.encode(prompt, raw=True)
    assert len(ids) > PREFILL_ROWS or prompt == "hello"
    expected = scored(engine, ids, 3)
    body = {"prompt": prompt, "max_tokens": max_tokens, "logprobs": 3, **GREEDY}
    reply = post(client, COMPLETIONS, **body)
    (choice,) = reply["choices"]
    found = choice["logprobs"]
    n = len(ids)
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:n] == pytest.approx([e.logprob for e in expected], abs=1e-9)
    assert [sorted(top.values()) for top in found["top_logprobs"][1:n]] == [
        pytest.approx(sorted(value for _, value in entry.top), abs=1e-9) for entry in expected
    ]
    assert found["tokens"][:n] == ["", *prompt], "BOS has no text"
    assert found["text_offset"][:n] == [0, *range(len(prompt))]
    # and the answer is the one that it gets without
    plain = {"prompt": prompt, "max_tokens": max(1, max_tokens), "logprobs": 3, "temperature": 0}
    answer = choice_of(client, COMPLETIONS, **plain)
    if max_tokens == 0:
        answer["logprobs"] = {key: [] for key in answer["logprobs"]}
        answer["text"] = ""
    assert choice["text"] == prompt + answer["text"]
    assert choice["finish_reason"] == "length"
    for key, values in answer["logprobs"].items():
        shift = len(prompt) if key == "text_offset" else 0
        rest = found[key][n:]
        assert rest == ([each + shift for each in values] if shift else values), key
    assert reply["usage"]["prompt_tokens"] == n
    assert reply["usage"]["completion_tokens"] == max_tokens

    parts = [part["choices"][0] for part in stream(client, COMPLETIONS, **body)[:-1]]
    assert "".join(part["text"] for part in parts) == choice["text"]
    for key, values in found.items():
        assert [each for part in parts for each in (part["logprobs"] or {key: []})[key]] == values
    assert parts[-1]["finish_reason"] == "length"


def test_a_prompt_of_ids_is_scored_as_its_text_is(client: Any) -> None:
    ids = toy_engine().encode("hello", raw=True)
    body = {"max_tokens": 1, "logprobs": 1, "seed": 1234, **GREEDY}
    text = choice_of(client, COMPLETIONS, prompt="hello", **body)
    assert choice_of(client, COMPLETIONS, prompt=[ids], **body) == text
    one = choice_of(client, COMPLETIONS, prompt=[ids[:1]], **body)["logprobs"]
    assert one["token_logprobs"][0] is None
    assert len(one["tokens"]) == 2


def test_each_token_after_the_prompt_is_shown_also_the_one_that_ends_the_answer(
    client: Any,
) -> None:
    """Clients take what follows a prompt's tokens by their number."""
    body = {"prompt": "hello", "max_tokens": 3, "logprobs": 1, "logit_bias": {"257": 100}, **GREEDY}
    choice = choice_of(client, COMPLETIONS, **body)
    assert (choice["text"], choice["finish_reason"]) == ("hello", "stop")
    assert choice["logprobs"]["tokens"] == ["", *"hello", ""]
    assert len(choice["logprobs"]["token_logprobs"]) == 7


def test_without_tokens_to_answer_the_prompt_is_read_only(client: Any) -> None:
    before = metrics(client).get('tokens_total{kind="completion"}', 0)
    body = {"prompt": "abcdefgh", "max_tokens": 0}
    reply = post(client, COMPLETIONS, **body, n=2, logprobs=1, logit_bias={"257": 100})
    for choice in reply["choices"]:
        assert (choice["text"], choice["finish_reason"]) == ("", "length")
        assert choice["logprobs"]["tokens"] == []
    assert reply["usage"]["completion_tokens"] == 0
    echoed = choice_of(client, COMPLETIONS, **body, echo=True)
    assert (echoed["text"], echoed["logprobs"]) == ("abcdefgh", None)
    *_, last, done = stream(client, COMPLETIONS, **body)
    assert last["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"
    usage = post(client, COMPLETIONS, prompt="abcdefghi", max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 8, "its rows are kept"
    assert metrics(client)['tokens_total{kind="completion"}'] == before + 1


def test_prompts_are_scored_beside_other_calls() -> None:
    prompts = [f"{'ab' * n} say" for n in range(1, 9)]
    engine = small.toy_engine()
    expected = {each: scored(engine, engine.encode(each, raw=True), 1) for each in prompts}
    with in_process(small.toy_engine(), parallel=3) as client:

        def ask(prompt: str) -> list[Any]:
            body = {"prompt": prompt, "max_tokens": 5, "temperature": 0}
            plain = choice_of(client, COMPLETIONS, **body)
            echoed = choice_of(client, COMPLETIONS, **body, echo=True, logprobs=1)
            assert echoed["text"] == prompt + plain["text"]
            return list(echoed["logprobs"]["token_logprobs"])

        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(ask, prompts))
    for prompt, values in zip(prompts, found, strict=True):
        ours = [entry.logprob for entry in expected[prompt]]
        assert values[1 : len(ours) + 1] == pytest.approx(ours, abs=1e-9)


@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.parametrize("drafter", ["none", "prompt_lookup"])
def test_prompts_that_are_scored_are_answered_as_others_are(drafter: str, parallel: int) -> None:
    """Its passes over the prompt count as the prompt's rows, with drafters that wait for runs."""
    engine = small.toy_engine(drafter)
    prompts = ["abab say", "abcabc say"]
    expected = engine.generate_many(prompts, 1, raw=True, max_new_tokens=20)
    calls = [engine.prepare(each, raw=True, max_new_tokens=20, reuse=False) for each in prompts]
    scores = {call: PromptScores(1) for call in calls}
    for call in calls:
        call.scores = scores[call]
    batch = Batch(engine, parallel)
    passes: list[Pass] = []
    batch.on_pass = passes.append
    results: dict[int, Any] = {}
    for number, chunk in batch.answer(calls):
        assert len(scores[calls[number]].entries) == len(calls[number].prompt) - 1
        if chunk.result is not None:
            results[number] = chunk.result
    assert [results[n].token_ids for n in range(2)] == [each.token_ids for each in expected]
    assert sum(ran.prompt_rows for ran in passes) == sum(len(call.prompt) for call in calls)
    assert all(0 <= ran.granted <= ran.drafted for ran in passes)
    for call in calls:
        ours = scored(small.toy_engine(), call.prompt, 1)
        found = [entry.logprob for entry in scores[call].entries]
        assert np.allclose(found, [entry.logprob for entry in ours], atol=1e-9)
