"""The commands on the toy target: what they print and write, and how they fail."""

import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small import PROMPTS, Measure, Run, toy_engine, write_prompts

import spec_runtime
from spec_export import cli as export_cli
from spec_runtime import Engine
from spec_runtime import cli as runtime_cli
from spec_runtime.errors import UserError
from spec_runtime.kernels.library import instructions
from spec_runtime.load import LoadOptions
from spec_runtime.loop import answering, generate
from spec_runtime.loop.proposer import OpenedDrafter
from spec_runtime.measure import audit
from spec_runtime.measure.prompts import BenchPrompt, read_prompts
from spec_runtime.options import declared
from spec_runtime.sampling import SamplingParams

PROMPT = "abcabcabc"
JSON_KEYS = [
    "text",
    "token_ids",
    "finish_reason",
    "tokens_per_second",
    "prefill_seconds",
    "accepted_length",
    "steps",
    "timings",
    "acceptance",
    "preserves_distribution",
]

# Options of `load` with values that are not their defaults, and the flags that say so.
LOADING: dict[str, tuple[Any, str]] = {
    "backend": ("cuda", "--backend=cuda"),
    "threads": (1, "--threads=1"),
    "cuda_graphs": (False, "--no-cuda-graphs"),
    "drafter": ("none", "--drafter=none"),
    "lookup": (False, "--no-lookup"),
    "profile": (False, "--no-profile"),
    "strict": (True, "--strict"),
    "context": (99, "--context=99"),
}


@pytest.mark.parametrize(
    ("words", "without"),
    [
        (["generate", PROMPT], {"strict"}),
        (["chat"], {"strict"}),
        (["bench"], {"strict"}),
        (["audit"], {*LOADING} - {"threads", "drafter", "lookup", "strict"}),
    ],
)
def test_the_flags_of_load_reach_it(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], without: set[str]
) -> None:
    """Each verb hands on all of its flags, and their defaults without them."""
    asked: list[dict[str, Any]] = []

    def load(path: Path, **options: Any) -> Engine:
        asked.append(options)
        raise UserError("not here")

    monkeypatch.setattr(spec_runtime, "load", load)
    if words[0] in ("bench", "audit"):
        words = [*words, "--prompts", str(write_prompts(folder / "prompts.jsonl", *PROMPTS))]
    given = {name: value for name, value in LOADING.items() if name not in without}
    for flags in ([], [flag for _, flag in given.values()]):
        assert run(*words, *flags, "--bundle", folder) == (2, "", "error: not here\n")
    fixed = {"profile": False} if words[0] == "audit" else {}
    defaults = {name: declared(LoadOptions)[name].default for name in given}
    assert asked == [defaults | fixed, {name: value for name, (value, _) in given.items()} | fixed]


def test_generate_streams_text_and_ends_with_a_summary(
    run: Run, folder: Path, engines: list[Engine]
) -> None:
    code, out, err = run("generate", PROMPT, "--bundle", folder, "--max-new-tokens", 20)
    expected = toy_engine("none").generate(PROMPT, max_new_tokens=20)
    assert (code, out) == (0, expected.text + "\n")
    native = f" with {name}" if (name := instructions()) else ""
    ends = f"threads?{native}, finished by length\n"
    assert re.fullmatch(rf"20 tokens, .* tokens/s, accepted length .* {ends}", err)
    assert [engine.drafter for engine in engines] == ["prompt_lookup"]


def test_generate_json_has_exactly_the_documented_keys(
    run: Run, folder: Path, engines: list[Engine]
) -> None:
    arguments = ("generate", "--bundle", folder, "--max-new-tokens", 40, "--json")
    code, out, err = run(*arguments, stdin=PROMPT + "\n")
    report = json.loads(out)
    assert (code, err, list(report)) == (0, "", JSON_KEYS)
    plain = toy_engine("none").generate(PROMPT, max_new_tokens=40)
    assert (report["text"], report["token_ids"]) == (plain.text, plain.token_ids)
    assert report["finish_reason"] == "length"
    assert report["accepted_length"] == 39 / report["steps"] > 1.5
    _, out, _ = run(*arguments, "--drafter", "none", stdin=PROMPT)
    assert json.loads(out)["accepted_length"] == 1.0
    assert json.loads(out)["token_ids"] == plain.token_ids


