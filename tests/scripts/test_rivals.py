"""Measures fake rivals: workers, rounds, going on after a stop, figures by hand, both commands."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import spec_runtime
from spec_export.model import target
from spec_runtime.errors import UserError
from spec_runtime.measure.prompts import BenchPrompt
from tools.docs import render, results
from tools.docs.rows import by_contender
from tools.measure import compare_rivals
from tools.measure.rivals import contexts, environments, fidelity, field, race, report
from tools.measure.rivals.environments import Environment, RivalError
from tools.measure.rivals.field import LANES, OURS, PLAIN, Contender, Form, Options, Rival
from tools.measure.rivals.models import TargetFiles
from tools.measure.rivals.race import Context, Race, Row
from tools.measure.rivals.worker import Worker

if TYPE_CHECKING:
    from workshop import Workshop

# Counts on from each prompt's last id, in parts of one token and then of two, client by client, and
# fails in the way that its settings name.
OPEN_ENGINE = """
def open_engine(settings):
    print("a library greets")
    if settings["model"] == "missing":
        raise FileNotFoundError("no model\\nof that name")

    def answer(prompts, clients, max_new_tokens):
        if settings["model"] == "dies" and len(prompts[0]) > 2:
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(3)
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


def settings(model: str) -> dict[str, Any]:
    return {"model": model, "threads": 1}


@pytest.fixture
def opened(
    fake_rival: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Worker]]:
    """Two sound workers and one that dies of the second prompt."""
    monkeypatch.setattr(race, "REST_SECONDS", 0.0)
    workers = {
        name: Worker([sys.executable, str(fake_rival)], settings(model), tmp_path / f"{name}.log")
        for name, model in (("one", "good"), ("two", "good"), ("bad", "dies"))
    }
    yield workers
    for worker in workers.values():
        worker.close()


# ---- workers and rounds


def test_a_worker_that_fails_says_why(
    opened: dict[str, Worker], fake_rival: Path, tmp_path: Path
) -> None:
    assert opened["one"].version == "0.1"
    if sys.platform == "linux":
        assert opened["one"].peak_rss() > 1e6
    for command, model, message in (
        ([sys.executable, str(fake_rival)], "missing", "FileNotFoundError: no model of that name"),
        ([str(tmp_path / "nobody")], "good", "cannot be run"),
        ([sys.executable, "-c", "print('ready')"], "good", "got the line b'ready'"),
    ):
        with pytest.raises(RivalError, match=message):
            Worker(command, settings(model), tmp_path / "log")
    with pytest.raises(RivalError, match="the worker ended: code 3, out of memory"):
        opened["bad"].ask({"prompts": [[1, 2, 3]], "clients": 1, "max_new_tokens": 2})


@pytest.mark.parametrize(
    ("parts", "tokens", "message"),
    [
        (None, [], "got a reply with seconds: KeyError"),
        ([[0.5, 1]], [1, 2], r"in parts of \[1\], expected 1 of 2"),
        ([[0.5, 1]], [1], r"got answers of \[1\] tokens.* expected 1 of 2"),
        ([[1.5, 2]], [1, 2], "got times up to 1.5 s in a load of 1.0 s"),
    ],
)
def test_a_load_that_nobody_can_have_answered_so_is_refused(
    parts: Any, tokens: list[int], message: str
) -> None:
    reply: dict[str, Any] = {"seconds": 1.0}
    if parts is not None:
        reply["answers"] = [{"sent": 0, "parts": parts, "tokens": tokens}]
    with pytest.raises(RivalError, match=message):
        race.checked(reply, 1, 2)
    if message.startswith("got answers"):
        assert race.checked(reply, 1, 2, may_end=True) == reply


def test_a_failure_stops_nobody_else(opened: dict[str, Worker]) -> None:
    asked = [Context("short", {"p": [1, 2], "q": [1, 2, 3]})]
    contest = Race("fp32", race.one_by_one(asked, 2), 4, may_end=True)
    said: list[str] = []
    rows, failed = contest.run(opened, said.append)
    assert failed == {"bad": "the worker ended: code 3, out of memory"}
    assert any("bad is left out" in line for line in said)
    for name in ("one", "two"):
        mine = [row for row in rows if row["contender"] == name]
        expected = [(0, ("p",)), (0, ("q",)), (1, ("p",)), (1, ("q",))]
        assert [(row["round"], row["prompts"]) for row in mine] == expected
        assert mine[1]["answers"][0]["tokens"] == [4, 5, 6, 7]
        assert mine[1]["prompt_tokens"] == 3
    # whose turn comes first rotates
    assert [row["contender"] for row in rows if row["round"] == 1] == ["one", "two", "two", "one"]
    assert len(rows) == 8, "who failed is left out of all of it"


