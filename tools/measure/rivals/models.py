"""Writes the target in the form that each rival reads, from the same weights, once.

`TargetFiles` has one method for each form; what it returns is there already if it was made
before. The weights are those of the target as it stands: a GGUF file's are dequantised.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spec_export.distill.engines import write_gguf
from spec_export.model import target
from tools.measure.rivals.environments import GENAI, OPENVINO, RivalError, run


class TargetFiles:
    """Holds a target's forms below `work`."""

    def __init__(self, source: target.Source, work: Path) -> None:
        self.source, self.work = source, work
        self._folder = work / "models" / f"{source.name}-{target.fingerprint(source)[:12]}"

    def hugging_face(self) -> Path:
        """Returns a folder with float32 weights that transformers of both versions read."""
        out = self._folder / "float32"
        if not out.is_dir():
            with self._made(out) as folder:
                target.save(*target.load(self.source), folder)
                _name_rope_theta(folder / "config.json")
        return out

    def gguf(self, kind: str) -> Path:
        """Returns a GGUF file with its matrices as F32, F16 or Q8_0, or the target's own for Q4_1.

        Raises RivalError if the target is no GGUF file: only its tensors' names are copied.
        """
        if self.source.gguf_file is None:
            raise RivalError(f"got target {self.source.name}, expected a GGUF file to make GGUF of")
        own = self.source.path / self.source.gguf_file
        if kind == "Q4_1":
            # What is there is as close as Q4_1 gets: quantising again would only round once more.
            if not _is_q4_1(own):
                raise RivalError(f"got {own.name}, expected a file in Q4_1 for int4")
            return own
        out = self._folder / f"{kind}.gguf"
        if not out.is_file():
            with self._made(out) as file:
                write_gguf(own, file, kind)
        return out

    def genai(self, precision: str) -> Path:
        """Returns onnxruntime-genai's CPU model, from its own builder.

        The builder runs under this interpreter, which has torch and transformers.
        """
        out = self._folder / f"genai-{precision}"
        if not out.is_dir():
            find = "import onnxruntime_genai as og; print(og.__path__[0])"
            python = str(GENAI.program(self.work))
            found = subprocess.run([python, "-c", find], capture_output=True, text=True)
            if found.returncode:
                raise RivalError(f"onnxruntime-genai cannot be imported: {found.stderr[-200:]}")
            builder = Path(found.stdout.strip()) / "models" / "builder.py"
            with self._made(out) as folder, tempfile.TemporaryDirectory() as cache:
                command = [sys.executable, builder, "-i", self.hugging_face(), "-o", folder]
                command += ["-p", precision, "-e", "cpu", "-c", cache]
                run([str(part) for part in command])
        return out

    def openvino(self, precision: str) -> Path:
        """Returns OpenVINO's graph with weights that its own compressor, NNCF, made int8 or int4.

        Raises RivalError if the target is no GGUF file, which its reader takes.
        """
        out = self._folder / f"openvino-{precision}"
        if not out.is_dir():
            command = [OPENVINO.program(self.work), Path(__file__).parent / "compress_openvino.py"]
            source = self.gguf("F16")
            with self._made(out) as folder:
                run([str(part) for part in (*command, source, precision, folder)])
        return out

    @contextmanager
    def _made(self, out: Path) -> Iterator[Path]:
        """Gives a place to write to, which becomes `out` only if nothing fails."""
        print(f"writing {out.name}", file=sys.stderr, flush=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            place = Path(scratch) / out.name
            yield place
            shutil.move(place, out)


def _name_rope_theta(file: Path) -> None:
    """Adds the rotary base where transformers 4 looks for it, which would take 10,000 without."""
    config = json.loads(file.read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _is_q4_1(file: Path) -> bool:
    """Says whether most matrices of a GGUF file are Q4_1."""
    import gguf

    matrices = [each for each in gguf.GGUFReader(file).tensors if len(each.shape) > 1]
    kept = sum(each.tensor_type == gguf.GGMLQuantizationType.Q4_1 for each in matrices)
    return 2 * kept > len(matrices)