SAMPLING: dict[str, Any] = {
    "temperature": 1.5,
    "top_k": 60,
    "top_p": 0.97,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.1,
    "seed": 3,
    "typical_epsilon": 0.2,
    "typical_delta": 0.6,
}


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_sampling_flags_have_the_names_of_the_parameters(
    run: Run, folder: Path, engines: list[Engine], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    seen: list[SamplingParams] = []
    inner = Engine.chunks
    names = {field.name for field in dataclasses.fields(SamplingParams)}

    def chunks(self: Engine, prompt: Any, **options: Any) -> Any:
        given = {name: value for name, value in options.items() if name in names}
        seen.append(SamplingParams(**given))
        return inner(self, prompt, **options)

    monkeypatch.setattr(Engine, "chunks", chunks)
    flags = [word for name, value in SAMPLING.items() for word in (f"--{name}", value)]
    flags = [str(word).replace("_", "-") if str(word)[:2] == "--" else word for word in flags]
    flags += ["--logit-bias", "97=2.5", "--logit-bias", "99=-1", "--acceptance", "typical"]
    flags += ["--stop", "zz", "--draw-widths", "3,1", "--draw-with-replacement"]
    flags += ["--stop-token-id", "9", "--stop-token-id", "8", "--ignore-eos"]
    words = [verb, PROMPT] if verb == "generate" else [verb]
    for more in (flags, []):
        words = [*words, "--bundle", str(folder), "--max-new-tokens", "20"]
        code, _, err = run(*words, *more, stdin=PROMPT)
        assert code == 0
        assert ("not the target's distribution" in err) == bool(more)
    assert seen == [
        SamplingParams(
            **SAMPLING,
            max_new_tokens=20,
            acceptance="typical",
            logit_bias={97: 2.5, 99: -1.0},
            stop=("zz",),
            draw_widths=(3, 1),
            draw_with_replacement=True,
            stop_token_ids=(9, 8),
            ignore_eos=True,
        ),
        SamplingParams(max_new_tokens=20),
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--acceptance", "fast"], "got acceptance 'fast', expected one of target_sampling, "),
        (["--logit-bias", "7"], "got --logit-bias 7, expected ID=VALUE"),
        (["--logit-bias", "a=1"], "got --logit-bias a=1, expected ID=VALUE"),
        (["--logit-bias", "5=1e300"], "got logit_bias {5: 1e+300}, expected at most 1e+09"),
        (["--presence-penalty", "1e300"], "got presence_penalty 1e+300, expected at most 1e+09"),
        (["--repetition-penalty", "1e-40"], "got repetition_penalty 1e-40, expected 0.001 or more"),
        (["--logit-bias", "999=1"], "got logit_bias for token 999, expected 0 to 257"),
        (["--min-p", "2"], "got min_p 2.0, expected at most 1 or None"),
        (["--temperature", "-1"], "got temperature -1.0, expected 0"),
        (["--stop-token-id", "-1"], "got stop_token_ids [-1], expected 0 or more"),
        (["--draw-widths", "3;1"], "got --draw-widths 3;1, expected numbers"),
        (["--logprobs", "2"], "got --logprobs without --json"),
    ],
)
def test_bad_sampling_flags_are_one_line(
    run: Run, folder: Path, engines: list[Engine], flags: list[str], message: str
) -> None:
    code, _, err = run("generate", PROMPT, "--bundle", folder, *flags)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err


def test_json_with_logprobs_and_acceptance(run: Run, folder: Path, engines: list[Engine]) -> None:
    arguments = ("generate", PROMPT, "--bundle", folder, "--max-new-tokens", 9, "--json")
    code, out, _ = run(*arguments, "--logprobs", 2, "--temperature", 0.7, "--acceptance", "typical")
    report = json.loads(out)
    assert (code, list(report)) == (0, [*JSON_KEYS, "logprobs"])
    assert (report["acceptance"], report["preserves_distribution"]) == ("typical", False)
    assert [each["token_id"] for each in report["logprobs"]] == report["token_ids"]
    for each in report["logprobs"]:
        (_, best), (_, second) = each["top"]
        assert 0 > best >= max(each["logprob"], second)
    _, out, _ = run(*arguments, "--acceptance", "typical")  # greedy after all
    report = json.loads(out)
    assert (report["acceptance"], report["preserves_distribution"]) == ("greedy", True)


