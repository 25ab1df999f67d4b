"""Implements spec-runtime chat: a conversation whose turns reuse the KV of earlier turns."""

import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from spec_runtime.cli import line_input, messages, options
from spec_runtime.cli.flags import whole, with_flags
from spec_runtime.cli.terminal import AnswerPrinter, WordStream, visible
from spec_runtime.errors import ContextLengthError, UserError

if TYPE_CHECKING:
    from spec_runtime import Engine, GenerationResult
    from spec_runtime.loop.stats import Stats
    from spec_runtime.sampling import SamplingOptions

# A line is a command if its first word is one: "/usr/bin/env" is not, "/rest" is a mistyped one.
COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
SENDS_SLASH = "// in front sends a line with a slash as text"

History = Annotated[
    bool,
    typer.Option(
        "--history/--no-history",
        help="Keep what is typed in the user's state folder, for the next chat",
    ),
]


@with_flags(
    loading=options.loading("strict", "kept_mb"),
    settings=options.sampling("logprobs", max_new_tokens=512),
)
def command(
    settings: "SamplingOptions",
    loading: dict[str, Any],
    bundle: options.Bundle = None,
    system: options.System = None,
    show_accepted: options.ShowAccepted = False,
    control_tokens: options.ControlTokens = False,
    template_kwargs: options.TemplateKwargs = None,
    history: History = True,
) -> None:
    """Chat with the target; /help lists what else there is, end of input leaves."""
    from spec_runtime.bundle import manifest as bundles

    options.standard_input()
    bundle = bundle or bundles.find()
    variables = options.template_kwargs(template_kwargs)
    engine = options.open_engine(bundle, loading)
    if variables is not None:  # refused here if the template does not read them
        engine.encode("", template_kwargs=variables)
    names = options.drafter_names(bundle)
    chat = Chat(engine, settings, system or None, names, loading["lookup"])
    chat.is_coloured, chat.control_tokens = show_accepted, control_tokens
    chat.template_kwargs = variables
    source = line_input.open_input([f"/{name}" for name in chat.commands], history)
    chat.help = source.help
    if source.is_interactive:
        name = bundles.read(bundle, verify=False).manifest.name
        _note(
            f"{name} in {engine.target.precision}, drafter {engine.drafter}, context of "
            f"{engine.target.max_length:,} tokens"
        )
        _note("/help lists commands, Ctrl-C stops an answer, Ctrl-D leaves.")
    while _turn(chat, source):
        pass


def _turn(chat: "Chat", source: line_input.LineInput) -> bool:
    """Reads and does one thing; returns whether there may be another.

    On a terminal Ctrl-C ends only the line being typed or the answer being written. Elsewhere it
    ends the command, as SIGINT ends others.
    """
    try:
        text = source.read().strip()
        with _catching_ctrl_c(source.is_interactive) as is_stopped:
            chat.take(text, is_stopped)
    except EOFError:
        if source.is_interactive:
            print()
        return False
    except KeyboardInterrupt:
        if not source.is_interactive:
            raise
        print("\n(Ctrl-D leaves)")
    return True


@contextmanager
def _catching_ctrl_c(is_wanted: bool) -> Iterator[threading.Event]:
    """Lets Ctrl-C set the event instead of raising KeyboardInterrupt wherever the block is."""
    is_stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        is_stopped.set()

    if not is_wanted or threading.current_thread() is not threading.main_thread():
        yield is_stopped
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield is_stopped
    finally:
        signal.signal(signal.SIGINT, before)


class Command(NamedTuple):
    """One command of a chat: what may follow it, what it does, and what does it."""

    argument: str
    what: str
    run: Callable[[str], None]


