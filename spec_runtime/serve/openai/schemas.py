"""Describes the requests of OpenAI's API that the server takes, and what the engine makes of them.

A field that OpenAI does not know is refused, as its server does; so is a known one that this server
cannot obey. Known fields without an effect on the answer are taken and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Le, MaxLen
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    create_model,
    model_validator,
)

from spec_runtime.errors import UserError
from spec_runtime.options import declared, members_of
from spec_runtime.sampling import SamplingOptions, SamplingParams
from spec_runtime.serve.ignored import Tolerant
from spec_runtime.serve.openai.elsewhere import NO_EFFORT, SOME_EFFORT, as_ours, chosen

if TYPE_CHECKING:
    from spec_runtime.dialogue.chat_template import ChatTemplate

DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI's
MAX_STOPS, MAX_TOP_LOGPROBS, MAX_COMPLETION_LOGPROBS = 16, 20, 5
AS_FITS = -1  # as a number of tokens: as many as the context has room for
SMALLEST_TOP_P = 1e-6  # stands for 0, which OpenAI allows: only the likeliest token

Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict(), AllowInfNan(False)]
Flag = Annotated[bool, Strict()]
Penalty = Annotated[Number, Ge(-2), Le(2)]
Item = TypeVar("Item")
# Of a list with many mistakes only the first is described: a million take a gigabyte.
List = Annotated[list[Item], Field(fail_fast=True)]
Ids = List[Annotated[Whole, Ge(0)]]


def _not_zero(number: int) -> int:
    """Raises ValueError for a chat of no tokens."""
    if number == 0:
        raise ValueError(f"expected 1 or more, or {AS_FITS} for as many as fit")
    return number


# Of a completion, where 0 reads the prompt and answers nothing; and of a chat.
MostTokens = Annotated[Whole, Ge(AS_FITS)]
SomeTokens = Annotated[MostTokens, AfterValidator(_not_zero)]

# Fields of SamplingParams whose bounds OpenAI has narrower, or whose form in JSON is another.
OPENAIS: dict[str, Any] = {
    "temperature": Annotated[Number, Ge(0), Le(2)],
    "top_k": Annotated[Whole, Ge(-1)],  # -1 and 0 are off
    "top_p": Annotated[Number, Ge(0), Le(1)],
    "stop": str | Annotated[List[str], MaxLen(MAX_STOPS)],
    "presence_penalty": Penalty,
    "frequency_penalty": Penalty,
    "logit_bias": dict[Annotated[int, Ge(0)], Annotated[Number, Ge(-100), Le(100)]],
}
# Those that have other names here, and those that OpenAI's clients have no use for.
NOT_SERVED = (
    "max_new_tokens",
    "logprobs",
    "acceptance",
    "typical_epsilon",
    "typical_delta",
    "draw_widths",
    "draw_with_replacement",
)


def sampled_fields(declaration: type) -> dict[str, Any]:
    """Returns pydantic's fields of a request for the options of sampling: OpenAI's form of a field,
    or its own type and bounds. Each may be left out, or be null."""
    return {
        name: (
            OPENAIS.get(name, _in_json(option.annotation)) | None,
            Field(None, description=option.option.help),
        )
        for name, option in declared(declaration).items()
        if name not in NOT_SERVED
    }


def _in_json(hint: Any) -> Any:
    """Returns an annotation as JSON has it: without conversions, and with lists for tuples."""
    if get_origin(hint) is Annotated:
        kind, *bounds = get_args(hint)
        return Annotated[(_in_json(kind), *bounds)]
    if get_origin(hint) in (list, tuple):
        return List[_in_json(get_args(hint)[0])]  # type: ignore[misc]
    members = members_of(hint)
    if len(members) > 1:
        return Union[tuple(_in_json(each) for each in get_args(hint))]  # noqa: UP007
    return {int: Whole, float: Number, bool: Flag}.get(hint, hint)


SAMPLED_FIELDS = sampled_fields(SamplingParams)

Model = TypeVar("Model", bound=Tolerant)


def sampled(model: type[Model]) -> type[Model]:
    """Gives a request the fields of SamplingParams that it has not itself."""
    more: dict[str, Any] = {"__base__": model, "__doc__": model.__doc__, "__module__": __name__}
    own = model.model_fields
    fields = {name: field for name, field in SAMPLED_FIELDS.items() if name not in own}
    made: type[Model] = create_model(model.__name__, **more, **fields)
    return made


def sampling_of(request: BaseModel) -> dict[str, Any]:
    """Returns a request's fields of SamplingParams."""
    return {name: getattr(request, name, None) for name in SAMPLED_FIELDS}


