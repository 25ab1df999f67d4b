"""Runs one contender's worker in a process of its own, which sleeps while it is not asked.

The lines that go to and fro are described in workers/protocol.py.
"""

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.measure.rivals.environments import RivalError

OPEN_SECONDS = 600  # to load a model, which some engines compile first
JOB_SECONDS = 900


class Worker:
    """Starts a worker and waits until it has opened its model; `version` is its engine's.

    Raises RivalError, here and in `ask`, if the worker ends, stays silent or says
    something else than the protocol. Its standard error goes to the file `log`.
    """

    def __init__(self, command: Sequence[str], settings: Mapping[str, Any], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        threads = str(settings["threads"])
        limits = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        # What is on this process's path belongs to another environment.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment.setdefault("ORT_DISABLE_TELEMETRY", "1")
        with open(log, "w", encoding="utf-8") as errors:
            try:
                self._process = subprocess.Popen(
                    [*command, json.dumps(settings)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env={**environment, **dict.fromkeys(limits, threads)},
                )
            except OSError as error:
                raise RivalError(f"{command[0]} cannot be run: {error.strerror}") from None
        try:
            self.version = str(self._reply(OPEN_SECONDS).get("version"))
        except RivalError:
            self.close()
            raise

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the worker's reply to a job."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RivalError(f"the worker ended: {self._last_words()}") from None
        return self._reply(JOB_SECONDS)

    def peak_rss(self) -> int:
        """Returns the process's peak resident size in bytes; 0 where the system does not say."""
        try:
            lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        except OSError:
            return 0
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

    def close(self) -> None:
        """Ends the worker: it stops at the end of its input, and is killed if it does not."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _reply(self, seconds: float) -> dict[str, Any]:
        line = self._line(seconds)
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise RivalError(f"got the line {line[:80]!r}, expected a JSON object")
        if "error" in reply:
            text = str(reply["error"]).strip()
            raise RivalError(" ".join(text.split())[:300])
        return reply

    def _line(self, seconds: float) -> bytes:
        """Returns the worker's next line."""
        assert self._process.stdout is not None
        begun, late = time.monotonic(), threading.Timer(seconds, self._process.kill)
        late.start()
        line = self._process.stdout.readline()
        late.cancel()
        if line.endswith(b"\n"):
            return line[:-1]
        if time.monotonic() - begun >= seconds:
            raise RivalError(f"no answer within {seconds:.0f} s")
        raise RivalError(f"the worker ended: {self._last_words()}")

    def _last_words(self) -> str:
        """Returns the last line that the worker wrote to standard error."""
        code = self._process.wait()
        text = self._log.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f"code {code}, {lines[-1][:300] if lines else 'it says nothing'}"
