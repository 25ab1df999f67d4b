"""Opens a bundle's tokenizer and chat template, and encodes and decodes with them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from spec_runtime.bundle.manifest import Bundle, BundleError, TokenizerInfo
from spec_runtime.dialogue.messages import require_characters
from spec_runtime.errors import ContextLengthError, UserError
from spec_runtime.grammar.base import Matcher
from spec_runtime.grammar.formats import Grammar
from spec_runtime.grammar.llguidance_matcher import GrammarCompiler
from spec_runtime.interruption import Interruption
from spec_runtime.text import tokenizer_file
from spec_runtime.text.control_tokens import MARK, ControlTokens

if TYPE_CHECKING:
    from spec_runtime.dialogue.chat_template import ChatTemplate

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

    def spelled(self, ids: Sequence[int]) -> str:
        """Returns the text as `decode` does, but with the special tokens, by their names."""

    def open_compiler(self, num_logits: int) -> GrammarCompiler:
        """Returns what compiles grammars, for masks of `num_logits`. It is opened once, which takes
        half a second; raises UserError if that fails."""

    def matcher(
        self, grammar: Grammar, num_logits: int, interruption: Interruption | None = None
    ) -> Matcher:
        """Returns what follows this grammar over the tokenizer's tokens, with masks of
        `num_logits`; raises UserError for a grammar that is not valid. It and the matcher raise
        Interrupted once the interruption has a reason. Threads may call it at once."""

    def close(self) -> None:
        """Gives back what it can open again: the process that tries grammars."""


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
        self._compiler_lock = threading.Lock()
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
            path = bundle.path / info.chat_template
            source = _read_template(path)
            names = self._special_tokens(info)
            self.template = _open_template(path, source, names, info.response_template)
            # Calls and thinking are found by their marks, which an answer's text therefore shows.
            # Only marks that the template writes are control tokens once they are not special.
            marks = [mark for mark in self.template.answers.marks if mark in source]
            self._tokenizer = tokenizer_file.showing(self._tokenizer, marks)
        self._controls = ControlTokens(self._tokenizer, info.file, source)

    def _special_tokens(self, info: TokenizerInfo) -> dict[str, str]:
        """Returns the texts that a template knows by name; of a bundle without them, those of BOS
        and of the smallest EOS id."""
        if info.special_tokens is not None:
            return info.special_tokens
        ids = {"bos_token": self.bos, "eos_token": self.eos[0] if self.eos else None}
        return {
            name: "" if token is None else self._tokenizer.id_to_token(token) or ""
            for name, token in ids.items()
        }

    def encode(self, text: str, special_tokens: bool, is_marked: bool = False) -> list[int]:
        """See Codec.encode. Raises UserError for a text that no tokenizer can take, or that is far
        longer than the context."""
        require_characters(text, "the prompt")
        most = MAX_TOKEN_BYTES * self._max_length + FREE_BYTES
        if len(text) > most:
            raise ContextLengthError(len(text), most, "characters")
        if is_marked and (MARK in text or self._controls.reads_unmarked):
            return self._controls.encode(text, special_tokens)
        with tokenizer_file.no_panics(self._file):
            # Of the library's calls only those for several texts let other threads go on meanwhile.
            found = self._tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
            return list(found[0].ids)

    def marked(self, value: Any, by_assistant: bool = False) -> Any:
        return self._controls.marked(value, by_assistant)

    def decode(self, ids: Sequence[int]) -> str:
        return self._decoded(ids, skip_special_tokens=True)

    def spelled(self, ids: Sequence[int]) -> str:
        return self._decoded(ids, skip_special_tokens=False)

    def _decoded(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        with tokenizer_file.no_panics(self._file):
            several = [list(ids)]
            return str(self._tokenizer.decode_batch(several, skip_special_tokens)[0])

    def matcher(
        self, grammar: Grammar, num_logits: int, interruption: Interruption | None = None
    ) -> Matcher:
        return self.open_compiler(num_logits).matcher(grammar, interruption)

    def open_compiler(self, num_logits: int) -> GrammarCompiler:
        with self._compiler_lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self._tokenizer.to_str(), self.eos, num_logits)
        return self._compiler

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()


def _open_template(
    path: Path,
    source: str,
    special_tokens: dict[str, str],
    response_template: dict[str, Any] | None,
) -> ChatTemplate:
    from spec_runtime.dialogue.chat_template import ChatTemplate  # here: it imports jinja2

    try:
        # Clients of a server hear what it refuses, so that no line of its own names the path.
        return ChatTemplate(source, special_tokens, response_template=response_template)
    except UserError as error:
        raise BundleError(f"{path}: {error}; build the bundle again") from None


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BundleError(f"{path} is not UTF-8 ({error}); build the bundle again") from None
