"""Runs the examples of use, whose types `mypy` checks strictly (see pyproject.toml)."""

import threading
from pathlib import Path

import pytest
from toy_backend import CHATML, ByteTokenizer
from toy_bundle import patch_graphs, write_bundle
from toy_engine import make_engine
from typed_use import answer, measure, show

from spec_runtime import Engine
from spec_runtime.dialogue.chat_template import ChatTemplate


def engine_of() -> Engine:
    return make_engine("parallelspec", tokenizer=ByteTokenizer(ChatTemplate(CHATML)))


def test_a_program_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_graphs(monkeypatch)
    write_bundle(tmp_path, ("parallelspec",))
    assert answer(str(tmp_path), "hello")
    assert answer(str(tmp_path / "missing"), "hello").startswith("not a bundle: ")


def test_a_program_shows_and_measures(capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_of()
    result = show(engine, "hello", threading.Event())
    assert len(result.token_ids) == 8
    steps, stats = measure(engine, "hello")
    assert sum(len(step.tokens) for step in steps) == 8
    assert stats.prompt_tokens == result.usage.prompt_tokens
    assert "8 257 stop" in capsys.readouterr().out
