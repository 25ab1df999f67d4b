"""How the commands are found, named and completed, and where generate takes its prompt from."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from small import Run, toy_engine

import spec_runtime
from spec_export import cli as export_cli
from spec_runtime import Engine
from spec_runtime import cli as runtime_cli
from spec_runtime.cli import completion
from spec_runtime.cli.answer_format import response_format

ROOT = Path(__file__).parents[1]
PROMPT = "abcabcabc"

pytestmark = pytest.mark.usefixtures("plain_engine")


@pytest.fixture
def plain_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets commands load a toy engine without a drafter."""
    monkeypatch.setattr(spec_runtime, "load", lambda path, *args, **options: toy_engine("none"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What engines have encoded that was not encoded yet: prompt, raw, system, control_tokens."""
    seen: list[tuple[Any, ...]] = []
    inner = Engine.encode

    def encode(
        self: Engine, prompt: Any, raw: bool = False, system: Any = None, *rest: Any, **others: Any
    ) -> list[int]:
        if not isinstance(prompt[0], int):
            seen.append((prompt, raw, system, others.get("control_tokens")))
        return inner(self, prompt, raw, system, *rest, **others)

    monkeypatch.setattr(Engine, "encode", encode)
    return seen


# ---- where a prompt comes from


def test_messages_come_from_a_file_or_standard_input(
    run: Run, folder: Path, tmp_path: Path, asked: list[tuple[Any, ...]]
) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "abc"},
        {"role": "assistant", "content": "bcd"},
        {"role": "user", "content": [{"type": "text", "text": "cab é"}]},
    ]
    text = json.dumps(messages, ensure_ascii=False)
    path = tmp_path / "talk.json"
    path.write_text(text)
    words = ("generate", "--bundle", folder, "--max-new-tokens", 9, "--system", "Be brief.")
    expected = toy_engine("none").generate(messages, max_new_tokens=9).text + "\n"
    asked.clear()
    assert run(*words, "--messages", path)[:2] == (0, expected)
    assert run(*words, "--messages", "-", stdin=text)[:2] == (0, expected)
    assert asked == [(messages, False, "Be brief.", None)] * 2


def test_a_byte_order_mark_is_no_part_of_a_text(
    run: Run, folder: Path, tmp_path: Path, asked: list[tuple[Any, ...]]
) -> None:
    """Editors and shells on Windows write one."""
    words = ("generate", "--bundle", folder, "--max-new-tokens", 9)
    text, talk = f"\ufeff{MESSAGE}", tmp_path / "talk.json"
    talk.write_text(text, encoding="utf-8")
    assert run(*words, "--messages", talk)[0] == 0
    assert run(*words, "--messages", "-", stdin=text)[0] == 0
    assert run(*words, stdin=f"\ufeff{PROMPT}\n")[0] == 0
    assert run("chat", *words[1:], stdin=f"\ufeff{PROMPT}\n")[0] == 0
    chat = [{"role": "user", "content": PROMPT}]
    assert [prompt for prompt, *_ in asked] == [*[json.loads(MESSAGE)] * 2, PROMPT, chat]
    path = tmp_path / "schema"
    path.write_text('\ufeff{"type": "object"}', encoding="utf-8")
    for found in (response_format(path, None, None), response_format(None, None, path)):
        assert found is not None
        assert "\ufeff" not in str(found)


def test_a_dash_is_standard_input(run: Run, folder: Path, asked: list[tuple[Any, ...]]) -> None:
    words = ("generate", "--bundle", folder, "--max-new-tokens", 9)
    for more in (["-"], ["--raw", "--", "-"], []):
        assert run(*words, *more, stdin="a\n\n" + PROMPT + "\n")[0] == 0
    typed = f"a\n\n{PROMPT}"
    assert asked == [(typed, is_raw, None, None) for is_raw in (False, True, False)]


MESSAGE = '[{"role": "user", "content": "x"}]'


@pytest.mark.parametrize(
    ("words", "stdin", "message"),
    [
        ([""], "", "got an empty prompt, expected some text"),
        ([" \n"], "", "got an empty prompt"),
        ([], "", "got an empty prompt"),
        (["-"], "\n", "got an empty prompt"),
        (["--raw", ""], "", "got an empty prompt"),
        (["abc", "--messages", "-"], MESSAGE, "got a prompt and --messages, expected one"),
        (["--messages", "-"], "", "standard input: got no JSON"),
        (["--messages", "-"], "[]", "standard input: got [], expected a list of messages"),
        (["--messages", "-"], '{"role": "user"}', 'got {"role": "user"}, expected a list'),
        (["--messages", "-"], "[5]", "got message 5, expected one with a role"),
        (["--messages", "-"], '[{"role": "user"}]', "expected a role and its content"),
        (["--messages", "-", "--raw"], MESSAGE, "got messages, expected a string or token ids"),
        (["--messages", "nowhere.json"], "", "No such file or directory"),
    ],
)
def test_what_is_no_prompt_is_one_line(
    run: Run, folder: Path, words: list[str], stdin: str, message: str
) -> None:
    code, out, err = run("generate", *words, "--bundle", folder, stdin=stdin)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize("words", [["generate", PROMPT], ["chat"]])
def test_control_tokens_are_asked_for_by_a_flag(
    run: Run, folder: Path, asked: list[tuple[Any, ...]], words: list[str]
) -> None:
    for flags in ([], ["--control-tokens"]):
        assert run(*words, *flags, "--bundle", folder, stdin="abc\n")[0] == 0
    assert [bool(control_tokens) for *_, control_tokens in asked] == [False, True]


# ---- the commands themselves


@pytest.mark.parametrize(
    ("main", "name"), [(runtime_cli.main, "spec-runtime"), (export_cli.main, "spec-export")]
)
def test_the_version_is_that_of_the_package(
    run: Run, main: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"specsplit": "1.2.3"}.__getitem__)
    assert run("--version", main=main) == (0, f"{name} 1.2.3\n", "")

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert "run from a checkout" in run("--version", main=main)[1]


def test_the_runtime_is_a_module_that_is_run() -> None:
    words = [sys.executable, "-m", "spec_runtime", "generate", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    assert "spec-runtime generate [OPTIONS]" in done.stdout


# ---- completion


def complete(run: Run, monkeypatch: pytest.MonkeyPatch, line: str, shell: str = "bash") -> str:
    """Returns what a shell is told at the end of this line."""
    words = f"{line}x".split()
    with monkeypatch.context() as environment:
        environment.setenv("_SPEC_RUNTIME_COMPLETE", f"complete_{shell}")
        environment.setenv("COMP_WORDS", line)
        environment.setenv("COMP_CWORD", str(len(words) - 1))
        if shell != "bash":
            environment.delenv("COMP_WORDS")
            environment.setenv("_TYPER_COMPLETE_ARGS", line)
            environment.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        code, out, err = run()
    assert (code, err) == (0, "")
    return out


def test_verbs_options_and_drafters_are_completed(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parents[1])
    assert complete(run, monkeypatch, "spec-runtime ").split() == list(runtime_cli.VERBS)
    assert complete(run, monkeypatch, "spec-runtime gen").split() == ["generate"]
    assert "--messages" in complete(run, monkeypatch, "spec-runtime generate --m").split()
    names = ["parallelspec", "prompt_lookup", "lookahead", "none"]
    assert complete(run, monkeypatch, "spec-runtime chat --drafter ").split() == names
    other = "spec-runtime chat --bundle nowhere --drafter p"
    assert complete(run, monkeypatch, other).split() == ["prompt_lookup"]
    assert '"generate":"' in complete(run, monkeypatch, "spec-runtime gen", "zsh")
    assert "generate\t" in complete(run, monkeypatch, "spec-runtime gen", "fish")


def test_only_the_typed_verb_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completion has to be quick."""
    line = {"_A_COMPLETE": "complete_bash", "COMP_WORDS": "a\nchat\n--dr"}
    assert completion.typed_words("a", line) == ["chat", "--dr"]
    assert completion.typed_words("b", line) is None


@pytest.mark.parametrize("shell", get_args(completion.Shell))
def test_each_shell_has_a_script(run: Run, shell: str) -> None:
    code, out, err = run("--show-completion", shell)
    assert (code, err) == (0, "")
    assert f"_SPEC_RUNTIME_COMPLETE=complete_{shell}" in out
    assert run("--show-completion", "tcsh")[0] == 2


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    """The script in a real shell, in which the command is found by its name."""
    program = tmp_path / "spec-runtime"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m spec_runtime "$@"\n')
    program.chmod(0o755)
    lines = (
        'eval "$(spec-runtime --show-completion bash)"',
        "COMP_WORDS=(spec-runtime chat --show); COMP_CWORD=2",
        '_spec_runtime_completion spec-runtime; echo "${COMPREPLY[@]}"',
        "complete -p spec-runtime",
    )
    done = subprocess.run(
        ["bash", "-ec", "\n".join(lines)],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found, registered = done.stdout.splitlines()
    assert found == "--show-accepted"
    assert registered == "complete -o default -F _spec_runtime_completion spec-runtime"
