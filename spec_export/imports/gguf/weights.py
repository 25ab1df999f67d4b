"""Reads the weights of a GGUF model under the names that transformers gives them.

A tensor is read and dequantised when it is asked for, so that no more than one is held twice.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spec_export.imports.gguf.architectures import Architecture
from spec_export.imports.gguf.header import GGUFHeader, GGUFTensor
from spec_runtime.errors import UnsupportedModelError, UserError

Values = NDArray[np.float32]
Parts = tuple[tuple[str, ...], Callable[..., Values] | None]
PRODUCT = re.compile(r"self_attn\.([qkv])_proj\.(weight|bias)")
LAYER = re.compile(r"model\.layers\.(\d+)\.(?:mlp\.|block_sparse_moe\.)?(.*)")


def _beside(gate: Values, up: Values) -> Values:
    """Joins both halves of a product: [..., I, D] and [..., I, D] -> [..., 2 I, D]."""
    return np.concatenate((gate, up), axis=-2)


def _woven(gate: Values, up: Values) -> Values:
    """Alternates rows: [E, I, D] and [E, I, D] -> [E, D, 2 I], of biases [E, I] -> [E, 2 I]."""
    woven = np.stack((gate, up), axis=2).reshape(gate.shape[0], -1, *gate.shape[2:])
    return woven.swapaxes(1, -1) if woven.ndim > 2 else woven


def _turned(down: Values) -> Values:
    return down.swapaxes(1, 2)


# Tensors of a transformers layer that a file holds in parts, or under names that the package gguf
# does not map: the parts' names in a layer of the file, and what makes one of them.
JOINED: dict[str, Parts] = {
    "experts.gate_up_proj": (("ffn_gate_exps.weight", "ffn_up_exps.weight"), _beside),
    "experts.down_proj": (("ffn_down_exps.weight",), None),
    "gate.weight": (("ffn_gate_inp.weight",), None),
    "router.weight": (("ffn_gate_inp.weight",), None),
}
WOVEN: dict[str, Parts] = {  # in gpt-oss
    "experts.gate_up_proj": (("ffn_gate_exps.weight", "ffn_up_exps.weight"), _woven),
    "experts.gate_up_proj_bias": (("ffn_gate_exps.bias", "ffn_up_exps.bias"), _woven),
    "experts.down_proj": (("ffn_down_exps.weight",), _turned),
    "experts.down_proj_bias": (("ffn_down_exps.bias",), None),
    "self_attn.sinks": (("attn_sinks.weight",), None),
}


class GGUFWeights(Mapping[str, Tensor]):
    """Maps transformers' names to float32 tensors, read anew each time.

    The mapping has only the tensors that the file holds. unread: names the file's tensors from
    which no tensor of the mapping is made. Raises UserError for a tensor that is damaged, has a
    type that cannot be read, or consists of parts that do not fit each other.
    """

    def __init__(self, header: GGUFHeader, architecture: Architecture, model: Any) -> None:
        """model: the model of transformers; only its config, names and shapes are read."""
        self._header, self._architecture, self._config = header, architecture, model.config
        joined = JOINED | (WOVEN if architecture.weaves else {})
        self._shapes = dict[str, tuple[int, ...]]()
        self._parts = dict[str, tuple[str, ...]]()
        self._join = dict[str, Callable[..., Values] | None]()
        names = _name_map(header.architecture, model.config.num_hidden_layers)
        for name, tensor in model.state_dict().items():
            parts, join = _parts_of(name, joined, names)
            if not header.tensors.keys() >= set(parts):
                parts, join = _fused(name, joined, model.config)
            if parts and header.tensors.keys() >= set(parts):
                self._shapes[name] = tuple(tensor.shape)
                self._parts[name], self._join[name] = parts, join
        used = {part for parts in self._parts.values() for part in parts}
        self.unread = header.tensors.keys() - used - header.rope_factors.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, name: str) -> Tensor:
        parts = [self._header.tensors[part] for part in self._parts[name]]
        if len({part.shape for part in parts}) > 1:
            shapes = " and ".join(str(list(part.shape)) for part in parts)
            raise UserError(f"got shapes {shapes} for the parts of {name}, expected one")
        arrays = [read(part) for part in parts]
        join, shape = self._join[name], self._shapes[name]
        values = join(*arrays) if join else arrays[0]
        if values.size == prod(shape) and [n for n in values.shape if n > 1] == [
            n for n in shape if n > 1
        ]:
            values = values.reshape(shape)  # files have no axes of 1
        if self._architecture.adds_one and name.endswith("norm.weight"):
            values = values - 1
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        for projection, count in heads.items():
            if self._architecture.pairs and f".{projection}." in name and values.shape == shape:
                values = unpaired(values, getattr(self._config, count))
        return torch.from_numpy(np.require(values, np.float32, ["C", "W"]))


def read(tensor: GGUFTensor) -> Values:
    """Returns a tensor's values, exactly as the package gguf dequantises them.

    Raises UnsupportedModelError for a type that the package cannot dequantise.
    """
    data = np.memmap(tensor.path, np.uint8, "r", tensor.start, (tensor.stop - tensor.start,))
    return _dequantized(data.reshape(prod(tensor.shape[:-1]), -1), tensor).reshape(tensor.shape)


def require_readable(header: GGUFHeader) -> None:
    """Raises UnsupportedModelError unless all types of a file's tensors can be dequantised."""
    import gguf

    first = {tensor.kind: (name, tensor) for name, tensor in reversed(header.tensors.items())}
    for kind, (name, tensor) in first.items():
        _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        with np.errstate(all="ignore"):
            _dequantized(np.zeros((1, size), np.uint8), tensor, name)


