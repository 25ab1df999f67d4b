"""Prints on a terminal so that data can neither be taken for markup nor move the cursor.

Names, categories and texts come from manifests, prompt files and models, whose authors may
have put anything into them.
"""

import re
import shutil
from typing import TYPE_CHECKING, Any

import rich.console
from rich import box
from rich.cells import cell_len

if TYPE_CHECKING:
    from spec_runtime import Chunk

# The looks of a table with many columns, so that it fits a terminal of 80.
COMPACT: dict[str, Any] = {"box": box.SIMPLE_HEAD, "show_edge": False, "padding": (0, 0)}
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
# Halves of surrogate pairs, line and paragraph separators, and what turns the writing's direction.
_MISLEADING = {
    code: f"\\u{code:04x}"
    for code in (*range(0xD800, 0xE000), *range(0x2028, 0x202F), *range(0x2066, 0x206A))
}
_ESCAPES = _CONTROL | _MISLEADING
_ESCAPES_OF_TEXT = {code: text for code, text in _ESCAPES.items() if chr(code) not in "\n\t"}


def visible(data: object) -> str:
    r"""Returns data as one line of text whose control characters are visible escapes.

    >>> visible("red \x1b[31m")
    'red \\x1b[31m'
    """
    return str(data).translate(_ESCAPES)


class Console(rich.console.Console):
    """A console of `rich` that takes strings as they stand: no markup, no emoji codes, no colours
    guessed. Data still goes through `visible`."""

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """Passes the BrokenPipeError on, which `rich` would turn into exit code 1.

        On standard error it prints nothing more instead: nobody watches the progress, but the work
        may still be wanted.
        """
        if not self.stderr:
            raise
        self.quiet = True


class WordStream:
    """Writes text as it comes, and cuts no word at a terminal's edge: a word within a line waits
    until it is whole, or too long for the line. Control characters but line ends and tabs become
    visible escapes there. A file or a pipe gets all at once, as it is.

    It goes to standard output, or to standard error if it `is_error`. Lines that are broken go on
    with an indent.
    """

    def __init__(self, is_error: bool = False, indent: int = 0) -> None:
        self._console, self._indent = Console(stderr=is_error), indent
        self._column = 0
        self._held: list[tuple[str, str]] = []  # a word's parts and their styles
        self._is_begun = False  # some of the word is printed

    def write(self, text: str, style: str = "") -> None:
        """Writes a piece of text, but for the word at its end, which a blank releases."""
        file = self._console.file
        if not file.isatty():
            self._print(text, style)
            return
        columns = shutil.get_terminal_size().columns
        for part in re.findall(r"\S+|\s", text.translate(_ESCAPES_OF_TEXT)):
            is_blank = part.isspace()
            if not is_blank:
                self._held.append((part, style))
            width = sum(cell_len(each) for each, _ in self._held)
            is_long = self._column + width > columns
            if is_blank or is_long or self._is_begun or not self._column:
                if is_long and self._column and not self._is_begun:
                    self._column = min(self._indent, columns // 2)
                    self._print("\n" + " " * self._column)
                for held in self._held:
                    self._print(*held)
                self._column, self._held, self._is_begun = self._column + width, [], not is_blank
                if self._column > columns:  # of a word longer than a line
                    self._column %= columns
            if is_blank and (part == "\n" or self._column < columns):  # whose end is a blank
                self._print(part, style)
                stop = 8 - self._column % 8 if part == "\t" else 1
                self._column = 0 if part == "\n" else self._column + stop

    def _print(self, text: str, style: str = "") -> None:
        if style:
            self._console.print(text, end="", style=style, soft_wrap=True)
        else:
            print(text, end="", file=self._console.file, flush=True)


# The colours of tokens by depth: the target's own, the first guess, the second, and so on.
DEPTH_STYLES = ("", "green", "cyan", "blue", "magenta")


class AnswerPrinter:
    """Prints one answer as it comes: its text on standard output, and the model's thinking before
    it on standard error, dim on a terminal.

    If it `is_coloured`, all that the model writes goes to standard output, the marks of its
    thinking too, each token in its depth's colour.
    """

    def __init__(self, is_coloured: bool = False) -> None:
        self._is_coloured = is_coloured
        self._answer, self._thinking = WordStream(), WordStream(is_error=True)
        self._is_thinking = False  # it was printed last

    def print(self, chunk: "Chunk") -> None:
        """Prints what a chunk adds to the answer."""
        if self._is_coloured:
            for piece in chunk.pieces:
                style = DEPTH_STYLES[min(piece.depth, len(DEPTH_STYLES) - 1)]
                self._answer.write(piece.text, style)
            return
        for part in chunk.parts:
            if part.kind == "thinking":
                self._thinking.write(part.text, "dim")
            else:
                if self._is_thinking:
                    self._thinking.write("\n\n")
                self._answer.write(part.text)
            self._is_thinking = part.kind == "thinking"

    def end(self, mark: str = "") -> None:
        """Ends the answer's last line, on whose end a mark may stand."""
        if self._is_thinking:
            self._thinking.write("\n")
        self._answer.write(f"{mark}\n")
