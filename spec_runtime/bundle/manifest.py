"""Reads, writes and checks bundles: the manifest's dataclasses and the files that it names.

A bundle is a folder with `manifest.json`, graphs, a tokenizer and provenance. Every mistake that a
user can make with a bundle ends here as a `BundleError` of one line.
"""

import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from annotated_types import Ge, Le, MaxLen, MinLen

from spec_runtime.bundle.drafter_entry import Calibration, KnownConfig, KnownTrees, check_known
from spec_runtime.errors import UserError
from spec_runtime.files.installed import how_to_build
from spec_runtime.files.machine import require_utf8
from spec_runtime.files.mapping import Must, added_later, brief, from_mapping, parse_json, to_json
from spec_runtime.files.writing import sha256, temporaries, write_atomically

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
FORMS = ("slots", "contiguous", "stateless")
ATTENTIONS = ("bias", "full_buffer", "append")  # see Graph
DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "int4",
    "uint4",
    "bool",
)
POSITION_CONVENTIONS = ("absolute",)
FLAVOURS = ("tensorrt_rtx",)  # see Plan
MAX_MANIFEST_BYTES = 64 << 20
LARGEST_SIZE = 2**31 - 1  # of anything that is counted: tokens, heads, an axis
MAX_NAME = 200  # characters
MAX_AXES = 8


class BundleError(UserError):
    """Says why a bundle cannot be used: what was found, what was expected, what to do."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BundleError(message)


def _is_name(name: str) -> bool:
    """Says whether a terminal prints a name as it is, and on less than a screen."""
    return name.isprintable() and 1 <= len(name) <= MAX_NAME


def _is_inside(path: str) -> bool:
    """Says whether a path stays in its folder, and is written in one way only: "a/b", not "a//b".
    A bundle may come from anywhere."""
    pure = PurePosixPath(path)
    return not pure.is_absolute() and ".." not in pure.parts and str(pure) == path != "."


def _one_of(names: tuple[str, ...]) -> Must:
    return Must(names.__contains__, f"one of {', '.join(names)}")


Name = Annotated[str, Must(_is_name, f"1 to {MAX_NAME} printable characters")]
FilePath = Annotated[Name, Must(_is_inside, "a path inside the bundle")]
Sha256 = Annotated[str, Must(re.compile("[0-9a-f]{64}").fullmatch, "64 hexadecimal digits")]
Size = Annotated[int, Ge(1), Le(LARGEST_SIZE)]
Index = Annotated[int, Ge(0), Le(LARGEST_SIZE)]


def _listed(names: Iterable[str]) -> str:
    """Returns names for a message: "N, A", without those that a terminal would not print."""
    return ", ".join(name for name in names if name.isprintable())[:80] or "no axes"


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph. A string in `shape` names a free axis: [1, "N"]."""

    name: Name
    dtype: Annotated[str, _one_of(DTYPES)]
    shape: Annotated[tuple[Index | Name, ...], MaxLen(MAX_AXES)]


def _are_rising(sizes: tuple[int, ...]) -> bool:
    return len(sizes) == 3 and 1 <= sizes[0] <= sizes[1] <= sizes[2] <= LARGEST_SIZE


@dataclass(frozen=True)
class Plan:
    """A TensorRT engine that was made from a graph ahead of time.

    It was made by one version of one flavour of TensorRT for GPUs of one compute capability
    ("8.9"). `key` is a hash of all that shaped it. `profiles`, from narrow to wide, give each free
    axis of the graph's inputs its least, likeliest and largest size: {"N": (1, 8, 64)}.
    """

    file: Name
    flavour: Annotated[str, _one_of(FLAVOURS)]
    version: Annotated[str, Must(re.compile(r"\d+(\.\d+)+").fullmatch, "numbers, as 11.4.0")]
    compute_capability: Annotated[str, Must(re.compile(r"\d+\.\d").fullmatch, "one as 8.9")]
    key: Sha256
    profiles: Annotated[
        tuple[
            dict[str, Annotated[tuple[int, ...], Must(_are_rising, "three sizes, rising from 1")]],
            ...,
        ],
        MinLen(1),
    ]


