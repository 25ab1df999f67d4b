"""The tools around training data: broad prompts, overlap with evaluation files, provenance."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

TOOLS = Path(__file__).parents[1] / "tools"


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


broad_prompts, overlap, data_summary = map(tool, ("broad_prompts", "overlap", "data_summary"))


class Letters:
    """Decodes ids as the letters a, b, c …, a word each."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"w{i}" for i in ids)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---- overlap ----

SENTENCE = "The quick brown fox doesn't jump over the lazy dog, but it sleeps all day."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"Summarize: {SENTENCE.upper()}", True),
        ("quick brown fox doesnt jump over the lazy dog but it sleeps all", True),
        ("quick brown fox doesnt jump over the lazy dog but it sleeps", False),  # 12 words
        ("First, who wrote this famous book? Tell me.", True),  # a short text as a whole
        ("Who wrote this old famous book?", False),
        ("Yes or no", False),  # four words and fewer are in any text
        ("", False),
    ],
)
def test_overlap_is_thirteen_words_or_a_whole_short_text(text: str, expected: bool) -> None:
    index = overlap.Index([SENTENCE, "Who wrote this famous book?", "yes or no"])
    assert index.overlaps(text) is expected


def test_overlap_counts_prompts_and_answers_apart(tmp_path: Path) -> None:
    shared = list(range(13))
    eval_file = write(tmp_path / "eval.jsonl", {"turns": ["x", Letters().decode(shared)]})
    index = overlap.Index(overlap.evaluation_texts([eval_file]))
    clean = {"prompt": [1, 2], "response": [3], "source": "a"}
    path = write(
        tmp_path / "rows.jsonl",
        clean,
        {"prompt": [99, *shared], "response": [3], "source": "a"},
        {"prompt": [1], "response": shared, "source": "b"},
        {"turns": [{"prompt": [1], "response": [2]}, {"prompt": shared, "response": shared}]},
        {"turns": ["hello", "w0 w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 and"], "source": "a"},
        {"messages": [{"role": "assistant", "content": Letters().decode(shared)}]},
        {"tokens": [5, *shared], "loss_mask": [1] + [0] * 13},
    )
    counts, left = overlap.compare(path, index, Letters())
    assert left == [clean]
    assert counts["a"] == overlap.Counts(rows=3, prompts=2, answers=0, either=2)
    assert counts["b"] == overlap.Counts(rows=1, prompts=0, answers=1, either=1)
    assert counts[""] == overlap.Counts(rows=3, prompts=2, answers=2, either=3)
    assert overlap.total(counts.values()) == overlap.Counts(7, 4, 3, 6)


# ---- prompts ----


def small_material(seeds: Path) -> Any:
    wording = broad_prompts.tomllib.loads(broad_prompts.WORDING.read_text(encoding="utf-8"))
    passages = [
        broad_prompts.Passage(f"Passage {i} tells of a town. " * 12, origin, question)
        for i in range(40)
        for origin, question in (("quoref", f"Which town is {i}?"), ("answers", None))
    ]
    functions = [broad_prompts.Passage(FUNCTION.replace("1", str(i)), "python") for i in range(9)]
    pairs = [
        broad_prompts.Pair(f"Das ist Satz {i}.", "de", "django", f"This is sentence {i}.")
        for i in range(40)
    ]
    return broad_prompts.Material(seeds, passages, functions, pairs, wording)


FUNCTION = '''def add(a):
    """Returns more by 1."""
    b = a
    return b + 1'''


