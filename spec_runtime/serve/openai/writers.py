"""Turns the chunks and results of a request into OpenAI's two kinds of replies."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence

from spec_runtime import Chunk, GenerationResult, Part, TokenLogprob
from spec_runtime.loop.answer import AnswerForm
from spec_runtime.serve.answers import Answers
from spec_runtime.serve.openai.replies import (
    Echo,
    Heading,
    Object,
    ShownParts,
    ShownTokens,
    TokenTexts,
    counted,
    ends_in_calls,
    finish_reason,
    measured,
    usage,
    whole_chunk,
)
from spec_runtime.serve.openai.schemas import StreamOptions
from spec_runtime.serve.streams import event_of


class ChoicesReply:
    """Writes a reply in OpenAI's form, whose choices a writer writes. `stream_options` are the
    request's, if it has some. As the replies of other APIs do, it returns the whole reply, and
    yields the server-sent events of a stream for a chunk of the choice `index`, and after all."""

    def __init__(
        self,
        writer: ChatWriter | CompletionWriter,
        stream_options: StreamOptions | None,
        num_prompts: int = 1,
    ) -> None:
        self._writer = writer
        self._options = stream_options or StreamOptions()
        self._num_prompts = num_prompts
        self._num_tokens = 0  # of a stream, so far

    def whole(self, results: Sequence[GenerationResult]) -> Object:
        choices = [self._writer.whole(index, result) for index, result in enumerate(results)]
        told = usage(results, self._num_prompts)
        return self._writer.heading.reply(choices, usage=told, **measured(results))

    def events(self, answers: Answers, index: int, chunk: Chunk) -> Iterator[str]:
        more: Object = {"usage": None} if self._options.include_usage else {}
        self._num_tokens += len(chunk.token_ids)
        if self._options.continuous_usage_stats:
            more["usage"] = counted(answers.prompt_tokens, self._num_tokens)
        for choice in self._writer.parts(index, chunk, answers.form):
            if choice["finish_reason"] and chunk.result and not self._options.include_usage:
                more["timings"] = measured([chunk.result])["timings"]
            yield event_of(self._writer.heading.chunk(choice, **more))

    def last_events(self, answers: Answers) -> Iterator[str]:
        """Yields the usage, if it is asked for, and OpenAI's last event, [DONE]."""
        if self._options.include_usage:
            told = usage(answers.results, self._num_prompts)
            yield event_of(self._writer.heading.chunk(usage=told, **measured(answers.results)))
        yield "data: [DONE]\n\n"


class ChatWriter:
    """Writes choices of /v1/chat/completions; `content` is what a stream's begins with, None where
    a call is forced."""

    def __init__(self, model: str, texts: TokenTexts, content: str | None = "") -> None:
        self.heading = Heading("chatcmpl", "chat.completion", "chat.completion.chunk", model)
        self._texts, self._content = texts, content
        self._num_calls: dict[int, int] = {}  # of each choice that has begun
        self._shown: dict[int, ShownParts] = defaultdict(self._parts_of_choice)

    def parts(self, index: int, chunk: Chunk, form: AnswerForm) -> Iterator[Object]:
        if index not in self._num_calls:
            self._num_calls[index] = 0
            yield self._part(index, {"role": "assistant", "content": self._content})
        for part, shown in self._shown[index].push(chunk, form):
            logprobs = self._texts.chat(shown) if shown else None
            yield self._part(index, self._delta(index, part), logprobs)
        if chunk.result is not None:
            is_called = ends_in_calls(chunk.result)
            reason = "tool_calls" if is_called else finish_reason(chunk.result)
            yield {**self._part(index, {}), "finish_reason": reason}

    def _parts_of_choice(self) -> ShownParts:
        return ShownParts(self._texts.tokens_of_choice())

    def _part(self, index: int, delta: Object, logprobs: Object | None = None) -> Object:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _delta(self, index: int, part: Part) -> Object:
        if part.kind == "text":
            return {"content": part.text}
        if part.kind == "thinking":
            return _thought(part.text)
        self._num_calls[index] += part.kind == "call"
        call: Object = {"function": {"arguments": part.text}}
        if part.kind == "call":
            call = {**_begun_call(), "function": {"name": part.text, "arguments": ""}}
        return {"tool_calls": [{"index": self._num_calls[index] - 1, **call}]}

    def whole(self, index: int, result: GenerationResult) -> Object:
        reason = finish_reason(result)
        message: Object = {"role": "assistant", "content": result.content, "refusal": None}
        if result.reasoning:
            message |= _thought(result.reasoning)
        if result.tool_calls:
            calls = [
                {**_begun_call(), "function": {"name": name, "arguments": arguments}}
                for name, arguments in result.tool_calls
            ]
            message |= {"content": result.content or None, "tool_calls": calls}
            reason = "tool_calls" if ends_in_calls(result) else reason
        logprobs = None
        if result.logprobs is not None:
            parts = self._parts_of_choice().push(whole_chunk(result), result.form)
            logprobs = self._texts.chat([each for _, shown in parts for each in shown])
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def _thought(text: str) -> Object:
    """Returns thinking by both names that clients know."""
    return {"reasoning_content": text, "reasoning": text}