@dataclass(frozen=True)
class Graph:
    """One ONNX file: its path in the bundle, its inputs and outputs, and the plans made from it.

    `form` says how it keeps key/value rows: "slots" writes each row to any slot, "contiguous" keeps
    committed rows in order, "stateless" has none. `attention` says how rows read the cache in the
    slots form, by a mask in all: "bias" up to the highest row in use, "full_buffer" whole buffers;
    "append" as "bias", and writes each step's rows behind that row instead of to any slots.
    """

    file: Name
    form: Annotated[str, _one_of(FORMS)]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    plans: tuple[Plan, ...] = added_later(())
    attention: Annotated[str, _one_of(ATTENTIONS)] = added_later(ATTENTIONS[0])

    def __post_init__(self) -> None:
        for kind, specs in (("inputs", self.inputs), ("outputs", self.outputs)):
            _require(
                len({spec.name for spec in specs}) == len(specs),
                f"graph {self.file}: got {kind} of equal names, expected each name once",
            )
        _require(
            self.attention == ATTENTIONS[0] or self.form == "slots",
            f"graph {self.file}: got attention {self.attention} with the {self.form} form, "
            "expected slots",
        )
        _require(
            not self.plans or self.form != "slots",
            f"graph {self.file}: got plans with the slots form, expected contiguous or stateless",
        )
        for plan in self.plans:
            for profile in plan.profiles:
                _require(
                    set(profile) == set(self.free_axes),
                    f"plan {plan.file}: got a profile of {_listed(profile)}, "
                    f"expected {', '.join(self.free_axes) or 'none'}",
                )

    def has_input(self, name: str) -> bool:
        return any(spec.name == name for spec in self.inputs)

    @property
    def free_axes(self) -> tuple[str, ...]:
        """Returns the names of the inputs' free axes, each once."""
        axes = (axis for spec in self.inputs for axis in spec.shape if isinstance(axis, str))
        return tuple(dict.fromkeys(axes))


@dataclass(frozen=True)
class Dims:
    """The target's sizes. `num_heads` query heads share `num_kv_heads` key/value heads."""

    vocab_size: Size
    hidden_size: Size
    num_layers: Size
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size

    def __post_init__(self) -> None:
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"target.dims: got {self.num_heads} heads for {self.num_kv_heads} key/value heads, "
            "expected a multiple",
        )


@dataclass(frozen=True)
class TargetInfo:
    """The target. `max_length` is the context in tokens; caches hold `scratch` slots more."""

    family: Name
    dims: Dims
    precision: Name
    max_length: Size
    scratch: Size
    rope: dict[str, Any]
    taps: tuple[Index, ...]
    position_convention: Annotated[str, _one_of(POSITION_CONVENTIONS)]
    target_modified: bool


def _is_plain(name: str) -> bool:
    return not set(name) & set("/\\") and not name.startswith(".")


@dataclass(frozen=True)
class DrafterInfo:
    """One trained drafter: its graphs by role, and what it was measured to be worth.

    spec-export calibrate writes `calibration`, see drafter_entry.Calibration. The runtime reads of
    the `config`:

    - "features": the target's outputs, see FEATURES, that are side by side what the drafter reads
      as features. Older bundles have "taps" instead, layers that are read with "features";

    and of that of a drafter that guesses in one pass:

    - "num_guesses": rows of its output `guess_ids`; "num_masks", mask rows of a run;
      "mask_token_base" V, where mask k has the input id V + k - 1.

    If its graph has the output `pair_log_probs` f32[K-1, C, C], entry [k, p, c] is the
    log-probability of candidate c of guess k + 1 after candidate p of guess k. Candidates keep the
    order and the ids of `guess_ids`.
    """

    name: Annotated[Name, Must(_is_plain, "a name without / and \\")]
    config: dict[str, Any]
    graphs: dict[str, Graph]
    draft_token_ids: str | None
    calibration: dict[str, Any] | None
    trees: dict[str, Any]
    expected_accepted_length: float | None

    def __post_init__(self) -> None:
        where = f"drafter {self.name!r}"
        check_known(KnownConfig, self.config, f"{where}: config", BundleError)
        check_known(KnownTrees, self.trees, f"{where}: trees", BundleError)
        if self.calibration is not None:
            from_mapping(Calibration, self.calibration, f"{where}: calibration", BundleError)


def require_config(
    info: DrafterInfo | None, keys: tuple[str, ...], graphs: tuple[str, ...]
) -> DrafterInfo:
    """Returns the drafter's entry if it has these config keys and exactly these graphs.

    Raises BundleError otherwise.
    """
    assert info is not None, "a trained drafter needs its manifest entry"
    _require(
        set(keys) <= set(info.config) and set(graphs) == set(info.graphs),
        f"drafter {info.name!r}: got config keys {sorted(info.config)!r:.200} and graphs "
        f"{sorted(info.graphs)!r:.200}, expected {', '.join(keys) or 'no key'} and "
        f"{', '.join(graphs)}; build the bundle again",
    )
    return info


