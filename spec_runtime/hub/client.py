"""Names repositories of a hub, opens the client, and turns what it raises into one line.

The client is huggingface_hub. It reads HF_ENDPOINT (another hub than huggingface.co), HF_TOKEN and
HF_HUB_OFFLINE; nothing here sees the token.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_runtime.errors import UserError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PREFIX = "hf://"
MAX_PART = 96  # characters of an organisation's or a repository's name
_PART = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_REVISION = re.compile(r"[A-Za-z0-9._/-]{1,200}")
_LOG_IN = "log in with hf auth login, or set HF_TOKEN"


@dataclass(frozen=True)
class Repository:
    """Names a repository of a hub, "org/name", and a revision of it: a branch, a tag or a commit.

    Without a revision it is the default branch.
    """

    name: str
    revision: str | None = None

    def __post_init__(self) -> None:
        parts = self.name.split("/")
        if len(parts) != 2 or not all(map(_is_part, parts)):
            raise UserError(
                f"got repository {self.name!r:.200}, expected ORG/NAME: letters, digits and ._- "
                "on both sides of one slash"
            )
        if self.revision is not None and not _REVISION.fullmatch(self.revision):
            raise UserError(
                f"got revision {self.revision!r:.200}, expected a branch, a tag or a commit"
            )

    @classmethod
    def parse(cls, text: str, revision: str | None = None) -> Repository:
        """Reads "org/name" or "hf://org/name", with "@revision" after it if one is meant.

        Raises UserError if the text is no such name, or if `revision` is given as well.
        """
        name, mark, named = text.removeprefix(PREFIX).partition("@")
        if mark and revision is not None:
            raise UserError(f"got two revisions, {named!r:.60} and {revision!r:.60}, expected one")
        return cls(name, named if mark else revision)

    def __str__(self) -> str:
        at = "" if self.revision is None else f"@{self.revision}"
        return f"{PREFIX}{self.name}{at}"


def _is_part(part: str) -> bool:
    is_plain = _PART.fullmatch(part) is not None and len(part) <= MAX_PART
    return is_plain and ".." not in part and "--" not in part and not part.endswith(".git")


def open_client() -> HfApi:
    """Returns the client of the hub that HF_ENDPOINT names. Raises ModuleNotFoundError without the
    extra `hub`."""
    from huggingface_hub import HfApi

    endpoint = os.environ.get("HF_ENDPOINT")
    return HfApi(endpoint.rstrip("/") if endpoint else None, library_name="specsplit")


@contextmanager
def in_one_line(client: HfApi, repository: Repository, verb: str) -> Iterator[None]:
    """Raises what the client raises in the block as a UserError of one line; `verb` says what was
    being done to the repository, "read" or "write".

    Errors of the disk stay OSErrors, but that of a full disk says what to do.
    """
    try:
        yield
    except UserError:
        raise
    except _errors_of_the_client() as error:
        what = _told(error, client.endpoint, repository, verb)
        raise UserError(f"{repository}: {what}") from error
    except OSError as error:
        if error.errno is None:  # the client's own, of a short file
            raise UserError(
                f"{repository}: got less than a whole file ({_first_line(error)}); run the command "
                "again, which goes on with the files that are missing"
            ) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{repository}: no space is left on the disk; make room and run the command again, "
                "which goes on with the files that are missing"
            ) from error
        raise


def _errors_of_the_client() -> tuple[type[Exception], ...]:
    """Returns what huggingface_hub raises for the network and for the hub's answers. Some of those
    that it cannot read are a common ValueError or RuntimeError."""
    from huggingface_hub import errors

    http = importlib.import_module(errors.HTTPError.__module__.partition(".")[0])  # by its version
    network = errors.HTTPError, errors.OfflineModeIsEnabled, errors.XetDownloadError
    files = errors.EntryNotFoundError, errors.FileMetadataError, errors.LocalTokenNotFoundError
    return *network, *files, http.InvalidURL, ValueError, RuntimeError


def _told(error: Exception, endpoint: str, repository: Repository, verb: str) -> str:
    """Returns what an error of the client means; `endpoint` is the hub's address."""
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE forbids the network; unset it to reach {endpoint}"
    if isinstance(error, errors.GatedRepoError):
        page = f"{endpoint}/{repository.name}"
        return f"its owner lends access one by one; ask for it on {page}, then {_LOG_IN}"
    if isinstance(error, errors.RevisionNotFoundError):
        return "got a revision that is not there, expected a branch, a tag or a commit"
    if isinstance(error, errors.EntryNotFoundError) and isinstance(error, errors.HfHubHTTPError):
        return "a file is missing there; ask its owner"
    # Errors of one file carry those of the network as their cause.
    shown = error if error.__cause__ is None else error.__cause__
    for each in (error, shown):
        if isinstance(each, errors.HfHubHTTPError):
            return f"{endpoint} {_status_told(each, each.response.status_code, verb)}"
    if isinstance(error, errors.LocalTokenNotFoundError):
        return f"{endpoint} wants to know who you are; {_LOG_IN}"
    if isinstance(shown, ValueError):
        line = _first_line(shown)
        return f"{endpoint} did not answer as a hub does ({line}); check HF_ENDPOINT"
    return (
        f"{endpoint} could not be reached ({_first_line(shown)}); check the network and "
        "HF_ENDPOINT, and run the command again"
    )


def _status_told(error: Exception, status: int, verb: str) -> str:
    """Returns what an HTTP status means."""
    from huggingface_hub import errors

    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        what = f"knows no such repository, or shows it to others only ({status})"
        return f"{what}; check the name, or {_LOG_IN}"
    if status == 401:
        return f"wants to know who you are (401); {_LOG_IN}"
    if status == 403:
        return f"does not let you {verb} it (403); use a token that may {verb} it"
    return f"answered with HTTP status {status}; run the command again later"


def _first_line(error: BaseException) -> str:
    """Returns the kind of an error and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]:.200}" if lines else type(error).__name__
