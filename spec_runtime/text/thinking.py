"""Tells a model's thinking, which stands between two tags at the beginning of an answer, from the
answer itself."""

from __future__ import annotations

from typing import NamedTuple

from spec_runtime.text.stream import overlap


class Tags(NamedTuple):
    """The texts between which a model thinks."""

    opening: str
    closing: str


TAGS = (
    Tags("<think>", "</think>"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("[THINK]", "[/THINK]"),  # Magistral
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),  # Command R7B
    Tags("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThinker
)


def tags_of(chat_template: str) -> Tags | None:
    """Returns the tags of the models of a chat template, which reads them in earlier answers or
    writes them before a new one; None for models that do not think."""
    return next((tags for tags in TAGS if tags.closing in chat_template), None)


class ThinkingReader:
    """Splits one answer, as it comes, into its thinking and the text after it.

    `tags` are None for a model that does not think. The thinking has begun in the prompt if
    `is_begun`; else it begins with the opening tag, if that is the answer's first text. White space
    around the thinking belongs to neither. What may be a part of a tag is held back.

    Example: "<thi", "nk>\\nHm", ".</th", "ink>\\n\\nYes" gives ("", ""), ("Hm", ""), (".", ""),
    ("", "Yes").
    """

    def __init__(self, tags: Tags | None, is_begun: bool = False) -> None:
        self._tags = tags
        self._held = ""
        self._is_thinking = is_begun
        self._is_open = tags is not None  # whether an opening tag may still come
        self._is_new = True  # no text of this part is out yet
        self._had_thinking = is_begun

    def push(self, text: str, is_end: bool = False) -> tuple[str, str]:
        """Returns the thinking and the text that this text completes, all of it at the end."""
        if self._tags is None:
            return "", text
        self._held += text
        if self._is_open and not self._is_opened(self._tags.opening, is_end):
            return "", ""
        thinking = self._thinking(self._tags.closing, is_end) if self._is_thinking else ""
        return thinking, "" if self._is_thinking else self._rest()

    def _is_opened(self, opening: str, is_end: bool) -> bool:
        """Returns False while the answer may begin with the opening tag that is not whole yet;
        takes the tag away once it is."""
        begin = self._held.lstrip()
        if begin.startswith(opening):
            self._held = begin.removeprefix(opening)
            self._is_thinking = self._had_thinking = True
        elif opening.startswith(begin) and not is_end:
            return False
        self._is_open = False
        return True

    def _thinking(self, closing: str, is_end: bool) -> str:
        """Takes the thinking from the text held, up to the closing tag or what may be one."""
        if self._is_new:
            self._held = self._held.lstrip()
        found, tag, rest = self._held.partition(closing)
        if tag:
            self._is_thinking, self._is_new, self._held = False, True, rest
            return found.rstrip()
        num_free = len(self._held)
        if not is_end:
            num_free = len(self._held[: num_free - overlap(self._held, closing)].rstrip())
        free, self._held = self._held[:num_free], self._held[num_free:]
        self._is_new = self._is_new and not free
        return free.rstrip() if is_end else free

    def _rest(self) -> str:
        """Takes the text after the thinking."""
        text, self._held = self._held, ""
        if self._is_new and self._had_thinking:
            text = text.lstrip()
        self._is_new = self._is_new and not text
        return text
