"""EAGLE-1 and Medusa as others publish them: tensors by their names, forward passes in plain torch.

They are written after the published definitions, and share no code with ours.
"""

from collections.abc import Sequence
from typing import Any

import torch
from published_eagle3 import attended
from torch import Tensor

State = dict[str, Tensor]


def medusa_state(num_heads: int, num_layers: int, D: int, V: int | None) -> State:
    """Returns random heads; V: the rows of each one's output matrix, None for version 2."""
    state = {}
    for i in range(num_heads):
        for j in range(num_layers):
            state[f"{i}.{j}.linear.weight"] = torch.randn(D, D) * 0.2
            state[f"{i}.{j}.linear.bias"] = torch.randn(D) * 0.2
        if V is not None:
            state[f"{i}.{num_layers}.weight"] = torch.randn(V, D) * 0.3
    return state


def medusa_log_q(state: State, num_layers: int, hidden_D: Tensor, head_VD: Tensor) -> list[Tensor]:
    """Returns each head's log-probabilities after a position whose normed last state is given."""
    found: list[Tensor] = []
    while (i := len(found)) < 100 and f"{i}.0.linear.weight" in state:
        x = hidden_D
        for j in range(num_layers):
            y = state[f"{i}.{j}.linear.weight"] @ x + state[f"{i}.{j}.linear.bias"]
            x = x + y * torch.sigmoid(y)
        found.append(torch.log_softmax(state.get(f"{i}.{num_layers}.weight", head_VD) @ x, -1))
    return found


def eagle_state(config: dict[str, Any], has_bias: bool) -> State:
    """Returns the random tensors of an EAGLE-1 drafter with these sizes."""
    D, inner, H = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    G, Dh = config["num_key_value_heads"], D // H
    shapes = {"fc.weight": (D, 2 * D)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{i}.self_attn.q_proj.weight": (H * Dh, D),
            f"layers.{i}.self_attn.k_proj.weight": (G * Dh, D),
            f"layers.{i}.self_attn.v_proj.weight": (G * Dh, D),
            f"layers.{i}.self_attn.o_proj.weight": (D, H * Dh),
            f"layers.{i}.mlp.gate_proj.weight": (inner, D),
            f"layers.{i}.mlp.up_proj.weight": (inner, D),
            f"layers.{i}.mlp.down_proj.weight": (D, inner),
        }
    # larger weights make attention so sharp that levels magnify rounding
    state = {name: torch.randn(shape) * 0.1 for name, shape in shapes.items()}
    for i in range(config["num_hidden_layers"]):
        state[f"layers.{i}.post_attention_layernorm.weight"] = 1 + torch.randn(D) * 0.2
        if i:
            state[f"layers.{i}.input_layernorm.weight"] = 1 + torch.randn(D) * 0.2
        if config.get("qkv_bias"):
            for part in "qkv":
                rows = len(state[f"layers.{i}.self_attn.{part}_proj.weight"])
                state[f"layers.{i}.self_attn.{part}_proj.bias"] = torch.randn(rows) * 0.5
    return state | ({"fc.bias": torch.randn(D) * 0.2} if has_bias else {})


class PublishedEagle:
    """Runs published weights over the target's embedding."""

    def __init__(self, state: State, config: dict[str, Any], embed_VD: Tensor) -> None:
        self.state, self.config, self.embed_VD = state, config, embed_VD

    def levels(self, feature_TD: Tensor, tokens: Sequence[int], num_levels: int) -> list[Tensor]:
        """Returns the predicted features [D] of levels 0 … behind pairs (feature t, token t + 1).

        tokens: those of the text from 0 on, one more than features, and one for each level.
        """
        rows, outputs = list(feature_TD), []
        for level in range(num_levels):
            ids = list(tokens[1 : len(feature_TD) + 1 + level])
            outputs.append(self._run(torch.stack(rows), self.embed_VD[ids]))
            rows.append(outputs[-1])
        return outputs

    def _run(self, feature_RD: Tensor, embedding_RD: Tensor) -> Tensor:
        x = self._linear(torch.cat((embedding_RD, feature_RD), -1), "fc")
        x = x + self.state.get("fc.bias", torch.zeros(1))
        for i in range(self.config["num_hidden_layers"]):
            name = f"layers.{i}"
            read = self._norm(x, f"{name}.input_layernorm") if i else x
            x = x + self._linear(self._attention(read, name), f"{name}.self_attn.o_proj")
            read = self._norm(x, f"{name}.post_attention_layernorm")
            gate, up = (self._linear(read, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
            x = x + self._linear(gate * torch.sigmoid(gate) * up, f"{name}.mlp.down_proj")
        return x[-1]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.state[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.state[f"{name}.weight"]

    def _attention(self, read: Tensor, name: str) -> Tensor:
        Dh = len(read[0]) // self.config["num_attention_heads"]
        parts = [
            self._linear(read, f"{name}.self_attn.{part}_proj")
            + self.state.get(f"{name}.self_attn.{part}_proj.bias", torch.zeros(1))
            for part in "qkv"
        ]
        theta = self.config.get("rope_theta", 10000.0)
        return attended([part.view(len(read), -1, Dh) for part in parts], theta, len(read))
