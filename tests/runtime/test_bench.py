"""The bench: turns as a chat, and figures worked by hand from known times."""

import json
from pathlib import Path
from typing import Any

import pytest
from small import CONTEXT, known, toy_engine

from spec_runtime import Engine, GenerationResult
from spec_runtime.cli.bench import contenders
from spec_runtime.loop.stats import Stats
from spec_runtime.measure import bench
from spec_runtime.measure import clients as measured
from spec_runtime.measure.audit import Divergence
from spec_runtime.measure.bench import Pair, Turn
from spec_runtime.measure.prompts import MT_BENCH, BenchPrompt, read_prompts
from spec_runtime.sampling import SamplingOptions

# ---- figures by hand ----


def result(
    num_tokens: int, steps: int, engine_seconds: float, **seconds: float
) -> GenerationResult:
    """An answer of this many tokens, the first of which is prefill's, at these costs."""
    stats = Stats(steps=steps, committed_tokens=num_tokens - 1, engine_seconds=engine_seconds)
    stats.timings.update(seconds)
    return GenerationResult("", list(range(num_tokens)), "length", stats)


def plain_result(num_tokens: int = 21) -> GenerationResult:
    """Plain decoding: 20 tokens in 10 s, 9.5 s of them in the engine, after 5 s of prefill."""
    seconds = {"prefill": 5.0, "draft": 0.0, "verify": 9.5, "accept": 0.25, "other": 0.25}
    return result(num_tokens, num_tokens - 1, 9.5, **seconds)


def fast_result(num_tokens: int = 21) -> GenerationResult:
    """Speculative decoding: 20 tokens in 4 s, 3 s of them in the engine, after 6 s of prefill."""
    seconds = {"prefill": 6.0, "draft": 0.5, "verify": 2.5, "accept": 0.75, "commit": 0.25}
    return result(num_tokens, 8, 3.0, **seconds)


def pair(*turns: Turn, category: str = "qa", prompt: str = "p") -> Pair:
    return Pair(BenchPrompt(prompt, category, "text"), turns)


def test_a_summary_by_hand() -> None:
    found = bench.summary([pair(Turn(plain_result(), fast_result()))])
    assert found["plain_tokens_per_second"] == 2.0  # 20 tokens in 10 s
    assert found["tokens_per_second"] == 5.0  # 20 tokens in 4 s
    assert found["speedup"] == 2.5
    assert found["decode_time_ratio"] == 2.5  # the same: the answers are of one length
    assert (found["plain_decode_seconds"], found["decode_seconds"]) == (10.0, 4.0)
    assert (found["plain_prefill_seconds"], found["prefill_seconds"]) == (5.0, 6.0)
    assert found["plain_end_to_end_tokens_per_second"] == 21 / 15
    assert found["end_to_end_tokens_per_second"] == 21 / 10
    assert found["speedup_end_to_end"] == pytest.approx(1.5)
    assert found["plain_host_share"] == pytest.approx(0.05)
    assert found["host_share"] == pytest.approx(0.25)
    assert found["accepted_length"] == 20 / 8
    assert found["timings"]["accept"] == 0.75
    assert sum(found["timings"].values()) == 10.0
    assert found["draft_ms"] == 1000 * 0.5 / 8
    assert found["verify_ms"] == 1000 * 2.5 / 8
    assert found["plain_verify_ms"] == 1000 * 9.5 / 20
    assert (found["prompts"], found["turns"], found["identical"]) == (1, 1, 1.0)


def test_answers_of_other_lengths_are_compared_by_speed() -> None:
    """Half as many tokens in the same time is half the speed, though the total time is the same."""
    found = bench.summary([pair(Turn(plain_result(21), fast_result(11)))])
    assert found["tokens_per_second"] == 10 / 4
    assert found["speedup"] == 1.25
    assert found["decode_time_ratio"] == 2.5


def test_all_turns_count() -> None:
    one = pair(Turn(plain_result(), fast_result()), Turn(plain_result(), fast_result()))
    found = bench.summary([one, pair(Turn(plain_result(), fast_result()))])
    assert (found["prompts"], found["turns"]) == (2, 3)
    assert (found["tokens"], found["plain_tokens"], found["steps"]) == (60, 60, 24)
    assert (found["plain_decode_seconds"], found["plain_prefill_seconds"]) == (30.0, 15.0)
    assert found["speedup"] == 2.5


def test_spec_benchs_own_speedup_is_that_of_means_over_prompts() -> None:
    """Over all tokens a prompt that takes long counts for more."""
    slow = {"prefill": 1.0, "verify": 99.0}
    same = Turn(result(21, 20, 0.0, **slow), result(21, 20, 0.0, **slow))
    found = bench.summary([pair(Turn(plain_result(), fast_result())), pair(same)])
    assert found["speedup_end_to_end"] == pytest.approx((42 / 110) / (42 / 115))
    expected = (21 / 10 + 21 / 100) / (21 / 15 + 21 / 100)
    assert found["speedup_of_means"] == pytest.approx(expected)


