"""Tells a model's thinking, which stands between two tags at the beginning of an answer or in
messages of its own, from the answer itself."""

from __future__ import annotations

import re
from typing import NamedTuple

from spec_runtime.dialogue.stream import overlap


class Tags(NamedTuple):
    """The texts between which a model thinks."""

    opening: str
    closing: str


# gpt-oss writes several messages; what stands before the final one is not for the user.
HARMONY = Tags("<|channel|>", "<|channel|>final<|message|>")
TAGS = (
    Tags("<think>", "</think>"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("[THINK]", "[/THINK]"),  # Magistral
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),  # Command R7B
    Tags("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThinker
    Tags("<|channel>thought\n", "<channel|>"),  # Gemma 4
    HARMONY,
)


_MARK = re.compile(r"<[^<>]+>|\[[^][]+\]")
_AROUND = ("<|start|>", "<|end|>")  # a message of HARMONY


def marks_of(tags: Tags | None) -> list[str]:
    """Returns the names of the control tokens by which the thinking is found."""
    if tags is None:
        return []
    return [*_MARK.findall("".join(tags)), *(_AROUND if tags is HARMONY else ())]


def tags_of(chat_template: str) -> Tags | None:
    """Returns the tags of the models of a chat template, which reads them in earlier answers or
    writes them before a new one; None for models that do not think."""
    return next((tags for tags in TAGS if tags.closing in chat_template), None)


_SHOWN_HEAD = re.compile(
    r"(?:to=functions\.[\w.-]|<\|channel\|>\s*(?:final|commentary)\b)"
    r"(?:[^<]|<\|(?:channel|constrain)\|>){0,300}<\|message\|>"
)


def end_of_thinking(tags: Tags | None, answer: str, is_begun: bool) -> int | None:
    """Returns where an answer's thinking and the tag after it end: 0 if the answer has none, None
    while it has not ended."""
    if tags is None or not (is_begun or answer.lstrip().startswith(tags.opening)):
        return 0
    if tags is HARMONY:
        found = _SHOWN_HEAD.search(answer)
        return None if found is None else found.end()
    before, tag, _ = answer.partition(tags.closing)
    return len(before) + len(tag) if tag else None


class _Holding:
    """Holds text back. White space is joined once other text comes, for there may be much."""

    def __init__(self) -> None:
        self._held = ""
        self._spaces: list[str] = []  # before what is held

    def _hold(self, text: str, is_needed: bool) -> bool:
        """Adds a text to what is held; says whether that waits on, as white space alone does unless
        it `is_needed`."""
        if not self._held.strip():
            self._spaces.append(self._held)
            self._held = ""
        is_space = not text.strip() and not (text and self._held)
        if is_space and not is_needed:
            self._spaces.append(text)
            return True
        self._held = "".join((*self._spaces, self._held, text))
        self._spaces = []
        return False


class ThinkingReader(_Holding):
    """Splits one answer, as it comes, into its thinking and the text after it.

    `tags` are None for a model that does not think. The thinking has begun in the prompt if
    `is_begun`; else it begins with the opening tag, if that is the answer's first text. White space
    around the thinking belongs to neither. What may be a part of a tag is held back.

    Example: "<thi", "nk>\\nHm", ".</th", "ink>\\n\\nYes" gives ("", ""), ("Hm", ""), (".", ""),
    ("", "Yes").
    """

    def __init__(self, tags: Tags | None, is_begun: bool = False) -> None:
        super().__init__()
        self._tags = tags
        self._is_thinking = is_begun
        self._is_open = tags is not None  # whether an opening tag may still come
        self._is_new = True  # no text of this part is out yet
        self._had_thinking = is_begun

    def push(self, text: str, is_end: bool = False) -> tuple[str, str]:
        """Returns the thinking and the text that this text completes, all of it at the end."""
        if self._tags is None:
            return "", text
        if self._hold(text, is_end or not (self._is_open or self._is_thinking)):
            return "", ""
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


class MessageReader(_Holding):
    """Splits one answer, as it comes, of a model that writes messages in HARMONY.

    A message is a head, `<|message|>` and a body, and ends with `<|end|>` or where the next begins.
    Its channel, or the function that it is for, stands in its head. The text is what is for the
    user, and the calls, with one head for all of them: "<|channel|>commentary to=functions.f
    <|message|>". All else is thinking. An answer without any head is text.

    Example: "<|channel|>analysis<|message|>Hm.<|end|>" gives ("Hm.", ""), and then
    "<|start|>assistant<|channel|>final<|message|>Yes" gives ("", "Yes").
    """

    _HEADS = ("<|start|>", "<|channel|>", "to=")
    _ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
    _END = re.compile("|".join(map(re.escape, _ENDS)))
    _SAID = re.compile(r"\S")
    _CALLED = re.compile(r"to=functions\.([\w.-]+)")
    _MAX_HEAD = 300  # characters

    def __init__(self, is_begun: bool = False) -> None:
        super().__init__()
        self._at = 0  # up to here what is held is read, within a push
        self._in_body, self._is_shown = is_begun, False
        self._written = [False, False]  # whether thinking, and text, of a message are out
        self._is_new = True  # nothing of this message is out yet

    def push(self, text: str, is_end: bool = False) -> tuple[str, str]:
        """Returns the thinking and the text that this text completes, all of it at the end."""
        if self._hold(text, is_end or self._in_body):
            return "", ""
        out = ["", ""]
        while self._read_body(out, is_end) if self._in_body else self._read_head(out, is_end):
            pass
        self._held, self._at = self._held[self._at :], 0
        return out[0], out[1]

    def _read_head(self, out: list[str], is_end: bool) -> bool:
        """Reads a message's head; returns False while it is not whole."""
        held, mark = self._held, "<|message|>"
        begin = len(held) if (found := self._SAID.search(held, self._at)) is None else found.start()
        end = held.find(mark, begin, begin + self._MAX_HEAD + len(mark))
        head = held[begin : begin + self._MAX_HEAD + 1 if end < 0 else end]
        is_head = len(head) <= self._MAX_HEAD and head.startswith(self._HEADS)
        if end >= 0 and is_head:
            called = self._CALLED.search(head)
            self._at, self._is_shown = end + len(mark), _SHOWN_HEAD.search(head + mark) is not None
            if called is not None:
                out[1] += f"<|channel|>commentary to=functions.{called[1]}<|message|>"
            self._is_new = called is None
        elif not is_end and (is_head or any(each.startswith(head) for each in self._HEADS)):
            return False
        else:  # no head: its first character is text, and so is what follows
            out[1] += held[self._at : self._at + 1]
            self._at = min(self._at + 1, len(held))
            self._is_shown, self._is_new = True, False
        self._in_body = True
        return True

    def _read_body(self, out: list[str], is_end: bool) -> bool:
        """Hands on what is there of a message's body; returns False if more of it may come."""
        found = self._END.search(self._held, self._at)
        if found is not None:
            end = found.start()
        else:
            end = len(self._held)
            end -= 0 if is_end else overlap(self._held[self._at :], *self._ENDS)
        body = self._held[self._at : end]
        self._at = end
        if body and self._is_new and self._written[self._is_shown]:
            body = f"\n{body}"
        out[self._is_shown] += body
        if body:
            self._is_new, self._written[self._is_shown] = False, True
        if found is None:
            return False
        if found[0] not in self._HEADS:
            self._at = found.end()
        self._in_body, self._is_new = False, True
        return self._at < len(self._held)


def open_reader(tags: Tags | None, is_begun: bool = False) -> ThinkingReader | MessageReader:
    """Returns what reads one answer of a model with these tags, see `ThinkingReader`."""
    return MessageReader(is_begun) if tags is HARMONY else ThinkingReader(tags, is_begun)
