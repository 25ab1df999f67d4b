"""Finds a model's files and refuses what cannot be one, without torch.

Importing torch and transformers takes seconds: what a look at the files shows is refused before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spec_export.model import annex, foreign_json
from spec_export.model.families import FAMILIES, require_known, wrappers
from spec_runtime.errors import UnsupportedModelError, UserError

SAFETENSORS, PICKLED = "model*.safetensors", "pytorch_model*.bin"  # weights in a folder
HEADS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")  # Medusa's; the first that is there
# Files of other programs in a folder without weights that can be read, and what to do with them.
FOREIGN = {
    "genai_config.json": "ONNX Runtime GenAI's: take the model that it was made from",
    "consolidated*": "Mistral's or Meta's own format: take the model's Hugging Face files",
    "*.gguf": "name that file rather than its folder",
    "*.onnx": "an ONNX graph: take the model that it was made from",
    "onnx/*.onnx": "an ONNX graph: take the model that it was made from",
    "openvino_model*": "OpenVINO's: take the model that it was made from",
    "flax_model*": "Flax's: take the safetensors",
    "tf_model*": "TensorFlow's: take the safetensors",
    "manifest.json": "a bundle: take the model that it was made from",
}
SHOWN = 3  # names that a message lists


def path_of(model: str) -> Path | None:
    """Returns the folder or GGUF file that `--model` names, None for a hub id.

    Raises UserError if a path was clearly meant and is not there, or if it leads to no checkpoint.
    """
    try:
        path = Path(model).expanduser()
    except RuntimeError:
        raise UserError(f"got model {model}, expected a path: there is no such user") from None
    if path.is_dir():
        if not any((path / name).is_file() for name in ("config.json", annex.lora.CONFIG)):
            raise UserError(
                f"got folder {model}{_foreign(path)}, expected a Hugging Face checkpoint: it has "
                "no config.json"
            )
        return path
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(f"got file {model}, expected a GGUF file or a Hugging Face folder")
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise UserError(
            f"got model {model!r:.200}, expected an existing folder or GGUF file, or a hub id "
            "like org/name"
        )
    return None


def require(model: str) -> None:
    """Raises UserError unless `--model` names a hub id, an adapter, or a whole model's files.

    Whatever takes torch to be seen is left to those who load the model.
    """
    path = path_of(model)
    if path is None:
        return
    if path.is_file():
        annex.gguf_config.config_fields(annex.gguf_header.read(path))
    elif (path / annex.lora.CONFIG).is_file():
        annex.lora.read_config(path)
    else:
        require_whole(path)


def require_whole(folder: Path) -> dict[str, Any]:
    """Returns what a folder's config.json says; raises UserError unless the folder holds a whole
    model of a family that is known, which needs no code of its own."""
    config = foreign_json.read_object(folder / "config.json")
    model_type = wrappers.model_type(config)
    if "auto_map" in config and str(model_type) not in FAMILIES:
        raise UnsupportedModelError(
            f"{folder} needs code of its own (auto_map in config.json), which is never run; "
            f"expected a model of type {', '.join(FAMILIES)}"
        )
    if (folder / annex.lora.CONFIG).is_file():
        raise UserError(
            f"{folder} holds an adapter (adapter_config.json), expected a whole model: name the "
            "adapter's folder on this machine with --model"
        )
    require_known(model_type)
    _require_shards(folder)
    weight_files(folder, None)
    require_tokenizer(folder)
    return foreign_json.read(folder / "config.json", foreign_json.CONFIG)


def require_tokenizer(folder: Path) -> None:
    """Raises UserError if the tokenizer's config is damaged."""
    if (folder / "tokenizer_config.json").is_file():
        foreign_json.read(folder / "tokenizer_config.json", foreign_json.TOKENIZER)


def weight_files(folder: Path, gguf_file: str | None) -> list[Path]:
    """Returns the files that hold the weights; raises UserError if there are none.

    As transformers does, it takes pickled weights only where there are no others.
    """
    if gguf_file:
        return annex.gguf_header.parts(folder / gguf_file)
    files = sorted(folder.glob(SAFETENSORS)) or sorted(folder.glob(PICKLED))
    if not files:
        raise UserError(
            f"got {folder} without weights{_foreign(folder)}, expected {SAFETENSORS} or {PICKLED} "
            "in it"
        )
    return files


def _foreign(folder: Path) -> str:
    """Returns what a folder without weights of ours holds instead, such as " (ONNX graphs)"."""
    for pattern, what in FOREIGN.items():
        found = sorted(folder.glob(pattern))
        if found:
            return f" but with {found[0].relative_to(folder)} ({what})"
    return ""


def _require_shards(folder: Path) -> None:
    """Raises UserError if the index of the weights names files that are not there."""
    for pattern in (SAFETENSORS, PICKLED):
        if not list(folder.glob(pattern)):
            continue
        for index in folder.glob(f"{pattern.replace('*', '')}.index.json"):
            named = foreign_json.read(index, foreign_json.INDEX).get("weight_map")
            if not named:
                raise UserError(
                    f"{index}: got no weight_map, expected the file of each tensor; download the "
                    "index again"
                )
            files = set(named.values())
            lost = sorted(file for file in files if not (folder / file).is_file())
            if lost:
                raise UserError(
                    f"{index} names {len(files)} files, of which {len(lost)} "
                    f"{'is' if len(lost) == 1 else 'are'} not there: {', '.join(lost[:SHOWN])}"
                    f"{', ...' if len(lost) > SHOWN else ''}; download the rest of the model"
                )
        return