def test_a_prompt_is_identical_if_all_its_turns_are() -> None:
    parting = Divergence("p", 3, 7, 8, 0.5, 20.0)
    same = Turn(plain_result(), fast_result())
    first = pair(Turn(plain_result(), fast_result(), True, parting), Turn(*both(), False))
    second = pair(same, Turn(plain_result(), fast_result(), True, parting))
    found = bench.summary([first, second, pair(same), pair(same, same)])
    assert found["identical"] == 0.5
    assert [row["turn"] for row in found["divergences"]] == [1, 2]
    assert found["divergences"][0] == {
        "turn": 1,
        "prompt": "p",
        "position": 3,
        "plain_id": 7,
        "id": 8,
        "gap": 0.5,
        "spread": 20.0,
    }


def both() -> tuple[GenerationResult, GenerationResult]:
    return plain_result(), fast_result()


def test_categories_are_summed_apart() -> None:
    pairs = [pair(Turn(*both())), pair(Turn(*both()), category="rag"), pair(Turn(*both()))]
    found = bench.summarise(bench.BenchReport(pairs))
    assert found["overall"]["prompts"] == 3
    assert {name: row["prompts"] for name, row in found["categories"].items()} == {
        "qa": 2,
        "rag": 1,
    }


def test_nothing_decoded_is_zero() -> None:
    found = bench.summary([])
    assert (found["speedup"], found["speedup_end_to_end"], found["identical"]) == (0.0, 0.0, 0.0)


# ---- turns ----


class Recorder:
    """Notes the prompts of one engine; its answers begin with a letter of its own if asked to."""

    def __init__(self, inner: Engine, prefix: str = "") -> None:
        self.inner, self.prefix = inner, prefix
        self.target, self.encode = inner.target, inner.encode
        self.asked: list[list[int]] = []

    def with_drafter(self, name: str) -> "Recorder":
        self.plain = Recorder(self.inner.with_drafter(name))
        return self.plain

    def generate(self, prompt: list[int], **options: Any) -> GenerationResult:
        self.asked.append(prompt)
        found = self.inner.generate(prompt, **options)
        if not self.prefix:
            return found
        tokens = [*map(ord, self.prefix), *found.token_ids][: len(found.token_ids)]
        return GenerationResult(self.prefix + found.text, tokens, "length", found.stats)


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def test_each_way_continues_from_its_own_answer() -> None:
    prompt = BenchPrompt(1, "mt_bench", "abcabc", ("bcab", "cab"))
    right, wrong = Recorder(toy_engine()), Recorder(toy_engine(), prefix="x")
    wrong.inner = right.inner
    engines: Any = [right, wrong]
    reports = bench.run(engines, [prompt], max_new_tokens=8)
    reference = toy_engine("none")
    answers: list[str] = []
    for number, question in enumerate(("abcabc", "bcab", "cab")):
        history = [text for both in zip(("abcabc", "bcab"), answers, strict=False) for text in both]
        expected = reference.encode(chat(*history, question))
        assert right.asked[1 + number] == right.plain.asked[1 + number] == expected
        answers.append(reference.generate(expected, max_new_tokens=8).text)
    assert wrong.asked[2] == reference.encode(chat("abcabc", "x" + answers[0], "bcab"))
    same, other = (report.pairs[0] for report in reports)
    assert [turn.is_compared for turn in same.turns] == [True, True, True]
    assert same.divergence is None
    assert [turn.is_compared for turn in other.turns] == [True, False, False]
    number, divergence = known(other.divergence)
    assert (number, divergence.position, divergence.id) == (1, 0, ord("x"))
    figures = bench.summarise(reports[0])
    assert (figures["overall"]["turns"], figures["overall"]["tokens"]) == (3, 3 * 7)
    assert bench.summarise(reports[1])["overall"]["identical"] == 0.0