def test_prompts_are_the_same_for_a_seed_and_of_every_kind(tmp_path: Path) -> None:
    write(tmp_path / "gsm8k_train.jsonl", *({"question": f"{i}?", "answer": "1"} for i in range(9)))
    tables = {"question": "How many?", "context": "CREATE TABLE t (a number)"}
    write(tmp_path / "spider_dev_with_schema.jsonl", tables)
    write(tmp_path / "nq_open_dev.jsonl", {"question": "who is who"})
    material = small_material(tmp_path)
    prompts = broad_prompts.draw(material, 200, 3, lambda text: len(text) < 3000)
    assert prompts == broad_prompts.draw(material, 200, 3, lambda text: len(text) < 3000)
    assert prompts != broad_prompts.draw(material, 200, 4, lambda text: len(text) < 3000)
    assert {p.kind for p in prompts} == set(broad_prompts.SHARES)
    assert len({p.text for p in prompts}) == len(prompts) > 150
    assert all(len(p.text) < 3000 for p in prompts)
    # No name of a list, and no place for a text, is left.
    left = [p.text for p in prompts if "{" in p.text and p.kind not in ("code", "json")]
    assert not left
    rows = [broad_prompts.row_of(prompt) for prompt in prompts]
    broad_prompts.write(rows, material.wording["licences"], tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    sources = json.loads((tmp_path / "out.jsonl.sources.json").read_text())
    assert {row["source"] for row in rows} == set(sources)
    assert sum(entry["prompts"] for entry in sources.values()) == len(rows)
    assert sources["maths/gsm8k"]["licence"] == "MIT"


def test_follow_ups_are_different_messages_behind_the_prompt(tmp_path: Path) -> None:
    wording = small_material(tmp_path).wording
    rows = [{"prompt": f"Ask {i}", "source": "lists/own"} for i in range(30)]
    chats = broad_prompts.with_follow_ups(rows, wording, 2, 0)
    assert chats == broad_prompts.with_follow_ups(rows, wording, 2, 0)
    assert [chat["turns"][0] for chat in chats] == [row["prompt"] for row in rows]
    assert {len(set(chat["turns"])) for chat in chats} == {3}
    assert not [chat for chat in chats if "{" in "".join(chat["turns"])]


def test_prompts_without_seeds_are_the_projects_own(tmp_path: Path) -> None:
    material = broad_prompts.Material(tmp_path, [], [], [], small_material(tmp_path).wording)
    prompts = broad_prompts.draw(material, 100, 0, lambda text: True)
    assert {p.origin for p in prompts} == {"own"}
    assert len(prompts) > 20


def test_a_catalogue_gives_sentences_without_markup(tmp_path: Path) -> None:
    path = tmp_path / "a.po"
    path.write_text(
        'msgid "Use :func:`open` and\\n"\nmsgstr ""\n\n'
        'msgid ""\n"Use :func:`open`, not *this*."\nmsgstr "Nimm :func:`open`."\n\n'
        '#, fuzzy\nmsgid "No"\nmsgstr "Ja"\n\n'
        'msgid "%d files"\nmsgstr "%d Dateien"\n'
    )
    assert list(broad_prompts.catalogue(path)) == [("Use open, not this.", "Nimm open.")]


def test_code_to_write_has_no_body_and_code_to_explain_no_docstring() -> None:
    assert broad_prompts.without_body(FUNCTION) == "\n".join(FUNCTION.splitlines()[:2])
    assert broad_prompts.without_docstring(FUNCTION).splitlines()[1] == "    b = a"


# ---- provenance ----


def test_tokens_are_summed_by_source_licence_temperature_and_turns(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.jsonl",
        {"prompt": [5, 6], "response": [7, 8, 1], "source": "maths/gsm8k", "temperature": 0.7},
        {"turns": [{"prompt": [5], "response": [7, 1]}, {"prompt": [6], "response": [9]}]},
        {"prompt": [5], "response": [7, 1], "source": "elsewhere"},
    )
    sidecar = {"settings": {"temperature": 0.0}}
    (tmp_path / "rows.jsonl.state.json").write_text(json.dumps(sidecar))
    tables = data_summary.summarize([path], {1})
    Totals = data_summary.Totals
    assert tables["all"] == {"all": Totals(3, 5, 4, 8, 1)}
    assert tables["temperature"] == {"0.7": Totals(1, 2, 1, 3, 0), "0.0": Totals(2, 3, 3, 5, 1)}
    assert tables["turns"] == {"1": Totals(2, 3, 2, 5, 0), "2": Totals(1, 2, 2, 3, 1)}
    assert set(tables["licence"]) == {"MIT", "unknown", "as the target (Apache-2.0 for the demo)"}
    assert tables["all"]["all"].figures()["cut"] == 0.25
    with pytest.raises(ValueError, match=r"rows.jsonl:1: not a row of distill"):
        data_summary.summarize([write(path, {"prompt": "text"})], {1})
