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
from typing import TYPE_CHECKING, NamedTuple, NoReturn

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
        _refuse(error, _Call(client.endpoint, repository, verb))
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
    network = (
        errors.HTTPError,
        http.InvalidURL,
        errors.OfflineModeIsEnabled,
        errors.XetDownloadError,
    )
    files = errors.EntryNotFoundError, errors.FileMetadataError, errors.LocalTokenNotFoundError
    return *network, *files, http.InvalidURL, ValueError, RuntimeError


class _Call(NamedTuple):
    """What was being done: `endpoint` is the hub's address."""

    endpoint: str
    repository: Repository
    verb: str


def _refuse(error: Exception, call: _Call) -> NoReturn:
    """Raises the UserError that says what an error of the client means."""
    from huggingface_hub import errors

    endpoint, repository = call.endpoint, call.repository
    if isinstance(error, errors.OfflineModeIsEnabled):
        raise UserError(
            f"{repository}: HF_HUB_OFFLINE forbids the network; unset it to reach {endpoint}"
        ) from error
    if isinstance(error, errors.GatedRepoError):
        raise UserError(
            f"{repository}: its owner lends access one by one; ask for it on "
            f"{endpoint}/{repository.name}, then {_LOG_IN}"
        ) from error
    if isinstance(error, errors.RevisionNotFoundError):
        raise UserError(
            f"{repository}: got a revision that is not there, expected a branch, a tag or a commit"
        ) from error
    if isinstance(error, errors.EntryNotFoundError) and isinstance(error, errors.HfHubHTTPError):
        raise UserError(f"{repository}: a file is missing there; ask its owner") from error
    # Errors of one file carry those of the network as their cause.
    cause = error.__cause__
    for each in (error, cause):
        if isinstance(each, errors.HfHubHTTPError):
            _refuse_status(each, each.response.status_code, call)
    if isinstance(error, errors.LocalTokenNotFoundError):
        raise UserError(f"{repository}: {endpoint} wants to know who you are; {_LOG_IN}") from error
    shown = error if cause is None else cause
    if isinstance(shown, ValueError):
        raise UserError(
            f"{repository}: {endpoint} did not answer as a hub does ({_first_line(shown)}); check "
            "HF_ENDPOINT"
        ) from error
    raise UserError(
        f"{repository}: {endpoint} could not be reached ({_first_line(shown)}); check the "
        "network and HF_ENDPOINT, and run the command again"
    ) from error


def _refuse_status(error: Exception, status: int, call: _Call) -> NoReturn:
    """Raises the UserError that says what an HTTP status means."""
    from huggingface_hub import errors

    endpoint, repository, verb = call
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        what = f"{endpoint} knows no such repository, or shows it to others only ({status}); check "
        what += f"the name, or {_LOG_IN}"
    elif status == 401:
        what = f"{endpoint} wants to know who you are (401); {_LOG_IN}"
    elif status == 403:
        what = f"{endpoint} does not let you {verb} it (403); use a token that may {verb} it"
    else:
        what = f"{endpoint} answered with HTTP status {status}; run the command again later"
    raise UserError(f"{repository}: {what}") from error


def _first_line(error: BaseException) -> str:
    """Returns the kind of an error and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]:.200}" if lines else type(error).__name__
