"""Says what an option is: one sentence of help in the annotation of a dataclass' field.

A declaration is such a dataclass. The flags of commands, the fields of HTTP requests and the tables
of the reference are made from it, so that an option is said once.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Option:
    """Describes an option, next to its type and bounds: `Annotated[int, Ge(1), Option("Threads")]`.

    `help` is one sentence. `unset` says what the default does, where its value does not. `flag`
    names the flag on command lines, where that is not the field's name, and `metavar` its value.
    """

    help: str
    unset: str | None = None
    flag: str | None = None
    metavar: str | None = None


# Names that other libraries have for options of ours.
ELSEWHERE = {
    **dict.fromkeys(
        ("max_tokens", "max_length", "max_completion_tokens", "max_output_tokens", "num_predict"),
        "max_new_tokens",
    ),
    **dict.fromkeys(("n_predict", "num_tokens", "max_gen_len"), "max_new_tokens"),
    **dict.fromkeys(("stop_strings", "stop_sequences", "stop_words", "until"), "stop"),
    **dict.fromkeys(("eos_token_id", "stop_tokens"), "stop_token_ids"),
    **dict.fromkeys(("repeat_penalty", "rep_pen"), "repetition_penalty"),
    **dict.fromkeys(("random_seed", "sampler_seed"), "seed"),
    **dict.fromkeys(("temp", "do_sample"), "temperature"),
    **dict.fromkeys(("system_prompt", "instructions"), "system"),
    **dict.fromkeys(
        ("grammar", "json_schema", "guided_json", "structured_outputs"), "response_format"
    ),
    **dict.fromkeys(("logits_processors", "processors"), "logits_processor"),
    "top_logprobs": "logprobs",
    "sampling_params": "params",
    **dict.fromkeys(("n_ctx", "max_model_len", "max_seq_len", "num_ctx"), "context"),
    **dict.fromkeys(("n_threads", "num_threads", "num_thread"), "threads"),
    **dict.fromkeys(("draft_model", "speculative_model", "assistant_model"), "drafter"),
    **dict.fromkeys(("device", "provider", "providers"), "backend"),
    **dict.fromkeys(("batch_size", "num_lanes", "max_num_seqs", "n_parallel"), "parallel"),
    **dict.fromkeys(("model", "model_path", "bundle"), "path"),
}


def meant_by(name: str, known: Iterable[str]) -> str | None:
    """Returns the known option that an unknown name probably means, or None if there is none.

    The name may be another library's word for the option, or a misspelling of it.
    """
    known = list(known)
    if (meant := ELSEWHERE.get(name)) in known:
        return meant
    return next(iter(difflib.get_close_matches(name, known, 1, cutoff=0.75)), None)


def require_known(given: Iterable[str], known: Iterable[str]) -> None:
    """Raises TypeError for a name that is no known option, with the one that is meant."""
    known = list(known)
    for name in given:
        if name not in known:
            meant = meant_by(name, known)
            expected = meant if meant is not None else f"one of {', '.join(known)}"
            raise TypeError(f"got unknown option {name!r:.80}, expected {expected}")


class Declared(NamedTuple):
    """One option of a declaration: its name, its annotation, what it takes apart from None, its
    default, and its description."""

    name: str
    annotation: Any
    kind: Any
    is_optional: bool
    default: Any
    option: Option


def declared(declaration: type) -> dict[str, Declared]:
    """Returns the options of a dataclass by name: its fields that are annotated with an Option."""
    hints = typing.get_type_hints(declaration, include_extras=True)
    found = {}
    for field in dataclasses.fields(typing.cast(Any, declaration)):
        hint = hints[field.name]
        options = [each for each in typing.get_args(hint) if isinstance(each, Option)]
        if not options:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        members = members_of(hint)
        kinds = [each for each in members if each is not type(None)]
        kind = kinds[0] if len(kinds) == 1 else typing.Union[tuple(kinds)]  # noqa: UP007
        found[field.name] = Declared(
            field.name, hint, kind, len(kinds) < len(members), default, options[0]
        )
    return found


def members_of(hint: Any) -> list[Any]:
    """Returns the members of a union, or the type itself, without what they are annotated with."""
    if typing.get_origin(hint) is typing.Annotated:
        return members_of(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [each for member in typing.get_args(hint) for each in members_of(member)]
    return [hint]