def test_show_accepted_colours_drafted_tokens_only(
    run: Run, folder: Path, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("generate", PROMPT, "--bundle", folder, "--max-new-tokens", 30, "--show-accepted")
    text = toy_engine("none").generate(PROMPT, max_new_tokens=30).text
    _, out, _ = run(*arguments)
    assert out == text + "\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, out, _ = run(*arguments)
    steps = list(toy_engine().steps(PROMPT, max_new_tokens=30))
    depths = [depth for step in steps for depth in step.depths]
    assert max(depths) > 4, "the last colour is for all below"
    for depth, colour in ((1, 32), (2, 36), (3, 34), (4, 35)):
        coloured = re.findall(rf"\x1b\[{colour}m(.*?)\x1b\[0m", out)
        expected = [each for each in depths if each == depth or (depth == 4 and each > 4)]
        assert len("".join(coloured)) == len(expected) > 0, depth
    assert re.sub(r"\x1b\[\d+m", "", out) == text + "\n"


def test_no_prompt_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    with pytest.raises(SystemExit, match="2"):
        runtime_cli.main(["generate"])
    assert capsys.readouterr().err.startswith("error: got no prompt")


def test_a_warning_is_one_line_on_stderr(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = toy_engine("prompt_lookup")
    opened = OpenedDrafter("prompt_lookup", made.proposer, made.budget, (), 60.0)
    engine = Engine(made.target, made.tokenizer, opened)
    monkeypatch.setattr(answering, "JUDGED_STEPS", 12)
    monkeypatch.setattr(spec_runtime, "load", lambda *args, **kwargs: engine)
    code, out, err = run("generate", PROMPT, "--max-new-tokens", 110, "--bundle", folder)
    warning, summary = err.split("\n")[1:3]
    assert warning.startswith("warning: drafter prompt_lookup: accepted length ")
    assert summary.startswith("110 tokens")
    assert (code, "warning" in out, err.count("warning")) == (0, False, 1)


def test_chat_keeps_turns_reuses_them_and_resets(
    run: Run, folder: Path, engines: list[Engine]
) -> None:
    reference = toy_engine("none")
    first = [{"role": "user", "content": "abc"}]
    answer = reference.generate(first, max_new_tokens=12).text
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "bc"}]
    answers = [answer, reference.generate(second, max_new_tokens=12).text, answer]
    code, out, err = run(
        *("chat", "--bundle", folder, "--max-new-tokens", 12), stdin="abc\n\nbc\n/reset\nabc\n"
    )
    assert (code, out) == (0, "".join(text + "\n" for text in answers))
    assert err.count("finished by length") == 3
    last = engines[0].last_result
    assert last is not None
    assert last.stats.reused_tokens > 0  # what the two conversations have in common


def test_bench_writes_the_metrics_and_prints_a_table(measure: Measure, tmp_path: Path) -> None:
    code, out, err, figures = measure("bench", "--max-new-tokens", 24)
    assert code == 0
    assert list(figures["categories"]) == ["mt_bench", "qa"]
    for row in (figures["overall"], *figures["categories"].values()):
        assert (row["identical"], row["divergences"]) == (1.0, [])
        assert row["accepted_length"] == row["tokens"] / row["steps"] > 1
        assert row["acceptance_by_depth"]
        assert 0 <= row["host_share"] < 1
    overall = figures["overall"]
    assert (overall["prompts"], overall["turns"]) == (3, 4)
    assert (overall["tokens"], overall["plain_tokens"]) == (92, 92)
    assert [row["prompts"] for row in figures["categories"].values()] == [2, 1]
    assert len(figures["skipped"]) == 1
    assert "prompt 4 skipped: got a prompt of" in " ".join(err.split())
    assert re.search(r"overall .* 3 .*100%", out)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["out.json"]


