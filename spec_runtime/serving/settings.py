"""Says what a server allows: its limits, its key, and the name of what it serves."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from spec_runtime.errors import UserError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Settings:
    """Holds what `make_app` needs to know in addition to the engine.

    `name` is the model's id. `max_waiting` requests wait while the engine answers
    another one; `max_streams` streams are open at a time. `max_body` bytes and `max_prompt` tokens
    are the most of one request (None: the bundle's context), and `max_choices` the answers that it
    may ask for. `timeout` are the seconds that one request may take, its wait included. `api_key`,
    if there is one, is what a client has to send. `hosts` are the names by which requests may
    address the server, see `plain_host`; None allows all.

    Raises UserError for a value outside of its range.
    """

    name: str
    max_waiting: int = 32
    max_streams: int = 64
    max_body: int = 1 << 20
    max_prompt: int | None = None
    max_choices: int = 8
    timeout: float = 300.0
    api_key: str | None = None
    hosts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_waiting", 0), ("max_streams", 1), ("max_body", 1)):
            if getattr(self, name) < least:
                raise UserError(f"got {name} {getattr(self, name)}, expected {least} or more")
        if self.max_prompt is not None and self.max_prompt < 1:
            raise UserError(f"got max_prompt {self.max_prompt}, expected 1 or more, or None")
        if self.hosts is not None:
            object.__setattr__(self, "hosts", tuple(plain_host(host) for host in self.hosts))
        if not 0 < self.timeout < math.inf:
            raise UserError(f"got timeout {self.timeout}, expected seconds above 0")
        if self.api_key is not None and not self.api_key:
            raise UserError("got an empty API key, expected some characters, or None for none")


def plain_host(name: str) -> str:
    """Returns the name of a host as it is compared: "LocalHost." -> "localhost"."""
    return name.removesuffix(".").lower()


def key_from(variable: str) -> str:
    """Returns the API key in an environment variable. Raises UserError if there is none."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(
            f"got --api-key-env {variable}, expected an environment variable with a key; set it"
        )
    return key
