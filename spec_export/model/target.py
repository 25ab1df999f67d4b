"""Finds the target (folder, hub id, GGUF file or built-in demo), loads it and lends its ends."""

import hashlib
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_export.model import annex, pretrained
from spec_export.model.decoder import FAMILIES, Attention, Backbone, GatedMLP, Layer, RMSNorm
from spec_export.model.deferred import real
from spec_export.model.ends import LayerDims, TargetEnds
from spec_export.model.files import HEADS, INDEX, WHOLE, named_by, path_of, weight_files
from spec_export.model.weights import StoredWeights
from spec_export.report import SILENT, Report
from spec_runtime.errors import UnsupportedModelError, UserError
from spec_runtime.files.mapping import brief
from spec_runtime.files.writing import sha256

DEMO_NAME = "smollm2-135m-instruct"
SAVED = (  # what transformers writes
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
)


@dataclass(frozen=True)
class Source:
    """Says where a target's weights are.

    kind: "demo", "folder", "gguf" or "hub". path: a folder, or the hub id itself. gguf_file: the
    name of a file in that folder. name: what the target is called in bundles and messages. adapter:
    the folder of an adapter that is merged with the weights, which are its base's.
    """

    kind: str
    path: Path
    gguf_file: str | None
    name: str
    adapter: Path | None = None


def resolve(model: str | None, report: Report = SILENT, base: str | None = None) -> Source:
    """Returns what `--model` names: the demo (None), an existing folder or GGUF file, or a hub id.

    A folder may hold an adapter; `base` then names its base model in place of the adapter itself.
    The demo is downloaded if it is not in the user's cache. Raises UserError if a path was clearly
    meant and is not there, or if it leads to no checkpoint.
    """
    if model is not None and (Path(model) / annex.lora.CONFIG).is_file():
        return _with_base(Path(model), base, report)
    if base is not None:
        raise UserError(
            f"got the base {base} for {model or 'the demo'}, which is no adapter: name the "
            f"adapter's folder, with {annex.lora.CONFIG} in it, as the model"
        )
    if model is None:
        from spec_export.model import demo

        file = demo.fetch(report=report)
        return Source("demo", file.parent, file.name, DEMO_NAME)
    path = path_of(model)
    if path is None:
        return Source("hub", Path(model), None, Path(model).name.lower())
    if path.is_dir():
        return Source("folder", path, None, path.resolve().name.lower())
    split = annex.gguf_header.PART.fullmatch(path.name)
    name = split["stem"] if split else path.stem
    return Source("gguf", path.parent, path.name, name.lower())


def _with_base(folder: Path, base: str | None, report: Report) -> Source:
    """Returns an adapter's folder with the base model that it or the user names.

    A relative path that the adapter names starts from the working folder, or else from its own.
    """
    named = base or annex.lora.read_config(folder).base
    if not named:
        raise UserError(f"{folder} is an adapter that names no base model: name it with --base")
    if base is None and not os.path.exists(named) and (folder / named).exists():
        named = str(folder / named)
    if os.path.isfile(os.path.join(named, annex.lora.CONFIG)):
        raise UserError(f"{folder} is an adapter of {named}, an adapter itself: merge that first")
    try:
        source = resolve(named, report)
    except UserError as error:
        raise UserError(
            f"{folder} is an adapter of {named}: {error}; name its base model with --base"
        ) from error
    return replace(source, name=folder.resolve().name.lower(), adapter=folder)


def local_folder(source: Source) -> Path:
    """Returns the folder on this machine that holds the target's files.

    A hub id is looked up in the hub's cache, and downloaded if it is not there. Raises UserError
    if it cannot be had.
    """
    if source.kind != "hub":
        return source.path
    for whole in WHOLE:
        folder = _download(source.path, whole)
        if (folder / whole).is_file():
            break
        if shards := named_by(folder / f"{whole}{INDEX}"):
            return _download(source.path, *shards)
    return folder


def without_weights(source: Source) -> Source:
    """Returns where the target's config and tokenizer are: of a hub id nothing more is fetched."""
    return (
        source
        if source.kind != "hub"
        else replace(source, path=_download(source.path), kind="folder")
    )


