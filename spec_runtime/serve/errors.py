"""Writes errors as OpenAI's server does: an HTTP status and one JSON object, `error`. Below
/v1/messages they have Anthropic's form."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from spec_runtime.bundle.manifest import BundleError
from spec_runtime.errors import OutOfMemoryError, UserError
from spec_runtime.files.mapping import brief, expected_by
from spec_runtime.options import meant_by
from spec_runtime.queue.admission import QueueFull
from spec_runtime.serve.ignored import DEFAULTS
from spec_runtime.serve.openai.elsewhere import FORMATS

MAX_MESSAGE = 1200  # characters
MOST_PROBLEMS = 1000  # of a body, that are looked at
GONE = 499  # what logs call a client that did not wait for its answer
MESSAGES = "/v1/messages"  # Anthropic's address
RESPONSES = "/v1/responses"
INPUT_TOKENS = f"{RESPONSES}/input_tokens"
FORMAT = "response_format"  # a chat's field, which is "text.format" in RESPONSES
NO_THREADS = "thread_unsupported_request"  # by which its client knows to send whole conversations
# Anthropic's types of errors by status; others are invalid_request_error, or api_error from 500 on.
ANTHROPICS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}

# Names by which this and other servers know a field, and the fields that may stand for it: an error
# names the first one that the address takes and the request has not.
_LENGTH = ("max_tokens", "max_output_tokens")
_STOP = ("stop", "stop_sequences")
_FORMAT = ("response_format", "text.format", "output_config.format")
_SYSTEM = ("instructions", "system", "messages", "prompt")
_PROMPT = ("messages", "prompt", "input")
_THINKING = ("reasoning_effort", "reasoning.effort", "thinking", "chat_template_kwargs")
FIELDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("max_new_tokens", "max_length", "n_predict", "num_predict"), _LENGTH),
    **dict.fromkeys(("max_tokens", "max_output_tokens", "max_completion_tokens"), _LENGTH),
    **dict.fromkeys(("stop", "stop_sequences", "stop_strings", "stop_words", "until"), _STOP),
    **dict.fromkeys(("response_format", "output_config", "output_format"), _FORMAT),
    **dict.fromkeys((*FORMATS, "structured_outputs", "structural_tag"), _FORMAT),
    **dict.fromkeys(("system", "instructions", "system_prompt"), _SYSTEM),
    **dict.fromkeys(("prompt", "messages", "input", "content", "text", "suffix"), _PROMPT),
    **dict.fromkeys(("think", "enable_thinking", "thinking"), _THINKING),
    **dict.fromkeys(("reasoning", "reasoning_effort"), _THINKING),
    "repeat_penalty": ("repetition_penalty",),
    **dict.fromkeys(("logprobs", "top_logprobs"), ("top_logprobs", "logprobs", "include")),
    **dict.fromkeys(("draft_model", "speculative_model"), ("drafter",)),
    "random_seed": ("seed",),
    "functions": ("tools",),
    "function_call": ("tool_choice",),
}
# What another address has.
ELSEWHERE = {
    "prompt_logprobs": "/v1/completions with 'echo' and 'logprobs'",
    "echo": "/v1/completions",
    "return_token_ids": "/tokenize",
    "continue_final_message": "/v1/messages, whose last message may begin the answer",
}

Model = TypeVar("Model", bound=BaseModel)

log = logging.getLogger("spec_runtime")


class ApiError(HTTPException):
    """An error that the client sees as `{"error": {"message", "type", "param", "code"}}`, or in
    Anthropic's form, see `body_of`. An answer that was cut off has the texts so far as
    `partial`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, brief(message, MAX_MESSAGE), headers)
        self.code = code
        said = {"message": self.detail, "type": kind, "param": param, "code": code}
        self.body: dict[str, dict[str, Any]] = {"error": said}

    def with_texts(self, texts: Mapping[int, Sequence[str]] | None) -> ApiError:
        """Adds what there is so far of the choices that were not complete, in pieces, if the client
        has not got it as a stream."""
        if texts:
            found = sorted(texts.items())
            partial = [{"index": index, "text": "".join(pieces)} for index, pieces in found]
            self.body["error"]["partial"] = partial
        return self


class ClientGone(Exception):
    """The client has closed its connection, and will not read the answer."""


