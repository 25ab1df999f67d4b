"""Declares how a request's tokens are chosen and when its answer stops."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, TypedDict

import numpy as np
from annotated_types import Ge, Gt, Le, MinLen

from spec_runtime.errors import UserError
from spec_runtime.files.mapping import Checked, Must
from spec_runtime.grammar.formats import Grammar, read_format
from spec_runtime.options import Option

ACCEPTANCES = ("target_sampling", "rejection", "typical")
# Below this temperature a request is greedy. Logits of some tens are about 2e-6 apart in float32,
# so that there is nothing left to draw but exact ties.
MIN_TEMPERATURE = 1e-6
# The most that a bias or penalty may add to a logit, and a repetition penalty may multiply it by:
# more than any logit, and far from float32's largest number.
MAX_SHIFT, MAX_FACTOR = 1e9, 1e3
# Takes the tokens of prompt and answer on a row's path, and the row f32[V]; returns another row.
LogitsProcessor = Callable[[Sequence[int], np.ndarray], np.ndarray]

TokenId = Annotated[int, Ge(0)]
Width = Annotated[int, Ge(1)]
StopText = Annotated[str, MinLen(1)]
Shift = Annotated[float, Ge(-MAX_SHIFT), Le(MAX_SHIFT)]


class SamplingOptions(TypedDict, total=False):
    """Lists the keyword arguments of `SamplingParams`, for callers that pass them through."""

    # made by tools/docs/typed_arguments.py
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | tuple[str, ...] | list[str]
    stop_token_ids: tuple[int, ...] | list[int]
    ignore_eos: bool
    logprobs: int | None
    acceptance: str
    typical_epsilon: float
    typical_delta: float | None
    draw_widths: tuple[int, ...] | list[int] | None
    draw_with_replacement: bool
    thinking_budget: int | None
    response_format: Mapping[str, Any] | type | None
    logits_processor: LogitsProcessor | None


@dataclass(frozen=True)
class SamplingParams(Checked):
    """Says how tokens are chosen and when the answer stops; there is one answer a prompt.

    temperature 0 is greedy, and so is any below 1e-6, which counts as 0; from there on draws follow
    softmax(logits / temperature) exactly. top_k and top_p: None is off; equal logits at top-k's
    edge all stay. min_p keeps tokens at least as likely as this share of the likeliest token's
    probability. repetition_penalty above 1: the logits of tokens in the prompt or the answer are
    divided by it where positive and multiplied by it where negative (CTRL's rule). presence_penalty
    is subtracted once from the logit of each token of the answer, frequency_penalty as often as the
    token occurs. logit_bias maps a token id to what is added to its logit. seed: the same seed and
    arguments give the same tokens on the same engine, see docs/guide/sampling.md; None is a fresh
    seed each time.

    stop: strings that end the text and are left out of it; stop_token_ids end it too, and so does
    the tokenizer's EOS unless ignore_eos is set. logprobs n returns, with each token, its
    log-probability and those of the n likeliest tokens, under the target itself, before any
    processor (vLLM's default, raw_logprobs).

    acceptance is one of three rules; at temperature 0 all of them are greedy decoding.
    "target_sampling" is the default. "rejection" draws the children from the drafter: draw_widths
    says how many at each depth (None: chains, as many as the node budget has room for), and
    draw_with_replacement how. "typical" is Medusa's rule, which does not preserve the distribution:
    it has typical_epsilon and typical_delta (None: the square root of epsilon).

    thinking_budget: after this many tokens of thinking a model has to close it, so that its answer
    follows; a model that does not think ignores it.

    response_format keeps the answer inside a grammar, in OpenAI's form: {"type": "json_schema",
    "json_schema": {"name": …, "schema": {…}}}, {"type": "json_object"}, {"type": "text"} (free), or
    {"type": "regex", "regex": …}, {"type": "ebnf", "grammar": …}; or a JSON schema itself, or a
    class that has one, such as pydantic's. Tokens outside get p = 0. The answer ends by EOS where
    the grammar is complete; max_new_tokens may cut it before. It needs the extra `grammar`, see
    docs/guide/structured.md.

    logits_processor(tokens, logits_V) returns the logits f32[V] to use in place of the target's. It
    is called for every row that is looked at, before all other processors: `tokens` are those of
    prompt and answer that lead to the row, drafted ones included, and logits_V is a copy. Its
    result must depend on its arguments only; then any drafter gives the tokens of plain decoding.

    NumPy's scalars are taken as Python's. Raises UserError, whose `param` names the field, for a
    value of another type or outside its range.
    """

    max_new_tokens: Annotated[int, Ge(1), Option("Tokens at most")] = 256
    temperature: Annotated[float, Ge(0), Option("0 is greedy")] = 0.0
    top_k: Annotated[int | None, Ge(1), Option("Keep the k likeliest tokens")] = None
    top_p: Annotated[float | None, Gt(0), Le(1), Option("Keep this much probability")] = None
    min_p: Annotated[
        float | None, Ge(0), Le(1), Option("Keep tokens at least this share as likely as the best")
    ] = None
    repetition_penalty: Annotated[
        float, Ge(1 / MAX_FACTOR), Le(MAX_FACTOR), Option("Divides logits of tokens seen; 1 is off")
    ] = 1.0
    presence_penalty: Annotated[
        Shift, Option("Subtracted once from the logit of a token in the answer")
    ] = 0.0
    frequency_penalty: Annotated[
        Shift, Option("Subtracted from a token's logit for each time it occurs")
    ] = 0.0
    logit_bias: Annotated[
        Mapping[TokenId, Shift], Option("Added to a token's logit; repeatable", metavar="ID=VALUE")
    ] = field(default_factory=dict)
    seed: Annotated[int | None, Option("Same seed, same tokens")] = None
    stop: Annotated[
        StopText | tuple[StopText, ...] | list[StopText], Option("End before this text; repeatable")
    ] = ()
    stop_token_ids: Annotated[
        tuple[TokenId, ...] | list[TokenId],
        Option("End with this token, as well as with EOS; repeatable", flag="--stop-token-id"),
    ] = ()
    ignore_eos: Annotated[bool, Option("Go on after the end-of-sequence token")] = False
    logprobs: Annotated[
        int | None,
        Ge(0),
        Option("Each token's log-probability under the target, and those of the N likeliest"),
    ] = None
    acceptance: Annotated[
        str,
        Must(ACCEPTANCES.__contains__, f"one of {', '.join(ACCEPTANCES)}"),
        Option(
            "target_sampling, rejection, or typical, which does not preserve the target's "
            "distribution; without a temperature all three are greedy"
        ),
    ] = ACCEPTANCES[0]
    typical_epsilon: Annotated[
        float, Gt(0), Le(1), Option("Of typical acceptance: higher is stricter")
    ] = 0.09
    typical_delta: Annotated[
        float | None, Gt(0), Option("Of typical acceptance", unset="the root of epsilon")
    ] = None
    draw_widths: Annotated[
        tuple[Width, ...] | list[Width] | None,
        MinLen(1),
        Option("Of rejection: children drawn at each depth", unset="chains of 4", metavar="K,K,…"),
    ] = None
    draw_with_replacement: Annotated[bool, Option("Of rejection: siblings may be equal")] = False
    thinking_budget: Annotated[
        int | None, Ge(0), Option("Tokens of thinking at most", unset="as many as it takes")
    ] = None
    response_format: Mapping[str, Any] | type | None = None
    logits_processor: LogitsProcessor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature < MIN_TEMPERATURE:  # the one place that decides who is greedy
            object.__setattr__(self, "temperature", 0.0)
        object.__setattr__(
            self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.draw_widths is not None:
            object.__setattr__(self, "draw_widths", tuple(self.draw_widths))
        if self.grammar is not None and self.ignore_eos:
            raise UserError(
                "got ignore_eos with response_format, expected one of them: EOS ends what a "
                "grammar allows",
                param="ignore_eos",
            )

    def require_tokens_below(self, vocab_size: int) -> None:
        """Raises UserError if a bias is for a token that the target does not have."""
        if self.logit_bias and max(self.logit_bias) >= vocab_size:
            raise UserError(
                f"got logit_bias for token {max(self.logit_bias)}, expected 0 to {vocab_size - 1}",
                param="logit_bias",
            )

    @property
    def is_plainly_greedy(self) -> bool:
        """True if each token is the argmax of the raw logits, and nothing else is asked for."""
        is_processed = self.has_processors or self.logprobs is not None
        return self.temperature == 0 and not is_processed

    @cached_property
    def grammar(self) -> Grammar | None:
        """The grammar that `response_format` asks for, None for free text."""
        return read_format(self.response_format)

    @property
    def has_processors(self) -> bool:
        """True if anything changes the logits before the temperature."""
        return self.has_penalties or bool(self.logit_bias) or self.reads_text

    @property
    def reads_text(self) -> bool:
        """True if a grammar, a budget of thinking or the caller's own processor decides what may
        follow the text."""
        is_masked = self.grammar is not None or self.thinking_budget is not None
        return is_masked or self.logits_processor is not None

    @property
    def has_penalties(self) -> bool:
        """True if any of the three penalties is on."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def rule(self) -> str:
        """The rule that applies: "greedy" at temperature 0, else `acceptance`."""
        return self.acceptance if self.temperature > 0 else "greedy"
