"""Turns prompts of every kind into token ids."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spec_runtime.dialogue.messages import Message, Tools, plain_message, require_characters
from spec_runtime.dialogue.tools import CheckedTools, checked_tools
from spec_runtime.errors import UserError
from spec_runtime.text.kept_answers import Dialogue, KeptAnswers
from spec_runtime.text.tokenizer import Codec

if TYPE_CHECKING:
    from spec_runtime.dialogue.chat_template import ChatTemplate

Prompt = str | Sequence[Message] | Sequence[int] | np.ndarray


def encode_prompt(
    codec: Codec,
    prompt: Prompt,
    raw: bool,
    system: str | None,
    tools: Tools | None = None,
    continue_final: bool = False,
    control_tokens: bool | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Returns the token ids of a prompt.

    A string, even an empty one, becomes a user message if there is a chat template and `raw` is not
    set; otherwise it is encoded as it stands. Messages need a template; with `continue_final` the
    last one is an answer of the assistant's that has begun. Ids, a list or an array i64[T] with at
    least one, stay as they are. A text without any token becomes BOS.

    `control_tokens` says whether the names of control tokens, such as "<|im_end|>", become these
    tokens where a text or a message holds them. None allows it in raw prompts only, whose writer
    does the template's work; elsewhere they are ordinary text.

    `tools` and `template_kwargs`, further variables of the template, need a chat template. Raises
    UserError for anything that cannot be a prompt.
    """
    if continue_final and (isinstance(prompt, str) or not _is_begun(prompt)):
        raise UserError(
            "got continue_final, expected messages of which the last is the assistant's and a text"
        )
    for name, given in (("tools", tools), ("template_kwargs", template_kwargs)):
        if given and (raw or codec.template is None or not _is_chat(prompt)):
            raise UserError(
                f"got {name}, expected them with messages or a string for a bundle's chat "
                "template, which reads them",
                param=name,
            )
    is_marked = not (raw if control_tokens is None else control_tokens)
    if isinstance(prompt, str):
        require_characters(prompt, "the prompt")
        if codec.template is None or raw:
            if system is not None:
                raise UserError("got a system prompt, expected none without a chat template")
            text = codec.marked(prompt) if is_marked else prompt
            return _some(codec, codec.encode(text, special_tokens=True, is_marked=is_marked))
        prompt = [{"role": "user", "content": prompt}]
    items = _items(prompt)
    if len(items) == 0:
        raise UserError("got prompt [], expected at least one message or one token id")
    if all(isinstance(item, Mapping) for item in items):
        if raw or codec.template is None:
            why = "raw is set" if raw else "this bundle has no chat template"
            raise UserError(f"got messages, expected a string or token ids: {why}")
        answers = prompt.answers if isinstance(prompt, Dialogue) else None
        ids = _encode_messages(
            codec,
            codec.template,
            items,
            system,
            tools,
            template_kwargs,
            is_marked,
            continue_final,
            answers,
        )
        return _some(codec, ids)
    if system is not None:
        raise UserError("got a system prompt with token ids, expected it among the ids")
    return [_token_id(item) for item in items]


def _some(codec: Codec, ids: list[int]) -> list[int]:
    """Returns the ids, or BOS if there are none."""
    if ids:
        return ids
    if codec.bos is None:
        raise UserError("got an empty prompt, expected some text: this tokenizer has no BOS")
    return [codec.bos]


def _items(prompt: Any) -> Sequence[Any]:
    """Returns the items of a prompt that is no string: all of them messages, or all ids."""
    if isinstance(prompt, np.ndarray):
        if prompt.ndim == 1 and np.issubdtype(prompt.dtype, np.integer):
            return typing.cast(list[int], prompt.tolist())
        got = f"an array of {prompt.dtype} and shape {list(prompt.shape)}"
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray | memoryview):
        return prompt
    else:
        got = f"{type(prompt).__name__} {prompt!r:.40}"
    raise UserError(
        f"got prompt {got}, expected a string, a list of messages, or a list or 1-D array of token "
        "ids"
    )


def _token_id(item: Any) -> int:
    if not isinstance(item, int | np.integer) or isinstance(item, bool):
        raise UserError(f"got {item!r:.80} in the prompt, expected all token ids or all messages")
    return int(item)


def _is_begun(prompt: Any) -> bool:
    """Returns whether the last of these messages is a text of the assistant's."""
    items = _items(prompt)
    last = items[-1] if len(items) > 1 else None
    return (
        isinstance(last, Mapping)
        and last.get("role") == "assistant"
        and isinstance(last.get("content"), str)
    )


def _is_chat(prompt: Any) -> bool:
    """Returns True for a string and for messages, False for token ids."""
    if isinstance(prompt, str):
        return True
    is_list = isinstance(prompt, Sequence) and len(prompt) > 0
    return is_list and isinstance(prompt[0], Mapping)


def _encode_messages(
    codec: Codec,
    template: ChatTemplate,
    messages: Sequence[Message],
    system: str | None,
    tools: Tools | None,
    template_kwargs: Mapping[str, Any] | None,
    is_marked: bool,
    continue_final: bool = False,
    answers: KeptAnswers | None = None,
) -> list[int]:
    """Returns the ids of messages, tools and the template's further variables; if `is_marked`, no
    name of a control token in them becomes that token. Answers that `answers` has kept have their
    own ids."""
    messages = [plain_message(message) for message in messages]
    if system is not None:
        if not isinstance(system, str):
            raise UserError(f"got system prompt {system!r:.40}, expected a string")
        require_characters(system, "the system prompt")
        if messages[0]["role"] == "system":
            raise UserError("got two system prompts, expected one: in the messages or apart")
        messages = [{"role": "system", "content": system}, *messages]
    if is_marked:
        messages = [codec.marked(each, each["role"] == "assistant") for each in messages]
        tools = CheckedTools(codec.marked(checked_tools(tools))) if tools else None
    variables = template.checked_variables(template_kwargs) if template_kwargs else {}
    if is_marked:
        variables = {name: codec.marked(value) for name, value in variables.items()}
    begun = ""
    if continue_final:
        *messages, last = messages
        begun = last["content"]
    # the template writes BOS itself where the model wants one
    text = template.render(messages, tools, variables) + begun
    if answers is not None:
        return answers.encode(codec, text, is_marked)
    return codec.encode(text, special_tokens=False, is_marked=is_marked)
