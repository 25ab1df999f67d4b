"""Counts texts that a GGUF file's tokenizer encodes otherwise than a reference, by the name of its
pre-tokenizer: python -m tools.measure.pretokenizers [NAME=path/to/tokenizer.json …]

The texts are rows that the demo was trained with and paragraphs of docs/. The reference of a name
that is given a model's tokenizer.json is that file. Of any other it is the plain Python that
`spec-export check` has too, over tokens that were trained without cuts, which tell them apart.
"""

from __future__ import annotations

import json
import lzma
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from spec_export.imports.gguf import pretokenizers
from spec_export.imports.gguf import tokenizer as gguf_tokenizer
from spec_export.imports.gguf import vocabulary as gguf_vocabulary
from spec_export.model import target
from tools.figures import run

COUNT, LENGTH, FILES = 2000, 600, Path("recipes/smollm2-135m/answers")
KINDS = {None: 1, True: 3, False: 4}  # GGUF's kinds of tokens by "special"


def read_texts(tokenizer: Any) -> list[str]:
    """Returns the beginnings of COUNT texts, as many of each file of rows as of docs/."""
    sources = ["".join(page.read_text() for page in Path("docs").rglob("*.md")).split("\n\n")]
    for path in sorted(FILES.glob("*.jsonl.xz")):
        with lzma.open(path, "rt") as file:
            rows = [json.loads(line) for line in islice(file, COUNT)]
        turns = [row.get("turns", [row])[-1] for row in rows]
        sources.append([tokenizer.decode(turn["prompt"] + turn["response"]) for turn in turns])
    share = COUNT // len(sources)
    return [text[:LENGTH] for each in sources for text in each[:: len(each) // share][:share]]


def trained(texts: list[str]) -> Any:
    """Returns the state of a byte-level tokenizer that cuts nowhere."""
    made, whole = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(False, use_regex=False)
    made.pre_tokenizer, letters = whole, whole.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, show_progress=False, initial_alphabet=letters)
    made.train_from_iterator([text[i : i + 60] for text in texts[::4] for i in (0, 200)], trainer)
    return json.loads(made.to_str())


def vocabulary(state: Any, pre: pretokenizers.PreTokenizer, like: Any) -> Any:
    """Returns what a GGUF file would hold of the state of a tokenizer.json."""
    model, added = state["model"], {each["content"]: each for each in state["added_tokens"]}
    ids = model["vocab"] | {text: each["id"] for text, each in added.items()}
    tokens = [f"[unused {i}]" for i in range(1 + max(ids.values()))]
    for text, i in ids.items():
        tokens[i] = text
    kinds = [KINDS[added.get(token, {}).get("special")] for token in tokens]
    pairs = [each.split(" ") if isinstance(each, str) else each for each in model["merges"]]
    return replace(like, tokens=tokens, kinds=kinds, merges=list(map(tuple, pairs)), pre=pre)


def ids(encoder: Any, text: str) -> Any:
    found = encoder.encode(text, add_special_tokens=False)
    return getattr(found, "ids", found)


def main() -> None:
    own = {name: file for name, _, file in (each.partition("=") for each in sys.argv[1:])}
    for name in own:
        pretokenizers.find(name)
    demo = target.resolve(None)
    like = gguf_vocabulary.read(demo.path / str(demo.gguf_file))
    texts = read_texts(target.load_tokenizer(demo))
    uncut, wrong, plain = trained(texts), dict[Any, int](), gguf_vocabulary.ReferenceEncoder
    for name, pre in pretokenizers.KNOWN.items():
        file = own.get(name)
        if (pre, file) not in wrong:  # many names stand for one way of cutting
            given = vocabulary(json.loads(Path(file).read_text()) if file else uncut, pre, like)
            reference = Tokenizer.from_file(file) if file else plain(given)
            made = gguf_tokenizer.build(given)
            wrong[pre, file] = sum(ids(made, text) != ids(reference, text) for text in texts)
        print(f"{name}: {wrong[pre, file]} of {len(texts)} ({file or 'plain Python'})", flush=True)


if __name__ == "__main__":
    run(main)
