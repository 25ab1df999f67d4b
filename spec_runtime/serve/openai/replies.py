"""Writes answers as OpenAI's API does: whole ones, and the chunks of a stream."""

import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from spec_runtime import Chunk, GenerationResult, Part, TokenLogprob
from spec_runtime.dialogue.reader import ResponseReader, joined
from spec_runtime.dialogue.stream import REPLACEMENT, TextStream
from spec_runtime.loop.answer import AnswerForm
from spec_runtime.loop.stats import ratio
from spec_runtime.serve.threads import SMALL
from spec_runtime.text.tokenizer import Codec

Object = dict[str, Any]
Shown = list[tuple[TokenLogprob, int]]  # tokens, with the places where they begin
WORD = "a"  # after which a token's text has the space that a first word would lose


def usage(results: Sequence[GenerationResult], num_prompts: int = 1) -> Object:
    """Returns the object `usage` of all choices; a prompt counts once, however many they are."""
    each_prompt = results[:: max(1, len(results) // num_prompts)]
    prompt = sum(result.stats.prompt_tokens for result in each_prompt)
    reused = sum(result.stats.reused_tokens for result in each_prompt)
    completion = sum(len(result.token_ids) for result in results)
    reasoning = sum(result.usage.reasoning_tokens for result in results)
    return {
        **counted(prompt, completion),
        "prompt_tokens_details": {"cached_tokens": reused},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def counted(prompt: int, completion: int) -> Object:
    """Returns the object `usage` of so many tokens."""
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


def measured(results: Sequence[GenerationResult]) -> Object:
    """Returns what an answer took, `timings` in llama.cpp's form and `metrics` in vLLM's; nothing
    of several answers. Steps without drafted tokens are in no figure of drafting."""
    if len(results) != 1:
        return {}
    stats, predicted = results[0].stats, len(results[0].token_ids)
    accepts = stats.depth_accepts
    num_accepted, num_steps = sum(accepts), stats.drafted_steps
    at_least = [num_steps, *accepts, 0]  # steps that accepted so many tokens or more
    timings = {
        "cache_n": stats.reused_tokens,
        **_timed("prompt", stats.prompt_tokens - stats.reused_tokens, stats.prefill_seconds),
        **_timed("predicted", predicted, stats.decode_seconds),
        "draft_n": stats.drafted_tokens,
        "draft_n_accepted": num_accepted,
    }
    drafting = {
        "mean_acceptance_length": stats.drafted_length,
        "draft_acceptance_rate": ratio(num_accepted, stats.drafted_tokens),
        "acceptance_histogram": [a - b for a, b in pairwise(at_least)],
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": stats.drafted_tokens,
        "num_spec_tokens": len(accepts),
    }
    return {"timings": timings, "metrics": {"speculative_decoding": drafting}}


def _timed(name: str, number: int, seconds: float) -> Object:
    return {
        f"{name}_n": number,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * ratio(seconds, number),
        f"{name}_per_second": ratio(number, seconds),
    }


@dataclass(frozen=True)
class Echo:
    """Holds a prompt that goes before its answer: its text, its ids, and the log-probabilities of
    its tokens but the first, if they are asked for."""

    text: str
    token_ids: list[int]
    scores: list[TokenLogprob]


class ShownTokens:
    """Says which tokens of one answer its text shows so far, and at which character each begins.

    A token waits until its text has come: what may be a part of a stop string may never come.
    """

    def __init__(self, ending: frozenset[int]) -> None:
        self._ending = ending
        self._waiting: deque[tuple[TokenLogprob, int, int]] = deque()  # with its begin and end
        self._end = self._length = 0  # of the tokens, and of the text

    def take(self, chunk: Chunk) -> Shown:
        """Returns the tokens that a chunk shows, with the places where they begin."""
        self._length += len(chunk.text)
        for entry, end in zip(chunk.logprobs or (), chunk.text_ends, strict=False):
            self._waiting.append((entry, self._end, end))
            self._end = end
        is_last = chunk.result is not None
        is_cut = chunk.result is not None and isinstance(chunk.result.stop, str)
        taken = []
        while self._waiting and (is_last or self._waiting[0][2] <= self._length):
            entry, begin, _ = self._waiting.popleft()
            is_shown = begin < self._length or not is_cut
            if is_shown and entry.token_id not in self._ending:
                taken.append((entry, begin))
        return taken


class ShownParts:
    """Says which tokens each piece of an answer's text shows. Thinking, calls, and the marks and
    blanks around them show none."""

    def __init__(self, tokens: ShownTokens) -> None:
        self._tokens = tokens
        self._reader: ResponseReader | None = None  # says where each part stands
        self._waiting: deque[tuple[TokenLogprob, int]] = deque()  # with the places they begin at
        self._last = "text"  # the kind of the last part

    def push(self, chunk: Chunk, form: AnswerForm) -> Iterator[tuple[Part, Shown]]:
        """Yields the parts of a chunk of an answer in this form, each with the tokens that it
        shows, and a last one without text for tokens that have none."""
        if chunk.logprobs is None:  # none are asked for
            yield from ((part, []) for part in chunk.parts)
            return
        is_last = chunk.result is not None
        if self._reader is None:
            self._reader = form.reader(streams=not (is_last and chunk.token_ids))
        is_cut = chunk.result is not None and chunk.result.is_cut
        parts = self._reader.push(chunk.text, is_last, chunk.token_ids, chunk.text_ends, is_cut)
        self._waiting.extend(self._tokens.take(chunk))
        for part, span in zip(parts, self._reader.spans, strict=True):
            self._last = part.kind
            yield part, self._within(*span) if part.kind == "text" else []
        if is_last and self._last == "text" and self._waiting:
            yield Part("text", ""), [*self._waiting]

    def _within(self, begin: int, end: int) -> Shown:
        """Returns the tokens that begin in this stretch of the answer."""
        shown = []
        while self._waiting and self._waiting[0][1] < end:
            entry, place = self._waiting.popleft()
            if place >= begin:
                shown.append((entry, place))
        return shown


def whole_chunk(result: GenerationResult) -> Chunk:
    """Returns a whole answer as one chunk, of whose calls none is cut."""
    return Chunk(
        text=result.text,
        token_ids=tuple(result.token_ids),
        logprobs=None if result.logprobs is None else tuple(result.logprobs),
        text_ends=tuple(result.text_ends),
        result=result,
        parts=tuple(result.parts(streams=False)),
    )


def is_small(chunk: Chunk) -> bool:
    """Says whether a chunk is a piece of text that is short, without log-probabilities."""
    size = len(chunk.text) + sum(len(part.text) for part in chunk.parts)
    return chunk.result is None and chunk.logprobs is None and size <= SMALL


class TokenTexts:
    """Writes tokens and their log-probabilities as text; `ending` are ids that are left out, since
    the text has nothing of them."""

    def __init__(self, codec: Codec, ending: frozenset[int]) -> None:
        self._decode, self._spelled = codec.decode, codec.spelled
        self._ending = ending
        self._before = codec.encode(WORD, special_tokens=False)
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Returns a token's text as it is after a word."""
        if token not in self._texts:
            known, text = self._decode(self._before), self._decode([*self._before, token])
            is_after = text.startswith(known)
            self._texts[token] = text[len(known) :] if is_after else self._decode([token])
        return self._texts[token]

    def tokens_of_choice(self) -> ShownTokens:
        """Returns what says which tokens of a choice are shown."""
        return ShownTokens(self._ending)

    def chat(self, shown: Sequence[tuple[TokenLogprob, int]]) -> Object:
        """Returns the object `logprobs` of a chat choice."""
        return {
            "content": [
                {
                    **self._entry(entry.token_id, entry.logprob),
                    "top_logprobs": [self._entry(token, value) for token, value in entry.top],
                }
                for entry, _ in shown
            ],
            "refusal": None,
        }

    def response(self, shown: Sequence[tuple[TokenLogprob, int]]) -> list[Object]:
        """Returns the list `logprobs` of a response's text, whose `bytes` may not be null."""
        entries: list[Object] = self.chat(shown)["content"]
        for entry in entries:
            for each in (entry, *entry["top_logprobs"]):
                each["bytes"] = each["bytes"] or []
        return entries

    def _entry(self, token: int, logprob: float) -> Object:
        text = self.text(token)
        data = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": data}

    def completion(self, shown: Sequence[tuple[TokenLogprob, int]], offset: int) -> Object:
        """Returns the object `logprobs` of a completion; the answer begins at `offset` of its
        text."""
        return {
            "tokens": [self.text(entry.token_id) for entry, _ in shown],
            "token_logprobs": [_finite(entry.logprob) for entry, _ in shown],
            "top_logprobs": [self._by_text(entry.top) for entry, _ in shown],
            "text_offset": [offset + begin for _, begin in shown],
        }

    def prompt(self, echo: Echo) -> Object:
        """Returns the object `logprobs` of a prompt, whose first token has none."""
        begin, ends = -1, [0]
        for decode in (self._spelled, self._decode):  # a text may have names of control tokens
            if begin < 0:
                stream = TextStream(decode)
                for token in echo.token_ids:
                    stream.push(token)
                stream.finish()
                begin, ends = stream.text.find(echo.text), stream.ends
        begins = [min(max(0, end - max(0, begin)), len(echo.text)) for end in ends[:-1]]
        rest = self.completion(list(zip(echo.scores, begins, strict=True)), 0)
        first = {"tokens": self.text(echo.token_ids[0]), "text_offset": 0}
        return {key: [first.get(key), *values] for key, values in rest.items()}

    def _by_text(self, top: Sequence[tuple[int, float]]) -> Object:
        """Returns log-probabilities by text. Of tokens that have the same text the likeliest has
        it, and the others are named by their ids."""
        found: Object = {}
        for token, value in top:
            text = self.text(token)
            found[f"token_id:{token}" if text in found else text] = _finite(value)
        return found


def _finite(logprob: float) -> float:
    """Returns a log-probability as OpenAI writes it, where -9999 stands for "never"."""
    return max(logprob, -9999.0)


def finish_reason(result: GenerationResult) -> str:
    """Returns OpenAI's word for how an answer ended."""
    return "length" if result.finish_reason == "length" else "stop"


def ends_in_calls(result: GenerationResult) -> bool:
    """Says whether an answer has calls, and all that a stream of it shows are whole: one that is
    cut, or has arguments that are no JSON, is no call of the result."""
    calls = result.tool_calls
    return bool(calls) and joined(result.parts(streams=True))[1] == calls


class Heading:
    """Writes what all objects of one reply have in common; `whole` is the kind of its object, and
    `part` that of a stream's chunks."""

    def __init__(self, prefix: str, whole: str, part: str, model: str) -> None:
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._whole, self._part, self._model = whole, part, model

    def reply(self, choices: list[Object], **more: Any) -> Object:
        """Returns a whole reply."""
        return {**self._head(self._whole), "choices": choices, **more}

    def chunk(self, *choices: Object, **more: Any) -> Object:
        """Returns one chunk of a stream."""
        return {**self._head(self._part), "choices": list(choices), **more}

    def _head(self, kind: str) -> Object:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}
