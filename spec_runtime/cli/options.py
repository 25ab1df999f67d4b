"""Declares the options that verbs share, opens the engine they name and delivers their results."""

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from spec_runtime.errors import UserError
from spec_runtime.files.writing import write_atomically
from spec_runtime.mapping import brief

if TYPE_CHECKING:
    from spec_runtime import Engine, GenerationResult
    from spec_runtime.sampling import SamplingOptions


def drafter_names(bundle: Path | None) -> list[str]:
    """Returns the drafters of a bundle, or of the newest under ./bundles; the built-in ones last.

    Leaves the bundle's own out if it cannot be read.
    """
    from spec_runtime.bundle import manifest as bundles
    from spec_runtime.proposers import BUILT_IN

    try:
        manifest = bundles.read(bundle or bundles.find(), verify=False).manifest
    except (OSError, ValueError):  # who opens it will say what is wrong with it
        return [*BUILT_IN]
    return [*(entry.name for entry in manifest.drafters), *BUILT_IN]


def _complete_drafter(context: typer.Context) -> list[str]:
    return drafter_names(context.params.get("bundle"))


Bundle = Annotated[
    Path | None,
    typer.Option("--bundle", help="Bundle folder", show_default="the newest under ./bundles"),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="A drafter of the bundle, prompt_lookup, prompt_lookup:published, lookahead, or none",
        show_default="the bundle's first",
        autocompletion=_complete_drafter,
    ),
]
Lookup = Annotated[
    bool | None,
    typer.Option(
        "--lookup/--no-lookup",
        help="Merge prompt lookup's candidates into a trained drafter's trees",
        show_default="as the bundle says",
    ),
]
Memory = Annotated[
    int,
    typer.Option(
        "--memory",
        min=0,
        help="Prompt lookup also finds so many tokens of earlier answers of this run; 0: none",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, help="CPU threads", show_default="the cores this process may use"
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        "--backend",
        help="onnxruntime (on the CPU), cuda (ONNX Runtime's) or tensorrt",
    ),
]
CudaGraphs = Annotated[
    bool,
    typer.Option(
        "--cuda-graphs/--no-cuda-graphs",
        help="On a GPU: capture runs that come again as CUDA graphs",
    ),
]
Fused = Annotated[
    bool | None,
    typer.Option(
        "--fused/--no-fused",
        help="Greedy requests take the drafter's fused step (build --fuse): one run a step",
        show_default="on CUDA, if the bundle has one that can be captured",
    ),
]
Profile = Annotated[
    bool,
    typer.Option(
        "--profile/--no-profile", help="Use what spec-runtime tune found on this machine, if run"
    ),
]
Prompts = Annotated[
    Path, typer.Option("--prompts", help="JSON Lines: turns (Spec-Bench), prompt or messages")
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", min=1, help="So many prompts in all, evenly over categories"),
]
Out = Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the figures here")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens at most")]
ShowAccepted = Annotated[
    bool,
    typer.Option(
        "--show-accepted",
        help="Colour the tokens the drafter guessed, by depth: green the first, then cyan, blue, "
        "magenta",
    ),
]
ControlTokens = Annotated[
    bool,
    typer.Option(
        "--control-tokens",
        help="Names of control tokens in the text, such as <|im_end|>, become these tokens",
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        "--system",
        help="System prompt",
        callback=lambda text: text and whole(text, "a system prompt"),
    ),
]


def open_engine(
    bundle: Path | None,
    drafter: str | None,
    threads: int | None,
    lookup: bool | None = None,
    profile: bool = True,
    backend: str = "onnxruntime",
    fused: bool | None = None,
    cuda_graphs: bool = True,
    memory: int = 0,
) -> "Engine":
    """Opens an engine over ``bundle``, or over the newest bundle under ./bundles."""
    import spec_runtime
    from spec_runtime.bundle.manifest import find

    return spec_runtime.load(
        bundle or find(),
        drafter=drafter,
        threads=threads,
        lookup=lookup,
        profile=profile,
        backend=backend,
        fused=fused,
        cuda_graphs=cuda_graphs,
        memory=memory,
    )


def standard_input() -> TextIO:
    """Returns standard input. Raises ValueError if the caller closed it (`<&-`)."""
    if sys.stdin is None:
        raise UserError("got no standard input (it is closed), expected text there; open it")
    return sys.stdin


