"""Tests OpenAI's completions and what only OpenAI's chats have, by a toy engine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import small
from served import (
    CHAT,
    COMPLETIONS,
    HELLO,
    choice_of,
    in_process,
    metrics,
    post,
    stream,
    toy_engine,
)
from toy_backend import ByteTokenizer

from spec_runtime import Engine, TokenLogprob
from spec_runtime.batch.batch import Batch, Pass
from spec_runtime.loop.generate import PromptScores
from spec_runtime.loop.target import PREFILL_ROWS
from spec_runtime.sampling import token_logprob
from spec_runtime.serve.openai.replies import TokenTexts
from spec_runtime.trees.tree import TokenTree

BODY = {"prompt": "hello", "max_tokens": 12, "temperature": 0}


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8, "seed": 5},
        {"temperature": 0.9, "seed": 6, "top_p": 0.7},
        {"temperature": 1.0, "seed": 7, "top_k": 3, "min_p": 0.01},
        {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0, "repetition_penalty": 1.4},
        {"temperature": 0, "logit_bias": {65: 50}},
    ],
)
def test_sampling_is_the_engines(client: Any, sampling: dict[str, Any]) -> None:
    expected = toy_engine().generate("hello", raw=True, max_new_tokens=12, **sampling)
    assert choice_of(client, COMPLETIONS, **{**BODY, **sampling})["text"] == expected.text


def test_without_a_temperature_it_is_one(client: Any) -> None:
    body = {"prompt": "hello", "max_tokens": 12, "seed": 3}
    default, one, greedy = (
        choice_of(client, COMPLETIONS, **body, **more)["text"]
        for more in ({}, {"temperature": 1}, {"temperature": 0})
    )
    assert default == one != greedy


@pytest.mark.parametrize("top_k", [0, -1])
def test_no_top_k_keeps_all_tokens(client: Any, top_k: int) -> None:
    body = {**BODY, "temperature": 2.0, "seed": 3}
    found = choice_of(client, COMPLETIONS, **body, top_k=top_k)
    assert found == choice_of(client, COMPLETIONS, **body)
    assert found != choice_of(client, COMPLETIONS, **body, top_k=1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "max_tokens": -1}),
        (CHAT, {"messages": HELLO, "max_completion_tokens": -1}),
        (COMPLETIONS, {"prompt": "hello", "max_tokens": -1}),
        (COMPLETIONS, {"prompt": ["hello"], "max_completion_tokens": -1, "echo": True}),
    ],
)
def test_an_answer_may_fill_the_context(client: Any, path: str, body: dict[str, Any]) -> None:
    reply = post(client, path, **body, temperature=0, ignore_eos=True)
    assert reply["usage"]["total_tokens"] == toy_engine().target.max_length
    assert reply["choices"][0]["finish_reason"] == "length"


def test_another_name_of_the_number_of_tokens(client: Any) -> None:
    body = {"prompt": "hello", "temperature": 0}
    found = post(client, COMPLETIONS, **body, max_completion_tokens=7)
    assert found["usage"]["completion_tokens"] == 7
    assert choice_of(client, COMPLETIONS, **body, max_completion_tokens=0)["text"] == ""


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 4}])
@pytest.mark.parametrize("ending", [{}, {"ignore_eos": True, "stop_token_ids": [257, 9999]}])
def test_an_answer_has_its_least_number_of_tokens(
    client: Any, sampling: dict[str, Any], ending: dict[str, Any]
) -> None:
    """Exactly: the tokens are those of the engine where these have no probability until then."""
    least, engine = 6, toy_engine()
    length = len(engine.encode("hello", raw=True)) + least

    def suppress(tokens: Sequence[int], logits_V: np.ndarray) -> np.ndarray:
        if len(tokens) < length:
            logits_V[257] = -np.inf
        return logits_V

    bias = {"logit_bias": {257: 100.0}}
    options = {**sampling, **ending, **bias, "max_new_tokens": 20}
    expected = engine.generate("hello", raw=True, logits_processor=suppress, **options)
    assert len(expected.token_ids) == least + 1
    body = {"prompt": "hello", "max_tokens": 20, **sampling, **ending, **bias}
    reply = post(client, COMPLETIONS, **body, min_tokens=least)
    assert reply["choices"][0]["text"] == expected.text
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == least + 1
    assert post(client, COMPLETIONS, **body)["usage"]["completion_tokens"] == 1
    chat = {"messages": HELLO, "max_tokens": 20, "min_tokens": least, **sampling, **ending, **bias}
    assert post(client, CHAT, **chat)["usage"]["completion_tokens"] == least + 1


def test_a_completion_without_bos(client: Any) -> None:
    reply = post(client, COMPLETIONS, **BODY, add_special_tokens=False)
    assert reply["usage"]["prompt_tokens"] == len("hello")
    ids = list(b"hello")
    assert reply["choices"] == post(client, COMPLETIONS, **{**BODY, "prompt": ids})["choices"]
    assert post(client, COMPLETIONS, **BODY, add_special_tokens=True)["usage"]["prompt_tokens"] == 6
    post(client, CHAT, messages=HELLO, max_tokens=1, add_special_tokens=False)


def test_a_completion_keeps_to_a_format(client: Any) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed, of the extra grammar")
    form = {"type": "regex", "regex": "[ab]{3}x"}
    for prompt in ("hello", ["hello", "you"]):
        reply = post(client, COMPLETIONS, **{**BODY, "prompt": prompt}, response_format=form)
        for choice in reply["choices"]:
            assert re.fullmatch("[ab]{3}x", choice["text"])


def test_a_prompt_may_be_read_anew(client: Any) -> None:
    def num_cached(**more: Any) -> Any:
        usage = post(client, COMPLETIONS, **{**BODY, "prompt": "read me anew"}, **more)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    num_cached()
    assert num_cached(cache_prompt=True) == num_cached() == len("read me anew")
    assert num_cached(cache_prompt=False) == 0


def test_choices_of_several_prompts(client: Any) -> None:
    body = {"max_tokens": 6, "temperature": 1.5, "seed": 11}
    reply = post(client, COMPLETIONS, prompt=["one", "two"], n=2, **body)
    texts = [choice["text"] for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert texts == [
        choice_of(client, COMPLETIONS, prompt=prompt, **{**body, "seed": seed})["text"]
        for prompt in ("one", "two")
        for seed in (11, 12)
    ]
    assert len(set(texts)) == 4
    assert reply["usage"]["prompt_tokens"] == 8  # each prompt once: three letters and BOS
    assert reply["usage"]["completion_tokens"] == 24
    streamed = ["", "", "", ""]
    for part in stream(client, COMPLETIONS, prompt=["one", "two"], n=2, **body)[:-1]:
        streamed[part["choices"][0]["index"]] += part["choices"][0]["text"]
    assert streamed == texts


@pytest.mark.parametrize("also_at_the_end", [False, True])
def test_each_event_counts_the_tokens_so_far(client: Any, also_at_the_end: bool) -> None:
    options = {"continuous_usage_stats": True, "include_usage": also_at_the_end}
    parts = stream(client, COMPLETIONS, **BODY, n=2, stream_options=options)[:-1]
    if also_at_the_end:
        last = parts.pop()
        assert last["choices"] == []
        assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 24
    prompt = post(client, COMPLETIONS, **BODY)["usage"]["prompt_tokens"]
    assert all(part["usage"]["prompt_tokens"] == prompt for part in parts)
    assert parts[-1]["usage"]["total_tokens"] == prompt + 24
    chat = {"messages": HELLO, "max_tokens": 5, "stream_options": options}
    parts = [part for part in stream(client, CHAT, **chat)[:-1] if part["choices"]]
    assert parts[-1]["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_answer_says_what_it_took_as_other_servers_do(client: Any, path: str) -> None:
    body = {**(BODY if path == COMPLETIONS else {"messages": HELLO}), "temperature": 0}
    whole = post(client, path, **body)
    timings, said = whole["timings"], whole["metrics"]["speculative_decoding"]
    usage = whole["usage"]
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert timings["predicted_n"] == usage["completion_tokens"]
    seconds = timings["predicted_ms"] / 1000
    assert timings["predicted_per_second"] == pytest.approx(timings["predicted_n"] / seconds)
    drafted, accepted = said["num_draft_tokens"], said["num_accepted_draft_tokens"]
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (drafted, accepted)
    assert drafted >= accepted > 0
    histogram, num_steps = said["acceptance_histogram"], said["num_spec_steps"]
    assert len(histogram) == said["num_spec_tokens"] + 1
    assert sum(histogram) == num_steps
    assert sum(number * count for number, count in enumerate(histogram)) == accepted
    assert said["mean_acceptance_length"] == 1 + accepted / num_steps
    assert said["draft_acceptance_rate"] == accepted / drafted
    *_, last, _ = stream(client, path, **body, stream_options={"include_usage": True})
    assert last["metrics"] == whole["metrics"]
    assert last["timings"].keys() == timings.keys()
    *_, last, _ = stream(client, path, **body)
    assert last["choices"][0]["finish_reason"]
    assert last["timings"]["draft_n"] == drafted
    assert not {"timings", "metrics"} & post(client, path, **body, n=2).keys()


def test_cached_tokens_are_those_of_all_prompts() -> None:
    with in_process() as client:
        counts = []
        for prompt in ("one two", ["one two", "one three"]):
            usage = post(client, COMPLETIONS, prompt=prompt, n=2, max_tokens=6)["usage"]
            counts.append(usage["prompt_tokens_details"]["cached_tokens"])
    # what the prompts share with what was read before, BOS too; the last such token is read anew
    assert counts == [0, len("one two") + len("one t")]


def test_a_prompt_may_be_token_ids_and_is_echoed(client: Any) -> None:
    ids = toy_engine().encode("hello", raw=True)
    text = choice_of(client, COMPLETIONS, **BODY)["text"]
    assert choice_of(client, COMPLETIONS, **{**BODY, "prompt": ids})["text"] == text
    assert choice_of(client, COMPLETIONS, **BODY, echo=True)["text"] == "hello" + text
    parts = stream(client, COMPLETIONS, **{**BODY, "prompt": [ids]}, echo=True)[:-1]
    assert "".join(part["choices"][0]["text"] for part in parts) == "hello" + text


def test_the_answers_ids_are_returned(client: Any) -> None:
    """As vLLM returns them: whole and in the chunks of a stream, none left out."""
    body = {**BODY, "return_token_ids": True}
    whole = choice_of(client, COMPLETIONS, **body)
    assert toy_engine().tokenizer.decode(whole["token_ids"]) == whole["text"] != ""
    parts = [part["choices"][0]["token_ids"] for part in stream(client, COMPLETIONS, **body)[:-1]]
    assert [token for part in parts for token in part] == whole["token_ids"]
    assert "token_ids" not in choice_of(client, COMPLETIONS, **BODY)


@pytest.mark.parametrize("is_stream", [False, True])
def test_ids_that_are_no_tokens_are_refused_before_they_are_echoed(
    client: Any, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    decode = ByteTokenizer.decode

    def decode_strictly(self: ByteTokenizer, ids: Sequence[int]) -> str:
        assert max(ids) < self.vocab_size, "real tokenizers raise an error as well"
        return decode(self, ids)

    monkeypatch.setattr(ByteTokenizer, "decode", decode_strictly)
    body = {"prompt": [99999999999], "echo": True, "max_tokens": 2, "stream": is_stream}
    reply = client.post(COMPLETIONS, json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "prompt"


@pytest.fixture(scope="module")
def letters() -> Iterator[Any]:
    """Returns a client of an engine whose tokens are letters."""
    with in_process(small.toy_engine()) as made:
        yield made


@pytest.mark.parametrize("has_stop", [False, True])
def test_logprobs_of_a_completion(letters: Any, has_stop: bool) -> None:
    """Whole and streamed: the tokens shown are those of the text, and no more."""
    text = choice_of(letters, COMPLETIONS, **BODY)["text"]
    stop = text[4:7]
    body = {**BODY, "logprobs": 1, "stop": [stop] if has_stop else []}
    choice = choice_of(letters, COMPLETIONS, **body)
    found = choice["logprobs"]
    count = text.index(stop) if has_stop else len(text)
    assert "".join(found["tokens"]) == choice["text"] == text[:count]
    assert found["text_offset"] == list(range(count))
    pairs = zip(found["tokens"], found["token_logprobs"], strict=True)
    assert found["top_logprobs"] == [{token: logprob} for token, logprob in pairs]
    parts = [part["choices"][0] for part in stream(letters, COMPLETIONS, **body)[:-1]]
    assert len(parts) > 2
    for key, values in found.items():
        assert [each for part in parts for each in (part["logprobs"] or {key: []})[key]] == values


class Alike(ByteTokenizer):
    """Has a token 1 whose text is that of "a", and half a character, 200."""

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode([ord("a") if i == 1 else i for i in ids])


def test_of_tokens_with_one_text_none_is_lost() -> None:
    texts = TokenTexts(Alike(), frozenset())
    entry = TokenLogprob(1, -0.5, [(1, -0.5), (ord("a"), -1.5), (200, -2.5), (201, -3.5)])
    found = texts.completion([(entry, 7)], 3)
    half = "\ufffd"
    expected = {"a": -0.5, "token_id:97": -1.5, half: -2.5, "token_id:201": -3.5}
    assert found["top_logprobs"] == [expected]
    assert found["text_offset"] == [10]
    (content,) = texts.chat([(entry, 7)])["content"]
    assert [top["logprob"] for top in content["top_logprobs"]] == [-0.5, -1.5, -2.5, -3.5]


class Spaced(ByteTokenizer):
    """Drops the space before its first word, as SentencePiece does."""

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids).removeprefix(" ")


def test_a_tokens_text_has_its_space() -> None:
    (entry,) = TokenTexts(Spaced(), frozenset()).chat([(TokenLogprob(32, -1.0, []), 0)])["content"]
    assert (entry["token"], entry["bytes"]) == (" ", [32])


def test_the_token_that_ends_an_answer_has_no_logprob(client: Any) -> None:
    body = {"messages": HELLO, "temperature": 0, "logprobs": True, "logit_bias": {"257": 100}}
    choice = choice_of(client, CHAT, **body)
    assert choice["message"]["content"] == ""
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["content"] == []


# ---- what evaluation tools ask for: how likely the tokens of prompts are ----


LONG = "the quick brown fox jumps " * 11
GREEDY = {"temperature": 0, "echo": True}


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
