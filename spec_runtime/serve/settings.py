"""Says what a server allows: its limits, its key, and the name of what it serves."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Gt

from spec_runtime.errors import UserError
from spec_runtime.files.mapping import Checked
from spec_runtime.options import Option

HOST = r"(\[(?P<ipv6>[0-9a-fA-F:.]+)\]|(?P<name>[\w.-]+))(:\d*)?"
ORIGIN = r"\*|null|[a-z][a-z0-9+.-]*://[^*/\s@?#A-Z]+"  # as browsers write it
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, kw_only=True)
class ServerLimits(Checked):
    """Declares how much clients may ask of a server, from which flags are made.

    Raises UserError for a value outside of its range.
    """

    parallel: Annotated[
        int | None,
        Ge(1),
        Option(
            "Answers decoded together, each with caches of its own",
            unset="8 where they share passes and there is memory; else 1",
        ),
    ] = None
    max_gap: Annotated[
        float, Gt(0), Option("Seconds that streams may pause while prompts of others are read")
    ] = 0.25
    max_waiting: Annotated[int, Ge(0), Option("Requests that wait; more get 429")] = 32
    max_streams: Annotated[int, Ge(1), Option("Streams open at a time; more get 429")] = 64
    max_body: Annotated[int, Ge(1), Option("Bytes of a request; larger ones get 413")] = 1 << 20
    max_prompt: Annotated[
        int | None, Ge(1), Option("Tokens of a prompt", unset="the bundle's context")
    ] = None
    timeout: Annotated[float, Gt(0), Option("Seconds of a request, its wait included")] = 300.0
    grace: Annotated[float, Ge(0), Option("Seconds to finish running answers at a stop")] = 60.0


@dataclass(frozen=True)
class Settings(ServerLimits):
    """Holds what the app needs to know in addition to its models.

    `name` is the model's id. A request asks for at most `max_choices` answers. Clients have to send
    `api_key`, if there is one. `hosts` are the names by which requests may address the server, of
    which a port is left out; None allows all. Scripts of the sites `cors_origins` may read answers,
    "*" of all. `template_kwargs` are variables of chat templates that hold where a request does not
    set them. Raises UserError for an empty key, for a host that is neither a name nor an address,
    and for an origin that is none.
    """

    name: str
    max_choices: int = 8
    api_key: str | None = None
    hosts: tuple[str, ...] | None = None
    cors_origins: tuple[str, ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hosts is not None:
            object.__setattr__(self, "hosts", tuple(_checked_host(host) for host in self.hosts))
        for origin in self.cors_origins:
            if re.fullmatch(ORIGIN, origin) is None:
                raise UserError(
                    f"got origin {origin!r}, expected a scheme and a host without a path, such as "
                    "https://chat.example:8443, or *"
                )
        if self.api_key is not None and not self.api_key:
            raise UserError("got an empty API key, expected some characters, or None for none")


def plain_host(header: str) -> str | None:
    """Returns the name or the address in a header Host as it is compared, without its port, or None
    if the header has neither: "LocalHost.:80" -> "localhost", "[::1]:80" -> "::1"."""
    found = re.fullmatch(HOST, header, re.ASCII)
    return None if found is None else (found["ipv6"] or found["name"]).removesuffix(".").lower()


def _checked_host(host: str) -> str:
    """Returns a host as `plain_host` does, also for an IPv6 address without its brackets."""
    found = plain_host(host) or plain_host(f"[{host}]")
    if found is None:
        raise UserError(f"got host {host!r}, expected a name or an address, with or without a port")
    return found


def key_from(variable: str) -> str:
    """Returns the API key in an environment variable. Raises UserError if there is none."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(
            f"got --api-key-env {variable}, expected an environment variable with a key; set it"
        )
    return key
