"""Measures how much int4 and int8 bundles add to the weights of checkpoints in each form.

    python -m tools.measure.checkpoint_forms     # docs/models.md sums it up

Tiny Llamas of random weights, 256 and 512 wide, are written in each form by the packers of
tests/export and built; the tables of GGUF's K-quants are random bytes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "export"))

import test_quantised_forms as forms
import tiny_gguf
from tiny_target import save_llama

from spec_export.build import make_bundle
from spec_export.build.make_bundle import BuildOptions
from spec_export.model import target
from spec_runtime.bundle import manifest

PRECISIONS = ("int4", "int8")
GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", *tiny_gguf.SCALES_AT)
WIDER = {  # groups that the tests' narrow matrices do not have
    "gptq 128": (partial(forms.gptq, group=128), forms.GPTQ | {"group_size": 128}),
    "gptq zeros 128": (
        partial(forms.gptq, group=128, is_symmetric=False),
        forms.GPTQ | {"group_size": 128},
    ),
    "awq 64": (partial(forms.awq, group=64), forms.AWQ | {"group_size": 64}),
    "awq 128": (partial(forms.awq, group=128), forms.AWQ | {"group_size": 128}),
    "mlx 64": (partial(forms.mlx, group=64), forms.MLX | {"group_size": 64}),
}


def checkpoints(folder: Path) -> Iterator[tuple[str, Path]]:
    """Writes a model in each form; yields what is read of it, and where it is."""
    plain = save_llama(folder / "plain", hidden_size=256, intermediate_size=512)
    yield "float32", plain
    known = {name: (pack, settings) for name, (pack, settings, _) in forms.FORMS.items()}
    for name, (pack, settings) in (known | WIDER).items():
        made = folder / name.replace(" ", "-")
        forms.quantised(plain, made, pack, settings)
        said = target.weights_said(target.resolve(str(made)))
        assert said is not None
        yield f"{said.partition('(')[2].rstrip(')')}{NOTES.get(name, '')}", made
    for kind in GGUF:
        path = folder / f"{kind}.gguf"
        tiny_gguf.write_gguf(path, kind=kind, sizes=(256, 512))
        yield f"GGUF {kind}", path


NOTES = {
    "gptq zeros": ", zero points",
    "gptq zeros 128": ", zero points",
    "gptq act-order": ", `desc_act`",
    "gptq v2": ", `gptq_v2`",
    "w4a16 zeros": ", zero points",
    "fp8 rows": ", scales of rows",
    "fp8 whole": ", one scale",
    "nf4": ", nf4",
    "nf4 nested": ", nf4, scales quantised too",
}


def added(model: Path, precision: str, out: Path) -> str:
    """Builds a bundle and returns what it adds to the layers' weights, 0 where nothing."""
    built = make_bundle.build(BuildOptions(str(model), precision=precision, out=out, max_length=64))
    facts = manifest.read(built, verify=False).manifest.provenance["rounding"]
    return f"{facts['added_error']:.2%}" if facts["added_error"] else "0"


def main(write: Callable[[str], object] = print) -> None:
    write(f"| weights | {' | '.join(PRECISIONS)} |")
    write("|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, path in checkpoints(Path(folder)):
            cells = [added(path, each, Path(folder) / "bundle") for each in PRECISIONS]
            write(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