def _dequantized(rows: NDArray[np.uint8], tensor: GGUFTensor, name: str = "a tensor") -> Values:
    import gguf

    kind = gguf.GGMLQuantizationType(tensor.kind)
    try:
        values: Values = gguf.dequantize(rows, kind)
    except NotImplementedError:
        raise UnsupportedModelError(
            f"got {name} of type {kind.name} in {tensor.path}, which is not supported: expected a "
            "type that the package gguf dequantises, such as Q4_K, Q8_0 or F16"
        ) from None
    return values


def _name_map(architecture: str, num_layers: int) -> Any:
    """Returns the package gguf's map from transformers' names to those of a file."""
    import gguf

    kinds = [kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    return gguf.get_tensor_name_map(kinds[0], num_layers)


def _parts_of(name: str, joined: Mapping[str, Parts], names: Any) -> Parts:
    """Returns the file's names of the parts of a tensor, and what joins them."""
    layer = LAYER.fullmatch(name)
    if layer and layer[2] in joined:
        parts, join = joined[layer[2]]
        return tuple(f"blk.{layer[1]}.{part}" for part in parts), join
    stem, _, suffix = name.rpartition(".")
    return (f"{names.get_name(stem)}.{suffix}",), None


def _fused(name: str, joined: Mapping[str, Parts], config: Any) -> Parts:
    """Returns the same of a file that holds a layer's queries, keys and values as one tensor, or
    the gates and ups of its experts; ((), None) of any other tensor."""
    layer = LAYER.fullmatch(name)
    product = layer and PRODUCT.fullmatch(layer[2])
    if layer and product:
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        starts = {"q": (0, queries), "k": (queries, queries + keys), "v": (queries + keys, None)}
        rows = slice(*starts[product[1]])
        return (f"blk.{layer[1]}.attn_qkv.{product[2]}",), lambda values: values[rows]
    if layer and layer[2].startswith("experts.gate_up_proj"):
        (gate, _), join = joined[layer[2]]
        part = f"blk.{layer[1]}.{gate.replace('gate', 'gate_up')}"
        return (part,), lambda values: join(*np.split(values, 2, axis=1)) if join else values
    return (), None


def unpaired(values: Values, num_heads: int) -> Values:
    """Returns rows of heads with the halves of a rotation apart, which the file has side by side.

    Example of one head of 4 rows: 0, 2, 1, 3 -> 0, 1, 2, 3.
    """
    rows = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)
