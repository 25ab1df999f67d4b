"""Reads what a user types into a chat, one turn at a time.

On a terminal with prompt-toolkit (the extra `chat`) a turn may have several lines, typed or pasted,
and earlier ones come back with the arrow keys. Otherwise a turn is one line.
"""

import os
import sys
import termios
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from spec_runtime.cli import options
from spec_runtime.cli.terminal import WordStream, visible
from spec_runtime.files.installed import install
from spec_runtime.files.machine import own_folder

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT = "> "
HISTORY = "chat_history"
LINE_KEYS = "Enter sends, Alt-Enter begins a new line, and a pasted text stays together."


class LineInput(Protocol):
    """Says what a chat needs of its input."""

    is_interactive: bool
    help: str  # how several lines are typed

    def read(self) -> str:
        """Returns what the user sent. Raises EOFError at the end of input, and KeyboardInterrupt on
        Ctrl-C."""


def open_input(words: Sequence[str], keeps_history: bool) -> LineInput:
    """Returns the best input that there is here.

    `words` are completed by the tabulator key. `keeps_history` writes the typed lines into the
    user's state folder. Raises UserError if standard input is closed.
    """
    is_interactive = options.standard_input().isatty()
    if is_interactive and sys.stdout.isatty():
        try:
            return EditedInput(words, keeps_history)
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("prompt_toolkit"):
                raise
    return PlainInput(is_interactive)


class PlainInput:
    """Reads single lines from a pipe, a file, or a terminal without prompt-toolkit."""

    help = f"Enter sends. For several lines install prompt-toolkit: {install('chat')}"

    def __init__(self, is_interactive: bool) -> None:
        self.is_interactive = is_interactive
        if is_interactive:
            with suppress(ImportError):  # a terminal alone cuts lines after 4,095 bytes
                import readline  # noqa: F401

    def read(self) -> str:
        return input(PROMPT if self.is_interactive else "").removeprefix("\ufeff")


class EditedInput:
    """Reads turns with prompt-toolkit. Raises ModuleNotFoundError where that is not installed."""

    is_interactive = True
    help = LINE_KEYS

    def __init__(self, words: Sequence[str], keeps_history: bool) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter

        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_keys(),
            history=_open_history() if keeps_history else None,
            completer=WordCompleter(list(words), sentence=True),
            complete_while_typing=False,
        )

    def read(self) -> str:
        before = termios.tcgetattr(sys.stdin)
        try:
            return self._session.prompt()
        finally:  # SIGTERM may come in the midst of prompt-toolkit's own cleaning up
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _open_history() -> "History | None":
    """Returns the history on disk, which only its user may read.

    If it cannot be kept, says so and returns None: lines are then remembered until the end.
    """
    from prompt_toolkit.history import FileHistory

    try:
        path = own_folder("XDG_STATE_HOME", ".local/state", "the history") / HISTORY
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except (OSError, ValueError) as error:
        warning = f"warning: no history is kept: {visible(error)}\n"
        WordStream(is_error=True).write(warning)
        return None
    return FileHistory(path)


def _keys() -> "KeyBindings":
    """Returns what keys do in addition to editing: Enter sends, Alt-Enter breaks the line, and
    Ctrl-C clears what is typed, or is passed on where nothing is."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: "KeyPressEvent") -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def break_line(event: "KeyPressEvent") -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    @keys.add("<sigint>")
    def clear(event: "KeyPressEvent") -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    return keys
