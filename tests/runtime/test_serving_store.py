"""Tests what a server keeps of responses: conversations, items, and the store's bounds."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from apis import APIS
from served import HELLO, RESPONSES, post, prompts_read, stream, toy_engine

from spec_runtime.serve.errors import ApiError
from spec_runtime.serve.responses import store
from spec_runtime.serve.responses.store import ResponseStore

RESPONSES_API = APIS[1]
BODY = {"input": "hello", "max_output_tokens": 20, "temperature": 0}


def text_of(response: Any) -> str:
    return RESPONSES_API.read(response).text


def test_a_conversation_goes_on_from_a_kept_response(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its instructions are those of one request."""
    prompts, messages, previous = prompts_read(monkeypatch), list[Any](), None
    for text in ("hello", "and you?", "well"):
        messages.append({"role": "user", "content": text})
        more = {"previous_response_id": previous, "input": text}
        instructions = "Be brief." if previous is None else None
        found = RESPONSES_API.answer(client, 9, **more, instructions=instructions).whole
        asked = prompts[-2:]  # whole and streamed
        before = [{"role": "system", "content": "Be brief."}] if previous is None else []
        assert asked == [toy_engine().encode([*before, *messages])] * 2
        assert found["previous_response_id"] == previous
        messages.append({"role": "assistant", "content": text_of(found)})
        previous = found["id"]


def test_an_item_may_be_referred_to(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_read(monkeypatch)
    found = post(client, RESPONSES, **BODY)
    (item,) = found["output"]
    more = {"role": "user", "content": "And?"}
    reference = {"type": "item_reference", "id": item["id"]}
    whole = [*HELLO, item, more]
    expected = text_of(post(client, RESPONSES, **{**BODY, "input": whole}))
    referring = post(client, RESPONSES, **{**BODY, "input": [*HELLO, reference, more]})
    assert text_of(referring) == expected
    assert prompts[-1] == prompts[-2] != prompts[0]
    goes_on = {**BODY, "input": "Well?", "previous_response_id": referring["id"]}
    again = [*whole, referring["output"][0], {"role": "user", "content": "Well?"}]
    post(client, RESPONSES, **goes_on)
    post(client, RESPONSES, **{**BODY, "input": again})
    assert prompts[-1] == prompts[-2]


def test_a_kept_response_is_shown_and_deleted(client: Any) -> None:
    whole = post(client, RESPONSES, **BODY)
    streamed = stream(client, RESPONSES, **BODY)[-1]["response"]
    for response in (whole, streamed):
        path = f"{RESPONSES}/{response['id']}"
        assert client.get(path).json() == response
        assert client.delete(path).json() == {
            "id": response["id"],
            "object": "response",
            "deleted": True,
        }
        for reply in (client.get(path), client.delete(path)):
            assert reply.status_code == 404
            assert reply.json()["error"]["code"] == "response_not_found"
        reply = client.post(RESPONSES, json={**BODY, "previous_response_id": response["id"]})
        assert reply.status_code == 404
        assert reply.json()["error"]["param"] == "previous_response_id"
        assert "'input'" in reply.json()["error"]["message"]


def test_what_shall_not_be_stored_is_not(client: Any) -> None:
    found = post(client, RESPONSES, **BODY, store=False)
    assert found["store"] is False
    assert client.get(f"{RESPONSES}/{found['id']}").status_code == 404


def responded(name: str, text: str = "x", **more: Any) -> dict[str, Any]:
    return {"id": name, "output": [{"id": f"msg_{name}", "content": text}], **more}


def test_the_store_is_bounded_by_number_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ResponseStore()
    monkeypatch.setattr(store, "MOST_RESPONSES", 3)
    for name in "abc":
        kept.keep(responded(name), HELLO)
    kept.response("a", "")  # which makes it the last used
    kept.keep(responded("d"), [*kept.messages("c", ""), *HELLO])
    assert kept.messages("d", "") == HELLO * 2
    for find in (kept.response, kept.messages):
        with pytest.raises(ApiError, match="'b' not found"):
            find("b", "")
    with pytest.raises(ApiError, match="'msg_b' not found"):
        kept.item("msg_b")
    assert json.loads(kept.response("d", "")) == responded("d")
    assert kept.item("msg_d") == responded("d")["output"][0]
    assert len(kept) == 3
    monkeypatch.setattr(store, "MOST_BYTES", 2000)
    kept.keep(responded("e", 900 * "x"), HELLO)
    assert len(kept) == 1
    kept.keep(responded("f", 3000 * "x"), HELLO)
    assert len(kept) == 0
    kept.keep(responded("g", 900 * "x"), HELLO)
    kept.remove("g", "")
    kept.keep(responded("h", 900 * "x"), HELLO)
    assert len(kept) == 1


def test_the_store_takes_no_more_memory_than_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty lists take three bytes of JSON, and seventy as objects."""
    monkeypatch.setattr(store, "MOST_BYTES", 1 << 20)
    kept = ResponseStore()
    tools = json.dumps([[]] * 50_000)
    tracemalloc.start()
    for number in range(12):
        kept.keep(responded(str(number), tools=json.loads(tools)), HELLO)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 800_000 < held < 1_200_000


def test_items_are_found_by_the_servers_ids_only(client: Any) -> None:
    """One client's items are found neither by ids that it gave them, nor by another's id."""
    mine = {"type": "message", "id": "msg_1", "role": "user", "content": "a secret"}
    found = post(client, RESPONSES, **{**BODY, "input": [mine]})
    answered = found["output"][0]
    forged = {**answered, "content": "another's"}
    post(client, RESPONSES, **{**BODY, "input": [forged, *HELLO]})  # a second client
    for name, status in (("msg_1", 404), (answered["id"], 200)):
        items = [{"type": "item_reference", "id": name}, *HELLO]
        reply = client.post(RESPONSES, json={**BODY, "input": items})
        assert reply.status_code == status, reply.text
    whole = post(client, RESPONSES, **{**BODY, "input": [answered, *HELLO]})
    assert text_of(reply.json()) == text_of(whole)


def test_an_item_is_referred_to_once(client: Any) -> None:
    """Many references to a long item would make a short request a very long one."""
    (item,) = post(client, RESPONSES, **BODY)["output"]
    items = [{"type": "item_reference", "id": item["id"]}] * 2
    reply = client.post(RESPONSES, json={**BODY, "input": [*HELLO, *items]})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "input")
    assert "twice, expected each item once" in error["message"]
