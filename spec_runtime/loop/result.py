"""Holds answers: whole ones, and chunks of one that is on its way."""

from dataclasses import dataclass, field
from functools import cached_property

from spec_runtime.dialogue.reader import Part
from spec_runtime.dialogue.tools import ToolCall
from spec_runtime.loop.answer import Answer, AnswerForm
from spec_runtime.loop.stats import Stats
from spec_runtime.sampling import TokenLogprob


@dataclass(frozen=True)
class Usage:
    """Counts the tokens of one call.

    `reused_tokens` are those of the prompt whose KV was still there. `drafted_tokens` are all that
    drafters guessed, right or wrong; `completion_tokens` are the answer's, of which
    `reasoning_tokens` are its thinking.
    """

    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int
    drafted_tokens: int
    reasoning_tokens: int


@dataclass(frozen=True)
class GenerationResult:
    """Holds one answer.

    `text` is all that the model wrote, without the stop string. Of it `reasoning` is the thinking
    between a model's tags, `tool_calls` are the calls of the tools that the prompt had, and
    `content` is the rest, the answer itself: that alone fits a `response_format`.

    `token_ids` include the EOS or the token that ended it.
    `acceptance` is greedy, target_sampling, rejection or typical. `logprobs` belong to `token_ids`,
    if the request asked for them. `stop` is what ended it where the finish reason is "stop": the
    stop string, or the token's id. `text_ends` says of each of `token_ids` how many characters of
    the text are there with it: token i begins at text_ends[i - 1]. Tokens of a stop string may end
    after the text.
    """

    text: str
    token_ids: list[int]
    finish_reason: str  # stop | length | cancelled | timeout
    stats: Stats
    acceptance: str = "greedy"
    logprobs: list[TokenLogprob] | None = None
    stop: str | int | None = None
    text_ends: list[int] = field(default_factory=list)
    form: AnswerForm = field(default_factory=AnswerForm, repr=False, compare=False)

    @property
    def reasoning(self) -> str:
        """Returns the model's thinking, an empty text if there is none."""
        return self._answer.thinking

    @property
    def content(self) -> str:
        """Returns the text without the thinking and the calls of tools."""
        return self._answer.content

    @property
    def tool_calls(self) -> list[ToolCall]:
        """Returns the calls of tools in the answer."""
        return self._answer.calls

    @cached_property
    def _answer(self) -> Answer:
        return self.form.read(self.text, self.token_ids, self.text_ends, self.is_cut)

    @property
    def is_cut(self) -> bool:
        """Says whether something other than the model's own words ended the answer."""
        return self.finish_reason != "stop"

    def parts(self, streams: bool) -> list[Part]:
        """Returns the parts of the answer, as they come in a stream or whole, see Part."""
        reader = self.form.reader(streams)
        return reader.push(self.text, True, self.token_ids, self.text_ends, self.is_cut)

    @property
    def preserves_distribution(self) -> bool:
        """Says whether the tokens follow the target's distribution: typical acceptance's do not."""
        return self.acceptance != "typical"

    @property
    def usage(self) -> Usage:
        """Counts prompt, reused, completion and drafted tokens."""
        stats = self.stats
        return Usage(
            prompt_tokens=stats.prompt_tokens,
            reused_tokens=stats.reused_tokens,
            completion_tokens=len(self.token_ids),
            drafted_tokens=stats.drafted_tokens,
            reasoning_tokens=self.form.num_thinking_tokens(
                self.text, self.text_ends, self.token_ids
            ),
        )


@dataclass(frozen=True)
class Piece:
    """Holds the text of one token and the token's depth, see Chunk."""

    text: str
    depth: int


@dataclass(frozen=True)
class Chunk:
    """Holds what one step adds to an answer.

    `depths` are those of `token_ids`: 0 is the target's own token, and k was drafted as guess k of
    the step's tree. `logprobs` and `text_ends` belong to `token_ids`, see GenerationResult.
    `num_drafted` counts the nodes of the step's tree without its root.

    `text` may lag behind the tokens: a character whose last byte is missing, and what may be the
    beginning of a stop string, come with a later chunk. The texts of `pieces` joined are `text`;
    each has the depth of the token that completed it. `parts` tell thinking, the answer itself, and
    the calls of tools in it apart, see Part; they may lag behind the text, since what may be the
    beginning of a mark waits for the rest of it. The last chunk has no tokens but what was held
    back, and is the only one with a `result`.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    depths: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()
    num_drafted: int = 0
    result: GenerationResult | None = None
    text_ends: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()
