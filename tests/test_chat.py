"""Chat on a real terminal and on pipes: turns, keys, commands, and what stays after them."""

import json
import logging
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from screen import ALT_ENTER, CTRL_C, CTRL_D, PASTE, UP, Screen, screen
from small import CONTEXT, Run, toy_engine

import spec_runtime
from spec_runtime import Chunk, Engine
from spec_runtime.cli import _OneLine, line_input, messages
from spec_runtime.cli import chat as chat_command
from spec_runtime.cli.terminal import AnswerPrinter, WordStream
from spec_runtime.dialogue.chat_template import ChatTemplate
from spec_runtime.dialogue.reader import Part
from spec_runtime.errors import UserError
from spec_runtime.files.machine import own_folder

TESTS = Path(__file__).parent
# Chats with toy engines; writes the messages of each call into a file. What is asked to go on
# without end waits, after its first text, for the call to be cancelled.
PROGRAM = f"""
import json, os, sys, time
sys.path.insert(0, {str(TESTS)!r})
if os.environ.get("WITHOUT"):
    sys.modules[os.environ["WITHOUT"]] = None
import spec_runtime
from small import toy_engine
from spec_runtime import Engine
inner = Engine.chunks

def chunks(self, prompt, **options):
    with open(os.environ["ASKED"], "a") as file:
        print(json.dumps([options["system"], *prompt]), file=file)
    for chunk in inner(self, prompt, **options):
        yield chunk
        if prompt[-1]["content"].endswith("without end") and chunk.text:
            # Ctrl-C sets the event in this thread, which must not hold the event's lock by a wait
            end = time.monotonic() + 30
            while not options["cancel"].is_set():
                assert time.monotonic() < end, "Ctrl-C did not come"
                time.sleep(0.01)

Engine.chunks = chunks
spec_runtime.load = lambda path, drafter=None, **options: toy_engine(drafter)
from spec_runtime.cli import main
main()
"""
LONG = "x" * 9_990 + "0123456789"


Open = Callable[..., Any]
Say = Callable[..., tuple[str, str]]


@pytest.fixture
def chat(tmp_path: Path, folder: Path) -> Open:
    """Opens a chat on a terminal."""

    def open_chat(*words: object, **env: str) -> Any:
        places = {"XDG_STATE_HOME": str(tmp_path), "ASKED": str(tmp_path / "asked")}
        words = ("chat", "--bundle", folder, "--max-new-tokens", 12, *words)
        return screen(PROGRAM, *words, **places, **env)

    return open_chat


def asked(tmp_path: Path) -> list[list[Any]]:
    """Returns the messages of each call, the system prompt first."""
    return [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]


def users(call: list[Any]) -> list[str]:
    return [message["content"] for message in call[1:] if message["role"] == "user"]


def send(terminal: Screen, text: str, wanted: str) -> None:
    """Sends a turn once the prompt is there, and waits for what it prints."""
    terminal.prompt()
    terminal.type(text + "\r")
    terminal.wait(wanted)


