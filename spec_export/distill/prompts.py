"""Reads prompts for a target to answer, from the forms of rows that people have.

This file needs no torch, so that a faulty row is found before anything large is loaded.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_export.training import data
from spec_runtime.errors import UserError

ROLES = ("user", "assistant")  # the answers of a row are left out: the target writes its own


@dataclass(frozen=True)
class PromptRow:
    """The user messages of one row, each a text or token ids, and what the row says of them.

    `system` is the system message before them, None for the chat template's own. `where` is the
    row's file and line.
    """

    messages: list[Any]
    system: str | None
    source: str | None
    where: str


def read(path: Path) -> list[PromptRow]:
    """Returns the prompts of a file of JSON Lines.

    Raises UserError, which names file and line, for a row of another form, and for a file without
    prompts.
    """
    rows = [_row(row, where) for where, row in data.read_rows(path)]
    if not rows:
        raise UserError(f"{path} holds no prompts")
    return rows


def _row(row: dict[str, Any], where: str) -> PromptRow:
    source, chat = row.get("source"), data.as_messages(row, where)
    system = data.system_text(row.get("system"), where)
    if source is not None and not isinstance(source, str):
        raise UserError(f'{where}: "source" is {source!r:.60}, expected a string')
    if chat is not None:
        system, messages = _asked(chat, where)
    elif ("turns" in row) == ("prompt" in row):
        raise UserError(
            f'{where}: got keys {sorted(row)}, expected "prompt": a text or token ids, "turns": a '
            'list of all user messages, "messages", "conversations" or "instruction"'
        )
    else:
        messages = row["turns"] if "turns" in row else [row["prompt"]]
        if not isinstance(messages, list):
            raise UserError(f'{where}: expected "turns": a list of all user messages')
    if not messages:
        raise UserError(f"{where}: got no message of a user, expected one or more")
    for message in messages:
        is_ids = isinstance(message, list) and all(type(i) is int and i >= 0 for i in message)
        if not message or not (is_ids or isinstance(message, str)):
            raise UserError(f'{where}: expected "prompt": a text or token ids, not empty')
    return PromptRow(messages, system, source, where)


def _asked(chat: Any, where: str) -> tuple[str | None, list[Any]]:
    """Returns the system message of a row of chat messages, and those of the user.

    Raises UserError for messages of other roles, which would be left out.
    """
    system = None
    if chat and chat[0].get("role") == "system":
        system = data.system_text(chat[0].get("content"), where)
        chat = chat[1:]
    others = [role for message in chat if (role := message.get("role")) not in ROLES]
    if others:
        raise UserError(
            f"{where}: got a message of role {others[0]!r:.40}, expected one system message at "
            f"most, as the first, and then those of {' and '.join(ROLES)}"
        )
    return system, [message.get("content") for message in chat if message["role"] == "user"]