def _download(model: Path, *weights: str) -> Path:
    """Returns the folder of a model of the hub, with these files of its weights that it has."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()  # a log file would get each state of the bars
    patterns = ["*.json", "*.txt", "*.model", "*.jinja", *HEADS, *weights]
    try:
        return Path(snapshot_download(str(model), allow_patterns=patterns))
    except (OSError, ValueError) as error:
        reason = brief(error)
        raise UserError(
            f"could not load target {model} (no hub access here? pass a local folder or a GGUF "
            f"file): {reason}"
        ) from error


def fingerprint(source: Source) -> str:
    """Returns a SHA-256 in hex of the target's config and weights.

    All bytes are read, because models of one name, size and shape differ in nothing else. A copy
    of a model has the model's fingerprint, whatever its folder is called; the tokenizer does not
    count. Raises UserError if the files cannot be read or there are none.
    """
    folder = local_folder(source)
    files = weight_files(folder, source.gguf_file)
    if not source.gguf_file:
        files.insert(0, folder / "config.json")
    digest = hashlib.sha256()
    if source.adapter is not None:
        files += [source.adapter / annex.lora.CONFIG, *pretrained.adapter_files(source.adapter)]
    for file in files:
        name = "gguf" if source.gguf_file else file.name
        try:
            digest.update(f"{name} {file.stat().st_size} {sha256(file)}\n".encode())
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from error
    return digest.hexdigest()


def load(source: Source, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Returns the transformers causal LM, frozen and in eval mode, and its tokenizer.

    A tensor that is stored in another type, or quantised, is cast when it is read. Raises UserError
    if the files are damaged or do not fit each other, or if the model is not supported, which is
    found out before its weights are read. Code in the model's folder is never run.
    """
    config, tokenizer = read_config(source), load_tokenizer(source)
    folder, adapter = local_folder(source), _adapter(source)
    model = pretrained.read_model(folder, source.gguf_file, config, adapter, dtype)
    return model.requires_grad_(False).eval(), tokenizer


def open_weights(source: Source) -> tuple[Any, StoredWeights, Any]:
    """Returns the transformers causal LM without its numbers, its weights, which are read when they
    are needed, and its tokenizer.

    Raises UserError as `load` does; a tensor of another shape, or not finite, is found when it is
    read.
    """
    config, tokenizer = read_config(source), load_tokenizer(source)
    folder, adapter = local_folder(source), _adapter(source)
    model, tensors = pretrained.open_model(folder, source.gguf_file, config, adapter)
    return model, StoredWeights(tensors), tokenizer


def weights_said(source: Source) -> str | None:
    """Says which quantised matrices are read, in which form, and which adapter is merged; None for
    weights that are taken as they are."""
    weights = pretrained.quantised_weights(local_folder(source), source.gguf_file)
    adapter = _adapter(source)
    said = [each.said() for each in (weights, adapter) if each is not None]
    return ", ".join(said) or None


def expects_int8(source: Source) -> bool:
    """Returns whether the weights were made for activations in 8 bits (W8A8)."""
    weights = pretrained.quantised_weights(local_folder(source), source.gguf_file)
    return weights is not None and weights.expects_int8 and source.adapter is None


def read_config(source: Source, has_weights: bool = True) -> Any:
    """Returns the transformers config, with as many tokens as an adapter has embeddings for.

    has_weights: raise UserError where the weights are not there, or do not fit the config.
    """
    config = pretrained.read_config(local_folder(source), source.gguf_file, has_weights)
    adapter = _adapter(source)
    config.vocab_size = (adapter and adapter.vocab_size()) or config.vocab_size
    return config


def _adapter(source: Source) -> Any | None:
    return None if source.adapter is None else pretrained.read_adapter(source.adapter)


def _tokenizer_place(source: Source) -> tuple[Path, str | None]:
    """Returns the folder and the GGUF file, if any, with the tokenizer: the adapter's own if it has
    one."""
    if source.adapter is not None and (source.adapter / "tokenizer_config.json").is_file():
        return source.adapter, None
    return local_folder(source), source.gguf_file


