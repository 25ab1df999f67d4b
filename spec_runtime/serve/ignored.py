"""Takes fields of other servers that would change nothing here, and names them in a header of the
answer, and so the tools that nobody runs here: clients send them to every server."""

import re
from collections.abc import Iterable
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic.fields import FieldInfo
from starlette.responses import Response

HEADER = "X-Specsplit-Ignored"
MOST_NAMED, MOST_CHARACTERS = 32, 80  # names in it, and of each

# Change no token, whatever their values are.
NO_EFFECT = frozenset(
    (
        "cache_salt",
        "kv_transfer_params",
        "priority",
        "request_id",
        "rid",
        "detokenize",
        "id_slot",
        "slot_id",
        "timings_per_token",
        "return_progress",
        "keep_alive",
        "ttl",
        "usage",
        "provider",
        "num_draft_tokens",
        "client_metadata",
        "max_tool_calls",  # those of the server's own tools
        "prompt_cache_options",
        "speculative.n_max",
        "speculative.n_min",
        "speculative.p_min",
    )
)
# Change nothing where they have these values, other servers' defaults, or ask for nothing.
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), True),
    "add_generation_prompt": True,
    **dict.fromkeys(("length_penalty", "typical_p", "tfs_z", "num_beams", "best_of"), 1),
    **dict.fromkeys(("mirostat", "dynatemp_range", "xtc_probability", "dry_multiplier"), 0),
    **dict.fromkeys(("top_a", "epsilon_cutoff", "eta_cutoff", "smoothing_factor", "n_probs"), 0),
    **dict.fromkeys(("no_repeat_ngram_size", "min_keep"), 0),
}
UNSEEN = re.compile(r"(input_)?(image|document|file|audio|video)(_url)?")  # parts of results


class Tolerant(BaseModel):
    """A request whose unknown fields are refused, apart from those that change nothing."""

    model_config = ConfigDict(extra="forbid")

    _ignored: list[str] = PrivateAttr(default_factory=list)

    @classmethod
    def rewritten(cls, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the body with the names that the fields have here."""
        return body

    def left_out(self) -> Iterable[str]:
        """Returns what else the header names. It is asked once, where the body is read."""
        return ()

    def ignore(self, names: Iterable[str]) -> None:
        """Adds these names to those of the header, which has the first of them, each once and
        without what a header cannot hold."""
        for name in dict.fromkeys(names):
            shown = name.encode("unicode_escape").decode()[:MOST_CHARACTERS]
            if len(self._ignored) < MOST_NAMED and shown not in self._ignored:
                self._ignored.append(shown)

    @model_validator(mode="wrap")
    @classmethod
    def _set_aside(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        data = cls.rewritten(data)
        unseen = [f"results: {kind}" for kind in _without_pictures(data)]
        ignored = {
            name: value
            for name, value in data.items()
            if _is_unused(cls.model_fields.get(name)) and changes_nothing(name, value)
        }
        made = handler({name: value for name, value in data.items() if name not in ignored})
        made.ignore([*ignored, *made.left_out(), *unseen])
        return made


def _without_pictures(body: dict[str, Any]) -> list[str]:
    """Puts a text in place of each picture or file in a tool's result, and returns their kinds.
    Agents send results again with every turn: one that is refused would end the conversation."""
    kinds = []
    for message in [*_objects(body.get("messages")), *_objects(body.get("input"))]:
        for each in (message, *_objects(message.get("content"))):
            is_item = str(each.get("type")).endswith("_call_output")
            is_result = (
                each.get("role") in ("tool", "function") or each.get("type") == "tool_result"
            )
            for part in _objects(each.get("output" if is_item else "content")):
                kind = str(part.get("type"))
                if (is_item or is_result) and UNSEEN.fullmatch(kind):
                    text = f"[{kind}: left out, this model reads texts only]"
                    part.clear()
                    part.update(type="text", text=text)
                    kinds.append(kind)
    return kinds


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _is_unused(field: FieldInfo | None) -> bool:
    """Says whether a field is unknown, or known as one that has to be null."""
    return field is None or field.annotation is type(None)


def changes_nothing(name: str, value: Any) -> bool:
    """Says whether a field of another server would change nothing with this value, as none does
    that is null, false or empty."""
    asks_nothing = value is None or value is False or value in ([], {})
    return name in NO_EFFECT or asks_nothing or (name in DEFAULTS and value == DEFAULTS[name])


def noted(response: Response, body: Tolerant) -> Response:
    """Adds the header with the names of a request's ignored fields to its response, if there are
    any."""
    if body._ignored:
        response.headers[HEADER] = ", ".join(body._ignored)
    return response
