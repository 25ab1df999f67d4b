"""The tool that measures other engines: workers, rounds, resuming, figures by hand, the command."""

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

import rival_rows

import spec_runtime
from spec_runtime.measure.prompts import BenchPrompt
from tools.measure import compare_rivals
from tools.measure.rivals import contexts, environments, fidelity, field, race, report
from tools.measure.rivals.environments import Environment, RivalError
from tools.measure.rivals.field import Form, Options, Rival
from tools.measure.rivals.worker import Answer, Worker

if TYPE_CHECKING:
    from workshop import Workshop

# Counts on from the prompt's last id, and fails in the way that its settings name.
FAKE = f"""
import os, sys
sys.path.insert(0, {str(field.WORKERS)!r})
import protocol

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

protocol.serve(open_engine)
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    file = tmp_path / "fake_worker.py"
    file.write_text(FAKE)
    return file


@pytest.fixture
def opened(fake: Path, tmp_path: Path) -> Iterator[dict[str, Worker]]:
    """Two sound workers and one that dies of the second prompt."""
    workers = {
        name: Worker([sys.executable, str(fake)], settings(model), tmp_path / f"{name}.log")
        for name, model in (("one", "good"), ("two", "good"), ("bad", "dies"))
    }
    yield workers
    for worker in workers.values():
        worker.close()


def settings(model: str) -> dict[str, Any]:
    return {"model": model, "threads": 1}


# ---- one worker ----


def test_a_worker_answers_in_lines(opened: dict[str, Worker]) -> None:
    worker = opened["one"]
    assert worker.version == "0.1"
    for _ in range(2):
        answer = worker.generate([7, 8], 3)
        assert answer.tokens == [9, 10, 11]
        assert (answer.first, answer.decoded) == (1, 2)
        assert 0 < answer.prefill_seconds < answer.seconds
    if sys.platform == "linux":
        sizes = worker.memory()
        assert sizes["peak_rss"] > 5e6
        assert 0 < sizes["pss"] <= sizes["peak_rss"]
        assert worker.cpu_seconds() > 0


def test_a_worker_that_cannot_open_its_model_says_so_in_a_line(fake: Path, tmp_path: Path) -> None:
    with pytest.raises(RivalError, match=r"^FileNotFoundError: no model of that name$"):
        Worker([sys.executable, str(fake)], settings("missing"), tmp_path / "log")
    assert "Traceback" in (tmp_path / "log").read_text()
    with pytest.raises(RivalError, match="cannot be run"):
        Worker([str(tmp_path / "nobody")], settings("good"), tmp_path / "log")


def test_a_worker_that_ends_leaves_its_last_words(opened: dict[str, Worker]) -> None:
    with pytest.raises(RivalError, match="the worker ended: code 3, out of memory"):
        opened["bad"].generate([1, 2, 3], 2)


def test_a_worker_that_babbles_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RivalError, match="got the line b'ready'"):
        Worker([sys.executable, "-c", "print('ready')"], settings("good"), tmp_path / "log")
    short = "import sys; print('{}', flush=True); input(); print('{\"tokens\": [1]}', flush=True)"
    worker = Worker([sys.executable, "-c", short], settings("good"), tmp_path / "log")
    with pytest.raises(RivalError, match="got a reply with tokens: KeyError"):
        worker.generate([1], 1)
    worker.close()


@pytest.mark.parametrize(
    ("values", "message"),
    [(([], 0, 0.1, 0.2), "0 first of 0"), (([1, 2], 1, 0.3, 0.2), "prefill of 0.3 s")],
)
def test_an_impossible_answer_is_refused(values: Any, message: str) -> None:
    with pytest.raises(RivalError, match=message):
        Answer(*values)


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
    with pytest.raises(ValueError, match="holds answers to other settings"):
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
    with pytest.raises(ValueError, match="got no prompt of at most 2 tokens"):
        contexts.short(prompts, encode, 3, 2)
    with pytest.raises(ValueError, match=r"got prompts of 60 tokens in all.*--long-tokens"):
        contexts.long(prompts, encode, 2, 400)


# ---- figures by hand ----


def test_speeds_ratios_and_agreement_by_hand() -> None:
    figures = rival_rows.figures()
    found = figures["precisions"]["fp32"]["short"]
    lookup = found[rival_rows.LOOKUP]
    assert lookup["tokens_per_second"] == {
        "median": 9.0,
        "least": 8.0,
        "greatest": 10.0,
        "by_round": [8.0, 10.0],
    }
    assert lookup["prefill_ms"]["median"] == 1000
    assert lookup["peak_rss"] == 3_000_000
    assert lookup["repeats_itself"]
    assert lookup["others_cpu_share"] == 0.01 / 2.0
    for key in ("same_engine", "same_weights"):
        assert lookup[key]["reference"] == "specsplit, plain"
        assert (lookup[key]["identical"], lookup[key]["prompts"]) == (2, 2)
    worse = found[rival_rows.WORSE]
    assert worse["same_weights"] is None, "nobody else has them"
    assert worse["same_engine"]["reference"] == rival_rows.RIVAL
    assert worse["same_engine"]["identical"] == 0
    difference = {"prompt": "a", "position": 3, "expected": 3, "got": 99}
    assert worse["same_engine"]["differences"][0] == difference
    assert (worse["fp32_choices"], lookup["fp32_choices"]) == (0.25, 1)
    best, plain, prefill = figures["best"]
    assert (best["ours"], best["rival"]) == (rival_rows.LOOKUP, rival_rows.RIVAL)
    assert (best["ratio"], best["least"], best["greatest"]) == (9 / 5, 8 / 5, 10 / 5)
    assert (plain["ours"], plain["ratio"]) == ("specsplit, plain", 4 / 5)
    assert prefill["ratio"] == 1
    assert report.aim_lines([best]) == [
        "fp32, short prompts, best mode: 1.80 (1.60 to 2.00), specsplit, lookup over Other, plain"
    ]
    shown = report.table("fp32", {"short": found}).splitlines()
    line = "| Other, lookup | short | 2.0 | 2.0 to 2.0 | 1000 | 3 | 2 | 0 of 2 |  | 25.0% |"
    assert shown[-1] == line


def test_a_text_that_ends_earlier_is_a_difference() -> None:
    found = report.compare({"p": [1, 2, 3], "q": [1]}, {"p": [1, 2], "r": [5]})
    assert found["prompts"] == 1
    assert found["differences"] == [{"prompt": "p", "position": 2, "expected": 3, "got": None}]


def test_a_text_that_changes_from_round_to_round_is_seen() -> None:
    rows = rival_rows.rows()
    rows[-1] = {**rows[-1], "tokens": [5, 6]}
    found = report.summarise(rows, rival_rows.CONTENDERS)["short"]
    assert not found[rival_rows.WORSE]["repeats_itself"]
    assert found[rival_rows.RIVAL]["repeats_itself"]


def test_a_token_that_fp32_would_not_choose_counts_once(workshop: Workshop) -> None:
    bundle = workshop.bundle("parallelspec")
    engine = spec_runtime.load(bundle, "none")
    text = engine.generate([5, 6, 7], max_new_tokens=40, ignore_eos=True).token_ids
    worse = [*text[:-1], (text[-1] + 1) % 64]
    rows = [
        rival_rows.row("one", 0, "p", [1], 2.0),
        rival_rows.row("one", 1, "p", text, 2.0),
        rival_rows.row("two", 1, "p", worse, 2.0),
        {**rival_rows.row("one", 1, "p", worse, 2.0), "context": "long"},
    ]
    asked = [race.Context(name, {"p": [5, 6, 7]}) for name in ("short", "long", "empty")]
    found = fidelity.choices(bundle, 1, asked, rows)
    assert found == {"short": {"one": 1, "two": 39 / 40}, "long": {"one": 39 / 40}}


# ---- environments and the field ----


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


def test_an_environment_below_a_relative_folder_is_installed_by_its_own_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip runs in the environment's folder, where a relative path would lead nowhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Environment, "_install", lambda self, work, step: [program(self), "-V"])

    def program(environment: Environment) -> str:
        return str(environment.program(Path("work")))

    Environment("one", (("engine==2.0",),)).make(Path("work"))
    assert (tmp_path / "work" / "environments" / "one" / environments.STAMP).is_file()


def test_what_an_installer_says_last_is_the_reason() -> None:
    code = "print('a\\nno such version\\n'); raise SystemExit(4)"
    with pytest.raises(RivalError, match="ended with code 4: no such version"):
        environments.run([sys.executable, "-c", code])


def test_versions_are_pinned_and_everybody_missing_has_a_reason() -> None:
    for rival in field.RIVALS:
        for step in rival.environment.steps:
            assert all("==" in word or "@" in word for word in step), rival.name
        assert rival.environment.version[0].isdigit()
        assert (field.WORKERS / rival.worker).is_file()
        assert set(rival.forms) <= set(field.PRECISIONS)
    options = Options(1, (2,), 256, 5, 3, True, None)
    transformers = field.RIVALS[0]
    assert "assisted" in transformers.modes
    assert field.modes(transformers, options) == ("plain", "lookup")
    assert "assisted" in field.modes(transformers, replace(options, assistant=Path("draft")))


# ---- the command ----


def test_the_command_measures_ours_and_names_who_fails(
    workshop: Workshop,
    fake: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ours are real workers on a tiny bundle; the rivals are fakes."""
    there = Environment("there", (("there==1",),))
    made: list[str] = []

    def make(environment: Environment, work: Path) -> None:
        if environment.name == "nowhere":
            raise RivalError("no such package")
        made.append(environment.name)

    monkeypatch.setattr(Environment, "make", make)
    monkeypatch.setattr(Environment, "program", lambda environment, work: Path(sys.executable))
    form = {"fp32": Form("others", lambda files: Path("good"))}
    rivals = (
        Rival("there", "There", there, str(fake), ("plain",), form),
        Rival("gone", "Gone", replace(there, name="nowhere"), str(fake), ("plain",), form),
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
    assert compare_rivals.run(args) == 0
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
    assert compare_rivals.run(args) == 0
    again = json.loads(out.read_text())
    assert again["precisions"] == found["precisions"]
    assert again["versions"] == found["versions"]


def test_texts_too_short_for_a_long_prompt_are_refused(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fp32").symlink_to(workshop.bundle("parallelspec"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "word " * 40}) + "\n")
    paths = {"--prompts": prompts, "--bundles": tmp_path, "--json": tmp_path / "out.json"}
    paths["--model"] = workshop.llama()
    words = [str(word) for pair in paths.items() for word in pair]
    assert compare_rivals.main([*words, "--precision", "fp32", "--long-tokens", "100000"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: got ")
    assert "--long-tokens" in error
    words += ["--precision", "fp32", "--long-limit", "0", "--max-new-tokens", "100000"]
    assert compare_rivals.main(words) == 2
    assert "and 100000 new ones, expected at most" in capsys.readouterr().err


def test_contenders_have_their_settings(tmp_path: Path) -> None:
    options = Options(2, (2,), 256, 5, 3, False, None)
    ours = {each.mode: each for each in field.ours(tmp_path, "int8", options)}
    assert [each.is_ours for each in ours.values()] == [True] * 4
    assert ours["plain"].settings["drafter"] == "none"
    both = ours["drafter + lookup"].settings
    assert (both["drafter"], both["lookup"], both["profile"]) == (None, True, False)
    assert both["threads"] == 2
