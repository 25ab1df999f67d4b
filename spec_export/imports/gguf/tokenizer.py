"""Builds the tokenizer that a GGUF file describes, from the file's own metadata.

transformers takes the name of a pre-tokenizer that it does not know for GPT-2's without a word, and
its classes for SentencePiece differ from what such models were trained with. Here every token keeps
its id, every control token its text, and what is not known is refused.
"""

import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from spec_export.imports.gguf.vocabulary import NORMAL, SPACE, GGUFVocabulary
from spec_runtime.errors import UserError

PROBES = 300  # tokens whose texts are encoded and decoded again
# With a wrong pre-tokenizer 4 to 13 of SmolLM2's first thousand merges are out of reach, none with
# the right one.
FIRST_MERGES, MAX_LOST = 1000, 2


def build(vocabulary: GGUFVocabulary) -> Tokenizer:
    """Returns the `tokenizers.Tokenizer`, each of whose tokens has the file's id.

    What the library raises on merges that do not fit the tokens is not caught.
    """
    made = _sentencepiece(vocabulary) if vocabulary.pre is None else _byte_level(vocabulary)
    for token, number in vocabulary.added.items():
        is_control = vocabulary.is_control(number)
        strips = vocabulary.is_stripping(token)
        added = AddedToken(token, normalized=False, special=is_control, rstrip=strips)
        (made.add_special_tokens if is_control else made.add_tokens)([added])
    first = [vocabulary.bos] if vocabulary.add_bos else []
    last = [vocabulary.ends[0]] if vocabulary.add_eos else []
    if first or last:
        before, after = (
            [vocabulary.tokens[i] for i in ids if i is not None] for ids in (first, last)
        )
        made.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, vocabulary.ids[token]) for token in {*before, *after}],
        )
    return made


def _byte_level(vocabulary: GGUFVocabulary) -> Tokenizer:
    pre = vocabulary.pre
    assert pre is not None
    made = Tokenizer(models.BPE(vocabulary.ids, vocabulary.merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(vocabulary: GGUFVocabulary) -> Tokenizer:
    unk = None if vocabulary.unk is None else vocabulary.tokens[vocabulary.unk]
    merges = _merges_of_scores(vocabulary)
    made = Tokenizer(
        models.BPE(vocabulary.ids, merges, unk_token=unk, fuse_unk=True, byte_fallback=True)
    )
    has_prefix = vocabulary.add_space_prefix
    # Every text between control tokens gets the prefix, one that begins with a newline too.
    prepend = [normalizers.Prepend(SPACE)] if has_prefix else []
    made.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return made


def _merges_of_scores(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """Returns the pairs that make a token, those of the highest score first.

    Example, with scores "ab" -1, "bc" -2, "abc" -3: ("a", "b"), ("b", "c"), ("a", "bc"),
    ("ab", "c").
    """
    scores = {
        token: score
        for token, kind, score in zip(
            vocabulary.tokens, vocabulary.kinds, vocabulary.scores, strict=True
        )
        if kind == NORMAL
    }
    pairs = [
        (-score, cut, token)
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    return [(token[:cut], token[cut:]) for _, cut, token in sorted(pairs)]


def require_own_tokens(vocabulary: GGUFVocabulary, tokenizer: Tokenizer, path: Path) -> None:
    """Raises UserError if the tokenizer that was built is not the one that made the vocabulary.

    The texts of tokens from all over the vocabulary must decode to themselves, and the results of
    the first merges must be encoded as themselves: a file whose pre-tokenizer bears a wrong name
    would never write the tokens that cross its cuts.
    """
    plain = [i for i, kind in enumerate(vocabulary.kinds) if kind == NORMAL]
    for number, text in _whole_texts(tokenizer, plain[:: max(1, len(plain) // PROBES)]):
        decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids)
        if decoded != text:
            raise UserError(
                f"{path}: got {decoded!r:.80} from the ids of {text!r:.80}, the text of token "
                f"{number}, expected the same text; convert the model again"
            )
    merged = [vocabulary.ids[left + right] for left, right in vocabulary.merges[:FIRST_MERGES]]
    lost = [
        text
        for number, text in _whole_texts(tokenizer, merged)
        if tokenizer.encode(text, add_special_tokens=False).ids != [number]
    ]
    if len(lost) > MAX_LOST:
        raise UserError(
            f"{path}: its pre-tokenizer (tokenizer.ggml.pre) cuts {len(lost)} of the first "
            f"{len(merged)} merges, such as {lost[0]!r:.40}, expected at most {MAX_LOST}: it is "
            "not the one that the merges were made with; convert the model again"
        )


def _whole_texts(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Yields the tokens that are no parts of characters, with their texts."""
    for number in ids:
        text = tokenizer.decode([number])
        if "\ufffd" not in text and unicodedata.is_normalized("NFC", text):
            yield number, text