@pytest.mark.slow
def test_a_person_chats(chat: Open, tmp_path: Path) -> None:
    """Several lines as one turn, pasted and typed; Ctrl-C on a line; every command; then the same
    conversation in a new process, an answer that is stopped, and SIGTERM."""
    pytest.importorskip("prompt_toolkit")
    saved = tmp_path / "talk.json"
    with chat() as terminal:
        terminal.wait("small in fp32, drafter prompt_lookup, context of 224 tokens")
        send(terminal, PASTE.format("ab\nbc\ncd"), "finished by length")
        terminal.prompt()
        terminal.type("never sent" + CTRL_C + "ab" + ALT_ENTER + "bc\r")
        terminal.wait(lambda text: text.count("finished by length") == 2)
        assert [users(call) for call in asked(tmp_path)] == [
            ["ab\nbc\ncd"],
            ["ab\nbc\ncd", "ab\nbc"],
        ]

        terminal.prompt()
        terminal.type(CTRL_C)  # nothing is typed, and nothing is lost
        terminal.wait("(Ctrl-D leaves)")
        send(terminal, "/help", "/save FILE")
        send(terminal, "/system Be brief.", "system prompt: Be brief.")
        send(terminal, "/drafter none", "drafter: none; there are parallelspec, prompt_lookup,")
        send(terminal, "/stats", "conversation: 2 answers, 24 tokens")
        send(terminal, "/colour", "guesses green, cyan, blue, then magenta")
        send(terminal, f"/save {saved}", "saved 4 messages")
        send(terminal, LONG, "error: got a prompt of ")  # the toy's context is short
        assert users(asked(tmp_path)[-1])[-1] == LONG
        terminal.prompt()
        terminal.type(CTRL_D)
        assert terminal.end() == 0
        assert terminal.echoes
    found = json.loads(saved.read_text())
    assert [message["role"] for message in found] == ["system", *["user", "assistant"] * 2]

    with chat("--show-accepted") as terminal:
        send(terminal, f"/load {saved}", "loaded 4 messages")
        send(terminal, "without end", "d")
        answer = toy_engine("none").generate([*found, {"role": "user", "content": "without end"}])
        terminal.wait(answer.text[0])
        terminal.type(CTRL_C)
        terminal.wait(" …")
        terminal.prompt()
        terminal.type(UP + UP + "\r")  # the history goes over from one process to the next
        terminal.wait(lambda text: text.count("loaded 4 messages") == 2)
        send(terminal, "c", "finished by length")
        calls = asked(tmp_path)
        assert len(calls) == 5
        assert calls[-2][0] == "Be brief."
        assert users(calls[-2]) == ["ab\nbc\ncd", "ab\nbc", "without end"]
        assert calls[-1][1:-1] == found[1:], "/load takes the place of what was said"
        terminal.prompt()
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end() == 143
        assert terminal.echoes
    kept = tmp_path / "specsplit" / line_input.HISTORY
    assert kept.stat().st_mode & 0o777 == 0o600
    assert "+/stats\n" in kept.read_text()


def test_a_stopped_answer_stays_in_the_conversation(chat: Open, tmp_path: Path) -> None:
    """Without prompt-toolkit too, where a line may be as long, and Ctrl-C does not leave."""
    with chat("--no-history", WITHOUT="prompt_toolkit") as terminal:
        terminal.wait("\n> ")
        terminal.type("without end\r")
        terminal.wait(lambda text: re.search(r"> without end\s+[abcd]", text) is not None)
        terminal.type(CTRL_C)
        terminal.wait(lambda text: text.endswith(" …\r\n> "))
        terminal.type("never sent")
        terminal.wait("never sent")
        terminal.press(CTRL_C, lambda text: text.endswith("(Ctrl-D leaves)\r\n> "))
        terminal.type(LONG + "\r")
        terminal.wait(lambda text: "error: got a prompt of " in text and text.endswith("\n> "))
        terminal.type("abc\r")
        terminal.wait(lambda text: "finished by length" in text and text.endswith("\n> "))
        terminal.type(CTRL_D)
        assert terminal.end() == 0
        assert terminal.echoes
    first, second, third = asked(tmp_path)
    assert users(second) == ["without end", LONG]
    assert users(third) == ["without end", "abc"]
    whole = toy_engine("none").generate(first[1:], max_new_tokens=12).text
    assert second[2]["role"] == "assistant"
    assert 0 < len(second[2]["content"]) < len(whole)
    assert whole.startswith(second[2]["content"])
    assert not (tmp_path / "specsplit").exists()


# ---- on a pipe


@pytest.fixture
def say(run: Run, engines: list[Engine], folder: Path) -> Say:
    """Chats with these lines on standard input: (stdout, stderr)."""

    def say(*lines: str) -> tuple[str, str]:
        stdin = "".join(f"{line}\n" for line in lines)
        code, out, err = run("chat", "--bundle", folder, "--max-new-tokens", 6, stdin=stdin)
        assert code == 0
        return out, err

    return say


