"""Reads what a GGUF file says of its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from spec_export.imports.gguf import header as gguf_header
from spec_export.imports.gguf import pretokenizers
from spec_export.model import named_templates
from spec_runtime.errors import UserError

# Kinds of tokens, as GGUF counts them. Those that are not listed are bytes and unused tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
SPACE = "\u2581"  # how SentencePiece writes a space
# Tokens that end a turn wherever a vocabulary has them. A file often names only EOS, as Phi-3's,
# which ends a text, while turns end in <|end|>.
TURN_ENDS = {
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "[EOT]",
}
UNSTRIPPED = {
    "<unk>",
    "<s>",
    "<|endoftext|>",
}  # control tokens of Phi-3 that keep blanks after them
MARK = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")  # how control tokens look


@dataclass(frozen=True)
class GGUFVocabulary:
    """Holds what a GGUF file says of its tokenizer.

    tokens, kinds: the text and the kind of each id. pre: how a text is cut before bytes are merged,
    None for SentencePiece, which does not cut. merges: pairs of a byte-level tokenizer, the first
    to be merged first. scores: one for each id of a SentencePiece tokenizer. unk, bos, pad: ids,
    None where there are none. ends: the ids that end an answer, EOS first. add_bos, add_eos: what a
    text gets that is no chat. add_space_prefix: each text between control tokens begins with a
    space. strips: control tokens swallow the blanks after them. template: the chat template.
    """

    tokens: list[str]
    kinds: list[int]
    pre: pretokenizers.PreTokenizer | None
    merges: list[tuple[str, str]]
    scores: list[float]
    unk: int | None
    bos: int | None
    pad: int | None
    ends: tuple[int, ...]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    strips: bool
    template: str | None

    @cached_property
    def added(self) -> dict[str, int]:
        """The tokens that are found in a text before it is cut, with their ids."""
        kinds = (UNKNOWN, CONTROL, USER_DEFINED)
        return {self.tokens[i]: i for i, kind in enumerate(self.kinds) if kind in kinds}

    @cached_property
    def ids(self) -> dict[str, int]:
        """The ids of all tokens."""
        return {token: i for i, token in enumerate(self.tokens)}

    def is_control(self, token: int) -> bool:
        """Returns whether an added token is no part of a text."""
        return self.kinds[token] != USER_DEFINED or token in self.ends

    def is_stripping(self, token: str) -> bool:
        """Returns whether an added token swallows the blanks after it."""
        return self.strips and token not in UNSTRIPPED


def read(path: Path) -> GGUFVocabulary:
    """Returns what a file says of its tokenizer.

    Raises UserError if it says too little or contradicts itself, and for kinds of tokenizers and
    pre-tokenizers that are not supported.
    """
    header = gguf_header.read(path)
    try:
        return _read(header.architecture, _Values(header.values))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _read(architecture: str, values: _Values) -> GGUFVocabulary:
    model = values.one("ggml.model", str)
    if model not in ("gpt2", "llama"):
        raise UserError(
            f"got a tokenizer of kind {model!r:.40} (tokenizer.ggml.model), expected gpt2 or llama:"
            " it is not supported; use the model's Hugging Face folder"
        )
    is_spm = model == "llama"
    tokens = values.texts("ggml.tokens")
    if len(set(tokens)) < len(tokens):
        raise UserError("got a token twice in tokenizer.ggml.tokens, expected each once")
    kinds = values.numbers("ggml.token_type", len(tokens))
    pre = None if is_spm else pretokenizers.find(values.one("ggml.pre", str, ""))

    def token(name: str, default: int | None = None) -> int | None:
        return values.token(f"ggml.{name}_token_id", len(tokens), default)

    merges = [] if is_spm else [_pair(merge) for merge in values.texts("ggml.merges")]
    template = named_templates.joined(
        {
            "default": values.one("chat_template", str, "") or None,
            "tool_use": values.one("chat_template.tool_use", str, "") or None,
        }
    )
    ends = [token("eos", 2 if is_spm else None), token("eot"), token("eom")]
    bos, pad = token("bos", 1 if is_spm else None), token("padding")
    kinds = _with_marks(tokens, kinds, merges, template or "", (*ends, bos, pad))
    ends += [i for i in sorted(map(tokens.index, TURN_ENDS & set(tokens))) if kinds[i] != NORMAL]
    found = GGUFVocabulary(
        tokens=tokens,
        kinds=kinds,
        pre=pre,
        merges=merges,
        scores=values.numbers("ggml.scores", len(tokens)) if is_spm else [],
        unk=token("unknown", 0 if is_spm else None),
        # Some converters write the id of an ordinary word, as a comma's, where a model has none.
        bos=None if bos is None or kinds[bos] == NORMAL else bos,
        pad=None if pad is None or kinds[pad] == NORMAL else pad,
        ends=tuple(dict.fromkeys(end for end in ends if end is not None)),
        add_bos=values.one("ggml.add_bos_token", bool, pre is None or pre.add_bos),
        add_eos=values.one("ggml.add_eos_token", bool, False),
        add_space_prefix=values.one("ggml.add_space_prefix", bool, is_spm),
        strips=is_spm and architecture == "phi3",
        template=template,
    )
    if not found.ends:
        raise UserError("got no tokenizer.ggml.eos_token_id, expected one: no answer would end")
    if found.add_bos and found.bos is None:
        raise UserError("got no control token as tokenizer.ggml.bos_token_id, expected one")
    if found.add_space_prefix and not is_spm:
        raise UserError(
            "got tokenizer.ggml.add_space_prefix of a byte-level tokenizer, expected false"
        )
    return found


def _with_marks(
    tokens: list[str],
    kinds: list[int],
    merges: list[tuple[str, str]],
    template: str,
    special: Collection[int | None],
) -> list[int]:
    """Returns the kinds of all tokens, with the marks of chats among the control tokens.

    Some converters call marks ordinary tokens, as which no text is ever encoded: no two tokens make
    one. They are the special tokens, those that end a turn, and those that the template writes.
    """
    known = set(tokens)
    made = {left + right for left, right in merges}

    def is_made(token: str) -> bool:
        """Returns whether a tokenizer writes this token for ordinary text."""
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        return token in made if merges else any(known.issuperset(parts) for parts in cuts)

    return [
        CONTROL
        if kind == NORMAL
        and MARK.fullmatch(token)
        and (i in special or token in TURN_ENDS or token in template)
        and not is_made(token)
        else kind
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    ]


def _pair(merge: str) -> tuple[str, str]:
    """Returns both parts of a merge, between which the file has a space."""
    cut = merge.find(" ", 1)
    if cut < 0:
        raise UserError(f"got {merge!r:.80} in tokenizer.ggml.merges, expected two tokens")
    return merge[:cut], merge[cut + 1 :]


class _Values:
    """Lends the metadata by what follows "tokenizer." in their keys; raises UserError for a value
    that is of another kind than was asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def one(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._values.get(f"tokenizer.{key}", default)
        if type(value) is not kind:
            raise _refusal(key, value, kind.__name__)
        return value

    def texts(self, key: str) -> list[str]:
        values: list[str] = self.one(key, list)
        if not values or not all(type(value) is str for value in values):
            raise _refusal(key, values, "strings")
        return values

    def numbers(self, key: str, count: int) -> list[Any]:
        values: list[Any] = self.one(key, list)
        if len(values) != count or not all(type(value) in (int, float) for value in values):
            raise _refusal(key, values, f"{count} numbers, one for each token")
        return values

    def token(self, key: str, count: int, default: int | None) -> int | None:
        value: int | None = self._values.get(f"tokenizer.{key}", default)
        if value is not None and not (type(value) is int and 0 <= value < count):
            raise _refusal(key, value, f"an id below {count}")
        return value


def _refusal(key: str, value: Any, expected: str) -> UserError:
    got = f"{len(value)} values" if isinstance(value, list) else f"{value!r:.80}"
    return UserError(f"got {got} for tokenizer.{key}, expected {expected}; convert the model again")
