"""Declares what a caller may ask for in addition to sampling, and checks it."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from annotated_types import Gt

from spec_runtime.dialogue.messages import Tools
from spec_runtime.errors import UserError
from spec_runtime.files.mapping import Checked
from spec_runtime.interruption import Interruption
from spec_runtime.options import Option, require_known
from spec_runtime.sampling import SamplingOptions, SamplingParams


class CallOptions(SamplingOptions, total=False):
    """Lists the keyword arguments of an engine's calls: these, and the fields of SamplingParams.

    `raw` takes a string past the chat template. `system` is the system prompt of a string or of
    messages without one. `tools` are functions in OpenAI's form, which the chat template shows to
    the model (see dialogue/tools.py). `template_kwargs` are further variables that it reads,
    such as {"enable_thinking": False}. `continue_final` goes on with the last message, an answer of
    the assistant's that has begun; the result has what is added. `control_tokens` lets the names
    of control tokens in the prompt, such as "<|im_end|>", become these tokens; None does so in raw
    prompts only. `reuse` keeps the KV of the prefix shared with the previous call, unless there is
    a seed and the target is not fp32, whose rows would then depend on that call. `params` are taken
    in place of single fields of SamplingParams.

    The call ends early, with what it has, `timeout` seconds after it was made, the waiting for its
    turn included, or once another thread sets the event `cancel`: at the next step or after at most
    256 tokens of the prompt. Its finish reason is then "timeout" or "cancelled".
    """

    # made by tools/docs/typed_arguments.py
    params: SamplingParams | None
    raw: bool
    system: str | None
    tools: Sequence[Mapping[str, Any]] | None
    template_kwargs: Mapping[str, Any] | None
    continue_final: bool
    control_tokens: bool | None
    reuse: bool
    timeout: float | None
    cancel: threading.Event | None


@dataclass(frozen=True)
class Request(Checked):
    """Holds the checked options of a call."""

    params: SamplingParams | None = None
    raw: Annotated[bool, Option("No chat template around the prompt")] = False
    system: Annotated[str | None, Option("System prompt")] = None
    tools: Tools | None = None
    template_kwargs: Mapping[str, Any] | None = None
    continue_final: bool = False
    control_tokens: Annotated[
        bool | None,
        Option("Names of control tokens in the text, such as <|im_end|>, become these tokens"),
    ] = None
    reuse: bool = True
    timeout: Annotated[float | None, Gt(0)] = None
    cancel: threading.Event | None = None

    @property
    def sampling(self) -> SamplingParams:
        return self.params or SamplingParams()

    def interruption(self) -> Interruption:
        """Returns what may end the call early; its time runs from now on."""
        return Interruption(self.timeout, self.cancel)


def read_options(options: Mapping[str, Any]) -> Request:
    """Returns the options, checked.

    Raises TypeError for an unknown one, and UserError for a value that is not allowed and for
    `params` together with single fields of SamplingParams.
    """
    names = [field.name for field in fields(Request)]
    require_known(options, [*(field.name for field in fields(SamplingParams)), *names])
    own = {name: value for name, value in options.items() if name in names}
    sampling = {name: value for name, value in options.items() if name not in names}
    params = own.get("params")
    if params is None:
        own["params"] = SamplingParams(**sampling)
    elif not isinstance(params, SamplingParams):
        raise UserError(
            f"got params {params!r:.60}, expected SamplingParams or None", param="params"
        )
    elif sampling:
        raise UserError(
            f"got params and {', '.join(sampling)}, expected one of them: dataclasses.replace "
            "copies params with other fields",
            param="params",
        )
    return Request(**own)
