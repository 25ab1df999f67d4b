"""Keeps the kernels that TensorRT-RTX compiles for this GPU in the user's cache folder.

A file holds the SHA-256 of its content, then the content. Content whose hash does not agree never
reaches TensorRT.
"""

import hashlib
import logging
import re
from pathlib import Path
from typing import Any

from spec_runtime.backends.tensorrt.api import TensorRT
from spec_runtime.bundle.manifest import Plan
from spec_runtime.errors import UserError
from spec_runtime.files.machine import cache_folder
from spec_runtime.files.writing import require_regular_file, write_atomically

DIGEST_BYTES = hashlib.sha256().digest_size

log = logging.getLogger("spec_runtime")


def kernels_path(plan: Plan, gpu_name: str) -> Path | None:
    """Returns the file for the kernels of this plan on this GPU, or None for a user without a cache
    folder."""
    try:
        folder = cache_folder()
    except ValueError:
        return None
    gpu = re.sub("[^0-9A-Za-z]+", "-", gpu_name)[:60].strip("-")
    name = f"{plan.key[:20]}-{plan.flavour}-{plan.version}-{gpu}.kernels"
    return folder / "tensorrt" / name


class KernelStore:
    """One TensorRT-RTX runtime cache and the file at `path` that keeps it, None for no file.

    `cache` is an empty IRuntimeCache. A file that is damaged or does not fit this machine is
    ignored with a warning, and replaced by the next `save`.
    """

    def __init__(self, cache: Any, trt: TensorRT, path: Path | None) -> None:
        self._cache, self._path = cache, path
        self._saved = b""  # the digest of what the file holds, as far as known
        if path is None:
            return
        try:
            self._load(path, trt)
        except FileNotFoundError:
            return
        except (ValueError, OSError) as error:
            # As text: the error's frames would keep the whole backend as long as the record.
            log.warning("%s is ignored: %s; kernels are compiled again", path, str(error))

    def save(self) -> None:
        """Writes the file if kernels were added. Warns, once, if it cannot be written."""
        if self._path is None:
            return
        content = bytes(self._cache.serialize())
        digest = hashlib.sha256(content).digest()
        if digest == self._saved:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, digest + content)
        except (ValueError, OSError) as error:
            log.warning("compiled kernels are not kept in %s: %s", self._path, str(error))
            self._path = None
        self._saved = digest

    def _load(self, path: Path, trt: TensorRT) -> None:
        require_regular_file(path)
        data = path.read_bytes()
        digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            raise UserError("it is damaged")
        if not self._cache.deserialize(content):
            raise UserError(f"{trt.flavour} does not take it ({trt.reason})")
        self._saved = digest