def whole(text: str, what: str) -> str:
    """Returns `text`. Raises ValueError if it has a half surrogate, which no tokenizer takes.

    Python keeps bytes of the command line and of standard input that are not UTF-8 as such halves.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"got {what} whose character {error.start + 1} is not UTF-8, expected text in UTF-8; "
            "convert it"
        ) from None
    return text


def write_figures(out: Path, figures: dict[str, Any]) -> None:
    """Writes the figures as JSON, atomically."""
    write_atomically(out, json.dumps(figures, indent=2) + "\n")


def deliver(out: Path | None, figures: dict[str, Any], show: Callable[[], None]) -> None:
    """Writes the figures to `out`, if that is given, and then prints them by `show`.

    Whatever goes wrong with one of the two, the other is done: a measurement is not lost because a
    disk is full or a table cannot be drawn.
    """
    try:
        if out is not None:
            write_figures(out, figures)
    finally:
        show()


# The flags of `sampling`, which have the names of its parameters.
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Keep the k likeliest tokens")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Keep this much probability")]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", help="Keep tokens at least this share as likely as the best"),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option("--repetition-penalty", help="Divides logits of tokens seen; 1 is off"),
]
PresencePenalty = Annotated[
    float,
    typer.Option("--presence-penalty", help="Off the logit of a token in the answer, once"),
]
FrequencyPenalty = Annotated[
    float, typer.Option("--frequency-penalty", help="The same for each time it occurs")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", metavar="ID=VALUE", help="Added to a token's logit; repeatable"),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same tokens")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End before this text; repeatable")]
StopTokenId = Annotated[
    list[int] | None,
    typer.Option("--stop-token-id", help="End with this token, besides EOS; repeatable"),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on behind the end-of-sequence token")
]
Acceptance = Annotated[
    str,
    typer.Option(
        "--acceptance",
        help="target_sampling, rejection, or typical, which does not preserve the target's "
        "distribution; without a temperature all three are greedy",
    ),
]
TypicalEpsilon = Annotated[
    float, typer.Option("--typical-epsilon", help="Of typical acceptance: higher is stricter")
]
TypicalDelta = Annotated[
    float | None,
    typer.Option(
        "--typical-delta", help="Of typical acceptance", show_default="the root of epsilon"
    ),
]
DrawWidths = Annotated[
    str | None,
    typer.Option(
        "--draw-widths",
        metavar="K,K,…",
        help="Of rejection: children drawn at each depth",
        show_default="chains of 4",
    ),
]
DrawWithReplacement = Annotated[
    bool, typer.Option("--draw-with-replacement", help="Of rejection: siblings may be equal")
]


def sampling(
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    logit_bias: LogitBias = None,
    seed: Seed = None,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    ignore_eos: IgnoreEos = False,
    acceptance: Acceptance = "target_sampling",
    typical_epsilon: TypicalEpsilon = 0.09,
    typical_delta: TypicalDelta = None,
    draw_widths: DrawWidths = None,
    draw_with_replacement: DrawWithReplacement = False,
) -> "SamplingOptions":
    """Returns these flags as options of the engine. Raises ValueError for what it will not take."""
    from spec_runtime.sampling import SamplingOptions, SamplingParams

    for text in stop or ():
        whole(text, "a --stop text")
    settings = SamplingOptions(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=dict(_bias(entry) for entry in logit_bias or ()),
        seed=seed,
        stop=stop or (),
        stop_token_ids=stop_token_id or (),
        ignore_eos=ignore_eos,
        acceptance=acceptance,
        typical_epsilon=typical_epsilon,
        typical_delta=typical_delta,
        draw_widths=None if draw_widths is None else _widths(draw_widths),
        draw_with_replacement=draw_with_replacement,
    )
    SamplingParams(**settings)  # refuses bad values before anything slow
    return settings


def with_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the command with the flags of `sampling` in place of its parameter ``settings``,
    which gets their values."""
    own = inspect.signature(command).parameters
    flags = inspect.signature(sampling).parameters
    parameters = [each for name, each in own.items() if name != "settings"] + [*flags.values()]

    def run(**values: Any) -> None:
        settings = sampling(**{name: values.pop(name) for name in flags})
        command(**values, settings=settings)

    keyword = inspect.Parameter.KEYWORD_ONLY
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(kind=keyword) for each in parameters]
    )
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _bias(entry: str) -> tuple[int, float]:
    """Parses "42=-5" as (42, -5.0)."""
    token, _, value = entry.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise UserError(
            f"got --logit-bias {brief(entry, 80)}, expected ID=VALUE, as in 42=-5"
        ) from None


def _widths(text: str) -> tuple[int, ...]:
    """Parses "3,2,1" as (3, 2, 1)."""
    try:
        return tuple(int(width) for width in text.split(","))
    except ValueError:
        raise UserError(
            f"got --draw-widths {brief(text, 80)}, expected numbers, as in 3,2,1"
        ) from None


def summary_line(result: "GenerationResult") -> str:
    """Returns one line that says how much was generated, how fast, and why it ended."""
    stats = result.stats
    caveat = "" if result.preserves_distribution else "; not the target's distribution"
    return (
        f"{len(result.token_ids)} tokens, {stats.tokens_per_second:.1f} tokens/s, "
        f"accepted length {stats.accepted_length:.2f}, prefill {stats.prefill_seconds:.2f} s, "
        f"finished by {result.finish_reason}{caveat}"
    )
