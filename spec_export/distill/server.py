"""Asks an OpenAI-compatible server for the target's answers, many at a time.

vLLM, SGLang and `spec-runtime serve` are such servers. They bring their own batching, and the
parallelism over several GPUs and machines.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from spec_export.distill.engines import GenerationParams, OnTokens, unheard, until_end
from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief

PATIENCE = 3600.0  # seconds for one answer, which may wait in the server's queue
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # seconds before a request is tried again
# A busy server, and a proxy whose server is being started again.
TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504)


class ServerEngine:
    """The target behind `/v1/completions`, which gets prompts as token ids.

    vLLM returns the answers' token ids too. Of other servers the texts are encoded again, with the
    end token where the server says that the answer stopped. Where OPENAI_API_KEY is set it is sent.
    """

    name = "server"

    def __init__(self, url: str, tokenizer: Any, batch_size: int) -> None:
        """`url` ends with or without `/v1`. Raises UserError if no server answers there."""
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._tokenizer, self._batch_size = tokenizer, batch_size
        try:
            self.model = str(self._ask("models")["data"][0]["id"])
        except (LookupError, TypeError) as error:
            text = f"{self._base}/models names no model: got {error!r:.60}, expected a list"
            raise UserError(text, param="server") from error

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: GenerationParams,
        on_tokens: OnTokens = unheard,
    ) -> list[list[int]]:
        """Returns the new tokens of each prompt; as many requests run as a batch has rows.

        Raises UserError if the server refuses a request, or fails it again and again.
        """
        answers: dict[int, list[int]] = {}
        with ThreadPoolExecutor(self._batch_size) as pool:
            asked = {
                pool.submit(self._answer, list(prompt), params, row): row
                for row, prompt in enumerate(prompts)
            }
            try:
                for each in as_completed(asked):
                    answers[asked[each]] = each.result()
                    on_tokens(len(answers), sum(map(len, answers.values())))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [answers[row] for row in range(len(prompts))]

    def _answer(self, prompt: list[int], params: GenerationParams, row: int) -> list[int]:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature_of(row),
            "top_p": 1.0,  # the server's defaults must not change the distribution
            "top_k": params.top_k or -1,
            "seed": params.seed + row,
            "stop_token_ids": list(params.end_ids),
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        reply = self._ask("completions", body)
        try:
            choice = reply["choices"][0]
            ids, text = choice.get("token_ids"), choice["text"]
            if ids is None:
                ids = self._tokenizer.encode(text, add_special_tokens=False)
                if choice["finish_reason"] == "stop" and not set(ids) & set(params.end_ids):
                    ids.append(params.end_ids[0])
        except (LookupError, TypeError, AttributeError) as error:
            text = f"{self._base}/completions: got {reply!r:.80}, expected an answer's text"
            raise UserError(text, param="server") from error
        return until_end(ids, params.end_ids)[: params.max_new_tokens]

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Returns the reply, asked for again after each of `PAUSES` while the server is down."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._base}/{path}", data, headers)
        for pause in (*PAUSES, None):
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                said = f"{error.code} {brief(error.read().decode(errors='replace'))}"
                if error.code not in TRANSIENT:
                    pause = None
            # a connection that ends, and half an answer
            except (OSError, http.client.HTTPException, ValueError) as error:
                said = brief(error)
            if pause is None:
                break
            time.sleep(pause)
        raise UserError(f"{request.full_url}: {said}, expected an answer", param="server")
