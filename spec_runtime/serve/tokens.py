"""Turns texts into tokens and back for clients that count or cut them, in vLLM's form."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator
from starlette.requests import Request
from starlette.responses import Response

from spec_runtime.errors import UserError
from spec_runtime.serve.errors import Json
from spec_runtime.serve.openai.replies import TokenTexts
from spec_runtime.serve.openai.schemas import ChatMessage, Flag, Ids
from spec_runtime.serve.service import Service


class TokenizeRequest(BaseModel):
    """Holds the body of a request to /tokenize: a text as /v1/completions takes it, or messages as
    chats do."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: Flag | None = None  # to a text: BOS, where the tokenizer adds it
    add_generation_prompt: Literal[True] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: Flag | None = None
    return_token_strs: Flag | None = None

    @model_validator(mode="after")
    def _check_together(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise UserError("expected either 'prompt' or 'messages'")
        return self


class DetokenizeRequest(BaseModel):
    """Holds the body of a request to /detokenize."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: Ids


async def tokenize(service: Service, body: TokenizeRequest, request: Request) -> Response:
    """Answers /tokenize, also for prompts longer than the context."""
    codec = service.engine.tokenizer

    def encode() -> list[int]:
        if body.prompt is not None:
            return codec.encode(body.prompt, special_tokens=body.add_special_tokens is not False)
        is_begun = bool(body.continue_final_message)
        template_kwargs = body.chat_template_kwargs
        return service.encode_messages(body.messages or [], body.tools, is_begun, template_kwargs)

    ids = await service.in_preparation(encode, request)
    reply: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.engine.target.max_length,
        "tokens": ids,
    }
    if body.return_token_strs:
        texts = TokenTexts(codec, frozenset())
        reply["token_strs"] = [texts.text(token) or codec.spelled([token]) for token in ids]
    return Json(reply)


async def detokenize(service: Service, body: DetokenizeRequest, request: Request) -> Response:
    """Answers /detokenize: the text with the names of control tokens, as /tokenize reads it."""
    most = service.engine.target.vocab_size - 1
    if body.tokens and max(body.tokens) > most:
        message = f"got token id {max(body.tokens)}, expected 0 to {most}"
        raise UserError(message, param="tokens")
    codec = service.engine.tokenizer
    text = await service.in_preparation(lambda: codec.spelled(body.tokens), request)
    return Json({"prompt": text})


def tokenizer_info(service: Service) -> Response:
    """Answers /tokenizer_info, by the names that tokenizer_config.json has."""
    codec, target = service.engine.tokenizer, service.engine.target
    bos, eos = codec.bos, next(iter(codec.eos), None)
    names = {
        "bos_token": None if bos is None else codec.spelled([bos]),
        "eos_token": None if eos is None else codec.spelled([eos]),
    }
    if codec.template is not None:
        names |= codec.template.special_tokens
    return Json(
        {
            "model_max_length": target.max_length,
            "vocab_size": target.vocab_size,
            "bos_token_id": bos,
            "eos_token_id": eos,
            **names,
            "chat_template": None if codec.template is None else codec.template.source,
        }
    )
