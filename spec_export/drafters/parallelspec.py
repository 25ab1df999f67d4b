"""Defines ParallelSpec: a small transformer guesses K+1 tokens in one pass, through K trained
[MASK] embeddings.

A *parallel group* is one real row and the K mask rows behind it. Real row t reads the feature of
position t and the embedding of token t+1, is at position t and guesses token t+2, the token after
the root. Mask row k of its group is at position t+k, sees the real rows up to t and its own group's
masks 1 … k, and guesses token t+2+k:

    t = 2, K = 2        real0 real1 real2 real3 | mask1 mask2
    mask1 (position 3)    x     x     x     .   |   x     .
    mask2 (position 4)    x     x     x     .   |   x     x

There are two styles (section 4 of the paper), each guess's loss being a mean over its rows:

    medusa:  L = −log q(y_0) − Σ_{k≥1} λ_k log q(y_k),  λ_k = decay^k
    eagle:   L = Σ_{k≥0} [w_reg · SmoothL1(f_k, f̂_k) + w_cls · CE(LM_head(f̂_k), y_k)]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export import decoder
from spec_export.drafters.layers import (
    Batch,
    DecoderLayer,
    DrafterBase,
    TargetEnds,
    as_traceable,
    fusion,
    rotate,
)
from spec_export.drafters.losses import (
    IGNORED,
    feature_regression,
    head_cross_entropy,
    position_weights,
)
from spec_export.drafters.markov import require_rank
from spec_export.graphs.trace import GraphInput, export, step_inputs

STYLES = ("medusa", "eagle")
INPUTS = ("tokens", "features+tokens")
MASK_FEATURES = ("zero", "anchor")
LOSSES = ("ce", "tv", "lk")
DEPTH_WEIGHTS = ("decay", "reach")


@dataclass(frozen=True)
class Config:
    """The settings of ParallelSpec.

    `num_masks` K masks give K+1 guesses. `taps` are target layers that are read beside the final
    feature. `mask_feature` is what mask rows read in place of a feature: "zero", nothing, or
    "anchor", the feature of their group's real row, with which the drafter learns sooner.
    `anchor_fraction` is the share of labelled rows that get a group in a training step.

    The other fields leave the paper's form where they are not their defaults:

    - `markov_rank` r > 0 adds a bias of rank r through which a guess reads the guess before it (see
      `markov.py`). With `markov_reads_hidden` the bias depends on the guess's own row too.
    - `mask_reads_token`: mask rows read the embedding of the root beside their own.
    - `loss`: "ce" is the paper's cross-entropy. "tv" is `tv_weight` times the total variation
      distance between the target's distribution and the drafter's, and 1 − `tv_weight` times the
      cross-entropy. "lk" is the logarithm of the share of guesses that sampling would accept.
    - `depth_weights`: λ_k is decay^k ("decay"), or follows from how often the guesses before guess
      k are all right ("reach").
    - `prompt_weight`: the weight of rows that predict a prompt's tokens; answers' rows weigh 1.
    - `depth_keep`: the share of groups that keep mask k + 1 among those that keep mask k in a
      training step, so that deeper guesses cost less.
    - `feature_noise`: in training each feature gets uniform noise in ±`feature_noise`, as EAGLE's
      does. Style "eagle" alone reads it.
    """

    num_masks: int = 4
    style: str = "medusa"
    inputs: str = "features+tokens"
    layers: int = 1
    taps: tuple[int, ...] = ()
    top_k: int = 10
    mask_feature: str = "zero"
    decay: float = 0.8
    soft_weight: float = 0.0
    w_reg: float = 1.0
    w_cls: float = 0.1
    anchor_fraction: float = 1.0
    markov_rank: int = 0
    markov_reads_hidden: bool = False
    mask_reads_token: bool = False
    loss: str = "ce"
    tv_weight: float = 0.9
    depth_weights: str = "decay"
    prompt_weight: float = 0.0
    depth_keep: float = 1.0
    feature_noise: float = 0.0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("style", self.style, STYLES),
            ("inputs", self.inputs, INPUTS),
            ("mask_feature", self.mask_feature, MASK_FEATURES),
            ("loss", self.loss, LOSSES),
            ("depth_weights", self.depth_weights, DEPTH_WEIGHTS),
        ):
            if value not in known:
                raise ValueError(f"got {name} {value!r}, expected one of {', '.join(known)}")
        if self.style == "eagle" and self.inputs == "tokens":
            raise ValueError("style 'eagle' regresses features: set inputs = \"features+tokens\"")
        if self.inputs == "tokens" and self.taps:
            raise ValueError('inputs = "tokens" reads no target layer: leave taps empty')
        if self.num_masks < 0 or self.layers < 1 or self.top_k < 1:
            raise ValueError(
                f"got num_masks {self.num_masks}, layers {self.layers}, top_k {self.top_k}, "
                "expected num_masks >= 0, layers >= 1, top_k >= 1"
            )
        if not 0 < self.anchor_fraction <= 1 or not 0 <= self.soft_weight <= 1:
            raise ValueError("anchor_fraction must lie in (0, 1], soft_weight in [0, 1]")
        if not 0 <= self.tv_weight <= 1 or not 0 < self.depth_keep <= 1:
            raise ValueError(
                f"got tv_weight {self.tv_weight} and depth_keep {self.depth_keep}, expected "
                "numbers in [0, 1] and in (0, 1]"
            )
        if self.prompt_weight < 0 or self.feature_noise < 0:
            raise ValueError(
                f"got prompt_weight {self.prompt_weight} and feature_noise {self.feature_noise}, "
                "expected neither negative"
            )
        if self.feature_noise and self.style != "eagle":
            raise ValueError(
                f"got feature_noise {self.feature_noise} with style {self.style!r}, expected 0: "
                "noise is a part of style 'eagle'"
            )
        require_rank(self.markov_rank, self.markov_reads_hidden, self.num_masks + 1)


class Drafter(DrafterBase):
    """The trained part: masks, fc, layers and norm; see DrafterBase for what it borrows."""

    is_one_pass = True
    config: Config
    layers: Any  # nn.ModuleList of DecoderLayer; mypy sees plain Modules in it

    def __init__(
        self, config: Config, ends: TargetEnds, draft_token_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, ends, draft_token_ids)
        D, K = ends.dims.hidden_size, config.num_masks
        num_chunks = 1 if config.inputs == "tokens" else 2 + len(config.taps)
        self.num_features = num_chunks - 1
        spread = ends.embed_VD.float().std()
        self.mask_embed = nn.Parameter(
            ends.embed_VD.float().mean(0) + 0.5 * spread * torch.randn(K, D)
        )
        if num_chunks > 1:
            # the chunks' scales differ a hundredfold, so each is normalised before fc mixes them
            self.input_norm = nn.Parameter(torch.ones(num_chunks, D))
            self.fc = fusion(num_chunks, D)
        self.layers = nn.ModuleList(DecoderLayer(ends.dims) for _ in range(config.layers))
        norm_D = ends.final_norm_D.float().clone()
        for layer in self.layers:
            layer.load_target_layer(ends.last_layer)
        if num_chunks > 1:
            # before training the drafter predicts that the feature does not change, which the LM
            # head can read
            for layer in self.layers:
                layer.start_as_identity()
            if config.style == "eagle":
                nn.init.constant_(self.input_norm[0], self.feature_scale)
            norm_D = torch.full((D,), self.feature_scale)
        if config.style == "medusa":
            self.final_norm = nn.Parameter(norm_D)
        self.add_markov_bias(config.markov_rank, config.markov_reads_hidden)

    # ---- rows ------------------------------------------------------------------------------------

    def input_rows(self, embedding: Tensor, feature: Tensor | None) -> Tensor:
        """Returns the layers' input [..., D] from embedding [..., D] and feature [..., F], which
        may be 0 on mask rows."""
        if self.config.inputs == "tokens":
            return embedding
        assert feature is not None, "features+tokens needs features"
        D, eps = self.dims.hidden_size, self.dims.norm_eps
        chunks = torch.cat((feature, embedding), -1).unflatten(-1, (-1, D))
        normed = F.rms_norm(chunks.float(), (D,), None, eps) * self.input_norm
        return normed.flatten(-2) @ self.fc

    def mask_rows(self, embedding: Tensor, feature: Tensor | None, anchor_BA: Tensor) -> Tensor:
        """Returns the layers' input of mask rows, [B, A, K, D].

        Their groups are anchored at the real rows anchor_BA i64 of embedding [B, T-1, D] and
        feature [B, T-1, F].
        """
        shape = (*anchor_BA.shape, self.config.num_masks, -1)
        row_B1 = torch.arange(len(anchor_BA), device=anchor_BA.device)[:, None]
        tokens: Tensor = self.mask_embed
        if self.config.mask_reads_token:  # row t carries token t + 1, the group's root
            tokens = embedding[row_B1, anchor_BA][:, :, None] + self.mask_embed
        if feature is None or self.config.mask_feature == "zero":
            width = self.num_features * self.dims.hidden_size
            zeros = self.mask_embed.new_zeros(*tokens.shape[:-1], width)
            return self.input_rows(tokens, zeros).expand(shape)
        anchors = feature[row_B1, anchor_BA][:, :, None]
        return self.input_rows(tokens.expand(shape), anchors.expand(shape))

    def output_rows(self, hidden: Tensor) -> Tensor:
        """Returns what the shared head reads, [..., D]: the normed row (medusa) or the predicted
        feature itself (eagle)."""
        if self.config.style == "eagle":
            return hidden
        return F.rms_norm(
            hidden, (self.dims.hidden_size,), self.final_norm.to(hidden.dtype), self.dims.norm_eps
        )

    # ---- group-wise parallel training ------------------------------------------------------------

    def hidden_rows(self, batch: Batch, anchor_BA: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the last hidden states of the real rows, [B, T-1, D], and of the mask rows of the
        groups anchored at the real rows anchor_BA, [B, A, K, D]."""
        K = self.config.num_masks
        embedding = self.embed_VD[batch.token_BT[:, 1:]]
        feature = None if batch.feature_BTF is None else batch.feature_BTF[:, :-1]
        real = self.input_rows(embedding, feature)
        R = real.shape[1]
        masks = self.mask_rows(embedding, feature, anchor_BA)
        cos, sin = self.cos, self.sin
        position_BAK = anchor_BA[..., None] + torch.arange(1, K + 1, device=real.device)
        group_KK = torch.ones(K, K, dtype=torch.bool, device=real.device).tril()
        visible_BAR = torch.arange(R, device=real.device) <= anchor_BA[..., None]
        for layer in self.layers:
            q, k, v = layer.project_qkv(real)
            q, k = rotate(q, cos[:R], sin[:R]), rotate(k, cos[:R], sin[:R])
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            v = v.to(q.dtype)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            if K:
                qm, km, vm = layer.project_qkv(masks)
                qm = rotate(qm, cos[position_BAK], sin[position_BAK])
                km = rotate(km, cos[position_BAK], sin[position_BAK])
                masks = layer.finish(
                    masks, self._attend_groups(qm, km, vm, k, v, visible_BAR, group_KK)
                )
            real = layer.finish(real, attended.transpose(1, 2).flatten(-2))
        return real, masks

    def _attend_groups(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        real_k: Tensor,
        real_v: Tensor,
        visible_BAR: Tensor,
        group_KK: Tensor,
    ) -> Tensor:
        """Returns the attention [B,A,K,H*Dh] of mask rows q [B,A,K,H,Dh] over real keys and values
        [B,G,R,Dh] and those of their own group, k and v [B,A,K,G,Dh].

        visible_BAR says which real rows a group sees, group_KK which masks a mask sees.
        """
        B, A, K, H, Dh = q.shape
        G = real_k.shape[1]
        q = q.unflatten(-2, (G, H // G)) * Dh**-0.5  # heads h of one key/value head g
        to_real = torch.einsum("bakghd,bgrd->bghakr", q, real_k)
        to_group = torch.einsum("bakghd,bajgd->bghakj", q, k)
        low = torch.finfo(to_real.dtype).min
        to_real = to_real.masked_fill(~visible_BAR[:, None, None, :, None], low)
        to_group = to_group.masked_fill(~group_KK, low)
        weight = torch.cat((to_real, to_group), -1).softmax(-1).to(v.dtype)
        R = real_k.shape[2]
        out = torch.einsum("bghakr,bgrd->bakghd", weight[..., :R], real_v)
        out = out + torch.einsum("bghakj,bajgd->bakghd", weight[..., R:], v)
        return out.reshape(B, A, K, H * Dh)

    def loss(
        self, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the mean loss of a batch, f32 scalar, and each guess's top-1 hits `correct_K` and
        labelled rows `count_K`, i64[K+1].

        Positions without a label (past the end, a prompt token, or a token outside the draft
        vocabulary) are ignored. Groups are anchored at a random `anchor_fraction` of the labelled
        rows; every real row stays.
        """
        config = self.config
        K, D = config.num_masks, self.dims.hidden_size
        label_BRK = self.labels(batch, K + 1)
        has_label_BR = label_BRK[..., 0] != IGNORED
        anchor_BA, is_anchor_BA = self._choose_anchors(has_label_BR, generator)
        real, masks = self.hidden_rows(batch, anchor_BA)

        at_real = has_label_BR.nonzero(as_tuple=True)
        at_group = is_anchor_BA.nonzero(as_tuple=True)
        group_row = (at_group[0], anchor_BA[at_group])
        rows = torch.cat((real[at_real], masks[at_group].flatten(0, 1)))
        label_R = torch.cat((label_BRK[at_real][:, 0], label_BRK[group_row][:, 1:].flatten()))
        guess_K = torch.arange(1, K + 1, device=real.device)
        guess_R = torch.cat((torch.zeros_like(at_real[0]), guess_K.repeat(len(at_group[0]))))
        # the target's own row for that guess: guess k of row t is what position t+1+k predicts
        target_b = torch.cat((at_real[0], at_group[0].repeat_interleave(K)))
        target_t = torch.cat((at_real[1], group_row[1].repeat_interleave(K))) + 1 + guess_R
        keep = label_R != IGNORED
        rows, label_R, guess_R = rows[keep], label_R[keep], guess_R[keep]
        target_b, target_t = target_b[keep], target_t[keep]

        count_K = torch.bincount(guess_R, minlength=K + 1)
        decay = config.decay if config.style == "medusa" else 1.0
        lambda_K = position_weights(K + 1, decay).to(count_K.device)
        weight_R = (lambda_K / count_K.clamp(min=1))[guess_R]
        out = self.output_rows(rows)
        head_VD = self.head_VD.to(out.dtype)
        teacher_RD = None
        if batch.feature_BTF is not None:
            teacher_RD = batch.feature_BTF[target_b, target_t, :D].to(out.dtype)
        loss, top_R = head_cross_entropy(
            out, head_VD, label_R, weight_R, teacher_RD, config.soft_weight
        )
        if config.style == "eagle":
            assert teacher_RD is not None
            loss = config.w_cls * loss + config.w_reg * feature_regression(
                out, teacher_RD, weight_R
            )
        correct_K = torch.zeros_like(count_K).index_add_(0, guess_R, (top_R == label_R).long())
        return loss, {"correct_K": correct_K, "count_K": count_K}

    def _choose_anchors(
        self, has_label_BR: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the row indices i64[B, A] of the groups' anchors, and bool[B, A], False where a
        sequence has fewer than A anchors and the index is padding."""
        fraction = self.config.anchor_fraction
        score = torch.rand(has_label_BR.shape, generator=generator).to(has_label_BR.device)
        score = torch.where(has_label_BR, score, -1.0)
        num_B = (has_label_BR.sum(1) * fraction).ceil().long()
        A = max(int(num_B.max()), 1)
        anchor_BA = score.topk(A, dim=1).indices
        return anchor_BA, torch.arange(A, device=num_B.device) < num_B[:, None]

    @torch.no_grad()
    def guesses(self, batch: Batch, top_k: int) -> tuple[Tensor, Tensor]:
        """Returns the top guesses at every real row: token ids i64 and log-probabilities f32, both
        [B, T-1, K+1, top_k]. None is conditioned on the guess before it."""
        return self.top_guesses(self._all_rows(batch), self.output_rows, top_k)

    @torch.no_grad()
    def guesses_with_pairs(self, batch: Batch, top_k: int) -> tuple[Tensor, Tensor, Tensor | None]:
        rows = self._all_rows(batch)
        ids, log_probs = self.top_guesses(rows, self.output_rows, top_k)
        return ids, log_probs, self.pairs(rows, self.output_rows, ids, log_probs)

    def _all_rows(self, batch: Batch) -> Tensor:
        """Returns the hidden rows of all guesses at every real row, [B, T-1, K+1, D]."""
        B, T = batch.token_BT.shape
        anchor_BA = torch.arange(T - 1, device=batch.token_BT.device).expand(B, T - 1)
        real, masks = self.hidden_rows(batch, anchor_BA)
        return torch.cat((real[:, :, None], masks), dim=2)

    # ---- export ----------------------------------------------------------------------------------

    def runtime_config(self) -> dict[str, Any]:
        """Returns what the proposer reads: see `spec_runtime/proposers/heads.py`."""
        added: dict[str, Any] = {}
        if self.config.markov_rank:
            added["markov_rank"] = self.config.markov_rank
        if self.config.mask_reads_token:
            added["mask_reads_token"] = True
        return {
            "inputs": self.config.inputs,
            "mask_feature": self.config.mask_feature,
            "num_masks": self.config.num_masks,
            "num_guesses": self.config.num_masks + 1,
            "mask_token_base": len(self.embed_VD),
            "taps": list(self.config.taps),
            "style": self.config.style,
            "top_k": self.config.top_k,
            **added,
        }

    def export(
        self, target: decoder.DecoderConfig, *, capacity_symbolic: bool = True
    ) -> dict[str, ir.Model]:
        """Returns the graph "drafter" in the contiguous form.

        Its inputs are input_ids i64[1,N], features f32[1,N,F] (not with inputs = "tokens"),
        position_ids, mask, logit_rows i64[M] and the caches; its outputs guess_ids i64[M,C],
        guess_log_probs f32[M,C] and the caches. With V = mask_token_base mask k has the id
        V + k − 1, and with `mask_reads_token` the id k · V + root token. With a `markov_rank` there
        is the output pair_log_probs f32[K,C,C] over the first K+1 rows of logits, see
        `CandidateTables`.
        """
        config = replace(target, num_layers=self.config.layers, taps=())
        inputs = step_inputs(config, self.head_VD.dtype, capacity_symbolic)
        if self.num_features:
            width = self.num_features * self.dims.hidden_size
            num_rows = inputs[0].example.shape[1]
            inputs.insert(1, GraphInput("features", torch.zeros(1, num_rows, width), {1: "N"}))
        caches = [f"kv.{layer}.{part}.out" for layer in range(config.num_layers) for part in "kv"]
        pairs = ["pair_log_probs"] if self.markov is not None else []
        outputs = ["guess_ids", "guess_log_probs", *pairs, *caches]
        return {"drafter": export(_DrafterGraph(self, config), inputs, outputs, "parallelspec")}


class _DrafterGraph(nn.Module):
    """The graph "drafter": one chain of rows over a cache, top-k guesses out."""

    mask_KD: Tensor

    def __init__(self, drafter: Drafter, config: decoder.DecoderConfig) -> None:
        super().__init__()
        self.drafter = drafter
        self.layers = nn.ModuleList(as_traceable(layer, config) for layer in drafter.layers)
        self.tables = drafter.candidate_tables()
        # row 0 is what real rows add to their token, nothing
        self.register_buffer("mask_KD", F.pad(drafter.mask_embed.detach(), (0, 0, 1, 0)))
        if drafter.num_features:
            # the gains are folded into fc, so that one operator norms all chunks
            self.fc = decoder.Projection(
                (drafter.input_norm.reshape(-1, 1) * drafter.fc).detach().t()
            )
            self.unit_norm = decoder.RMSNorm(torch.ones(config.hidden_size), config.norm_eps)

    def forward(self, input_ids: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        drafter = self.drafter
        feature, inputs = (inputs[0], inputs[1:]) if drafter.num_features else (None, inputs)
        position_ids, mask, logit_rows, write_index, src, perm, *kv = inputs
        D = drafter.dims.hidden_size
        x = self._tokens(input_ids)
        if feature is not None:
            chunks = torch.cat((feature, x), -1).view(1, -1, drafter.num_features + 1, D)
            x = self.fc(self.unit_norm(chunks).view(1, -1, (drafter.num_features + 1) * D))
        step = decoder.SharedInputs(
            position_ids, mask, write_index, src, perm, drafter.cos, drafter.sin
        )
        caches: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            x, k, v = layer(x, kv[2 * i], kv[2 * i + 1], step)
            caches += (k, v)
        rows_MD = drafter.output_rows(x.index_select(1, logit_rows)).view(-1, D)
        logits_MV = F.linear(rows_MD, drafter.head_VD)
        index_MC, log_prob_MC = drafter.top_draft_tokens(logits_MV, drafter.config.top_k)
        outputs = [drafter.draft_token_ids[index_MC], log_prob_MC]
        if self.tables is not None:
            # The pairs have a fixed shape, which axes of logit rows cannot give. A run of the
            # prompt has fewer rows, and the last one repeated: nobody reads its guesses.
            K = drafter.config.num_masks
            outputs.append(
                self.tables(
                    *(
                        torch.cat((x, x[-1:].expand(K, -1)))[: K + 1]
                        for x in (rows_MD, index_MC, log_prob_MC)
                    )
                )
            )
        return (*outputs, *caches)

    def _tokens(self, input_ids: Tensor) -> Tensor:
        """Returns the token chunk [1, N, D] of real and mask rows."""
        drafter = self.drafter
        V, K = len(drafter.embed_VD), drafter.config.num_masks
        if not K:
            return F.embedding(input_ids.clamp(max=V - 1), drafter.embed_VD)
        if drafter.config.mask_reads_token:
            # ONNX's Div of integers; torch's own would be traced as one of float32
            whole = torch.tensor(V)
            k = torch.onnx.ops.symbolic(
                "Div", (input_ids, whole), dtype=torch.int64, shape=input_ids.shape
            )
            token = F.embedding(input_ids - k * V, drafter.embed_VD)
            return token + F.embedding(k, self.mask_KD)
        real = F.embedding(input_ids.clamp(max=V - 1), drafter.embed_VD)
        masked = F.embedding((input_ids - V).clamp(min=0), drafter.mask_embed)
        return torch.where((input_ids >= V)[..., None], masked, real)