def test_bench_compares_drafters_in_one_run(measure: Measure) -> None:
    drafters = ("--drafter", "prompt_lookup", "--drafter", "none")
    code, out, _, figures = measure("bench", "--max-new-tokens", 24, *drafters)
    assert (code, list(figures["drafters"])) == (0, ["prompt_lookup", "none"])
    lookup, plain = (result["overall"] for result in figures["drafters"].values())
    assert (plain["accepted_length"], plain["tokens"], plain["identical"]) == (1.0, 92, 1.0)
    assert (lookup["accepted_length"] > 1, lookup["identical"]) == (True, 1.0)
    assert lookup["plain_tokens_per_second"] == plain["plain_tokens_per_second"]
    for row in (lookup, plain):
        assert row["verify_ms"] == pytest.approx(1000 * row["timings"]["verify"] / row["steps"])
    assert re.search(r"prompt_lookup .*100%", out)


def test_bench_samples_both_ways_alike(measure: Measure) -> None:
    sampling = ("--max-new-tokens", 24, "--temperature", 3.0, "--seed", 2)
    identical = []
    for more in ((), ("--acceptance", "typical"), ("--system", "abab")):
        code, _, _, figures = measure("bench", *sampling, *more)
        found = figures["sampling"]
        assert (code, found["temperature"], found["seed"]) == (0, 3.0, 2)
        identical.append(figures["overall"]["identical"])
    assert identical == [1.0, 0.0, 1.0]  # the plain side draws whatever the rule
    assert (figures["system"], found["acceptance"]) == ("abab", "target_sampling")


def test_bench_fixes_the_size_of_trees(measure: Measure) -> None:
    drafted = []
    for nodes in (1, 2, 3):
        code, _, _, figures = measure("bench", "--max-new-tokens", 24, "--nodes", nodes)
        assert (code, figures["nodes"]) == (0, nodes)
        drafted.append(figures["overall"]["nodes_per_step"])
    assert drafted[0] == 0 < drafted[1] <= 1 < drafted[2] <= 2
    code, _, err, _ = measure("bench", "--nodes", 10_000)
    assert code == 2
    assert "got --nodes 10000, expected at most the bundle's scratch of" in err


def test_divergence_has_the_targets_logit_gap() -> None:
    engine = toy_engine("none")
    prompt_ids = engine.encode("abcabc")
    plain = engine.generate(prompt_ids, max_new_tokens=6).token_ids
    other = [*plain[:3], plain[3] + 1, *plain[4:]]
    found = audit.compare("p", prompt_ids, plain, other, engine.target)
    fresh = toy_engine("none").target
    logits_V = fresh.prefill(prompt_ids + plain[:3])[0].row(0)
    gap = float(logits_V[plain[3]] - logits_V[plain[3] + 1])
    spread = float(logits_V.max() - logits_V.min())
    assert found == audit.Divergence("p", 3, plain[3], plain[3] + 1, gap, spread)
    assert gap > 0
    # the engine notices that its KV is gone
    assert engine.generate(prompt_ids, max_new_tokens=6).token_ids == plain
    assert audit.compare("p", prompt_ids, plain, plain, engine.target) is None
    shorter = audit.compare("p", prompt_ids, plain, plain[:5], engine.target)
    assert shorter is not None
    assert (shorter.position, shorter.plain_id, shorter.id) == (5, plain[5], None)
    assert shorter.gap is None


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "hello"}]
    rows: list[dict[str, Any]] = [
        {"prompt": "text"},
        {"messages": messages, "category": "chat", "id": "m"},
    ]
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    assert read_prompts(path) == [BenchPrompt(1, "all", "text"), BenchPrompt("m", "chat", messages)]
    write_prompts(path, *PROMPTS)

    def chosen(limit: int | None, per_category: int | None) -> list[str | int]:
        return [prompt.id for prompt in read_prompts(path, limit, per_category)]

    assert chosen(None, None) == [1, 2, 3, 4]
    assert chosen(None, 1) == [1, 3]
    assert chosen(2, None) == [1, 3]
    assert chosen(3, None) == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got no prompt"),
        ("{}", "line 1: got keys none, expected turns"),
        ('{"prompt": ""}\n{"prompt": 3}', "line 2: got keys prompt"),
        ('{"prompt": "a"}\n{"prompt": 3}', "line 2: got keys prompt"),
        ('{"turns": []}', "line 1: got keys turns"),
        ('{"turns": ["a", 3]}', "line 1: got keys turns, expected turns"),
        ('{"messages": ["a"]}', "line 1: got keys messages"),
        ('{"messages": [{"role": "user", "content": null}]}', "line 1: got keys messages"),
        ('{"messages": [{"role": 3, "content": "a"}]}', "line 1: got keys messages"),
        ('{"prompt": "a", "id": [1]}', "line 1: got id [1], expected a number or a text"),
        ("[1]", "line 1: got list, expected an object"),
        ("prompt", "line 1: not JSON"),
        ("[" * 100_000, "line 1: not JSON (it is nested too deeply)"),
    ],
)
def test_bad_prompt_files_are_one_line_and_write_nothing(
    measure: Measure, text: str, message: str
) -> None:
    code, _, err, figures = measure("bench", prompts=[text])
    assert (code, err.count("\n"), figures) == (2, 1, {})
    assert message in err


