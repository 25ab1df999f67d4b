"""Lists what a caller may ask for besides the prompt, and checks it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from spec_runtime.errors import UserError
from spec_runtime.sampling import SamplingOptions, SamplingParams, checked_flag
from spec_runtime.text.tokenizer import Tools
from spec_runtime.waiting.interruption import Interruption


class CallOptions(SamplingOptions, total=False):
    """Lists the keyword arguments of an engine's calls: these, and the fields of SamplingParams.

    `raw` takes a string past the chat template. `system` is the system prompt of a string or of
    messages without one. `tools` are functions in OpenAI's form, which the chat template shows to
    the model (see constraints/tools.py). `continue_final` goes on with the last message, an answer
    of the assistant's that has begun; the result has what is added. `control_tokens` lets the names
    of control tokens in the prompt, such as "<|im_end|>", become these tokens; None does so in raw
    prompts alone. `reuse` keeps the KV of the prefix shared with the previous call, unless there is
    a seed and the target is not fp32, whose rows would then depend on that call. `params` are taken
    in place of single fields of SamplingParams.

    The call ends early, with what it has, `timeout` seconds after it was made, the waiting for its
    turn included, or once another thread sets the event `cancel`: at the next step or after at most
    256 tokens of the prompt. Its finish reason is then "timeout" or "cancelled".
    """

    raw: bool
    system: str | None
    tools: Tools | None
    continue_final: bool
    control_tokens: bool | None
    reuse: bool
    params: SamplingParams | None
    timeout: float | None
    cancel: threading.Event | None


@dataclass(frozen=True)
class Request:
    """Holds the checked options of a call; the fields are those of CallOptions."""

    params: SamplingParams
    raw: bool = False
    system: str | None = None
    tools: Tools | None = None
    continue_final: bool = False
    control_tokens: bool | None = None
    reuse: bool = True
    timeout: float | None = None
    cancel: threading.Event | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.params, SamplingParams):
            raise UserError(
                f"got params {self.params!r:.60}, expected SamplingParams, or None", param="params"
            )
        for name in ("raw", "reuse", "continue_final"):
            object.__setattr__(self, name, checked_flag(name, getattr(self, name)))
        if self.control_tokens is not None:
            allowed = checked_flag("control_tokens", self.control_tokens)
            object.__setattr__(self, "control_tokens", allowed)
        if self.system is not None and not isinstance(self.system, str):
            raise UserError(
                f"got system {self.system!r:.60}, expected a string, or None for none",
                param="system",
            )

    def interruption(self) -> Interruption:
        """Returns what may end the call early; its time runs from now on."""
        return Interruption(self.timeout, self.cancel)


def read_options(options: Mapping[str, Any]) -> Request:
    """Returns the options, checked.

    Raises TypeError for an unknown one, and ValueError for a value that is not allowed and for
    `params` beside single fields of SamplingParams.
    """
    names = {field.name for field in fields(Request)}
    own = {name: value for name, value in options.items() if name in names}
    sampling = {name: value for name, value in options.items() if name not in names}
    if own.get("params") is None:
        own["params"] = SamplingParams(**sampling)
    elif sampling:
        SamplingParams(**sampling)  # an unknown name is a TypeError, here as elsewhere
        raise UserError(
            f"got params and {', '.join(sampling)}, expected one of them: dataclasses.replace "
            "copies params with other fields",
            param="params",
        )
    return Request(**own)