def test_a_saved_conversation_goes_on_as_if_it_had_not_ended(say: Say, tmp_path: Path) -> None:
    path = tmp_path / "new" / "talk.json"
    out, _ = say("/system Be brief.", "abc", "bcd")
    first, second = out.splitlines()
    assert say("/system Be brief.", "abc", f"/save {path}")[0] == first + "\n"
    out, err = say(f"/load {path}", "bcd")
    assert out == f"{first}\n{second}\n", "the last message is shown again"
    assert "loaded 2 messages" in err
    _, err = say(f"/load {path}", "/reset", "/save x.json")
    assert "error: got nothing to save" in err
    assert messages.read(path)[0] == {"role": "system", "content": "Be brief."}


def test_an_answer_is_taken_back_and_given_anew(say: Say) -> None:
    out, err = say("abc", "bcd", "/undo", "bcd", "/retry", "/stats", "/undo", "/undo", "/undo")
    first, *others = out.splitlines()
    assert len(others) == 3
    assert len(set(others)) == 1
    assert "the same answer, as ever at temperature 0" in err
    assert "conversation: 2 answers, 12 tokens" in err
    assert re.findall("took back (.*)", err) == ["'bcd'", "'bcd'", "'abc'"]
    assert "error: got no message so far, expected one to take back" in err
    (left,) = set(re.findall("context left: (.*)", err)[1:])
    template = len("<user>abc<assistant>" + first + "<user>bcd<a>")
    assert int(left) == CONTEXT - template - 6


def test_commands_help_who_has_said_nothing_yet(say: Say) -> None:
    _, err = say("/retry", "/help /save", "/help")
    assert "error: got no message so far, expected one to answer anew; type it first" in err
    assert (err.count("/save FILE"), err.count("/undo "), err.count("// in front")) == (2, 1, 1)


def test_a_message_stays_if_it_gets_no_other_answer(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Engine.chunks
    failures = iter([False, True, False])

    def chunks(self: Engine, prompt: Any, **options: Any) -> Any:
        if next(failures):
            raise UserError("no place")
        return inner(self, prompt, **options)

    monkeypatch.setattr(Engine, "chunks", chunks)
    out, err = say("abc", "/retry", "/stats", "/retry")
    assert "error: no place" in err
    assert "conversation: 1 answers, 6 tokens" in err
    assert len(set(out.splitlines())) == 1


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """The last message and the temperature of each call."""
    found, inner = [], Engine.chunks

    def chunks(self: Engine, prompt: Any, **options: Any) -> Any:
        found.append((prompt[-1]["content"], options["temperature"]))
        return inner(self, prompt, **options)

    monkeypatch.setattr(Engine, "chunks", chunks)
    return found


def test_a_temperature_is_set(say: Say, seen: list[tuple[str, float]]) -> None:
    _, err = say("abc", "/temperature 0.7", "/retry", "/temperature")
    assert [temperature for _, temperature in seen] == [0, 0.7]
    assert err.count("temperature: 0.7\n") == 2


def test_variables_reach_the_chat_template(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = toy_engine("none")
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tone }}"
    engine.tokenizer.template = ChatTemplate(source)
    monkeypatch.setattr(spec_runtime, "load", lambda path, **options: engine)
    words = ("chat", "--bundle", folder, "--max-new-tokens", 6, "--template-kwargs")
    code, out, _ = run(*words, '{"tone": "kind"}', stdin="abc\n")
    options: dict[str, Any] = {"template_kwargs": {"tone": "kind"}, "max_new_tokens": 6}
    assert (code, out) == (0, engine.generate("abc", **options).text + "\n")
    assert out != engine.generate("abc", max_new_tokens=6).text + "\n"
    code, _, err = run(*words, '{"mood": 1}', stdin="abc\n")
    assert code == 2
    assert "got 'mood', which the chat template does not read, expected tone" in err


