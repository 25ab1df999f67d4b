"""Takes fields of other servers that would change nothing here, and names them in a header of the
answer: clients and load generators send them to every server."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, PrivateAttr, model_validator
from starlette.responses import Response

HEADER = "X-Specsplit-Ignored"

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
        "speculative.n_max",
        "speculative.n_min",
        "speculative.p_min",
    )
)
# Change nothing where they have these values, other servers' defaults, or are null.
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("use_beam_search", "early_stopping", "echo", "continue_final_message"), False),
    **dict.fromkeys(("include_stop_str_in_output", "return_token_ids"), False),
    **dict.fromkeys(("return_tokens_as_token_ids", "no_stop_trim", "return_hidden_states"), False),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), True),
    "add_generation_prompt": True,
    **dict.fromkeys(("length_penalty", "typical_p", "tfs_z", "num_beams", "best_of"), 1),
    **dict.fromkeys(("mirostat", "dynatemp_range", "xtc_probability", "dry_multiplier"), 0),
    **dict.fromkeys(("top_a", "epsilon_cutoff", "eta_cutoff", "smoothing_factor", "n_probs"), 0),
    **dict.fromkeys(("no_repeat_ngram_size", "min_keep"), 0),
    "bad_words": [],
    "lora": [],
    **dict.fromkeys(("allowed_token_ids", "truncate_prompt_tokens", "documents"), None),
    **dict.fromkeys(("chat_template", "mm_processor_kwargs", "adapters", "draft_model"), None),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), None),
    **dict.fromkeys(("structured_outputs", "grammar", "json_schema", "options", "think"), None),
}


class Tolerant(BaseModel):
    """A request whose unknown fields are refused, apart from those that change nothing."""

    model_config = ConfigDict(extra="forbid")

    _ignored: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _set_aside(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        ignored = [
            name
            for name, value in data.items()
            if name not in cls.model_fields and changes_nothing(name, value)
        ]
        made = handler({name: value for name, value in data.items() if name not in ignored})
        made._ignored = ignored
        return made


def changes_nothing(name: str, value: Any) -> bool:
    """Says whether a field of another server would change nothing with this value."""
    return name in NO_EFFECT or (name in DEFAULTS and value in (None, DEFAULTS[name]))


def noted(response: Response, body: Tolerant) -> Response:
    """Adds the header with the names of a request's ignored fields to its response, if there are
    any."""
    if body._ignored:
        response.headers[HEADER] = ", ".join(body._ignored)
    return response
