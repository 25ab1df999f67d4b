"""Talks to `spec-runtime serve` by LangChain's client for OpenAI.

pip install langchain-openai
spec-runtime serve --bundle bundles/smollm2-135m-instruct     # in another terminal
python examples/langchain_chat.py http://127.0.0.1:8000/v1 smollm2-135m-instruct
"""

import argparse

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

QUESTIONS = ("Name three colours.", "Which of them is the sea's?")


def chat(model: ChatOpenAI, questions: tuple[str, ...]) -> list[BaseMessage]:
    """Asks the questions of one conversation, and returns it; prints the answers as they come."""
    messages: list[BaseMessage] = [SystemMessage("Answer in one sentence.")]
    for question in questions:
        messages.append(HumanMessage(question))
        answer = ""
        for chunk in model.stream(messages):
            answer += chunk.text
            print(chunk.text, end="", flush=True)
        print()
        messages.append(AIMessage(answer))
    return messages


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model", help="its id, which the server lists under /v1/models")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    model = ChatOpenAI(
        base_url=arguments.url,
        api_key=SecretStr("none"),  # the server asks for one only if it was started with one
        model=arguments.model,
        max_completion_tokens=arguments.max_tokens,
        temperature=0.0,
    )
    chat(model, QUESTIONS)


if __name__ == "__main__":
    main()
