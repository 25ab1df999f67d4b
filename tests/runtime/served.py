"""Serves toy engines to tests: inside the process, or on a real port by a thread."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from toy_backend import CHATML, ByteTokenizer
from toy_engine import make_engine

from spec_runtime import Engine
from spec_runtime.proposers.base import Proposer
from spec_runtime.proposers.wrapper import ProposerWrapper
from spec_runtime.serving.app import make_app
from spec_runtime.serving.processes import bind, make_config
from spec_runtime.serving.settings import Settings
from spec_runtime.text.tokenizer import ChatTemplate
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.tree import TokenTree

PATIENCE = 20.0  # seconds after which a test that waits has failed
SMALL_BUFFER = 4096  # bytes of a socket's


def toy_engine(drafter: str = "parallelspec", max_length: int = 400) -> Engine:
    """Returns an engine with a chat template, whose drafter is often right."""
    template = ChatTemplate(CHATML, "", "", "the toy template")
    return make_engine(
        drafter, max_length=max_length, peak=9.0, noise=4.0, tokenizer=ByteTokenizer(template)
    )


class Holder(ProposerWrapper):
    """Lets a step begin only when the test allows it; counts the steps that began."""

    def __init__(self, proposer: Proposer) -> None:
        super().__init__(proposer)
        self.allowed = threading.Semaphore(0)
        self.num_begun = 0

    def propose(self, token: int, budget: Budget) -> TokenTree:
        self.num_begun += 1
        assert self.allowed.acquire(timeout=PATIENCE), "no test allowed this step"
        return super().propose(token, budget)

    def free(self) -> None:
        """Allows all steps from now on."""
        self.allowed.release(10_000)


def held_engine() -> tuple[Engine, Holder]:
    """Returns an engine whose steps wait for the holder."""
    holders: list[Holder] = []

    def hold(proposer: Proposer) -> Proposer:
        holders.append(Holder(proposer))
        return holders[0]

    return toy_engine().observed(hold), holders[0]


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
def served(engine: Engine, **settings: Any) -> Iterator[Served]:
    """Serves the engine while the block runs; the stop is a graceful one."""
    with bind("127.0.0.1", 0) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
        app = make_app(engine, Settings("toy", **settings))
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


def wait_until(is_true: Any) -> None:
    """Waits until the function returns something true."""
    until = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.002)


def metrics(client: Any) -> dict[str, float]:
    """Returns the server's metrics by name and labels."""
    lines = client.get("/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def events(text: str) -> list[Any]:
    """Returns the server-sent events of a body: objects, and the string "[DONE]"."""
    found = []
    for block in text.strip().split("\n\n"):
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found
