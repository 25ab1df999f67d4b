"""Reads an answer: its thinking, its text, and the calls of tools in it, whole or as it comes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from spec_runtime.dialogue.messages import Tools
from spec_runtime.dialogue.reader import ResponseReader, joined
from spec_runtime.dialogue.response_template import HARMONY, ResponseTemplate, Tags, template_of
from spec_runtime.dialogue.thinking_matcher import ThinkingMatcher, ThinkingTokens
from spec_runtime.dialogue.tools import ToolCall
from spec_runtime.grammar.base import Matcher
from spec_runtime.text.tokenizer import Codec

MAX_OPENING = 64  # tokens of what a template writes before an answer
# What opens a message of gpt-oss's thinking, and what ends it before the final one's head.
ANALYSIS, ENDING = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"


class Answer(NamedTuple):
    """An answer's parts; `thinking` is empty for a model that did not think."""

    thinking: str
    content: str
    calls: list[ToolCall]


@dataclass(frozen=True)
class AnswerForm:
    """Says how a model writes the answer to one prompt.

    Between `tags` it thinks, None if it does not; `is_begun` says that the prompt ends inside of
    them. `tokens` are the tags' tokens, or None if no thinking may go before a grammar. It calls
    `tools` as its `family` does; without tools, calls are text. `shipped` is the response template
    of a model that ships one. `marks` are control tokens of thinking, see ResponseReader.
    """

    tags: Tags | None = None
    is_begun: bool = False
    tokens: ThinkingTokens | None = None
    family: str = ""
    tools: Tools | None = None
    at_most: int | None = None  # calls of an answer; further ones are dropped
    shipped: ResponseTemplate | None = None
    marks: dict[int, str] = field(default_factory=dict)

    def reader(self, streams: bool = True, has_calls: bool = True) -> ResponseReader:
        """Returns what reads one answer as it comes; unless it `streams`, a call comes out once it
        is whole, see ResponseReader. Calls are text unless it `has_calls`."""
        template = self.shipped or template_of(self.tags, self.family)
        has_calls = has_calls and bool(self.tools)
        return ResponseReader(
            template, self.tools, self.at_most, streams, self.is_begun, has_calls, self.marks
        )

    def read(
        self,
        text: str,
        token_ids: Sequence[int] = (),
        text_ends: Sequence[int] = (),
        is_cut: bool = False,
    ) -> Answer:
        """Returns the parts of a whole answer, see ResponseReader.push."""
        parts = self.reader(streams=False).push(text, True, token_ids, text_ends, is_cut)
        thinking = "".join(part.text for part in parts if part.kind == "thinking")
        return Answer(thinking, *joined(parts))

    def num_thinking_tokens(
        self, text: str, text_ends: Sequence[int], token_ids: Sequence[int] = ()
    ) -> int:
        """Returns how many tokens of an answer are its thinking, the tags among them; see
        GenerationResult.text_ends."""
        reader = self.reader(has_calls=False)
        reader.push(text, True, token_ids, text_ends)
        inside = ((begin, end) for begin, end in reader.heads)
        return sum(sum(begin < each <= end for each in text_ends) for begin, end in inside)

    def after_thinking(
        self, matcher: Matcher, eos: Sequence[int], num_logits: int, budget: int | None = None
    ) -> Matcher:
        """Returns a matcher of the same grammar before whose text the model may think, no more than
        `budget` tokens."""
        if self.tokens is None:
            return matcher
        return ThinkingMatcher(matcher, self.tokens, eos, num_logits, budget)


def form_of(codec: Codec, prompt: Sequence[int], tools: Tools | None = None) -> AnswerForm:
    """Returns the form of the answer to a prompt.

    A model may think before a grammar's text where the prompt ends as the chat template ends it, or
    inside of its thinking.
    """
    template = codec.template
    if template is None:
        return AnswerForm()
    marks = {}
    for mark in template.answers.tokens:
        ids = codec.encode(mark, special_tokens=False)
        if len(ids) == 1 and codec.spelled(ids) == mark:
            marks[ids[0]] = mark
    form = AnswerForm(template.tags, False, None, template.tool_family, tools, marks=marks)
    form = replace(form, shipped=template.answers)
    if template.tags is None:
        return form
    end = codec.spelled(prompt[-MAX_OPENING:]).rstrip()
    opening, closing = (_ids_of(codec, tag) for tag in template.tags)
    if not opening or not closing:
        return replace(form, is_begun=end.endswith(template.tags.opening))
    place = _last(prompt, opening[0])
    is_begun = place > _last(prompt, closing[0])
    if is_begun and template.answers.begins_in(codec.spelled(prompt[place:])):
        is_begun = False  # of an earlier answer, which was cut off
    before = template.opening.rstrip()
    is_new = bool(before) and end.endswith(before) and prompt[-1] != closing[-1]
    if not is_begun and not is_new:
        return form
    blanks = [codec.encode(blank, special_tokens=False) for blank in ("\n", "\n\n")]
    is_message = template.tags == HARMONY
    tokens = ThinkingTokens(
        None if is_begun else opening[0],
        closing,
        tuple(each[0] for each in blanks if len(each) == 1),
        [*codec.encode(ENDING, special_tokens=False), *closing] if is_message else closing,
        codec.encode(ANALYSIS, special_tokens=False) if is_message else (),
    )
    return replace(form, is_begun=is_begun, tokens=tokens)


def _ids_of(codec: Codec, tag: str) -> list[int]:
    """Returns the tokens of a tag, none if it does not begin with a mark that is a token: then the
    text around it may change them."""
    ids = codec.encode(tag, special_tokens=False)
    mark = re.split(r"(?<=[]>])", tag)[0]
    return next((ids[at:] for at, each in enumerate(ids) if codec.spelled([each]) == mark), [])


def _last(ids: Sequence[int], token: int) -> int:
    """Returns the last place of a token, -1 if it is not there."""
    return next((at for at in range(len(ids) - 1, -1, -1) if ids[at] == token), -1)
