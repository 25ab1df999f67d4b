"""Runs a transformers model for what drafters read of it: the final feature and inner layers."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from spec_export.model.families import require_known


def features_and_taps(body: Any, token_BT: Tensor, taps: Sequence[int]) -> list[Tensor]:
    """Returns the final hidden state, after the last norm, and each tap: [B, T, D] each.

    body: a causal LM's `model`. Tap i is what layer i reads, and with n layers tap n is what the
    last norm reads. No other layer's states are kept.
    """
    norm = body.get_submodule(require_known(body.config.model_type).final_norm)
    readers = [*body.layers, norm]
    read_by: dict[Any, Tensor] = {}
    with ExitStack() as hooks:
        for tap in taps:
            hook = readers[tap].register_forward_pre_hook(
                lambda module, given: read_by.update({module: given[0]})
            )
            hooks.callback(hook.remove)
        out = body(token_BT, use_cache=False)
    return [out.last_hidden_state, *(read_by[readers[tap]] for tap in taps)]
