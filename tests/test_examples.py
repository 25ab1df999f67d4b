"""Runs every example on a tiny target, as a reader would."""

import dataclasses
import importlib.util
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import tiny_bundle

import spec_runtime
from spec_runtime.bundle import manifest as bundles

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
Run = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_roomy_bundle(tmp_path_factory.mktemp("examples") / "tiny")


def write_roomy_bundle(folder: Path, max_length: int = 4000) -> Path:
    """Writes a bundle whose target writes letters, with room for more of them than in tests of
    limits."""
    tiny_bundle.write(folder)
    manifest = bundles.read(folder).manifest
    target = dataclasses.replace(manifest.target, max_length=max_length)
    bundles.write_manifest(folder, dataclasses.replace(manifest, target=target))
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs an example as a program: (stdout, stderr)."""

    def run(name: str, *arguments: object) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr()

    return run


def module(name: str) -> ModuleType:
    """Imports an example, without running it."""
    spec = importlib.util.spec_from_file_location(f"example_{Path(name).stem}", EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_script(run: Run, bundle: Path) -> None:
    out, err = run("script.py", bundle, "abcd", "--max-new-tokens", 20)
    with spec_runtime.load(bundle) as engine:
        assert out == engine.generate("abcd", max_new_tokens=20).text + "\n"
    assert re.fullmatch(r"20 tokens, \d+ tokens/s, accepted length \d.\d\d, length\n", err)
    with pytest.raises(SystemExit, match=r"error: nowhere: no manifest\.json here"):
        run("script.py", "nowhere", "abcd")


def test_asyncio_app(run: Run, bundle: Path) -> None:
    lines = run("asyncio_app.py", bundle)[0].splitlines()
    assert [line.partition(".")[0] for line in lines] == [
        "Name a colour",
        "Name an animal",
        "Name a city",
        "Tell me a story",
        "cancelled",
    ]
    assert lines[3].startswith("Tell me a story. ")


def test_multi_user_chat(run: Run, bundle: Path) -> None:
    text = run("multi_user_chat.py", bundle)[0]
    example = module("multi_user_chat.py")
    turns = re.findall(
        r"^(\w+): (.+?) -> .*?^ +(\d+) of (\d+) prompt", text, re.DOTALL | re.MULTILINE
    )
    assert len(turns) == 6
    for user, questions in example.QUESTIONS.items():
        own = [turn for turn in turns if turn[0] == user]
        assert [question for _, question, _, _ in own] == [*questions]
        (_, _, first, _), (_, _, reused, num_tokens) = own
        assert int(first) < int(num_tokens) / 2 < int(reused), "the first turn was kept"


def test_json_extraction(run: Run, bundle: Path) -> None:
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    people = [
        json.loads(line) for line in run("json_extraction.py", bundle, "abc", "bcd")[0].splitlines()
    ]
    assert [set(person) for person in people] == [{"name", "age", "city"}] * 2
    assert all(0 <= person["age"] <= 150 for person in people)


def test_fastapi_app(bundle: Path) -> None:
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    pytest.importorskip("httpx", reason="httpx, which FastAPI's test client uses, is not installed")
    testclient = pytest.importorskip("fastapi.testclient", reason="FastAPI is not installed")
    engine = spec_runtime.load(bundle)
    expected = engine.generate("abcd", max_new_tokens=20).text
    with testclient.TestClient(module("fastapi_app.py").make_app(engine)) as client:
        asked = {"question": "abcd", "max_new_tokens": 20}
        with client.stream("POST", "/ask", json=asked) as response:
            assert response.status_code == 200
            assert "".join(response.iter_text()) == expected
        too_long = client.post("/ask", json={"question": "é" * 2000})
        assert too_long.status_code == 400
        assert too_long.json()["detail"].startswith("got a prompt of ")
        assert client.post("/ask", json={"question": ""}).status_code == 422
    with pytest.raises(RuntimeError, match="this engine is closed"):
        engine.generate("abcd")


def test_langchain_chat(run: Run, bundle: Path) -> None:
    pytest.importorskip("langchain_openai", reason="LangChain's client is not installed")
    pytest.importorskip("spec_runtime.serve.app", reason="the extra `serve` is not installed")
    served = importlib.import_module("served").served
    with spec_runtime.load(bundle) as engine, served(engine) as server:
        out, _ = run("langchain_chat.py", f"{server.url}/v1", "toy", "--max-tokens", 20)
    with spec_runtime.load(bundle) as engine:
        messages = [
            {"role": "system", "content": "Answer in one sentence."},
            {"role": "user", "content": "Name three colours."},
        ]
        first = engine.generate(messages, max_new_tokens=20).text
    assert out.startswith(first + "\n")
    assert len(out) > len(first) + 2


@pytest.mark.parametrize("drafter", ["parallelspec", "medusa", "prompt_lookup", "none"])
def test_speculative(drafter: str, run: Run, bundle: Path) -> None:
    """The loop by hand gives the tokens of `generate`, and drafts save passes."""
    example = module("speculative.py")
    with spec_runtime.load(bundle, drafter, profile=False) as engine:
        expected = engine.generate("abcd", max_new_tokens=40).token_ids
        with engine.target.alone():
            passes = list(example.decode(engine, engine.encode("abcd"), 40))
    assert [token for tokens in passes for token in tokens] == list(expected)
    assert (len(passes) < 40) == (drafter != "none")
    out, err = run("speculative.py", bundle, "abcd", "--drafter", drafter, "--max-new-tokens", 40)
    assert out.count("|") == len(passes) - 1
    assert re.fullmatch(r"accepted length \d\.\d\d\n", err)


def test_what_follows_the_end_of_an_answer_is_cut() -> None:
    until = module("speculative.py").until
    assert until([1, 9, 2], (8, 9)) == [1, 9]
    assert until([1, 2], (8, 9)) == [1, 2]


def test_the_quickstart_measures_prompts_in_turns(
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch", reason="the extra `export` is not installed")
    script = (ROOT / "tools/quickstart.sh").read_text(encoding="utf-8")
    (program,) = re.findall(r"<<'PY'\n(.*?)^PY$", script, re.DOTALL | re.MULTILINE)
    file = tmp_path / "measured.py"
    file.write_text(program)
    monkeypatch.setattr(sys, "argv", [str(file), str(bundle)])
    runpy.run_path(str(file), run_name="__main__")
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].startswith("median and range of 8 prompts, each answered without and with")
    for line in shown[2:]:
        median, least, greatest = map(float, re.findall(r"\d+\.\d\d", line))
        assert least <= median <= greatest
    words = [re.split(r"\s+\d", line)[0] for line in shown[2:]]
    assert words == ["tokens/s without", "tokens/s with", "speed-up", "accepted length"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"\n{word}" in readme for word in (shown[1], *words)), "README shows such a run"


def test_every_example_is_run_here_and_walked_through_on_the_page() -> None:
    page = (ROOT / "docs/embed.md").read_text(encoding="utf-8")
    own = Path(__file__).read_text(encoding="utf-8")
    for file in EXAMPLES.glob("*.py"):
        assert f"examples/{file.name}" in page, "docs/embed.md walks through every example"
        assert f"def test_{file.stem}(" in own
        assert f"python examples/{file.name}" in file.read_text(encoding="utf-8")
