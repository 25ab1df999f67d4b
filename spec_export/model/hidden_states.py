"""Runs a transformers model for what drafters read of it: the final feature and inner layers."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from spec_export.model.families import require_known


def features_and_taps(body: Any, token_BT: Tensor, taps: Sequence[int]) -> list[Tensor]:
    """Returns the final hidden state, after the last norm, and each tap: [B, T, D] each.

    body: a causal LM's `model`. Tap i is what layer i reads, and with n layers tap n is what the
    last norm reads, which transformers does not return.
    """
    last: list[Tensor] = []
    norm = body.get_submodule(require_known(body.config.model_type).final_norm)
    hook = norm.register_forward_pre_hook(lambda module, given: last.append(given[0]))
    try:
        out = body(token_BT, output_hidden_states=bool(taps), use_cache=False)
    finally:
        hook.remove()
    n = body.config.num_hidden_layers
    states = [last[-1] if tap == n else out.hidden_states[tap] for tap in taps]
    return [out.last_hidden_state, *states]
