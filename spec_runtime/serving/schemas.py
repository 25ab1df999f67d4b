"""Describes the requests of OpenAI's API that the server takes, and what the engine makes of them.

A field that OpenAI does not know is refused, as its server does; so is a known one that this server
cannot obey. Known fields without an effect on the answer are taken and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from spec_runtime.errors import UserError
from spec_runtime.sampling import SamplingOptions

DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI's
MAX_STOPS, MAX_TOP_LOGPROBS, MAX_COMPLETION_LOGPROBS = 4, 20, 5
SMALLEST_TOP_P = 1e-6  # stands for 0, which OpenAI allows: the likeliest token alone

Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
Bias = Annotated[Number, Field(ge=-100, le=100)]
Ids = list[Annotated[Whole, Field(ge=0)]]


class StreamOptions(BaseModel):
    """Holds OpenAI's `stream_options`."""

    model_config = ConfigDict(extra="forbid")

    include_usage: Flag = False
    include_obfuscation: Flag | None = None  # ignored: there is nothing to hide on loopback


class _Sampled(BaseModel):
    """Holds what both kinds of request say about sampling.

    The fields in the second group are extensions; they are those of SamplingParams.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    n: Annotated[Whole, Field(ge=1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    seed: Whole | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[Annotated[int, Field(ge=0)], Bias] | None = None
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    top_k: Annotated[Whole, Field(ge=1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.001, le=1000)] | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: Flag | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> _Sampled:
        if self.stream_options is not None and not self.stream:
            raise UserError("'stream_options' is only allowed when 'stream' is true")
        return self

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_choices(self) -> int:
        return self.n or 1

    def _options(self, max_new_tokens: int, logprobs: int | None) -> SamplingOptions:
        """Returns the engine's options; a temperature left out is 1, as OpenAI's."""
        options = SamplingOptions(
            max_new_tokens=max_new_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=None if self.top_p is None else max(self.top_p, SMALLEST_TOP_P),
            seed=self.seed,
            stop=self.stop or (),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias or {},
            logprobs=logprobs,
            top_k=self.top_k,
            min_p=self.min_p,
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
        )
        if self.repetition_penalty is not None:
            options["repetition_penalty"] = self.repetition_penalty
        return options


class ChatMessage(BaseModel):
    """Holds one message; what the chat template makes of further keys is its own affair."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None

    def plain(self) -> dict[str, Any]:
        """Returns the message as the engine takes it; templates know `developer` as `system`."""
        message = self.model_dump(exclude_unset=True)
        message["role"] = "system" if self.role == "developer" else self.role
        message.setdefault("content", None)
        return message


class ChatRequest(_Sampled):
    """Holds the body of a request to /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    parallel_tool_calls: Flag | None = None
    modalities: list[Literal["text"]] | None = None

    # Refused unless they are null, as some clients send them.
    functions: None = None
    function_call: None = None
    audio: None = None
    web_search_options: None = None

    # Taken and ignored: none of them changes the answer of a model that has no such feature.
    metadata: dict[str, Any] | None = None
    store: Flag | None = None
    service_tier: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise UserError("'top_logprobs' is only allowed when 'logprobs' is true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise UserError("'max_tokens' and 'max_completion_tokens' exclude each other")
        if self.tool_choice is not None and not self.tools:
            raise UserError("'tool_choice' is only allowed when 'tools' are specified")
        is_free = (self.response_format or {"type": "text"}).get("type") == "text"
        if self.tool_choice not in (None, "none", "auto") and not is_free:
            raise UserError("a 'tool_choice' that asks for a call excludes 'response_format'")
        return self

    @property
    def usable_tools(self) -> list[dict[str, Any]] | None:
        """Returns the tools that the model may call, None for none."""
        return None if self.tool_choice == "none" else self.tools or None

    def options(self, room: int) -> SamplingOptions:
        """Returns the engine's options; without a number of tokens, `room` is the most."""
        most = self.max_tokens or self.max_completion_tokens or max(1, room)
        options = self._options(most, (self.top_logprobs or 0) if self.logprobs else None)
        options["response_format"] = self.response_format
        return options


class CompletionRequest(_Sampled):
    """Holds the body of a request to /v1/completions."""

    prompt: str | list[str] | Ids | list[Ids]
    echo: Flag | None = None
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    best_of: Whole | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _check_together(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise UserError("'best_of' has to equal 'n': this server drops no answer")
        if self.echo and self.logprobs is not None:
            raise UserError("'echo' is not allowed together with 'logprobs'")
        if not self.prompts:
            raise UserError("'prompt' has to hold at least one prompt")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts, each a text or token ids: a list of ids is one prompt."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

    def options(self) -> SamplingOptions:
        return self._options(self.max_tokens or DEFAULT_MAX_TOKENS, self.logprobs)