def test_audit_writes_figures_and_prints_a_table(
    measure: Measure, engines: list[Engine], tmp_path: Path
) -> None:
    words = ("audit", "--max-new-tokens", 24)
    code, out, err, figures = measure(*words)
    assert code == 0
    assert (figures["bundle"], figures["precision"]) == ("small", "fp32")
    assert (figures["prompts"], figures["tokens"]) == (3, 72)
    assert (figures["identical"], figures["real"], figures["divergences"]) == (1.0, 0, [])
    assert figures["accepted_length"] > 1
    assert figures["strict"]["rows"] == 0
    assert "prompt 4 skipped: got a prompt of" in " ".join(err.split())
    assert re.search(r"identical .* 100.0% of the prompts", out)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["out.json"]
    assert [engine.drafter for engine in engines] == ["prompt_lookup"]
    code, out, _, figures = measure(*words, "--strict", "--limit", 1)
    assert (code, "rows redone" in out) == (0, True)
    assert figures["strict"]["rows"] > 0


def test_audit_of_a_wrong_acceptance_exits_with_1(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_the_first_child(tree: Any, draw: Callable[[int], int]) -> tuple[list[int], int]:
        path = [0, *tree.children(0)[:1]]
        return path, draw(path[-1])

    monkeypatch.setattr(generate, "by_target_sampling", take_the_first_child)
    code, out, _, figures = measure("audit", "--max-new-tokens", 24)
    assert code == 1
    assert figures["real"] >= len(figures["unjustified"]) > 0
    assert "first divergences" in out
    assert "real" in out


def test_audit_refuses_strict_with_a_temperature(measure: Measure, engines: list[Engine]) -> None:
    code, out, err, _ = measure("audit", "--strict", "--temperature", "0.5")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "got --strict with temperature 0.5, expected 0" in err
    assert engines == []  # found out before anything slow


@pytest.mark.parametrize("verb", sorted({*runtime_cli.VERBS} - {"pull", "push"}))
def test_no_bundle_is_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    from_file = ["--prompts", str(write_prompts(tmp_path / "p", *PROMPTS))]
    more = {"bench": from_file, "audit": from_file, "generate": ["hello"]}
    code, out, err = run(verb, *more.get(verb, []))
    assert (code, out) == (2, "")
    assert err.startswith("error: no bundle under bundles/")
    assert err.count("\n") == 1


def test_altered_bundle_and_unknown_drafter(run: Run, folder: Path) -> None:
    code, _, err = run("generate", "hello", "--bundle", folder, "--drafter", "nosuch")
    assert (code, err.count("\n")) == (2, 1)
    assert "got drafter 'nosuch', expected one of parallelspec, prompt_lookup" in err
    (folder / "target" / "target.onnx").write_bytes(b"altered")
    code, _, err = run("generate", "hello", "--bundle", folder)
    assert (code, err.count("\n")) == (2, 1)
    assert "truncated or altered" in err


def test_export_says_which_model_is_missing(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("build", "--model", "./no-such-model", "--out", out)
    code, _, err = run(*arguments, main=export_cli.main)
    assert (code, err.count("\n")) == (2, 1)
    assert "no-such-model" in err
    assert not out.exists()
