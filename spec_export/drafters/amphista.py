"""Defines Amphista: staged adaptation layers that read the sampled token, and heads that see each
other.

    h1_t = SAL1(fc1([h_t; e(x_{t+1})])),  h2_t = SAL2(fc2([h1_t; e(x_{t+1})]))

The staged adaptation layers SAL1 and SAL2 are causal decoder layers with a cache each. Heads 1 …
⌊K/2⌋ read MLP_k(h1), the others MLP_k(h2). These K rows, plus a position table, go through the
auto-embedding block, bidirectional self-attention over the K rows. Row k's output head guesses
token t + k + 1; elsewhere in this code that is guess k − 1.

    L = Σ_k mean[λ_soft · CE(q_k, p) + λ_hard · CE(q_k, token)],  p the target's distribution

Where the paper is silent: fc norms each of its inputs, because their scales differ a hundredfold. A
SAL's output passes through a norm that learns and starts with the final features' scale, so that
the heads read rows like those that the target's head reads.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export.drafters.fields import AtLeastOne, Heads, NotNegative
from spec_export.drafters.heads import HeadsDrafter
from spec_export.drafters.layers import Batch, CachedGraph, DecoderLayer, export_cached, fusion
from spec_export.graphs.trace import GraphInput, export
from spec_export.model import decoder
from spec_export.model.ends import LayerDims, TargetEnds
from spec_runtime.errors import UserError
from spec_runtime.files.mapping import Checked

STAGES = {"none": 0, "one": 1, "two": 2}


@dataclass(frozen=True)
class Config(Checked):
    """The settings of Amphista.

    The paper's ablations are `auto_embedding` false (without a position table too),
    `position_table` false, `staged` "one" (one SAL for all heads) or "none" (the heads read h_t,
    without sampled token and taps), and `sampled_token` false. Two `attention_layers` make the
    paper's variant alpha. `taps` are target layers that fc1 reads as well as h_t.
    """

    num_heads: AtLeastOne = 4
    staged: Literal["none", "one", "two"] = "two"
    sampled_token: bool = True
    auto_embedding: bool = True
    attention_layers: AtLeastOne = 1
    position_table: bool = True
    heads: Heads = "shared"
    taps: tuple[int, ...] = ()
    top_k: AtLeastOne = 10
    lambda_soft: NotNegative = 1.0
    lambda_hard: NotNegative = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.taps and self.staged == "none":
            raise UserError(f"got taps {list(self.taps)} without a layer that reads them")
        if self.staged == "two" and self.num_heads == 1:
            raise UserError('got one head for two stages: set staged = "one"')
        if not self.lambda_soft + self.lambda_hard:
            raise UserError("got lambda_soft 0 and lambda_hard 0, expected one of them positive")


class Mixer(nn.Module):
    """Norms each of `num_inputs` vectors and multiplies their concatenation by fc."""

    def __init__(self, num_inputs: int, dims: LayerDims) -> None:
        super().__init__()
        D = dims.hidden_size
        self.eps = dims.norm_eps
        self.norms = nn.ParameterList(torch.ones(D) for _ in range(num_inputs))
        self.fc = fusion(num_inputs, D)

    def forward(self, *inputs: Tensor) -> Tensor:
        pairs = zip(inputs, self.norms, strict=True)
        normed = [F.rms_norm(x.float(), norm.shape, norm, self.eps) for x, norm in pairs]
        return torch.cat(normed, -1) @ self.fc


class MutualAttention(nn.Module):
    """Self-attention over the K rows of a group [..., K, D]: every row sees all, without rotary
    embedding.

    It is pre-norm and residual, and its output product starts at 0. The attention is written as
    products and a softmax, because the graph's rewriter would take an Attention operator for one
    with a cache.
    """

    def __init__(self, dims: LayerDims) -> None:
        super().__init__()
        self.num_heads, self.eps, D = dims.num_heads, dims.norm_eps, dims.hidden_size
        width = dims.num_heads * dims.head_dim
        self.norm = nn.Parameter(torch.ones(D))
        self.qkv = nn.Parameter(torch.randn(D, 3 * width) * D**-0.5)
        self.out = nn.Parameter(torch.zeros(width, D))

    def forward(self, x: Tensor) -> Tensor:
        qkv = F.rms_norm(x, self.norm.shape, self.norm.to(x.dtype), self.eps) @ self.qkv
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)
            for part in qkv.chunk(3, dim=-1)
        )
        weight = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1)
        return x + (weight.to(v.dtype) @ v).transpose(-3, -2).flatten(-2) @ self.out


class Drafter(HeadsDrafter):
    """The trained part; see DrafterBase for what it borrows."""

    config: Config
    mixers: Any  # nn.ModuleLists and a ParameterList; mypy sees plain Modules in them
    layers: Any
    final_norms: Any
    attention: Any

    def __init__(
        self, config: Config, ends: TargetEnds, draft_token_ids: Tensor | None = None
    ) -> None:
        K, stages = config.num_heads, STAGES[config.staged]
        total = config.lambda_soft + config.lambda_hard
        super().__init__(
            config,
            ends,
            draft_token_ids,
            num_blocks=1,
            weight_K=torch.full((K,), total),
            soft_weight=config.lambda_soft / total,
        )
        num_inputs = [1 + len(config.taps), 1][:stages]
        self.mixers = nn.ModuleList(
            Mixer(count + config.sampled_token, ends.dims) for count in num_inputs
        )
        self.layers = nn.ModuleList(DecoderLayer(ends.dims) for _ in range(stages))
        for layer in self.layers:
            layer.load_target_layer(ends.last_layer)
            layer.start_as_identity()
        scale_D = torch.full((ends.dims.hidden_size,), ends.feature_scale)
        self.final_norms = nn.ParameterList(scale_D.clone() for _ in range(stages))
        # the first half of the heads reads the first stage, the others the last
        self.stage_of_head = [0 if k < K // 2 else max(stages - 1, 0) for k in range(K)]
        self.attention = nn.ModuleList()
        self.position_table = None
        if config.auto_embedding:
            self.attention.extend(
                MutualAttention(ends.dims) for _ in range(config.attention_layers)
            )
            if config.position_table:
                self.position_table = nn.Parameter(torch.zeros(K, ends.dims.hidden_size))

    def stage_inputs(self, feature: Tensor, embedding: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Returns two lists of inputs [..., D]: those of only fc1, h_t and taps, cut from feature
        [..., F]; and those of every fc, the embedding if the sampled token is read."""
        chunks = feature.split(self.dims.hidden_size, -1)[: 1 + len(self.config.taps)]
        return list(chunks), [embedding] if self.config.sampled_token else []

    def stages(self, batch: Batch) -> list[Tensor]:
        """Returns h1 and h2 of every row, [B, T-1, D] each; h_t itself with staged = "none"."""
        assert batch.feature_BTF is not None, "heads read features"
        embedding = self.embed_VD[batch.token_BT[:, 1:]]
        inputs, token = self.stage_inputs(batch.feature_BTF[:, :-1].float(), embedding)
        outputs = []
        for mixer, layer in zip(self.mixers, self.layers, strict=True):
            inputs = [layer.causal(mixer(*inputs, *token), self.cos, self.sin)]
            outputs += inputs
        return outputs or inputs[:1]

    def head_rows(self, batch: Batch, at: tuple[Tensor, Tensor]) -> Tensor:
        return self.exchange([rows_BRD[at] for rows_BRD in self.stages(batch)])

    def exchange(self, stages: list[Tensor]) -> Tensor:
        """Returns what the output heads read, [N, K, D], from N rows of h1 and h2, [..., D] each.

        In a graph all its products have rank 3, as the quantised forms want them.
        """
        size = (self.dims.hidden_size,)
        if self.final_norms:
            pairs = zip(stages, self.final_norms, strict=True)
            stages = [
                F.rms_norm(x, size, norm.to(x.dtype), self.dims.norm_eps) for x, norm in pairs
            ]
        picked = zip(self.blocks, self.stage_of_head, strict=True)
        rows = torch.stack([block(stages[stage]) for block, stage in picked], dim=-2)
        rows = rows.flatten(0, -3)
        if self.position_table is not None:
            rows = rows + self.position_table.to(rows.dtype)
        for layer in self.attention:
            rows = layer(rows)
        return rows

    # ---- export ----------------------------------------------------------------------------------

    def runtime_config(self) -> dict[str, Any]:
        return self.one_pass_config("features+tokens", 0, self.config.num_heads)

    def export(self, target: decoder.DecoderConfig) -> dict[str, ir.Model]:
        """Returns the graph "drafter", in the contiguous form; stateless with staged = "none".

        Its inputs are input_ids i64[1,N], features f32[1,N,F], position_ids, mask, logit_rows
        i64[M] and the caches; its outputs guess_ids i64[K,C] and guess_log_probs f32[K,C] of the
        last logit row, with a table of bigrams pair_log_probs f32[K-1,C,C], and the caches. The
        stateless graph reads only features f32[1,D] of the last committed position.
        """
        outputs, width = self.output_names(), self.dims.hidden_size
        if self.config.staged == "none":
            features = GraphInput("features", torch.zeros(1, width), {})
            return {"drafter": export(_StatelessGraph(self), [features], outputs, "amphista")}
        config = replace(target, num_layers=len(self.layers), taps=(), layers=())
        graph = export_cached(
            _DrafterGraph(self, self.layers, config),
            config,
            self.head_VD.dtype,
            outputs,
            "amphista",
            feature_width=(1 + len(self.config.taps)) * width,
        )
        return {"drafter": graph}


class _DrafterGraph(CachedGraph):
    """The graph "drafter": one chain of rows over the stages' caches."""

    def forward(self, input_ids: Tensor, features: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        drafter = self.drafter
        step, logit_rows, kv = self.shared_inputs(inputs)
        stage, token = drafter.stage_inputs(features, F.embedding(input_ids, drafter.embed_VD))
        rows: list[Tensor] = []
        caches: list[Tensor] = []
        for i, (mixer, layer) in enumerate(zip(drafter.mixers, self.layers, strict=True)):
            x, new = layer(mixer(*stage, *token), kv[2 * i : 2 * i + 2], step)
            stage = [x]
            rows.append(x.index_select(1, logit_rows[-1:]))
            caches += new
        return (*drafter.graph_outputs(drafter.exchange(rows)), *caches)


class _StatelessGraph(nn.Module):
    """The graph "drafter" without stages: one feature row in, top-k guesses out."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        drafter = self.drafter
        return tuple(drafter.graph_outputs(drafter.exchange([features[None]])))
