r"""Says how the tokenizers that GGUF files name cut a text before they merge its bytes.

A GGUF file holds a tokenizer's tokens and merges, and of the rest only a name: its key
`tokenizer.ggml.pre`. The table below has what llama.cpp's src/llama-vocab.cpp means by each name.
Where llama.cpp rewrote an expression for its own engine, the one of the model's own tokenizer.json
stands here.

Each expression of a pre-tokenizer cuts the pieces that the one before has left: what it matches,
and what lies between, become pieces of their own. With "smollm" the text "a 10\n\n1" is first cut
into "a ", "1", "0", "\n\n", "1", and then into "a", " ", "1", "0", "\n\n", "1".
"""

from dataclasses import dataclass

from spec_runtime.errors import UserError

# Parts that many expressions share.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PUNCTUATION = r"[\p{P}$+<=>^~|]+"
_PUNCTUATION_FALCON = r"[\p{P}$+<=>^~|`]+"
_THREE_DIGITS = "[0-9][0-9][0-9]"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_BLANKS}"
_QWEN2 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_SYMBOLS}|{_BLANKS}"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
_CASED_ENDED = _CASED % (f"{_ENDINGS}?", f"{_ENDINGS}?")
_GPT4O = rf"{_CASED_ENDED}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3_WORDS = rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
# DeepSeek's letters: those with two cases, as of an old Unicode.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_DEEPSEEK_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


@dataclass(frozen=True)
class PreTokenizer:
    """Holds what llama.cpp's name for a pre-tokenizer stands for.

    patterns: regular expressions, applied one after the other. ignore_merges: a piece that is a
    token is that token, whatever its merges say. add_bos: a text begins with BOS unless the file
    says otherwise. nfc: the text is normalised to NFC first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_TABLE = {
    "default": PreTokenizer((_PUNCTUATION, _GPT2, r"\p{N}+", _THREE_DIGITS)),
    "falcon": PreTokenizer((_PUNCTUATION_FALCON, _GPT2, _THREE_DIGITS)),
    "gpt-2 a.x-4.0 mellum olmo trillion granite-docling exaone4": PreTokenizer((_GPT2,)),
    "smollm starcoder command-r minerva-7b mellum2": PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 lfm2": PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", rf"{_ENDINGS}|{_WORDS}|\p{{N}}+|{_SYMBOLS}|{_BLANKS}"), ignore_merges=True
    ),
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2": PreTokenizer((_QWEN2,)),
    "ufakzeka": PreTokenizer((rf"{_WORDS}|\p{{N}}|{_SYMBOLS}|{_BLANKS}",)),
    "seed-coder": PreTokenizer(
        (rf"{_ENDINGS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",)
    ),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o talkie": PreTokenizer((_GPT4O,)),
    "tiny_aya": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*(?![\p{L}\p{M}\p{Nd}\p{Pc}]))", _GPT4O)),
    "deepseek-llm": PreTokenizer(
        (
            "[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            rf"\s?[{_DEEPSEEK_MARKS}]+",
            r"\s+$",
            _DEEPSEEK_HAN,
            r"\p{N}",
        )
    ),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, r"\p{N}")),
    "deepseek-v3 hunyuan-dense hy_v4": PreTokenizer(
        (r"\p{N}{1,3}", _HAN_AND_KANA, rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}")
    ),
    "spark2_5": PreTokenizer(
        (
            r"\p{N}{1,3}",
            _HAN_AND_KANA,
            rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        )
    ),
    "viking": PreTokenizer(
        (" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", r"\p{N}")
    ),
}
KNOWN = {name: found for names, found in _TABLE.items() for name in names.split()}


def find(name: str) -> PreTokenizer:
    """Returns the pre-tokenizer of a name; raises UserError for one that is not in the table."""
    if name in KNOWN:
        return KNOWN[name]
    raise UserError(
        f"got the pre-tokenizer {name!r:.80} (tokenizer.ggml.pre), which is unknown; expected one "
        "of llama.cpp's names, such as llama-bpe or qwen2: use the model's Hugging Face folder"
    )
