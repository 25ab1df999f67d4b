"""A FastAPI app of one's own: one address that streams an answer as plain text.

pip install fastapi uvicorn
python examples/fastapi_app.py bundles/smollm2-135m-instruct
curl -N localhost:8001/ask --json '{"question": "Why is the sky blue?"}'

For OpenAI's API there is `spec-runtime serve`; this is for apps that have an API already.
"""

import argparse
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

import spec_runtime


class Question(BaseModel):
    question: str = Field(min_length=1, max_length=2000)
    max_new_tokens: int = Field(default=128, ge=1, le=512)


def make_app(engine: spec_runtime.Engine) -> FastAPI:
    """Returns the app, which closes the engine when it stops."""
    shared = spec_runtime.AsyncEngine(engine, max_waiting=8)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        yield
        await shared.close()

    app = FastAPI(lifespan=lifespan)

    @app.post("/ask")
    async def ask(body: Question) -> StreamingResponse:
        chunks = shared.stream(body.question, max_new_tokens=body.max_new_tokens, timeout=60.0)
        try:
            first = await anext(chunks)  # a refusal comes here, while a status can be sent
        except spec_runtime.QueueFull as error:
            headers = {"Retry-After": str(error.seconds)}
            raise HTTPException(429, str(error), headers=headers) from None
        except spec_runtime.UserError as error:  # as a question longer than the context
            raise HTTPException(400, str(error)) from None

        async def texts() -> AsyncIterator[str]:
            # A client that goes away cancels this, which ends the generation within one step.
            async with aclosing(chunks):
                yield first.text
                async for chunk in chunks:
                    yield chunk.text

        return StreamingResponse(texts(), media_type="text/plain; charset=utf-8")

    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle")
    parser.add_argument("--port", type=int, default=8001)
    arguments = parser.parse_args()
    uvicorn.run(make_app(spec_runtime.load(arguments.bundle)), port=arguments.port)


if __name__ == "__main__":
    main()
