"""Serves toy engines to tests on a real port, by a thread; skips tests where the server's
libraries are not installed."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

for module in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(module, reason=f"{module} is not installed; the extra serve has it")
import httpx  # noqa: E402
import uvicorn  # noqa: E402
from gates import PATIENCE, GatedRuns, wait_until  # noqa: E402
from starlette.testclient import TestClient  # noqa: E402
from starlette.types import ASGIApp  # noqa: E402
from toy_backend import CHATML, ByteTokenizer  # noqa: E402
from toy_engine import make_engine  # noqa: E402

from spec_runtime import Chunk, Engine, GenerationResult  # noqa: E402
from spec_runtime.dialogue.chat_template import ChatTemplate  # noqa: E402
from spec_runtime.serve import streams  # noqa: E402
from spec_runtime.serve.app import make_app  # noqa: E402
from spec_runtime.serve.models import Model, Models  # noqa: E402
from spec_runtime.serve.processes import bind, make_config  # noqa: E402
from spec_runtime.serve.service import Service  # noqa: E402
from spec_runtime.serve.settings import Settings  # noqa: E402

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}},
    "required": ["name"],
    "additionalProperties": False,
}
SMALL_BUFFER = 4096  # bytes of a socket's
streams.LOOK_SECONDS = PATIENCE  # no header goes out before what it depends on, on any machine


def toy_engine(max_length: int = 400) -> Engine:
    """Returns an engine with a chat template, whose drafter is often right."""
    tokenizer = ByteTokenizer(ChatTemplate(CHATML, name="the toy template"))
    return make_engine(
        "parallelspec", max_length=max_length, peak=9.0, noise=4.0, tokenizer=tokenizer
    )


def tool_engine(max_length: int = 1500) -> Engine:
    """Returns an engine whose answers can be kept inside a grammar, and so be calls of tools."""
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    from bpe_tokenizer import BpeTokenizer

    tags = {"<tool_call>": False, "</tool_call>": False}  # added tokens, as Qwen's
    tokenizer = BpeTokenizer(ChatTemplate(CHATML, name="the toy template"), tags)
    size = tokenizer.vocab_size
    return make_engine("parallelspec", vocab_size=size, max_length=max_length, tokenizer=tokenizer)


class Served:
    """A server on a port of its own."""

    def __init__(self, port: int, server: uvicorn.Server, thread: threading.Thread) -> None:
        self.port = port
        self.server = server
        self.thread = thread
        self.url = f"http://127.0.0.1:{port}"

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE)

    def open_request(self, path: str, body: dict[str, Any]) -> socket.socket:
        return open_request(self.url, path, body)


def open_request(url: str, path: str, body: dict[str, Any]) -> socket.socket:
    """Returns a connection on which a request was sent, of whose answer nothing was read. It takes
    a few kilobytes that nobody reads, and no more."""
    host, _, port = url.removeprefix("http://").partition(":")
    data = json.dumps(body).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    connection.settimeout(PATIENCE)
    connection.connect((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


@contextmanager
def served(engine: Engine | None = None, **settings: Any) -> Iterator[Served]:
    """Serves an engine, a toy if none is given, while the block runs."""
    with running(app_of(engine or toy_engine(), Settings("toy", **settings))) as server:
        yield server


def app_of(engine: Engine, settings: Settings, aliases: tuple[str, ...] = ()) -> Any:
    """Returns the app of one engine."""
    service = Service(engine, settings)
    names = dict.fromkeys([*engine.drafters, "none"])
    model = Model(settings.name, lambda: service, engine.target.max_length, (*names,), aliases)
    models = Models([model], service.metrics, service.kept, timeout=settings.timeout)
    models.add_open(service)
    return make_app(models, settings)


def prompts_read(patch: pytest.MonkeyPatch) -> list[list[int]]:
    """Returns the list of what prompts become from now on: the toy's texts say little of theirs."""
    found: list[list[int]] = []
    check = Service.check_prompt

    def recording(service: Service, ids: list[int], field: str) -> list[int]:
        found.append(check(service, ids, field))
        return ids

    patch.setattr(Service, "check_prompt", recording)
    return found


@contextmanager
def in_process(
    engine: Engine | None = None, aliases: tuple[str, ...] = (), **settings: Any
) -> Iterator[TestClient]:
    """Gives a client of an app without a port, for tests to which connections are nothing."""
    app = app_of(engine or toy_engine(), Settings("toy", **settings), aliases)
    with TestClient(app, "http://localhost", raise_server_exceptions=False) as client:
        yield client


@contextmanager
def running(app: ASGIApp) -> Iterator[Served]:
    """Serves an app while the block runs; the stop is a graceful one."""
    with bind("127.0.0.1", 0) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
        server = uvicorn.Server(make_config(app, grace=PATIENCE))
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            yield Served(bound.getsockname()[1], server, thread)
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive(), "the server does not stop"


@contextmanager
def held(num_runs: int = 0, **settings: Any) -> Iterator[tuple[Served, Any, GatedRuns]]:
    """Serves an engine whose runs wait for the test: the prompt's is the first. The first
    `num_runs` do not wait, nor does any after the block. Gives a client and these runs too."""
    engine = toy_engine()
    runs = GatedRuns(engine)
    if num_runs:
        runs.let_through(num_runs)
    with served(engine, **settings) as server, server.client() as client:
        try:
            yield server, client, runs
        finally:
            runs.let_through()


def post(client: Any, path: str, **body: Any) -> Any:
    """Returns an answer's JSON."""
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def choice_of(client: Any, path: str, **body: Any) -> Any:
    """Returns the only choice of an answer."""
    (choice,) = post(client, path, **body)["choices"]
    return choice


def stream(client: Any, path: str, **body: Any) -> list[Any]:
    """Returns the events of a streamed answer; those of some paths have names."""
    reply = client.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return events(reply.text, has_names=path in (RESPONSES, MESSAGES))


def events(text: str, has_names: bool = False) -> list[Any]:
    """Returns the server-sent events of a body: objects, and the string "[DONE]". If an event has a
    name, that is its type."""
    found: list[Any] = []
    for block in text.strip().split("\n\n"):
        *names, data = block.split("\n")
        data = data.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
        assert names == ([f"event: {found[-1]['type']}"] if has_names else [])
    return found


def chunks_of(result: GenerationResult, pieces: int | list[str]) -> list[Chunk]:
    """Returns an answer as the chunks of its stream, in these pieces or of so many characters; with
    log-probabilities each character is a token."""
    if isinstance(pieces, int):
        starts = range(0, len(result.text), pieces)
        pieces = [result.text[start : start + pieces] for start in starts]
    reader, chunks, begin = result.form.reader(), [], 0
    for piece in pieces:
        end = begin + len(piece)
        scores = None if result.logprobs is None else tuple(result.logprobs[begin:end])
        ends = tuple(result.text_ends[begin:end])
        parts = tuple(reader.push(piece))
        chunks.append(Chunk(text=piece, logprobs=scores, text_ends=ends, parts=parts))
        begin = end
    parts = tuple(reader.push("", is_end=True, is_cut=result.is_cut))
    none = None if result.logprobs is None else ()
    return [*chunks, Chunk(text="", logprobs=none, result=result, parts=parts)]


def metrics(client: Any) -> dict[str, float]:
    """Returns the server's metrics by name, without "specsplit_", and labels."""
    lines = client.get("/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("specsplit_"): float(value) for name, value in pairs}
