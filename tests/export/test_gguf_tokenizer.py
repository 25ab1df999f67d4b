"""Tests that a tokenizer is the model's own: a GGUF file's metadata, a folder's tokenizer.json."""

import dataclasses
import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf_reference import ReferenceEncoder
from tiny_gguf import bytewise_tokens, write_gguf, write_tokenizer
from tiny_target import save_llama

from spec_export.build import make_bundle, manifest
from spec_export.build.make_bundle import BuildOptions
from spec_export.check import check
from spec_export.check.check import DELICATE_TEXTS
from spec_export.imports.gguf import pretokenizers
from spec_export.imports.gguf import tokenizer as gguf_tokenizer
from spec_export.imports.gguf import vocabulary as gguf_vocabulary
from spec_export.model import target
from spec_runtime.bundle import manifest as bundles
from spec_runtime.text.tokenizer import Tokenizer

BOS, EOS = (
    "<|begin\u2581of\u2581sentence|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # DeepSeek's
CONTROL = [(BOS, 3), (EOS, 3), ("<think>", 4)]
KINDS: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "bos_token_id": 0, "eos_token_id": 1}
# "\u010a" is a newline and "\u0120" a space in the byte alphabet.
MERGES = ["\u010a \u010a", "\u0120 \u0120", "1 2", "12 3", "a b", "\u0120 ab", "c d", "\u0120ab cd"]


def byte_level(path: Path, merges: list[str] = MERGES, **values: Any) -> Path:
    """Writes a byte-level tokenizer: three added tokens, 256 bytes and what the merges make."""
    tokens = [*CONTROL, *((each, 1) for each in bytewise_tokens())]
    tokens += [(merge.replace(" ", ""), 1) for merge in merges]
    return write_tokenizer(path, tokens, **KINDS | {"merges": merges} | values)


def sentencepiece(path: Path, architecture: str = "llama", **values: Any) -> Path:
    """Writes a SentencePiece tokenizer of control tokens, bytes and a few words."""
    words = [*"\u2581abcd", "\u2581\u2581", "ab", "\u2581a", "\u2581ab", "cd", "\u2581abcd"]
    tokens = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("<|end|>", 3)]
    tokens += [(f"<0x{byte:02X}>", 6) for byte in range(256)]
    tokens += [(word, 1) for word in words]
    scores = [0.0] * 260 + [-float(rank) for rank in range(len(words))]
    return write_tokenizer(path, tokens, architecture, model="llama", scores=scores, **values)


def open_file(path: Path) -> Any:
    """Returns the transformers tokenizer of a GGUF file."""
    return target.load_tokenizer(target.resolve(str(path)))