def test_a_drafter_is_chosen_and_changes_no_token(say: Say) -> None:
    out, err = say("abc", "/stats", "/reset", "/drafter none", "abc", "/stats", "/drafter")
    first, second = out.splitlines()
    assert first == second
    assert "drafter: none; there are parallelspec, prompt_lookup, lookahead, none\n" in err
    drafted, plain = (line for line in err.splitlines() if " drafted, accepted by depth " in line)
    assert " 0 drafted, accepted by depth none" in plain
    assert " 0 drafted" not in drafted
    assert err.count("conversation: 1 answers, 6 tokens") == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/rest", "got command /rest, expected /reset, or another of /help, /retry, /undo, "),
        ("/xyz", "got command /xyz, expected one of /help, "),
        ("/temperature hot", "got temperature 'hot', expected a number"),
        ("/temperature -1", "got temperature -1.0, expected 0 or more"),
        ("/reset now", "got /reset 'now', expected nothing after it"),
        ("/help saev", "got command /saev, expected /save, or another of /help, "),
        ("/load", "got /load without anything, expected /load FILE"),
        ("/load nowhere.json", "No such file or directory: 'nowhere.json'"),
        ("/load broken.json", "broken.json: got no JSON ("),
        ("/load empty.json", "empty.json: got [], expected a list of messages"),
        ("/load roles.json", 'roles.json: got message {"content": "x"}, expected one with a role'),
        ("/load parts.json", "got content 5 in a message of 'user'"),
        ("/save broken.json", "broken.json is there and holds no messages"),
        ("/save ~nobody-of-that-name/x", "got path '~nobody-of-that-name/x', expected one that"),
        ("/load x\0y", "expected one without a null character"),
        ("\udcff", "got a message whose character 1 is not UTF-8"),
    ],
)
def test_a_mistyped_command_costs_nothing(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {"broken": "{", "empty": "[]", "roles": '[{"content": "x"}]'}
    texts["parts"] = '[{"role": "user", "content": 5}]'
    for name, text in texts.items():
        (tmp_path / f"{name}.json").write_text(text)
    expected = say("abc", "bcd")[0]
    out, err = say("abc", line, "bcd")
    assert out == expected
    (error,) = (each for each in err.splitlines() if each.startswith("error: "))
    assert message in error
    assert (tmp_path / "broken.json").read_text() == "{"


def test_text_that_begins_with_a_slash_is_text(say: Say, seen: list[tuple[str, float]]) -> None:
    say("/usr/bin/env", "//reset", "/ a", "/Reset")
    assert [text for text, _ in seen] == ["/usr/bin/env", "/reset", "/ a", "/Reset"]


SAID = "one two three\n\tsix 一二三四五六七八九十一二 s\x1b[m"
CUT = "/help  list\n     these \n     now\n\nwarning: \nits weights\nare wrong\n"


@pytest.mark.parametrize(
    ("columns", "notes", "said"),
    [
        (0, "/help  list these now\n\nwarning: its weights are wrong\n", SAID),
        (11, CUT, "one two \nthree\n\tsix\n一二三四五六七八九十一二 s\\x1b[m"),
    ],
)
def test_words_are_not_cut_at_the_edge_of_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, columns: int, notes: str, said: str
) -> None:
    """Neither of notes and warnings nor of answers, however they come, and no escape sequence gets
    there; a pipe gets all as it is."""
    monkeypatch.setenv("COLUMNS", str(columns))
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: columns > 0)
    chat_command._note("/help  list these now", indent=7)
    warning = logging.makeLogRecord({"levelno": logging.WARNING, "msg": "its weights are wrong"})
    WordStream(is_error=True).write(f"{_OneLine().format(warning)}\n")
    assert capsys.readouterr().err == notes
    for size in (1, 6, len(SAID)):
        printer = AnswerPrinter()
        for piece in re.findall(f".{{1,{size}}}", SAID, re.DOTALL):
            printer.print(Chunk(piece, parts=(Part("text", piece),)))
        printer.end()
        assert capsys.readouterr().out == f"{said}\n"


def test_no_history_where_it_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("prompt_toolkit")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert line_input._open_history() is None
    assert capsys.readouterr().err.startswith("warning: no history is kept: ")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        own_folder("XDG_STATE_HOME", ".local/state", "")
        == tmp_path / ".local" / "state" / "specsplit"
    )
