"""Self-distillation: interrupted equals uninterrupted, and answers are the target's own."""

import errno
import hashlib
import importlib.util
import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import numpy as np
import pytest
from fake_clock import FakeClock
from said import Said
from small import Run
from tiny_gguf import write_gguf
from tiny_target import make_tokenizer, save_llama

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from spec_export.cli import main  # noqa: E402
from spec_export.distill import answers as distill  # noqa: E402 (needs torch)
from spec_export.distill import config as distill_config  # noqa: E402
from spec_export.distill import engines as distill_engines  # noqa: E402
from spec_export.distill import server as distill_server  # noqa: E402 (needs torch)
from spec_export.distill.answers import DistillConfig, DistillResult  # noqa: E402
from spec_export.distill.engines import GenerationParams  # noqa: E402
from spec_export.model import target  # noqa: E402 (needs torch)
from spec_export.training import data  # noqa: E402 (needs torch)
from spec_runtime.errors import UserError  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_llama(tmp_path_factory.mktemp("models") / "tiny"))


def config(model: str, out: Path, **more: Any) -> DistillConfig:
    settings = {"num_prompts": 10, "max_new_tokens": 12, "batch_size": 4, "engine": "transformers"}
    return DistillConfig(model=model, out=out, **{**settings, "max_prompt_tokens": 48, **more})


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[float, DistillResult]:
    """Returns what runs that nothing interrupted wrote, by temperature."""
    out = tmp_path_factory.mktemp("whole") / "sub"
    return {
        temperature: distill.run(config(model, out / f"{temperature}", temperature=temperature))
        for temperature in (0.0, 0.8)
    }


def test_sampled_prompts_and_greedy_answers(model: str, whole: dict[float, DistillResult]) -> None:
    result = whole[0.0]
    rows = read(result.out)
    assert (result.rows, result.engine, len(rows)) == (10, "transformers", 10)
    assert result.answer_tokens == result.new_tokens == sum(len(r["response"]) for r in rows)
    assert len({tuple(row["prompt"]) for row in rows}) > 5
    assert all(row["prompt"] and not {0, 1} & set(row["prompt"]) for row in rows)

    # Each answer is the arg max of the target's logits at every one of its positions.
    network, tokenizer = target.load(target.resolve(model))
    examples = data.read(result.out, tokenizer, 256)
    for row, example in zip(rows, examples, strict=True):
        with torch.inference_mode():
            logits_TV = network(torch.from_numpy(example.token_T[None].astype(np.int64))).logits[0]
        first = int(np.argmax(example.loss_T))
        assert logits_TV[first - 1 : -1].argmax(-1).tolist() == row["response"]
        assert len(row["response"]) == 12 or row["response"][-1] == 1


class Interrupted(Exception):
    pass


NO_PROMPTS = ('{"prompt": ""}', '{"prompt": [98]}', '{"text": "a"}')
NO_TURNS = ('{"turns": "a"}', '{"turns": ["a"], "prompt": "b"}', '{"turns": ["a", ""]}')
TWO_SYSTEMS = '{"system": "b", "messages": [{"role": "system", "content": "c"}]}'


def use_engine(patch: pytest.MonkeyPatch, engine: Any) -> None:
    """Lets distilling open this engine, whatever the settings name."""
    patch.setattr(distill, "open_engine", lambda *_: engine)


