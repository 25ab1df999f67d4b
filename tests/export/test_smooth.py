"""Tests smooth: outliers shrink. That the function stays the same is tested in test_families.py."""

from typing import Any

import torch
from tiny_backbone import backbone_of, random_tokens, tiny

from spec_export.graphs.smooth import largest_outputs, smooth
from spec_export.model.decoder import Layer


def outputs_of(backbone: Any, sequences: list[list[int]]) -> dict[Any, Any]:
    """Returns the largest outputs of all norms."""
    pairs = largest_outputs(backbone, sequences)
    return {norm: largest_K for _, largest in pairs for norm, largest_K in largest.items()}


def test_an_outlier_channel_of_the_head_shrinks() -> None:
    model = tiny("llama", num_hidden_layers=1)
    with torch.no_grad():
        model.model.norm.weight[3] = 50.0
    backbone = backbone_of(model)
    sequences = [random_tokens(12, seed=seed) for seed in range(3)]
    largest_D = outputs_of(backbone, sequences)[backbone.norm]
    smooth(backbone, sequences)
    assert backbone.head is not backbone.embedding
    assert backbone.head.input_scale is not None
    smoothed_D = largest_D * backbone.head.input_scale
    assert largest_D.max() / largest_D.median() > 20
    assert smoothed_D.max() / smoothed_D.median() < largest_D.max() / largest_D.median() / 3


def test_layers_of_a_checkpoint_made_for_int8_stay_as_they_are() -> None:
    backbone = backbone_of(tiny("llama", num_hidden_layers=2))
    before = {name: value.clone() for name, value in backbone.layers.state_dict().items()}
    head_VD = backbone.head.weight.clone()
    smooth(backbone, [random_tokens(12, seed=0)], head_only=True)
    for name, value in backbone.layers.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not torch.equal(backbone.head.weight, head_VD)


def test_an_outlier_channel_shrinks() -> None:
    model = tiny("llama", num_hidden_layers=2)
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = 50.0
    backbone = backbone_of(model)
    sequences = [random_tokens(12, seed=seed) for seed in range(3)]

    def spread() -> float:
        """Returns the largest channel over the typical one, at the second layer's QKV."""
        layer = backbone.layers[1]
        assert isinstance(layer, Layer)
        assert layer.attention_norm is not None
        largest_K = outputs_of(backbone, sequences)[layer.attention_norm]
        return float(largest_K.max() / largest_K.median())

    before = spread()
    smooth(backbone, sequences)
    assert before > 20
    assert spread() < before / 3
