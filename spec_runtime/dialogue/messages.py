"""Defines messages of a conversation and checks them before a chat template reads them."""

from collections.abc import Mapping, Sequence
from typing import Any

from spec_runtime.errors import UserError

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]  # functions in OpenAI's form


def plain_message(message: Message) -> Message:
    """Returns a message whose content is a string: parts of kind text or refusal are joined. Other
    keys that say nothing, such as "tool_calls": null or [], are left out, as templates ask for the
    key. What an assistant thought, by whatever name a client knows it, is in "reasoning_content".

    The content of an assistant's message with tool calls may be None. Raises UserError for a
    message without role and content, for other kinds of content, and for half surrogate pairs.
    """
    if not isinstance(message.get("role"), str) or "content" not in message:
        raise UserError(f"got message {dict(message)!r:.200}, expected a role and its content")
    role, content = message["role"], message["content"]
    if isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content):
        for part in content:
            kind = part.get("type")
            if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
                raise UserError(
                    f"got content part {dict(part)!r:.80} in a message of {role!r:.40}, expected "
                    "parts of type 'text' with a text"
                )
        content = "".join(part[part["type"]] for part in content)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise UserError(
            f"got content {content!r:.80} in a message of {role!r:.40}, expected a string or a "
            "list of text parts"
        )
    if pictures := [name for name in ("images", "audio", "videos") if message.get(name)]:
        raise UserError(
            f"got {pictures[0]} in a message of {role!r:.40}, expected texts: send what they show "
            "or say as text"
        )
    for text in (role, content or ""):
        require_characters(text, f"a message of {role!r:.40}")
    said = {key: value for key, value in message.items() if not _is_nothing(value)}
    if role == "assistant" and (thought := _thought(said)):
        said["reasoning_content"] = thought
    return {**said, "content": content}


def _thought(message: Message) -> str:
    """Returns what an assistant's message says of its thinking: OpenAI's clients send back what
    they got as a text or as `reasoning_details`, OpenRouter's list of parts."""
    for name in ("reasoning_content", "reasoning", "thinking"):
        if isinstance(text := message.get(name), str):
            return text
    details = message.get("reasoning_details")
    parts = details if isinstance(details, list | tuple) else ()
    texts = [part.get("text") or part.get("summary") for part in parts if isinstance(part, Mapping)]
    return "".join(text for text in texts if isinstance(text, str))


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple | Mapping) and not value)


def require_characters(text: str, what: str) -> None:
    """Raises UserError if `text` holds half a surrogate pair, which no tokenizer can take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"got half a surrogate pair at character {error.start} of {what}, expected text that "
            "can be written as UTF-8"
        ) from None