def _are_special_ids(ids: dict[str, Any]) -> bool:
    return (
        set(ids) == {"bos", "eos", "pad"}
        and isinstance(ids["eos"], list)
        and all(type(i) is int and 0 <= i <= LARGEST_SIZE for i in ids["eos"])
        and all(ids[key] is None or type(ids[key]) is int for key in ("bos", "pad"))
    )


@dataclass(frozen=True)
class TokenizerInfo:
    """The tokenizer. `special_ids` is {"bos": id or None, "eos": [ids], "pad": id or None}.

    `special_tokens` are the texts that a chat template knows by name: {"eos_token": "<|im_end|>"}.
    A bundle that was built before they were kept has None. `response_template` is what the model
    ships under this name, if it does, see dialogue/response_template.py.
    """

    file: str
    sha256: str
    vocab_size: Size
    special_ids: Annotated[
        dict[str, Any],
        Must(_are_special_ids, "bos, eos (a list) and pad, all token ids, or null for bos and pad"),
    ]
    chat_template: str | None
    special_tokens: dict[str, str] | None = added_later(None)
    response_template: dict[str, Any] | None = added_later(None)


@dataclass(frozen=True)
class Manifest:
    """Everything about a bundle. `files` maps each file but the manifest to its sha256."""

    schema_version: int
    name: Name
    target: TargetInfo
    graphs: dict[Name, Graph]
    drafters: tuple[DrafterInfo, ...]
    tokenizer: TokenizerInfo
    provenance: dict[str, Any]
    files: dict[FilePath, Sha256]

    def __post_init__(self) -> None:
        _require(
            "target" in self.graphs,
            f"graphs: got {brief(', '.join(self.graphs) or 'none')}, expected one named target",
        )
        _require(
            self.graphs["target"].form != "stateless",
            "graphs: got a target of the stateless form, expected slots or contiguous",
        )
        names = [drafter.name for drafter in self.drafters]
        _require(
            len(set(names)) == len(names), f"drafters: got {names!r:.200}, expected each name once"
        )

    def drafter(self, name: str) -> DrafterInfo:
        """Returns the drafter called `name`. Raises BundleError, which lists those there are."""
        for drafter in self.drafters:
            if drafter.name == name:
                return drafter
        known = ", ".join(drafter.name for drafter in self.drafters) or "none"
        raise BundleError(
            f"got drafter {name!r:.80}, expected one this bundle holds: {brief(known)}"
        )

    def entry(self, drafter: str) -> DrafterInfo | None:
        """Returns the entry of the drafter that an engine names so, "medusa+prompt_lookup" for
        instance; None for one that every bundle has."""
        name = drafter.partition("+")[0]
        return next((info for info in self.drafters if info.name == name), None)

    def feature_outputs(self, drafter: DrafterInfo) -> tuple[str, ...]:
        """Names the outputs of the target's graph that make up what a drafter reads as features.

        Raises BundleError if the target has no such output.
        """
        taps = drafter.config.get("taps", self.target.taps)
        names = tuple(drafter.config.get("features", feature_names(taps)))
        known = [spec.name for spec in self.graphs["target"].outputs if is_feature(spec.name)]
        unknown = [name for name in names if name not in known]
        _require(
            not unknown,
            f"drafter {drafter.name!r}: got features {_listed(unknown)}, expected some of "
            f"{_listed(known)}; build the bundle again",
        )
        return names


@dataclass(frozen=True)
class Bundle:
    """A manifest and the folder that its paths are relative to."""

    path: Path
    manifest: Manifest

    def file(self, relative: str) -> Path:
        """Returns where a file named in the manifest is on disk."""
        return self.path / relative


# Outputs f32[N, F] of a target's graph that drafters read: the final feature, the state that enters
# layer 3 ("taps.3"), and what a drafter's own weights make of such states ("fused.eagle3").
FEATURES, TAPS, FUSED = "features", "taps.", "fused."
# Graphs built for a device have banks: buffers of rows that stay there, see
# spec_export/graphs/banks.py. Their names begin with BANK. Further inputs say which rows a run
# writes, and which features and states it reads.
BANK = "bank."
BANK_ROWS, FEATURE_ROWS, STATE_ROWS = "bank_rows", "feature_rows", "state_rows"
SAMPLING = "sampling"  # names the graph that finds the largest logits, on a device
# The most conversations that a pass takes together, where a bundle has graphs for that, and the
# inputs of such a graph that say how many rows each has, and how many rows of logits, see
# spec_export/graphs/lanes.py.
MAX_LANES = 8
LANE_ROWS, LANE_LOGITS = "lane_rows", "lane_logits"
# What stands before the number of lanes in the name of a graph, and before a lane's own in others.
LANES, LANE = "-lanes", ".lane"


