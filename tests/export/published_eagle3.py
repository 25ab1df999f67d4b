"""EAGLE-3 and P-EAGLE as others publish them: tensors by name, forward passes in plain torch.

They are written after the published definitions of the models, and share no code with ours.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]


def published_state(drafter: Any) -> State:
    """Returns the weights of a drafter of ours as `speculators` names and stores them."""
    config, fusion = drafter.config, drafter.fusion
    state = {"fc.weight": fusion.fc.T, "norm.weight": drafter.norm, "lm_head.weight": drafter.head}
    state["embed_tokens.weight"] = drafter.embedding_table
    if config.fc_norm:
        state |= {f"fc_norm.{i}.weight": fusion.norm[i] for i in range(len(config.taps))}
    if config.norm_before_fc:
        state["input_norm.weight"] = fusion.norm
    if hasattr(config, "mask_token_id"):
        state["mask_hidden"] = drafter.mask_hidden.view(1, 1, -1)
    H, G, Dh = drafter.dims.num_heads, drafter.dims.num_kv_heads, drafter.dims.head_dim
    for i, layer in enumerate(drafter.layers):
        q, k, v = layer.qkv.T.split((H * Dh, G * Dh, G * Dh))
        gate, up = layer.gate_up.T.chunk(2)
        parts = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.out.T,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down.T,
            "post_attention_layernorm": layer.mlp_norm,
            "input_layernorm": layer.attention_norm if i else layer.token_norm,
        }
        if not i:
            parts["hidden_norm"] = layer.attention_norm
        if config.qk_norms:
            parts |= {"self_attn.q_norm": layer.q_norm, "self_attn.k_norm": layer.k_norm}
        state |= {f"layers.{i}.{name}.weight": tensor for name, tensor in parts.items()}
    return state


class Published:
    """Runs published weights; `drafter` gives only numbers: flags, head sizes, eps."""

    def __init__(self, drafter: Any, rope_theta: float) -> None:
        self.state, self.config, self.dims = published_state(drafter), drafter.config, drafter.dims
        self.theta = rope_theta

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.dims.norm_eps).rsqrt()
        return x * scale * self.state[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.state[f"{name}.weight"].T

    def fused(self, taps: Sequence[Tensor]) -> Tensor:
        if self.config.fc_norm:
            taps = [self.norm(tap, f"fc_norm.{i}") for i, tap in enumerate(taps)]
        x = torch.cat(list(taps), -1)
        return self.linear(self.norm(x, "input_norm") if self.config.norm_before_fc else x, "fc")

    def fused_of(self, feature_TF: Tensor) -> Tensor:
        """Returns the fused taps of features, which begin with the final one."""
        return self.fused(
            feature_TF.split(feature_TF.shape[-1] // (1 + len(self.config.taps)), -1)[1:]
        )

    def levels(self, fused_TD: Tensor, tokens: Sequence[int], num_levels: int) -> list[Tensor]:
        """Returns the output rows [D] of levels 0 … after the pairs (fused t, token t + 1).

        tokens: those of the text from 0 on, one more than rows of fused, and one for each level.
        """
        T, rows, outputs = len(fused_TD), list(fused_TD), []
        for level in range(num_levels):
            ids = list(tokens[1 : T + 1 + level])
            embedding = self.state["embed_tokens.weight"][ids]
            outputs.append(self._run(torch.stack(rows), embedding)[-1])
            is_normed = self.config.norm_output
            rows.append(self.norm(outputs[-1], "norm") if is_normed else outputs[-1])
        return outputs

    def group(self, fused_TD: Tensor, tokens: Sequence[int], num_masks: int) -> Tensor:
        """Returns P-EAGLE's output rows [K + 1, D] of the last pair and of K masks after it."""
        hidden = self.state["mask_hidden"].flatten().chunk(len(self.config.taps))
        rows = torch.cat((fused_TD, self.fused(hidden).expand(num_masks, -1)))
        ids = [*tokens[1 : len(fused_TD) + 1], *[self.config.mask_token_id] * num_masks]
        return self._run(rows, self.state["embed_tokens.weight"][ids])[-1 - num_masks :]

    def log_q(self, output: Tensor) -> Tensor:
        """Returns log-probabilities over the draft vocabulary."""
        return torch.log_softmax(self.linear(self.norm(output, "norm"), "lm_head"), -1)

    def _run(self, x: Tensor, embedding: Tensor) -> Tensor:
        for i in range(self.config.layers):
            name = f"layers.{i}"
            read = self.norm(embedding if i == 0 else x, f"{name}.input_layernorm")
            if i == 0:
                normed = self.norm(x, f"{name}.hidden_norm")
                read = torch.cat((read, normed), -1)
                x = normed if self.config.norm_before_residual else x
            window = self.config.window if i in self.config.sliding_layers else None
            mixed = self._attention(read, name, window or len(x))
            x = x + self.linear(mixed, f"{name}.self_attn.o_proj")
            read = self.norm(x, f"{name}.post_attention_layernorm")
            gate, up = (self.linear(read, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
            x = x + self.linear(gate * torch.sigmoid(gate) * up, f"{name}.mlp.down_proj")
        return x

    def _attention(self, read: Tensor, name: str, window: int) -> Tensor:
        d, part = self.dims, f"{name}.self_attn."
        parts = [
            self.linear(read, f"{part}{x}_proj").view(len(read), -1, d.head_dim) for x in "qkv"
        ]
        if self.config.qk_norms:
            parts[:2] = [self.norm(parts[i], f"{part}{x}_norm") for i, x in enumerate("qk")]
        return attended(parts, self.theta, window)


def attended(parts: Sequence[Tensor], theta: float, window: int) -> Tensor:
    """Returns causal attention [T, H*Dh] of queries, keys and values [T, ., Dh], which sees this
    many positions back."""
    T, H, Dh = parts[0].shape
    angle = torch.outer(torch.arange(T).float(), theta ** -(torch.arange(0, Dh, 2) / Dh))
    cos, sin = (torch.cat((part, part), -1) for part in (angle.cos(), angle.sin()))

    def turn(heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, -1)
        return heads * cos + torch.cat((-second, first), -1) * sin

    q, k, v = (part.transpose(0, 1) for part in parts)
    k, v = (each.repeat_interleave(H // len(k), 0) for each in (turn(k), v))
    score, ones = turn(q) @ k.transpose(1, 2) * Dh**-0.5, torch.ones(T, T)
    score = score.masked_fill(ones.triu(1) + ones.tril(-window) > 0, -torch.inf)
    return (score.softmax(-1) @ v).transpose(0, 1).reshape(T, -1)
