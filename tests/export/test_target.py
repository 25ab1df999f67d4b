"""Tests what the target module says of, and reads from, the files of foreign models."""

import contextlib
import io
import json
import pickle
import re
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_backbone import (
    LINEAR,
    LLAMA3,
    ORIGINAL,
    YARN,
    YARN_FACTOR,
    Decoder,
    backbone_of,
    chain,
    llama3_factors,
    longrope,
)
from tiny_backbone import reference as reference_logits
from tiny_gguf import write_gguf
from tiny_target import Touch, save_llama
from torch import Tensor
from transformers import AutoTokenizer
from workshop import Workshop

from spec_export import reference
from spec_export.build import make_bundle
from spec_export.build.make_bundle import BuildOptions
from spec_export.check import check
from spec_export.model import target
from spec_export.model.decoder import Backbone
from spec_export.model.deferred import real
from spec_runtime.dialogue.chat_template import ChatTemplate


@pytest.fixture
def folder(workshop: Workshop, tmp_path: Path) -> Path:
    """Returns a copy of a tiny target's folder, which a test may spoil."""
    return shutil.copytree(workshop.llama(), tmp_path / "model")


def change(path: Path, **values: Any) -> None:
    """Replaces values of an object in a file of JSON."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def load(path: Path) -> Any:
    """Returns the model of a folder or file."""
    return target.load(target.resolve(str(path)))[0]


def fingerprint(path: Path) -> str:
    return target.fingerprint(target.resolve(str(path)))


def refusal(act: Callable[[], object]) -> str:
    """Returns the one line with which `act` is refused."""
    with pytest.raises(ValueError, match=r"\w") as error:
        act()
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


# ---- fingerprints ----


def test_a_fingerprint_is_of_contents_not_of_names(folder: Path) -> None:
    first = fingerprint(folder)
    copy = shutil.copytree(folder, folder.parent / "another-name")
    assert fingerprint(copy) == first
    (copy / "tokenizer_config.json").write_text("{}")
    assert fingerprint(copy) == first

    edit_weights(copy, lambda weights: weights["lm_head.weight"].view(-1)[-1].add_(1e-3))
    changed = fingerprint(copy)
    assert changed != first
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("}", " }", 1))
    assert fingerprint(folder) not in (first, changed)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"expected model\.safetensors or pytorch_model\.bin, or"):
        fingerprint(folder)


def test_a_gguf_file_has_a_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(2_000_000))
    (tmp_path / "b.gguf").write_bytes(b"GGUF" + bytes(1_999_999) + b"\1")
    one = fingerprint(tmp_path / "a.gguf")
    assert fingerprint(tmp_path / "b.gguf") != one
    assert fingerprint((tmp_path / "a.gguf").rename(tmp_path / "c.gguf")) == one


# ---- a model's code ----


def test_code_in_a_model_folder_is_never_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard input answers yes to whatever is asked."""
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n" * 100))
    written = tmp_path / "written"
    (folder / "own.py").write_text(
        f"open({str(written)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    change(folder / "config.json", model_type="own", auto_map=own)
    change(
        folder / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]},
    )
    source = target.resolve(str(folder))
    for load in (target.load, target.load_tokenizer):
        assert "needs code of its own" in refusal(partial(load, source))
    change(folder / "config.json", model_type="llama")
    with contextlib.suppress(ValueError):
        target.load(source)
    assert not written.exists()


# ---- weights ----


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Changes the tensors of a model's folder."""
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def rename_up(weights: dict[str, Tensor]) -> None:
    layer = "model.layers.1.mlp."
    weights[f"{layer}upper.weight"] = weights.pop(f"{layer}up_proj.weight")


def make_nan(weights: dict[str, Tensor]) -> None:
    for tensor in weights.values():
        tensor.fill_(float("nan"))