def test_every_load_of_many_clients_is_answered_once(opened: dict[str, Worker]) -> None:
    short, long = Context("short", {"p": [1, 2], "q": [1, 7]}), Context("long", {"r": [5] * 9})
    clients, answers = {"short": [1, 3], "long": [2]}, {"short": 2, "long": 1}
    loads = [*race.by_many([short, long], clients, answers, 3, 2)]
    assert [each.prompts for each in loads[:3]] == [
        ("p", "q", "p"),  # at least three
        ("p", "q") * 3,
        ("r", "r", "r"),
    ]
    workers = {name: opened[name] for name in ("one", "two")}
    rows, failed = Race("int8", loads, 4, may_end=False).run(workers, lambda said: None)
    assert (len(rows), failed) == (2 * 3 * 2, {})
    assert [row["contender"] for row in rows[::2]] == ["one", "two"] * 3
    found = rows[2]["answers"]
    assert [answer["tokens"] for answer in found] == [[3, 4, 5, 6], [8, 9, 10, 11]] * 3
    assert [count for _, count in found[0]["parts"]] == [1, 2, 1]


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

LOOKUP, RIVAL, WORSE = f"{OURS}, lookup", "Other, plain", "Other, lookup"


def contender(name: str, weights: str = "float32") -> Contender:
    engine, _, mode = name.partition(", ")
    return Contender(name, engine, mode, weights, ("python",), {"threads": 1})


def row(name: str, number: int, seconds: float, **answers: Any) -> Row:
    """A load of so many seconds in all; answers are by prompt."""
    keys = {"precision": "fp32", "context": "short", "clients": len(answers), "round": number}
    about = {"prompt_tokens": 10, "version": "1.2", "peak_rss": 3_000_000}
    asked = {"prompts": [*answers], "answers": [*answers.values()], "seconds": seconds}
    return {**keys, **about, **asked, "contender": name}


def single(name: str, number: int, prompt: str, tokens: list[int], seconds: float) -> Row:
    """A prompt of one client: a second of prefill, which gives one token."""
    parts = [[1.0, 1], [seconds, len(tokens) - 1]][: len(tokens)]
    answer = {"sent": 0.0, "parts": parts, "tokens": tokens}
    return row(name, number, seconds, **{prompt: answer})


def test_speeds_ratios_and_agreement_by_hand() -> None:
    """Two rounds of two prompts. In decoding, our plain mode gives 4 tokens a second, our lookup 8
    and then 10, the rival 5 in both; its lookup 2, in other words."""
    text = list(range(11))  # 10 tokens of decoding
    plain = f"{OURS}, {PLAIN}"
    contenders = [*map(contender, (plain, LOOKUP, RIVAL)), contender(WORSE, "rounded")]
    rows = []
    for number, lookup_seconds in enumerate((1.25, 1.0)):
        for prompt in ("a", "b"):
            rows += [
                single(plain, number, prompt, text, 3.5),
                single(LOOKUP, number, prompt, text, 1 + lookup_seconds),
                single(RIVAL, number, prompt, text, 3.0),
                single(WORSE, number, prompt, [0, 1, 2, 99, *range(7)], 6.0),
            ]
    choices = {"short": {WORSE: 0.25, LOOKUP: 1.0}}
    found = report.summarise(rows, contenders, choices)["short"]
    lookup, worse = found[LOOKUP], found[WORSE]
    speed = {"median": 9.0, "least": 8.0, "greatest": 10.0, "by_round": [8.0, 10.0]}
    assert lookup["tokens_per_second"] == speed
    assert (lookup["prefill_ms"]["median"], lookup["peak_rss"]) == (1000, 3_000_000)
    for key in ("same_engine", "same_weights"):
        assert lookup[key]["reference"] == plain
        assert (lookup[key]["identical"], lookup[key]["prompts"]) == (2, 2)
    assert worse["same_weights"] is None, "nobody else has them"
    assert found[RIVAL]["same_engine"] is None, "it is the plain one"
    best, own, prefill = report.aims("fp32", {"short": found})
    assert (best["ours"], best["rival"]) == (LOOKUP, RIVAL)
    assert (best["ratio"], best["least"], best["greatest"]) == (9 / 5, 8 / 5, 10 / 5)
    assert (own["ratio"], prefill["ratio"]) == (4 / 5, 1)
    line = "| Other, lookup | rounded | 2.0 (2.0 to 2.0) | 1000 | 3 | 0 of 2 |  | 25.0% |"
    assert render.shown("rivals", by_contender({"short": found})).splitlines()[-1] == line
    ended = report.compare({"p": [1, 2, 3], "q": [1]}, [single("x", 0, "p", [1, 2], 2.0)])
    assert ended["differences"] == [{"prompt": "p", "position": 2, "expected": 3, "got": None}]


