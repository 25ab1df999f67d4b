"""Moves activation outliers into the weights, so that int8 loses less; the function stays the same.

A channel of a product's input is divided by s and its row of the weight multiplied by s, with
s = max|x|^a / max|W|^(1-a) per channel (SmoothQuant, Xiao et al. 2023, eq. 4). The division goes
into the scale of the norm in front, so it is free at run time, where that norm feeds only the
product: QKV, and gate with up. The LM head's norm also makes the graph's `features`, which drafters
read, so the head's rows are divided in a step of their own, a few microseconds. Out and down are
left out because no norm stands in front of them; folding their s into v and up was measured to cost
more in those weights than it saves.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from spec_export.model.decoder import Backbone, Layer, VocabularyTable
from spec_export.model.deferred import changed, real, replaced
from spec_export.model.modules.basic import LayerNorm, frozen

# The exponent a: how much of a channel's range moves into the weights. Measured on the demo as
# divergence from the float32 target in nats a token. Layers, on prose that is none of the smoothing
# texts: 0.033 without smoothing, 0.019 at 0.5, 0.017 at 0.65. Only the head in int8, on answers:
# 0.009 without, 0.0066 at 0.2, 0.0032 at 0.5, 0.0044 at 0.65, 0.0068 at 0.8.
ALPHA = 0.65
HEAD_ALPHA = 0.5
TINY = 1e-5


def smooth(
    backbone: Backbone, smoothing_texts: Sequence[Sequence[int]], *, head_only: bool = False
) -> None:
    """Rescales layers and head of a float32 backbone in place, by the activations on these texts.

    smoothing_texts: token ids of a few typical inputs, each of two tokens or more. head_only:
    leaves the layers as they are, which a checkpoint made for int8 has smoothed itself. The
    rescaled weights are new tensors, so a model that the backbone shared them with stays as it was.
    """
    for module, largest in largest_outputs(backbone, smoothing_texts):
        if module is backbone.norm:
            head = backbone.head
            scale_D = _scale(largest[module], _largest_weights(real(head.weight), 0), HEAD_ALPHA)
            backbone.head = VocabularyTable(head.weight, 1 / scale_D)
            backbone.head.weight = changed(head.weight, partial(torch.mul, scale_D))
            continue
        assert isinstance(module, Layer)
        for norm, product in () if head_only else module.norms_of_one_product():
            largest_K = _largest_weights(real(product.weight), 1)
            scale_K = _scale(largest[norm], largest_K, ALPHA)
            norm.weight = frozen(norm.weight / scale_K)
            if isinstance(norm, LayerNorm) and norm.bias is not None:
                norm.bias = frozen(norm.bias / scale_K)
            product.weight = changed(product.weight, partial(torch.mul, scale_K[:, None]))


def _largest_weights(weight: Tensor, axis: int) -> Tensor:
    """Returns max|W| along an axis, without a copy of W."""
    low, high = weight.aminmax(dim=axis)
    return torch.maximum(high, -low)


def _scale(largest_x_K: Tensor, largest_w_K: Tensor, alpha: float) -> Tensor:
    """Returns s = max|x|^alpha / max|W|^(1-alpha) per channel, f32[K]."""
    x_K, w_K = largest_x_K.clamp(min=TINY), largest_w_K.clamp(min=TINY)
    return (x_K**alpha / w_K ** (1 - alpha)).clamp(min=TINY)


def largest_outputs(
    backbone: Backbone, smoothing_texts: Sequence[Sequence[int]]
) -> Iterator[tuple[nn.Module, dict[nn.Module, Tensor]]]:
    """Yields each layer, and last the final norm, with the largest |x| per channel, f32[K], that
    each of its norms in front of a product gives.

    The first token of each text is left out: its few huge values (an attention sink) occur at no
    other token. All texts go through a layer before the next one is read.
    """
    runs = []
    with replaced(backbone.embedding, real), torch.no_grad():
        for tokens in smoothing_texts:
            assert len(tokens) > 1, "one token says nothing"
            row_N = torch.arange(len(tokens))
            none, start = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
            mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()[None, None]
            shared = backbone.shared_inputs(row_N[None], mask, start, none, row_N)
            caches = backbone.config.empty_caches(len(tokens), backbone.dtype)
            num_layers = backbone.config.num_layers
            shared, _ = backbone.with_ancestors(list(caches.values()), shared, num_layers)
            runs.append((backbone.embedding.embed(torch.tensor(tokens)), shared, caches))
    for i, layer in enumerate((*backbone.layers, backbone.norm)):
        largest: dict[nn.Module, Tensor] = {}

        def note(
            norm: nn.Module,
            args: tuple[Tensor, ...],
            output_NK: Tensor,
            largest: dict[nn.Module, Tensor] = largest,
        ) -> None:
            seen_K = output_NK[1:].abs().amax(0)
            largest[norm] = torch.maximum(largest.get(norm, seen_K), seen_K)

        pairs = layer.norms_of_one_product() if isinstance(layer, Layer) else [(layer, None)]
        hooks = [norm.register_forward_hook(note) for norm, _ in pairs]
        try:
            with replaced(layer, real), torch.no_grad():
                for k, (x_ND, shared, caches) in enumerate(runs):
                    if isinstance(layer, Layer):
                        past = [each for name, each in caches.items() if f"kv.{i}." in name]
                        runs[k] = layer(x_ND, past, shared)[0], shared, caches
                    else:
                        layer(x_ND)
        finally:
            for hook in hooks:
                hook.remove()
        yield layer, largest
