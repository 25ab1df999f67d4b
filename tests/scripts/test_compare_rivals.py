"""Measures fake rivals: workers, rounds, going on after a stop, figures by hand, the command."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import spec_runtime
from spec_runtime.errors import UserError
from spec_runtime.measure.prompts import BenchPrompt
from tools.measure import compare_rivals
from tools.measure.rivals import contexts, environments, fidelity, field, race, report
from tools.measure.rivals.environments import Environment, RivalError
from tools.measure.rivals.field import OURS, PLAIN, Contender, Form, Rival
from tools.measure.rivals.race import Row
from tools.measure.rivals.worker import Answer, Worker

if TYPE_CHECKING:
    from workshop import Workshop

# Counts on from the prompt's last id, and fails in the way that its settings name.
OPEN_ENGINE = """
def open_engine(settings):
    print("a library greets")
    if settings["model"] == "missing":
        raise FileNotFoundError("no model\\nof that name")

    def generate(ids, max_new_tokens):
        if settings["model"] == "dies" and len(ids) > 2:
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(3)
        watch = protocol.Watch()
        tokens = []
        for step in range(max_new_tokens):
            tokens.append((ids[-1] + 1 + step) % 50)
            watch.tick(len(tokens))
        return watch.reply(tokens)

    return "0.1", generate
