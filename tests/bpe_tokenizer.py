"""Makes a small byte-level BPE tokenizer, a few of whose tokens are longer than a byte."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer

from spec_runtime.dialogue.chat_template import ChatTemplate
from spec_runtime.grammar.base import Matcher
from spec_runtime.grammar.formats import Grammar
from spec_runtime.grammar.llguidance_matcher import GrammarCompiler
from spec_runtime.grammar.trials import TrialLimits
from spec_runtime.interruption import Interruption

# Pairs that become one token, in this order; the last ones build on those before.
MERGES = ('{ "', '" :', "t r", "u e", "tr ue", "f a", "n a", "m e", "na me", '" ,', "a b", "1 2")
BOS, EOS = 256, 257
FIRST_MERGED = 258
# Added tokens, which follow the merged ones, and whether they are special.
ADDED = {"<call>": False, "<|call|>": True}


def _byte_letters() -> list[str]:
    """Returns the letter that stands for each byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def definition(
    merges: Sequence[str] = MERGES, added: Mapping[str, bool] = MappingProxyType(ADDED)
) -> str:
    """Returns a tokenizer.json: bytes are tokens 0 to 255, then BOS, EOS, the merged and the added
    ones."""
    vocab = {letter: byte for byte, letter in enumerate(_byte_letters())}
    vocab |= {"<bos>": BOS, "<eos>": EOS}
    for merge in merges:
        vocab[merge.replace(" ", "")] = len(vocab)
    names = {"<bos>": (BOS, True), "<eos>": (EOS, True)}
    names |= {name: (len(vocab) + i, each) for i, (name, each) in enumerate(added.items())}
    added_tokens = [
        {"id": number, "content": name, "special": is_special, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for name, (number, is_special) in names.items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": added_tokens,
            "pre_tokenizer": byte_level | {"use_regex": False},
            "decoder": byte_level | {"use_regex": False},
            "model": {
                "type": "BPE",
                "vocab": vocab,
                "merges": [merge.split() for merge in merges],
                "byte_fallback": False,
                "fuse_unk": False,
            },
        }
    )


class BpeTokenizer:
    """A codec over `definition`, as an engine needs it."""

    vocab_size = FIRST_MERGED + len(MERGES) + len(ADDED)
    bos: int | None = BOS
    eos: tuple[int, ...] = (EOS,)

    def __init__(
        self,
        template: ChatTemplate | None = None,
        added: Mapping[str, bool] = MappingProxyType(ADDED),
        limits: TrialLimits | None = None,
    ) -> None:
        self.template, self._limits = template, limits
        self.vocab_size = FIRST_MERGED + len(MERGES) + max(len(ADDED), len(added))
        self._definition = definition(added=added)
        self._tokenizer: Any = Tokenizer.from_str(self._definition)
        self._compiler: GrammarCompiler | None = None

    def encode(self, text: str, special_tokens: bool, is_marked: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [BOS] * special_tokens + ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def spelled(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def marked(self, value: Any, by_assistant: bool = False) -> Any:
        return value

    def open_compiler(self, num_logits: int) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._definition, self.eos, num_logits, self._limits)
        return self._compiler

    def matcher(
        self, grammar: Grammar, num_logits: int, interruption: Interruption | None = None
    ) -> Matcher:
        return self.open_compiler(num_logits).matcher(grammar, interruption)

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()
