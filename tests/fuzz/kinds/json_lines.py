"""JSON Lines: training data, prompts of bench and of distill; read lines are those JSON parses."""

import json
import lzma
from contextlib import suppress
from pathlib import Path
from typing import Any

import mutations
from cases import Kind, Refused, Run, Wrong, refusing
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy


def _rows(reader: str) -> SearchStrategy[Any]:
    """Draws rows of which most are for this reader."""
    ids = st.lists(st.integers(0, 97), min_size=1, max_size=6)
    text = (
        st.sampled_from(("hello", "a\u2028b", "x\x85y\x1c", "[/b]", "\ud800")) | mutations.texts()
    )
    message = st.fixed_dictionaries(
        {"role": st.sampled_from(("user", "assistant", "system")), "content": text}
    )
    chat = st.fixed_dictionaries({"messages": st.lists(message, min_size=1, max_size=3)})
    asked = st.one_of(
        st.fixed_dictionaries({"prompt": text}, optional={"id": _id(), "category": _category()}),
        st.fixed_dictionaries(
            {"turns": st.lists(text, min_size=1, max_size=3)},
            optional={"question_id": _id(), "category": _category()},
        ),
        chat,
    )
    trained = st.one_of(
        st.fixed_dictionaries({"prompt": ids, "response": ids}, optional={"source": text}),
        st.builds(lambda ids: {"tokens": ids, "loss_mask": [1] * len(ids)}, ids),
        chat,
    )
    right, other = (trained, asked) if reader == "training" else (asked, trained)
    wrong = st.builds(lambda row, edits: {"row": row, "edits": edits}, right, mutations.edits(2))
    odd = st.builds(lambda v: {"value": v}, mutations.values())
    return st.one_of(*[right] * 8, other, wrong, odd)


def _id() -> SearchStrategy[Any]:
    return st.integers(0, 9) | st.text(max_size=3) | mutations.values()


def _category() -> SearchStrategy[Any]:
    return st.sampled_from(("writing", "math", "[/b]", "qa", "\x1b[31m")) | mutations.values()


def cases() -> SearchStrategy[Any]:
    return _files("bench") | _files("training")


def _files(reader: str) -> SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {
            "reader": st.just(reader),
            "rows": st.lists(_rows(reader), min_size=1, max_size=5),
            "ascii": st.booleans(),
            "end": st.sampled_from(("\n", "\r\n", "\n\n", " \n")),
        },
        optional={
            "damage": st.just([]) | st.just([]) | mutations.damages(),
            "xz": st.booleans(),
            "limit": st.integers(1, 4),
            "per_category": st.integers(1, 2),
            "max_length": st.sampled_from((2, 8, 1024)),
        },
    )


def _content(case: dict[str, Any]) -> bytes:
    lines = []
    for row in case["rows"]:
        if "edits" in row:
            row = mutations.edited({"row": row["row"]}, row["edits"]).get("row")
        elif "value" in row:
            row = mutations.expand(row["value"])
        text = mutations.dump(row)
        if not case["ascii"]:
            with suppress(RecursionError, ValueError):  # too deep to be read here
                text = json.dumps(json.loads(text), ensure_ascii=False)
        lines.append(text + case["end"])
    content = "".join(lines).encode("utf-8", "surrogatepass")
    content = lzma.compress(content, preset=0) if case.get("xz") else content
    return mutations.damaged(content, case.get("damage", []))


def _parsed(content: bytes) -> list[Any]:
    """Returns what JSON says each line is, None for those that it cannot read."""
    found: list[Any] = []
    for line in content.split(b"\n"):
        if line.strip():
            try:
                found.append(json.loads(line.decode()))
            except (ValueError, RecursionError):
                found.append(None)
    return found


def open_kind(folder: Path) -> Run:
    from tiny_target import make_tokenizer

    from spec_export.training import data
    from spec_runtime.measure.prompts import read_prompts

    folder.mkdir(exist_ok=True)
    file = folder / "data.jsonl"
    tokenizer = make_tokenizer()

    def run_training(case: dict[str, Any], content: bytes) -> None:
        with refusing():
            rows = [row for _, row in data.read_rows(file)]
            examples = data.read(file, tokenizer, case.get("max_length", 1024))
        expected = None
        if not case.get("xz"):
            expected = _parsed(content)
        if expected is not None and rows != expected and repr(rows) != repr(expected):
            raise Wrong(f"rows are not the file's: {rows!r:.300} {expected!r:.300}")
        for example in examples:
            if len(example.token_T) != len(example.loss_T) or not example.loss_T.any():
                raise Wrong(f"a useless example: {example}")

    def run_bench(case: dict[str, Any], content: bytes) -> None:
        with refusing():
            prompts = read_prompts(file, case.get("limit"), case.get("per_category"))
        rows = _parsed(content)
        texts = [json.dumps(row) for row in rows]
        for prompt in prompts:
            if json.dumps(prompt.content) not in "".join(texts):
                raise Wrong(f"a prompt that no line has: {prompt!r:.300}")
        num_asked = min(len(rows), case.get("limit", len(rows)))
        if len(prompts) > num_asked:
            raise Wrong(f"{len(prompts)} prompts of {num_asked}")
        if len(prompts) > sum(row is not None for row in rows):
            raise Wrong("a line that is not JSON became a prompt")

    def run(case: dict[str, Any]) -> None:
        content = _content(case)
        file.write_bytes(content)
        (run_training if case["reader"] == "training" else run_bench)(case, content)

    return run


__all__ = ["KIND", "Refused"]
KIND = Kind("JSON Lines", cases, open_kind, weight=14)
