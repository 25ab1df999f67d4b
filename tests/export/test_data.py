"""Training data: the four schemas, where the loss falls, and errors that name file and line."""

import json
import logging
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_target import TEMPLATE, make_tokenizer

from spec_export.distill import prompts
from spec_export.training import data
from spec_export.training.data import Example
from spec_runtime.errors import UserError


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer(tokenizer: Any, example: Example) -> str:
    return tokenizer.decode(example.token_T[example.loss_T].tolist())


def test_distilled_rows_are_wrapped_in_the_chat_template(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": tokenizer.encode("hi"), "response": tokenizer.encode("yes</s>"), "source": "x"},
    )
    (example,) = data.read(path, tokenizer, 1000)
    text = "<s>system\nbe nice</s>\n<s>user\nhi</s>\n<s>assistant\nyes</s>"
    assert tokenizer.decode(example.token_T.tolist()) == text
    assert answer(tokenizer, example) == "yes</s>"
    assert example.token_T.dtype == np.int32
    assert example.loss_T.dtype == bool
    assert example.source == "x"


def test_without_a_chat_template_nothing_is_added(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": [5, 6], "response": [7]})
    (example,) = data.read(path, make_tokenizer(None), 1000)
    assert example.token_T.tolist() == [5, 6, 7]


def test_token_rows_and_xz_whatever_the_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"tokens": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]}
    path.write_bytes(lzma.compress(json.dumps(row).encode() + b"\n\n"))
    (example,) = data.read([path], make_tokenizer(), 1000)
    assert example.token_T.tolist() == [5, 6, 7, 8]
    assert example.loss_T.tolist() == [False, True, False, True]