def require_supported(source: Source) -> None:
    """Raises UserError unless the target is of a supported family; reads no weights."""
    read_config(source)


def require_standard_operators(source: Source) -> None:
    """Raises UserError if the target needs an operator that only ONNX Runtime has; reads no
    weights."""
    config = read_config(source)
    if any(kind.mlp == "experts" for kind in FAMILIES[config.model_type].layers(config)):
        raise UnsupportedModelError(
            f"got a '{config.model_type}' model, whose layers have experts, for TensorRT, which "
            "has no operator for them: expected --backend onnxruntime"
        )


def context(source: Source) -> int:
    """Returns the tokens that the target was made for; reads no weights.

    Raises UserError unless it is of a supported family.
    """
    config = read_config(source)
    return int(config.max_position_embeddings)


def load_tokenizer(source: Source) -> Any:
    """Returns the target's transformers tokenizer; raises UserError if it is damaged."""
    return pretrained.read_tokenizer(*_tokenizer_place(source))


def tokenizer_file(source: Source) -> Path | None:
    """Returns the target's own tokenizer.json, None if it has none, as every GGUF file."""
    folder, gguf_file = _tokenizer_place(source)
    return None if gguf_file else pretrained.tokenizer_file(folder)


def load_generation_config(source: Source) -> Any | None:
    """Returns transformers' generation config, or None if the target has no file of it.

    Raises UserError if the file is damaged.
    """
    return pretrained.read_generation_config(local_folder(source), source.gguf_file)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes a loaded target as a Hugging Face folder; weights that were quantised are so no more.

    Raises OSError or SafetensorError if that fails.
    """
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def files_of_model(folder: Path) -> set[str] | None:
    """Returns which files of a folder `save` may have written, None if it is no model's folder."""
    if not (folder / "config.json").is_file():
        return None
    return {path.name for pattern in SAVED for path in folder.glob(pattern)}


def ends(backbone: Backbone) -> TargetEnds:
    """Returns what a drafter borrows of this backbone, in float32; float32 tensors share memory."""
    config = backbone.config
    lent = _lent_layer(backbone)
    dims = LayerDims(
        hidden_size=config.hidden_size,
        intermediate_size=lent["down"].shape[0] if lent else config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
    )
    embed_VD = real(backbone.embedding.weight)
    head_VD = embed_VD if backbone.head is backbone.embedding else real(backbone.head.weight)
    return TargetEnds(
        dims=dims,
        embed_VD=_scaled(embed_VD, backbone.embedding.embedding_scale),
        head_VD=_scaled(head_VD, backbone.logit_scale),
        final_norm_D=backbone.norm.weight.detach().float(),
        cos=backbone.cos,
        sin=backbone.sin,
        last_layer=lent,
    )


def _scaled(weight: Tensor, scale: float) -> Tensor:
    return weight.detach().float() if scale == 1 else weight.detach().float() * scale


def _lent_layer(backbone: Backbone) -> dict[str, Tensor]:
    """Returns the weights of the last layer that is built as the drafters' own are, none if there
    is no such layer."""
    for layer in reversed(list(backbone.layers)):
        assert isinstance(layer, Layer)
        attention_norm, mlp_norm = layer.attention_norm, layer.mlp_norm
        mixer, mlp = layer.attention, layer.mlp
        if (
            isinstance(attention_norm, RMSNorm)
            and isinstance(mlp_norm, RMSNorm)
            and layer.attention_post_norm is None
            and layer.mlp_post_norm is None
            and isinstance(mixer, Attention)
            and isinstance(mlp, GatedMLP)
        ):
            return {
                "attention_norm": attention_norm.weight,
                "qkv": real(mixer.qkv.weight),
                "out": real(mixer.out.weight),
                "mlp_norm": mlp_norm.weight,
                "gate_up": real(mlp.gate_up.weight),
                "down": real(mlp.down.weight),
            }
    return {}