def is_feature(output: str) -> bool:
    """Says whether drafters read this output of a target's graph."""
    return output == FEATURES or output.startswith((TAPS, FUSED))


def feature_names(taps: Iterable[int]) -> tuple[str, ...]:
    """Names the outputs of a target's graph with the final feature and these taps."""
    return (FEATURES, *(f"{TAPS}{tap}" for tap in taps))


def feature_widths(target: Graph) -> dict[str, int]:
    """Returns the width of each output of a target's graph that drafters read."""
    widths = {spec.name: spec.shape[-1] for spec in target.outputs if is_feature(spec.name)}
    return {name: width for name, width in widths.items() if isinstance(width, int)}


def lanes_name(num_lanes: int, graph: str = "target") -> str:
    """Names the graph for this many lanes among the manifest's graphs: of the target, or of a
    drafter's graph (see `draft_name`)."""
    return f"{graph}{LANES}{num_lanes}"


def draft_name(drafter: str, role: str) -> str:
    """Returns the drafter's part in the names of its graphs for several lanes."""
    return f"{drafter}-{role}"


@cache
def lane_name(name: str, lane: int) -> str:
    """Names what a lane has in place of an input, output or free axis of the graph for one."""
    return f"{name}{LANE}{lane}"


def written_name(buffer: str) -> str:
    """Names the output that is a buffer after a step, which may be a lane's.

    >>> written_name("kv.0.k"), written_name("kv.0.k.lane1")
    ('kv.0.k.out', 'kv.0.k.out.lane1')
    """
    name, dot, lane = buffer.partition(LANE)
    return f"{name}.out{dot}{lane}"


def read(path: str | Path, verify: bool = True) -> Bundle:
    """Reads the bundle in the folder `path`; with `verify` checks every file's sha256.

    Raises BundleError if the folder, the manifest or a file is missing, truncated or altered, if
    the manifest is of a newer schema, or if a key is unknown or missing.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    _check_files(folder, manifest, verify)
    return Bundle(folder, manifest)


def read_manifest(folder: Path) -> Manifest:
    """Reads only the manifest: the files that it names need not be there yet, but none of them
    lies outside of the folder.

    Raises BundleError as `read` does.
    """
    manifest_file = folder / MANIFEST
    if not manifest_file.is_file():
        raise BundleError(
            f"{folder}: no {MANIFEST} here, expected a bundle folder; make one with "
            f"{how_to_build()}"
        )
    require_utf8(folder)
    try:
        size = manifest_file.stat().st_size
        if size > MAX_MANIFEST_BYTES:
            raise UserError(f"it has {size} bytes, expected at most {MAX_MANIFEST_BYTES}")
        data = parse_json(manifest_file.read_bytes())
    except (OSError, ValueError) as error:  # ValueError: JSON and UTF-8 errors alike
        raise BundleError(f"{manifest_file}: not readable ({error}); build it again") from None
    _require(
        isinstance(data, dict),
        f"{manifest_file}: got {type(data).__name__}, expected an object; build the bundle again",
    )
    # The version comes first: keys of a newer schema would only look like mistakes.
    version = data.get("schema_version")
    _require(
        type(version) is int and version >= 1,
        f"{manifest_file}: got schema_version {version!r:.40}, expected {SCHEMA_VERSION}; "
        "build the bundle again",
    )
    _require(
        version <= SCHEMA_VERSION,
        f"{manifest_file}: got schema_version {version!s:.40}, expected at most {SCHEMA_VERSION}; "
        "upgrade specsplit or build the bundle again",
    )
    try:
        manifest = from_mapping(Manifest, data, "manifest", BundleError)
    except BundleError as error:
        raise BundleError(f"{manifest_file}: {error}") from None
    _check_names(folder, manifest)
    return manifest


def _check_names(folder: Path, manifest: Manifest) -> None:
    """Checks that the files which the manifest names are hashed, the tokenizer as it says, and that
    a folder can hold them all, beside the manifest."""
    for name in manifest.files:
        folders = {str(parent) for parent in PurePosixPath(name).parents}
        for other in (MANIFEST, *(folders & manifest.files.keys())):
            _require(
                name != other and other not in folders,
                f"{folder}: got {brief(name, 80)} beside {brief(other, 80)} among its files, "
                "expected other files than the manifest, and none inside another; build it again",
            )
    for name in _named_files(manifest):
        _require(
            name in manifest.files,
            f"{folder}: {brief(name, 80)} is named in the manifest but not hashed under its files",
        )
    listed = manifest.files[manifest.tokenizer.file]
    _require(
        manifest.tokenizer.sha256 == listed,
        f"{folder}: tokenizer.sha256 {manifest.tokenizer.sha256[:12]!r}… does not match the "
        f"{listed[:12]}… of {manifest.tokenizer.file}; this is not the target's tokenizer",
    )


def _check_files(folder: Path, manifest: Manifest, verify: bool) -> None:
    for name, expected in manifest.files.items():
        file = folder / name
        _require(file.is_file(), f"{file}: missing; build or copy the bundle again")
        _require_inside(folder, file)
        if verify:
            try:
                found = sha256(file)
            except OSError as error:
                raise BundleError(f"{file}: not readable ({error.strerror})") from None
            _require(
                found == expected,
                f"{file}: got sha256 {found[:12]}…, expected {expected[:12]}…: truncated or "
                "altered; build or copy the bundle again",
            )


def _require_inside(folder: Path, file: Path) -> None:
    _require(
        file.resolve().is_relative_to(folder.resolve()),
        f"{file}: a symbolic link that leads out of the bundle, expected a file inside the bundle; "
        "copy the file there",
    )


def _named_files(manifest: Manifest) -> list[str]:
    """Returns every path that the manifest's fields point to."""
    graphs = [*manifest.graphs.values()]
    names = []
    for drafter in manifest.drafters:
        graphs += drafter.graphs.values()
        names += [drafter.draft_token_ids] if drafter.draft_token_ids else []
    for graph in graphs:
        names += [graph.file, *(plan.file for plan in graph.plans)]
    names.append(manifest.tokenizer.file)
    names += [manifest.tokenizer.chat_template] if manifest.tokenizer.chat_template else []
    return names