def test_who_goes_first_rotates(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    inner = Engine.generate

    def generate(self: Engine, prompt: Any, **options: Any) -> GenerationResult:
        order.append(self.drafter)
        return inner(self, prompt, **options)

    monkeypatch.setattr(Engine, "generate", generate)
    engine = toy_engine()
    prompts = [BenchPrompt(i, "all", "abcabc") for i in range(4)]
    reports = bench.run([engine, engine.with_drafter("lookahead")], prompts, max_new_tokens=4)
    assert [len(report.pairs) for report in reports] == [4, 4]
    turns = [order[i : i + 3] for i in range(3, len(order), 3)]  # the first three warm up
    plain_first = ["none", "prompt_lookup", "lookahead"]
    second, third = (plain_first[i:] + plain_first[:i] for i in (1, 2))
    assert turns == [plain_first, second, third, plain_first]


def test_a_turn_that_does_not_fit_ends_the_chat() -> None:
    prompts = [
        BenchPrompt(1, "all", "abc", ("a" * CONTEXT, "abc")),
        BenchPrompt(2, "all", "b" * CONTEXT, ("abc",)),
        BenchPrompt(3, "all", "abc", ("ab",)),
    ]
    reasons: list[str] = []
    [report] = bench.run([toy_engine()], prompts, max_new_tokens=4, on_skip=reasons.append)
    assert [(each.prompt.id, len(each.turns)) for each in report.pairs] == [(1, 1), (3, 2)]
    assert [(row["prompt"], row["turn"]) for row in report.skipped] == [(1, 2), (2, 1)]
    assert reasons[0].startswith("prompt 1, turn 2, skipped: got a prompt of")
    assert reasons[1].startswith("prompt 2 skipped: got a prompt of")


# ---- prompts ----


def spec_bench(path: Path) -> Path:
    """The ids and categories of Spec-Bench's file, with other texts."""
    names = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem")
    rows: list[dict[str, Any]] = []
    for name in (*names, "humanities"):
        rows += [{"category": name, "turns": ["one", "two"]}] * 10
    for name in ("translation", "summarization", "qa", "math_reasoning", "rag"):
        rows += [{"category": name, "turns": ["one"]}] * 80
    numbered = [{"question_id": 81 + i, **row} for i, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in numbered))
    return path


def test_ten_of_mt_bench_are_of_all_its_categories(tmp_path: Path) -> None:
    path = spec_bench(tmp_path / "prompts.jsonl")
    chosen = read_prompts(path, per_category=10)
    ids = [prompt.id for prompt in chosen]
    assert ids[:10] == [81, 82, 91, 92, 101, 111, 121, 131, 141, 151]
    assert ids[10:] == [begin + i for begin in range(161, 561, 80) for i in range(10)]
    assert [prompt.id for prompt in read_prompts(path, limit=60)] == ids
    assert [prompt.id for prompt in read_prompts(path, limit=12)][:4] == [81, 91, 161, 162]
    assert len(read_prompts(path)) == 480
    assert len(MT_BENCH) == 8
    assert {prompt.later_turns for prompt in chosen[:10]} == {("two",)}
    assert {prompt.later_turns for prompt in chosen[10:]} == {()}


def test_later_turns_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a", 3]}\n')
    with pytest.raises(ValueError, match="line 1: got keys turns, expected turns"):
        read_prompts(path)


# ---- drafters ----


@pytest.mark.parametrize(
    ("spelled", "lookup", "expected"),
    [
        ([], None, [(None, None)]),
        ([], False, [(None, False)]),
        (["medusa", "none"], None, [("medusa", None), ("none", None)]),
        (["medusa", "none"], False, [("medusa", False), ("none", False)]),
        (["medusa+prompt_lookup"], None, [("medusa", True)]),
        (["medusa+prompt_lookup"], False, [("medusa", True)]),
        (["medusa", "medusa+prompt_lookup"], None, [("medusa", False), ("medusa", True)]),
        (["hydra", "medusa+prompt_lookup"], None, [("hydra", None), ("medusa", True)]),
        (["medusa", "medusa+prompt_lookup"], True, [("medusa", True), ("medusa", True)]),
    ],
)
def test_how_drafters_are_spelled(
    spelled: list[str], lookup: bool | None, expected: list[Any]
) -> None:
    assert contenders(spelled, lookup) == expected


def test_only_prompt_lookup_can_be_merged() -> None:
    with pytest.raises(ValueError, match=r"got drafter medusa\+hydra, expected a name, or a name"):
        contenders(["medusa+hydra"], None)


# ---- clients at the same time ----


@pytest.mark.parametrize(("clients", "parallel"), [(1, 1), (3, 1), (3, 2), (5, 3)])
def test_clients_share_the_prompts(clients: int, parallel: int) -> None:
    engine, answered = toy_engine("prompt_lookup"), []
    prompts = [engine.encode(f"{'ab' * n} say") for n in range(1, 8)]
    sampling: SamplingOptions = {"max_new_tokens": 20}
    traffic = measured.run(engine, prompts, clients, parallel, sampling, lambda: answered.append(1))
    expected = [engine.generate(prompt, **sampling).token_ids for prompt in prompts]
    assert traffic.tokens == sum(map(len, expected))
    assert len(answered) == len(traffic.firsts) == len(prompts)
    assert engine.num_lanes == 0  # those that were opened are closed again
    figures = traffic.figures()
    assert figures["tokens_per_second"] == pytest.approx(traffic.tokens / traffic.seconds)
    assert 0 < figures["gap"]["median"] <= figures["gap"]["p99"] <= figures["gap"]["longest"]


def test_waits_are_summed_up_in_order() -> None:
    traffic = measured.Traffic(10, 2.0, [3.0, 1.0, 2.0], [])
    first = traffic.figures()["first_token"]
    assert first == {"median": 2.0, "p95": 3.0, "p99": 3.0, "longest": 3.0}
    assert set(traffic.figures()["gap"].values()) == {0.0}
