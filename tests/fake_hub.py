"""A hub on this machine: as much of the Hugging Face hub's HTTP API as pull and push use.

Run as a program it serves until it is interrupted: python tests/fake_hub.py [PORT].
"""

import base64
import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"
LARGE = (".onnx", ".bin")  # are sent as large files
NAME = r"(?P<name>[^/]+/[^/]+)"
FIRST = "0" * 40  # the commit of a repository without files


@dataclass
class Repository:
    """The files of each commit; `revisions` maps branches and tags to commits."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {FIRST: {}})
    revisions: dict[str, str] = field(default_factory=lambda: {"main": FIRST})

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Adds a commit that holds the branch's files and these; returns its id."""
        old = self.revisions.get(branch, FIRST)
        names = "".join(
            f"{name} {hashlib.sha256(data).hexdigest()}" for name, data in files.items()
        )
        new = hashlib.sha1((old + names).encode()).hexdigest()
        self.commits[new] = self.commits[old] | files
        self.revisions[branch] = new
        return new

    def find(self, revision: str) -> str | None:
        commit = self.revisions.get(revision, revision)
        return commit if commit in self.commits else None


class FakeHub:
    """Serves repositories. Tests put files and faults into it.

    `refusals` maps a part of a path to the HTTP status that answers requests for it, `cut` a file's
    name to the number of bytes after which its download ends early, each time. `requests` are the
    methods and paths asked for, `sent` the bytes sent of each file.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.refusals: dict[str, tuple[int, str]] = {}
        self.cut: dict[str, int] = {}
        self.requests: list[tuple[str, str]] = []
        self.sent: dict[str, int] = {}
        self.large: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def add(self, name: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Commits files to a repository, which is made if there is none."""
        return self.repositories.setdefault(name, Repository()).commit(files, branch)


@contextmanager
def serving(hub: FakeHub, port: int = 0) -> Iterator[str]:
    """Serves the hub on this machine while the block runs; gives its address."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection; each `_on_…` method is one call of the API."""

    hub: FakeHub
    protocol_version = "HTTP/1.1"
    routes = (
        ("GET", rf"/api/models/{NAME}(/revision/(?P<revision>.+))?", "info"),
        ("HEAD", rf"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", "file"),
        ("GET", rf"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", "file"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("POST", rf"/api/models/{NAME}/preupload/main", "preupload"),
        ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", "batch"),
        ("PUT", r"/upload/(?P<oid>[0-9a-f]+)", "upload"),
        ("POST", rf"/api/models/{NAME}/commit/main", "commit"),
    )

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._route()

    do_HEAD = do_POST = do_PUT = do_GET

    def _route(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.hub.lock:
            self.hub.requests.append((self.command, path))
            for part, (status, code) in self.hub.refusals.items():
                if part in path:
                    return self._refuse(status, code)
            for method, pattern, name in self.routes:
                found = re.fullmatch(pattern, path)
                if method == self.command and found:
                    return getattr(self, f"_on_{name}")(body, **found.groupdict())
        return self._refuse(404, "EntryNotFound")

    # ---- answers ----

    def _answer(self, data: Any, status: int = 200) -> None:
        self._bytes(json.dumps(data).encode(), status, {"Content-Type": "application/json"})

    def _bytes(
        self, data: bytes, status: int, headers: dict[str, str], num_bytes: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:num_bytes])
        if num_bytes is not None:
            self.close_connection = True

    def _refuse(self, status: int, code: str = "") -> None:
        self._bytes(b"{}", status, {"X-Error-Code": code} if code else {})

    def _is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _readable(self, name: str) -> Repository | None:
        """Returns the repository, None after refusing it: a private one is as good as missing."""
        found = self.hub.repositories.get(name)
        if found is None or (found.private and not self._is_known()):
            self._refuse(404 if self._is_known() else 401, "RepoNotFound")
            return None
        return found

    # ---- reading ----

    def _on_info(self, body: bytes, name: str, revision: str | None) -> None:
        if (repository := self._readable(name)) is None:
            return
        if (commit := repository.find(revision or "main")) is None:
            return self._refuse(404, "RevisionNotFound")
        files = repository.commits[commit]
        siblings = [{"rfilename": key, "size": len(data)} for key, data in files.items()]
        self._answer(
            {"id": name, "sha": commit, "private": repository.private, "siblings": siblings}
        )

    def _on_file(self, body: bytes, name: str, revision: str, file: str) -> None:
        if (repository := self._readable(name)) is None:
            return
        commit = repository.find(revision)
        data = repository.commits[commit].get(file) if commit else None
        if commit is None or data is None:
            return self._refuse(404, "EntryNotFound")
        digest = hashlib.sha256(data).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        start = 0
        status = 200
        if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start, status = int(found[1]), 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = self.hub.cut.get(file)
        if self.command == "GET":
            sent = len(data[start:]) if cut is None else min(cut, len(data) - start)
            self.hub.sent[file] = self.hub.sent.get(file, 0) + sent
        self._bytes(data[start:], status, headers, cut)

    # ---- writing ----

    def _on_create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if not self._is_known():
            return self._refuse(401)
        url = f"http://{self.headers['Host']}/{name}"
        if name in self.hub.repositories:
            return self._answer({"url": url}, 409)
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.repositories[name] = Repository(private)
        self._answer({"url": url})

    def _on_validate(self, body: bytes) -> None:
        self._answer({"errors": [], "warnings": []})

    def _on_preupload(self, body: bytes, name: str) -> None:
        def mode_of(path: str) -> dict[str, Any]:
            mode = "lfs" if path.endswith(LARGE) else "regular"
            return {"path": path, "uploadMode": mode, "shouldIgnore": False}

        self._answer({"files": [mode_of(each["path"]) for each in json.loads(body)["files"]]})

    def _on_batch(self, body: bytes, name: str) -> None:
        def place_of(oid: str, size: int, **_: Any) -> dict[str, Any]:
            href = f"http://{self.headers['Host']}/upload/{oid}"
            return {"oid": oid, "size": size, "actions": {"upload": {"href": href}}}

        objects = [place_of(**each) for each in json.loads(body)["objects"]]
        self._answer({"objects": objects, "transfer": "basic"})

    def _on_upload(self, body: bytes, oid: str) -> None:
        self.hub.large[oid] = body
        self._answer({})

    def _on_commit(self, body: bytes, name: str) -> None:
        if not self._is_known():
            return self._refuse(403)
        files = {}
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
        commit = self.hub.repositories[name].commit(files)
        url = f"http://{self.headers['Host']}/{name}/commit/{commit}"
        self._answer({"commitUrl": url, "commitOid": commit})


if __name__ == "__main__":
    with serving(FakeHub(), int(sys.argv[1]) if len(sys.argv) > 1 else 0) as address:
        print(address, flush=True)
        threading.Event().wait()