def internal_error() -> ApiError:
    """Returns what a client learns of a mistake of ours: that there was one, and no more."""
    message = "The server had an error while processing the request. Its log says more."
    return ApiError(500, message, kind="server_error", code="internal_error")


def timed_out(seconds: float) -> ApiError:
    message = f"The answer was not complete after {seconds:g} s, the most that this server allows."
    return ApiError(504, message, kind="timeout_error", code="timeout")


def stopped() -> ApiError:
    """Returns the error of an answer that a stop of the server cuts off."""
    message = "The answer was cancelled: the server is stopping."
    return ApiError(503, message, kind="server_error", code="cancelled")


def as_api_error(error: Exception, prompt_field: str | None = None) -> ApiError:
    """Returns what the client is told of an error: of a UserError its line without the hint, of a
    bug nothing, nor of a bundle's fault, whose line may name files of this machine.

    `prompt_field` is the request's field that holds the prompt, where the error is one of encoding
    it.
    """
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, UserError) or isinstance(error, BundleError | OutOfMemoryError):
        log.error("a request failed", exc_info=error)
        return internal_error()
    message = str(error)
    if isinstance(error, QueueFull):
        headers = {"Retry-After": str(error.seconds)}
        return ApiError(429, message, kind="rate_limit_error", code=error.code, headers=headers)
    is_of_prompt = prompt_field is not None and error.param in (None, "prompt")
    param = prompt_field if is_of_prompt else error.param
    return ApiError(400, message, param=param, code=error.code or "invalid_value")


class Json(Response):
    """A JSON response in ASCII: half surrogates, which a message may quote, have no UTF-8."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumped(content).encode()


def dumped(content: Any) -> str:
    """Returns JSON as the server writes it: in ASCII, without spaces, and without NaN."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def is_anthropics(path: str) -> bool:
    """Says whether requests to this path, and their errors, have Anthropic's form."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def body_of(error: ApiError, path: str) -> dict[str, Any]:
    """Returns the JSON of an error of a request to `path`.

    Anthropic's is `{"type": "error", "error": {"type", "message"}}`. Its clients know a prompt that
    is too long by how the message begins.
    """
    if not is_anthropics(path):
        said = error.body["error"]
        if path == RESPONSES and said["param"] == FORMAT:
            return {"error": {**said, "param": "text.format"}}
        return error.body
    kind = "api_error" if error.status_code >= 500 else "invalid_request_error"
    is_too_long = error.code == "context_length_exceeded"
    message = f"prompt is too long: {error.detail}" if is_too_long else error.detail
    told: dict[str, Any] = {"type": ANTHROPICS.get(error.status_code, kind), "message": message}
    if error.code == NO_THREADS:
        told["details"] = {"error_code": error.code}
    if partial := error.body["error"].get("partial"):
        told["partial"] = partial
    return {"type": "error", "error": told}


def response(error: ApiError, path: str) -> Json:
    """Returns the response of an error of a request to `path`."""
    return Json(body_of(error, path), error.status_code, error.headers)


def add_handlers(app: FastAPI) -> None:
    """Makes the app answer all of its errors in the form of the API that was asked."""
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(UserError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ClientGone, _gone)
    app.add_exception_handler(Exception, _failed)


async def _refused(request: Request, error: Exception) -> Response:
    """Answers our own errors, and FastAPI's: unknown addresses and methods, unreadable bodies."""
    if isinstance(error, HTTPException) and not isinstance(error, ApiError):
        error = _reworded(request, error)
    told = as_api_error(error)
    request.scope["log"]["error"] = told.code
    return response(told, request.url.path)


def _reworded(request: Request, error: HTTPException) -> ApiError:
    message, code = str(error.detail), None
    if error.status_code in (404, 405):
        message = f"Invalid URL ({request.method} {request.url.path}){_meant(request)}"
        code = "unknown_url"
    elif error.status_code == 400:  # bytes that are not UTF-8, numbers too long to be read
        message = "The body is not JSON in UTF-8."
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def _meant(request: Request) -> str:
    """Returns what an error adds if the address is a known one but for a "/v1" before it."""
    path = request.url.path
    rest = path
    while rest == "/v1" or rest.startswith("/v1/"):
        rest = rest.removeprefix("/v1")
    for known in (f"/v1{rest}", rest):
        scope = {**request.scope, "path": known}
        if known != path and any(
            route.matches(scope)[0] is not Match.NONE for route in request.app.routes
        ):
            what = "misses /v1" if len(known) > len(path) else "has one /v1 too many"
            return f": got an address that {what}, expected {known}; mend the client's base address"
    return ""


