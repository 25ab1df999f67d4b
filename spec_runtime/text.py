"""Turns prompts into token ids, and token ids into text as they come.

Tokenizers, chat templates and stop strings are handled here and nowhere else.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from spec_runtime.bundle import Bundle, BundleError

Message = Mapping[str, Any]


class Codec(Protocol):
    """Declares what an engine needs of a tokenizer."""

    bos: int | None
    eos: tuple[int, ...]
    template: ChatTemplate | None

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        """Returns the ids of a text; `special_tokens` adds those that the tokenizer adds by itself,
        like BOS."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text without special tokens; bytes that are no UTF-8 (yet) become U+FFFD."""


class ChatTemplate:
    """Renders a Hugging Face chat template in a sandbox."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> None:
            raise ValueError(f"the chat template refuses these messages: {message}")

        def tojson(value: Any, indent: int | None = None) -> str:
            return json.dumps(value, ensure_ascii=False, indent=indent)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = tojson  # jinja's own escapes for HTML
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda f: datetime.datetime.now().strftime(f)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template is not valid: {error}") from None
        self._names = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: Sequence[Message]) -> str:
        """Returns the messages as one text that ends where the assistant's answer begins."""
        from jinja2 import TemplateError

        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._names,
            )
        except TemplateError as error:
            raise ValueError(f"the chat template cannot render these messages: {error}") from None


class Tokenizer:
    """Reads a bundle's tokenizer.json and its chat template; raises BundleError if they do not fit
    the manifest."""

    def __init__(self, bundle: Bundle) -> None:
        import tokenizers

        info = bundle.manifest.tokenizer
        path = bundle.path / info.file
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise BundleError(f"{path} is not a tokenizer: {error}; build it again") from None
        size, num_logits = self._tokenizer.get_vocab_size(), bundle.manifest.target.dims.vocab_size
        if size != info.vocab_size or size > num_logits:
            raise BundleError(
                f"{path}: got {size} tokens, expected the manifest's {info.vocab_size} and at most "
                f"the target's {num_logits}: this is not the target's tokenizer"
            )
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.bos: int | None = info.special_ids["bos"]
        self.eos: tuple[int, ...] = tuple(info.special_ids["eos"])
        self.template: ChatTemplate | None = None
        if info.chat_template is not None:
            source = (bundle.path / info.chat_template).read_text(encoding="utf-8")
            eos = self.eos[0] if self.eos else None
            self.template = ChatTemplate(source, self._name(self.bos), self._name(eos))

    def _name(self, token: int | None) -> str:
        return "" if token is None else self._tokenizer.id_to_token(token) or ""

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


Prompt = str | Sequence[Message] | Sequence[int]


def encode_prompt(codec: Codec, prompt: Prompt, raw: bool, system: str | None) -> list[int]:
    """Returns the token ids of a prompt.

    A string, even an empty one, becomes a user message if there is a chat template and `raw` is not
    set; otherwise it is encoded as it stands. Messages need a template; ids stay as they are. An
    empty raw prompt is BOS alone. Raises ValueError for what cannot be a prompt.
    """
    if isinstance(prompt, str):
        if codec.template is not None and not raw:
            messages: list[Message] = [{"role": "user", "content": prompt}]
            return _encode_messages(codec, codec.template, messages, system)
        if system is not None:
            raise ValueError("got a system prompt, expected none without a chat template")
        ids = codec.encode(prompt, special_tokens=True)
    elif len(prompt) > 0 and all(isinstance(item, Mapping) for item in prompt):
        if raw or codec.template is None:
            why = "raw is set" if raw else "this bundle has no chat template"
            raise ValueError(f"got messages, expected a string or token ids: {why}")
        return _encode_messages(codec, codec.template, prompt, system)  # type: ignore[arg-type]
    else:
        if system is not None:
            raise ValueError("got a system prompt with token ids, expected it among the ids")
        ids = [_token_id(item) for item in prompt]
    if ids:
        return ids
    if codec.bos is None:
        raise ValueError("got an empty prompt, expected some text: this tokenizer has no BOS")
    return [codec.bos]


def _token_id(item: Any) -> int:
    if isinstance(item, bool) or not hasattr(item, "__index__"):
        raise ValueError(f"got {item!r} in the prompt, expected all token ids or all messages")
    return int(item.__index__())


def _encode_messages(
    codec: Codec, template: ChatTemplate, messages: Sequence[Message], system: str | None
) -> list[int]:
    for message in messages:
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"got message {dict(message)!r}, expected a role and its content")
    if system is not None:
        if messages[0]["role"] == "system":
            raise ValueError("got two system prompts, expected one: in the messages or apart")
        messages = [{"role": "system", "content": system}, *messages]
    # the template writes BOS itself where the model wants one
    return codec.encode(template.render(messages), special_tokens=False)


class TextStream:
    """Makes text of tokens as they come: whole characters only, and never a part of a stop string.

    Text is released as soon as no later token can change it. Example, stop "END": pushing "a",
    "E", "N", "x" releases "a", "", "", "ENx"; pushing "a", "E", "ND" releases "a" and stops.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self.text = ""  # all that is released
        self.stopped = False
        self._decode = decode
        self._stops = stops
        self._ids: list[int] = []  # a window: `_read` ids whose text is out, then new ones
        self._read = 0
        self._held = ""  # may be the beginning of a stop string
        self._taken = 0

    def push(self, token: int) -> bool:
        """Adds a token; returns True once a stop string is complete, before which the text ends."""
        self._ids.append(token)
        piece = self._new_text()
        # U+FFFD at the end: perhaps a character whose other bytes are in the next token
        if piece and not piece.endswith("\ufffd"):
            # keep the last tokens: some decoders treat the first id of a list differently
            del self._ids[: self._read]
            self._read = len(self._ids)
            self._release(piece)
        return self.stopped

    def finish(self) -> None:
        """Releases what was held back, as no more tokens come."""
        piece = self._new_text()
        self._read = len(self._ids)
        self._release(piece)
        self.text += self._held
        self._held = ""

    def take(self) -> str:
        """Returns the text released since the last call."""
        piece = self.text[self._taken :]
        self._taken = len(self.text)
        return piece

    def _new_text(self) -> str:
        if self._read == len(self._ids):
            return ""
        known = self._decode(self._ids[: self._read]) if self._read else ""
        return self._decode(self._ids)[len(known) :]

    def _release(self, piece: str) -> None:
        if self.stopped:
            return
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.text += text[: min(found)]
            self._held, self.stopped = "", True
            return
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self.text += text[: len(text) - num_held]
        self._held = text[len(text) - num_held :]


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` with which `stop` begins: ("abEN", "END") ->
    2."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
