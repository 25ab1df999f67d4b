"""Makes drafters of a tiny target, and compares their losses with formulas written out."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from tiny_backbone import HEAD_DIM, HEADS, TRIMMED, VOCAB, backbone_of, tiny
from torch import Tensor
from torch.nn import functional as F

from spec_export import drafters
from spec_export.drafters.layers import Batch
from spec_export.model import target
from spec_export.model.decoder import Backbone

D = HEADS * HEAD_DIM
# What a tiny drafter has instead of a config's default.
SMALL: dict[str, dict[str, Any]] = {
    "draft_model": {
        "hidden_size": 48,
        "intermediate_size": 80,
        "layers": 2,
        "num_heads": 3,
        "num_kv_heads": 1,
    },
    "eagle": {"feature_noise": 0.0},
    "dflash": {"taps": (0, 2, 3), "mask_token_id": 3, "block_size": 4, "top_k": 5},
    "eagle3": {"taps": (0, 2, 3)},
    "peagle": {"taps": (0, 2, 3)},
    "pard": {
        "model": {
            **{"model_type": "llama", "hidden_size": 48, "intermediate_size": 80},
            **{"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1},
            **{"vocab_size": VOCAB + 2, "initializer_range": 0.2},
        },
        "mask_token_id": VOCAB,
    },
    "semi_autoregressive": {"head_width": 128},  # large enough for every product to be quantised
    "skip_layer": {"layers": 1},
}
PLUS_PLUS: dict[str, Any] = {"prefix_layer": True, "num_layers": 4, "soft_weight": 1.0}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "amphista": {
        "full": {},
        "alpha, tap": {"attention_layers": 2, "taps": (1,)},
        "own heads, odd number": {"heads": "own", "num_heads": 3},
        "no auto-embedding": {"auto_embedding": False},
        "no position table": {"position_table": False},
        "one stage": {"staged": "one"},
        "no sampled token": {"sampled_token": False},
        "no stage": {"staged": "none"},
    },
    "hydra": {
        "hydra": {},
        "hydra++": PLUS_PLUS | {"num_guesses": 3},
        "one head": {"num_guesses": 1},
        "mixed labels": {"num_guesses": 2, "num_layers": 2, "soft_weight": 0.3},
    },
    "redrafter": {
        "default": {},
        "five levels, soft labels": {"num_guesses": 5, "num_layers": 1, "soft_weight": 0.5},
        "no layer": {"num_guesses": 2, "num_layers": 0},
        "the authors'": {"width": "both", "head": "own", "num_guesses": 3, "soft_weight": 0.3},
        "the authors' width": {"width": "both", "num_guesses": 3},
        "a head of its own": {"head": "own", "num_guesses": 2, "num_layers": 1},
    },
    "semi_autoregressive": {
        "fixed attention": {},
        "lstm": {"kind": "lstm", "head": "shared", "soft_weight": 0.5},
        "rnn": {"kind": "rnn", "head": "shared"},
        "no layer": {"kind": "transformer", "layers": 0, "num_guesses": 2},
        "two layers": {"kind": "transformer", "layers": 2, "num_guesses": 4, "head": "shared"},
    },
}


@cache
def backbone() -> Backbone:
    return backbone_of(tiny("llama"), taps=(1, 2))


def new_drafter(name: str, vocabulary: Tensor | None = None, **config: Any) -> Any:
    """Returns a drafter as training begins with it."""
    torch.manual_seed(1)
    module = drafters.load(name)
    fields = SMALL.get(name, {}) | config
    return module.Drafter(module.Config(**fields), target.ends(backbone()), vocabulary)


def make_drafter(name: str, vocabulary: Tensor | None = None, **config: Any) -> Any:
    """Returns a drafter with random weights, so that every one of them matters."""
    drafter = new_drafter(name, vocabulary, **config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return drafter


def width_of(drafter: Any) -> int:
    """Returns the width of the features that a drafter reads."""
    return (1 + len(drafter.config.taps)) * D


def make_batch(lengths: Sequence[int] = (8,), width: int = D) -> Batch:
    """Returns random tokens and features; every token is an answer's, and 1 pads."""
    torch.manual_seed(2)
    B, T, length_B = len(lengths), max(lengths), torch.tensor(lengths)
    is_token_BT = torch.arange(T) < length_B[:, None]
    token_BT = torch.where(is_token_BT, torch.randint(VOCAB, (B, T)), 1)
    return Batch(token_BT, is_token_BT, torch.randn(B, T, width), length_B)


