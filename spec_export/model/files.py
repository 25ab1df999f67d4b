"""Finds a model's files and refuses what cannot be one, without torch.

Importing torch and transformers takes seconds: what a look at the files shows is refused before.
"""

from pathlib import Path
from typing import Any

from spec_export.model import annex, foreign_json
from spec_export.model.families import FAMILIES, require_known, wrappers
from spec_runtime.errors import UnsupportedModelError, UserError
from spec_runtime.files.machine import require_utf8

# Files of a folder that hold all weights, each before the index of several, INDEX after its name:
# the first that is there is read, as transformers does, and no other.
WHOLE = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"
HEADS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")  # Medusa's; the first that is there
# Files of other programs in a folder without weights that can be read, and what to do with them.
FOREIGN = {
    "genai_config.json": "ONNX Runtime GenAI's: take the model that it was made from",
    "consolidated*": "Mistral's or Meta's own format: take the model's Hugging Face files",
    "*.gguf": "name that file rather than its folder",
    "*.onnx": "an ONNX graph: take the model that it was made from",
    "onnx/*.onnx": "an ONNX graph: take the model that it was made from",
    "openvino_model*": "OpenVINO's: take the model that it was made from",
    "model*.safetensors": "a part that no index names: download model.safetensors.index.json",
    "pytorch_model*.bin": "a part that no index names: download pytorch_model.bin.index.json",
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
    require_utf8(path)
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


def require_whole(folder: Path, has_weights: bool = True) -> dict[str, Any]:
    """Returns what a folder's config.json says; raises UserError unless the folder holds a whole
    model, or all of it but its weights, of a family that is known, which needs no code of its own.
    """
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
    if has_weights:
        weight_files(folder, None)
    require_tokenizer(folder)
    return foreign_json.read(folder / "config.json", foreign_json.CONFIG)


def require_tokenizer(folder: Path) -> None:
    """Raises UserError if the tokenizer's config is damaged."""
    if (folder / "tokenizer_config.json").is_file():
        foreign_json.read(folder / "tokenizer_config.json", foreign_json.TOKENIZER)


def weight_files(folder: Path, gguf_file: str | None) -> list[Path]:
    """Returns the files that hold the weights, see WHOLE; raises UserError if there are none, or if
    some that the index names are not there."""
    if gguf_file:
        return annex.gguf_header.parts(folder / gguf_file)
    for whole in WHOLE:
        index = folder / f"{whole}{INDEX}"
        if (folder / whole).is_file():
            return [folder / whole]
        if index.is_file():
            return _shards(index)
    raise UserError(
        f"got {folder} without weights{_foreign(folder)}, expected {' or '.join(WHOLE)}, or the "
        "index of one, in it"
    )


def _foreign(folder: Path) -> str:
    """Returns what a folder without weights of ours holds instead, such as " (ONNX graphs)"."""
    for pattern, what in FOREIGN.items():
        found = sorted(folder.glob(pattern))
        if found:
            return f" but with {found[0].relative_to(folder)} ({what})"
    return ""


def _shards(index: Path) -> list[Path]:
    """Returns the files that an index names; raises UserError if some are not there."""
    files = named_by(index)
    lost = [file for file in files if not index.with_name(file).is_file()]
    if lost:
        raise UserError(
            f"{index} names {len(files)} files, of which {len(lost)} "
            f"{'is' if len(lost) == 1 else 'are'} not there: {', '.join(lost[:SHOWN])}"
            f"{', ...' if len(lost) > SHOWN else ''}; download the rest of the model"
        )
    return [index.with_name(file) for file in files]


def named_by(index: Path) -> list[str]:
    """Returns the names of the files that an index of weights names, none if there is no index."""
    if not index.is_file():
        return []
    named = foreign_json.read(index, foreign_json.INDEX).get("weight_map")
    if not named:
        raise UserError(
            f"{index}: got no weight_map, expected the file of each tensor; download the index "
            "again"
        )
    return sorted(set(named.values()))