def run_until_interrupted(
    settings: DistillConfig, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distills with an engine that stops working after that number of calls (a batch takes two)."""
    engine = transformers_engine(str(settings.model))
    generate, left = engine.generate, [None] * calls

    def failing(*given: Any) -> list[list[int]]:
        if not left:
            raise Interrupted
        left.pop()
        return generate(*given)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "generate", failing)
        use_engine(patch, engine)
        with pytest.raises(Interrupted):
            distill.run(settings)


def transformers_engine(model: str) -> distill_engines.TransformersEngine:
    return distill_engines.TransformersEngine(target.resolve(model), "fp32")


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "calls"), [(0.0, 0), (0.0, 3), (0.8, 1), (0.8, 4)])
def test_resumed_equals_uninterrupted(
    model: str,
    whole: dict[float, DistillResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
    calls: int,
) -> None:
    part = config(model, tmp_path / "part.jsonl", temperature=temperature)
    run_until_interrupted(part, calls, monkeypatch)
    with open(part.out, "a") as file:  # killed while it wrote: a whole row and half of one
        file.write('{"prompt": [5], "response": [6]}\n{"prompt": [5], "resp')
    distill.run(part)
    assert part.out.read_bytes() == whole[temperature].out.read_bytes()


def test_killed_while_the_last_batch_is_cut_off(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows are asked for, so that the last batch, which was not whole, is made again."""
    prompts = prompts_file(tmp_path, *(f"say {i}" for i in range(7)))
    given: dict[str, Any] = {"prompts": prompts, "batch_size": 2}
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    distill.run(config(model, whole, **given, num_prompts=7))
    distill.run(config(model, part, **given, num_prompts=5))
    more = config(model, part, **given, num_prompts=7)
    cut = distill._truncate

    def cut_and_die(path: Path, size: int) -> None:
        cut(path, size)
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(distill, "_truncate", cut_and_die)
        with pytest.raises(Interrupted):
            distill.run(more)
    distill.run(more)
    assert part.read_bytes() == whole.read_bytes()


@pytest.mark.slow
def test_more_rows_later_equals_all_at_once(
    model: str, whole: dict[float, DistillResult], tmp_path: Path
) -> None:
    out = tmp_path / "part.jsonl"
    for count in (3, 3, 7, 10):
        result = distill.run(config(model, out, num_prompts=count))
        assert len(read(out)) == result.rows == count
    assert out.read_bytes() == whole[0.0].out.read_bytes()
    with pytest.raises(UserError, match="expected fewer: 2"):
        distill.run(config(model, out, num_prompts=2))


def test_prompts_from_a_file(model: str, tmp_path: Path) -> None:
    hello_row = {"prompt": "hello", "source": "x"}
    prompts = write_rows(tmp_path, hello_row, {"prompt": [40, 41]}, {"prompt": "a"})
    settings = {"prompts": prompts, "num_prompts": None, "batch_size": 2}
    out = distill.run(config(model, tmp_path / "out.jsonl", **settings)).out
    got = read(out)
    hello, a = (make_tokenizer().encode(text) for text in ("hello", "a"))
    assert [row["prompt"] for row in got] == [hello, [40, 41], a]
    assert [row.get("source") for row in got] == ["x", None, None]

    with pytest.raises(UserError, match=r"num_prompts is 4, .* holds 3"):
        distill.run(config(model, out, **{**settings, "num_prompts": 4}))
    prompts_file(tmp_path, "b")
    with pytest.raises(UserError, match=r"cannot go on with .*: prompts was"):
        distill.run(config(model, out, **settings))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((line, 'expected "prompt"') for line in NO_PROMPTS),
        *((line, "expected ") for line in NO_TURNS),
        ('{"turns": []}', "got no message of a user"),
        ('{"prompt": "a", "system": ["b"]}', '"system" is list, expected a text'),
        (TWO_SYSTEMS, "got a message of role 'system', expected one system message at most"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "got a message of role 'tool'"),
        ('{"messages": "a"}', '"messages" is not a list'),
        ('{"text": "a"}', r"got keys \['text'\], expected \"prompt\""),
        ('{"conversations": [{"from": "gpt", "value": "a"}]}', "got no message of a user"),
        ("[" * 5000, "nested too deeply"),
        ('{"prompt": "a\\ud800"}', "half a surrogate pair"),
        ('{"prompt": "a", "source": 3}', '"source" is 3, expected a string'),
    ],
)
def test_bad_prompts_name_file_and_line(
    model: str, tmp_path: Path, line: str, message: str
) -> None:
    prompts = prompts_file(tmp_path, "fine")
    with prompts.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=rf"prompts.jsonl:2: .*{message}"):
        distill.run(config(model, tmp_path / "out.jsonl", prompts=prompts, num_prompts=None))


def test_refuses_to_mix_or_overwrite(model: str, tmp_path: Path) -> None:
    out = distill.run(config(model, tmp_path / "out.jsonl", num_prompts=2)).out
    before = out.read_bytes()
    with pytest.raises(UserError, match=r"seed was 0, got 1"):
        distill.run(config(model, out, seed=1))
    with pytest.raises(UserError, match="exists: resume it"):
        distill.run(config(model, out, resume=False))
    assert out.read_bytes() == before
    out.write_bytes(before[:-3])
    with pytest.raises(UserError, match=r"bytes, expected \d+: it was changed"):
        distill.run(config(model, out))
    (tmp_path / "out.jsonl.state.json").unlink()
    with pytest.raises(UserError, match=r"no usable out.jsonl.state.json"):
        distill.run(config(model, out))


