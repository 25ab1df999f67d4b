"""Reads checkpoints whose matrices are quantised, without the library that wrote them.

A form says which tensors stand for a matrix and how its numbers follow from them. Each matrix is
dequantised to float32 anew when it is asked for, so that no more than one has to be in memory.
What a checkpoint says of its activations (W8A8, FP8) is not taken over: only weights are read.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_export.model import foreign_json
from spec_export.model.families import wrappers
from spec_runtime.errors import UnsupportedModelError, UserError
from spec_runtime.files import mapping
from spec_runtime.files.mapping import brief

GPTQ_BITS = (2, 4, 8)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each four bits of a word are of
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by their number; from 8 on they are negative
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Parts:
    """Holds the tensors of one matrix by the ends of their names, and the checkpoint's settings."""

    stem: str
    tensors: Mapping[str, Tensor]
    settings: Mapping[str, Any]

    def need(self, suffix: str) -> Tensor:
        """Returns the tensor `stem` + `suffix`; raises UserError if there is none."""
        if suffix not in self.tensors:
            raise UserError(f"got {self.stem} without {self.stem}{suffix}, which it is scaled by")
        return self.tensors[suffix]


@dataclass(frozen=True)
class Form:
    """Says how a quantised matrix is stored.

    title: what it is called in messages. key: end of the name of a tensor that every quantised
    matrix has; the rest is the matrix's stem. sides: ends of the names of its other tensors.
    dequantise: returns the matrix f32[N, K] of these parts. name: end of the matrix's own name.
    """

    title: str
    key: str
    sides: tuple[str, ...]
    dequantise: Callable[[Parts], Tensor]
    name: str = ".weight"


def unpack(words: Tensor, bits: int, axis: int) -> Tensor:
    """Unpacks 32-bit words into their values along `axis`, the lowest bits first.

    Values follow each other without gaps, so that those of 3, 5 or 6 bits may lie in two words.

    >>> unpack(torch.tensor([0x21]), 4, 0).tolist()
    [1, 2, 0, 0, 0, 0, 0, 0]
    """
    if not 1 < bits <= 8:
        raise UnsupportedModelError(f"got weights of {bits} bits, expected 2 to 8")
    if words.dtype not in (torch.int32, torch.uint32):
        raise ValueError(f"got words of {words.dtype}, expected 32-bit integers")
    is_split = bool(32 % bits)
    words = words.view(torch.int32).movedim(axis, -1)
    words = words.long() & 0xFFFFFFFF if is_split else words
    words = words.unflatten(-1, (-1, bits if is_split else 1))
    values = []
    for start in range(0, 32 * words.shape[-1], bits):
        place, shift = divmod(start, 32)
        value = words[..., place] >> shift
        if shift + bits > 32:
            value = value | words[..., place + 1] << (32 - shift)
        values.append(value & (2**bits - 1))
    return torch.stack(values, -1).flatten(-2).movedim(-1, axis)


