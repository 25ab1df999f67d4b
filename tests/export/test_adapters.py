"""Tests that LoRA adapters are merged with their base as peft computes with them."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_target import save_llama
from transformers import AutoModelForCausalLM

from spec_export.imports import lora
from spec_export.model import target
from spec_runtime.errors import UserError

IDS = torch.tensor([[1, 5, 9, 2, 7]])
CASES: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "rank-stabilised": {"target_modules": "all-linear", "use_rslora": True},
    "a regular expression": {"target_modules": r".*layers\.1\..*(up|down)_proj"},
    "patterns": {
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"v_proj": 2, r"layers\.1\..*down_proj": 3},
        "alpha_pattern": {"self_attn.v_proj": 5, r"^model\.layers\.0\.mlp\.down_proj": 9},
    },
    "DoRA": {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
    "whole modules": {"target_modules": ["o_proj"], "modules_to_save": ["norm", "lm_head"]},
    "biases": {"target_modules": ["q_proj"], "bias": "all"},
    "fan_in_fan_out": {"target_modules": ["q_proj"], "fan_in_fan_out": True},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head"]},
}
TIED = {
    "tied, embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "tied, whole": CASES["whole modules"],
}


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Returns folders of a base whose head is tied, and of one whose head is not."""
    folder = tmp_path_factory.mktemp("bases")
    return {
        is_tied: save_llama(
            folder / f"tied-{is_tied}", tie_word_embeddings=is_tied, attention_bias=not is_tied
        )
        for is_tied in (True, False)
    }


def adapted(base: Path, **settings: Any) -> Any:
    """Returns peft's model of a base and an adapter with random weights."""
    warnings.simplefilter("ignore")  # of tied heads and fan_in_fan_out, which are what is tested
    model = AutoModelForCausalLM.from_pretrained(base)
    made = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, **settings))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return made.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def test_a_pattern_of_alphas_is_for_whole_names() -> None:
    config = lora.AdapterConfig("", 8.0, {"proj": 2.0}, is_rank_stabilised=False)
    assert [config.scale(f"model.{name}", 4) for name in ("proj", "q_proj")] == [0.5, 2.0]


@pytest.mark.parametrize("name", [*CASES, *TIED])
def test_an_adapter_is_merged_as_peft_computes_with_it(
    bases: dict[bool, Path], tmp_path: Path, name: str
) -> None:
    base = bases[name in TIED]
    model = adapted(base, **(CASES | TIED)[name])
    model.save_pretrained(tmp_path / "adapter")
    source = target.resolve(str(tmp_path / "adapter"))
    assert (source.name, source.path) == ("adapter", base)
    merged, _ = target.load(source)
    expected = logits(model)
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=2e-5)
    with model.disable_adapter():
        assert (logits(model) - expected).abs().max() > 1e-3
    said = target.weights_said(source)
    assert said is not None
    assert "matrices" in said


def test_tensors_are_merged_one_by_one_and_the_tokenizer_is_the_adapters(
    bases: dict[bool, Path], tmp_path: Path
) -> None:
    model = adapted(bases[False], target_modules=["q_proj"])
    model.save_pretrained(tmp_path / "adapter")
    change_config(tmp_path / "adapter", base_model_name_or_path="/nowhere/base")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bases[False] / name, tmp_path / "adapter")
    source = target.resolve(str(tmp_path / "adapter"), base=str(bases[False]))
    _, weights, _ = target.open_weights(source)
    whole, _ = target.load(source)
    for name, tensor in whole.state_dict().items():
        read = weights.get(name)
        assert read is not None
        assert torch.equal(read, tensor), name
    assert target.tokenizer_file(source) == tmp_path / "adapter" / "tokenizer.json"


def test_more_tokens_than_the_base_has_are_taken(bases: dict[bool, Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(bases[True])
    rows = model.config.vocab_size + 3
    model.resize_token_embeddings(rows, mean_resizing=False)
    made = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    made.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=True)
    merged, _ = target.load(target.resolve(str(tmp_path / "adapter")))
    assert merged.config.vocab_size == len(merged.model.embed_tokens.weight) == rows
    torch.testing.assert_close(logits(merged), logits(made.eval()), rtol=0, atol=2e-5)


def test_pickled_adapters_are_read(bases: dict[bool, Path], tmp_path: Path) -> None:
    model = adapted(bases[True], target_modules=["q_proj"])
    model.save_pretrained(tmp_path / "adapter", safe_serialization=False)
    assert (tmp_path / "adapter" / "adapter_model.bin").is_file()
    merged, _ = target.load(target.resolve(str(tmp_path / "adapter")))
    torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol=2e-5)


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensor(folder: Path, change: Callable[[dict[str, torch.Tensor], str], None]) -> None:
    """Changes the stored tensors by a function of them and the name of one up-projection."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors, next(name for name in tensors if "lora_B" in name))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no base": (
        lambda f: change_config(f, base_model_name_or_path="/nowhere/base"),
        "is an adapter of /nowhere/base: got model .* name its base model with --base",
    ),
    "none named": (lambda f: change_config(f, base_model_name_or_path=None), "--base"),
    "another kind": (lambda f: change_config(f, peft_type="IA3"), "'IA3', expected LORA"),
    "tokens": (lambda f: change_config(f, trainable_token_indices=[1]), "trainable_token_indices"),
    "pissa": (lambda f: change_config(f, init_lora_weights="pissa"), "init_lora_weights = 'pissa'"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "without weights"),
    "a half": (lambda f: change_tensor(f, lambda t, n: t.__delitem__(n)), "only a half"),
    "a shape": (
        lambda f: change_tensor(f, lambda t, n: t.update({n: t[n][:3]})),
        r"by \[3, 4\] x \[4, 32\], the base model's is \[32, 32\]",
    ),
    "a module": (
        lambda f: change_tensor(f, lambda t, n: t.update({n.replace("q_proj", "qkv"): t[n] + 1})),
        "changes 1 tensor unknown to its base model: model.layers.0.self_attn.qkv.weight",
    ),
    "one twice": (
        lambda f: change_tensor(f, lambda t, n: t.update({n.removeprefix(lora.PREFIX): t[n] + 1})),
        rf"got ({lora.PREFIX})?(\S+) and (?!\1)\S*\2, which are one tensor of the adapter",
    ),
    "not json": (lambda f: (f / "adapter_config.json").write_text("{"), "restore the file"),
}


@pytest.fixture(scope="session")
def adapter(bases: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    adapted(bases[True], target_modules=["q_proj"]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", DAMAGED)
def test_an_adapter_that_cannot_be_merged_is_one_line(
    adapter: Path, tmp_path: Path, name: str
) -> None:
    damage, said = DAMAGED[name]
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    damage(folder)
    with pytest.raises(UserError, match=said) as error:
        target.load(target.resolve(str(folder)))
    assert "\n" not in str(error.value)


def test_a_base_is_only_for_adapters(bases: dict[bool, Path]) -> None:
    with pytest.raises(UserError, match="which is no adapter"):
        target.resolve(str(bases[True]), base=str(bases[False]))


def test_an_adapters_fingerprint_is_not_its_bases(adapter: Path, bases: dict[bool, Path]) -> None:
    own, base = (target.fingerprint(target.resolve(str(each))) for each in (adapter, bases[True]))
    assert own != base
