"""A bundle's tokenizer and template, when they are not what they should be: one line each."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from toy_bundle import write_bundle

from spec_runtime.bundle import manifest as bundle
from spec_runtime.dialogue.chat_template import ChatTemplate
from spec_runtime.grammar.formats import Grammar
from spec_runtime.text import tokenizer_file
from spec_runtime.text.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bundle(tmp_path)


def refusal(folder: Path, message: str) -> None:
    with pytest.raises(bundle.BundleError, match=message):
        Tokenizer(bundle.read(folder, verify=False))


def edit(folder: Path, **changes: Any) -> None:
    """Replaces parts of tokenizer.json."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def describe(folder: Path, **changes: Any) -> None:
    """Replaces parts of the manifest's entry of the tokenizer."""
    file = folder / bundle.MANIFEST
    data = json.loads(file.read_text())
    data["tokenizer"] |= changes
    file.write_text(json.dumps(data))


def template_of(folder: Path) -> ChatTemplate:
    template = Tokenizer(bundle.read(folder, verify=False)).template
    assert template is not None
    return template


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[" * 5000, b'{"model": 5}'])
def test_a_file_that_is_no_tokenizer(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    refusal(folder, "tokenizer.json is not a tokenizer: ")


def test_a_tokenizer_that_doubles_again_and_again(folder: Path) -> None:
    doubling = [replace("a", "aa")] * 40
    edit(folder, normalizer={"type": "Sequence", "normalizers": doubling})
    refusal(
        folder, "got a Sequence that may make a text 1e.12 times as long, expected at most 1000"
    )
    edit(folder, normalizer=None, decoder={"type": "Sequence", "decoders": doubling})
    refusal(folder, "got a Sequence that may make a text 1e.12 times as long")
    regex = {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 5000}
    edit(folder, normalizer=regex, decoder={"type": "Fuse"})
    refusal(folder, "got a Replace that may make a text 5e.03 times as long")


def test_what_real_tokenizers_do_is_not_refused(folder: Path) -> None:
    steps = [
        {"type": "Prepend", "prepend": "▁"},
        replace(" ", "▁"),
        {"type": "NFKC"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
    ]
    edit(folder, normalizer={"type": "Sequence", "normalizers": steps})
    assert Tokenizer(bundle.read(folder, verify=False)).bos == 256


class Panicking:
    """Raises what a panic of Rust code becomes: it is no Exception."""

    class PanicException(BaseException):
        pass

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> None:
        raise self.PanicException("index out of\nbounds")

    def decode_batch(self, ids: list[list[int]], skip_special_tokens: bool) -> None:
        raise self.PanicException("index out of bounds")


def test_panics_are_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(bundle.read(folder))
    monkeypatch.setattr(tokenizer, "_tokenizer", Panicking())
    for call in (lambda: tokenizer.encode("a", True), lambda: tokenizer.decode([1])):
        with pytest.raises(
            ValueError, match=r"^the tokenizer tokenizer\.json fails: index out of bounds; build"
        ):
            call()


@pytest.mark.parametrize("is_marked", [False, True])
def test_other_threads_go_on_while_a_text_is_encoded_or_decoded(
    folder: Path, is_marked: bool
) -> None:
    """A server's event loop stood still for a second for each megabyte."""
    tokenizer = Tokenizer(bundle.read(folder, verify=False))
    text = tokenizer.marked("<eos>") * is_marked + "abc " * 20_000
    counts: list[int] = []
    count = 0

    def work() -> None:
        ids = tokenizer.encode(text, True, is_marked=is_marked)
        tokenizer.spelled(ids)
        for call in (
            lambda: tokenizer.encode(text, True, is_marked),
            lambda: tokenizer.decode(ids),
        ):
            most = 0
            for _ in range(100):  # a busy machine may leave this thread alone for a call or two
                before = count
                call()
                most = max(most, count - before)
                if most > 5:
                    break
            counts.append(most)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        time.sleep(1e-5)  # where the other thread keeps the interpreter, this ends after its call
        count += 1
    assert min(counts) > 5
    assert tokenizer.decode(tokenizer.encode("abc", True)) == "abc"


def test_a_bundles_tokenizer_follows_grammars(folder: Path) -> None:
    """Padded logits are never allowed; a tokenizer that the library cannot read is one line."""
    pytest.importorskip("llguidance", reason="needs the extra `grammar`")
    grammar = Grammar("regex", "é|a")
    tokenizer = Tokenizer(bundle.read(folder))
    matcher = tokenizer.matcher(grammar, 300)
    texts = [tokenizer.encode(text, False)[0] for text in "éa"]
    assert matcher.allowed().nonzero()[0].tolist() == sorted(texts)
    assert matcher.allowed().shape == (300,)
    assert matcher.advance(texts[1])
    assert matcher.allowed().nonzero()[0].tolist() == [*tokenizer.eos]
    edit(folder, decoder=None)
    with pytest.raises(ValueError, match="llguidance cannot read this bundle's tokenizer"):
        Tokenizer(bundle.read(folder, verify=False)).matcher(grammar, 300)
    ended = Tokenizer(bundle.read(folder, verify=False))
    ended.eos = ()
    with pytest.raises(ValueError, match="got response_format for a tokenizer without EOS"):
        ended.matcher(grammar, 300)


def test_an_interruption_stays_one() -> None:
    with pytest.raises(KeyboardInterrupt), tokenizer_file.no_panics("tokenizer.json"):
        raise KeyboardInterrupt


def test_texts_that_no_tokenizer_can_take(folder: Path) -> None:
    tokenizer = Tokenizer(bundle.read(folder))
    with pytest.raises(ValueError, match="got half a surrogate pair at character 2"):
        tokenizer.encode("ab\ud800", True)
    most = 256 * 80 + (1 << 16)
    with pytest.raises(
        ValueError, match=f"got a prompt of {most + 1} characters, expected at most"
    ):
        tokenizer.encode("a" * (most + 1), True)
    assert len(tokenizer.encode("a" * 2000, False)) == 2000


def test_special_tokens_lie_in_the_vocabulary(folder: Path) -> None:
    describe(folder, special_ids={"bos": 256, "eos": [999], "pad": None})
    refusal(folder, "got the special token 999, expected one below the target's 258")


@pytest.mark.parametrize(
    ("special_tokens", "expected"),
    [
        ({"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "?"}, "<s> <|im_end|> ?"),
        ({}, "  "),
        (None, "<s> </s> "),  # of a bundle from before they were kept: those of the ids
    ],
)
def test_a_template_gets_the_tokens_of_the_tokenizer(
    folder: Path, special_tokens: dict[str, str] | None, expected: str
) -> None:
    describe(folder, special_tokens=special_tokens)
    source = "{{ bos_token }} {{ eos_token }} {{ unk_token }}"
    (folder / "chat_template.jinja").write_text(source)
    assert template_of(folder).render([{"role": "user", "content": "hi"}]) == expected


def test_the_response_template_of_a_bundle_is_read_and_checked(folder: Path) -> None:
    describe(folder, response_template=None)
    assert template_of(folder).tags is None
    field = {"open": "<ponder>", "close": "</ponder>"}
    describe(folder, response_template={"fields": {"thinking": field}})
    assert template_of(folder).tags == ("<ponder>", "</ponder>")
    describe(folder, response_template={"fields": {"thinking": {"open_pattern": "(a"}}})
    refusal(folder, r"got the expression '\(a', expected .*; build the bundle again")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", r"chat_template\.jinja is not UTF-8"),
        (b"{% if %}", r"chat_template\.jinja: the chat template is not valid: "),
        (
            b"{{ x|nofilter }}",
            r"chat_template\.jinja: the chat template is not valid: No filter named 'nofilter'",
        ),
    ],
)
def test_a_template_that_is_none_names_its_file(folder: Path, content: bytes, message: str) -> None:
    (folder / "chat_template.jinja").write_bytes(content)
    refusal(folder, message)