async def _invalid(request: Request, error: Exception) -> Response:
    """Answers a body that is no JSON, or not what the schema says."""
    assert isinstance(error, RequestValidationError), error
    return await _refused(request, refusal(error.errors()))


async def _gone(request: Request, error: Exception) -> Response:
    """Ends a request whose client left, with a response that is never read."""
    request.scope["log"]["gone"] = True
    return Response(status_code=GONE)


async def _failed(request: Request, error: Exception) -> Response:
    """Answers a mistake of ours, which goes on to the log."""
    return response(internal_error(), request.url.path)


def parsed(kind: type[Model], body: bytes) -> Model:
    """Returns the object that a body of JSON is. Raises ApiError if it is none of this kind, and
    ValueError if it is no JSON."""
    try:
        return kind.model_validate(found := json.loads(body))
    except ValidationError as error:
        if (number := error.error_count()) > MOST_PROBLEMS:  # a million would take 10 s to describe
            message = f"got a body with {number} mistakes, expected one that /openapi.json allows"
            raise ApiError(400, message, code="invalid_value") from None
        given = found if isinstance(found, dict) else {}
        fields = [
            name
            for name, field in kind.model_fields.items()
            if name not in given and field.annotation is not type(None)
        ]
        raise refusal(error.errors(), fields) from None


def refusal(problems: Sequence[Mapping[str, Any]], open_fields: Sequence[str] = ()) -> ApiError:
    """Returns the error of the first of pydantic's problems, in words like OpenAI's. `open_fields`
    are those that the request could have and has not.

    A value that may have several types has a problem with each of them; one that is not about the
    type comes first.
    """
    problem = min(problems, key=lambda each: str(each["type"]).endswith("_type"))
    kind, place = problem["type"], [part for part in problem["loc"] if part != "body"]
    if kind == "json_invalid":
        why = problem.get("ctx", {}).get("error", problem["msg"])
        return ApiError(400, f"We could not parse the JSON body of your request: {why}.")
    name = _named(place)
    if kind == "extra_forbidden":  # the place ends with the unknown field, whatever its name is
        outer, field = _named(place[:-1]), brief(place[-1], 80)
        name = f"{outer}.{field}" if outer else field
        message = f"Unrecognized request argument supplied: {name}{_instead(name, open_fields)}"
        return ApiError(400, message, param=name)
    if kind == "value_error" and not place:  # two fields that do not go together
        return ApiError(400, problem["msg"].removeprefix("Value error, ") + ".")
    if not place:
        message = "The body has to be a JSON object, with Content-Type: application/json."
        return ApiError(400, message)
    if kind == "missing":
        message = f"Missing required parameter: '{name}'."
        return ApiError(400, message, param=name, code="missing_required_parameter")
    is_other = kind == "none_required" or (name == "logprobs" and kind == "bool_type")
    instead = _instead(name, open_fields) if is_other else ""
    expected = expected_by(problem, "null")
    if kind == "value_error":  # of ours: "Value error, expected …"
        expected = problem["msg"].partition(" expected ")[2]
    got = brief(repr(problem.get("input")), 80)
    message = f"Invalid '{name}': got {got}, expected {expected}{instead}."
    return ApiError(400, message, param=name, code="invalid_value")


def _instead(name: str, open_fields: Sequence[str]) -> str:
    """Returns what an error adds about a field that is known from elsewhere, or misspelt: a field
    that the request could have."""
    for field in FIELDS.get(name, ()):
        if field.partition(".")[0] in open_fields and field != name:
            return f"; use '{field}'"
    if name in ELSEWHERE:
        return f"; use {ELSEWHERE[name]}"
    if name in DEFAULTS:
        return f"; here it is always {json.dumps(DEFAULTS[name])}"
    meant = meant_by(name, open_fields)
    return f"; use '{meant}'" if meant not in (None, name) else ""


def _named(place: Sequence[Any]) -> str:
    """Returns a place as OpenAI writes it: ("messages", 0, "role") -> "messages[0].role"."""
    name = ""
    for part in place:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part != "str":  # else the branch of a union: "list[str]"
            name += f".{part}" if name else part
    return name
