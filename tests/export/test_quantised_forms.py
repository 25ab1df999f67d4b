"""Tests that quantised checkpoints are read as the programs that wrote them would read them.

The folders are packed here by loops over single values, by the published layouts.
"""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_target import save_llama
from torch import Tensor

from spec_export.graphs import four_bits
from spec_export.imports.quantised import FORMS as FORMS_READ
from spec_export.imports.quantised import Parts
from spec_export.model import pretrained, target
from spec_runtime.errors import UserError

GROUP = 32
Packed = tuple[dict[str, Tensor], Tensor]  # tensors by the ends of their names, and the matrix


def words(values: Tensor, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Packs values into i32 along an axis; `order` says which value each part of a word holds."""
    order = order or (0,)
    lines = values.movedim(axis, -1).reshape(-1, values.shape[axis])
    made = []
    for line in lines.tolist():
        stream = 0
        for start in range(0, len(line), len(order)):
            for place, index in enumerate(order):
                stream |= line[start + index] << (bits * (start + place))
        row = [stream >> shift & 0xFFFFFFFF for shift in range(0, len(line) * bits, 32)]
        made.append([word - 2**32 if word >= 2**31 else word for word in row])
    shape = [*values.movedim(axis, -1).shape[:-1], -1]
    return torch.tensor(made, dtype=torch.int32).reshape(shape).movedim(-1, axis).contiguous()


def grid(
    weight: Tensor, is_symmetric: bool, bits: int = 4, group: int = GROUP
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises W [N, K] in groups: q i64[N, K], scale f16[N, G] and zero point i64[N, G]."""
    largest = 2**bits - 1
    groups = weight.reshape(len(weight), -1, group)
    low, high = groups.amin(-1), groups.amax(-1)
    if is_symmetric:
        scale = (groups.abs().amax(-1) / (largest // 2)).half()
        zero = torch.full(scale.shape, largest // 2 + 1)
    else:
        scale = ((high - low) / largest).half()
        zero = (-low / scale.float()).round().long()
    q = ((groups / scale.float()[..., None]).round() + zero[..., None]).clamp(0, largest)
    return q.reshape(weight.shape).long(), scale, zero


def values(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Returns scale · (q - zero) f32[N, K]."""
    size = q.shape[1] // scale.shape[1]
    zero, scale = zero.repeat_interleave(size, 1), scale.float().repeat_interleave(size, 1)
    return (q - zero) * scale


def gptq(
    weight: Tensor,
    stored_less: int = 1,
    is_symmetric: bool = True,
    bits: int = 4,
    group: int = GROUP,
) -> Packed:
    q, scale, zero = grid(weight, is_symmetric, bits, group)
    zeros = words((zero - stored_less).T, bits, 1)
    tensors = {".qweight": words(q.T, bits, 0), ".scales": scale.T, ".qzeros": zeros}
    return tensors, values(q, scale, zero)


def gptq_in_another_order(weight: Tensor) -> Packed:
    """Makes what desc_act does: a column's group is not the one that it stands in."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
    tensors, value = gptq(weight[:, order])
    back = order.argsort()
    q, _, _ = grid(weight[:, order], True)
    tensors[".qweight"] = words(q[:, back].T, 4, 0)
    tensors[".g_idx"] = (back // GROUP).int()
    return tensors, value[:, back]


def awq(weight: Tensor, group: int = GROUP) -> Packed:
    q, scale, zero = grid(weight, is_symmetric=False, group=group)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    packed = {".qweight": words(q.T, 4, 1, order), ".qzeros": words(zero.T, 4, 1, order)}
    return packed | {".scales": scale.T}, values(q, scale, zero)


def packed(weight: Tensor, is_symmetric: bool = True, bits: int = 4) -> Packed:
    q, scale, zero = grid(weight, is_symmetric, bits)
    tensors = {".weight_packed": words(q, bits, 1), ".weight_scale": scale}
    tensors[".weight_shape"] = torch.tensor(weight.shape)
    if not is_symmetric:
        tensors[".weight_zero_point"] = words(zero, bits, 0)
    return tensors, values(q, scale, zero)


def int8(weight: Tensor) -> Packed:
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    q = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {".weight": q, ".weight_scale": scale}, q.float() * scale.float()


def float8(weight: Tensor, shape: tuple[int, ...]) -> Packed:
    """Has scales of this shape, of rows or of the whole."""
    size = weight.abs().amax(1, keepdim=True) if shape else weight.abs().max()
    scale = (size / 448).float()
    q = (weight / scale).to(torch.float8_e4m3fn)
    return {".weight": q, ".weight_scale": scale}, q.float() * scale


def blocks(weight: Tensor, size: int = 24) -> Packed:
    """Has scales of squares, the last of which stand over the edge."""
    N, K = weight.shape
    scale = torch.zeros(-(-N // size), -(-K // size))
    value, q = torch.zeros(N, K), torch.zeros(N, K).to(torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
            scale[i, j] = weight[part].abs().max() / 448
            q[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
            value[part] = q[part].float() * scale[i, j]
    return {".weight": q, ".weight_scale_inv": scale}, value


def mlx(weight: Tensor, bits: int = 4, group: int = GROUP) -> Packed:
    q, scale, zero = grid(weight, is_symmetric=False, bits=bits, group=group)
    minimum = (-zero * scale.float()).half()
    packed = words(q, bits, 1).view(torch.uint32)
    tensors = {".weight": packed, ".scales": scale, ".biases": minimum}
    scale, minimum = (each.float().repeat_interleave(group, 1) for each in (scale, minimum))
    return tensors, q * scale + minimum


def nf4(weight: Tensor, is_nested: bool = False) -> Packed:
    """Has unevenly spaced levels, and scales of 64 values, which may themselves be quantised."""
    levels, generator = torch.linspace(-1, 1, 16) ** 3, torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (weight.numel(),), generator=generator)
    absmax = torch.rand(weight.numel() // 64, generator=generator) + 0.5
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape)}
    tensors = {".weight.absmax": absmax, ".weight.quant_map": levels}
    if is_nested:
        state |= {"nested_blocksize": 256, "nested_offset": 0.25}
        codes = (absmax * 100).to(torch.uint8)
        outer = torch.rand(-(-len(codes) // 256), generator=generator)
        map_256 = torch.linspace(-1, 1, 256)
        tensors[".weight.absmax"] = codes
        tensors |= {".weight.nested_absmax": outer, ".weight.nested_quant_map": map_256}
        absmax = torch.stack(
            [map_256[code] * outer[i // 256] + 0.25 for i, code in enumerate(codes.tolist())]
        )
    pairs = q.reshape(-1, 2)
    tensors[".weight"] = (pairs[:, 0] * 16 + pairs[:, 1]).to(torch.uint8)[:, None]
    text = json.dumps(state).encode()
    tensors[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    return tensors, (levels[q] * absmax.repeat_interleave(64)).reshape(weight.shape)


def bnb8(weight: Tensor) -> Packed:
    most = weight.abs().amax(1)
    q = (weight / most[:, None] * 127).round().to(torch.int8)
    tensors = {".weight": q, ".SCB": most, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, q.float() * most[:, None] * (1 / 127)


def compressed(
    form: str, activations: dict[str, Any] | None = None, **weights: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"0": group}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
PACKED = compressed("pack-quantized", num_bits=4, group_size=GROUP)
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [24, 24]}
MLX = {"bits": 4, "group_size": GROUP}
# name: what packs a matrix, config.json's settings, what is said of it
FORMS: dict[str, tuple[Callable[[Tensor], Packed], dict[str, Any], str]] = {
    "gptq": (gptq, GPTQ, "GPTQ, 4 bits, groups of 32"),
    "gptq zeros": (lambda w: gptq(w, is_symmetric=False), GPTQ, "GPTQ, 4 bits, groups of 32"),
    "gptq act-order": (gptq_in_another_order, GPTQ, "GPTQ, 4 bits, groups of 32"),
    "gptq v2": (
        lambda w: gptq(w, stored_less=0),
        GPTQ | {"checkpoint_format": "gptq_v2"},
        "GPTQ, 4 bits, groups of 32",
    ),
    "gptq 8": (lambda w: gptq(w, bits=8), GPTQ | {"bits": 8}, "GPTQ, 8 bits, groups of 32"),
    "awq": (awq, AWQ, "AWQ, 4 bits, groups of 32"),
    "w4a16": (packed, PACKED, "compressed-tensors, 4 bits, groups of 32"),
    "w4a16 zeros": (
        lambda w: packed(w, is_symmetric=False),
        PACKED,
        "compressed-tensors, 4 bits, groups of 32",
    ),
    "w8a16": (
        lambda w: packed(w, bits=8),
        compressed("pack-quantized", num_bits=8, group_size=GROUP),
        "compressed-tensors, 8 bits, groups of 32",
    ),
    "w8a8": (
        int8,
        compressed("int-quantized", {"type": "int", "num_bits": 8}, num_bits=8),
        "compressed-tensors, int8",
    ),
    "fp8 rows": (
        lambda w: float8(w, (1,)),
        compressed("float-quantized", num_bits=8),
        "compressed-tensors, FP8",
    ),
    "fp8 whole": (
        lambda w: float8(w, ()),
        compressed("float-quantized", num_bits=8),
        "compressed-tensors, FP8",
    ),
    "fp8 blocks": (blocks, FP8, "FP8, blocks of 24 x 24"),
    "mlx": (mlx, MLX, "MLX, 4 bits, groups of 32"),
    "mlx 3": (lambda w: mlx(w, 3), MLX | {"bits": 3}, "MLX, 3 bits, groups of 32"),
    "mlx 6": (lambda w: mlx(w, 6), MLX | {"bits": 6}, "MLX, 6 bits, groups of 32"),
    "nf4": (nf4, BNB, "bitsandbytes, 4 bits"),
    "nf4 nested": (lambda w: nf4(w, is_nested=True), BNB, "bitsandbytes, 4 bits"),
    "bitsandbytes int8": (
        bnb8,
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "bitsandbytes, int8",
    ),
}


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder whose matrices are [64, 64], [32, 64], [96, 64] and [64, 96]."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    return save_llama(folder, hidden_size=64, intermediate_size=96)


def quantised(
    plain: Path, folder: Path, pack: Callable[[Tensor], Packed], settings: dict[str, Any]
) -> dict[str, Tensor]:
    """Writes the folder in a form and returns the matrices that it then stands for, by name."""
    shutil.copytree(plain, folder)
    stored, expected = {}, {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        if not key.endswith("_proj.weight"):
            stored[key] = tensor
            continue
        stem = key.removesuffix(".weight")
        parts, expected[key] = pack(tensor)
        stored |= {stem + suffix: part.contiguous() for suffix, part in parts.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    field = "quantization_config" if "quant_method" in settings else "quantization"
    (folder / "config.json").write_text(json.dumps(config | {field: settings}))
    return expected


def require_read(folder: Path, expected: dict[str, Tensor], said: str) -> None:
    """Asserts that a folder's matrices are read bit for bit, and what is said of them."""
    model, _ = target.load(target.resolve(str(folder)))
    for key, value in expected.items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=0, atol=0, msg=key)
    weights = pretrained.quantised_weights(folder, None)
    assert weights is not None
    assert weights.said() == f"read 14 matrices ({said})"


@pytest.mark.parametrize("name", FORMS)
def test_a_quantised_checkpoint_is_read_as_it_was_written(
    plain: Path, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "model"
    expected = quantised(plain, folder, *FORMS[name][:2])
    assert len(expected) == 14
    require_read(folder, expected, FORMS[name][2])


def test_a_zero_point_of_0_borrows_from_the_next_in_gptqs_first_version() -> None:
    q, scale = torch.arange(64).reshape(8, 8) % 16, torch.ones(1, 8)
    zero = torch.tensor([[3, 0, 5, 0, 0, 9, 15, 1]])
    less = sum(z << 4 * i for i, z in enumerate(zero[0].tolist())) - 0x11111111
    word = torch.tensor([[less - 2**32 if less >= 2**31 else less]], dtype=torch.int32)
    tensors = {".qweight": words(q, 4, 0), ".scales": scale, ".qzeros": word}
    found = FORMS_READ["gptq"].dequantise(Parts("stem", tensors, GPTQ))
    assert torch.equal(found, (q - zero).T.float())


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("stored_less", [0, 1])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("sym", [{"sym": True}, {}])
def test_symmetric_gptq_has_its_zero_in_the_middle_whatever_its_version_is_called(
    bits: int, stored_less: int, form: str | None, sym: dict[str, bool]
) -> None:
    """GPTQModel has written the zeros of its second version under the first one's name."""
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    tensors, expected = gptq(weight, stored_less, bits=bits)
    settings = GPTQ | {"bits": bits} | sym | ({"checkpoint_format": form} if form else {})
    found = FORMS_READ["gptq"].dequantise(Parts("stem", tensors, settings))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_asymmetric_gptq_has_the_zeros_of_its_version(form: str) -> None:
    """Also where all are alike: `sym` is false."""
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    tensors, expected = gptq(weight, stored_less=0)
    settings = GPTQ | {"sym": False, "checkpoint_format": form}
    found = FORMS_READ["gptq"].dequantise(Parts("stem", tensors, settings))
    scale = values(torch.ones(32, 64), tensors[".scales"].T, torch.zeros(32, 2))
    assert torch.allclose(found, expected - (scale if form == "gptq" else 0), rtol=0, atol=1e-6)


def quantised_apart(
    plain: Path, folder: Path, settings: dict[str, Any], packs: list[Callable[[Tensor], Packed]]
) -> dict[str, Tensor]:
    """Writes a folder whose matrices are packed in turn by one of `packs`."""
    turn = itertools.cycle(packs)
    return quantised(plain, folder, lambda weight: next(turn)(weight), settings)


TWO_GROUPS = compressed("float-quantized", num_bits=8, strategy="channel")
TWO_GROUPS["config_groups"]["1"] = {
    "targets": ["re:.*mlp.*"], "weights": {"num_bits": 8, "block_structure": [24, 24]}
}  # fmt: skip


def blocks_as_compressed_tensors(weight: Tensor) -> Packed:
    tensors, value = blocks(weight)
    return {".weight": tensors[".weight"], ".weight_scale": tensors[".weight_scale_inv"]}, value


@pytest.mark.parametrize(
    ("settings", "packs", "said"),
    [
        (
            GPTQ | {"dynamic": {"+:.*": {"bits": 8, "group_size": 16}, "-:lm_head": {}}},
            [gptq, lambda w: gptq(w, bits=8, group=16), lambda w: gptq(w, bits=2)],
            "GPTQ, mixed bits",
        ),
        (PACKED, [packed, lambda w: packed(w, bits=8)], "compressed-tensors, 4 bits, groups of 32"),
        (
            TWO_GROUPS,
            [lambda w: float8(w, (1,)), blocks_as_compressed_tensors, lambda w: float8(w, ())],
            "compressed-tensors, FP8, blocks of 24 x 24",
        ),
    ],
    ids=["GPTQ dynamic", "packed", "FP8"],
)
def test_matrices_of_one_model_may_be_quantised_apart(
    plain: Path,
    tmp_path: Path,
    settings: dict[str, Any],
    packs: list[Callable[[Tensor], Packed]],
    said: str,
) -> None:
    folder = tmp_path / "model"
    require_read(folder, quantised_apart(plain, folder, settings, packs), said)


@pytest.mark.parametrize("prefix", ["", "language_model.", "model.language_model."])
def test_mlxs_settings_of_a_matrix_are_found_by_another_programs_name(
    plain: Path, tmp_path: Path, prefix: str
) -> None:
    folder, number = tmp_path / "model", itertools.count()
    sizes = {"bits": 8, "group_size": GROUP}

    def pack(weight: Tensor) -> Packed:
        return mlx(weight, 8 if next(number) % 2 else 4)

    expected = quantised(plain, folder, pack, MLX)
    named = [key.removesuffix(".weight") for key in [*expected][1::2]]
    inner = "model." if prefix.startswith("model.") else ""
    own = {prefix + key.removeprefix(inner): sizes for key in named}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization": MLX | own}))
    require_read(folder, expected, "MLX, mixed bits")

    (folder / "config.json").write_text(json.dumps(config))  # without them
    with pytest.raises(UserError, match=r"got \d+ columns of 4 bits in \d groups of 32") as error:
        target.load(target.resolve(str(folder)))
    assert "\n" not in str(error.value)


def test_columns_of_no_group_stand_in_order() -> None:
    """compressed-tensors writes -1 for each column where it has kept their order."""
    tensors, expected = packed(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)))
    tensors[".weight_g_idx"] = torch.full((64,), -1)
    found = FORMS_READ["pack-quantized"].dequantise(Parts("stem", tensors, {}))
    assert torch.equal(found, expected)


def test_blocks_of_fp8_are_rows_by_columns() -> None:
    """Where they do not divide the matrix, its shape does not tell their sizes."""
    weight, scale = torch.ones(5, 6).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2], [3, 4]])
    tensors = {".weight": weight, ".weight_scale_inv": scale}
    found = FORMS_READ["fp8"].dequantise(Parts("stem", tensors, {"blocks": [[3, 4]]}))
    assert found.tolist() == [[1, 1, 1, 1, 2, 2]] * 3 + [[3, 3, 3, 3, 4, 4]] * 2


@pytest.mark.parametrize("place", ["whole", "text_config"])
def test_the_text_part_of_a_quantised_model_of_pictures_is_read(
    plain: Path, tmp_path: Path, place: str
) -> None:
    folder = tmp_path / "model"
    expected = quantised(plain, folder, *FORMS["awq"][:2])
    text = json.loads((folder / "config.json").read_text())
    settings = text.pop("quantization_config")
    config = {"model_type": "llava", "text_config": text, "tie_word_embeddings": False}
    (config if place == "whole" else text)["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    stored = {f"language_model.{name}": tensor for name, tensor in stored.items()}
    tower = "vision_tower.vision_model.encoder.layers.0.mlp.fc1"
    more = {f"{tower}.qweight": torch.zeros(8, 1).int(), f"{tower}.scales": torch.ones(1, 8)}
    save_file(stored | more, folder / "model.safetensors", metadata={"format": "pt"})
    model, _ = target.load(target.resolve(str(folder)))
    for key, value in expected.items():
        assert torch.equal(model.state_dict()[key], value)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_four_bits_are_not_rounded_a_second_time(group: int, is_symmetric: bool) -> None:
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    value = values(*grid(weight, is_symmetric, group=group)).numpy()
    form = four_bits.form_of(value)
    assert (form.has_minima, form.size) == (False, group)
    found = four_bits.unpack_zero_points(four_bits.pack_zero_points(value, group))
    # float32's rounding of the scale
    np.testing.assert_allclose(found, value, rtol=0, atol=1e-6 * np.abs(value).max())
    assert not np.array_equal(value, weight.numpy())


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "torchao"},
        {"quant_method": "hqq"},
        {"quant_method": "aqlm"},
        compressed("nvfp4-pack-quantized"),
        compressed("pack-quantized") | {"transform_config": {"a": 1}},
        GPTQ | {"bits": 3},
        GPTQ | {"checkpoint_format": "marlin"},
        AWQ | {"version": "gemv"},
        {},
    ],
    ids=str,
)
def test_other_forms_are_refused_by_name(
    plain: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    folder = shutil.copytree(plain, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(UserError, match="got weights quantised as ") as error:
        target.require_supported(target.resolve(str(folder)))
    known = settings.get("format", settings.get("quant_method", "unnamed"))
    assert str(known).partition("-")[0].lower() in str(error.value).lower()


@pytest.mark.parametrize("name", ["gptq", "awq", "w4a16", "mlx", "nf4", "fp8 blocks"])
@pytest.mark.parametrize("is_lost", [True, False])
def test_parts_that_do_not_fit_are_one_line(
    plain: Path, tmp_path: Path, name: str, is_lost: bool
) -> None:
    folder = tmp_path / "model"
    quantised(plain, folder, *FORMS[name][:2])
    stored = load_file(folder / "model.safetensors")
    ends = (".scales", ".weight_scale", ".weight.quant_map", ".weight_scale_inv")
    key = next(each for each in stored if each.endswith(ends))
    if is_lost:
        del stored[key]
    else:
        stored[key] = stored[key][:1].contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="model") as error:
        target.load(target.resolve(str(folder)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("genai_config.json", "ONNX Runtime GenAI"),
        ("consolidated.safetensors", "Mistral's or Meta's own format"),
        ("model-q4.gguf", "name that file"),
        ("onnx/model.onnx", "an ONNX graph"),
        ("tf_model.h5", "TensorFlow"),
    ],
)
@pytest.mark.parametrize("has_config", [True, False])
def test_a_foreign_format_is_named(
    plain: Path, tmp_path: Path, file: str, said: str, has_config: bool
) -> None:
    folder = tmp_path / "model"
    (folder / file).parent.mkdir(parents=True)
    (folder / file).write_bytes(b"?")
    if has_config:
        shutil.copy(plain / "config.json", folder)
    with pytest.raises(UserError, match=said):
        target.require_supported(target.resolve(str(folder)))


def test_a_missing_shard_is_named(plain: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = shutil.copytree(plain, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(plain).save_pretrained(folder, max_shard_size="60KB")
    lost = sorted(folder.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(UserError, match=f"1 is not there: {lost.name}; download"):
        target.require_supported(target.resolve(str(folder)))
