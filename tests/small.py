"""Makes a bundle of a few bytes and an engine on the toy target, for tests without real graphs."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toy_backend import ByteTokenizer, ToyTarget

from spec_runtime.batch.batch import Batch
from spec_runtime.bundle import manifest as bundle
from spec_runtime.bundle.manifest import (
    Dims,
    DrafterInfo,
    Graph,
    Manifest,
    TargetInfo,
    TensorSpec,
    TokenizerInfo,
)
from spec_runtime.dialogue.chat_template import ChatTemplate
from spec_runtime.engine import Engine
from spec_runtime.load import DEFAULT_BUDGET
from spec_runtime.loop.kv import open_cache
from spec_runtime.loop.proposer import OpenedDrafter, PlainProposer, Proposer
from spec_runtime.loop.target import Target
from spec_runtime.proposers.merged import MergedProposer

if TYPE_CHECKING:
    import pytest  # which processes that tests start need not import

Run = Callable[..., tuple[int, str, str]]  # see conftest.run
Measure = Callable[..., tuple[int, str, str, dict[str, Any]]]  # see conftest.measure

CONTEXT = 224
# The shares of right guesses by depth and rank, and the calibration that has them.
ACCURACY = [[0.5, 0.2, 0.1], [0.4, 0.3, 0.0]]
CALIBRATION = {
    "prompts": 1,
    "positions": 9,
    "accuracy": ACCURACY,
    "reliability": [[0.1, 0.1, 9]],
    "accepted_length": {"2": 1.5},
}
# Three prompts that fit the context, the first with two turns, and one that does not.
PROMPTS: tuple[dict[str, Any], ...] = (
    {"question_id": 1, "category": "writing", "turns": ["abcabc", "bcabca"]},
    {"question_id": 3, "category": "qa", "turns": ["bcdbcdb"]},
    {"question_id": 2, "category": "math", "turns": ["ddabdda"]},
    {"question_id": 4, "category": "qa", "turns": ["a" * CONTEXT]},
)


def small_manifest() -> Manifest:
    graph = Graph(
        file="target/target.onnx",
        form="slots",
        inputs=(TensorSpec("input_ids", "int64", (1, "N")),),
        outputs=(TensorSpec("logits", "float32", ("M", 64)),),
    )
    return Manifest(
        schema_version=bundle.SCHEMA_VERSION,
        name="small",
        target=TargetInfo(
            family="llama",
            dims=Dims(64, 8, 1, 2, 1, 4),
            precision="fp32",
            max_length=32,
            scratch=128,
            rope={"type": "default", "theta": 10000.0},
            taps=(1,),
            position_convention="absolute",
            target_modified=False,
        ),
        graphs={"target": graph},
        drafters=(
            DrafterInfo(
                name="parallelspec",
                config={"num_masks": 4},
                graphs={
                    "drafter": dataclasses.replace(graph, file="drafters/parallelspec/drafter.onnx")
                },
                draft_token_ids=None,
                calibration=None,
                trees={"max_nodes": 12, "min_probability": 0.04},
                expected_accepted_length=2.0,
            ),
        ),
        tokenizer=TokenizerInfo(
            file="tokenizer.json",
            sha256="",
            vocab_size=64,
            special_ids={"bos": None, "eos": [2], "pad": None},
            chat_template=None,
        ),
        provenance={"command": "spec-export build"},
        files={},
    )


def write_small_bundle(path: Path) -> Path:
    """Writes the bundle; each file's content is its own name, which reading a manifest accepts."""
    for name in ("target/target.onnx", "drafters/parallelspec/drafter.onnx", "tokenizer.json"):
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(name.encode() * 10)
    bundle.write_manifest(path, small_manifest())
    return path


def write_byte_tokenizer(path: Path) -> int:
    """Writes a byte-level tokenizer without merges, BOS and EOS after the 256 bytes; returns the
    size of its vocabulary."""
    import tokenizers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.enable_truncation(5)  # some are shipped so; it must not cut prompts
    tokenizer.save(str(path))
    return int(tokenizer.get_vocab_size())


def byte_tokenizer(vocab_size: int) -> TokenizerInfo:
    """Returns a manifest's entry of that tokenizer, beside a chat template."""
    special_ids = {"bos": 256, "eos": [257], "pad": None}
    return TokenizerInfo("tokenizer.json", "", vocab_size, special_ids, "chat_template.jinja")


def write_prompts(path: Path, *rows: dict[str, Any] | str | bytes) -> Path:
    """Writes a file of prompts: these objects as JSON, and other lines as they are."""
    lines = [json.dumps(row) if isinstance(row, dict) else row for row in rows]
    whole = [line.encode() if isinstance(line, str) else line for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in whole))
    return path


class ToyOpener:
    """Opens plain decoding or prompt lookup, as load.DrafterOpener does for a bundle."""

    names = ("prompt_lookup", "none")

    def open(self, name: str | None, lookup: bool | None) -> OpenedDrafter:
        proposer: Proposer = PlainProposer() if name == "none" else MergedProposer(PlainProposer())
        return OpenedDrafter(name or "prompt_lookup", proposer, DEFAULT_BUDGET)

    def open_lane(self, engine: Engine) -> Engine:
        return toy_engine(engine.drafter, engine)

    def lane_bytes(self, drafter: str) -> int:
        return 0

    def free_bytes(self) -> int:
        return 0

    def open_passes(self) -> None:
        """Returns None: each lane runs by itself."""

    def open_batch(self, engine: Engine, parallel: int) -> Batch:
        return Batch(engine, parallel)


def target_of(backend: ToyTarget, max_length: int, **options: Any) -> Target:
    """Returns a target whose graph is a toy, with a cache of its own."""
    cache, vocab_size = open_cache(backend.form, backend.capacity), backend.vocab_size
    return Target(backend, cache, vocab_size=vocab_size, max_length=max_length, **options)


def toy_engine(drafter: str | None = None, beside: Engine | None = None) -> Engine:
    """Returns an engine whose text is four letters in loops, which prompt lookup guesses well; a
    lane `beside` another, if one is given."""
    backend = ToyTarget(vocab_size=ByteTokenizer.vocab_size, capacity=256, noise=0.5)
    backend.table_VV = backend.table_VV % 4 + ord("a")
    target, opener = target_of(backend, CONTEXT), ToyOpener()
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>")
    opened = opener.open(drafter, None)
    return Engine(target, ByteTokenizer(template), opened, opener, beside=beside)


def known(value: Any) -> Any:
    """Returns what has to be there."""
    assert value is not None
    return value


def raising(error: BaseException) -> Callable[..., Any]:
    """Returns a function that raises `error`, whatever it is called with."""

    def stand_in(*arguments: object, **options: object) -> None:
        raise error

    return stand_in


def without_home(monkeypatch: "pytest.MonkeyPatch") -> None:
    """Takes this process's home, as for a user without an entry in the table of users."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