def make_inf(weights: dict[str, Tensor]) -> None:
    weights["lm_head.weight"][3, 3] = float("inf")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"num_hidden_layers": 3},
            "the config asks for 9 tensors missing in the weights: "
            "model.layers.2.input_layernorm.weight, .* and 6 more",
        ),
        (
            {"num_hidden_layers": 1},
            "the weights hold 9 tensors unknown to the config: model.layers.1.input_layernorm",
        ),
        (
            {"vocab_size": 99},
            r"of another shape than the config's: lm_head.weight \[98, 64\] instead of \[99, 64\]",
        ),
    ],
)
def test_every_tensor_of_the_config_is_accounted_for(
    folder: Path, config: dict[str, int], message: str
) -> None:
    change(folder / "config.json", **config)
    assert re.search(message, refusal(lambda: load(folder)))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "missing in the weights: model.norm.w"),
        (rename_up, "1 tensor missing in the weights: model.layers.1.mlp.up_proj"),
        (
            lambda weights: weights.update({"model.layers.0.mlp.extra.weight": torch.ones(2)}),
            "1 tensor unknown to the config: model.layers.0.mlp.extra.weight",
        ),
        (
            lambda weights: weights.update({"a" * 70_000: torch.ones(2)}),
            "a tensor of a name of 70000 characters, expected at most 200 that can be printed",
        ),
        (make_nan, "21 tensors with NaN or infinity: lm_head.weight, "),
        (make_inf, "1 tensor with NaN or infinity: lm_head.weight"),
    ],
)
def test_every_tensor_of_the_weights_is_accounted_for(
    folder: Path, edit: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    edit_weights(folder, edit)
    assert message in refusal(lambda: load(folder))


def test_tied_heads_and_old_buffers_are_no_fault(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "tied", tie_word_embeddings=True)
    old = {"rotary_emb.inv_freq": torch.ones(4), "masked_bias": torch.ones(1)}
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    named = {f"model.layers.0.self_attn.{name}": tensor for name, tensor in old.items()}
    edit_weights(folder, lambda weights: weights.update(named))
    model = load(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("edit", "is_tied"),
    [
        (lambda weights, table: weights.update({"lm_head.weight": table.clone()}), True),
        (lambda weights, table: weights.update({"lm_head.weight": table + 1}), False),
        (lambda weights, table: rename_table(weights), True),
    ],
)
def test_a_tied_table_may_be_stored_twice_or_as_the_head(
    edit: Callable[[dict[str, Tensor], Tensor], object], is_tied: bool, tmp_path: Path
) -> None:
    folder = save_llama(tmp_path / "tied", tie_word_embeddings=True)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit_weights(folder, lambda weights: edit(weights, table))
    model, weights, _ = target.open_weights(target.resolve(str(folder)))
    deferred = Backbone.deferred(model.config, weights)
    assert (deferred.head is deferred.embedding) == is_tied
    for backbone in (deferred, Backbone.from_transformers(load(folder))):
        assert torch.equal(real(backbone.embedding.weight), table)
        assert torch.equal(real(backbone.head.weight), table + (not is_tied))


def rename_table(weights: dict[str, Tensor]) -> None:
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")


def test_pickled_weights_are_read_but_nothing_in_them_is_run(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    model = load(folder)
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"])

    for save in (torch.save, lambda code, path: path.write_bytes(pickle.dumps(code))):
        code = weights | {"lm_head.weight": Touch(tmp_path / "written")}
        save(code, folder / "pytorch_model.bin")
        found = refusal(lambda: load(folder))
        assert "convert it to safetensors" in found
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 100, b"\xff" * 100, b"{}", pickle.dumps({"a": 1}), None]
)
def test_damaged_safetensors_are_one_line(folder: Path, content: bytes | None) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    found = refusal(lambda: load(folder))
    assert re.search(r"could not load .*/model|files hold .* bytes", found), found


