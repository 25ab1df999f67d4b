"""Finds a model's files and refuses what cannot be one, without torch.

Importing torch and transformers takes seconds: a wrong path is refused before.
"""

from __future__ import annotations

from pathlib import Path

from spec_export.families import require_known_folder
from spec_export.loading import gguf_config, gguf_header
from spec_runtime.errors import UserError


def path_of(model: str) -> Path | None:
    """Returns the folder or GGUF file that `--model` names, None for a hub id.

    Raises UserError if a path was clearly meant and is not there, or if a file is no GGUF file.
    """
    try:
        path = Path(model).expanduser()
    except RuntimeError:
        raise UserError(f"got model {model}, expected a path: there is no such user") from None
    if path.is_dir():
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
    """Raises UserError unless `--model` names a hub id, or files of a family that is known.

    Whatever takes torch to be seen is left to those who load the model.
    """
    path = path_of(model)
    if path is None:
        return
    if path.is_file():
        gguf_config.config_fields(gguf_header.read(path))
    else:
        require_known_folder(path)
