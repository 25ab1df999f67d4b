"""Opens tokenizer.json files of strangers, and turns the library's panics into errors."""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spec_runtime.bundle.manifest import BundleError
from spec_runtime.files.mapping import brief

# How much longer a tokenizer's steps may make a text, all of them together: NFKC makes eleven times
# as much of one character.
MAX_GROWTH = 1000
_UNICODE_GROWTH = 11


def open_tokenizer(path: Path) -> Any:
    """Returns the `tokenizers.Tokenizer` of this file.

    Raises BundleError if it is none, or if its steps could make a text very much longer, as one
    that doubles it again and again.
    """
    import tokenizers

    with _refused(f"{path} is not a tokenizer: ", "; build it again"):
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        parts = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder)
        states = [json.loads(part.__getstate__()) for part in parts if part is not None]
    for state in states:
        growth = _growth(state)
        if growth > MAX_GROWTH:
            raise BundleError(
                f"{path}: got a {state['type']} that may make a text {growth:.0e} times as long, "
                f"expected at most {MAX_GROWTH} times; build it again"
            )
    return tokenizer


def showing(tokenizer: Any, names: Collection[str]) -> Any:
    """Returns a `tokenizers.Tokenizer` like this one whose texts show the special tokens of these
    names: they become ordinary added tokens."""
    added = tokenizer.get_added_tokens_decoder().values()
    if not any(token.special and token.content in names for token in added):
        return tokenizer
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in names
    return type(tokenizer).from_str(json.dumps(state))


@contextmanager
def no_panics(file: str) -> Iterator[None]:
    """Turns whatever the tokenizer raises in the block into a UserError that names its file."""
    with _refused(f"the tokenizer {file} fails: ", "; build the bundle again"):
        yield


@contextmanager
def _refused(before: str, after: str) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        # The library raises bare Exception, and a panic of its Rust code is no Exception at all.
        raise BundleError(f"{before}{brief(error)}{after}") from None


def _growth(step: Any) -> float:
    """Returns by how much, at most, a normalizer, pre-tokenizer or decoder makes a text longer."""
    parts = [each for key in _PARTS for each in step.get(key, ())]
    if parts:
        growth = 1.0
        for part in parts:
            growth = min(growth * _growth(part), 1e100)
        return growth
    kind = step.get("type")
    if kind == "Replace":
        pattern, content = step["pattern"], step["content"]
        # A regular expression may match between any two characters.
        size = max(1, len(pattern.get("String", "")))
        return max(1.0, len(content) / size + (0 if pattern.get("String") else 1))
    if kind in ("NFKC", "NFKD", "NFD", "NFC", "Precompiled"):
        return _UNICODE_GROWTH
    if kind == "ByteLevel":
        return 2.0
    if kind in ("Metaspace", "Prepend", "Append"):
        return float(1 + len(step.get("replacement", step.get("prepend", step.get("append", "")))))
    return 1.0


_PARTS = ("normalizers", "pretokenizers", "decoders")
