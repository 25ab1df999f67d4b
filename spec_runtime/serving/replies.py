"""Writes answers as OpenAI's API does: whole ones, and the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from spec_runtime import GenerationResult, TokenLogprob

Object = dict[str, Any]
REPLACEMENT = "\ufffd"  # what a part of a character is decoded as


def usage(results: Sequence[GenerationResult], num_prompts: int = 1) -> Object:
    """Returns the object `usage` of all choices; a prompt counts once, however many they are."""
    each_prompt = results[:: max(1, len(results) // num_prompts)]
    prompt = sum(result.stats.prompt_tokens for result in each_prompt)
    reused = sum(result.stats.reused_tokens for result in each_prompt)
    completion = sum(len(result.token_ids) for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": reused},
    }


class TokenTexts:
    """Writes tokens and their log-probabilities as text; `ending` are ids that are left out, since
    the text has nothing of them."""

    def __init__(self, decode: Callable[[Sequence[int]], str], ending: frozenset[int]) -> None:
        self._decode = decode
        self._ending = ending

    def text(self, token: int) -> str:
        return self._decode([token])

    def shown(self, logprobs: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        """Returns the entries of tokens that belong to the text."""
        return [entry for entry in logprobs if entry.token_id not in self._ending]

    def chat(self, logprobs: Sequence[TokenLogprob]) -> Object:
        """Returns the object `logprobs` of a chat choice."""
        return {
            "content": [
                {
                    **self._entry(entry.token_id, entry.logprob),
                    "top_logprobs": [self._entry(token, value) for token, value in entry.top],
                }
                for entry in self.shown(logprobs)
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float) -> Object:
        text = self.text(token)
        data = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": data}

    def completion(self, logprobs: Sequence[TokenLogprob], offset: int) -> Object:
        """Returns the object `logprobs` of a completion whose text begins at `offset`."""
        shown = self.shown(logprobs)
        tokens = [self.text(entry.token_id) for entry in shown]
        offsets = [offset + sum(map(len, tokens[:i])) for i in range(len(tokens))]
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.logprob) for entry in shown],
            "top_logprobs": [
                {self.text(token): _finite(value) for token, value in entry.top} for entry in shown
            ],
            "text_offset": offsets,
        }


def _finite(logprob: float) -> float:
    """Returns a log-probability as OpenAI writes it, where -9999 stands for "never"."""
    return max(logprob, -9999.0)


def finish_reason(result: GenerationResult) -> str:
    """Returns OpenAI's word for how an answer ended."""
    return "length" if result.finish_reason == "length" else "stop"


class Heading:
    """Writes what all objects of one reply have in common; `whole` is the kind of its object, and
    `part` that of a stream's chunks."""

    def __init__(self, prefix: str, whole: str, part: str, model: str) -> None:
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._whole, self._part, self._model = whole, part, model

    def reply(self, choices: list[Object], usage: Object) -> Object:
        """Returns a whole reply."""
        return {**self._head(self._whole), "choices": choices, "usage": usage}

    def chunk(self, *choices: Object, **more: Any) -> Object:
        """Returns one chunk of a stream."""
        return {**self._head(self._part), "choices": list(choices), **more}

    def _head(self, kind: str) -> Object:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}