def test_targets_that_cannot_be_distilled(model: str, tmp_path: Path) -> None:
    bare = str(save_llama(tmp_path / "bare", template=None))
    with pytest.raises(UserError, match="no chat template to sample prompts after"):
        distill.run(config(bare, tmp_path / "out.jsonl"))
    with pytest.raises(UserError, match="the target's context"):
        distill.run(config(model, tmp_path / "out2.jsonl", max_new_tokens=250))


def test_no_prompt_ended_is_an_error(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless(Chatty):
        def generate(self, prompts: Any, params: GenerationParams, *_: Any) -> list[list[int]]:
            return [[5] * params.max_new_tokens for _ in prompts]

    use_engine(monkeypatch, Endless())
    with pytest.raises(UserError, match="ended no prompt within 48 tokens in 20 batches"):
        distill.run(config(model, tmp_path / "out.jsonl"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_prompts", 0),
        ("turns", 0),
        ("temperature", -1.0),
        ("temperature", (0.0, float("nan"))),
        ("engine", "llama"),
        ("precision", "int8"),
        ("server", "localhost:8000"),
        *(("shard", shard) for shard in ("0/2", "3/2", "1", "a/b")),
    ],
)
def test_bad_settings(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        config("m", tmp_path / "out.jsonl", **{field: value})
    assert caught.value.param == field


def test_missing_engine_is_one_line(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (distill_config, distill_engines):
        monkeypatch.setattr(module, "is_installed", lambda: False)
    with pytest.raises(UserError, match="engine openvino is not installed") as caught:
        distill.run(config(model, tmp_path / "out.jsonl", engine="openvino"))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    assert distill_engines.choose("auto", target.resolve(model)) == "transformers"


def test_padding_does_not_change_answers(model: str) -> None:
    engine, params = transformers_engine(model), GenerationParams(8, 0.0, 0, 0, (1,))
    prompts = [[5, 6, 7], [40, 41, 42, 43, 44, 45, 46]]
    assert engine.generate(prompts, params) == [engine.generate([p], params)[0] for p in prompts]


def test_sampling_is_seeded_cut_and_leaves_the_global_generator(model: str) -> None:
    engine, state = transformers_engine(model), torch.get_rng_state()
    first, again, other = (
        engine.generate([[5, 6]] * 4, GenerationParams(8, 1.0, 0, seed, (1,))) for seed in (3, 3, 4)
    )
    assert first == again != other
    assert len({tuple(ids) for ids in first}) > 1
    greedy = engine.generate([[5, 6]], GenerationParams(8, 0.0, 0, 0, (1,)))
    assert engine.generate([[5, 6]], GenerationParams(8, 1.0, 1, 9, (1,))) == greedy
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("kind", "most"), [("F32", 0.0), ("F16", 2**-11), ("Q8_0", 1 / 220)])
def test_a_copied_gguf_is_the_same_model(kind: str, most: float, tmp_path: Path) -> None:
    """float16 keeps 11 bits of a weight; Q8_0 has steps of 1/127 of a block's largest."""
    write_gguf(tmp_path / "q4.gguf")
    distill_engines.write_gguf(tmp_path / "q4.gguf", tmp_path / "copy.gguf", kind)
    weights = []
    for name in ("q4.gguf", "copy.gguf"):
        network, tokenizer = target.load(target.resolve(str(tmp_path / name)))
        assert tokenizer.eos_token_id == 2
        assert len(data.chat_affixes(tokenizer)[1]) > 5
        weights.append(network.state_dict())
    for name, expected in weights[0].items():
        error = (weights[1][name] - expected).abs().max()
        assert error <= most * expected.abs().max(), name
        assert expected.ndim > 1 or error == 0, "vectors stay as they are"


def test_a_damaged_gguf_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="cannot read"):
        distill_engines.write_gguf(tmp_path / "bad.gguf", tmp_path / "x.gguf", "F16")


@pytest.mark.skipif(
    importlib.util.find_spec("openvino_genai") is None, reason="openvino-genai is not installed"
)
def test_openvino_gives_the_answers_of_transformers(tmp_path: Path) -> None:
    model = str(tmp_path / "q4.gguf")
    write_gguf(tmp_path / "q4.gguf")
    # The reference reads the same float16 weights, so that greedy answers can be compared exactly.
    distill_engines.write_gguf(tmp_path / "q4.gguf", tmp_path / "f16.gguf", "F16")
    reference = transformers_engine(str(tmp_path / "f16.gguf"))
    engine = distill_engines.OpenVINOEngine(target.resolve(model), "fp32", 4)
    prompts = [[5, 6, 7, 8], [40, 41, 42], [99, 100, 101, 102, 103]]
    params = GenerationParams(10, 0.0, 0, 0, (2,))
    assert engine.generate(prompts, params) == reference.generate(prompts, params)
    sampled = GenerationParams(10, 1.0, 50, 7, (2,))
    first = engine.generate([[5, 6]] * 3, sampled)
    assert engine.generate([[5, 6]] * 3, sampled) == first
    assert len({tuple(ids) for ids in first}) > 1

    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    settings = {"engine": "openvino", "max_prompt_tokens": 96, "batch_size": 16}
    for out, count in ((whole, 5), (part, 2), (part, 5)):
        distill.run(config(model, out, **settings, num_prompts=count))
    assert part.read_bytes() == whole.read_bytes()


# ---- two at once, foreign files, prompts that do not fit ----


@pytest.mark.slow
def test_two_processes_cannot_write_one_file(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second says who writes; the first one's rows are all there."""
    settings, opened, refused = config(model, tmp_path / "out.jsonl"), distill.open_engine, []

    def another(*arguments: Any) -> Any:
        with pytest.raises(UserError, match=f"is being written by process {os.getpid()} on "):
            distill.run(settings)
        refused.append(True)
        return opened(*arguments)

    monkeypatch.setattr(distill, "open_engine", another)
    rows = read(distill.run(settings).out)
    assert refused == [True]
    assert len({json.dumps(row) for row in rows}) == len(rows) == 10
    assert not list(tmp_path.glob(".*")), "a lock is left"


def write_rows(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts_file(folder: Path, *prompts: str) -> Path:
    return write_rows(folder, *({"prompt": prompt} for prompt in prompts))


def test_a_prompt_that_does_not_fit_is_skipped_and_counted(model: str, tmp_path: Path) -> None:
    """A context of 256 less 12 new tokens and 13 after the prompt leave 231 with the 23 before."""
    texts = ["one", "x" * 300, "two", "three"]
    given = {"prompts": prompts_file(tmp_path, *texts), "num_prompts": None, "batch_size": 2}
    said = Said()
    result = distill.run(config(model, tmp_path / "out.jsonl", **given), said)
    tokenizer = make_tokenizer()
    fitting = [tokenizer.encode(text) for text in ("one", "two", "three")]
    assert [row["prompt"] for row in read(result.out)] == fitting
    assert (result.rows, result.skipped) == (3, 1)
    assert "warning: skipping 1 of 4 prompts" in said.text
    assert "prompts.jsonl:2 has 323" in said.text
    with pytest.raises(UserError, match=r"num_prompts is 4, .* holds 3, and 1 that do not fit"):
        distill.run(config(model, result.out, **given | {"num_prompts": 4}))
    given["prompts"] = prompts_file(tmp_path, "x" * 300)
    with pytest.raises(UserError, match=r"every prompt of .* is longer than the"):
        distill.run(config(model, tmp_path / "none.jsonl", **given))


@pytest.mark.parametrize(
    "sidecar",
    [
        b"[" * 5000,
        b"[]",
        b'{"settings": {}, "provenance": {}, "rows": "2"}',
        b'{"settings": {}, "provenance": {}, "size": -9}',
        b'{"settings": {}, "provenance": {}, "finished": {"rows": 1, "bytes": 2}}',
        b"\xff\xfe",
    ],
)
def test_a_foreign_sidecar_is_one_line(model: str, tmp_path: Path, sidecar: bytes) -> None:
    (tmp_path / "out.jsonl").write_text("{}\n")
    (tmp_path / "out.jsonl.state.json").write_bytes(sidecar)
    with pytest.raises(UserError, match=r"no usable out\.jsonl\.state\.json"):
        distill.run(config(model, tmp_path / "out.jsonl"))
    assert (tmp_path / "out.jsonl").read_text() == "{}\n"


def test_a_tokenizer_that_fails_is_one_line(model: str, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    (copy / "tokenizer.json").write_text('{"version": 1}')
    with pytest.raises(ValueError, match="could not load the tokenizer of"):
        distill.run(config(str(copy), tmp_path / "out.jsonl"))
    shutil.copytree(model, copy, dirs_exist_ok=True)
    (copy / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ValueError, match=r"eos_token_id: got str '</s>', expected int"):
        distill.run(config(str(copy), tmp_path / "out.jsonl"))


def test_a_model_of_the_same_name_does_not_go_on(model: str, tmp_path: Path) -> None:
    out = distill.run(config(model, tmp_path / "out.jsonl", num_prompts=2)).out
    other = save_llama(tmp_path / "tiny", initializer_range=0.2)
    with pytest.raises(UserError, match=r"cannot go on with .*: fingerprint was"):
        distill.run(config(str(other), out, num_prompts=4))


def test_the_rate_is_that_of_generating(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, chatty = FakeClock(), Chatty()
    monkeypatch.setattr("time.perf_counter", clock.read)
    monkeypatch.setattr(chatty, "generate", clock.taking(2, chatty.generate))
    monkeypatch.setattr(distill, "open_engine", clock.taking(60, lambda *_: chatty))
    result = distill.run(config(model, tmp_path / "out.jsonl", num_prompts=1))
    assert result.seconds == clock.now - 60 > 0


def test_a_full_disk_is_one_line(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = config(model, tmp_path / "out.jsonl", num_prompts=2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"cannot write answers to .*\(No space left on"):
            distill.run(out)
    assert distill.run(out).rows == len(read(out.out)) == 2


# ---- several turns, several temperatures ----


class Chatty:
    """Says up to nine letters that depend on the prompt, the seed and the temperature.

    One of three answers is cut off. After the user prefix it makes up messages, which all end.
    """

    name = "chatty"

    def generate(
        self, prompts: Sequence[Sequence[int]], params: GenerationParams, *_: Any
    ) -> list[list[int]]:
        said = []
        for row, prompt in enumerate(prompts):
            temperature = params.temperature_of(row)
            key = f"{list(prompt)} {temperature} {params.seed + row if temperature else 0}"
            draw = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")
            letters = [40 + (draw + i) % 50 for i in range(3 + draw % 7)]
            ends = draw % 3 or params.top_k
            said.append([*letters, 1] if ends else (letters * 9)[: params.max_new_tokens])
        return said


@pytest.fixture
def chatty(monkeypatch: pytest.MonkeyPatch) -> None:
    use_engine(monkeypatch, Chatty())


def turns_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    return row.get("turns", [row])


@pytest.mark.usefixtures("chatty")
def test_every_turn_of_a_conversation_carries_loss(model: str, tmp_path: Path) -> None:
    """A row's tokens are those that the chat template writes for the conversation."""
    tokenizer = make_tokenizer()
    rows = read(distill.run(config(model, tmp_path / "out.jsonl", turns=3)).out)
    assert {len(turns_of(row)) for row in rows} == {1, 2, 3}
    for row, example in zip(rows, data.read(tmp_path / "out.jsonl", tokenizer, 999), strict=True):
        turns = turns_of(row)
        messages = []
        for turn in turns:
            answer = [i for i in turn["response"] if i != 1]
            messages.append({"role": "user", "content": tokenizer.decode(turn["prompt"])})
            messages.append({"role": "assistant", "content": tokenizer.decode(answer)})
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        written = tokenizer.encode(text, add_special_tokens=False)
        # The template ends the last answer, and a newline follows.
        ended = turns[-1]["response"][-1] == 1
        assert example.token_T.tolist() == written[: -1 if ended else -2]
        answers = [i for turn in turns for i in turn["response"]]
        assert example.token_T[example.loss_T].tolist() == answers
        # Only an answer that ended has a turn after it.
        assert all(turn["response"][-1] == 1 for turn in turns[:-1])


@pytest.mark.usefixtures("chatty")
def test_a_system_message_is_asked_and_learned_from(model: str, tmp_path: Path) -> None:
    """It comes through the chat template, whatever the row's form, and stays with the answer."""
    user = {"role": "user", "content": "hello"}
    prompts = write_rows(
        tmp_path,
        {"prompt": "hello", "system": "be rude"},
        {"messages": [{"role": "system", "content": "be rude"}, user], "id": 3},
        {"conversations": [{"from": "human", "value": "hello"}], "system": "be rude"},
        {"turns": ["hello", "and you?"], "system": "be rude"},
        {"prompt": "hello"},
    )
    settings = {"prompts": prompts, "num_prompts": None, "turns": 2, "max_new_tokens": 20}
    out = distill.run(config(model, tmp_path / "out.jsonl", **settings)).out
    *rude, nice = read(out)
    answers = [turns_of(row)[0]["response"] for row in (*rude, nice)]
    assert answers[:4] == [answers[0]] * 4 != [answers[4]] * 4
    assert [row.get("system") for row in (*rude, nice)] == ["be rude"] * 4 + [None]
    tokenizer = make_tokenizer()
    texts = [tokenizer.decode(example.token_T) for example in data.read(out, tokenizer, 256)]
    for text in texts[:4]:
        assert text.startswith("<s>system\nbe rude</s>\n<s>user\nhello</s>\n<s>assistant\n")
    assert texts[4].startswith("<s>system\nbe nice</s>\n<s>user\nhello</s>\n")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[-1]['content'] }}", "leaves out a system message"),
        (
            "{{ raise_exception('no system') if messages | length > 1 }}"
            "{{ messages[0]['content'] }}",
            "no system",
        ),
        (None, "this tokenizer has none, which a system message needs"),
    ],
)
def test_a_system_message_without_a_place_is_refused(
    tmp_path: Path, template: str | None, message: str
) -> None:
    bare = str(save_llama(tmp_path / "bare", template=template))
    prompts = write_rows(tmp_path, {"prompt": "hello", "system": "be rude"})
    with pytest.raises(UserError, match=message):
        distill.run(config(bare, tmp_path / "out.jsonl", prompts=prompts, num_prompts=None))


def test_what_is_done_is_said_from_the_beginning(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first answer stands what is done, and within a batch how far it is."""
    monkeypatch.setattr(distill, "FIRST_STEPS", 2)
    said, out = Said(), tmp_path / "out.jsonl"
    distill.run(config(model, out, num_prompts=8, turns=2), said)
    assert said.lines[-2:] == [
        "loading tiny (transformers, fp32)",
        "the target writes 4 prompts, then 4 answers at once",
    ]
    shares = said.shares["answers"]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert len(shares) > 2 * 8, "a batch of 12 steps is more than one report"


@pytest.mark.usefixtures("chatty")
def test_given_turns_are_asked_and_the_rest_is_sampled(model: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    given = [{"turns": ["first", f"second {i}", "third"], "source": "chat"} for i in range(9)]
    settings = {"prompts": write_rows(tmp_path, *given, {"prompt": "alone"}), "num_prompts": None}
    rows = read(distill.run(config(model, tmp_path / "out.jsonl", turns=2, **settings)).out)
    second = [turns_of(row)[1]["prompt"] for row in rows[:9] if len(turns_of(row)) > 1]
    assert second
    assert all(tokenizer.decode(ids).startswith("second ") for ids in second)
    assert max(len(turns_of(row)) for row in rows) == 2
    assert turns_of(rows[9])[0]["prompt"] == tokenizer.encode("alone")
    once = read(distill.run(config(model, tmp_path / "once.jsonl", **settings)).out)
    assert [row["prompt"] for row in once] == [turns_of(row)[0]["prompt"] for row in rows]


@pytest.mark.usefixtures("chatty")
def test_conversations_fit_the_context(model: str, tmp_path: Path) -> None:
    """A context of 256: the template takes 47 and 31 a turn, messages and answers up to 60."""
    settings = {"max_new_tokens": 60, "max_prompt_tokens": 60, "num_prompts": 30}
    out = distill.run(config(model, tmp_path / "out.jsonl", turns=9, **settings)).out
    lengths = [len(e.token_T) for e in data.read(out, make_tokenizer(), 999)]
    assert max(len(turns_of(row)) for row in read(out)) > 2
    assert max(lengths) <= 256


@pytest.mark.usefixtures("chatty")
@pytest.mark.parametrize("turns", [1, 3])
def test_temperatures_share_the_rows(model: str, tmp_path: Path, turns: int) -> None:
    temperatures = (0.0, 0.7, 1.0)
    more = {"num_prompts": 90, "turns": turns, "temperature": temperatures}
    rows = read(distill.run(config(model, tmp_path / "out.jsonl", **more)).out)
    counts = Counter(row["temperature"] for row in rows)
    assert set(counts) == set(temperatures)
    assert min(counts.values()) >= 20
    # The rows as they are written train, and stopping changes none of them.
    assert len(data.read(tmp_path / "out.jsonl", make_tokenizer(), 999)) == 90
    for count in (5, 90):
        part = config(model, tmp_path / "part.jsonl", **{**more, "num_prompts": count})
        distill.run(part)
    assert part.out.read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(UserError, match="temperature was"):
        distill.run(config(model, part.out, **{**more, "temperature": (0.0, 0.7)}))


def test_a_file_of_one_turn_does_not_go_on_with_two(model: str, tmp_path: Path) -> None:
    out = distill.run(config(model, tmp_path / "out.jsonl", num_prompts=2)).out
    assert "temperature" not in read(out)[0]  # a wholly greedy run's rows are as they were
    with pytest.raises(UserError, match="turns was 1, got 2"):
        distill.run(config(model, out, turns=2))
    assert distill.run(config(model, out, num_prompts=3)).rows == 3


def test_one_batch_of_two_temperatures_equals_two_batches(model: str) -> None:
    engine, prompts = transformers_engine(model), [[5, 6, 7], [40, 41], [9], [60, 61, 62, 63]]
    both = engine.generate(prompts, GenerationParams(8, (0.0, 1.0, 0.0, 1.0), 0, 3, (1,)))
    greedy = engine.generate(prompts[::2], GenerationParams(8, 0.0, 0, 3, (1,)))
    sampled = engine.generate(prompts[1::2], GenerationParams(8, 1.0, 0, 3, (1,)))
    assert (both[::2], both[1::2]) == (greedy, sampled)


@pytest.mark.usefixtures("chatty")
def test_the_command_takes_several_temperatures(model: str, tmp_path: Path, run: Run) -> None:
    command = ["distill", "--model", model, "--out", tmp_path / "out.jsonl", "--num-prompts", "8"]
    command += ["--max-new-tokens", "12", "--max-prompt-tokens", "48", "--engine", "transformers"]
    code, _, err = run(*command, "--temperature", "0,warm", main=main)
    assert code == 2
    assert "got '0,warm', expected a number, or several" in err
    assert run(*command, "--temperature", "0.5,1", "--turns", "2", main=main)[0] == 0
    assert {row["temperature"] for row in read(tmp_path / "out.jsonl")} == {0.5, 1.0}


# ---- answers of a server, shards ----


class AnswerServer(ThreadingHTTPServer):
    """Answers /v1/completions with an engine, as vLLM does (`with_ids`) or with texts alone.

    `failures` come before the answers: a status each, None for a connection that breaks off, or 0
    for an answer that does.
    """

    def __init__(self, engine: Any, *failures: int | None, with_ids: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), AnswerHandler)
        self.engine, self.failures, self.with_ids = engine, list(failures), with_ids
        self.turn, self.asked, self.keys = Lock(), list[dict[str, Any]](), set[str | None]()
        self.url = f"http://127.0.0.1:{self.server_port}"
        Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class AnswerHandler(BaseHTTPRequestHandler):
    server: AnswerServer

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": "its-name"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.turn:
            if self.server.failures:
                status = self.server.failures.pop(0)
                return self._reply(status, {"error": "no\nidea"}) if status else None
            self.server.asked.append(body)
            self.server.keys.add(self.headers["Authorization"])
            ends, top_k = tuple(body["stop_token_ids"]), max(0, body["top_k"])
            params = GenerationParams(
                body["max_tokens"], body["temperature"], top_k, body["seed"], ends
            )
            (ids,) = self.server.engine.generate([body["prompt"]], params)
        text = make_tokenizer().decode([i for i in ids if i not in ends])
        choice: dict[str, Any] = {"text": text}
        choice["finish_reason"] = "stop" if ids[-1] in ends else "length"
        self._reply(
            200, {"choices": [choice | ({"token_ids": ids} if self.server.with_ids else {})]}
        )

    def _reply(self, status: int, body: Any) -> None:
        self.send_response(status or 200)
        if not status:
            self.send_header("Content-Length", "99")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        """Writes nothing."""


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets requests be tried again without waiting, three times at most."""
    monkeypatch.setattr(distill_server, "PAUSES", (0.0,) * 3)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("with_ids", [True, False])
def test_a_server_gives_the_answers_of_the_target(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_ids: bool
) -> None:
    """Rows are those of its engine, through failures, and none needs the target's weights here."""
    server = AnswerServer(Chatty(), 503, None, 0, with_ids=with_ids)
    more = {"turns": 2, "temperature": (0.0, 0.7)}
    monkeypatch.setenv("OPENAI_API_KEY", "its-key")
    said = Said()
    asked = distill.run(config(model, tmp_path / "a", server=f"{server.url}/v1/", **more), said)
    assert (asked.engine, server.keys) == ("server", {"Bearer its-key"})
    assert f"asking its-name at {server.url}" in said.text
    assert {body["seed"] for body in server.asked} != {server.asked[0]["seed"]}
    use_engine(monkeypatch, Chatty())
    here = distill.run(config(model, tmp_path / "b", **more))
    assert read(asked.out) == read(here.out)
    part = config(model, tmp_path / "c", **more, num_prompts=3, server=server.url)
    distill.run(part)
    server.shutdown()
    other = AnswerServer(Chatty(), with_ids=with_ids)  # another address goes on with the file
    distill.run(replace(part, num_prompts=10, server=other.url))
    assert read(part.out) == read(here.out)
    other.shutdown()


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ([400], r"/v1/completions: 400 .*no\\nidea.*, expected an answer"),
        ([503] * 40, r"/v1/completions: 503 "),
        ([None] * 40, r"/v1/completions: .*, expected an answer"),
        ([200], r"got \{'error': .*\}, expected an answer's text"),
    ],
)
def test_a_server_that_does_not_answer_is_one_line(
    model: str, tmp_path: Path, failures: list[int | None], message: str
) -> None:
    server = AnswerServer(Chatty(), *failures)
    settings = config(model, tmp_path / "out.jsonl", server=server.url, batch_size=1)
    with pytest.raises(UserError, match=message) as caught:
        distill.run(settings)
    assert (caught.value.param, "\n" in str(caught.value)) == ("server", False)
    server.shutdown()
    server.server_close()
    with pytest.raises(UserError, match=r"/v1/models: .*refused.*, expected an answer"):
        distill.run(settings)


@pytest.mark.usefixtures("chatty")
@pytest.mark.parametrize("from_file", [True, False])
def test_shards_are_written_apart_and_joined(model: str, tmp_path: Path, from_file: bool) -> None:
    prompts = prompts_file(tmp_path, *(f"say {i}" for i in range(10))) if from_file else None
    parts = [tmp_path / f"{i}.jsonl" for i in range(3)]
    shards = [
        config(model, out, prompts=prompts, shard=f"{i + 1}/3") for i, out in enumerate(parts)
    ]
    sizes = [distill.run(shard).rows for shard in shards]
    assert sizes == [3, 3, 4]
    joined = distill.merge([parts[2], parts[0], parts[1]], tmp_path / "all.jsonl")
    assert joined.out.read_bytes() == b"".join(part.read_bytes() for part in parts)
    rows = read(joined.out)
    assert len({json.dumps(row["prompt"]) for row in rows}) == joined.rows == 10
    assert joined.answer_tokens == sum(len(row["response"]) for row in rows)
    data.require_target([joined.out], "tiny", target.fingerprint(target.resolve(model)))
    assert distill.run(config(model, joined.out, prompts=prompts)).new_tokens == 0, "is whole"

    def refused(message: str, *given: Path, out: str = "other.jsonl") -> None:
        with pytest.raises(UserError, match=message):
            distill.merge(given, tmp_path / out)
        assert not (tmp_path / "other.jsonl").exists()

    refused(r"got shard 1/3, 2/3 in 2 files, expected 1/2, 2/2", *parts[:2])
    refused(r"got shard 1/3, 2/3 in 3 files", parts[0], parts[0], parts[1])
    refused("exists: remove it", *parts, out="all.jsonl")
    with parts[1].open("a") as file:
        file.write("{}\n")
    refused(r"1\.jsonl is not finished: distill its shard 2/3", *parts)
    parts[1].unlink()
    distill.run(replace(shards[1], max_new_tokens=9, resume=False))
    refused("1.jsonl was written with another max_new_tokens than", *parts)