def test_chat_rows_lose_on_the_assistant_only(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path = write(tmp_path / "a.jsonl", {"messages": messages})
    (example,) = data.read(path, tokenizer, 1000)
    assert answer(tokenizer, example) == "b</s>d</s>"
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(example.token_T.tolist()) == text


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a\n\nb", "n": 1}], "id": 7},
        {"conversations": [{"from": "human", "value": "a\n\nb"}], "id": 7},
        {"conversations": [{"role": "user", "content": "a\n\nb"}], "id": 7},
        {"instruction": "a", "input": "b"},
        {"instruction": "a\n\nb", "input": ""},
    ],
)
def test_rows_of_other_tools_are_the_same_chat(tmp_path: Path, row: dict[str, Any]) -> None:
    if "messages" in row:
        row["messages"].append({"role": "assistant", "content": "c"})
    elif "conversations" in row:
        said = {"from": "gpt", "value": "c"}
        is_named = "role" in row["conversations"][0]
        row["conversations"].append({"role": "assistant", "content": "c"} if is_named else said)
    else:
        row["output"] = "c"
    tokenizer = make_tokenizer()
    (example,) = data.read(write(tmp_path / "a.jsonl", row), tokenizer, 1000)
    messages = [{"role": "user", "content": "a\n\nb"}, {"role": "assistant", "content": "c"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(example.token_T.tolist()) == text


@pytest.mark.parametrize(
    ("asks", "answers"),
    [
        *(("human", name) for name in ("gpt", "chatgpt", "bing", "bard", "bot", "model", "GPT")),
        *((name, "assistant") for name in ("user", "Human", " USER ")),
    ],
)
@pytest.mark.parametrize("key", ["conversations", "messages"])
def test_answers_are_the_assistants_whatever_its_name(
    tmp_path: Path, asks: str, answers: str, key: str
) -> None:
    who, what = ("from", "value") if key == "conversations" else ("role", "content")
    turns = [("System", "s"), (asks, "a"), (answers, "b")]
    row = {key: [{who: speaker, what: text} for speaker, text in turns]}
    tokenizer = make_tokenizer()
    (example,) = data.read(write(tmp_path / "a.jsonl", row), tokenizer, 1000)
    text = "<s>system\ns</s>\n<s>user\na</s>\n<s>assistant\nb</s>\n"
    assert tokenizer.decode(example.token_T.tolist()) == text
    assert answer(tokenizer, example) == "b</s>"
    (prompt,) = prompts.read(tmp_path / "a.jsonl")
    assert (prompt.messages, prompt.system) == (["a"], "s")


@pytest.mark.parametrize("read", [lambda path: data.read(path, make_tokenizer(), 99), prompts.read])
@pytest.mark.parametrize("key", ["conversations", "messages"])
def test_an_unknown_speaker_is_named(tmp_path: Path, key: str, read: Any) -> None:
    who, what = ("from", "value") if key == "conversations" else ("role", "content")
    turns = [("user", "a"), ("narrator", "b"), ("assistant", "c")]
    path = write(tmp_path / "a.jsonl", {key: [{who: name, what: text} for name, text in turns]})
    with pytest.raises(
        UserError, match=r"a\.jsonl:1: got a message of 'narrator', expected one of"
    ):
        read(path)


# A template that wants a first message, and this to be the user's, as Mistral's and Gemma's do.
ALTERNATING = (
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    f"{TEMPLATE}"
)


def test_an_answer_before_the_first_question_is_left_out(tmp_path: Path) -> None:
    """As other trainers do; the file's other rows are read."""
    turns = [("gpt", "hello"), ("human", "a"), ("gpt", "b")]
    row = {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}
    greeting = {"messages": [{"role": "assistant", "content": "hi"}]}
    path = write(tmp_path / "a.jsonl", row, greeting, {"messages": QUESTION_AND_ANSWER})
    tokenizer = make_tokenizer(ALTERNATING)
    first, second = data.read(path, tokenizer, 1000)
    assert np.array_equal(first.token_T, second.token_T)
    assert answer(tokenizer, first) == "b</s>"


def test_sources_allow_list(tmp_path: Path) -> None:
    rows = [
        {"tokens": [i, 9], "loss_mask": [0, 1], **({"source": s} if s else {})}
        for i, s in enumerate(["", "x", "y"], start=5)
    ]
    path = write(tmp_path / "a.jsonl", *rows)
    kept = data.read(path, make_tokenizer(), 10, sources=("", "y"))
    assert [e.token_T[0] for e in kept] == [5, 7]
    assert data.source_counts(kept) == {"": 1, "y": 1}
    message = r"no row has source \['z'\], expected some of \['', 'x', 'y'\]"
    with pytest.raises(UserError, match=message):
        data.read(path, make_tokenizer(), 10, sources=("x", "z"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b"[1]", "got list, expected an object"),
        (b'{"text": "x"}', r"got keys \['text'\]"),
        (b'{"prompt": [1], "response": "x"}', '"response" is not a list of token ids'),
        (b'{"prompt": [98], "response": [1]}', "ids from 98 to 98, expected 0 to 97"),
        (b'{"prompt": [1], "response": [-1]}', "ids from -1"),
        (b'{"tokens": [1, 2], "loss_mask": [1]}', "loss_mask of 1 for 2 tokens"),
        (b'{"tokens": [1], "loss_mask": [2]}', "expected a list of 0 and 1"),
        (b'{"conversations": [{"from": 1}]}', '"conversations" is not a list of'),
        (b'{"instruction": "x", "input": [1], "output": "y"}', '"messages" is not a list'),
        (b'{"messages": [{"role": "user"}]}', '"messages" is not a list'),
        (b'{"prompt": [1], "response": [1], "source": 3}', '"source" is 3'),
        (b"[" * 5000, "not JSON .it is nested too deeply"),
        (b'{"tokens": ' + b"[" * 5000 + b"]" * 5000 + b', "loss_mask": [1]}', "nested too deeply"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "half a surrogate pair"),
        (b'{"tokens": [5], "loss_mask": [1' + b"0" * 5000 + b"]}", "not JSON"),
        (b'{"tokens": [1e400], "loss_mask": [1]}', "not JSON .it holds 1e400"),
        (b'{"tokens": [1.5], "loss_mask": [1]}', '"tokens" is not a list of token ids'),
        (b'{"tokens": [5], "loss_mask": [[[]]]}', '"loss_mask" holds other values'),
        (b'{"tokens": {}, "loss_mask": null}', '"tokens" is not a list of token ids'),
        (b'{"prompt": [true], "response": [5]}', '"prompt" is not a list of token ids'),
        (b'{"messages": {"role": "user"}}', '"messages" is not a list of'),
        (b'{"messages": [{"role": 1, "content": "a"}]}', '"messages" is not a list of'),
        (b'{"messages": [{"role": "user", "content": null}]}', '"messages" is not a list of'),
        (b'{"prompt": [5], "response": [5], "source": {}}', '"source" is {}, expected a string'),
        (b'{"messages": [], "\\ud800": 1}', "half a surrogate pair"),
        (b"\xff\xfe", "not JSON"),
        (b"NaN", "not JSON .it holds NaN"),
        (b"1.5", "got float, expected an object"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"tokens": [5, 6], "loss_mask": [0, 1]}\n' + line + b"\n")
    with pytest.raises(UserError, match=rf"bad\.jsonl:2: .*{message}"):
        data.read(path, make_tokenizer(), 1000)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.xz"
    cut.write_bytes(lzma.compress(b'{"tokens": [1], "loss_mask": [1]}\n' * 5)[:-20])
    for path in (tmp_path / "none.jsonl", cut, "a\0b: embedded null byte"):
        with pytest.raises(UserError, match=f"cannot read {path}"):
            data.read(str(path).partition(":")[0], make_tokenizer(), 10)


REFUSES = "the chat template refuses the messages"


@pytest.mark.parametrize(
    ("template", "message", "of_affixes"),
    [
        ("{{ messages | length }}", "the chat template rewrites", "exactly once"),
        ("{{ raise_exception('no') }}", f"{REFUSES}: no", REFUSES),
        *(
            (template, REFUSES, REFUSES)
            for template in ("{{ 1 / 0 }}", "{{ messages + 1 }}", "{% for %}", "{{ range(10**9) }}")
        ),
    ],
)
def test_a_template_that_fails_is_named_with_the_row(
    tmp_path: Path, template: str, message: str, of_affixes: str
) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": QUESTION_AND_ANSWER})
    with pytest.raises(UserError, match=rf"a\.jsonl:1: {message}"):
        data.read(path, make_tokenizer(template), 10)
    with pytest.raises(UserError, match=of_affixes):
        data.chat_affixes(make_tokenizer(template))


QUESTION_AND_ANSWER = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def example(*tokens: int, prompt: int = 1) -> Example:
    return Example(np.array(tokens, dtype=np.int32), np.arange(len(tokens)) >= prompt)


def test_split_is_by_prompt_and_stable() -> None:
    examples = [example(i, j, 5, prompt=2) for i in range(200) for j in (0, 0, 1)]
    train, validation = data.split(examples, 0.25)
    prompts = [{tuple(e.token_T[:2]) for e in side} for side in (train, validation)]
    assert not prompts[0] & prompts[1]
    assert len(train) + len(validation) == 600
    assert 100 < len(validation) < 200
    fewer = data.split(examples[::2], 0.25)[1]
    assert {tuple(e.token_T[:2]) for e in fewer} <= prompts[1]


def test_split_leaves_neither_side_empty() -> None:
    pair = [example(1, 2), example(3, 4)]
    for fraction in (1e-9, 0.5, 0.999999):
        train, validation = data.split(pair, fraction)
        assert len(train) == len(validation) == 1
    assert data.split(pair, 0) == (pair, [])
    with pytest.raises(UserError, match="validation_fraction"):
        data.split([example(1, 2), example(1, 3)], 0.5)


def test_most_frequent_tokens() -> None:
    examples = [
        example(9, 4, 4, 4, 7, 7, 3),
        example(9, 9, 5),
    ]  # prompt token 9 counts once of three
    counts_V = data.count_tokens(examples, 12)
    got = data.most_frequent_tokens(counts_V, 4, always=[11])
    assert got.tolist() == [3, 4, 7, 11]
    assert got.dtype == np.int64
    every = data.most_frequent_tokens(counts_V, 7, always=[11])
    assert every.tolist() == [0, 3, 4, 5, 7, 9, 11]
    # The prompts count too: 9 comes three times then, as often as 4.
    counts_V = data.count_tokens(examples, 12, prompt_weight=1.0)
    assert data.most_frequent_tokens(counts_V, 2).tolist() == [4, 9]
    with pytest.raises(UserError, match="token id 9"):
        data.require_vocabulary(examples, 8)
    with pytest.raises(UserError, match=r"cannot hold 2 special ids"):
        data.most_frequent_tokens(counts_V, 1, always=[1, 2])
    with pytest.raises(UserError, match="expected 1 to 12"):
        data.most_frequent_tokens(counts_V, 13)


def test_separators_of_unicode_do_not_end_a_line(tmp_path: Path) -> None:
    """U+2028 and its like may stand in JSON strings as they are; a mark may begin the file."""
    text = "a\u2028b\u2029c\x85d\x1ee"
    row = {"messages": [{"role": "user", "content": text}]}
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(row, ensure_ascii=False).encode() + b"\n")
    with pytest.raises(UserError, match="no training example"):  # an answer is missing, no line
        data.read(path, make_tokenizer(), 1000)
    ((where, got),) = data.read_rows(path)
    assert (where, got) == (f"{path}:1", row)


def test_cut_to_max_length_and_rows_without_answer_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of one token are dropped too."""
    path = write(
        tmp_path / "a.jsonl",
        {"tokens": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]},
        {"tokens": [5, 6, 7, 8], "loss_mask": [0, 0, 0, 1]},
        {"tokens": [5], "loss_mask": [1]},
    )
    with caplog.at_level(logging.WARNING):
        (example,) = data.read(path, make_tokenizer(), 3)
    assert example.token_T.tolist() == [5, 6, 7]
    assert "dropped 2 rows" in caplog.text
    with pytest.raises(UserError, match="no training example"):
        data.read(path, make_tokenizer(), 2)


class Panic(BaseException):
    """As the Rust library raises it."""


@pytest.mark.parametrize("error", [Panic("index out\nof bounds"), TypeError("bad text")], ids=str)
def test_a_tokenizer_that_fails_is_named_with_the_row(
    tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": QUESTION_AND_ANSWER})
    tokenizer = make_tokenizer()

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(tokenizer, "encode", fail)
    with pytest.raises(UserError, match=r"a\.jsonl:1: the tokenizer cannot encode it: [ib]"):
        data.read(path, tokenizer, 10)
    path = write(tmp_path / "b.jsonl", {"prompt": [5], "response": [6]})
    with pytest.raises(UserError, match="the chat template: the tokenizer cannot encode it"):
        data.read(path, tokenizer, 10)


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([{"prompt": [5]}], "is not a list of"),
        ([{"prompt": [5], "response": [6]}] * 2, "ends without the chat template's end token"),
        ([{"prompt": [5], "response": [999]}], "belong to another tokenizer"),
    ],
)
def test_foreign_turns_are_one_line(tmp_path: Path, turns: Any, message: str) -> None:
    path = write(tmp_path / "rows.jsonl", {"turns": turns})
    with pytest.raises(UserError, match=f"rows.jsonl:1: .*{message}"):
        data.read(path, make_tokenizer(), 99)


def test_a_template_shows_the_user_message_once() -> None:
    with pytest.raises(UserError, match="exactly once"):
        data.chat_affixes(make_tokenizer("{{ messages[0].content * 2 }}"))


def test_a_template_without_end_tokens_has_no_second_turn() -> None:
    template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }} {% endfor %}"
    assert data.chat_joint(make_tokenizer())[0] == 1
    with pytest.raises(UserError, match="distill one turn"):
        data.chat_joint(make_tokenizer(template))
    with pytest.raises(UserError, match="has none"):
        data.chat_joint(make_tokenizer(None))