MAPS: list[Any] = [5, {}, [], None, "x", {"a": 1}, {"a": ["model.safetensors"]}, {"a": "x\0"}]
MAPS += [{"a": "../six/model.safetensors"}, {"a": "/etc/passwd"}, {"a": "y" * 5000}]


@pytest.mark.parametrize(
    "index",
    ["[" * 100_000, "[]", *(json.dumps({"weight_map": each}) for each in MAPS)],
    ids=lambda text: text[:40],
)
def test_damaged_indices_are_one_line(folder: Path, index: str) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    said = refusal(lambda: load(folder))
    assert "could not load" in said or "model.safetensors.index.json: " in said


# ---- stray files ----

INDEX = "model.safetensors.index.json"


def split(folder: Path, is_pickled: bool = False) -> dict[str, Tensor]:
    """Writes a folder's weights as two files with an index; returns them."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem, end = ("pytorch_model", "bin") if is_pickled else ("model", "safetensors")
    names = [f"{stem}-0000{i}-of-00002.{end}" for i in (1, 2)]
    where = {name: names[i % 2] for i, name in enumerate(sorted(weights))}
    for file in names:
        part = {name: tensor for name, tensor in weights.items() if where[name] == file}
        (torch.save if is_pickled else save_file)(part, folder / file)
    index = json.dumps({"metadata": {}, "weight_map": where})
    (folder / f"{stem}.{end}.index.json").write_text(index)
    return weights


def add_stray(folder: Path, name: str, weights: dict[str, Tensor]) -> None:
    """Writes the weights of another model, and one that this model does not have."""
    other = {key: tensor + 1 for key, tensor in weights.items()} | {"mtp.fc.weight": torch.ones(2)}
    (torch.save if name.endswith(".bin") else save_file)(other, folder / name)


@pytest.mark.parametrize("form", ["whole", "shards", "pickled", "pickled shards"])
def test_stray_files_beside_the_weights_are_not_read(folder: Path, form: str) -> None:
    weights = load_file(folder / "model.safetensors")
    strays = ["model_old.safetensors", "model-mtp.safetensors", "pytorch_model_old.bin"]
    if "shards" in form:
        split(folder, is_pickled=form == "pickled shards")
    elif form == "pickled":
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin")
    if "pickled" not in form:  # transformers takes these only where there are no others
        strays += ["pytorch_model.bin"]
    alone = fingerprint(folder)
    for stray in strays:
        add_stray(folder, stray, weights)
    found = load(folder).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    assert fingerprint(folder) == alone


@pytest.mark.parametrize("end", ["safetensors", "bin"])
def test_a_tensor_in_two_files_is_refused_with_both(folder: Path, end: str) -> None:
    split(folder, is_pickled=end == "bin")
    first, second = sorted(folder.glob(f"*-of-00002.{end}"))
    shutil.copy(first, second)
    said = refusal(lambda: load(folder))
    assert f" in {first} and in {second}, expected it in one of them" in said


def test_a_whole_file_beside_an_old_index_is_read(folder: Path) -> None:
    """As transformers does, which looks at the index only where there is no whole file."""
    weights = split(folder)
    save_file({name: tensor + 1 for name, tensor in weights.items()}, folder / "model.safetensors")
    assert torch.equal(load(folder).lm_head.weight, weights["lm_head.weight"] + 1)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert torch.equal(load(folder).lm_head.weight, weights["lm_head.weight"] + 1)


def test_an_index_may_name_its_files_as_it_likes(folder: Path) -> None:
    weights = split(folder)
    for i in (1, 2):
        (folder / f"model-0000{i}-of-00002.safetensors").rename(folder / f"part{i}.safetensors")
    index = (folder / INDEX).read_text()
    (folder / INDEX).write_text(re.sub(r"model-0000(\d)-of-00002", r"part\1", index))
    assert torch.equal(load(folder).lm_head.weight, weights["lm_head.weight"])


@pytest.mark.parametrize("file", ["model-00001-of-00001.safetensors", "pytorch_model-00001.bin"])
def test_a_part_without_an_index_is_named(folder: Path, file: str) -> None:
    (folder / "model.safetensors").rename(folder / file)
    assert f"with {file} (a part that no index names: download" in refusal(lambda: load(folder))


@pytest.mark.parametrize("is_sharded", [True, False])
def test_only_the_weights_themselves_are_downloaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_sharded: bool
) -> None:
    weights = split(folder) if is_sharded else load_file(folder / "model.safetensors")
    add_stray(folder, "model_old.safetensors", weights)
    cache = tmp_path / "cache"

    def download(model: str, allow_patterns: list[str]) -> str:
        """Stands for the hub's client."""
        assert model == "org/name"
        for path in folder.iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                cache.mkdir(exist_ok=True)
                shutil.copy(path, cache)
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    found = target.local_folder(target.resolve("org/name"))
    assert {path.name for path in found.glob("*.safetensors")} == (
        {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
        if is_sharded
        else {"model.safetensors"}
    )
    assert torch.equal(load(found).lm_head.weight, weights["lm_head.weight"])


# ---- configs and tokenizers ----


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"a":' * 100_000, "[]", "5", "", "\xff", "{", '{"a": "\\ud800"}']
)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_damaged_json_is_one_line(folder: Path, name: str, content: str) -> None:
    (folder / name).write_bytes(content.encode("latin1"))
    found = refusal(lambda: load(folder))
    assert name in found or name == "tokenizer.json"


