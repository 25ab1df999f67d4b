"""The commands under hostile input and in hostile places: what ends in one line, what may not."""

import errno
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import CALIBRATION, PROMPTS, Measure, Run, raising, without_home, write_prompts

import spec_runtime
from spec_export import cli as export_cli
from spec_export.model.files import path_of
from spec_runtime import Engine
from spec_runtime import cli as runtime_cli
from spec_runtime.backends import Runtime
from spec_runtime.bundle import manifest as bundle
from spec_runtime.cli import options, terminal
from spec_runtime.errors import UserError
from spec_runtime.files import machine
from spec_runtime.files.installed import install
from spec_runtime.files.machine import default_threads, warn_of_threads
from spec_runtime.measure import provenance
from spec_runtime.measure.prompts import read_prompts
from spec_runtime.pace import profile

TESTS = Path(__file__).parent
ESCAPE = "\x1b[31m"

# Runs the command in a process of its own, on toy engines.
PROGRAM = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import spec_runtime
from small import toy_engine
spec_runtime.load = lambda path, drafter=None, **options: toy_engine(drafter)
from spec_runtime.cli import main
main()
"""


def shell(line: str, *arguments: object, program: str = PROGRAM, **settings: Any) -> Any:
    """Runs a line of shell in which "$@" is the command with these arguments."""
    words = ["bash", "-c", f"set -o pipefail; {line}", "bash", sys.executable, "-c", program]
    return subprocess.run(
        [*words, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        **settings,
    )


# ---- what is the user's to mend, and what is a mistake of ours


def shapes_that_do_not_fit(*arguments: object, **options: object) -> None:
    np.zeros(2) + np.zeros(3)


class PanicException(BaseException):
    """What a panic of Rust code becomes."""


@pytest.mark.parametrize(
    "failure",
    [
        shapes_that_do_not_fit,
        raising(ValueError("invalid literal")),
        raising(ModuleNotFoundError("No module named 'x'", name="spec_runtime.typo")),
        raising(PanicException("boom")),
    ],
    ids=["shapes", "value", "module", "panic"],
)
def test_a_mistake_of_ours_is_a_traceback_with_a_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failure: Callable[..., None]
) -> None:
    monkeypatch.setattr(spec_runtime, "load", failure)
    with pytest.raises(BaseException, match=r"broadcast|literal|No module named|boom") as found:
        runtime_cli.main(["generate", "hello", "--bundle", str(folder)])
    (note,) = found.value.__notes__
    assert "Please report it to the project's issue tracker" in note
    assert f"spec-runtime generate hello --bundle {folder}" in note
    assert f"numpy {np.__version__}" in note
    assert "\n" not in note


def test_the_request_stands_under_the_traceback(folder: Path) -> None:
    program = PROGRAM.replace("toy_engine(drafter)", "1 / 0")
    done = shell('"$@"', "generate", "hello", "--bundle", folder, program=program)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2] == "ZeroDivisionError: division by zero"
    assert "report it" in lines[-1]


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (UserError("got this,\nexpected that"), 2, "error: got this, expected that\n"),
        (UserError("got this", hint="do that"), 2, "error: got this; do that\n"),
        (bundle.BundleError("got this"), 2, "error: got this\n"),
        (FileNotFoundError(2, "No such file", "x"), 2, "error: [Errno 2] No such file: 'x'\n"),
        (MemoryError(), 2, "error: not enough memory\n"),
        (
            ModuleNotFoundError("No module named 'onnxruntime'", name="onnxruntime.capi"),
            2,
            "error: onnxruntime is not installed, which this command needs; "
            f"run {install('cpu')}\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_failures_are_one_line(
    run: Run,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr(spec_runtime, "load", raising(failure))
    assert run("generate", "hello", "--bundle", folder) == (code, "", message)


# ---- the command line


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (runtime_cli.main, ["compose"], "No such command 'compose'"),
        (runtime_cli.main, ["generate", "--colour"], "No such option"),
        (runtime_cli.main, ["generate", "--threads", "x"], "Invalid value for '--threads'"),
        (runtime_cli.main, ["serve", "--port", "x"], "Invalid value for '--port'"),
        (runtime_cli.main, ["bench"], "Missing option '--prompts'"),
        (runtime_cli.main, ["generate", "--stop"], "--stop"),
        (export_cli.main, ["train"], "Missing argument"),
        (export_cli.main, ["compose"], "No such command 'compose'"),
        (export_cli.main, ["build", "--colour"], "No such option"),
        (export_cli.main, ["build", "--precision", "fp7"], "Invalid value for '--precision'"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    run: Run, main: Any, arguments: list[str], message: str
) -> None:
    code, out, err = run(*arguments, main=main)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert message in err
    assert err.endswith(" --help\n") or "requires an argument" in err  # typer says no more of it


@pytest.mark.parametrize("main", [runtime_cli.main, export_cli.main])
def test_without_a_verb_the_help_is_printed(run: Run, main: Any) -> None:
    code, out, err = run(main=main)
    assert (code, err) == (2, "")
    assert "Usage" in out


# ---- streams and signals


def test_nobody_reads_the_output(folder: Path) -> None:
    arguments = ("generate", "abcabcabc", "--bundle", folder, "--max-new-tokens", 150)
    for line in ('"$@" | true', '"$@" 2>&1 | true', '"$@" --show-accepted | true'):
        done = shell(line, *arguments)
        assert (done.returncode, done.stderr) == (141, "")


def test_nobody_watches_the_progress(folder: Path, tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path / "p", *PROMPTS, PROMPTS[-1]), tmp_path / "out.json"
    done = shell(
        '"$@" 2>&1 >/dev/null | true',
        *("bench", "--bundle", folder, "--prompts", prompts, "--max-new-tokens", 4, "--json", out),
    )
    assert done.returncode == 0
    assert len(json.loads(out.read_text())["skipped"]) == 2


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_standard_input_is_closed(folder: Path, verb: str) -> None:
    done = shell('"$@" <&-', verb, "--bundle", folder)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: got no standard input (it is closed)")


def test_outputs_are_closed(folder: Path, tmp_path: Path) -> None:
    arguments = ("generate", "abcabc", "--bundle", folder, "--max-new-tokens", 9)
    done = shell('"$@" >&-', *arguments)
    assert done.returncode == 0
    assert done.stderr.startswith("9 tokens")
    assert shell('"$@" >&- 2>&-', *arguments).returncode == 0
    prompts, out = write_prompts(tmp_path / "p", *PROMPTS[:2]), tmp_path / "out.json"
    words = ("bench", "--bundle", folder, "--prompts", prompts, "--json", out)
    done = shell('"$@" <&- >&- 2>&-', *words, "--max-new-tokens", 9)
    assert (done.returncode, "overall" in json.loads(out.read_text())) == (0, True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_the_output_is_one_line(folder: Path) -> None:
    done = shell('"$@" >/dev/full', "generate", "abcabc", "--bundle", folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "No space left on device" in done.stderr


def test_an_encoding_without_the_characters(folder: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    done = shell('"$@"', "show", "--bundle", folder, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("encoding", "printed"),
    [
        ("cp1252", b"caf\xe9 ? ? \x93?"),
        ("latin-1", b"caf\xe9 ? ? ??"),
        ("ascii:strict", b"caf? ? ? ??"),
        ("utf-8:strict", "caf\u00e9 \u2028 \U0001f600 \u201c?".encode()),
    ],
)
def test_characters_that_a_console_lacks_are_question_marks(encoding: str, printed: bytes) -> None:
    """An escape such as \\u2028 would look like the answer's own text."""
    text = "caf\u00e9 \u2028 \U0001f600 \u201c\ud800"
    program = (
        f"from spec_runtime.cli import boundary; boundary.end([], lambda: print({text!a}) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, printed + b"\n"), done.stderr


def test_a_path_that_libraries_cannot_open_is_said_to_be_none(folder: Path, tmp_path: Path) -> None:
    """Under LC_ALL=C Python takes UTF-8 all the same, unless it is told not to."""
    accented = shutil.copytree(folder, tmp_path / "caf\u00e9")
    latin = shutil.copytree(folder, os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    program = "from spec_runtime.cli import main; main()"
    said = "whose name is not UTF-8 here, expected one that is; rename it, or set PYTHONUTF8=1"
    others = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for path, more, code in ((accented, {}, 0), (accented, others, 2), (latin, {}, 2)):
        environment = {**os.environ, "LC_ALL": "C", **more}
        done = shell('"$@"', "show", "--bundle", path, program=program, env=environment)
        assert (done.returncode, said in done.stderr) == (code, code == 2), done.stderr
    with pytest.raises(UserError, match=said):
        path_of(str(latin))


WAITING = """
import signal, sys, time
from spec_runtime.cli import boundary

def work():
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("cleaned", flush=True)
        if sys.argv[1:] == ["hangs"]:
            while True:
                time.sleep(60)

boundary.end(["waiting"], work)
"""


@contextmanager
def child(*words: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Runs this Python beside the block, and kills it if the block ends before it does: the test
    would wait for it without end."""
    with subprocess.Popen([sys.executable, "-c", *words], text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_clean_up(number: int, code: int) -> None:
    with child(WAITING, stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        assert process.stdout.read() == "cleaned\n"
        assert process.stderr.read() == ""
        assert process.wait(20) == code


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_that_comes_in_a_destructor_is_not_lost(number: int, code: int) -> None:
    """Python prints and drops whatever a destructor raises, the exception of a signal too."""
    source = WAITING.replace("time.sleep(60)", "signalled(); time.sleep(60)", 1)
    source = f"""
import os

class Dying:
    def __del__(self):
        os.kill(os.getpid(), {int(number)})
        len("the exception comes here")

def signalled():
    Dying()
{source}"""
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "begun\ncleaned\n", "")


def test_a_second_sigterm_kills() -> None:
    with child(WAITING, "hangs", stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.terminate()
        assert process.stdout.readline() == "cleaned\n"
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM


@pytest.mark.parametrize("main", [runtime_cli.main, export_cli.main])
def test_sigterm_is_as_it_was_afterwards(run: Run, main: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run("--help", main=main)
    assert signal.getsignal(signal.SIGTERM) is before


# ---- text that is no text


@pytest.mark.parametrize(
    ("words", "stdin"),
    [
        (["a\udcff"], ""),
        ([], "a\udcff"),
        (["a", "--system", "\udcff"], ""),
        (["a", "--stop", "\udcff"], ""),
    ],
)
def test_bytes_that_are_no_text_are_one_line(
    run: Run, folder: Path, engines: list[Engine], words: list[str], stdin: str
) -> None:
    """Python gives a command such halves of surrogates for them."""
    code, out, err = run("generate", *words, "--bundle", folder, stdin=stdin)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "is not UTF-8, expected text in UTF-8" in err


def test_the_record_of_a_command_is_text() -> None:
    words = ["/opt/spec-runtime", "bench", "--prompts=/data/\udcff.jsonl"]
    assert provenance.command(words) == ["spec-runtime", "bench", "--prompts=?.jsonl"]


def test_chat_goes_on_after_a_line_that_is_no_text(folder: Path) -> None:
    line = "printf 'a\\xff\\nabc\\n' | \"$@\""
    done = shell(line, "chat", "--bundle", folder, "--max-new-tokens", 3)
    assert (done.returncode, len(done.stdout)) == (0, 4)
    assert done.stderr.startswith("error: got a message whose character 2 is not UTF-8")


@pytest.mark.parametrize("line", ['{"prompt": "\\ud800"}', b'{"prompt": "\xff"}'])
@pytest.mark.parametrize("verb", ["bench", "audit"])
def test_a_line_that_is_no_text_is_left_out_and_named(
    measure: Measure, line: str | bytes, verb: str
) -> None:
    sound = {"prompt": "bcbc"}
    code, _, err, figures = measure(verb, "--max-new-tokens", 8, prompts=[sound, line, sound])
    assert code == 0
    assert "prompts.jsonl, line 2 is skipped: " in err
    assert figures["provenance"]["prompts"]["ids"] == [1, 3]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_only_line_ends_cut_json_lines(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "prompts.jsonl"
    row = {"prompt": f"a{separator}b"}
    text = json.dumps(row, ensure_ascii=ord(separator) < 32)
    path.write_text(f"{text}\r\n{text}\n", encoding="utf-8")
    assert [prompt.content for prompt in read_prompts(path)] == [f"a{separator}b"] * 2


# ---- data on the terminal


HOSTILE = ["[/b]", "[link", f"{ESCAPE}red", "[bold]x", "a\nb", "\u202egnp", ":smile:"]


@pytest.mark.parametrize("category", HOSTILE)
def test_a_category_is_no_markup(measure: Measure, category: str) -> None:
    texts = ("abc", "a" * 999)
    prompts = [{"prompt": text, "category": category, "id": category} for text in texts]
    skipped = f"prompt {terminal.visible(category)} skipped"
    for verb in ("bench", "audit"):
        code, out, err, figures = measure(verb, "--max-new-tokens", 8, prompts=prompts)
        assert (code, skipped in " ".join(err.split())) == (0, True)
        assert not {"\x1b", "\u202e"} & set(out + err)
        if verb == "bench":
            assert list(figures["categories"]) == [category]
            assert terminal.visible(category) in out


def hostile_bundle(folder: Path, text: str) -> None:
    """Puts `text` wherever a manifest has room for one; a name has none for control characters."""
    file = folder / bundle.MANIFEST
    data = json.loads(file.read_text())
    data["name"] = data["target"]["family"] = "b[/x]"
    data["provenance"] = {text: {"command": [text], text: [text], "deep": text}}
    data["target"]["rope"]["type"] = text
    data["drafters"][0]["config"][text] = text
    data["drafters"][0]["calibration"] = CALIBRATION
    data["drafters"][0]["trees"] = {"max_nodes": 2}
    file.write_text(json.dumps(data))


@pytest.mark.parametrize("text", ["b[/x]", *HOSTILE])
def test_a_manifest_is_no_markup(run: Run, measure: Measure, folder: Path, text: str) -> None:
    hostile_bundle(folder, text)
    code, out, err = run("show", "--bundle", folder)
    assert (code, err, terminal.visible(text) in out) == (0, "", True)
    for verb in ("bench", "audit"):
        code, more, err, _ = measure(verb, "--max-new-tokens", 4, prompts=PROMPTS[:1])
        assert (code, err.strip(), "b[/x]" in more) == (0, "", True)
        out += more
    assert not {"\x1b", "\u202e"} & set(out)


def test_errors_and_warnings_are_no_escape_sequences(
    run: Run, folder: Path, tmp_path: Path, engines: list[Engine]
) -> None:
    code, _, err = run("show", "--bundle", tmp_path / ESCAPE)
    assert (code, "\\x1b[31m" in err) == (2, True)
    prompts = write_prompts(tmp_path / f"p{ESCAPE}", *PROMPTS[:1], '{"prompt": "\\ud800"}')
    code, _, err = run("bench", "--bundle", folder, "--prompts", prompts)
    assert (code, "\x1b" in err) == (0, False)
    assert "\\x1b[31m, line 2 is skipped" in err


# ---- results


@pytest.mark.parametrize("verb", ["bench", "audit"])
def test_figures_come_before_the_table(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    module = importlib.import_module(f"spec_runtime.cli.{verb}")
    monkeypatch.setattr(module, "_table", raising(UserError("no table")))
    code, _, _, figures = measure(verb, prompts=PROMPTS[:1])
    assert (code, figures["bundle"]) == (2, "small")


@pytest.mark.parametrize(("verb", "word"), [("bench", "overall"), ("audit", "identical")])
def test_the_table_is_printed_though_the_disk_is_full(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, verb: str, word: str
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(options, "write_figures", raising(full))
    code, printed, err, _ = measure(verb, prompts=PROMPTS[:1])
    assert (code, word in printed) == (2, True)
    assert "No space left on device" in err


@pytest.mark.parametrize("verb", ["bench", "audit", "tune"])
@pytest.mark.parametrize("place", ["/proc/nowhere/out.json", ".", "/dev/null", "link.json"])
def test_a_place_that_cannot_be_written_is_found_before_the_measurement(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.json").symlink_to("p")
    monkeypatch.setattr(spec_runtime, "load", shapes_that_do_not_fit)
    prompts = write_prompts(tmp_path / "p", *PROMPTS)
    code, _, err = run(verb, "--bundle", folder, "--prompts", prompts, "--json", place)
    assert (code, err.count("\n")) == (2, 1)
    assert place.removesuffix("/out.json") in err
    assert {each.name for each in tmp_path.iterdir()} == {"bundles", "link.json", "p"}


# ---- machine profiles


KEY = profile.Key("0" * 64, "some cpu", 2, "int8", "parallelspec")


def test_without_a_home_there_is_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    without_home(monkeypatch)
    assert profile.find(KEY) is None
    message = "got neither XDG_CACHE_HOME nor a home folder"
    with pytest.raises(ValueError, match=message), profile.reserved(KEY):
        pass
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert machine.cache_folder() == Path("/cache/specsplit")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"candidates": "\\ud800"}', '{"a":' * 10_000])
def test_a_hostile_profile_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = profile.path_of(KEY)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert profile.find(KEY) is None
    (message,) = caplog.messages
    assert message.endswith("run spec-runtime tune again")


def test_two_cannot_tune_for_the_same_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    message = f"is being written by process {os.getpid()}"
    with (
        profile.reserved(KEY) as path,
        pytest.raises(ValueError, match=message),
        profile.reserved(KEY),
    ):
        pass
    assert list(path.parent.iterdir()) == []


# ---- threads


@pytest.mark.parametrize("threads", [0, -1, 100_000, 2.0, "2", True])
def test_threads_are_bounded(threads: Any) -> None:
    with pytest.raises(UserError, match=f"got threads {threads!r}, expected") as caught:
        Runtime(threads=threads)
    assert caught.value.param == "threads"


def test_more_threads_than_cpus_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_threads(default_threads())
    assert caplog.messages == []
    warn_of_threads(default_threads() + 1)
    (message,) = caplog.messages
    assert message.startswith(f"{default_threads() + 1} threads share the")


def test_a_temperature_that_is_greedy_is_audited_as_greedy(measure: Measure) -> None:
    words = ("--max-new-tokens", 4, "--temperature", "1e-9")
    code, _, _, figures = measure("audit", *words, prompts=PROMPTS[:1])
    assert (code, figures["temperature"]) == (0, 0)


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--draw-widths", "9" * 5000, ""),
        ("--logit-bias", "x" * 5000, ""),
        ("--threads", "100000", f"got threads 100000, expected 1 to {4 * default_threads()}, "),
    ],
)
def test_a_wrong_argument_is_one_short_line(
    run: Run, folder: Path, flag: str, value: str, message: str
) -> None:
    code, _, err = run("generate", "hi", "--bundle", folder, flag, value)
    assert (code, err.count("\n"), message in err) == (2, 1, True)
    assert len(err) < 300