class Chat:
    """A conversation with one target: its messages, what they are answered with, and the commands.

    Answers go to standard output, and all else to standard error.
    """

    def __init__(
        self,
        engine: "Engine",
        settings: "SamplingOptions",
        system: str | None,
        drafters: list[str],
        lookup: bool | None = None,
    ) -> None:
        from spec_runtime import Session  # here, since a shell's completion waits for this module

        self.session = Session(engine, system)
        self.is_coloured = False
        self.control_tokens = False
        self.template_kwargs: dict[str, Any] | None = None
        self.help = ""
        self.commands = {
            "help": Command("[COMMAND]", "list these commands, or one", self._help),
            "retry": Command("", "answer the last message anew", self._retry),
            "undo": Command("", "take the last message and its answer back", self._undo),
            "reset": Command("", "forget the conversation", self._reset),
            "save": Command("FILE", "write the conversation as JSON", self._save),
            "load": Command("FILE", "go on with a conversation that was saved", self._load),
            "system": Command(
                "[TEXT]", "show or set the system prompt; - takes it out", self._system
            ),
            "temperature": Command(
                "[X]", "show or set the temperature; 0 is greedy", self._temperature
            ),
            "drafter": Command("[NAME]", "show or choose the drafter", self._drafter),
            "stats": Command("", "figures of the last answer and of the conversation", self._stats),
            "colour": Command("", "colour tokens by drafted depth, or stop that", self._colour),
        }
        self._settings: SamplingOptions = {**settings}
        self._is_stopped = threading.Event()
        self._drafters = drafters
        self._lookup = lookup
        self._opened = {engine.drafter.partition("+")[0]: engine}
        self._results: list[GenerationResult] = []

    def take(self, text: str, is_stopped: threading.Event) -> None:
        """Does what the user typed: a command, or a message to answer; nothing if it is empty.

        What the user can mend is one line, and the conversation stays as it was.
        """
        self._is_stopped = is_stopped
        found = COMMAND.fullmatch(text)
        try:
            if found is not None:
                self._run(found[1], (found[2] or "").strip())
            elif text:
                self._answer(text[1:] if text.startswith("//") else text)
        except BrokenPipeError:
            raise
        except (OSError, UserError) as error:
            is_too_long = isinstance(error, ContextLengthError) and self.session.messages
            _note(f"error: {error}{' (/reset starts anew)' if is_too_long else ''}")

    def _run(self, name: str, argument: str) -> None:
        wanted = self.commands[self._known(name)]
        if not wanted.argument and argument:
            raise UserError(f"got /{name} {argument!r:.60}, expected nothing after it")
        if wanted.argument and not wanted.argument.startswith("[") and not argument:
            raise UserError(f"got /{name} without anything, expected /{name} {wanted.argument}")
        wanted.run(argument)

    def _known(self, name: str) -> str:
        """Returns a command's name. Raises UserError, which names the nearest one, for others."""
        if name not in self.commands:
            names = ", ".join(f"/{each}" for each in self.commands)
            near = get_close_matches(name, self.commands, 1)
            meant = f"/{near[0]}, or another" if near else "one"
            raise UserError(f"got command /{name}, expected {meant} of {names}; {SENDS_SLASH}")
        return name

    # ---- answers ----

    def _answer(self, text: str) -> None:
        """Prints the answer to a message; the session adds both to the conversation."""
        whole(text, "a message")
        chunks = self.session.chunks(
            text,
            control_tokens=self.control_tokens,
            template_kwargs=self.template_kwargs,
            cancel=self._is_stopped,
            **self._settings,
        )
        printer = AnswerPrinter(self.is_coloured)
        result = None
        with closing(chunks):
            for chunk in chunks:
                printer.print(chunk)
                result = chunk.result
        assert result is not None, "no last chunk"
        is_cut = result.finish_reason == "cancelled"
        printer.end(" …" if is_cut else "")
        if is_cut and not result.text:
            _note("stopped before the first word: the message is forgotten")
            return
        self._results.append(result)
        if not is_cut:
            used = result.stats.prompt_tokens + len(result.token_ids)
            left = self.session.engine.target.max_length - used
            _note(f"{options.summary_line(result)}; context left: {left:,}")

    # ---- commands ----

    def _help(self, argument: str) -> None:
        wanted = argument.removeprefix("/")
        for name in [self._known(wanted)] if wanted else self.commands:
            each = self.commands[name]
            _note(f"{f'/{name} {each.argument}':16} {each.what}", indent=17)
        if not wanted:
            _note(f"All else is a message; {SENDS_SLASH}.")
            _note(f"{self.help} Ctrl-C clears the line or stops the answer, Ctrl-D leaves.")

    def _retry(self, argument: str) -> None:
        before, results = self.session.messages, self._results
        try:
            self._answer(self._take_back("answer anew"))
        finally:
            if len(self.session.messages) < len(before):  # there was no answer
                self.session.messages, self._results = before, results
        if self.session.messages == before and not self._settings["temperature"]:
            _note("the same answer, as ever at temperature 0; /temperature 0.7 lets it vary")

    def _undo(self, argument: str) -> None:
        _note(f"took back {self._take_back('take back')!r:.80}")

    def _take_back(self, purpose: str) -> str:
        """Removes the last message of the user's and what came after it; returns its text. Raises
        UserError, which names the purpose, if there is none."""
        said = self.session.messages
        asked = [index for index, each in enumerate(said) if each["role"] == "user"]
        if not asked:
            raise UserError(f"got no message so far, expected one to {purpose}; type it first")
        self.session.messages, self._results = said[: asked[-1]], self._results[:-1]
        return _text(said[asked[-1]])

    def _reset(self, argument: str) -> None:
        self.session.messages, self._results = [], []

    def _save(self, argument: str) -> None:
        if not self.session.messages:
            raise UserError("got nothing to save, expected a message before /save")
        path = _path(argument)
        messages.write(path, [dict(each) for each in self.session.all_messages])
        _note(f"saved {len(self.session.messages)} messages in {path}")

    def _load(self, argument: str) -> None:
        path = _path(argument)
        found = messages.read(path)
        has_system = found[0]["role"] == "system"
        content = found[0].get("content") if has_system else None
        if has_system and not isinstance(content, str):
            raise UserError(f"{path}: got system prompt {content!r:.60}, expected a string")
        session = self.session
        # refuses what it cannot do
        session.engine.encode([*found, {"role": "user", "content": ""}])
        loaded = found[has_system:]
        session.messages, session.system, self._results = [*loaded], content, []
        _note(f"loaded {len(loaded)} messages of {path}")
        if loaded:
            _note(f"the last one, of {loaded[-1]['role']}:")
            WordStream().write(f"{_text(loaded[-1])}\n")

    def _system(self, argument: str) -> None:
        if argument:
            whole(argument, "a system prompt")
            self.session.system = None if argument == "-" else argument
        shown = self.session.system or "none but the template's own"
        _note(f"system prompt: {shown}")

    def _temperature(self, argument: str) -> None:
        if argument:
            from spec_runtime.sampling import SamplingParams

            try:
                value = float(argument)
            except ValueError:
                raise UserError(f"got temperature {argument!r:.40}, expected a number") from None
            SamplingParams(temperature=value)
            self._settings["temperature"] = value
        _note(f"temperature: {self._settings['temperature']:g}")

    def _drafter(self, argument: str) -> None:
        if argument:
            self.session.engine = self._open(argument)
        _note(f"drafter: {self.session.engine.drafter}; there are {', '.join(self._drafters)}")

    def _open(self, name: str) -> "Engine":
        if name not in self._opened:
            from spec_runtime.proposers import BUILT_IN

            lookup = None if name in BUILT_IN else self._lookup  # which is for trained ones
            self._opened[name] = self.session.engine.with_drafter(name, lookup)
        return self._opened[name]

    def _stats(self, argument: str) -> None:
        if not self._results:
            _note("no answer yet")
            return
        from spec_runtime.loop.stats import Stats

        last = self._results[-1]
        _note(f"last answer: {options.summary_line(last)}")
        _note(_details(last.stats))
        total = Stats.total(result.stats for result in self._results)
        num_tokens = sum(len(result.token_ids) for result in self._results)
        _note(
            f"conversation: {len(self._results)} answers, {num_tokens} tokens, "
            f"{total.tokens_per_second:.1f} tokens/s, accepted length {total.accepted_length:.2f}"
        )

    def _colour(self, argument: str) -> None:
        self.is_coloured = not self.is_coloured
        legend = "the target's own plain, guesses green, cyan, blue, then magenta"
        _note(f"tokens by drafted depth: {legend if self.is_coloured else 'not coloured'}")


def _path(argument: str) -> Path:
    """Returns the path that a user typed; raises UserError for one that cannot be."""
    try:
        path = Path(argument).expanduser()
    except RuntimeError as error:  # "~name" of nobody
        raise UserError(f"got path {argument!r:.80}, expected one that exists: {error}") from None
    if "\0" in argument:
        raise UserError(f"got path {argument!r:.80}, expected one without a null character")
    return path


def _note(text: str, indent: int = 0) -> None:
    """Prints a line that is not an answer."""
    WordStream(is_error=True, indent=indent).write(f"{visible(text)}\n")


def _text(message: Mapping[str, Any]) -> str:
    """Returns the text of a message that the engine has taken."""
    content = message["content"] or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _details(stats: "Stats") -> str:
    """Returns what a summary leaves out: the prompt's tokens, the drafted ones, and how many were
    accepted at each depth."""
    shares = ", ".join(f"{share:.0%}" for share in stats.acceptance_by_depth) or "none"
    return (
        f"prompt {stats.prompt_tokens} tokens, {stats.reused_tokens} of them reused; "
        f"{stats.drafted_tokens} drafted, accepted by depth {shares}"
    )