"""


@pytest.fixture
def opened(fake_rival: Path, tmp_path: Path) -> Iterator[dict[str, Worker]]:
    """Two sound workers and one that dies of the second prompt."""
    workers = {
        name: Worker([sys.executable, str(fake_rival)], settings(model), tmp_path / f"{name}.log")
        for name, model in (("one", "good"), ("two", "good"), ("bad", "dies"))
    }
    yield workers
    for worker in workers.values():
        worker.close()


def settings(model: str) -> dict[str, Any]:
    return {"model": model, "threads": 1}


# ---- one worker


def test_a_worker_answers_in_lines(opened: dict[str, Worker]) -> None:
    worker = opened["one"]
    assert worker.version == "0.1"
    answer = worker.generate([7, 8], 3)
    assert (answer.tokens, answer.first, answer.decoded) == ([9, 10, 11], 1, 2)
    assert 0 < answer.prefill_seconds < answer.seconds
    if sys.platform == "linux":
        assert 0 < worker.memory()["pss"] <= worker.memory()["peak_rss"]
        assert worker.cpu_seconds() > 0


def test_a_worker_that_fails_says_why(
    opened: dict[str, Worker], fake_rival: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    for command, model, message in (
        ([sys.executable, str(fake_rival)], "missing", "FileNotFoundError: no model of that name"),
        ([str(tmp_path / "nobody")], "good", "cannot be run"),
        ([sys.executable, "-c", "print('ready')"], "good", "got the line b'ready'"),
    ):
        with pytest.raises(RivalError, match=message):
            Worker(command, settings(model), log)
    with pytest.raises(RivalError, match="the worker ended: code 3, out of memory"):
        opened["bad"].generate([1, 2, 3], 2)
    with pytest.raises(RivalError, match="0 first of 0"):
        Answer([], 0, 0.1, 0.2)
    with pytest.raises(RivalError, match=r"prefill of 0.3 s"):
        Answer([1, 2], 1, 0.3, 0.2)


# ---- the rounds ----


def contest(rounds: int = 2) -> race.Race:
    prompts = {"p": [1, 2], "q": [1, 2, 3]}
    return race.Race("fp32", [race.Context("short", prompts)], rounds, 4)


def test_a_killed_race_goes_on_and_a_failure_stops_nobody_else(
    opened: dict[str, Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "REST_SECONDS", 0.0)
    file = tmp_path / "out.rows.jsonl"

    def kill(said: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        race.run(contest(), opened, race.Journal(file, {"n": 1}), kill)
    with open(file, "a") as torn:
        torn.write('{"precision": "fp')
    before = file.read_text().splitlines()[1:4]
    journal = race.Journal(file, {"n": 1})
    assert [row["contender"] for row in journal.rows] == ["one", "two", "bad"]
    assert not race.is_over(contest(), ["one"], journal)

    said: list[str] = []
    failed = race.run(contest(), opened, journal, said.append)
    assert failed == {"bad": "the worker ended: code 3, out of memory"}
    assert any("bad is left out" in line for line in said)
    rows = race.Journal(file, {"n": 1}).rows
    assert [json.dumps(row) for row in rows[:3]] == before, "measured again"
    assert race.is_over(contest(), ["one", "two"], race.Journal(file, {"n": 1}))
    for name in ("one", "two"):
        mine = [row for row in rows if row["contender"] == name]
        assert [(row["round"], row["prompt"]) for row in mine] == [
            (0, "p"),
            (0, "q"),
            (1, "p"),
            (1, "q"),
        ]
        assert mine[1]["tokens"] == [4, 5, 6, 7]
        assert mine[1]["prompt_tokens"] == 3
    # whose turn comes first rotates
    assert [row["contender"] for row in rows if row["round"] == 1] == ["one", "two", "two", "one"]
    with pytest.raises(UserError, match="holds answers to other settings"):
        race.Journal(file, {"n": 2})


def encode(text: str) -> list[int]:
    """A number a word, and one more for the template."""
    return [0, *(len(word) for word in text.split())]


def test_short_prompts_are_taken_evenly_and_long_ones_put_together() -> None:
    prompts = [
        BenchPrompt(number, category, " ".join(["word"] * length))
        for number, (category, length) in enumerate(
            [("qa", 3), ("qa", 4), ("qa", 5), ("rag", 30), ("rag", 9), ("rag", 20)]
        )
    ]
    assert contexts.short(prompts, encode, 3, 12).prompts == {
        "0": encode("word " * 3),
        "4": encode("word " * 9),
        "1": encode("word " * 4),
    }
    long = contexts.long(prompts, encode, 2, 40)
    assert list(long.prompts) == ["3", "4"], "only texts to read"
    assert [len(ids) for ids in long.prompts.values()] == [40, 40]
    with pytest.raises(UserError, match="got no prompt of at most 2 tokens"):
        contexts.short(prompts, encode, 3, 2)
    with pytest.raises(UserError, match=r"got prompts of 60 tokens in all.*--long-tokens"):
        contexts.long(prompts, encode, 2, 400)


# ---- figures by hand

LOOKUP = f"{OURS}, lookup"
RIVAL = "Other, plain"
WORSE = "Other, lookup"


def contender(name: str, weights: str = "float32") -> Contender:
    engine, mode = name.split(", ")
    return Contender(name, engine, mode, weights, ("python",), {"threads": 1})


CONTENDERS = [
    contender(f"{OURS}, {PLAIN}"),
    contender(LOOKUP),
    contender(RIVAL),
    contender(WORSE, "rounded"),
]


def row(name: str, number: int, prompt: str, tokens: list[int], seconds: float) -> Row:
    """A job of one second of prefill, which gives one token, and of `seconds` in all."""
    return {
        "precision": "fp32",
        "context": "short",
        "round": number,
        "prompt": prompt,
        "contender": name,
        "tokens": tokens,
        "first": 1,
        "prefill_seconds": 1.0,
        "seconds": seconds,
        "prompt_tokens": 10,
        "others_cpu_seconds": 0.01,
        "version": "1.2",
        "peak_rss": 3_000_000,
        "pss": 2_000_000,
    }


def rows() -> list[Row]:
    """Two rounds of two prompts. In decoding, our plain mode gives 4 tokens a second, our lookup 8
    and then 10, the rival 5 in both; its lookup 2, in other words."""
    text = list(range(11))  # 10 tokens of decoding
    found = []
    for number, lookup_seconds in enumerate((1.25, 1.0)):
        for prompt in ("a", "b"):
            found += [
                row(CONTENDERS[0].name, number, prompt, text, 3.5),
                row(LOOKUP, number, prompt, text, 1 + lookup_seconds),
                row(RIVAL, number, prompt, text, 3.0),
                row(WORSE, number, prompt, [0, 1, 2, 99, *range(7)], 6.0),
            ]
    return found


def test_speeds_ratios_and_agreement_by_hand() -> None:
    found = report.summarise(rows(), CONTENDERS, {"short": {WORSE: 0.25, LOOKUP: 1.0}})["short"]
    lookup, worse = found[LOOKUP], found[WORSE]
    speed = {"median": 9.0, "least": 8.0, "greatest": 10.0, "by_round": [8.0, 10.0]}
    assert lookup["tokens_per_second"] == speed
    assert (lookup["prefill_ms"]["median"], lookup["peak_rss"]) == (1000, 3_000_000)
    assert lookup["repeats_itself"]
    for key in ("same_engine", "same_weights"):
        assert lookup[key]["reference"] == "specsplit, plain"
        assert (lookup[key]["identical"], lookup[key]["prompts"]) == (2, 2)
    assert worse["same_weights"] is None, "nobody else has them"
    difference = {"prompt": "a", "position": 3, "expected": 3, "got": 99}
    assert worse["same_engine"]["differences"][0] == difference
    best, plain, prefill = report.aims("fp32", {"short": found})
    assert (best["ours"], best["rival"]) == (LOOKUP, RIVAL)
    assert (best["ratio"], best["least"], best["greatest"]) == (9 / 5, 8 / 5, 10 / 5)
    assert (plain["ratio"], prefill["ratio"]) == (4 / 5, 1)
    line = "| Other, lookup | short | 2.0 (2.0 to 2.0) | 1000 | 3 | 2 | 0 of 2 |  | 25.0% |"
    assert report.table("fp32", {"short": found}).splitlines()[-1] == line
    ended = report.compare({"p": [1, 2, 3], "q": [1]}, {"p": [1, 2], "r": [5]})
    assert ended["differences"] == [{"prompt": "p", "position": 2, "expected": 3, "got": None}]
    others = rows()
    others[-1] = {**others[-1], "tokens": [5, 6]}
    assert not report.summarise(others, CONTENDERS)["short"][WORSE]["repeats_itself"]


def test_a_token_that_fp32_would_not_choose_counts_once(workshop: Workshop) -> None:
    bundle = workshop.bundle("parallelspec")
    engine = spec_runtime.load(bundle, "none")
    text = engine.generate([5, 6, 7], max_new_tokens=40, ignore_eos=True).token_ids
    worse = [*text[:-1], (text[-1] + 1) % 64]
    rows = [
        row("one", 0, "p", [1], 2.0),
        row("one", 1, "p", text, 2.0),
        row("two", 1, "p", worse, 2.0),
        {**row("one", 1, "p", worse, 2.0), "context": "long"},
    ]
    asked = [race.Context(name, {"p": [5, 6, 7]}) for name in ("short", "long", "empty")]
    found = fidelity.choices(bundle, 1, asked, rows)
    assert found == {"short": {"one": 1, "two": 39 / 40}, "long": {"one": 39 / 40}}


# ---- environments


def test_an_environment_is_made_once_and_anew_for_other_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(environments, "run", lambda command, cwd=None: ran.append(command))
    first = Environment("one", (("torch==1",), ("torch==1", "engine==2.0")))
    first.make(tmp_path)
    assert [command[-1] for command in ran] == [
        str(first.folder(tmp_path)),
        "torch==1",
        "engine==2.0",
    ]
    first.make(tmp_path)
    assert len(ran) == 3
    assert replace(first, steps=(("engine==2.1",),)).version == "2.1"
    replace(first, steps=(("engine==2.1",),)).make(tmp_path)
    assert len(ran) == 5


def test_versions_are_pinned() -> None:
    for rival in field.RIVALS:
        for step in rival.environment.steps:
            assert all("==" in word or "@" in word for word in step), rival.name
        assert (field.WORKERS / rival.worker).is_file()
        assert set(rival.forms) <= set(field.PRECISIONS)
    code = "print('a\\nno such version\\n'); raise SystemExit(4)"
    with pytest.raises(RivalError, match="ended with code 4: no such version"):
        environments.run([sys.executable, "-c", code])


# ---- the command ----


def test_the_command_measures_ours_and_names_who_fails(
    workshop: Workshop,
    fake_rival: Path,
    made: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ours are real workers on a tiny bundle; the rivals are fakes."""
    there = Environment("there", (("there==1",),))
    form = {"fp32": Form("others", lambda files: Path("good"))}
    rivals = (
        Rival("there", "There", there, str(fake_rival), ("plain",), form),
        Rival("gone", "Gone", replace(there, name="nowhere"), str(fake_rival), ("plain",), form),
    )
    monkeypatch.setattr(compare_rivals, "RIVALS", rivals)
    monkeypatch.setattr(field, "OUR_MODES", {"plain": ("none", None), "drafter": (None, True)})
    monkeypatch.setattr(race, "REST_SECONDS", 0.0)
    (tmp_path / "fp32").symlink_to(workshop.bundle("parallelspec"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "say abc, abc, abc"}) + "\n")
    out = tmp_path / "out.json"
    paths = {"--prompts": prompts, "--bundles": tmp_path, "--json": out, "--work": tmp_path / "w"}
    paths |= {"--model": workshop.llama(), "--figure": tmp_path / "out.svg"}
    words = [str(word) for pair in paths.items() for word in pair]
    words += ["--precision", "fp32", "--long-limit", "0", "--rounds", "2"]
    args = compare_rivals.parser().parse_args([*words, "--max-new-tokens", "6", "--threads", "1"])
    args.rival = ["there", "gone"]
    compare_rivals.run(args)
    found = json.loads(out.read_text())
    contenders = found["precisions"]["fp32"]["short"]
    assert list(contenders) == ["specsplit, plain", "specsplit, drafter", "There, plain"]
    assert contenders["specsplit, drafter"]["same_engine"]["identical"] == 1
    assert contenders["specsplit, drafter"]["fp32_choices"] == 1
    assert contenders["There, plain"]["fp32_choices"] < 1
    assert [each["reason"] for each in found["failed"]] == ["no such package"]
    assert made == ["there"]
    assert found["versions"]["there"] == "0.1"
    shown = capsys.readouterr().out
    assert "not measured: Gone, fp32: no such package" in shown
    assert "fp32, short prompts, best mode: " in shown.splitlines()[-3]
    assert "waiting workers used at most" in shown
    assert ElementTree.parse(tmp_path / "out.svg").getroot().tag.endswith("svg")
    assert len((tmp_path / "out.rows.jsonl").read_text().splitlines()) == 1 + 2 * 3

    monkeypatch.setattr(compare_rivals, "Worker", None)  # what is over is not opened again
    compare_rivals.run(args)
    again = json.loads(out.read_text())
    assert again["precisions"] == found["precisions"]
    assert again["versions"] == found["versions"]
    args.max_new_tokens = 100_000
    with pytest.raises(UserError, match="and 100000 new ones, expected at most"):
        compare_rivals.run(args)
