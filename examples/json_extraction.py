"""Extracts fields from texts as JSON: no answer can be anything but an object of this schema.

pip install '.[cpu,grammar]'  # in a checkout
python examples/json_extraction.py bundles/smollm2-135m-instruct "Ann Lee, 42, lives in Oslo."
"""

import argparse
import json
from typing import TypedDict

import spec_runtime

# Bounds keep a small model from writing a string until its tokens run out.
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string", "maxLength": 40},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


class Person(TypedDict):
    name: str
    age: int
    city: str


def extract(engine: spec_runtime.Engine, text: str) -> Person:
    """Returns the person that a text speaks of. Raises ValueError if the answer was cut short."""
    params = spec_runtime.SamplingParams(max_new_tokens=256, response_format=FORMAT)
    result = engine.generate(f"Who is this? Answer in JSON.\n\n{text}", params=params)
    if result.finish_reason != "stop":
        raise ValueError(f"got an answer cut short by {result.finish_reason}: {result.text!r}")
    person: Person = json.loads(result.text)
    return person


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle")
    parser.add_argument("texts", nargs="+")
    arguments = parser.parse_args()
    with spec_runtime.load(arguments.bundle) as engine:
        for text in arguments.texts:
            print(json.dumps(extract(engine, text)))


if __name__ == "__main__":
    main()
