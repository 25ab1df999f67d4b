"""Checks a bundle: compares its graphs with the transformers model, in the ways they are used.

The graphs are compared step by step (see replay.py) and by perplexity. Then come the tokenizer and,
if the bundle has drafters, their accepted length.
"""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from spec_export import reference
from spec_export.build import drafters, make_bundle
from spec_export.build.make_bundle import BuildOptions
from spec_export.build.options import GPU_PRECISIONS
from spec_export.check.replay import TransformersModel, make_scripts, play
from spec_export.graphs import trace
from spec_export.graphs.quantize import dequantised
from spec_export.model import target
from spec_export.model.config import read_config
from spec_export.model.decoder import Backbone
from spec_export.model.modules.fusion import Fusion
from spec_export.report import SILENT, Report
from spec_export.training import folders
from spec_runtime.backends import Backend, open_graph
from spec_runtime.bundle import manifest as bundles
from spec_runtime.errors import UserError
from spec_runtime.files.writing import require_writable
from spec_runtime.loop.kv import open_cache
from spec_runtime.loop.stats import Stats
from spec_runtime.measure import provenance
from spec_runtime.text.prompt import encode_prompt
from spec_runtime.text.tokenizer import Tokenizer

REFERENCE_TOKENS = 128  # generated per prompt to measure accepted length
# Tokenizers differ in where they cut blanks, digits, endings, cases, marks and scripts.
DELICATE_TEXTS = (
    "One:\n\n1. first\n2. second\n\n\n  5  12345 1,000.5",
    " don't I'LL they've\tnaïve CamelCase HTTPServer snake_case x==y; //a\r\n\r\n",
    "{\n    'key': [1, 22, 333],\n}\n\n    return  None   ",
    "über Straße Ünïcödé «quoted» \u2013 3½ m² ☃ 🙂",
    "你好\uff0c世界。日本語のテキスト 한국어 العربية हिन्दी ไทย",
)


@dataclass(frozen=True)
class Bounds:
    """Says how far a graph of some precision may be from the float32 model.

    logits: the largest |difference| in a row over the range of that row. features: likewise, over
    the row's largest |value|, each tap by itself. Both apply to the worst row at fp32 and to the
    mean row in reduced precisions, whose worst row is always the text's first: its outliers spoil
    any quantisation. perplexity: the ratio on the shipped text.
    """

    logits: float
    features: float
    perplexity: float


# fp32 differs only by the order of summation, measured 4e-6. The others differ by rounding: the
# demo's mean rows measure 0.07 (int8) and 0.04 (int4). With positions one off they measure 0.10 or
# more, and 0.5 in trees that ignore their mask. Perplexity says how good a precision is.
BOUNDS = {
    "fp32": Bounds(logits=1e-4, features=1e-3, perplexity=1.001),
    "fp16": Bounds(logits=0.01, features=0.02, perplexity=1.005),
    "bf16": Bounds(logits=0.05, features=0.1, perplexity=1.02),
    "int8": Bounds(logits=0.1, features=0.15, perplexity=1.03),
    "int4": Bounds(logits=0.1, features=0.15, perplexity=1.10),
    "fp8": Bounds(logits=0.1, features=0.15, perplexity=1.05),
}


@dataclass(frozen=True)
class CheckRow:
    """Holds one line of the table.

    A row without a value was skipped, and `note` says why. A row without a bound always passes.
    """

    name: str
    precision: str
    value: float | None
    bound: float | None = None
    note: str = ""

    @property
    def skipped(self) -> bool:
        """True if there is no value."""
        return self.value is None

    @property
    def passed(self) -> bool:
        """True if the value keeps its bound, or if either is missing."""
        if self.value is None:
            return True
        # A NaN compares as false, so it fails.
        return self.value <= (np.inf if self.bound is None else self.bound)