def write_manifest(path: str | Path, manifest: Manifest) -> None:
    """Hashes the bundle's files and writes `manifest` with the hashes, by an atomic rename.

    These are the files that the manifest points to, those that `manifest.files` has already, and
    the weights beside a graph, which have its name and end in .bin. Whatever else lies in the
    folder is not the bundle's. The hashes of what is on disk replace `manifest.files` and
    `manifest.tokenizer.sha256`.

    Raises BundleError if a file that the manifest points to is missing, or if one of the bundle's
    lies outside of the folder, where a symbolic link leads.
    """
    folder = Path(path)
    named = _named_files(manifest)
    for name in named:
        _require(
            (folder / name).is_file(),
            f"{folder / name}: missing, cannot write a manifest that names it",
        )
    weights = {PurePosixPath(name).with_suffix(".bin").as_posix() for name in named}
    own = {*named, *manifest.files, *weights}
    own = {name for name in own if (folder / name).is_file()}
    for name in own:
        _require_inside(folder, folder / name)
    files = {name: sha256(folder / name) for name in sorted(own)}
    tokenizer = dataclasses.replace(manifest.tokenizer, sha256=files[manifest.tokenizer.file])
    complete = to_json(dataclasses.replace(manifest, files=files, tokenizer=tokenizer))
    from_mapping(Manifest, complete, "manifest", BundleError)  # writes what can be read
    write_atomically(folder / MANIFEST, json.dumps(complete, indent=2) + "\n")


def own_files(folder: Path) -> set[str] | None:
    """Returns the files of the bundle in `folder`, missing ones too; None if it holds no bundle.

    The manifest says which these are, also that of a damaged bundle or of another version.
    `files.writing.replacing_folder` takes this function to know what it may replace.
    """
    manifest_file = folder / MANIFEST
    try:
        found = parse_json(manifest_file.read_bytes())
    except (OSError, ValueError):
        return None
    keys = {"schema_version", "target", "graphs", "tokenizer", "files"}
    if not isinstance(found, dict) or not keys <= found.keys():
        return None
    if not isinstance(found["files"], dict):
        return None
    left = {path.name for path in temporaries(manifest_file)}
    return {MANIFEST, *found["files"], *left}


def find(root: str | Path = "bundles") -> Path:
    """Returns the newest bundle, by its manifest's date, among the folders in `root`."""
    # Hidden folders are half-built bundles.
    manifests = list(Path(root).glob(f"[!.]*/{MANIFEST}"))
    if not manifests:
        raise BundleError(
            f"no bundle under {Path(root)}/, expected one; make one with {how_to_build()}, or name "
            "a folder with --bundle"
        )
    return max(manifests, key=lambda file: file.stat().st_mtime).parent
