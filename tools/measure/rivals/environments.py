"""Makes the rivals' environments: a virtual environment for each, and a folder of npm packages.

The versions of all rivals stand here and nowhere else. What an environment was made from is kept in
a stamp beside it, so that it is made once and made anew when a version changes.
"""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

STAMP = "rival.stamp"
TORCH = "torch==2.13.0"


class RivalError(ValueError):
    """A rival that cannot be installed, built or run here; the message is one line."""


@dataclass(frozen=True)
class Environment:
    """What a rival needs installed: `steps` are the requirements of one installation each.

    Torch comes first where it is needed, on its own, so that pip takes the build that this machine
    is set up for (on one with an index of CPU builds, that) and keeps it in the steps that follow.
    `is_node` makes the packages npm's.
    """

    name: str
    steps: tuple[tuple[str, ...], ...]
    is_node: bool = False

    def program(self, work: Path) -> Path:
        """Returns the interpreter that runs the rival's worker, from whatever folder."""
        if self.is_node:
            return Path(shutil.which("node") or "node")
        scripts = "Scripts/python.exe" if sys.platform == "win32" else "bin/python"
        return self.folder(work).absolute() / scripts

    @property
    def version(self) -> str:
        """Returns the version of what the environment is for, the first of the last step."""
        main = next(word for word in self.steps[-1] if word != TORCH)
        return re.split("==|@", main)[1]

    def folder(self, work: Path) -> Path:
        return work / "environments" / self.name

    def make(self, work: Path) -> None:
        """Installs what is missing. Raises RivalError with the installer's last line."""
        folder = self.folder(work)
        wanted = "\n".join(" ".join(step) for step in self.steps)
        stamp = folder / STAMP
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
            return
        print(f"installing {self.name}: {wanted.splitlines()[-1]}", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if not self.is_node:
            run([sys.executable, "-m", "venv", str(folder)])
        for step in self.steps:
            run(self._install(work, step), cwd=folder)
        stamp.write_text(wanted, encoding="utf-8")

    def _install(self, work: Path, step: tuple[str, ...]) -> list[str]:
        if self.is_node:
            if shutil.which("npm") is None or shutil.which("node") is None:
                raise RivalError("Node and npm are not installed")
            return ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *step]
        pip = [str(self.program(work)), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        return [*pip, *step]


TRANSFORMERS = Environment("transformers", ((TORCH,), (TORCH, "transformers==5.23.0")))
GENAI = Environment("genai", (("onnxruntime-genai==0.18.0", "onnxruntime==1.32.0"),))
OPENVINO = Environment("openvino", (("openvino-genai==2026.4.1.0", "nncf==3.4.0"),))
LLAMA_CPP = Environment("llama.cpp", (("node-llama-cpp@3.22.1",),), is_node=True)


def run(command: list[str], cwd: Path | None = None) -> None:
    """Runs a command whose output is shown only by its last line, if it fails, as a RivalError."""
    try:
        done = subprocess.run(
            command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        raise RivalError(f"{command[0]} cannot be run: {error}") from None
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        last = lines[-1] if lines else "it says nothing"
        raise RivalError(f"{Path(command[0]).name} ended with code {done.returncode}: {last}")
