"""Moves activation outliers into the weights, so that int8 loses less; the function stays the same.

A channel of a product's input is divided by s and its row of the weight multiplied by s, with
s = max|x|^a / max|W|^(1-a) per channel (SmoothQuant, Xiao et al. 2023, eq. 4). The division goes
into the scale of the norm in front, so it is free at run time. That is done where a norm feeds only
the product: QKV, and gate with up. The LM head is left out because its norm also makes the graph's
`features`, which drafters read. Out and down are left out because no norm stands in front of them;
folding their s into v and up was measured to cost more in those weights than it saves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spec_export.decoder import Backbone, Layer, Projection, RMSNorm

# The exponent a: how much of a channel's range moves into the weights. Measured on the demo, on
# prose that is none of the smoothing texts, as divergence from the float32 target in nats a token:
# 0.033 without smoothing, 0.019 at 0.5, 0.017 at 0.65.
ALPHA = 0.65
TINY = 1e-5


def smooth(backbone: Backbone, smoothing_texts: Sequence[Sequence[int]]) -> None:
    """Rescales the layers of a float32 backbone in place, by the activations on these texts.

    smoothing_texts: token ids of a few typical inputs, each of two tokens or more. The rescaled
    weights are new tensors, so a model that the backbone shared them with stays as it was.
    """
    largest = largest_inputs(backbone, smoothing_texts)
    for layer in backbone.layers:
        assert isinstance(layer, Layer)
        for norm, product in _pairs(layer):
            weight_KN = product.weight.detach()
            x_K, w_K = largest[product].clamp(min=TINY), weight_KN.abs().amax(1).clamp(min=TINY)
            scale_K = (x_K**ALPHA / w_K ** (1 - ALPHA)).clamp(min=TINY)
            norm.weight = nn.Parameter(norm.weight.detach() / scale_K, requires_grad=False)
            product.weight = nn.Parameter(weight_KN * scale_K[:, None], requires_grad=False)


def _pairs(layer: Layer) -> list[tuple[RMSNorm, Projection]]:
    """Returns the layer's norms that feed one product only, each with its product."""
    return [(layer.attention_norm, layer.attention.qkv), (layer.mlp_norm, layer.mlp.gate_up)]


def largest_inputs(
    backbone: Backbone, smoothing_texts: Sequence[Sequence[int]]
) -> dict[nn.Module, Tensor]:
    """Returns the largest |x| per input channel, f32[K], of each product that follows a norm.

    The first token of each text is left out: its few huge values (an attention sink) occur at no
    other token.
    """
    largest: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen_K = args[0][1:].abs().amax(0)
        largest[module] = torch.maximum(largest.get(module, seen_K), seen_K)

    products: list[nn.Module] = []
    for layer in backbone.layers:
        assert isinstance(layer, Layer)
        products += [product for _, product in _pairs(layer)]
    hooks = [product.register_forward_pre_hook(note) for product in products]
    try:
        with torch.inference_mode():
            for tokens in smoothing_texts:
                assert len(tokens) > 1, "one token says nothing"
                row_N = torch.arange(len(tokens))
                none, start = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
                mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()[None, None]
                backbone(
                    torch.tensor([tokens]),
                    row_N[None],
                    mask,
                    start,
                    start,
                    none,
                    row_N,
                    *backbone.empty_cache(len(tokens)),
                )
    finally:
        for hook in hooks:
            hook.remove()
    return {module: seen_K.clone() for module, seen_K in largest.items()}
