"""Lets many clients ask fake rivals and a tiny bundle, and computes figures by hand."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

from spec_export.model import target
from spec_runtime.errors import UserError
from tools.docs import render, results
from tools.measure import many_clients
from tools.measure.rivals import crowd, environments, field, race
from tools.measure.rivals.environments import Environment, RivalError
from tools.measure.rivals.field import OURS, PLAIN, Contender, Form, Options, Rival
from tools.measure.rivals.models import TargetFiles
from tools.measure.rivals.race import Row
from tools.measure.rivals.worker import Worker

if TYPE_CHECKING:
    from workshop import Workshop

# Counts on from each prompt's last id, in parts of one token and then of two, client by client.
OPEN_ENGINE = """
def open_engine(settings):
    def answer(prompts, clients, max_new_tokens):
        load = protocol.Load(prompts)
        while running := [each for each in (load.take() for _ in range(clients)) if each]:
            for one, ids in running:
                tokens = [(ids[-1] + 1 + step) % 50 for step in range(max_new_tokens)]
                load.add(one, tokens[:1])
                for begin in range(1, max_new_tokens, 2):
                    load.add(one, tokens[begin:begin + 2])
        return load.reply()

    return "0.1", answer
"""


# ---- loads ----


def a_crowd(rounds: int = 2) -> crowd.Crowd:
    contexts = [
        race.Context("short", {"p": [1, 2], "q": [1, 7]}),
        race.Context("long", {"r": [5] * 9}),
    ]
    clients = {"short": [1, 3], "long": [2]}
    return crowd.Crowd(contexts, clients, {"short": 2, "long": 1}, 3, rounds, 4)


def test_every_load_is_answered_once_whose_turn_is_first_rotates(
    fake_rival: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "REST_SECONDS", 0.0)
    loads = a_crowd()
    short, long = loads.contexts
    assert loads.prompts(short, 3) == ["p", "q"] * 3
    assert loads.prompts(short, 1) == ["p", "q", "p"], "at least three"
    assert loads.prompts(long, 2) == ["r"] * 3
    command = [sys.executable, str(fake_rival)]
    workers = {name: Worker(command, {"threads": 1}, tmp_path / name) for name in ("one", "two")}
    journal = race.Journal(tmp_path / "rows", {})
    try:
        assert crowd.run(loads, workers, journal, lambda said: None) == {}
        assert crowd.run(loads, workers, journal, lambda said: None) == {}, "all is there"
    finally:
        for worker in workers.values():
            worker.close()
    assert len(journal.rows) == 2 * 3 * 2
    assert crowd.is_over(loads, ["one", "two"], journal)
    assert not crowd.is_over(a_crowd(3), ["one"], journal)
    assert not crowd.is_over(loads, ["three"], journal)
    begun = [row["contender"] for row in journal.rows[::2]]
    assert begun == ["one", "two", "one", "two", "one", "two"]
    answers = journal.rows[2]["answers"]
    assert [answer["tokens"] for answer in answers] == [[3, 4, 5, 6], [8, 9, 10, 11]] * 3
    assert [count for _, count in answers[0]["parts"]] == [1, 2, 1]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"seconds": 1.0}, "got a reply with seconds: KeyError"),
        ({"seconds": 1.0, "answers": []}, r"got answers of \[\] tokens, .* expected 1 of 2"),
        (
            {"seconds": 1.0, "answers": [{"sent": 0, "parts": [[0.5, 1]], "tokens": [1, 2]}]},
            r"in parts of \[1\]",
        ),
        (
            {"seconds": 1.0, "answers": [{"sent": 0, "parts": [[1.5, 2]], "tokens": [1, 2]}]},
            "got times up to 1.5 s in a load of 1.0 s",
        ),
    ],
)
def test_a_load_that_nobody_can_have_answered_so_is_refused(
    reply: dict[str, Any], message: str
) -> None:
    with pytest.raises(RivalError, match=message):
        crowd.checked(reply, 1, 2)


# ---- figures by hand

RIVAL = "Other, plain"
NAMES = (crowd.BEFORE, f"{OURS}, {crowd.LANES}", f"{OURS}, {crowd.LANES}, {PLAIN}", RIVAL)
CONTENDERS = [
    Contender(name, name.partition(", ")[0], "", "float32", (), {"threads": 1}) for name in NAMES
]


def row(name: str, number: int, seconds: float, *texts: list[int]) -> Row:
    """Answers in a row, sent a tenth of a second apart: a token after 0.2 s, two 0.1 s later, and
    the fourth 0.3 s after these."""
    answers = [
        {
            "sent": 0.1 * at,
            "parts": [[0.1 * at + 0.2, 1], [0.1 * at + 0.3, 2], [0.1 * at + 0.6, 1]],
            "tokens": tokens,
        }
        for at, tokens in enumerate(texts)
    ]
    keys = {"context": "short", "clients": 2, "round": number, "contender": name}
    return {**keys, "seconds": seconds, "answers": answers, "prompts": ["p", "q"], "peak_rss": 5}


def test_speeds_gaps_and_agreement_by_hand() -> None:
    texts = [1, 2, 3, 4], [5, 6, 7, 8]
    rows = []
    for number, times in enumerate(((4.0, 2.0, 2.5, 4.0), (2.0, 0.5, 1.0, 1.0))):
        seconds = dict(zip(NAMES, times, strict=True))
        rows += [row(name, number, seconds[name], *texts) for name in NAMES[:3]]
        rows.append(row(RIVAL, number, seconds[RIVAL], texts[0], [5, 6, 0, 0]))
    before, lanes, plain, rival = found = crowd.summarise(rows[::-1], CONTENDERS)
    assert before["tokens_per_second"] == {"median": 3.0, "least": 2.0, "greatest": 4.0}
    assert lanes["tokens_per_second"] == {"median": 10.0, "least": 4.0, "greatest": 16.0}
    assert lanes["gain"] == {"median": 3.0, "least": 2.0, "greatest": 4.0}
    assert (plain["answers"], plain["peak_rss"], plain["ours"]) == (4, 5, True)
    assert lanes["first_ms"] == {key: pytest.approx(200) for key in ("median", "p95")}
    assert lanes["gap_ms"] == {
        "median": pytest.approx(200),
        "p99": pytest.approx(300),
        "longest": pytest.approx(300),
    }
    assert lanes["as_alone"] == {"prompts": 4, "identical": 4, "parted": []}
    parted = [{"prompt": "q", "position": 2}] * 2
    assert rival["as_alone"] == {"prompts": 4, "identical": 2, "parted": parted}
    (line,) = crowd.best(found)
    assert line["over_rival"] == 10 / 5
    assert line["over_plain"] == pytest.approx(10 / ((8 / 2.5 + 8) / 2))
    assert crowd.best_line(line) == (
        "short, 2 clients: lanes 2.00 over Other, plain, 1.79 over no drafting"
    )
    assert crowd.best(found[:1]) == []
    last = (
        "| Other, plain | short | 2 | 5.0 (2.0 to 8.0) | 1.50 | 200 | 200 | 200 | 300 | 300 | "
        "2 of 4 |"
    )
    assert crowd.table(found).splitlines()[-1] == last
    columns = render.columns_for(render.TABLES["many_clients_best"]["columns"], [line])
    shown = [results.cell(template, line) for _, template in columns]
    assert shown == ["short", "2", "Other, plain", "2.00", "1.79"]


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
    rivals = [
        Rival("openvino", "There", there, str(fake_rival), (PLAIN,), form),
        Rival("llama.cpp", "Gone", replace(there, name="nowhere"), str(fake_rival), (PLAIN,), form),
    ]
    monkeypatch.setattr(crowd, "rivals", lambda precision: rivals)
    monkeypatch.setattr(crowd, "REST_SECONDS", 0.0)
    prompts = tmp_path / "prompts.jsonl"
    asked = ("say abc, abc, abc", "say xyz", "one two. one two.")
    prompts.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in asked))
    out = tmp_path / "out.json"
    paths = {"--prompts": prompts, "--bundle": workshop.bundle("parallelspec"), "--json": out}
    paths |= {"--model": workshop.llama(), "--work": tmp_path / "w"}
    words = [str(word) for pair in paths.items() for word in pair]
    words += ["--clients", "1", "3", "--long-limit", "0", "--rounds", "2", "--threads", "1"]
    words += ["--max-new-tokens", "6", "--parallel", "2"]
    many_clients.main(words)
    found = json.loads(out.read_text())
    assert found["precision"] == "fp32"
    rows = {(each["contender"], each["clients"]): each for each in found["rows"]}
    names = [*NAMES[:3], "There, plain"]
    assert list(rows) == [(name, clients) for name in names for clients in (1, 3)]
    for (name, clients), each in rows.items():
        answers = 2 * max(2, 2 * clients)
        assert each["answers"] == each["as_alone"]["prompts"] == answers
        if name.startswith(OURS):
            assert each["as_alone"]["identical"] == answers
    assert [each["reason"] for each in found["failed"]] == ["no such package"]
    assert made == ["there"]
    assert found["versions"]["There, plain"] == "0.1"
    assert "not measured: Gone, fp32: no such package" in capsys.readouterr().out
    assert len((tmp_path / "out.rows.jsonl").read_text().splitlines()) == 1 + 2 * 2 * 4

    monkeypatch.setattr("tools.measure.compare_rivals.Worker", None)  # what is over stays closed
    many_clients.main(words)
    assert json.loads(out.read_text())["rows"] == found["rows"]
    with pytest.raises(UserError, match="and 100000 new ones, expected at most"):
        many_clients.main([*words, "--max-new-tokens", "100000"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["openvino", "llama.cpp"])
def test_a_rival_that_is_installed_answers_several_at_a_time(name: str, tmp_path: Path) -> None:
    """The demo as Q8_0, in whatever modes the rival has; each answer is as long as it should be."""
    work = Path(__file__).parents[2] / "runs/rivals"
    rival = next(each for each in crowd.rivals("int8") if each.name == name)
    if not (rival.environment.folder(work) / environments.STAMP).is_file():
        pytest.skip(f"{rival.title} is not installed under runs/rivals, see many_clients.py")
    files = TargetFiles(target.resolve(None), work)
    options = Options(1, (2,), 256, 5, 3, profile=False)
    for each in field.of_rival(rival, "int8", files, options):
        worker = Worker(each.command, each.settings, tmp_path / "log")
        try:
            prompts = [[1, 9, 8, 7], [1, 20, 21, 20, 21, 20], [1, 30, 31, 32]]
            job = {"prompts": prompts, "clients": 2, "max_new_tokens": 5}
            answers = crowd.checked(worker.ask(job), 3, 5)["answers"]
        finally:
            worker.close()
        assert answers[2]["sent"] > 0 == answers[0]["sent"]
