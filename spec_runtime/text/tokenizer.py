"""Turns prompts into token ids, and token ids into text as they come.

Tokenizers, chat templates and stop strings are handled here and nowhere else.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from spec_runtime.bundle.manifest import Bundle, BundleError
from spec_runtime.constraints.base import Matcher
from spec_runtime.constraints.formats import Grammar
from spec_runtime.constraints.llguidance_matcher import GrammarCompiler
from spec_runtime.constraints.tool_prompts import ToolPrompter
from spec_runtime.constraints.tools import checked_tools, family_of
from spec_runtime.errors import ContextLengthError, UserError
from spec_runtime.text import tokenizer_file
from spec_runtime.text.control_tokens import MARK, ControlTokens

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]  # functions in OpenAI's form
# A prompt may be as long as the context, all of it tokens of this length, and a little longer. What
# is longer is refused before it is encoded.
MAX_TOKEN_BYTES = 256
FREE_BYTES = 1 << 16


class Codec(Protocol):
    """Declares what an engine needs of a tokenizer."""

    bos: int | None
    eos: tuple[int, ...]
    template: ChatTemplate | None

    def encode(self, text: str, special_tokens: bool, is_marked: bool = False) -> list[int]:
        """Returns the ids of a text; `special_tokens` adds those that the tokenizer adds by itself,
        like BOS. Names of control tokens become these tokens; if `is_marked`, those that `marked`
        has marked do not."""

    def marked(self, value: Any, by_assistant: bool = False) -> Any:
        """Returns a text, or a message's values, whose control tokens' names are marked, so that
        `encode` takes them for ordinary text; see text/control_tokens.py."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text without special tokens; bytes that are no UTF-8 (yet) become U+FFFD."""

    def matcher(self, grammar: Grammar, num_logits: int) -> Matcher:
        """Returns what follows this grammar over the tokenizer's tokens, with masks of so many
        logits; raises ValueError for a grammar that is not valid."""


class ChatTemplate:
    """Renders a Hugging Face chat template in a sandbox, see text/chat_template.py.

    `name` is what messages call it. Raises ValueError if the template is not valid.
    """

    def __init__(
        self, source: str, bos_token: str = "", eos_token: str = "", name: str = "the chat template"
    ) -> None:
        from spec_runtime.text.chat_template import MeteredTemplate  # here: it imports jinja2

        self._template = MeteredTemplate(source, bos_token, eos_token, name)
        self._prompter = ToolPrompter(source)
        self.tool_family = family_of(source)  # how the model writes calls, see constraints/tools.py

    def render(self, messages: Sequence[Message], tools: Tools | None = None) -> str:
        """Returns the messages as one text that ends where the assistant's answer begins.

        `tools` are functions in OpenAI's form. A template that knows none gets them, and calls and
        their results, as text. Raises ValueError if the template refuses the messages, fails, or
        takes too long, and for tools in another form.
        """
        return self._template.render(*self._prompter.prepared(messages, tools))


class Tokenizer:
    """Reads a bundle's tokenizer.json and its chat template; raises BundleError if they do not fit
    the manifest."""

    def __init__(self, bundle: Bundle) -> None:
        info, dims = bundle.manifest.tokenizer, bundle.manifest.target.dims
        path = bundle.path / info.file
        self._tokenizer = tokenizer_file.open_tokenizer(path)
        size, num_logits = self._tokenizer.get_vocab_size(), dims.vocab_size
        if size != info.vocab_size or size > num_logits:
            raise BundleError(
                f"{path}: got {size} tokens, expected the manifest's {info.vocab_size} and at most "
                f"the target's {num_logits}: this is not the target's tokenizer"
            )
        self._file = info.file
        self._max_length = bundle.manifest.target.max_length
        self._compiler: GrammarCompiler | None = None  # opened for the first grammar
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.bos: int | None = info.special_ids["bos"]
        self.eos: tuple[int, ...] = tuple(info.special_ids["eos"])
        for token in (*self.eos, *([] if self.bos is None else [self.bos])):
            if not 0 <= token < num_logits:
                raise BundleError(
                    f"{path}: got the special token {token}, expected one below the target's "
                    f"{num_logits}; build the bundle again"
                )
        self.template: ChatTemplate | None = None
        source = None
        if info.chat_template is not None:
            source = _read_template(bundle.path / info.chat_template)
            self.template = self._open_template(bundle.path / info.chat_template, source)
        self._controls = ControlTokens(self._tokenizer, info.file, source)

    def _open_template(self, path: Path, source: str) -> ChatTemplate:
        eos = self.eos[0] if self.eos else None
        try:
            return ChatTemplate(
                source, self._name(self.bos), self._name(eos), f"chat template {path}"
            )
        except ValueError as error:
            raise BundleError(f"{error}; build the bundle again") from None

    def _name(self, token: int | None) -> str:
        return "" if token is None else self._tokenizer.id_to_token(token) or ""

    def encode(self, text: str, special_tokens: bool, is_marked: bool = False) -> list[int]:
        """See Codec.encode. Raises ValueError for a text that no tokenizer can take, or that is far
        longer than the context."""
        require_characters(text, "the prompt")
        most = MAX_TOKEN_BYTES * self._max_length + FREE_BYTES
        if len(text) > most:
            raise ContextLengthError(len(text), most, "characters")
        if is_marked and (MARK in text or self._controls.reads_unmarked):
            return self._controls.encode(text, special_tokens)
        with tokenizer_file.no_panics(self._file):
            return list(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    def marked(self, value: Any, by_assistant: bool = False) -> Any:
        """See Codec.marked."""
        return self._controls.marked(value, by_assistant)

    def decode(self, ids: Sequence[int]) -> str:
        with tokenizer_file.no_panics(self._file):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def matcher(self, grammar: Grammar, num_logits: int) -> Matcher:
        """See Codec.matcher."""
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._tokenizer.to_str(), self.eos, num_logits)
        return self._compiler.matcher(grammar)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BundleError(f"{path} is not UTF-8 ({error}); build the bundle again") from None


