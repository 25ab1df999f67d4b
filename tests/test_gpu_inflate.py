"""Checks that an inflated Llama and its ParallelSpec compute what the small ones compute."""

from pathlib import Path

import pytest
import torch
from workshop import FluentWorkshop

import spec_runtime
from spec_export.build import make_bundle
from spec_export.build.make_bundle import BuildOptions
from spec_export.model import target
from tools.gpu import inflate
from tools.gpu.job import Shape
from tools.measure.compare import generated

LARGE = Shape("larger", 130, 192, 200, 4, 12, 3, 64)
PROMPTS = ("say abc, 1", "say xyz2", "one two. one two. one")


@pytest.mark.slow
def test_the_larger_llama_has_the_small_ones_logits_tokens_and_accepted_lengths(
    fluent: FluentWorkshop, tmp_path: Path
) -> None:
    model, tokenizer = target.load(target.resolve(str(fluent.llama())))
    texts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    own = [generated(model, text, 24) for text in texts]
    before = [inflate.logits(model, a + b) for a, b in zip(texts, own, strict=True)]
    lowest = inflate.least(before)
    large = inflate.inflate(model, tokenizer, LARGE, lowest, tmp_path / "llama", torch.float32)
    drafter = inflate.inflate_drafter(
        fluent.drafter("parallelspec"), model.config, LARGE, tmp_path / "drafter"
    )
    grown, _ = target.load(target.resolve(str(large)))
    assert grown.config.num_hidden_layers == LARGE.num_layers
    for small_V, text, more in zip(before, texts, own, strict=True):
        large_V = inflate.logits(grown, text + more)
        assert (small_V - large_V[:, :98]).abs().max() < 1e-4
        assert torch.equal(large_V[:, 98:], large_V[:, [lowest]].expand(-1, 32))
    options = BuildOptions(
        str(large),
        drafter_checkpoints=[drafter],
        drafter_precision="fp32",
        out=tmp_path / "bundle",
        lanes=1,
    )
    folders = fluent.bundle("parallelspec"), make_bundle.build(options)
    engines = [spec_runtime.load(folder, profile=False) for folder in folders]
    accepted = []
    for text, expected in zip(texts, own, strict=True):
        both = [engine.generate(text, max_new_tokens=24) for engine in engines]
        assert [result.token_ids for result in both] == [expected] * 2
        accepted.append([result.stats.accepted_length for result in both])
    assert all(one == other for one, other in accepted)
    assert max(one for one, _ in accepted) > 1.5
