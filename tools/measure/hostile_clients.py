"""Plays hostile clients of a server on this machine: one small function for each kind.

Each sends one round of requests and returns how they ended: by their status, "left" where the
client went away, "closed" where the server did. Rounds carry a number, so that no request is one
that the server has answered before. Every connection is to loopback, every round is of a bounded
number of requests and bytes, and `attack` bounds its time.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import urlsplit

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"
BODY_BYTES = 1 << 20  # the most that a server takes unless it is told otherwise
QUESTIONS = (
    "Why is the sky blue?",
    "Write two sentences about the sea.",
    "List three uses of a wooden spoon.",
    "Explain what a prime number is.",
    "What should I pack for a day in the mountains?",
    "Summarise the plot of a fairy tale that you know.",
)
LEFT, CLOSED = "left", "closed"


class Site(NamedTuple):
    """Holds the address of a server on loopback, and the tokens that its context has room for."""

    port: int
    room: int

    async def send(
        self, data: bytes, more: bytes = b"", leave_after: float = 60.0, pause: float = 0.0
    ) -> bytes:
        """Sends bytes on a connection of their own, then `more` until the server has had enough;
        returns the answer, or what came of it within `leave_after` seconds. With a `pause` it waits
        that long after each few bytes of the answer."""
        answer = bytearray()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 16)
            with closing(writer):
                async with asyncio.timeout(leave_after):
                    writer.write(data)
                    while more and not reader.at_eof():
                        writer.write(more)
                        await writer.drain()
                    while part := await reader.read(64 if pause else 1 << 16):
                        answer += part
                        await asyncio.sleep(pause)
        except (OSError, TimeoutError):
            pass
        return bytes(answer)

    async def ask(
        self, path: str, body: Any, leave_after: float = 60.0, pause: float = 0.0
    ) -> tuple[str, bytes]:
        """Posts a body, an object or bytes; returns how that ended and the body of the answer."""
        data = body if isinstance(body, bytes) else compact(body)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        begun = time.monotonic()
        answer = await self.send(head.encode() + data, b"", leave_after, pause)
        left = time.monotonic() - begun >= leave_after
        return (LEFT if left else ending(answer)), answer.partition(b"\r\n\r\n")[2]

    async def ask_all(self, path: str, *bodies: Any, **how: float) -> list[str]:
        """Posts bodies at once, see `ask`; returns how each ended."""
        asked = (self.ask(path, body, **how) for body in bodies)
        return [end for end, _ in await asyncio.gather(*asked)]


Round = Callable[[Site, int], Awaitable[Sequence[str]]]


def ending(answer: bytes) -> str:
    """Returns the status of an answer: "200"; CLOSED if none came."""
    parts = answer[:20].split(b" ")
    return parts[1].decode("latin-1") if len(parts) > 1 else CLOSED


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def chat(content: str = "hello", **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": content}
    return {"messages": [message], "max_tokens": 4, "temperature": 0} | more


def json_schema(schema: Any) -> dict[str, Any]:
    """Returns the `response_format` of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def tool(parameters: Any, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def words(count: int, number: int) -> str:
    """Returns words that differ from those of another number."""
    return " ".join(f"w{(number * 7919 + i * 31) % 9973}" for i in range(count))


# ---- prompts and answers ----


async def nobody(site: Site, number: int) -> Sequence[str]:
    """Does nothing for a while, so that there is something to compare with."""
    await asyncio.sleep(0.5)
    return ()


async def burst(site: Site, number: int) -> Sequence[str]:
    """Asks six things at once: on an empty cache folder these are the first ones."""
    bodies = [chat(f"Say {number} and {k}.", max_tokens=12) for k in range(6)]
    return await site.ask_all(CHAT, *bodies)


async def long_prompts(site: Site, number: int) -> Sequence[str]:
    """Lets the server read long prompts that begin as those of the ordinary clients do."""
    _, found = await site.ask("/tokenize", {"prompt": words(100, number)})
    each = max(1.0, json.loads(found)["count"] / 100)
    text = words(int(0.8 * site.room / each), number)
    bodies = [chat(f"{question} (Request {number}) {text}") for question in QUESTIONS[:2]]
    return await site.ask_all(CHAT, *bodies)


async def disconnects(site: Site, number: int) -> Sequence[str]:
    """Leaves eight long streams soon after they have begun."""
    bodies = [chat(f"Count {number} {k}", stream=True, max_tokens=site.room) for k in range(8)]
    return await site.ask_all(CHAT, *bodies, leave_after=0.3)


async def slow_readers(site: Site, number: int) -> Sequence[str]:
    """Reads eight streams a few bytes at a time."""
    bodies = [chat(f"Count {number} {k}", stream=True, max_tokens=40) for k in range(8)]
    return await site.ask_all(CHAT, *bodies, pause=0.02)


async def bad_bodies(site: Site, number: int) -> Sequence[str]:
    """Sends JSON that is none, bytes that are no UTF-8, and a body far too large."""
    body = compact(chat(f"Request {number}"))
    large = chat("x" * 2 * BODY_BYTES)
    return await site.ask_all(CHAT, body[:-2], body.replace(b"Request", b"\xff\xfe\xc3"), large)


async def choices(site: Site, number: int) -> Sequence[str]:
    """Asks for as many choices as there may be, and for far more."""
    bodies = [chat(f"Try {number}", n=n, max_tokens=32) for n in (8, 8, 9, 10**9, 10**300)]
    return await site.ask_all(CHAT, *bodies)


async def logprobs(site: Site, number: int) -> Sequence[str]:
    """Asks for the log-probabilities of long answers and prompts, and for far too many."""
    asked = {"max_tokens": 200, "logprobs": True, "stream": True}
    bodies = [chat(f"Tell {number} {k}", top_logprobs=k, **asked) for k in (20, 20, 10**9)]
    prompt = words(site.room // 10, number)
    scored = {"prompt": prompt, "echo": True, "max_tokens": 0}
    ends = await site.ask_all(CHAT, *bodies)
    return [*ends, *await site.ask_all(COMPLETIONS, scored | {"logprobs": 5})]


async def biases(site: Site, number: int) -> Sequence[str]:
    """Sends a body full of biases, and one full of texts that end an answer."""
    bias = {str(token): 1 for token in range(60_000)}
    stops = [f"{k}{'a' * 50_000}" for k in range(16)]
    return await site.ask_all(CHAT, chat(logit_bias=bias), chat(stop=stops))


# ---- schemas and calls ----


def nested_names(number: int) -> dict[str, Any]:
    """Nests names that are listed: of 1,186 bytes a copy for each name at each level is made."""
    schema: Any = {"type": "integer", "maximum": number}
    for _ in range(12):
        schema = {"propertyNames": {"enum": list("abcdefgh")}, "additionalProperties": schema}
    return json_schema(schema)


def shared_parts(number: int) -> dict[str, Any]:
    """Lets each definition refer to the next one twice: walks without a memo double each time."""
    levels = {f"d{k}": _object({n: _ref(f"d{k + 1}") for n in ("a", "b")}) for k in range(30)}
    levels["d30"] = {"patternProperties": {"^x": True}, "maxProperties": number + 9}
    joined = {"allOf": [_ref("d0")], "patternProperties": {"^y": _ref("d0")}}
    return json_schema({"$defs": levels, **joined})


def bomb(number: int) -> dict[str, Any]:
    """Takes minutes to compile."""
    patterns = [{"pattern": f"(.*a.{{{count}}})"} for count in range(10, 26)]
    return json_schema({"title": str(number), "type": "string", "allOf": patterns})


def lexeme(number: int) -> dict[str, Any]:
    """Fits texts of which any part may be the beginning of the end."""
    return {"type": "regex", "regex": f".*a.{{{8 + 6 * (number % 4)}}}"}


def optional_properties(number: int) -> dict[str, Any]:
    """Has 2,000 properties that may all be left out."""
    properties = {f"p{number}_{k}": {"type": "string"} for k in range(2000)}
    return json_schema({"type": "object", "properties": properties, "additionalProperties": False})


# Formats of answers that are slow to read, to compile or to follow, by a number each.
FORMATS = {
    each.__name__: each for each in (nested_names, shared_parts, bomb, lexeme, optional_properties)
}


def _asking(name: str, count: int = 1, leave_after: float = 60.0) -> Round:
    """Returns the kind that asks `count` times at once for answers in a format, a new one each."""

    async def ask(site: Site, number: int) -> Sequence[str]:
        formats = [FORMATS[name](count * number + k) for k in range(count)]
        bodies = [chat(response_format=each, max_tokens=40) for each in formats]
        return await site.ask_all(CHAT, *bodies, leave_after=leave_after)

    return ask


async def self_referring_tool(site: Site, number: int) -> Sequence[str]:
    """Makes the model call a tool, a type of whose parameters refers to itself 90 times."""
    loop = {"anyOf": [*[_ref("a")] * 90, {"type": "integer"}]}
    parameters = _object({"x": _ref("a")}) | {"$defs": {"a": loop}}
    call = f"<function=f>\n<parameter=x>\n{number}\n</parameter>\n</function>"
    asked = await _dictated(site, call) | {"tools": [tool(parameters)], "max_tokens": 200}
    return await site.ask_all(CHAT, chat(**asked), chat(stream=True, **asked))


async def many_tools(site: Site, number: int) -> Sequence[str]:
    """Sends as many tools as there may be, strict and each with 60 parameters."""
    parameters = _object({f"p{k}": {"type": ["string", "null"]} for k in range(60)})
    tools = [tool(parameters, f"f{number}_{k}") for k in range(128)]
    for each in tools:
        each["function"]["strict"] = True
    return await site.ask_all(CHAT, chat(tools=tools, tool_choice="required"), chat(tools=tools))


async def streamed_calls(site: Site, number: int) -> Sequence[str]:
    """Streams calls in six forms, whose arguments fill the context."""
    begins = (
        r'<tool_call>\n\{"name": "f", "arguments": \{"x": "',
        r"<function=f>\n<parameter=x>\n",
        r'<\|tool_call_start\|>\[f\(x="',
        r'<\|tool_call>call:f\{x:<\|"\|>',
        r"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>",
        r'```json\n\{"arguments": \{"x": "',
    )
    asked = {"stream": True, "max_tokens": 32_000, "tools": [tool(_object({"x": {}}))]}
    bodies = [
        chat(f"Call {number}", **asked, **await _dictated(site, begin + r"(ab|\[|\\\\n){5000}"))
        for begin in begins
    ]
    return await site.ask_all(CHAT, *bodies)


async def _dictated(site: Site, regex: str) -> dict[str, Any]:
    """Returns the options of an answer that is "Well " and fits a regular expression, and is no
    call in the form that the server forces others to."""
    _, found = await site.ask("/tokenize", {"prompt": "Well ", "add_special_tokens": False})
    bias = {str(token): 100 for token in json.loads(found)["tokens"]}
    form = {"type": "regex", "regex": f"Well {regex}"}
    return {"response_format": form, "logit_bias": bias}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


# ---- bodies that cost more than they weigh ----


async def token_texts(site: Site, number: int) -> Sequence[str]:
    """Asks for the text of each token of 580 kB."""
    text = words(100_000, number)[:580_000]
    return await site.ask_all("/tokenize", {"prompt": text, "return_token_strs": True})


async def many_ids(site: Site, number: int) -> Sequence[str]:
    """Sends 400,000 token ids, as a prompt and to be spelled."""
    ids = [1 + (number + k) % 9 for k in range(400_000)]
    ends = await site.ask_all("/detokenize", {"tokens": ids})
    return [*ends, *await site.ask_all(COMPLETIONS, {"prompt": ids})]


async def many_messages(site: Site, number: int) -> Sequence[str]:
    """Sends 25,000 messages, as a chat, to be counted, and as a conversation."""
    messages = [{"role": "user", "content": f"{number}"} for _ in range(25_000)]
    counted = {"messages": messages, "model": "m", "max_tokens": 4}
    ends = await site.ask_all(CHAT, {"messages": messages, "max_tokens": 4})
    ends += await site.ask_all("/v1/messages/count_tokens", {"messages": messages, "model": "m"})
    ends += await site.ask_all("/v1/messages", counted)
    return ends + await site.ask_all(RESPONSES, {"input": messages})


async def deep_json(site: Site, number: int) -> Sequence[str]:
    """Sends brackets in brackets, as a body, in a field and as a schema."""
    deep = b"[" * 400_000 + b"]" * 400_000
    schema = b'{"not":' * 50_000 + b"{}" + b"}" * 50_000
    return await site.ask_all(
        CHAT,
        deep,
        compact(chat(metadata={"m": 0})).replace(b'"m":0', b'"m":' + deep),
        compact(chat(response_format=json_schema(0))).replace(b'"schema":0', b'"schema":' + schema),
    )


async def item_references(site: Site, number: int) -> Sequence[str]:
    """Refers 20,000 times to an item, by an id of its own choice and by the server's."""
    item = {"type": "message", "id": "a", "role": "user", "content": "a"}
    end, found = await site.ask(RESPONSES, {"input": [item], "max_output_tokens": 1})
    names = ["a"] if end != "200" else ["a", json.loads(found)["output"][0]["id"]]
    ends = [end]
    for name in names:
        reference = {"type": "item_reference", "id": name}
        count = min(20_000, BODY_BYTES // (len(compact(reference)) + 1) - 10)
        ends += await site.ask_all(RESPONSES, {"input": [reference] * count})
    return ends


async def kept_responses(site: Site, number: int) -> Sequence[str]:
    """Has 36 MB kept: conversations of the smallest objects that JSON can say."""
    ends = []
    for k in range(36):
        empty = {"type": "reasoning", "content": [{}] * 340_000}
        said = {"role": "user", "content": f"{number} {k}"}
        ends += await site.ask_all(RESPONSES, {"input": [empty, said], "max_output_tokens": 1})
    return ends


# ---- connections ----


async def slow_bodies(site: Site, number: int) -> Sequence[str]:
    """Sends forty bodies a byte at a time, and leaves before their ends."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n".encode()

    async def drip() -> str:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", site.port)
            with closing(writer):
                writer.write(head)
                for _ in range(100):
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.sleep(0.01)
        except OSError:
            return CLOSED
        return LEFT

    return await asyncio.gather(*(drip() for _ in range(40)))


async def idle_connections(site: Site, number: int) -> Sequence[str]:
    """Holds more connections than the server keeps, and says nothing, or half a request."""
    texts = [b"", b"GET / HTTP/1.1\r\n"] * 260
    answers = await asyncio.gather(*(site.send(text, leave_after=1.0) for text in texts))
    return [LEFT if not answer else ending(answer) for answer in answers]


async def endless_header(site: Site, number: int) -> Sequence[str]:
    """Sends a header for as long as the server reads it."""
    answer = await site.send(b"GET / HTTP/1.1\r\nA: ", b"x" * 65536, leave_after=5.0)
    return [ending(answer)]


async def pipelined(site: Site, number: int) -> Sequence[str]:
    """Sends 200 requests on one connection before it reads an answer."""
    one = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    return [ending(await site.send(one * 200, leave_after=1.0))]


async def absolute_form(site: Site, number: int) -> Sequence[str]:
    """Asks as one asks a proxy, for a name that is not the server's."""
    lines = ("Host: localhost\r\nConnection: close", "Host: evil.com\r\nConnection: close")
    targets = ("http://evil.com/health", "http://evil.com/v1/models", "//evil.com/health")
    texts = [f"GET {t} HTTP/1.1\r\n{line}\r\n\r\n" for t in targets for line in lines]
    return [ending(await site.send(text.encode())) for text in texts]


KINDS: dict[str, Round] = {
    each.__name__: each for each in (nobody, burst, long_prompts, disconnects, choices, logprobs)
}
KINDS |= {name: _asking(name) for name in FORMATS}
KINDS["lexeme"] = _asking("lexeme", count=4)
KINDS["slow_schemas"] = _asking("bomb", count=12, leave_after=0.05)  # of clients that are gone
KINDS |= {
    each.__name__: each
    for each in (
        *(self_referring_tool, many_tools, streamed_calls, biases),
        *(token_texts, many_ids, many_messages, deep_json, item_references, kept_responses),
        *(slow_readers, bad_bodies),
        *(slow_bodies, idle_connections, endless_header, pipelined, absolute_form),
    )
}
REFUSED = ("absolute_form", "bad_bodies")  # kinds of which no request may be answered


def faults(kind: str, ends: Mapping[str, int]) -> list[str]:
    """Returns in what ways requests of this kind have ended that none may."""
    wrong = {end for end in ends if end.startswith("5") and end not in ("503", "504")}
    if kind in REFUSED:
        wrong |= ends.keys() & {"200"}
    return sorted(wrong)


def port_of(url: str) -> int:
    """Returns the port of a server on loopback. Raises ValueError for any other."""
    found = urlsplit(url)
    if found.hostname not in ("127.0.0.1", "localhost") or found.port is None:
        raise ValueError(f"got {url}, expected an address on loopback with a port")
    return found.port


async def attack(kind: str, site: Site, rounds: int, seconds: float) -> Counter[str]:
    """Sends rounds of a kind, until they are sent or the time is over; counts how requests ended.

    What still runs then counts as "left". A dead server answers nothing that a round needs.
    """
    ends = Counter[str]()
    until = time.monotonic() + seconds
    for number in range(rounds):
        if (left := until - time.monotonic()) <= 0:
            break
        try:
            async with asyncio.timeout(left):
                ends.update(await KINDS[kind](site, number))
        except TimeoutError:
            ends[LEFT] += 1
        except (ValueError, LookupError):  # of an answer that the round needed
            ends["unreadable"] += 1
    return ends