@pytest.mark.parametrize(
    "change_to",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},  # a panic
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["z z"]}},
        {"model": 5},
        {"added_tokens": 5},
    ],
)
def test_damaged_tokenizers_are_one_line(folder: Path, change_to: dict[str, Any]) -> None:
    change(folder / "tokenizer.json", **change_to)
    found = refusal(lambda: target.load_tokenizer(target.resolve(str(folder))))
    assert "could not load the tokenizer of" in found


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("config.json", {"hidden_act": "gelu_fast"}, "got activation 'gelu_fast', expected one"),
        ("config.json", {"logit_scale": 0.5}, "got logit_scale 0.5 in a 'llama' model, expected 1"),
        ("config.json", {"residual_multiplier": 0.2}, "got residual_multiplier 0.2 in a 'llama'"),
        ("config.json", {"attention_multiplier": 0.5}, "got attention_multiplier 0.5 in a 'llama'"),
        ("config.json", {"query_pre_attn_scalar": 224}, "got query_pre_attn_scalar 224 in a 'llam"),
        ("config.json", {"attn_logit_softcapping": 50.0}, "got attn_logit_softcapping 50.0 in a"),
        ("config.json", {"num_local_experts": 8}, "got num_local_experts 8 in a 'llama' model"),
        ("config.json", {"use_qk_norm": True}, "got use_qk_norm True in a 'llama' model, expected"),
        (
            "config.json",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "short_mscale": 1.2}},
            "got rotary parameter 'short_mscale' in the config, which is not supported",
        ),
        ("config.json", {"model_type": "gpt2"}, "a model of type 'gpt2', which is not supported"),
        ("config.json", {"layer_types": ["mamba"] * 2}, "layers have a recurrent state) in a 'll"),
        (
            "config.json",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "alpha": 2.0}},
            "got rotary parameter 'alpha' in the config, which is not supported",
        ),
        (
            "config.json",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5 in a 'llama' model",
        ),
        ("adapter_config.json", {}, "got an adapter of type None, expected LORA"),
    ],
)
def test_an_unsupported_model_is_refused_before_its_weights_are_read(
    folder: Path, file: str, values: dict[str, str], message: str
) -> None:
    (folder / "model.safetensors").write_bytes(b"never read")
    path = folder / file
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | values))
    assert message in refusal(lambda: load(folder))


