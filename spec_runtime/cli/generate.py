"""Implements spec-runtime generate: continues one prompt, as streamed text or as JSON."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spec_runtime.cli import answer_format, options
from spec_runtime.cli import messages as message_files
from spec_runtime.cli.flags import whole, with_flags
from spec_runtime.cli.terminal import AnswerPrinter, WordStream
from spec_runtime.errors import UserError
from spec_runtime.files.writing import require_writable, write_atomically

if TYPE_CHECKING:
    from spec_runtime import Engine, GenerationResult
    from spec_runtime.sampling import SamplingOptions


@with_flags(loading=options.loading("strict", "kept_mb"), settings=options.sampling())
def command(
    settings: "SamplingOptions",
    loading: dict[str, Any],
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt; - is standard input", show_default="standard input"),
    ] = None,
    bundle: options.Bundle = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template around the prompt")] = False,
    system: options.System = None,
    json_schema: answer_format.JsonSchema = None,
    regex: answer_format.Regex = None,
    grammar: answer_format.GrammarFile = None,
    messages: Annotated[
        Path | None,
        typer.Option(
            "--messages",
            metavar="FILE",
            help="Chat messages in place of a prompt: a JSON list; - is standard input",
            allow_dash=True,
        ),
    ] = None,
    template_kwargs: options.TemplateKwargs = None,
    control_tokens: options.ControlTokens = False,
    show_accepted: options.ShowAccepted = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Text, token ids and figures as one JSON object")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="OUT", help="Write every step's tree and times as an HTML page"
        ),
    ] = None,
) -> None:
    """Generate text from a prompt."""
    if trace is not None:
        if show_accepted:
            raise UserError("got --trace with --show-accepted, expected one of them")
        require_writable(trace)
    if settings["logprobs"] is not None and not as_json:
        raise UserError("got --logprobs without --json, where they are printed; add --json")
    wanted = answer_format.response_format(json_schema, regex, grammar)
    asked = _read_prompt(prompt, messages)
    engine = options.open_engine(bundle, loading)
    prompt_ids = engine.encode(
        asked,
        raw,
        system,
        control_tokens=control_tokens or None,
        template_kwargs=options.template_kwargs(template_kwargs),
    )
    settings["response_format"] = wanted
    if trace is not None:
        _trace(engine, prompt_ids, settings, trace, as_json)
        return
    if as_json:
        print(json.dumps(report(engine.generate(prompt_ids, **settings))))
        return
    printer = AnswerPrinter(show_accepted)
    for chunk in engine.chunks(prompt_ids, **settings):
        printer.print(chunk)
    printer.end()
    assert engine.last_result is not None
    WordStream(is_error=True).write(f"{options.summary_line(engine.last_result, loading)}\n")


def _trace(
    engine: "Engine", prompt: list[int], settings: "SamplingOptions", out: Path, as_json: bool
) -> None:
    """Prints the answer as usual, and writes the page of its steps."""
    from spec_runtime.trace.page import page
    from spec_runtime.trace.record import record

    words = WordStream()
    traced = record(engine, prompt, str if as_json else words.write, **settings)
    write_atomically(out, page(traced))
    if as_json:
        print(json.dumps(report(traced.result)))
    else:
        words.write("\n")
        WordStream(is_error=True).write(f"{options.summary_line(traced.result)}\n")


def _read_prompt(prompt: str | None, messages: Path | None) -> "str | list[dict[str, Any]]":
    """Returns the prompt: a text, or the messages of a file.

    Raises UserError if there is nothing, or both.
    """
    if messages is not None:
        if prompt is not None:
            raise UserError("got a prompt and --messages, expected one of them")
        if str(messages) == "-":
            return message_files.parse(_standard_input("--messages -"), "standard input")
        return message_files.read(messages)
    if prompt is None or prompt == "-":
        # The line end a shell adds is not part of the prompt.
        prompt = _standard_input("prompt").removeprefix("\ufeff").removesuffix("\n")
    if not prompt.strip():
        raise UserError("got an empty prompt, expected some text as an argument or on stdin")
    return whole(prompt, "a prompt")


def _standard_input(what: str) -> str:
    """Reads standard input. Raises UserError if that is a terminal."""
    stdin = options.standard_input()
    if stdin.isatty():
        raise UserError(f"got no {what}; give it as an argument or on standard input")
    return stdin.read()


def report(result: "GenerationResult") -> dict[str, Any]:
    """Returns what ``--json`` prints; times are seconds, logarithms natural."""
    stats = result.stats
    figures: dict[str, Any] = {
        "text": result.text,
        **({"reasoning": result.reasoning, "content": result.content} if result.reasoning else {}),
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "tokens_per_second": stats.tokens_per_second,
        "prefill_seconds": stats.prefill_seconds,
        "accepted_length": stats.accepted_length,
        "steps": stats.steps,
        "timings": stats.timings,
        "acceptance": result.acceptance,
        "preserves_distribution": result.preserves_distribution,
    }
    if result.logprobs is not None:
        figures["logprobs"] = [each._asdict() for each in result.logprobs]
    return figures