NAMES = (report.BEFORE, f"{OURS}, {LANES}", f"{OURS}, {LANES}, {PLAIN}", RIVAL)


def test_speeds_gaps_and_agreement_of_many_clients_by_hand() -> None:
    """Two clients: a token after 0.2 s, two 0.1 s later, and the fourth 0.3 s after these."""

    def load(name: str, number: int, seconds: float, *texts: list[int]) -> Row:
        return row(
            name,
            number,
            seconds,
            **{
                prompt: {
                    "sent": at,
                    "parts": [[at + 0.2, 1], [at + 0.3, 2], [at + 0.6, 1]],
                    "tokens": tokens,
                }
                for prompt, at, tokens in zip("pq", (0.0, 0.1), texts, strict=True)
            },
        )

    texts = [1, 2, 3, 4], [5, 6, 7, 8]
    rows = []
    for number, times in enumerate(((4.0, 2.0, 2.5, 4.0), (2.0, 0.5, 1.0, 1.0))):
        seconds = dict(zip(NAMES, times, strict=True))
        rows += [load(name, number, seconds[name], *texts) for name in NAMES[:3]]
        rows.append(load(RIVAL, number, seconds[RIVAL], texts[0], [5, 6, 0, 0]))
    contenders = [*map(contender, NAMES)]
    before, lanes, plain, rival = found = report.summarise_many(rows[::-1], contenders)
    assert before["tokens_per_second"] == {"median": 3.0, "least": 2.0, "greatest": 4.0}
    assert lanes["tokens_per_second"] == {"median": 10.0, "least": 4.0, "greatest": 16.0}
    assert lanes["gain"] == {"median": 3.0, "least": 2.0, "greatest": 4.0}
    assert (plain["answers"], plain["peak_rss"], plain["ours"]) == (4, 3_000_000, True)
    assert lanes["first_ms"] == {key: pytest.approx(200) for key in ("median", "p95")}
    gaps = {"median": 200, "p99": 300, "longest": 300}
    assert lanes["gap_ms"] == {name: pytest.approx(ms) for name, ms in gaps.items()}
    assert lanes["as_alone"] == {"prompts": 4, "identical": 4, "differences": []}
    parted = {"prompt": "q", "position": 2, "expected": 7, "got": 0}
    assert rival["as_alone"] == {"prompts": 4, "identical": 2, "differences": [parted] * 2}
    (line,) = report.best_of_many(found)
    assert line["over_rival"] == 10 / 5
    assert line["over_plain"] == pytest.approx(10 / ((8 / 2.5 + 8) / 2))
    assert report.best_of_many(found[:1]) == []
    last = (
        "| Other, plain | short | 2 | 5.0 (2.0 to 8.0) | 1.50 | 200 | 200 | 200 | 300 | 300 | "
        "2 of 4 |"
    )
    assert render.shown("many_clients", found).splitlines()[-1] == last
    columns = render.columns_for(render.TABLES["many_clients_best"]["columns"], [line])
    shown = [results.cell(template, line) for _, template in columns]
    assert shown == ["short", "2", "Other, plain", "2.00", "1.79"]


def test_a_token_that_fp32_would_not_choose_counts_once(workshop: "Workshop") -> None:
    bundle = workshop.bundle("parallelspec")
    engine = spec_runtime.load(bundle, "none")
    text = engine.generate([5, 6, 7], max_new_tokens=40, ignore_eos=True).token_ids
    worse = [*text[:-1], (text[-1] + 1) % 64]
    rows = [
        single("one", 0, "p", [1], 2.0),
        single("one", 1, "p", text, 2.0),
        single("two", 1, "p", worse, 2.0),
        {**single("one", 1, "p", worse, 2.0), "context": "long"},
    ]
    asked = [Context(name, {"p": [5, 6, 7]}) for name in ("short", "long", "empty")]
    found = fidelity.choices(bundle, 1, asked, rows)
    assert found == {"short": {"one": 1, "two": 39 / 40}, "long": {"one": 39 / 40}}


# ---- environments