# ---- GGUF ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rename": {"blk.1.ffn_up": "blk.1.ffn_upper"}}, "model.layers.1.mlp.up_proj.weight"),
        ({"fill": {"output_norm": float("nan")}}, "1 tensor with NaN or infinity: model.n"),
        ({"extra": {"rope_freq": (16,)}}, "1 tensor unknown to the config: rope_freq.weight"),
    ],
)
def test_tensors_of_a_gguf_file_are_accounted_for(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    write_gguf(tmp_path / "model.gguf", **options)
    assert message in refusal(lambda: load(tmp_path / "model.gguf"))


LONG_KEYS = {"rope.scaling.original_context_length": ORIGINAL, "rope.scaling.attn_factor": 1.25}


def long_tensors(width: int) -> dict[str, Any]:
    """Returns the tensors of `longrope`'s factors."""
    names = {"short_factor": "rope_factors_short", "long_factor": "rope_factors_long"}
    factors = longrope(width)
    return {
        "extra": dict.fromkeys(names.values(), (width,)),
        "fill": {name: np.array(factors[key]) for key, name in names.items()},
    }


@pytest.mark.parametrize(
    ("options", "values", "rope"),
    [
        ({}, {}, {"rope_theta": 500.0}),
        ({}, {"type": "none", "factor": 3.0}, {"rope_theta": 500.0}),
        ({}, {"type": "linear", "factor": 3.0}, LINEAR),
        ({}, {"factor": 3.0}, LINEAR),  # the type that llama.cpp takes without the key
        ({}, {"rope.scale_linear": 3.0}, LINEAR),
        ({}, {"type": "yarn", "factor": 4.0, "original_context_length": ORIGINAL}, YARN),
        (
            {},
            {"type": "yarn", "factor": 4.0, "original_context_length": ORIGINAL}
            | {"attn_factor": 0.7, "yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0},
            YARN_FACTOR | {"attention_factor": 0.7 * (1 + 0.1 * np.log(4.0))},
        ),
        ({"extra": {"rope_freqs": (16,)}, "fill": {"rope_freqs": llama3_factors()}}, {}, LLAMA3),
        (long_tensors(16), {"type": "longrope"} | LONG_KEYS, longrope(16, attention_factor=1.25)),
        (
            long_tensors(16) | {"architecture": "phi3"},
            LONG_KEYS,
            longrope(16, attention_factor=1.25),
        ),
        (
            long_tensors(8) | {"architecture": "phi3"},
            LONG_KEYS | {"rope.dimension_count": 16},
            longrope(8, attention_factor=1.25, partial_rotary_factor=0.5),
        ),
        (
            {"architecture": "phi3"},
            {"rope.dimension_count": 16},
            {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
        ),
    ],
)
def test_a_gguf_file_rotates_as_a_folder_does(
    tmp_path: Path, options: dict[str, Any], values: dict[str, Any], rope: dict[str, Any]
) -> None:
    """The decoder's logits beyond the original context are those of transformers' own class."""
    named = {key if "." in key else f"rope.scaling.{key}": value for key, value in values.items()}
    path = tmp_path / "model.gguf"
    write_gguf(path, keys={"rope.freq_base": 500.0} | named, **options)
    model = load(path)
    config = model.config.to_dict() | {"rope_parameters": rope}
    if model.config.model_type == "phi3":
        config["original_max_position_embeddings"] = ORIGINAL
    folders = type(model)(type(model.config).from_dict(config)).eval()
    folders.load_state_dict(model.state_dict())
    text = [int(i) for i in np.random.default_rng(0).integers(260, size=3 * ORIGINAL)]
    expected = reference_logits(folders, text)
    found = Decoder(backbone_of(model)).step(text, chain(len(text)))[0]
    scale = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("logit_scale", 0.5, "got llama.logit_scale 0.5 in the GGUF file, expected 0 or 1"),
        ("residual_scale", 0.5, "expected 0 or 1"),
        ("embedding_scale", 12.0, "expected 0 or 1"),
        ("attention.scale", 0.5, "expected 0.176777"),
        ("attention.clamp_kqv", 8.0, "expected 0"),
        ("attention.causal", False, "expected True"),
        ("attention.value_length", 16, "expected 32"),
        ("attn_logit_softcapping", 50.0, "expected 0"),
        ("final_logit_softcapping", 30.0, "expected 0"),
        ("expert_used_count", 2, "expected 0"),
        ("attention.sliding_window_pattern", 2, "expected only keys that are known"),
        ("anything.new", "x", "got llama.anything.new 'x' in the GGUF file, expected only keys"),
        ("rope.scaling.type", "dynamic", "expected none, linear, yarn or longrope"),
        ("rope.scaling.type", "longrope", "expected the tensors rope_factors_long.weight and"),
        ("rope.scaling.factor", -2.0, "expected more than 0"),
        ("rope.scaling.attn_factor", 2.0, "expected 1 with type linear"),
        ("rope.scaling.yarn_ext_factor", 0.5, "expected 1 or -1"),
        ("rope.scaling.yarn_log_multiplier", 0.1, "expected 0"),
        ("rope.dimension_count", 16, "got partial_rotary_factor 0.5 in a 'llama' model"),
        ("context_length", None, "got llama.context_length 'no such key'"),
        ("block_count", "x", "got llama.block_count 'x' in the GGUF file, expected a number"),
        ("attention.head_count", 0, "expected 1 or more"),
    ],
)
def test_keys_of_a_gguf_file_are_accounted_for(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, keys={key: value})
    found = refusal(lambda: target.require_supported(target.resolve(str(path))))
    assert message in found
    assert key in found or key == "rope.dimension_count"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra": {"rope_freqs": (8,)}}, "got 8 from .* in the tensor rope_freqs.weight, expect"),
        ({"extra": {"rope_freqs": (16,)}, "fill": {"rope_freqs": 0.0}}, "got 16 from 0.0 in the t"),
        ({"extra": {"rope_factors_long": (16,)}}, "got none in the tensor rope_factors_short.weig"),
        (
            {"extra": {"rope_freqs": (16,)}, "keys": {"rope.scaling.factor": 2.0}},
            "got llama.rope.scaling.factor 2.0 .* expected 1 beside a tensor of factors",
        ),
        (
            {"architecture": "phi3", "keys": {"rope.scaling.factor": 2.0}},
            "got phi3.rope.scaling.type 'linear' .* expected none or longrope in this architecture",
        ),
    ],
)
def test_rotary_factors_of_a_gguf_file_fit_its_keys(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, **options)
    found = refusal(lambda: target.require_supported(target.resolve(str(path))))
    assert re.search(message, found)