@dataclass(frozen=True)
class CheckResult:
    """Holds all rows, the name of the model, and the bundle if one was given.

    `stores` is True where the bundle can be written.
    """

    model: str
    opened: bundles.Bundle | None
    rows: list[CheckRow]
    stores: bool = False

    @property
    def passed(self) -> bool:
        """True if every row has passed."""
        return all(row.passed for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """Returns the rows with their provenance, as plain JSON."""
        packages = ("torch", "transformers", "onnx")
        manifest = None if self.opened is None else self.opened.manifest
        note = "the package's own texts; not recorded: prompts"
        note += ", bundle" if manifest is None else ""
        return {
            "provenance": provenance.collect(manifest=manifest, packages=packages, note=note),
            "model": self.model,
            "rows": [dataclasses.asdict(row) | {"passed": row.passed} for row in self.rows],
        }

    def store_accepted_lengths(self) -> None:
        """Writes the accepted lengths into the bundle's manifest, unless any check failed."""
        if self.opened is None or not self.stores or not self.passed:
            return
        manifest = bundles.read(self.opened.path, verify=False).manifest  # may have changed since
        measured = {row.name.removeprefix("accepted, "): row.value for row in self.rows}
        drafters = tuple(
            dataclasses.replace(drafter, expected_accepted_length=measured[drafter.name])
            for drafter in manifest.drafters
            if drafter.name in measured
        )
        if len(drafters) == len(manifest.drafters):
            manifest = dataclasses.replace(manifest, drafters=drafters)
            bundles.write_manifest(self.opened.path, manifest)


def run(
    model: str | None,
    bundle: Path | None,
    precisions: Sequence[str],
    report: Report = SILENT,
    *,
    base: str | None = None,
    checkpoints: Sequence[Path] = (),
) -> CheckResult:
    """Checks `bundle`, or a fresh export of `model` in each precision.

    model: a folder, hub id or GGUF file; None means the demo. It must be the one that the bundle
    was built from. precisions: for fresh exports only; fp32 is checked in both forms of the graph.
    base: of an adapter, see `target.resolve`. checkpoints: folders that the bundle's drafters were
    built from, ours or another library's; what the target's graph runs of one, the fusion of taps,
    is compared with its weights.
    Measures the drafters' accepted length on the reference prompts too. Raises UserError for a
    damaged bundle, or for one of another model.
    """
    opened = None if bundle is None else bundles.read(bundle)
    for each in checkpoints:
        folders.require_drafter(each)
    source = target.resolve(model, report, base)
    if opened is not None:
        _require_origin(opened, source)
    with report.status("loading the reference model"):
        hf_model, hf_tokenizer = target.load(source)
        model_truth = TransformersModel(hf_model)
        fusions = _fusions(checkpoints, source, hf_model, report)
    rows: list[CheckRow] = []
    stores = opened is not None and _is_writable(opened, report)
    if opened is not None:
        _require_same_dims(opened, hf_model.config)
        _require_drafters(opened, fusions)
        rows = _check_bundle(opened, source, model_truth, hf_tokenizer, fusions, report)
    else:
        with tempfile.TemporaryDirectory(prefix="specsplit-check-") as folder:
            for precision in dict.fromkeys(precisions):
                for form in ("slots", "contiguous") if precision == "fp32" else ("slots",):
                    made = Path(folder) / f"{precision}-{form}"
                    options = BuildOptions(
                        model, precision=precision, out=made, form=form, base=base,
                        drafter_checkpoints=checkpoints, lanes=1,
                        device="cuda" if precision in GPU_PRECISIONS else "cpu",
                    )  # fmt: skip
                    make_bundle.build(options, report)
                    fresh = bundles.read(made, verify=False)
                    rows += _check_bundle(fresh, source, model_truth, hf_tokenizer, fusions, report)
    return CheckResult(source.name, opened, rows, stores)


def _require_origin(opened: bundles.Bundle, source: target.Source) -> None:
    """Raises UserError unless the bundle was built from this model."""
    origin = opened.manifest.provenance.get("model", opened.manifest.name)
    if origin != source.name:
        raise UserError(
            f"got a bundle of {origin} to compare with {source.name}: name the model it was built "
            "from with --model"
        )


def _fusions(
    checkpoints: Sequence[Path], source: target.Source, hf_model: Any, report: Report
) -> dict[str, Fusion | None]:
    """Returns what each drafter in these folders makes of taps, None if it makes nothing."""
    found: dict[str, Fusion | None] = {}
    if not checkpoints:
        return found
    backbone = Backbone.from_transformers(hf_model)
    for each in checkpoints:
        saved = drafters.read(each, source, report, is_measured=False)
        module = drafters.load_module(saved, backbone.config, target.ends(backbone))
        found[f"{bundles.FUSED}{saved.name}"] = module.fusion
    return found


def _require_drafters(opened: bundles.Bundle, fusions: Mapping[str, Fusion | None]) -> None:
    """Raises UserError unless the bundle has the drafters whose folders were given."""
    names = [drafter.name for drafter in opened.manifest.drafters]
    for name in fusions:
        given = name.removeprefix(bundles.FUSED)
        if given not in names:
            raise UserError(
                f"got a folder of drafter {given}, expected one of the bundle's: "
                f"{', '.join(names) or 'it has none'}"
            )


def _is_writable(opened: bundles.Bundle, report: Report) -> bool:
    """Returns whether accepted lengths can be stored in the bundle; warns if they cannot."""
    if not opened.manifest.drafters:
        return False
    try:
        require_writable(opened.path / bundles.MANIFEST)
    except (OSError, UserError) as error:
        report.line(f"accepted lengths will not be stored in the bundle: {error}")
        return False
    return True


def _require_same_dims(opened: bundles.Bundle, raw: Any) -> None:
    """Raises UserError unless a model of this transformers config has the bundle's sizes."""
    info = opened.manifest.target
    config = read_config(raw, (), min(info.max_length, raw.max_position_embeddings))
    for field in dataclasses.fields(info.dims):
        got, wanted = getattr(config, field.name), getattr(info.dims, field.name)
        if got != wanted:
            raise UserError(
                f"got a model with {field.name} {got}, expected {wanted} as in the bundle: name "
                "the model it was built from with --model"
            )


def _check_bundle(
    opened: bundles.Bundle,
    source: target.Source,
    truth: TransformersModel,
    hf_tokenizer: Any,
    fusions: Mapping[str, Fusion | None],
    report: Report,
) -> list[CheckRow]:
    """Returns all rows of one bundle; one row says why if its graphs cannot be compared."""
    info, graph = opened.manifest.target, opened.manifest.graphs["target"]
    name = info.precision if graph.form == "slots" else f"{info.precision} {graph.form}"
    tokenizer = Tokenizer(opened)
    rows = [_tokenizer_row(name, tokenizer, hf_tokenizer), *_rounding_rows(name, opened, source)]
    if info.rope.get("factors") == "long":
        why = "transformers takes the short rotary factors for short sequences, the graph the long"
        return [*rows, CheckRow("logits", name, None, note=why)]
    try:
        backend = _open_target(opened)
    except UserError as error:
        return [*rows, CheckRow("logits", name, None, note=str(error))]
    text = tokenizer.encode(reference.prose(), special_tokens=True)
    run_by_target = [
        each for each in bundles.feature_widths(graph) if each.startswith(bundles.FUSED)
    ]
    known = {each: fusion for each in run_by_target if (fusion := fusions.get(each)) is not None}
    truth = TransformersModel(truth.model, info.taps, known)
    rows += _graph_rows(name, opened, backend, truth, text, report)
    why = "not compared: its drafter's weights are in --drafter-checkpoint"
    rows += [CheckRow(each, name, None, note=why) for each in run_by_target if each not in known]
    del backend  # frees its weights and buffers before the engine loads its own
    if info.precision in GPU_PRECISIONS:
        return [*rows, CheckRow("accepted", name, None, note="fp8 bundles run on GPUs only")]
    return [*rows, *_accepted_length_rows(name, opened, report)]


def _open_target(opened: bundles.Bundle) -> Backend:
    """Opens the target's graph; that of a bundle in fp8 with its weights as float16."""
    manifest = opened.manifest
    graph, info = manifest.graphs["target"], manifest.target
    if info.precision not in GPU_PRECISIONS:
        return open_graph(opened, graph, info.max_length + info.scratch)
    narrow = dataclasses.replace(manifest, target=dataclasses.replace(info, precision="fp16"))
    with tempfile.TemporaryDirectory(prefix="specsplit-check-") as folder:
        trace.save(dequantised(ir.load(opened.path / graph.file)), Path(folder) / graph.file)
        there = bundles.Bundle(Path(folder), narrow)
        return open_graph(there, graph, info.max_length + info.scratch)


def _graph_rows(
    name: str,
    opened: bundles.Bundle,
    backend: Backend,
    truth: TransformersModel,
    text: Sequence[int],
    report: Report,
) -> list[CheckRow]:
    """Plays all scripts on this text and returns a row for each, and those over all of them."""
    info = opened.manifest.target
    bounds = BOUNDS[info.precision]
    summed_up = np.max if info.precision == "fp32" else np.mean
    rows, results = [], []
    for script in make_scripts(text, info.max_length):
        appends = getattr(backend, "append_mover", None) is not None
        if script.is_permuted and (appends or backend.form != "slots"):
            continue
        with report.status(f"{name}: {script.name}"):
            cache = open_cache(backend.form, backend.capacity, backend)
            result = play(script, backend, cache, info, truth)
        results.append(result)
        rows.append(CheckRow(script.name, name, float(summed_up(result.logits)), bounds.logits))
    which = f"features, taps {', '.join(map(str, info.taps))}" if info.taps else "features"
    errors = [error for result in results for error in result.features]
    rows.append(CheckRow(which, name, float(summed_up(errors)), bounds.features))
    for fused in truth.fusions:
        each = [error for result in results for error in result.fused[fused]]
        rows.append(CheckRow(fused, name, float(summed_up(each)), bounds.features))
    other = sum(result.num_other_argmax for result in results)
    share = other / len(errors)
    rows.append(CheckRow("other argmax", name, share, note=f"{other} of {len(errors)} rows"))
    nats = float(np.mean([each for result in results for each in result.divergence]))
    rows.append(CheckRow("divergence", name, nats, note="nats a row, mean"))
    ours, theirs = (
        float(np.exp(np.mean(nats))) for nats in (results[-1].nats, results[-1].reference_nats)
    )
    note = f"{ours:.3f} to {theirs:.3f}, {len(results[-1].nats)} tokens"
    rows.append(CheckRow("perplexity ratio", name, ours / theirs, bounds.perplexity, note))
    return rows


def _tokenizer_row(name: str, tokenizer: Tokenizer, hf_tokenizer: Any) -> CheckRow:
    """Counts the prompts and texts whose ids differ from those by the model's own files, never the
    bundle's."""
    prompts = reference.prompts()
    wrong = sum(
        encode_prompt(tokenizer, prompt, raw=False, system=None)
        != reference.encode(hf_tokenizer, prompt)
        for prompt in prompts
    )
    wrong += sum(
        tokenizer.encode(text, special_tokens=True)
        != hf_tokenizer.encode(text, add_special_tokens=True)
        for text in DELICATE_TEXTS
    )
    note = f"of {len(prompts)} prompts and {len(DELICATE_TEXTS)} texts"
    return CheckRow("encoded otherwise", name, float(wrong), 0.0, note)


def _rounding_rows(name: str, opened: bundles.Bundle, source: target.Source) -> list[CheckRow]:
    """Says how much quantising has added to the weights, as the build measured it; 0 where the
    bundle holds the checkpoint's own."""
    facts = opened.manifest.provenance.get("rounding")
    if not facts:
        return []
    read = target.weights_said(source)
    note = f"{facts['exact']} of {facts['matrices']} matrices as they are"
    note += f"; {read}" if read else ""
    return [CheckRow("added to weights", name, float(facts["added_error"]), note=note)]


def _accepted_length_rows(name: str, opened: bundles.Bundle, report: Report) -> list[CheckRow]:
    """Measures the accepted length of each drafter on the reference prompts."""
    from spec_runtime.load import load

    expected = {each.name: each.expected_accepted_length for each in opened.manifest.drafters}
    if not expected:
        return []
    plain, rows = load(opened.path, "none", verify=False, profile=False), []
    encoded = [encode_prompt(plain.tokenizer, each, False, None) for each in reference.prompts()]
    short = [ids for ids in encoded if len(ids) < opened.manifest.target.max_length]
    for drafter, before in expected.items():
        engine = plain.with_drafter(drafter)
        with report.status(f"{name}: accepted length of {drafter}"):
            stats = Stats.total(
                engine.generate(ids, max_new_tokens=REFERENCE_TOKENS, reuse=False).stats
                for ids in short
            )
        note = f"{stats.committed_tokens} tokens, {len(short)} of {len(encoded)} prompts"
        if before is not None:
            note += f"; the manifest had {before:.2f}"
        value = stats.accepted_length if stats.steps else None
        rows.append(CheckRow(f"accepted, {drafter}", name, value, note=note))
    return rows
