"""Fetches a bundle from a hub: whole and with the right hashes, or not at all.

The files come into a folder beside the bundle's, `.NAME.pull`, which stays if the network or the
disk fails, so that the next try fetches the missing files only. The bundle's folder appears by a
rename once every hash of the manifest is right.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from spec_runtime.bundle import manifest as bundles
from spec_runtime.bundle.manifest import MANIFEST, Bundle, BundleError
from spec_runtime.errors import UserError
from spec_runtime.files.machine import cache_folder
from spec_runtime.files.writing import OwnFiles, files_in, replacing_folder, require_replaceable
from spec_runtime.hub.client import Repository, in_one_line, open_client

if TYPE_CHECKING:
    from huggingface_hub import HfApi

FREE_BYTES = 64 << 20  # that are to be left on the disk

log = logging.getLogger("spec_runtime")


class Progress(NamedTuple):
    """How far a download is: the file that is being fetched, and bytes of all files."""

    file: str
    done: int
    total: int


def pull(
    repository: str,
    to: str | Path | None = None,
    revision: str | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Path:
    """Fetches the bundle of the repository "org/name" and returns its folder.

    Args:
        repository: "org/name", or "hf://org/name".
        to: the folder; bundles/NAME by default. A bundle that is there is replaced.
        revision: a branch, a tag or a commit; the default branch if None.
        on_progress: is called as bytes come.

    Raises UserError if the hub cannot be reached or refuses, BundleError if what it has is not a
    whole bundle with the hashes of its manifest, UserError if `to` holds other files, and OSError
    if it cannot be written.
    """
    source = Repository.parse(repository, revision)
    out = Path("bundles", source.name.partition("/")[2]) if to is None else Path(to)
    return _pull(source, out, bundles.own_files, on_progress)


def open_cached(repository: str, verify: bool = True) -> Bundle:
    """Opens the bundle "hf://org/name" or "hf://org/name@revision" in the user's cache. Fetches it
    if it is not there or, with a warning, if `bundles.read` refuses what is there; asks the network
    for nothing otherwise.

    Raises as `pull` does.
    """
    source = Repository.parse(repository)
    revision = "" if source.revision is None else "@" + quote(source.revision, safe="")
    folder = cache_folder() / "hub" / f"{source.name.replace('/', '--')}{revision}"
    if folder.is_dir():
        try:
            return bundles.read(folder, verify)
        except BundleError as error:
            log.warning("%s; %s is fetched anew", error, source)
    log.info("fetching %s into %s", source, folder)
    # What lies in a folder of the cache is the cache's own.
    return bundles.read(_pull(source, folder, files_in), verify=False)


def _pull(
    source: Repository,
    out: Path,
    own_files: OwnFiles,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Path:
    """Does what `pull` says; `own_files` are those that may be replaced at `out`."""
    require_replaceable(out, own_files, "a bundle")  # before the network is asked
    client = open_client()
    with in_one_line(client, source, "read"):
        info = client.model_info(source.name, revision=source.revision, files_metadata=True)
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    if MANIFEST not in sizes:
        raise UserError(
            f"{source}: got a repository without {MANIFEST}, expected a bundle, as spec-runtime "
            "push makes one"
        )
    with replacing_folder(out, own_files, "a bundle") as folder:
        parts = folder.with_name(f".{out.name}.pull")
        download = _Download(client, source, info.sha, parts, on_progress)
        with in_one_line(client, source, "read"):
            _fetch(download, sizes)
        _move(parts, folder, source)
    return out


class _Download:
    """Fetches files of one commit into the folder `parts`, and counts their bytes."""

    def __init__(
        self,
        client: HfApi,
        source: Repository,
        commit: str | None,
        parts: Path,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.source, self.parts = source, parts
        self.total = 0
        self._client, self._commit, self._on_progress = client, commit, on_progress
        self._done = 0

    def fetch(self, name: str, size: int) -> None:
        """Fetches one file, unless it is there from an earlier try."""
        before = self._done

        def count(num_bytes: int) -> None:
            self._done += num_bytes
            self._on_progress(Progress(name, self._done, self.total))

        self._client.hf_hub_download(
            self.source.name,
            name,
            revision=self._commit,
            local_dir=self.parts,
            tqdm_class=_counting(count),
        )
        count(before + size - self._done)  # a file that was there counts at once


def _counting(count: Callable[[int], None]) -> Any:
    """Returns a class that huggingface_hub takes for a progress bar, and which only counts."""
    from huggingface_hub.utils import tqdm

    class Counter(tqdm):  # type: ignore[type-arg, misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **(options | {"disable": True}))

        def update(self, n: float | None = 1) -> bool | None:
            count(int(n or 0))
            return None

    return Counter


def _fetch(download: _Download, sizes: dict[str, int]) -> None:
    """Fetches the manifest and then all that it names."""
    download.parts.mkdir(parents=True, exist_ok=True)
    download.total = sizes[MANIFEST]
    download.fetch(MANIFEST, sizes[MANIFEST])
    try:
        manifest = bundles.read_manifest(download.parts)
    except BundleError as error:
        shutil.rmtree(download.parts, ignore_errors=True)
        raise BundleError(_without_folder(error, download.parts, download.source)) from None
    names = list(manifest.files)
    if missing := [name for name in names if name not in sizes]:
        shutil.rmtree(download.parts, ignore_errors=True)
        raise BundleError(
            f"{download.source}: {missing[0]:.200} is named in its manifest and missing there; ask "
            "its owner"
        )
    total = sum(sizes[name] for name in names)
    there = sum(_size(download.parts / name) for name in names)
    free = shutil.disk_usage(download.parts).free
    if total - there + FREE_BYTES > free:
        raise UserError(
            f"{download.source}: its files need {(total - there) / 1e6:.0f} MB more, and "
            f"{free / 1e6:.0f} MB are free at {download.parts.parent}; make room, or name another "
            "disk with --to"
        )
    download.total += total
    for name in names:
        download.fetch(name, sizes[name])


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def _move(parts: Path, folder: Path, source: Repository) -> None:
    """Moves the files into `folder` and checks them there; removes `parts` either way.

    What other tries left in `parts` is not moved.
    """
    manifest = bundles.read_manifest(parts)
    try:
        for name in (MANIFEST, *manifest.files):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (parts / name).rename(folder / name)
        bundles.read(folder)
    except BundleError as error:
        raise BundleError(_without_folder(error, folder, source)) from None
    finally:
        shutil.rmtree(parts, ignore_errors=True)


def _without_folder(error: BundleError, folder: Path, source: Repository) -> str:
    """Returns the message with the repository's name in place of the temporary folder's."""
    return str(error).replace(str(folder), str(source))