def test_an_environment_is_made_once_and_anew_for_other_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(environments, "run", lambda command, cwd=None: ran.append(command))
    first = Environment("one", (("torch==1",), ("torch==1", "engine==2.0")))
    for _ in range(2):
        first.make(tmp_path)
    folder = str(first.folder(tmp_path))
    assert [command[-1] for command in ran] == [folder, "torch==1", "engine==2.0"]
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


# ---- the commands ----


@pytest.fixture
def asking(
    workshop: "Workshop", fake_rival: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Flags of both commands. Ours are real workers on a tiny bundle; the rivals are fakes."""
    there = Environment("openvino", (("there==1",),))
    form = {"fp32": Form("others", lambda files: Path("good"))}
    gone = replace(there, name="nowhere")
    rivals = (
        Rival("there", "There", there, str(fake_rival), (PLAIN,), form),
        Rival("gone", "Gone", gone, str(fake_rival), (PLAIN,), form),
    )
    monkeypatch.setattr(compare_rivals, "RIVALS", rivals)
    monkeypatch.setattr(field, "for_many", lambda precision: [*rivals])
    modes = {PLAIN: ("none", None, None), "drafter": (None, True, None)}
    monkeypatch.setattr(field, "OUR_MODES", modes)
    monkeypatch.setattr(race, "REST_SECONDS", 0.0)
    (tmp_path / "fp32").symlink_to(workshop.bundle("parallelspec"))
    prompts = tmp_path / "prompts.jsonl"
    asked = ("say abc, abc, abc", "say xyz", "one two. one two.")
    prompts.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in asked))
    paths = {"--prompts": prompts, "--json": tmp_path / "out.json", "--work": tmp_path / "w"}
    words = [str(word) for pair in (paths | {"--model": workshop.llama()}).items() for word in pair]
    words += ["--long-limit", "0", "--rounds", "2", "--threads", "1", "--max-new-tokens", "6"]
    return words


def test_rivals_are_compared_and_who_fails_is_named(
    asking: list[str],
    made: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out.json"
    words = ["alone", *asking, "--bundles", str(tmp_path), "--precision", "fp32", "--limit", "1"]
    compare_rivals.main(words)
    found = json.loads(out.read_text())
    contenders = found["precisions"]["fp32"]["short"]
    assert list(contenders) == ["specsplit, plain", "specsplit, drafter", "There, plain"]
    assert contenders["specsplit, drafter"]["same_engine"]["identical"] == 1
    assert contenders["specsplit, drafter"]["fp32_choices"] == 1
    assert contenders["There, plain"]["fp32_choices"] < 1
    assert [each["reason"] for each in found["failed"]] == ["no such package"]
    assert made == ["openvino"]
    assert found["versions"]["there"] == "0.1"
    shown = capsys.readouterr().out
    assert "not measured: Gone, fp32: no such package" in shown
    assert "| fp32, short prompts | best mode | " in shown.splitlines()[-3]
    with pytest.raises(UserError, match="and 100000 new ones, expected at most"):
        compare_rivals.main([*words, "--max-new-tokens", "100000"])


def test_many_clients_are_answered_and_who_fails_is_named(
    asking: list[str],
    made: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "many",
        *asking,
        "--bundle",
        str(tmp_path / "fp32"),
        "--clients",
        "1",
        "3",
        "--parallel",
        "2",
    ]
    compare_rivals.main(words)
    found = json.loads((tmp_path / "out.json").read_text())
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
    assert found["versions"]["There, plain"] == "0.1"
    assert "not measured: Gone, fp32: no such package" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["openvino", "llama.cpp"])
def test_a_rival_that_is_installed_answers_several_at_a_time(name: str, tmp_path: Path) -> None:
    """The demo as Q8_0, in whatever modes the rival has; each answer is as long as it should be."""
    work = Path(__file__).parents[2] / "runs/rivals"
    rival = next(each for each in field.for_many("int8") if each.name == name)
    if not (rival.environment.folder(work) / environments.STAMP).is_file():
        pytest.skip(f"{rival.title} is not installed under runs/rivals, see compare_rivals.py")
    files = TargetFiles(target.resolve(None), work)
    options = Options(1, (2,), 256, 5, 3, may_end=False)
    for each in field.of_rival(rival, "int8", files, options):
        worker = Worker(each.command, each.settings, tmp_path / "log")
        try:
            prompts = [[1, 9, 8, 7], [1, 20, 21, 20, 21, 20], [1, 30, 31, 32]]
            job = {"prompts": prompts, "clients": 2, "max_new_tokens": 5}
            answers = race.checked(worker.ask(job), 3, 5)["answers"]
        finally:
            worker.close()
        assert answers[2]["sent"] > 0 == answers[0]["sent"]
