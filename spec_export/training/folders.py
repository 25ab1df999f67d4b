"""Writes and checks the folders of training checkpoints and finished drafters, without torch.

Both are written whole or not at all, with a header in JSON that lists the SHA-256 of every file.
"""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief, parse_json
from spec_runtime.files.writing import replacing_folder, require_replaceable, sha256

FORMAT = 1
HEADER, DRAFTER_HEADER = "checkpoint.json", "config.json"
STEP_PREFIX = "step-"
# folders of a run: the newest steps, the best one, what the runtime validates
CHECKPOINTS, BEST, DRAFTING = "checkpoints", "best", "drafting"
_STEP = re.compile(rf"{STEP_PREFIX}\d{{8,15}}")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def folder_name(step: int) -> str:
    """Returns the name of a step's checkpoint, such as "step-00000123"."""
    return f"{STEP_PREFIX}{step:08d}"


def finished_drafter(folder: Path) -> Path:
    """Returns the folder of the drafter: `folder` itself, or `drafter` in a training run's.

    Raises UserError if there is none, or a run that has not ended.
    """
    if (folder / DRAFTER_HEADER).is_file():
        return folder
    if (folder / "drafter" / DRAFTER_HEADER).is_file():
        return folder / "drafter"
    if checkpoints(folder / CHECKPOINTS):
        raise UserError(
            f"{folder} holds a training run that has not ended, expected a finished drafter; go on "
            "with spec-export train and --resume"
        )
    found = "it holds no drafter" if folder.is_dir() else "there is nothing"
    raise UserError(
        f"got {folder} ({found}), expected a drafter's folder, or that of a training run that has "
        "ended"
    )


def is_foreign(folder: Path) -> bool:
    """Says whether a folder's config.json is that of another library, or a file is a GGUF file."""
    if folder.suffix == ".gguf":
        return folder.is_file()
    try:
        header = parse_json((folder / DRAFTER_HEADER).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(header, dict) and "format" not in header


def require_drafter(folder: Path) -> None:
    """Raises UserError unless a drafter lies in this folder, or in that of its run, unaltered; one
    of another library is looked at when it is imported."""
    if is_foreign(folder):
        return
    read(finished_drafter(folder), DRAFTER_HEADER, ("drafter.safetensors",))


def write(final: Path, header_name: str, what: str, fill: Callable[[Path], dict[str, Any]]) -> None:
    """Writes the folder `final` whole or not at all.

    `fill` fills a temporary folder beside it and returns the header's facts; the header with the
    files' hashes is added, and the folder is renamed. Raises UserError if `final` is not
    `what`, such as "a drafter", or holds other files too.
    """
    require_replaceable(final, files_by(header_name), what)
    with replacing_folder(final, files_by(header_name), what) as temporary:
        header = {"format": FORMAT, **fill(temporary)}
        header["files"] = {file.name: sha256(file) for file in sorted(temporary.iterdir())}
        text = json.dumps(header, indent=1, ensure_ascii=False)
        (temporary / header_name).write_text(text + "\n", encoding="utf-8")
        for file in temporary.iterdir():  # safetensors makes its files private
            shutil.copymode(temporary / header_name, file)


def files_by(header_name: str) -> Callable[[Path], set[str] | None]:
    """Returns a function that gives the files of a folder as its header has them.

    That is None for a folder without such a header, as is a model's folder with its config.json.
    """

    def files_of(folder: Path) -> set[str] | None:
        try:
            header = parse_json((folder / header_name).read_bytes())
        except (OSError, ValueError):
            return None
        if not isinstance(header, dict) or type(header.get("format")) is not int:
            return None
        if not isinstance(header.get("files"), dict):
            return None
        return {header_name, *header["files"]}

    return files_of


def read(folder: Path, header_name: str, needed: Sequence[str]) -> dict[str, Any]:
    """Returns the header, after comparing every file's hash with it.

    `needed`: names of files that it has to list. Raises UserError on a file that is missing,
    not listed or of another hash, and on a name that leads out of the folder.
    """
    path = folder / header_name
    try:
        header = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {brief(error)}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        got = header.get("format") if isinstance(header, dict) else type(header).__name__
        hint = "; import another library's drafter first: spec-export import"
        raise UserError(
            f"{path} has format {got!r:.40}, expected {FORMAT}"
            f"{hint if header_name == DRAFTER_HEADER else ''}"
        )
    files = header.get("files")
    if not isinstance(files, dict) or not set(needed) <= set(files):
        raise UserError(f"{path} lists no hash of {', '.join(needed)}, expected one of each")
    for name, expected in files.items():
        if not _PLAIN_NAME.fullmatch(name) or not _SHA256.fullmatch(str(expected)):
            raise UserError(
                f"{path} lists {name!r:.80} with {expected!r:.80}, expected names of files in "
                "the folder, and their SHA-256"
            )
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing, expected it beside {header_name}")
        try:
            got = sha256(folder / name)
        except OSError as error:
            raise UserError(f"cannot read {folder / name}: {error.strerror}") from error
        if got != expected:
            raise UserError(
                f"{folder / name} has SHA-256 {got[:12]}…, expected {expected[:12]}…: "
                "damaged or altered, restore it or train again"
            )
    return header


def checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints in `folder`, whole or not, by rising step."""
    found = [path for path in folder.glob(f"{STEP_PREFIX}*") if _STEP.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix(STEP_PREFIX)))