def require_characters(text: str, what: str) -> None:
    """Raises ValueError if `text` holds half a surrogate pair, which no tokenizer can take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"got half a surrogate pair at character {error.start} of {what}, expected text that "
            "can be written as UTF-8"
        ) from None


Prompt = str | Sequence[Message] | Sequence[int] | np.ndarray


def encode_prompt(
    codec: Codec,
    prompt: Prompt,
    raw: bool,
    system: str | None,
    tools: Tools | None = None,
    continue_final: bool = False,
    control_tokens: bool | None = None,
) -> list[int]:
    """Returns the token ids of a prompt.

    A string, even an empty one, becomes a user message if there is a chat template and `raw` is not
    set; otherwise it is encoded as it stands. Messages need a template; with `continue_final` the
    last one is an answer of the assistant's that has begun. Ids, a list or an array i64[T] with at
    least one, stay as they are. A text without any token is BOS alone.

    `control_tokens` says whether the names of control tokens, such as "<|im_end|>", become these
    tokens where a text or a message holds them. None allows it in raw prompts alone, whose writer
    does the template's work; elsewhere they are ordinary text.

    `tools` need a chat template. Raises ValueError for what cannot be a prompt.
    """
    if continue_final and not (not isinstance(prompt, str) and _is_begun(prompt)):
        raise UserError(
            "got continue_final, expected messages of which the last is the assistant's and a text"
        )
    if tools and (raw or codec.template is None or not _is_chat(prompt)):
        raise UserError(
            "got tools, expected them with messages or a string for a bundle's chat template, "
            "which shows them to the model",
            param="tools",
        )
    is_marked = not (raw if control_tokens is None else control_tokens)
    if isinstance(prompt, str):
        require_characters(prompt, "the prompt")
        if codec.template is not None and not raw:
            messages: list[Message] = [{"role": "user", "content": prompt}]
            ids = _encode_messages(codec, codec.template, messages, system, tools, is_marked)
            return _some(codec, ids)
        if system is not None:
            raise UserError("got a system prompt, expected none without a chat template")
        text = codec.marked(prompt) if is_marked else prompt
        return _some(codec, codec.encode(text, special_tokens=True, is_marked=is_marked))
    items = _items(prompt)
    if len(items) == 0:
        raise UserError("got prompt [], expected at least one message or one token id")
    if all(isinstance(item, Mapping) for item in items):
        if raw or codec.template is None:
            why = "raw is set" if raw else "this bundle has no chat template"
            raise UserError(f"got messages, expected a string or token ids: {why}")
        ids = _encode_messages(
            codec, codec.template, items, system, tools, is_marked, continue_final
        )
        return _some(codec, ids)
    if system is not None:
        raise UserError("got a system prompt with token ids, expected it among the ids")
    return [_token_id(item) for item in items]


def _some(codec: Codec, ids: list[int]) -> list[int]:
    """Returns the ids, BOS alone if there are none."""
    if ids:
        return ids
    if codec.bos is None:
        raise UserError("got an empty prompt, expected some text: this tokenizer has no BOS")
    return [codec.bos]


def _items(prompt: Any) -> Sequence[Any]:
    """Returns the items of a prompt that is no string: all of them messages, or all ids."""
    if isinstance(prompt, np.ndarray):
        if prompt.ndim == 1 and np.issubdtype(prompt.dtype, np.integer):
            return typing.cast(list[int], prompt.tolist())
        got = f"an array of {prompt.dtype} and shape {list(prompt.shape)}"
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray | memoryview):
        return prompt
    else:
        got = f"{type(prompt).__name__} {prompt!r:.40}"
    raise UserError(
        f"got prompt {got}, expected a string, a list of messages, or a list or 1-D array of token "
        "ids"
    )


def _token_id(item: Any) -> int:
    if not isinstance(item, int | np.integer) or isinstance(item, bool):
        raise UserError(f"got {item!r:.80} in the prompt, expected all token ids or all messages")
    return int(item)


def _is_begun(prompt: Any) -> bool:
    """Returns whether the last of these messages is a text of the assistant's."""
    items = _items(prompt)
    last = items[-1] if len(items) > 1 else None
    return (
        isinstance(last, Mapping)
        and last.get("role") == "assistant"
        and isinstance(last.get("content"), str)
    )