def test_keys_that_change_nothing_are_no_fault(tmp_path: Path) -> None:
    """A sliding window is one of those that are read."""
    neutral: dict[str, Any] = {"logit_scale": 1.0, "expert_count": 0, "attention.causal": True}
    neutral |= {"attention.scale": 32**-0.5, "attention.key_length": 32}
    neutral |= {"rope.scaling.finetuned": True, "tensor_data_layout": "Meta AI original pth"}
    write_gguf(tmp_path / "model.gguf", keys=neutral | {"attention.sliding_window": 100})
    model = load(tmp_path / "model.gguf")
    assert backbone_of(model).config.windows == (100,)


def test_fields_of_other_families_that_change_nothing_are_no_fault(folder: Path) -> None:
    neutral = {"logit_scale": 1.0, "attn_logit_softcapping": None, "use_qk_norm": False}
    change(folder / "config.json", query_pre_attn_scalar=64, attention_multiplier=0.125, **neutral)
    target.require_supported(target.resolve(str(folder)))


def test_damaged_gguf_files_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    after_counts = whole[24:]
    damaged = [whole[:size] for size in (4, 20, 30, 300, 5000, len(whole) - 40)]
    damaged += [
        b"GGUF" + struct.pack("<IQQ", 3, 2**60, 1) + after_counts,
        b"GGUF" + struct.pack("<IQQ", 3, 1, 2**60) + after_counts,
        b"GGUF" + struct.pack("<IQQ", 9, 1, 1) + after_counts,
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, 2**63) + after_counts,
        # names without end
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 70_000) + bytes(70_100),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 70_000) + bytes(70_100),
        # an array of 2^60 bytes
        b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 1, 1, 1, b"a", 9, 0, 2**60) + bytes(100),
    ]
    for content in damaged:
        path.write_bytes(content)
        for load in (target.load, target.load_tokenizer):
            found = refusal(partial(load, target.resolve(str(path))))
            assert "is no whole GGUF file" in found