def _in_place(scale: Tensor, shape: torch.Size, block: tuple[int, int] | None = None) -> Tensor:
    """Repeats scales so that each element of a matrix has its own, f32[N, K].

    Scales are of the whole ([] or [1]), of rows ([N] or [N, 1]), of groups in a row ([N, K/G]) or
    of rectangles, whose sizes are `block` if they do not divide the matrix.
    """
    N, K = shape
    scale = scale.float()
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(N, K)
    if scale.ndim == 1:
        scale = scale[:, None]
    rows, columns = block or (1, K // scale.shape[1])
    if list(scale.shape) != [-(-N // rows), -(-K // columns)]:
        raise ValueError(f"got scales {list(scale.shape)} of a matrix {[N, K]}")
    scale = scale[torch.arange(N) // rows] if rows > 1 else scale
    return scale[:, torch.arange(K) // columns]


def _product(
    q_NK: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    group_K: Tensor | None = None,
    block: tuple[int, int] | None = None,
) -> Tensor:
    """Returns scale · (q - zero) f32[N, K], see `_in_place`.

    group_K: the group of each column, if they are not in order.
    """

    def in_place(each: Tensor) -> Tensor:
        by_group = each.float() if group_K is None else each.float()[:, group_K.long()]
        return _in_place(by_group, q_NK.shape, block)

    if zero is not None and zero.shape != scale.shape:
        raise ValueError(f"got scales {list(scale.shape)}, offsets {list(zero.shape)}")
    value = q_NK.float() if zero is None else q_NK - in_place(zero)
    return value * in_place(scale)


def _gptq(parts: Parts) -> Tensor:
    scale_GN, zeros = parts.need(".scales"), parts.need(".qzeros")
    N = scale_GN.shape[1]
    # `dynamic` may give modules bits of their own: the offsets of N columns tell them.
    known = (parts.settings["bits"], *GPTQ_BITS)
    bits = next((each for each in known if zeros.shape[1] == -(-N * each // 32)), known[0])
    half, stored_GN = 2 ** (bits - 1), unpack(zeros, bits, 1)[:, :N]
    # Symmetric weights have their offset in the middle. Files of the second version may bear the
    # first one's name, so that what is stored decides.
    is_symmetric = parts.settings.get("sym") is not False
    if is_symmetric and any(bool((stored_GN == each).all()) for each in (half - 1, half)):
        zero_GN = torch.full_like(stored_GN, half)
    elif parts.settings.get("checkpoint_format", "gptq") == "gptq_v2":
        zero_GN = stored_GN
    else:
        # The first version stores one less, and where that is below 0 it borrows from the next.
        zeros = zeros + sum(1 << shift for shift in range(0, 32, bits))
        zero_GN = unpack(zeros.int(), bits, 1)[:, :N]
    q_NK = unpack(parts.need(".qweight"), bits, 0).T
    return _product(q_NK, scale_GN.T, zero_GN.T, group_K=parts.tensors.get(".g_idx"))


def _awq(parts: Parts) -> Tensor:
    def columns(words: Tensor) -> Tensor:
        values = unpack(words, 4, 1).unflatten(1, (-1, 8))
        return values[..., torch.tensor(AWQ_ORDER).argsort()].flatten(1).T

    q_NK, zero_NG = columns(parts.need(".qweight")), columns(parts.need(".qzeros"))
    return _product(q_NK, parts.need(".scales").T, zero_NG)


def _packed(parts: Parts) -> Tensor:
    """compressed-tensors' "pack-quantized": values are stored with half of their range added."""
    N, K = (int(size) for size in parts.need(".weight_shape"))
    words, zero = parts.need(".weight_packed"), parts.tensors.get(".weight_zero_point")
    bits = _packed_bits(words.shape[1], K)
    half = 2 ** (bits - 1)
    if zero is not None and zero.dtype == torch.int32:
        zero = unpack(zero, bits, 0)[:N] - half
    groups = parts.tensors.get(".weight_g_idx")
    if groups is not None and (groups < 0).any():
        groups = None  # columns are in order
    q_NK = unpack(words, bits, 1)[:, :K] - half
    return _product(q_NK, parts.need(".weight_scale"), zero, group_K=groups)


def _packed_bits(words: int, values: int) -> int:
    """Returns the number of bits with which `values` values fill `words` words; 0 if none does."""
    return next((bits for bits in range(2, 9) if words == -(-values * bits // 32)), 0)


def _scaled(parts: Parts) -> Tensor:
    """Returns a matrix of int8 or FP8 times its scales; blocks are as in the settings."""
    weight = parts.need(".weight")
    if weight.dtype not in (torch.int8, *FLOAT8):
        raise UserError(f"got {parts.stem}.weight of {weight.dtype}, expected int8 or FP8")
    scale = parts.tensors.get(".weight_scale_inv")
    if scale is None:
        scale = parts.need(".weight_scale")
    # Groups of matrices may have blocks of their own, or none: the number of scales tells.
    N, K = weight.shape
    sizes = ((rows, columns) for rows, columns in parts.settings.get("blocks", ()))
    fits = (size for size in sizes if [-(-N // size[0]), -(-K // size[1])] == list(scale.shape))
    block = next(fits, None)
    return _product(weight, scale, parts.tensors.get(".weight_zero_point"), block=block)


def _mlx(parts: Parts) -> Tensor:
    own = parts.settings["own"].get(wrappers.own_name(f"{parts.stem}."), {})
    mapping.require_types(foreign_json.QUANTISATION, own, f"{parts.stem} in config.json: ")
    settings = {**parts.settings, **own}
    if settings.get("mode", "affine") != "affine":
        raise UnsupportedModelError(f"got MLX weights in mode {settings['mode']}, expected affine")
    scale_NG, minimum_NG = parts.need(".scales"), parts.need(".biases")
    if scale_NG.ndim != 2 or scale_NG.shape != minimum_NG.shape:
        raise ValueError(f"got scales {list(scale_NG.shape)}, minima {list(minimum_NG.shape)}")
    q_NK = unpack(parts.need(".weight"), settings["bits"], 1)
    K, G, size = q_NK.shape[1], scale_NG.shape[1], settings["group_size"]
    if G * size != K:
        raise ValueError(f"got {K} columns of {settings['bits']} bits in {G} groups of {size}")
    return _product(q_NK, scale_NG) + _in_place(minimum_NG, q_NK.shape)


def _bnb4(parts: Parts) -> Tensor:
    suffixes = [each for each in parts.tensors if ".quant_state." in each]
    if not suffixes:
        raise UserError(f"got {parts.stem}.weight without its quant_state")
    state = mapping.parse_json(bytes(parts.tensors[suffixes[0]].tolist()))
    mapping.require_types(foreign_json.MATRIX, state, f"{suffixes[0]}: ")
    absmax = parts.need(".weight.absmax")
    if absmax.dtype == torch.uint8:  # itself quantised
        levels, outer = parts.need(".weight.nested_quant_map"), parts.need(".weight.nested_absmax")
        absmax = levels[absmax.long()] * _spread(outer, state["nested_blocksize"], len(absmax))
        absmax = absmax + state["nested_offset"]
    packed = parts.need(".weight").flatten()
    q = torch.stack([packed >> 4, packed & 15], -1).flatten().long()
    value = parts.need(".weight.quant_map").float()[q]
    return (value * _spread(absmax, state["blocksize"], len(q))).reshape(state["shape"])


def _spread(scales: Tensor, size: int, count: int) -> Tensor:
    """Returns the scales of `count` values in blocks of `size`."""
    return scales[torch.arange(count) // size]


def _bnb8(parts: Parts) -> Tensor:
    return _product(parts.need(".weight"), parts.need(".SCB")) * (1 / 127)


def _mxfp4(parts: Parts) -> Tensor:
    """Returns the matrices of all experts [E, K, N]: blocks of 32 share a power of two."""
    blocks, scales = parts.need("_blocks"), parts.need("_scales")
    level = torch.tensor((*FP4, *(-value for value in FP4)))
    byte = torch.arange(256)
    pair = torch.stack([level[byte & 15], level[byte >> 4]], -1)
    value = pair[blocks.int()].flatten(-2)
    value *= torch.ldexp(torch.ones(scales.shape), scales.int() - 127)[..., None]
    return value.flatten(-2).transpose(1, 2)


_SCALED = (".weight", ".weight_zero_point", ".input_scale", ".input_zero_point")
_CACHE = (".k_scale", ".v_scale", ".q_scale")  # of quantised keys and values, which we do not have
FORMS = {
    "gptq": Form("GPTQ", ".qweight", (".scales", ".qzeros", ".g_idx"), _gptq),
    "awq": Form("AWQ", ".qweight", (".scales", ".qzeros"), _awq),
    "pack-quantized": Form(
        "compressed-tensors",
        ".weight_packed",
        (".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx"),
        _packed,
    ),
    "int-quantized": Form("compressed-tensors, int8", ".weight_scale", _SCALED, _scaled),
    "float-quantized": Form("compressed-tensors, FP8", ".weight_scale", _SCALED, _scaled),
    "naive-quantized": Form("compressed-tensors", ".weight_scale", _SCALED, _scaled),
    "fp8": Form("FP8", ".weight_scale_inv", (*_SCALED, ".activation_scale"), _scaled),
    "fbgemm_fp8": Form("FP8", ".weight_scale", (*_SCALED, ".input_scale_ub"), _scaled),
    "mlx": Form("MLX", ".scales", (".weight", ".biases"), _mlx),
    "bitsandbytes 4": Form(
        "bitsandbytes, 4 bits",
        ".weight.absmax",
        (
            ".weight",
            ".weight.quant_map",
            ".weight.nested_absmax",
            ".weight.nested_quant_map",
            ".weight.quant_state.bitsandbytes__nf4",
            ".weight.quant_state.bitsandbytes__fp4",
        ),
        _bnb4,
    ),
    "mxfp4": Form("MXFP4", "_blocks", ("_scales",), _mxfp4, name=""),
    "bitsandbytes 8": Form("bitsandbytes, int8", ".SCB", (".weight", ".weight_format"), _bnb8),
}


def find(config: Mapping[str, Any], where: Path) -> tuple[Form, dict[str, Any]] | None:
    """Returns the form of a folder's weights by its config.json, with the settings that it has.

    None: they are not quantised. Raises UnsupportedModelError, which names the form, if it is not
    one of `FORMS`.
    """
    whole = [config, part] if isinstance(part := config.get("text_config"), dict) else [config]
    found = [each.get(field) for each in whole for field in foreign_json.QUANTISATIONS]
    said = next((each for each in found if each is not None), None)
    if said is None:
        return None
    name, settings = _name(said), dict(said)
    refused = _refused_part(said)
    if name not in FORMS or refused:
        raise UnsupportedModelError(
            f"{where}: got weights quantised as {brief(refused or name)}, expected "
            "GPTQ, AWQ, compressed-tensors (packed, int8, FP8), FP8, MXFP4, MLX or bitsandbytes: "
            "take the model's unquantised weights, or a GGUF file of it"
        )
    groups = [group.get("weights") or {} for group in (said.get("config_groups") or {}).values()]
    sizes = [said.get("weight_block_size"), *(each.get("block_structure") for each in groups)]
    settings["blocks"] = [size for size in sizes if size]
    # MLX's settings of one matrix, which may be named there as another program names it
    own = {key: each for key, each in said.items() if isinstance(each, dict) and name == "mlx"}
    settings["own"] = {wrappers.own_name(f"{key}."): each for key, each in own.items()}
    return FORMS[name], settings


def _name(said: Mapping[str, Any]) -> str:
    """Returns what a quantization_config is called in `FORMS`, if it is there."""
    method = said.get("quant_method")
    if method is None:
        return "mlx" if {"bits", "group_size"} <= set(said) else "an unnamed method"
    if method == "compressed-tensors":
        return str(said.get("format"))
    if method == "bitsandbytes":
        return f"bitsandbytes {4 if said.get('load_in_4bit') else 8}"
    return str(method)


def _refused_part(said: Mapping[str, Any]) -> str | None:
    """Returns what in the settings of a known form cannot be read, None if all can."""
    method = said.get("quant_method")
    if method == "awq" and (said.get("version", "gemm") != "gemm" or said.get("bits", 4) != 4):
        return f"AWQ {said.get('version')} with {said.get('bits')} bits"
    if method == "gptq" and said.get("bits") not in GPTQ_BITS:
        return f"GPTQ with {said.get('bits')} bits"
    if method == "gptq" and said.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
        return f"GPTQ in the format {said['checkpoint_format']}"
    if said.get("transform_config"):
        return "compressed-tensors with transforms"
    sparsity = (said.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        return f"compressed-tensors with {sparsity}"
    return None


class QuantisedWeights(Mapping[str, Tensor]):
    """Maps the names of a checkpoint's tensors to them; quantised matrices are dequantised, f32.

    Nothing is kept: a tensor is read each time. Iterating reads no data.
    """

    def __init__(
        self, stored: Mapping[str, Tensor], form: Form, settings: Mapping[str, Any], where: Path
    ) -> None:
        """stored: all tensors as they are. where: their folder, for messages."""
        self._stored, self._form = stored, form
        self._settings, self._where = settings, where
        key = form.key
        stems = {name.removesuffix(key) for name in stored if name.endswith(key)}
        self._sides = {stem + form.name: self._parts_of(stem) for stem in sorted(stems)}
        taken = {name for names in self._sides.values() for name in names}
        plain = [name for name in stored if name not in taken and not name.endswith(_CACHE)]
        self._names = [*plain, *self._sides]

    def _parts_of(self, stem: str) -> list[str]:
        """Returns the names of all tensors that stand for one matrix."""
        suffixes = (self._form.key, *self._form.sides)
        return [stem + suffix for suffix in suffixes if stem + suffix in self._stored]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Tensor:
        """Returns the tensor; raises UserError if its parts do not fit each other."""
        if name not in self._sides:
            return self._read_float(name)
        stem = name.removesuffix(self._form.name)
        tensors = {each.removeprefix(stem): self._stored[each] for each in self._sides[name]}
        try:
            weight = self._form.dequantise(Parts(stem, tensors, self._settings))
        except (RuntimeError, LookupError, TypeError, ArithmeticError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{self._where}: the parts of {name} ({self._form.title}) do not fit each other "
                f"or the settings in config.json: {brief(error)}"
            ) from error
        return weight.float().contiguous()

    def _read_float(self, name: str) -> Tensor:
        """Returns a tensor that is stored as it is; raises UserError if it lacks its scales."""
        tensor = self._stored[name]
        if not tensor.is_floating_point() or tensor.dtype in FLOAT8:
            raise UserError(
                f"{self._where}: got {name} of {tensor.dtype} without the scales of "
                f"{self._form.title}; check that all files of the model are there"
            )
        return tensor

    @property
    def expects_int8(self) -> bool:
        """True if the checkpoint was made for activations in 8 bits, as int8 graphs have them."""
        groups = (self._settings.get("config_groups") or {}).values()
        activations = [group.get("input_activations") or {} for group in groups]
        return any((each.get("type"), each.get("num_bits")) == ("int", 8) for each in activations)

    def said(self) -> str:
        """Returns what was read, such as "read 168 matrices (GPTQ, 4 bits, groups of 32)"."""
        number = len(self._sides)
        return f"read {number} {'matrix' if number == 1 else 'matrices'} ({self._details()})"

    def _details(self) -> str:
        weights = [
            group.get("weights") or {}
            for group in (self._settings.get("config_groups") or {}).values()
        ]
        settings = {**(weights[0] if weights else {}), **self._settings}
        bits = settings.get("bits") or settings.get("num_bits")
        size, details = settings.get("group_size"), [self._form.title]
        if settings.get("dynamic") or settings["own"]:
            return f"{self._form.title}, mixed bits"
        if bits and "8" not in self._form.title:
            details.append(f"{bits} bits")
        if isinstance(size, int) and size > 0:
            details.append(f"groups of {size}")
        details += [f"blocks of {rows} x {columns}" for rows, columns in settings["blocks"]]
        return ", ".join(details)
