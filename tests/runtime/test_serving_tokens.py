"""Tests that a server gives the tokens of texts and messages, and their texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from bpe_tokenizer import BOS, EOS, BpeTokenizer
from served import COMPLETIONS, HELLO, choice_of, in_process, post, toy_engine
from toy_backend import CHATML
from toy_engine import make_engine

from spec_runtime.dialogue.chat_template import ChatTemplate

TOKENIZER = BpeTokenizer(ChatTemplate(CHATML, {"eos_token": "<eos>", "pad_token": "<|call|>"}))
TEXT = 'true <|call|>name" ä\n'


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    engine = make_engine("none", vocab_size=TOKENIZER.vocab_size, tokenizer=TOKENIZER)
    with in_process(engine) as made:
        yield made


def test_a_text_becomes_tokens_and_a_text_again(client: Any) -> None:
    reply = post(client, "/tokenize", prompt=TEXT, model="toy", return_token_strs=True)
    assert reply["tokens"] == TOKENIZER.encode(TEXT, special_tokens=True)
    assert reply["tokens"][0] == BOS
    assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), 200)
    strings = reply["token_strs"]
    assert strings[:4] == ["<bos>", "true", " ", "<|call|>"]
    assert len(strings) == reply["count"]
    bare = post(client, "/tokenize", prompt=TEXT, add_special_tokens=False)
    assert bare["tokens"] == reply["tokens"][1:]
    assert "token_strs" not in bare
    assert post(client, "/detokenize", tokens=bare["tokens"]) == {"prompt": TEXT}
    assert post(client, "/detokenize", tokens=reply["tokens"])["prompt"] == "<bos>" + TEXT
    assert post(client, "/detokenize", tokens=[]) == {"prompt": ""}
    assert post(client, "/tokenize", prompt="", add_special_tokens=False)["tokens"] == []


def test_the_tokens_are_those_that_prompts_have(client: Any) -> None:
    long = post(client, "/tokenize", prompt="xyz " * 300)
    assert long["count"] == 1201, "more than the context"
    tokens = post(client, "/tokenize", prompt=TEXT)["tokens"]
    body = {"max_tokens": 4, "temperature": 0}
    by_ids = choice_of(client, COMPLETIONS, prompt=tokens, **body)
    assert by_ids == choice_of(client, COMPLETIONS, prompt=TEXT, **body)


def test_messages_become_the_tokens_of_their_chat() -> None:
    engine = toy_engine()
    begun = [*HELLO, {"role": "assistant", "content": "well"}]
    with in_process(toy_engine()) as client:
        found = post(client, "/tokenize", messages=HELLO, add_generation_prompt=True)
        assert found["tokens"] == engine.encode(HELLO)
        found = post(client, "/tokenize", messages=begun, continue_final_message=True)
        assert found["tokens"] == engine.encode(begun, continue_final=True)


def test_the_tokenizer_is_described(client: Any) -> None:
    info = client.get("/tokenizer_info").json()
    assert info == {
        "model_max_length": 200,
        "vocab_size": TOKENIZER.vocab_size,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<|call|>",
        "chat_template": CHATML,
    }
    for name in ("bos", "eos"):  # as clients find the ids
        found = post(client, "/tokenize", prompt=info[f"{name}_token"], add_special_tokens=False)
        assert found["tokens"] == [info[f"{name}_token_id"]]


def test_offsets_count_the_names_of_control_tokens_in_a_prompt(client: Any) -> None:
    body = {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 0}
    choice = choice_of(client, COMPLETIONS, **body)
    assert choice["text"] == TEXT
    found = post(client, "/tokenize", prompt=TEXT, return_token_strs=True)
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[:5] == [0, 0, 4, 5, 13]
    whole = [k for k, text in enumerate(found["token_strs"]) if "\ufffd" not in text and k > 0]
    for k in whole:
        assert TEXT[offsets[k] :].startswith(found["token_strs"][k]), k


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, None, None),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, None, None),
        ("/tokenize", {"messages": []}, "messages", "invalid_value"),
        (
            "/tokenize",
            {"messages": HELLO, "add_generation_prompt": False},
            "add_generation_prompt",
            "invalid_value",
        ),
        (
            "/tokenize",
            {"messages": HELLO, "continue_final_message": True},
            "messages",
            "invalid_value",
        ),
        ("/detokenize", {"tokens": [5, 99999]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "invalid_value"),
        ("/detokenize", {"tokens": "x"}, "tokens", "invalid_value"),
        ("/tokenize", {"prompt": "x", "model": "gpt"}, "model", "model_not_found"),
        ("/detokenize", {"tokens": [1], "model": "gpt"}, "model", "model_not_found"),
    ],
)
def test_what_is_refused(client: Any, path: str, body: Any, param: Any, code: Any) -> None:
    reply = client.post(path, json=body)
    assert reply.status_code == (404 if code == "model_not_found" else 400)
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert param is not None or "either 'prompt' or 'messages'" in error["message"]