@pytest.mark.parametrize("template", ["{{ 1 // 0 }}", "{% for", "{{ raise_exception('a\nb') }}"])
def test_a_chat_template_that_fails_is_one_line(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = target.load_tokenizer(target.resolve(str(folder)))
    found = refusal(lambda: reference.encode(tokenizer, "hi"))
    assert "the target's chat template fails" in found


DEFAULT = "\n{%- set end = eos_token %}\n{{ messages[0].content }} {{ end }}\n  "
TOOL_USE = (
    "  {% macro named(tool) %}<{{ tool.function.name }}>{% endmacro %}\n"
    "{% for tool in tools %}\n{{ named(tool) }}\n{% endfor %}\n{{ messages[0].content }}\n"
)


@pytest.mark.parametrize("are_files", [False, True])
@pytest.mark.parametrize("others", [{"tool_use": TOOL_USE, "rag": "x"}, {"rag": "{{ 5 }}"}])
def test_where_there_are_tools_a_template_named_tool_use_is_taken(
    folder: Path, others: dict[str, str], are_files: bool
) -> None:
    """As transformers takes it, and to the letter; the named ones are in files, or in a list."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    named = {"default": DEFAULT, **others}
    if are_files:
        (folder / "chat_template.jinja").write_text(DEFAULT)
        (folder / "additional_chat_templates").mkdir()
        for name, source in others.items():
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(source)
    else:
        entries = [{"name": name, "template": source} for name, source in named.items()]
        change(folder / "tokenizer_config.json", chat_template=entries)
    expected: Any = AutoTokenizer.from_pretrained(str(folder))
    assert expected.chat_template == named
    found = target.load_tokenizer(target.resolve(str(folder)))
    if "tool_use" not in others:
        assert found.chat_template == DEFAULT
        return
    template = ChatTemplate(found.chat_template, {"eos_token": "</s>"})
    chat = [{"role": "user", "content": "hi"}]
    for tools in (None, [{"type": "function", "function": {"name": "now"}}]):
        text = template.render(chat, tools)
        assert text == expected.apply_chat_template(chat, tools=tools, tokenize=False)
        assert text == found.apply_chat_template(chat, tools=tools, tokenize=False)
        assert ("<now>" in text) == (tools is not None)


def test_a_hub_id_is_found_in_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its snapshot's folder is read like any other, without a network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    commit, kept = "0123456789abcdef" * 2 + "01234567", tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(folder, kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)
    source = target.resolve("org/tiny")
    assert target.local_folder(source) == kept / "snapshots" / commit
    assert target.fingerprint(source) == fingerprint(folder)
    target.load(source)


# ---- who loads models ----


def test_draft_models_and_reference_models_are_read_with_the_same_care(
    workshop: Workshop, folder: Path, tmp_path: Path
) -> None:
    edit_weights(folder, make_inf)
    options = BuildOptions(str(workshop.llama()), out=tmp_path / "out", draft_model=str(folder))
    assert "with NaN or infinity" in refusal(lambda: make_bundle.build(options))
    assert "with NaN or infinity" in refusal(lambda: check.run(str(folder), None, ["fp32"]))
    assert not (tmp_path / "out").exists()