def texts_of(tokenizer: Any, text: str) -> list[str]:
    """Returns the texts of the tokens of a text."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [tokenizer.backend_tokenizer.decode([i], skip_special_tokens=False) for i in ids]


# ---- pre-tokenizers ----


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("smollm", "\n\n1  52", ["\n\n", "1", "  ", "5", "2"]),
        ("gpt-2", "\n\n1  52", ["\n", "\n", "1", " ", " 52"]),
        ("default", "a (b) 1234", ["a", " ", "(", "b", ")", " ", "123", "4"]),
        ("falcon", "x`y 12345", ["x", "`", "y", " 12345"[:1], "123", "45"]),
        (
            "llama-bpe",
            "I'LL pay (12345)\n\nx",
            ["I", "'LL", " pay", " (", "123", "45", ")\n\n", "x"],
        ),
        ("dbrx", " don't\t\tx", [" don", "'t", "\t", "\tx"]),
        ("qwen2", "I'LL pay 123", ["I", "'LL", " pay", " ", "1", "2", "3"]),
        ("ufakzeka", "Ali'nin 12", ["Ali", "'nin", " ", "1", "2"]),
        ("seed-coder", "a;\n\nb", ["a", ";", "\n\n", "b"]),
        ("minicpm5", "a12345 67", ["a", "123", "45", " ", "67"]),
        ("tekken", "HTTPServer's 12", ["HTTPServer", "'s", " ", "1", "2"]),
        ("gpt-4o", "helloWorld's 1234", ["hello", "World's", " ", "123", "4"]),
        ("tiny_aya", "12345 x", ["12", "345", " x"]),
        ("deepseek-llm", "a 12\u4f60b!", ["a", " ", "1", "2", "\u4f60", "b", "!"]),
        ("deepseek-coder", "a 12\nb!?", ["a", " ", "1", "2", "\n", "b", "!?"]),
        ("deepseek-v3", "x.foo 1234\u4f60", ["x", ".foo", " ", "123", "4", "\u4f60"]),
        ("spark2_5", "a!\n\nb", ["a", "!", "\n", "\n", "b"]),
        ("viking", "a 12", ["a", " ", "1", "2"]),
    ],
)
def test_a_name_stands_for_its_way_of_cutting(
    tmp_path: Path, name: str, text: str, pieces: list[str]
) -> None:
    tokenizer = open_file(byte_level(tmp_path / "a.gguf", ["a b"], pre=name)).backend_tokenizer
    cut = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [tokenizer.decoder.decode([piece]) for piece, _ in cut] == pieces


def test_every_name_encodes_as_plain_python_does(tmp_path: Path) -> None:
    """Merges over all cuts make the ids tell where a text was cut."""
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False)
    lines = [line for text in DELICATE_TEXTS for line in (text[:40], text[20:])] * 2
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, show_progress=False)
    trained.train_from_iterator(lines, trainer)
    merges = [" ".join(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    whole = gguf_vocabulary.read(byte_level(tmp_path / "a.gguf", merges))
    results = {}
    for name, pre in pretokenizers.KNOWN.items():
        vocabulary = dataclasses.replace(whole, pre=pre)
        made, reference = gguf_tokenizer.build(vocabulary), ReferenceEncoder(vocabulary)
        for text in (*DELICATE_TEXTS, f"{BOS}  5{EOS}\n\n1<think>e\u0301"):
            ids = made.encode(text, add_special_tokens=False).ids
            assert ids == reference.encode(text), (name, text)
            results[pre, text] = tuple(ids)
    assert len(set(results.values())) > 40


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pre": "made-up"}, "got the pre-tokenizer 'made-up' (tokenizer.ggml.pre), which is unk"),
        ({"pre": ""}, "got the pre-tokenizer '' (tokenizer.ggml.pre), which is unknown"),
        (
            {"pre": "kimi-k2"},
            "'kimi-k2' (tokenizer.ggml.pre), which is unknown; expected one of ll",
        ),
        ({"model": "t5"}, "got a tokenizer of kind 't5' (tokenizer.ggml.model), expected gpt2 or"),
        ({"merges": ["ab"]}, "got 'ab' in tokenizer.ggml.merges, expected two tokens"),
        ({"merges": [" ab"]}, "got ' ab' in tokenizer.ggml.merges, expected two tokens"),
        ({"merges": ["z zz"]}, "could not load the tokenizer of"),
        ({"eos_token_id": 999}, "got 999 for tokenizer.ggml.eos_token_id, expected an id below 2"),
        ({"add_bos_token": "x"}, "got 'x' for tokenizer.ggml.add_bos_token, expected bool"),
        ({"add_bos_token": True, "bos_token_id": 9}, "got no control token as tokenizer.ggml.bos"),
        ({"scores": [1.0], "model": "llama"}, "got 1 values for tokenizer.ggml.scores, expected"),
    ],
)
def test_a_tokenizer_that_is_not_known_is_refused_by_name(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        open_file(byte_level(tmp_path / "a.gguf", **values))
    assert "\n" not in str(error.value)


def test_merges_that_the_named_pre_tokenizer_cuts_are_refused(tmp_path: Path) -> None:
    merges = ["1 2", "12 3", "2 3", "\u010a \u010a"]
    open_file(byte_level(tmp_path / "a.gguf", merges, pre="gpt-2"))
    with pytest.raises(ValueError, match="cuts 3 of the first 4 merges, such as '12', expected at"):
        open_file(byte_level(tmp_path / "a.gguf", merges, pre="smollm"))


def test_a_file_without_the_parts_of_its_own_tokens_is_refused(tmp_path: Path) -> None:
    """Nothing that the tokenizer writes gives "ab" back: the file has no "a", and no bytes."""
    tokens = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("\u2581", 1), ("b", 1), ("ab", 1)]
    path = write_tokenizer(tmp_path / "a.gguf", tokens, model="llama", scores=[0.0] * 6)
    with pytest.raises(ValueError, match="'ab', the text of token 5, expected the same text"):
        open_file(path)


# ---- added tokens and ends ----


def test_control_tokens_of_any_script_are_whole(tmp_path: Path) -> None:
    tokenizer = open_file(byte_level(tmp_path / "a.gguf", add_bos_token=True))
    assert (tokenizer.bos_token, tokenizer.eos_token) == (BOS, EOS)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 267)
    assert texts_of(tokenizer, f"{BOS}ab<think>{EOS}") == [BOS, "ab", "<think>", EOS]
    ids = tokenizer.encode(f"ab<think>{EOS}")
    assert (ids[0], ids[-2:]) == (0, [2, 1])
    assert tokenizer.backend_tokenizer.decode(ids) == "ab<think>"


def test_ordinary_words_with_a_special_id_stay_words(tmp_path: Path) -> None:
    """Some converters write the id of a comma where a model has no BOS."""
    comma = 3 + bytewise_tokens().index(",")
    tokenizer = open_file(
        byte_level(tmp_path / "a.gguf", bos_token_id=comma, padding_token_id=comma)
    )
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (None, None)
    assert tokenizer.backend_tokenizer.decode([comma], skip_special_tokens=True) == ","
    # nor does a word end turns that only looks as if it did
    assert gguf_vocabulary.read(byte_level(tmp_path / "b.gguf", ["<|end| >"])).ends == (1,)


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize("is_spm", [False, True])
@pytest.mark.parametrize("has_template", [True, False])
def test_marks_of_chats_that_a_file_calls_ordinary_tokens_are_control_tokens(
    tmp_path: Path, is_spm: bool, has_template: bool
) -> None:
    """No two tokens make one, so that without this they would be written letter by letter."""
    marks = ["</s>", "<|im_start|>", "<|im_end|>", "<tool>", "<other>"]
    word = "<ab>"  # which the tokenizer makes of its parts, wherever the template writes it
    letters = ["\u2581", *"abcd<>", "<ab", word] if is_spm else [*bytewise_tokens(), "<ab", word]
    letters += ["ab"]
    tokens = [("<unk>", 2), *((each, 1) for each in [*marks, *letters])]
    if is_spm:
        tokens += [(f"<0x{byte:02X}>", 6) for byte in range(256)]
    scores = [-float(rank) for rank in range(len(tokens))]
    values: dict[str, Any] = {"model": "llama", "scores": scores, "add_bos_token": False}
    if not is_spm:
        values = {"model": "gpt2", "pre": "gpt-2", "merges": ["a b", "< ab", "<ab >"]}
    values["templates"] = {"default": f"{CHATML}<tool>{word}"} if has_template else None
    path = write_tokenizer(tmp_path / "a.gguf", tokens, eos_token_id=1, **values)
    tokenizer = open_file(path)
    known = ["<|im_end|>", "</s>"] + (["<|im_start|>", "<tool>"] if has_template else [])
    for mark in known:
        ids = tokenizer.encode(f"ab{mark}ab", add_special_tokens=False)
        assert tokenizer.convert_tokens_to_ids(mark) in ids, mark
        assert tokenizer.backend_tokenizer.decode(ids[-2:]).strip() == "ab", "it is no text"
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    assert {token.content for token in added} == {"<unk>", *known}
    ends = target.load_generation_config(target.resolve(str(path)))
    assert ends is not None
    assert ends.eos_token_id == [1, 3]


@pytest.mark.parametrize(
    ("write", "values", "ends"),
    [
        (byte_level, {}, [1]),
        (byte_level, {"eot_token_id": 2, "eom_token_id": 0}, [1, 2, 0]),
        (sentencepiece, {}, [2, 3]),
        (sentencepiece, {"eos_token_id": 3, "eot_token_id": 2}, [3, 2]),
    ],
)
def test_every_end_of_a_turn_ends_an_answer(
    tmp_path: Path, write: Any, values: dict[str, int], ends: list[int]
) -> None:
    source = target.resolve(str(write(tmp_path / "a.gguf", **values)))
    config = target.load_generation_config(source)
    assert config is not None
    assert config.eos_token_id == ends
    assert target.load_tokenizer(source).eos_token_id == ends[0]


def test_where_there_are_tools_a_template_named_tool_use_is_taken(tmp_path: Path) -> None:
    templates = {"default": "plain", "tool_use": "{{ tools | length }}", "rag": "x"}
    found = open_file(byte_level(tmp_path / "a.gguf", templates=templates))
    render = partial(found.apply_chat_template, [{"role": "user", "content": ""}], tokenize=False)
    assert (render(), render(tools=[{"name": "f"}])) == ("plain", "1")


# ---- SentencePiece ----


@pytest.mark.parametrize(
    ("text", "values", "tokens"),
    [
        ("ab cd", {}, ["\u2581ab", "\u2581", "cd"]),
        ("ab abcd", {}, ["\u2581ab", "\u2581abcd"]),
        ("  ab", {}, ["\u2581\u2581", "\u2581ab"]),
        (
            "<s>\nab</s>\ncd",
            {},
            ["<s>", "\u2581", "<0x0A>", "ab", "</s>", "\u2581", "<0x0A>", "cd"],
        ),
        ("<s>\nab cd", {"add_space_prefix": False}, ["<s>", "<0x0A>", "ab", "\u2581", "cd"]),
        ("\u00e9", {}, ["\u2581", "<0xC3>", "<0xA9>"]),
        ("<|end|>\n cd", {}, ["<|end|>", "\u2581", "<0x0A>", "\u2581", "cd"]),
        ("<|end|>\n cd<s> cd", {"architecture": "phi3"}, ["<|end|>", "▁", "cd", "<s>", "▁▁", "cd"]),
    ],
)
def test_sentencepiece_marks_each_text_between_control_tokens(
    tmp_path: Path, text: str, values: dict[str, Any], tokens: list[str]
) -> None:
    path = sentencepiece(tmp_path / "a.gguf", **values)
    tokenizer, reference = open_file(path), ReferenceEncoder(gguf_vocabulary.read(path))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == tokens
    assert ids == reference.encode(text)
    assert tokenizer.encode(text) == [1, *ids] == reference.encode(text, add_special_tokens=True)


# ---- folders and bundles ----


def edit_own_file(folder: Path) -> bytes:
    """Gives a folder a tokenizer.json that no class of transformers makes; returns its bytes."""
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    split = {
        "type": "Split",
        "pattern": {"Regex": "[0-9]"},
        "behavior": "Isolated",
        "invert": False,
    }
    state["pre_tokenizer"], state["normalizer"] = split, {"type": "Lowercase"}
    path.write_text(json.dumps(state))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "LlamaTokenizer", "pad_token": "[PAD]", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return path.read_bytes()


def test_the_own_file_of_a_folder_is_written_and_used_as_it_is(tmp_path: Path) -> None:
    folder, out = save_llama(tmp_path / "tiny"), tmp_path / "out"
    own = edit_own_file(folder)
    source = target.resolve(str(folder))
    tokenizer = target.load_tokenizer(source)
    assert tokenizer.encode("HI") == tokenizer.encode("hi")
    assert (len(tokenizer), tokenizer.pad_token_id, tokenizer.unk_token_id) == (98, None, None)
    model = SimpleNamespace(generation_config=None)
    out.mkdir()
    info = manifest.write_tokenizer(tokenizer, model, out, target.tokenizer_file(source))
    assert (out / "tokenizer.json").read_bytes() == own
    assert (info.vocab_size, info.special_ids) == (98, {"bos": 0, "eos": [1], "pad": None})


@pytest.mark.parametrize("is_end", [True, False])
def test_tokens_beyond_the_embedding_are_refused_before_anything_is_exported(
    tmp_path: Path, is_end: bool
) -> None:
    folder = save_llama(tmp_path / "tiny")
    name, values = (
        ("generation_config.json", {"eos_token_id": [1, 98]})
        if is_end
        else ("tokenizer.json", {"added_tokens": None})
    )
    state = json.loads((folder / name).read_text())
    if not is_end:
        more = state["added_tokens"][0] | {"id": 98, "content": "<more>"}
        values = {"added_tokens": [*state["added_tokens"], more]}
    (folder / name).write_text(json.dumps(state | values))
    got = "the end of an answer" if is_end else "<more>"
    with pytest.raises(
        ValueError, match=rf"got token 98 \('{got}'\) in the tok.*below 98, the rows"
    ):
        make_bundle.build(BuildOptions(str(folder), out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_check_compares_a_bundle_with_the_file_itself(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, eot=0)
    make_bundle.build(BuildOptions(str(path), out=tmp_path / "out", lanes=1))
    opened = bundles.read(tmp_path / "out")
    assert opened.manifest.tokenizer.special_ids == {"bos": 1, "eos": [0, 2], "pad": 2}
    tokenizer = open_file(path)
    row = check._tokenizer_row("x", Tokenizer(opened), tokenizer)
    assert (row.value, row.note) == (0, "of 16 prompts and 5 texts")

    state = json.loads((opened.path / "tokenizer.json").read_text())
    state["model"]["merges"] = []
    (opened.path / "tokenizer.json").write_text(json.dumps(state))
    row = check._tokenizer_row("x", Tokenizer(opened), tokenizer)
    assert not row.passed