def _is_chat(prompt: Any) -> bool:
    """Returns True for a string and for messages, False for token ids."""
    if isinstance(prompt, str):
        return True
    is_list = isinstance(prompt, Sequence) and len(prompt) > 0
    return is_list and isinstance(prompt[0], Mapping)


def _encode_messages(
    codec: Codec,
    template: ChatTemplate,
    messages: Sequence[Message],
    system: str | None,
    tools: Tools | None,
    is_marked: bool,
    continue_final: bool = False,
) -> list[int]:
    """Returns the ids of messages and tools; if `is_marked`, no name of a control token in them
    becomes that token."""
    messages = [_plain_message(message) for message in messages]
    if system is not None:
        if not isinstance(system, str):
            raise UserError(f"got system prompt {system!r:.40}, expected a string")
        require_characters(system, "the system prompt")
        if messages[0]["role"] == "system":
            raise UserError("got two system prompts, expected one: in the messages or apart")
        messages = [{"role": "system", "content": system}, *messages]
    if is_marked:
        messages = [codec.marked(each, each["role"] == "assistant") for each in messages]
        tools = codec.marked(checked_tools(tools)) if tools else None
    begun = ""
    if continue_final:
        *messages, last = messages
        begun = last["content"]
    # the template writes BOS itself where the model wants one
    text = template.render(messages, tools) + begun
    return codec.encode(text, special_tokens=False, is_marked=is_marked)


def _plain_message(message: Message) -> Message:
    """Returns a message whose content is a string: parts of kind text are joined.

    Content may be None beside tool calls, as assistants have them. Raises ValueError for a message
    without role and content, for other kinds of content, and for half surrogate pairs.
    """
    if not isinstance(message.get("role"), str) or "content" not in message:
        raise UserError(f"got message {dict(message)!r:.200}, expected a role and its content")
    role, content = message["role"], message["content"]
    if isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content):
        for part in content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise UserError(
                    f"got content part {dict(part)!r:.80} in a message of {role!r:.40}, expected "
                    "parts of type 'text' with a text"
                )
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise UserError(
            f"got content {content!r:.80} in a message of {role!r:.40}, expected a string or a "
            "list of text parts"
        )
    for text in (role, content or ""):
        require_characters(text, f"a message of {role!r:.40}")
    return {**message, "content": content}


class TextStream:
    """Makes text of tokens as they come: whole characters only, and never a part of a stop string.

    Text is released as soon as no later token can change it. Example, stop "END": pushing "a",
    "E", "N", "x" releases "a", "", "", "ENx"; pushing "a", "E", "ND" releases "a" and stops.
    `stop` is then the stop string.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self.text = ""  # all that is released
        self.stop: str | None = None  # the stop string that ended the text
        self._decode = decode
        self._stops = stops
        self._ids: list[int] = []  # a window: `_read` ids whose text is out, then new ones
        self._read = 0
        self._held = ""  # may be the beginning of a stop string
        self._taken = 0
        self._ends: list[int] = []  # of each token: where its text ends, what is held included
        self._first = 0  # of the tokens whose text has not all been taken

    @property
    def stopped(self) -> bool:
        """Says whether a stop string is complete."""
        return self.stop is not None

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
        self._ends.append(len(self.text) + len(self._held))
        return self.stopped

    def finish(self) -> None:
        """Releases what was held back, as no more tokens come."""
        piece = self._new_text()
        self._read = len(self._ids)
        self._release(piece)
        self.text += self._held
        self._held = ""
        if self._ends:
            self._ends[-1] = len(self.text)

    def take(self) -> str:
        """Returns the text released since the last call."""
        piece = self.text[self._taken :]
        self._taken = len(self.text)
        return piece

    def take_pieces(self) -> list[tuple[int, str]]:
        """Returns the text released since the last call in pieces: the number of a token, from 0
        on, and the text that it completed.

        Example, stop "END": after "a", "E", "N" this returns [(0, "a")], and after another "x"
        [(1, "E"), (2, "N"), (3, "x")].
        """
        pieces = []
        while self._taken < len(self.text):
            end = min(self._ends[self._first], len(self.text))
            if end > self._taken:
                pieces.append((self._first, self.text[self._taken : end]))
                self._taken = end
            if end == self._ends[self._first]:
                self._first += 1
        return pieces

    def _new_text(self) -> str:
        if self._read == len(self._ids):
            return ""
        known = self._decode(self._ids[: self._read]) if self._read else ""
        return self._decode(self._ids)[len(known) :]

    def _release(self, piece: str) -> None:
        if self.stopped:
            return
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stop = min(found, key=lambda place: place[0])
            self.text += text[:at]
            self._held = ""
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