class StreamOptions(BaseModel):
    """Holds OpenAI's `stream_options`."""

    model_config = ConfigDict(extra="forbid")

    include_usage: Flag = False
    continuous_usage_stats: Flag | None = None
    include_obfuscation: Flag | None = None  # ignored: there is nothing to hide on loopback


class _Request(Tolerant):
    """Holds what both kinds of request say; their sampling is added by `sampled`."""

    model: str | None = None
    n: Annotated[Whole, Ge(1)] | None = None
    max_tokens: MostTokens | None = None
    max_completion_tokens: MostTokens | None = None
    min_tokens: Annotated[Whole, Ge(0)] | None = None
    response_format: dict[str, Any] | None = None
    cache_prompt: Flag | None = None
    drafter: str | None = None  # of the bundle, or a built-in one
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    prompt_logprobs: None = None  # see errors.ELSEWHERE

    @classmethod
    def rewritten(cls, body: dict[str, Any]) -> dict[str, Any]:
        return as_ours(body)

    @model_validator(mode="after")
    def _check_request(self) -> _Request:
        if self.stream_options is not None and not self.stream:
            raise UserError("'stream_options' is only allowed when 'stream' is true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise UserError("'max_tokens' and 'max_completion_tokens' exclude each other")
        if self.min_tokens and not self.is_free:
            raise UserError("'min_tokens' is not allowed together with 'response_format'")
        return self

    @property
    def is_free(self) -> bool:
        """Says whether the answer may be any text."""
        return (self.response_format or {"type": "text"}).get("type") == "text"

    def most_tokens(self, room: int) -> int | None:
        """Returns the number of tokens asked for, None for none; as many as fit are `room`."""
        given = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return max(1, room) if given == AS_FITS else given

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def sampling(self) -> dict[str, Any]:
        """Returns the options of sampling that the request has, by their names in SamplingParams; a
        temperature left out is 1, as OpenAI's."""
        given = {name: value for name, value in sampling_of(self).items() if value is not None}
        if given.get("top_k", 1) < 1:
            del given["top_k"]
        if "top_p" in given:
            given["top_p"] = max(given["top_p"], SMALLEST_TOP_P)
        return {"temperature": 1.0, **given}

    def _options(self, max_new_tokens: int, logprobs: int | None) -> SamplingOptions:
        if self.min_tokens is not None and self.min_tokens > max_new_tokens:
            raise UserError(
                f"got min_tokens {self.min_tokens}, expected at most the {max_new_tokens} tokens "
                "that the answer may have",
                param="min_tokens",
            )
        return SamplingOptions(
            max_new_tokens=max_new_tokens,
            logprobs=logprobs,
            response_format=self.response_format,
            **self.sampling,  # type: ignore[typeddict-item]
        )


def has(item: Mapping[str, Any], *names: str) -> bool:
    """Says whether an object has texts under these names."""
    return all(isinstance(item.get(name), str) for name in names)


class ChatMessage(BaseModel):
    """Holds one message; what the chat template makes of further keys is its own affair."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | List[dict[str, Any]] | None = None

    def plain(self) -> dict[str, Any]:
        """Returns the message as the engine takes it: templates know `developer` as `system`, and
        `function`, as results were sent once, as `tool`."""
        message = {name: value for name, value in self if name in self.model_fields_set}
        message["role"] = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message.setdefault("content", None)
        return message


@sampled
class ChatRequest(_Request):
    """Holds the body of a request to /v1/chat/completions."""

    messages: Annotated[List[ChatMessage], Field(min_length=1)]
    max_tokens: SomeTokens | None = None
    max_completion_tokens: SomeTokens | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[Whole, Ge(0), Le(MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[List[dict[str, Any]], MaxLen(128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Flag | None = None
    modalities: List[Literal["text"]] | None = None
    add_special_tokens: Literal[False] | None = None  # the chat template writes BOS
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Refused unless they are null, as some clients send them.
    functions: None = None
    function_call: None = None
    audio: None = None
    web_search_options: None = None

    # Taken and ignored: none of them changes the answer of a model that has no such feature.
    metadata: dict[str, Any] | None = None
    store: Flag | None = None
    service_tier: str | None = None
    verbosity: str | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise UserError("'top_logprobs' is only allowed when 'logprobs' is true")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise UserError("'tool_choice' is only allowed when 'tools' are specified")
        kinds = (str(each.get("type", "function")) for each in self.tools or ())
        self.ignore(f"tools: {kind}" for kind in kinds if kind != "function")
        tools = [each for each in self.tools or () if each.get("type", "function") == "function"]
        self.tool_choice, self.tools = chosen(self.tool_choice, tools)
        if self.tool_choice not in (None, "none", "auto") and self.min_tokens:
            raise UserError("a 'tool_choice' that asks for a call excludes 'min_tokens'")
        return self

    @property
    def usable_tools(self) -> list[dict[str, Any]] | None:
        """Returns the tools that the model may call, None for none."""
        return None if self.tool_choice == "none" else self.tools or None

    def template_kwargs(
        self, template: ChatTemplate | None, thinks: bool | None = None
    ) -> dict[str, Any]:
        """Returns the variables of the chat template: those that the request gives, and before them
        what its effort, or `thinks`, means to this template. Those that the template does not read
        are left out. Raises UserError for values that are no JSON."""
        given = self.chat_template_kwargs or {}
        if template is None:
            return given
        given = {name: value for name, value in given.items() if name in template.variables}
        effort, meant = self.reasoning_effort, dict[str, Any]()
        if effort is not None:
            thinks = effort != NO_EFFORT
            if "reasoning_effort" in template.variables and effort != SOME_EFFORT:
                meant["reasoning_effort"] = effort
        if thinks is not None:
            meant |= template.switched(thinks)
        try:
            return {**meant, **template.checked_variables(given)}
        except UserError as error:
            raise UserError(str(error), param="chat_template_kwargs") from None

    def options(self, room: int) -> SamplingOptions:
        """Returns the engine's options; without a number of tokens, `room` is the most."""
        most = self.most_tokens(room) or max(1, room)
        return self._options(most, (self.top_logprobs or 0) if self.logprobs else None)


@sampled
class CompletionRequest(_Request):
    """Holds the body of a request to /v1/completions."""

    prompt: str | List[str] | Ids | List[Ids]
    add_special_tokens: Flag | None = None  # BOS before texts, where the tokenizer adds it
    echo: Flag | None = None
    return_token_ids: Flag | None = None
    logprobs: Annotated[Whole, Ge(0), Le(MAX_COMPLETION_LOGPROBS)] | None = None
    best_of: Whole | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _check_together(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise UserError("'best_of' has to equal 'n': this server drops no answer")
        if not self.prompts:
            raise UserError("got prompt [], expected at least one prompt")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts, each a text or token ids: a list of ids is one prompt."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

    @property
    def scores_prompts(self) -> bool:
        """Says whether the log-probabilities of the prompts' tokens are asked for, too."""
        return bool(self.echo) and self.logprobs is not None

    def most_tokens(self, room: int) -> int:
        """Returns the number of tokens to answer; as many as fit are `room`."""
        most = super().most_tokens(room)
        return DEFAULT_MAX_TOKENS if most is None else most

    def options(self, room: int) -> SamplingOptions:
        """Returns the engine's options, whose calls have one token at least."""
        return self._options(max(1, self.most_tokens(room)), self.logprobs)