def features_of(batch: Batch) -> Tensor:
    assert batch.feature_BTF is not None
    return batch.feature_BTF


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Returns x over its root mean square."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x [..., Dh] with rotary embedding by the angles of its position."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attend(drafter: Any, layer: Any, x_TD: Tensor, positions: Sequence[int]) -> Tensor:
    """Returns the attended heads [T, H*Dh] of a causal layer, row by row and head by head."""
    dims = layer.dims
    q, k, v = layer.project_qkv(x_TD)
    cos, sin = drafter.cos[list(positions), None], drafter.sin[list(positions), None]
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    rows = []
    for t in range(len(x_TD)):
        heads = []
        for h in range(dims.num_heads):
            g = h // (dims.num_heads // dims.num_kv_heads)
            weight = torch.softmax(k[: t + 1, g] @ q[t, h] * dims.head_dim**-0.5, -1)
            heads.append(weight @ v[: t + 1, g])
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def decoder_layer(drafter: Any, layer: Any, x_TD: Tensor, positions: Sequence[int]) -> Tensor:
    """Returns what a causal layer makes of its rows."""
    x_TD = x_TD + attend(drafter, layer, x_TD, positions) @ layer.out
    gate, up = (rms(x_TD, layer.dims.norm_eps) * layer.mlp_norm @ layer.gate_up).chunk(2, -1)
    return x_TD + (F.silu(gate) * up) @ layer.down


Reference = tuple[Tensor, list[int], list[int]]  # loss, correct_K, count_K


def cross_entropy(
    drafter: Any,
    batch: Batch,
    logits_of: Callable[[Tensor, Tensor], Any],
    shares_K: Sequence[tuple[float, float]],
) -> Reference:
    """Returns Σ_k mean_t of −hard_k log q(token) − soft_k Σ p log q, token by token.

    `logits_of` takes tokens and features of one sequence and returns the logits of guess k at row
    t as [t][k]; `shares_K` are hard_k and soft_k.
    """
    ids = drafter.draft_token_ids.tolist()
    losses_K: list[list[Tensor]] = [[] for _ in shares_K]
    correct_K = [0] * len(shares_K)
    for b, length in enumerate(batch.length_B.tolist()):
        token_T, feature_TF = batch.token_BT[b, :length], features_of(batch)[b, :length]
        logits = logits_of(token_T, feature_TF)
        for k, (hard, soft) in enumerate(shares_K):
            for t in range(length - 2 - k):
                token = int(token_T[t + 2 + k])
                if not batch.loss_BT[b, t + 2 + k] or token not in ids:
                    continue
                log_q_V = torch.log_softmax(logits[t][k], -1)
                # what the target itself says of that token
                p_V = torch.softmax(drafter.head_VD @ feature_TF[t + 1 + k, :D], -1)
                label = ids.index(token)
                losses_K[k].append(-hard * log_q_V[label] - soft * (p_V @ log_q_V))
                correct_K[k] += int(log_q_V.argmax() == label)
    loss = torch.stack([torch.stack(losses).mean() for losses in losses_K]).sum()
    return loss, correct_K, [len(losses) for losses in losses_K]


def check_loss(
    drafter: Any,
    reference: Callable[[Batch], Reference],
    lengths: Sequence[int] = (14,),
    width: int | None = None,
    atol: float = 1e-4,
    empty: Sequence[str] = (),
) -> None:
    """Compares loss, counts and gradient with those of `reference`.

    A prompt, a turn between two answers, a token outside the draft vocabulary and a right guess 0
    are in the batch. Every parameter must have a gradient that is not zero, but those named
    `empty`, which have no element.
    """
    batch = make_batch(lengths, width_of(drafter) if width is None else width)
    batch.loss_BT[0, :5] = False
    batch.loss_BT[0, 7] = False
    batch.token_BT[0, 6] = 5
    assert 5 not in TRIMMED
    batch.token_BT[0, -1] = drafter.guesses(batch, 1)[0][0, -2, 0, 0]
    loss, counts = drafter.loss(batch)
    loss.backward()
    gradients = {name: p.grad for name, p in drafter.named_parameters()}
    drafter.zero_grad(set_to_none=True)
    expected, correct_K, count_K = reference(batch)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert counts["count_K"].tolist() == count_K
    assert counts["correct_K"].tolist() == correct_K
    assert correct_K[0] >= 1
    for name, parameter in drafter.named_parameters():
        got = gradients[name]
        assert got is not None, name
        assert got.any() or (name in empty and not got.numel()), name
        torch.testing.assert_close(got, parameter.grad, rtol=1e-3, atol=atol)