def _begun_call() -> Object:
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}


class CompletionWriter:
    """Writes choices of /v1/completions; `echoes` are the prompts that go before the texts, by
    choice, or None. With them go their tokens, where the answers' tokens are shown. `with_ids` adds
    the answers' token ids, the end's among them, as vLLM writes them."""

    def __init__(
        self, model: str, texts: TokenTexts, echoes: list[Echo] | None, with_ids: bool = False
    ) -> None:
        self.heading = Heading("cmpl", "text_completion", "text_completion", model)
        self._texts = texts
        self._echoes = echoes
        self._with_ids = with_ids
        self._shown: dict[int, ShownTokens] = defaultdict(texts.tokens_of_choice)

    def parts(self, index: int, chunk: Chunk, form: AnswerForm) -> Iterator[Object]:
        is_first = index not in self._shown
        shown = self._shown[index].take(chunk)
        has_prompt = is_first and self._echoes is not None and chunk.logprobs is not None
        asked = shown if shown or has_prompt else None
        text, logprobs = self._written(index, chunk.text, asked, is_first)
        ids = chunk.token_ids if self._with_ids else ()
        if text or logprobs or ids or chunk.result is not None:
            reason = None if chunk.result is None else finish_reason(chunk.result)
            yield self._choice(index, text, logprobs, reason, ids)

    def whole(self, index: int, result: GenerationResult) -> Object:
        shown = None
        if result.logprobs is not None:
            shown = self._texts.tokens_of_choice().take(whole_chunk(result))
        text, logprobs = self._written(index, result.text, shown, is_first=True)
        return self._choice(index, text, logprobs, finish_reason(result), result.token_ids)

    def _written(
        self, index: int, text: str, shown: list[tuple[TokenLogprob, int]] | None, is_first: bool
    ) -> tuple[str, Object | None]:
        """Returns a text of an answer and the object `logprobs` of its tokens, None for none; with
        the prompt's before them, if it is the first text and prompts are echoed."""
        echo = Echo("", [], []) if self._echoes is None else self._echoes[index]
        logprobs = None if shown is None else self._texts.completion(shown, len(echo.text))
        if logprobs is not None and echo.token_ids and is_first:
            prompt = self._texts.prompt(echo)
            logprobs = {key: [*prompt[key], *values] for key, values in logprobs.items()}
        return (echo.text if is_first else "") + text, logprobs

    def _choice(
        self, index: int, text: str, logprobs: Object | None, reason: str | None, ids: Sequence[int]
    ) -> Object:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {**choice, "token_ids": list(ids)} if self._with_ids else choice
