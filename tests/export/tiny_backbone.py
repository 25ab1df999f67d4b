"""Makes tiny random models with the backbones read from them, and runs a backbone step by step."""

import warnings
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from spec_export.model.decoder import Backbone

VOCAB, LAYERS, HEADS, HEAD_DIM = 61, 3, 4, 16
ORIGINAL = 16  # original context of the rotary kinds that stretch one
CONTEXT = 64
TRIMMED = torch.tensor([i for i in range(VOCAB) if i % 5])  # a draft vocabulary

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN_FACTOR = YARN | {"attention_factor": 0.7, "beta_fast": 8.0, "beta_slow": 2.0}


def llama3_factors() -> np.ndarray:
    """Returns by what LLAMA3 divides each frequency of a head of 32, by its paper's formula."""
    wavelength = 2 * np.pi * 500.0 ** (np.arange(0, 32, 2) / 32)
    smooth = np.clip((ORIGINAL / wavelength - 1) / (4 - 1), 0, 1)
    return 1 / ((1 - smooth) / 8 + smooth)


def longrope(half_width: int, **extra: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": [1.0 + 0.1 * i for i in range(half_width)],
        "long_factor": [1.5 + 0.7 * i for i in range(half_width)],
        "original_max_position_embeddings": ORIGINAL,
        **extra,
    }


def tiny(family: str, seed: int = 0, **options: Any) -> Any:
    """Returns a random transformers model whose norms, biases, positions and heads all matter."""
    known: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HEADS * HEAD_DIM,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": 0.15,
    }
    if family in ("llama", "mistral", "qwen3"):
        known["head_dim"] = HEAD_DIM
    if family == "mistral":
        known["sliding_window"] = None
    config = transformers.AutoConfig.for_model(family, **known | options)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def backbone_of(model: Any, **options: Any) -> Backbone:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return Backbone.from_transformers(model, scratch=32, **options)


class Decoder:
    """Runs a backbone in its contiguous form, with room to move `A` rows."""

    A = 4

    def __init__(self, backbone: Backbone, slots: int | None = None) -> None:
        self.backbone = backbone
        config = backbone.config
        self.caches = list(config.empty_caches(slots or config.rows, backbone.dtype).values())
        self.length = 0  # rows that are final
        self.accepted: list[int] = []  # slots of the last step's rows to keep

    def feeds(self, tokens: list[int], parents: list[int]) -> list[Tensor]:
        """Returns the inputs of one step; the parent of node 0 is 0, for the last kept row."""
        a, n = len(self.accepted), len(tokens)
        base = self.length + a
        mask = torch.zeros(n, self.caches[0].shape[2], dtype=torch.bool)
        mask[:, :base] = True
        depth = [0] * n
        for i, parent in enumerate(parents):
            if i > 0:
                depth[i] = depth[parent] + 1
                mask[i, base:] = mask[parent, base:]
            mask[i, base + i] = True
        src = self.accepted + [0] * (self.A - a)
        perm = [*range(a), *range(self.A, self.A + n), *range(a, self.A)]
        return [
            torch.tensor([tokens]),
            torch.tensor([[base + d for d in depth]]),
            mask[None, None],
            torch.arange(n),
            torch.tensor([self.length]),
            torch.tensor(src, dtype=torch.int64),
            torch.tensor(perm),
        ]

    def run(self, feeds: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            outputs = self.backbone(*feeds, *self.caches)
        self.caches = list(outputs[-len(self.caches) :])
        return list(outputs[: -len(self.caches)])

    def step(self, tokens: list[int], parents: list[int]) -> list[Tensor]:
        """Returns logits, features and taps of the nodes. Call `keep` before the next step."""
        outputs = self.run(self.feeds(tokens, parents))
        self.length += len(self.accepted)
        self.accepted = []
        return outputs

    def keep(self, nodes: list[int]) -> None:
        if len(nodes) <= self.A:
            self.accepted = [self.length + node for node in nodes]
        else:
            assert nodes == list(range(len(nodes))), nodes
            self.length += len(nodes)


def chain(n: int) -> list[int]:
    return [max(0, i - 1) for i in range(n)]


def path_to(node: int, parents: list[int]) -> list[int]:
    path = [node]
    while path[-1] != 0:
        path.append(parents[path[-1]])
    return path[::-1]


def reference(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def random_tokens(n: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
