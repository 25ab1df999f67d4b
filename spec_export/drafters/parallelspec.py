"""Defines ParallelSpec: a small transformer guesses K+1 tokens in one pass, through K trained
[MASK] embeddings.

A *parallel group* is one real row and the K mask rows after it. Real row t reads the feature of
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
from typing import Annotated, Any, Literal

import onnx_ir as ir
import torch
from annotated_types import Gt, Le
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export.drafters.fields import AtLeastOne, AtLeastZero, NotNegative, Share
from spec_export.drafters.layers import (
    Batch,
    CachedGraph,
    DecoderLayer,
    DrafterBase,
    export_cached,
    fusion,
    noisy_features,
    rotate,
    tokens_ahead,
)
from spec_export.drafters.losses import (
    IGNORED,
    feature_regression,
    head_losses,
    position_weights,
)
from spec_export.drafters.rollout import attend_groups, choose_anchors
from spec_export.model import decoder
from spec_export.model.ends import TargetEnds
from spec_runtime.errors import UserError
from spec_runtime.files.mapping import Checked

PositiveShare = Annotated[float, Gt(0), Le(1)]


@dataclass(frozen=True)
class Config(Checked):
    """The settings of ParallelSpec.

    `num_masks` K masks give K+1 guesses. `taps` are target layers that are read with the final
    feature. `mask_feature` is what mask rows read in place of a feature: "zero", nothing, or
    "anchor", the feature of their group's real row, with which the drafter learns sooner.
    `anchor_fraction` is the share of labelled rows that get a group in a training step.

    The other fields leave the paper's form where they are not their defaults:

    - `depth_weights`: λ_k is decay^k ("decay"), or of each group the probability that the drafter
      gives to its guesses before guess k being all right ("reach").
    - `feature_noise`: noise on the features that are read in training, as EAGLE has (see
      `noisy_features`). Only style "eagle" reads it.
    """

    num_masks: AtLeastZero = 4
    style: Literal["medusa", "eagle"] = "medusa"
    inputs: Literal["tokens", "features+tokens"] = "features+tokens"
    layers: AtLeastOne = 1
    taps: tuple[int, ...] = ()
    top_k: AtLeastOne = 10
    mask_feature: Literal["zero", "anchor"] = "zero"
    decay: float = 0.8
    soft_weight: Share = 0.0
    w_reg: float = 1.0
    w_cls: float = 0.1
    anchor_fraction: PositiveShare = 1.0
    depth_weights: Literal["decay", "reach"] = "decay"
    feature_noise: NotNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.style == "eagle" and self.inputs == "tokens":
            raise UserError("style 'eagle' regresses features: set inputs = \"features+tokens\"")
        if self.inputs == "tokens" and self.taps:
            raise UserError('inputs = "tokens" reads no target layer: leave taps empty')
        if self.feature_noise and self.style != "eagle":
            raise UserError(
                f"got feature_noise {self.feature_noise} with style {self.style!r}, expected 0: "
                "noise is a part of style 'eagle'"
            )


@dataclass(frozen=True)
class _Rows:
    """The R rows that train in a step, in the order of the target positions that guess their label.

    Row r is guess k_R of the group anchored at real row t_R of sequence b_R, and stands at index_R
    of all real rows and then all mask rows; i64[R] each.
    """

    b_R: Tensor
    t_R: Tensor
    k_R: Tensor
    index_R: Tensor

    def only(self, chosen: Tensor) -> _Rows:
        """Returns the rows `chosen`, bool[R] or indices i64."""
        return _Rows(self.b_R[chosen], self.t_R[chosen], self.k_R[chosen], self.index_R[chosen])

    def target_position(self, batch: Batch) -> Tensor:
        """Returns the position b · T + t + 1 + k whose feature predicts the row's label, i64[R]."""
        return self.b_R * batch.token_BT.shape[1] + self.t_R + 1 + self.k_R


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
                nn.init.constant_(self.input_norm[0], ends.feature_scale)
            norm_D = torch.full((D,), ends.feature_scale)
        if config.style == "medusa":
            self.final_norm = nn.Parameter(norm_D)

    # ---- rows ------------------------------------------------------------------------------------

    def input_rows(
        self, embedding: Tensor, feature: Tensor | None, anchor_BA: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the layers' input of real rows [B, T-1, D] and of mask rows [B, A, K, D].

        Real rows read embedding [B, T-1, D] and feature [B, T-1, F]; the mask rows' groups are
        anchored at the real rows anchor_BA i64[B, A].
        """
        row_B1 = torch.arange(len(anchor_BA), device=anchor_BA.device)[:, None]
        if self.config.inputs == "tokens":
            return embedding, self.mask_embed.expand(*anchor_BA.shape, -1, -1)
        assert feature is not None, "features+tokens needs features"
        # The gains are folded into fc, as in the graph: then neither features nor embeddings, which
        # are frozen, need a gradient. The product is a sum over the chunks, so that mask rows have
        # their anchor's part of it without a product of their own.
        fc = self.input_norm.reshape(-1, 1) * self.fc
        of_feature, of_token = fc.split((self.num_features * self.dims.hidden_size, len(fc[0])))
        from_feature = self._unit_chunks(feature) @ of_feature
        masks = self._unit_chunks(self.mask_embed) @ of_token
        if self.config.mask_feature == "anchor":
            masks = from_feature[row_B1, anchor_BA][:, :, None] + masks
        real = from_feature + self._unit_chunks(embedding) @ of_token
        return real, masks.expand(*anchor_BA.shape, *masks.shape[-2:])

    def _unit_chunks(self, rows: Tensor) -> Tensor:
        """Returns rows [..., n·D] in float32, each chunk of D scaled to a root mean square of 1."""
        chunks = rows.float().unflatten(-1, (-1, self.dims.hidden_size))
        return F.rms_norm(chunks, chunks.shape[-1:], None, self.dims.norm_eps).flatten(-2)

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
        B, T = batch.token_BT.shape
        hidden = self.layers[-1].finish(*self.attended_rows(batch, anchor_BA))
        real, masks = hidden.split((B * (T - 1), anchor_BA.numel() * self.config.num_masks))
        shape = (*anchor_BA.shape, self.config.num_masks, self.dims.hidden_size)
        return real.unflatten(0, (B, T - 1)), masks.view(shape)

    def attended_rows(self, batch: Batch, anchor_BA: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what the last layer's `finish` reads of all N rows: the layer's input [N, D] and
        the attended heads [N, H*Dh].

        They are the real rows of all sequences, and then the mask rows of their groups.
        """
        K = self.config.num_masks
        embedding = self.embed_VD[batch.token_BT[:, 1:]]
        feature = None if batch.feature_BTF is None else batch.feature_BTF[:, :-1]
        real, masks = self.input_rows(embedding, feature, anchor_BA)
        B, R, A = *real.shape[:2], anchor_BA.shape[1]
        x = torch.cat((real.flatten(0, 1), masks.flatten(0, 2)))
        position_BR = torch.arange(R, device=x.device).expand(B, R)
        position_BAK = anchor_BA[..., None] + torch.arange(1, K + 1, device=x.device)
        position_N = torch.cat((position_BR.flatten(), position_BAK.flatten()))
        cos, sin = self.cos[position_N], self.sin[position_N]
        group_KK = torch.ones(K, K, dtype=torch.bool, device=x.device).tril()
        visible_BAR = torch.arange(R, device=x.device) <= anchor_BA[..., None]
        attended = x
        for i, layer in enumerate(self.layers):
            if i:
                x = self.layers[i - 1].finish(x, attended)
            q, k, v = layer.project_qkv(x)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            parts = [part.split((B * R, B * A * K)) for part in (q, k, v.to(q.dtype))]
            q, k, v = (of_real.unflatten(0, (B, R)).transpose(1, 2) for of_real, _ in parts)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            attended = mixed.transpose(1, 2).flatten(2).flatten(0, 1)
            if K:
                qm, km, vm = (of_mask.unflatten(0, (B, A, K)) for _, of_mask in parts)
                of_masks = attend_groups(qm, km, vm, k, v, visible_BAR[:, :, None], group_KK)
                attended = torch.cat((attended, of_masks.flatten(0, 2)))
        return x, attended

    def loss(
        self, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the mean loss of a batch, f32 scalar, and the answers' top-1 hits `correct_K` and
        labelled rows `count_K` of each guess, i64[K+1].

        Positions without a label (past the end, a prompt's token, or a token outside the draft
        vocabulary) are ignored; style "eagle" regresses the features of tokens outside the draft
        vocabulary too. Groups are anchored at a random `anchor_fraction` of the rows that train;
        every real row stays.
        """
        config, num_guesses = self.config, self.config.num_masks + 1
        label_BRK = self.labels(batch, num_guesses)
        trains_BRK = label_BRK != IGNORED
        if config.style == "eagle":
            trains_BRK = tokens_ahead(batch.loss_BT, num_guesses, False)
        anchor_BA, is_anchor_BA = choose_anchors(
            trains_BRK[..., 0], config.anchor_fraction, generator
        )
        seen = replace(batch, feature_BTF=noisy_features(batch, config.feature_noise, generator))
        rows = self._training_rows(trains_BRK, anchor_BA, is_anchor_BA)
        # the other rows are needed only as keys and values
        chosen = (x.index_select(0, rows.index_R) for x in self.attended_rows(seen, anchor_BA))
        out = self.output_rows(self.layers[-1].finish(*chosen))
        return self._loss_of_rows(batch, label_BRK, rows, out)

    def _loss_of_rows(
        self, batch: Batch, label_BRK: Tensor, rows: _Rows, out: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns what `loss` does from the rows that train and what the head reads of them, `out`
        [R, D]."""
        config, K = self.config, self.config.num_masks
        label_R = label_BRK[rows.b_R, rows.t_R, rows.k_R]
        every, every_out, labelled_R = rows, out, label_R != IGNORED
        if config.style == "eagle":
            rows, out, label_R = rows.only(labelled_R), out[labelled_R], label_R[labelled_R]
        target_ND = None
        if batch.feature_BTF is not None:
            target_ND = batch.feature_BTF.flatten(0, 1)[:, : self.dims.hidden_size].to(out.dtype)
        losses = head_losses(
            out,
            self.head_VD,
            label_R,
            config.soft_weight,
            target_ND,
            rows.target_position(batch),
            self.shortlist,
        )
        factor_BRK = self._depth_weights(label_BRK.shape, rows, losses.label_probability_R)
        weight_R = self._mean_weights(rows, factor_BRK)
        loss = (losses.loss_R * weight_R).sum()
        if config.style == "eagle":
            assert target_ND is not None
            loss = config.w_cls * loss + config.w_reg * feature_regression(
                every_out,
                target_ND[every.target_position(batch)],
                self._mean_weights(every, factor_BRK),
            )
        count_K = torch.bincount(rows.k_R, minlength=K + 1)
        correct_K = torch.zeros_like(count_K).index_add_(0, rows.k_R, losses.is_top_R.long())
        return loss, {"correct_K": correct_K, "count_K": count_K}

    def _training_rows(self, trains_BRK: Tensor, anchor_BA: Tensor, is_anchor_BA: Tensor) -> _Rows:
        """Returns the real rows that train, and the mask rows that do of the groups anchored at
        anchor_BA.

        trains_BRK bool[B, T-1, K+1] says which guesses of a real row's group have something to
        learn.
        """
        B, R, _ = trains_BRK.shape
        A, K = anchor_BA.shape[1], self.config.num_masks
        row_B1 = torch.arange(B, device=anchor_BA.device)[:, None]
        of_mask_BAK = trains_BRK[row_B1, anchor_BA][..., 1:] & is_anchor_BA[..., None]
        b, t = trains_BRK[..., 0].nonzero(as_tuple=True)
        mask_b, a, j = of_mask_BAK.nonzero(as_tuple=True)
        rows = _Rows(
            torch.cat((b, mask_b)),
            torch.cat((t, anchor_BA[mask_b, a])),
            torch.cat((torch.zeros_like(t), j + 1)),
            torch.cat((b * R + t, B * R + (mask_b * A + a) * K + j)),
        )
        order = (rows.b_R * (R + K) + rows.t_R + rows.k_R).argsort(stable=True)
        return rows.only(order)

    def _depth_weights(
        self, shape: tuple[int, ...], rows: _Rows, label_probability_R: Tensor
    ) -> Tensor:
        """Returns λ_k of all guesses, f32[B, T-1, K+1] or [K+1].

        With depth_weights = "reach" λ_k of a group is Π_{j<k} q_j(y_j), how likely the drafter says
        that all guesses before guess k are right; a guess without a label counts as wrong.
        """
        if self.config.depth_weights == "decay":
            decay = self.config.decay if self.config.style == "medusa" else 1.0
            return position_weights(shape[-1], decay).to(rows.k_R.device)
        right_BRK = label_probability_R.new_zeros(shape)
        right_BRK[rows.b_R, rows.t_R, rows.k_R] = label_probability_R
        return F.pad(right_BRK.cumprod(-1), (1, -1), value=1.0)

    def _mean_weights(self, rows: _Rows, factor: Tensor) -> Tensor:
        """Returns the factor of each row's loss, f32[R]: that of a guess is the mean over its rows,
        times the guess's `factor` f32[K+1] or [B, T-1, K+1]."""
        count_K = torch.bincount(rows.k_R, minlength=self.config.num_masks + 1)
        factor_R = factor[rows.k_R] if factor.ndim == 1 else factor[rows.b_R, rows.t_R, rows.k_R]
        return factor_R / count_K[rows.k_R]

    @torch.no_grad()
    def guesses(self, batch: Batch, top_k: int) -> tuple[Tensor, Tensor]:
        """Returns the top guesses at every real row: token ids i64 and log-probabilities f32, both
        [B, T-1, K+1, top_k]. None is conditioned on the guess before it."""
        B, T = batch.token_BT.shape
        anchor_BA = torch.arange(T - 1, device=batch.token_BT.device).expand(B, T - 1)
        real, masks = self.hidden_rows(batch, anchor_BA)
        rows = torch.cat((real[:, :, None], masks), dim=2)
        return self.top_guesses(rows, self.output_rows, top_k)

    # ---- export ----------------------------------------------------------------------------------

    def runtime_config(self) -> dict[str, Any]:
        config = self.config
        own = self.one_pass_config(config.inputs, config.num_masks, config.num_masks + 1)
        return own | {"mask_feature": config.mask_feature, "style": config.style}

    def export(self, target: decoder.DecoderConfig) -> dict[str, ir.Model]:
        """Returns the graph "drafter" in the contiguous form.

        Its inputs are input_ids i64[1,N], features f32[1,N,F] (not with inputs = "tokens"),
        position_ids, mask, logit_rows i64[M] and the caches; its outputs guess_ids i64[M,C],
        guess_log_probs f32[M,C] and the caches. With V = mask_token_base mask k has the id
        V + k − 1. With a table of bigrams there is the output pair_log_probs f32[K,C,C] over the
        first K+1 rows of logits, see `BigramPairs`.
        """
        config = replace(target, num_layers=self.config.layers, taps=(), layers=())
        graph = export_cached(
            _DrafterGraph(self, config),
            config,
            self.head_VD.dtype,
            self.output_names(),
            "parallelspec",
            feature_width=self.num_features * self.dims.hidden_size,
        )
        return {"drafter": graph}


class _DrafterGraph(CachedGraph):
    """The graph "drafter": one chain of rows over a cache, top-k guesses out."""

    def __init__(self, drafter: Drafter, config: decoder.DecoderConfig) -> None:
        super().__init__(drafter, drafter.layers, config)
        if drafter.num_features:
            # the gains are folded into fc, so that one operator norms all chunks
            self.fc = decoder.Projection(
                (drafter.input_norm.reshape(-1, 1) * drafter.fc).detach().t()
            )
            self.unit_norm = decoder.RMSNorm(torch.ones(config.hidden_size), config.norm_eps)

    def forward(self, input_ids: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        drafter = self.drafter
        feature, inputs = (inputs[0], inputs[1:]) if drafter.num_features else (None, inputs)
        D = drafter.dims.hidden_size
        x = self._tokens(input_ids)
        if feature is not None:
            chunks = torch.cat((feature, x), -1).view(1, -1, drafter.num_features + 1, D)
            x = self.fc(self.unit_norm(chunks).view(1, -1, (drafter.num_features + 1) * D))
        rows, caches = self.run_layers(x, inputs)
        rows_MD = drafter.output_rows(rows).view(-1, D)
        logits_MV = F.linear(rows_MD, drafter.head_VD)
        return (*drafter.one_pass_outputs(logits_MV, drafter.config.num_masks), *caches)

    def _tokens(self, input_ids: Tensor) -> Tensor:
        """Returns the token chunk [1, N, D] of real and mask rows."""
        drafter = self.drafter
        V = len(drafter.embed_VD)
        real = F.embedding(input_ids.clamp(max=V - 1), drafter.embed_VD)
        if not drafter.config.num_masks:
            return real
        masked = F.embedding((input_ids - V).clamp(min=0), drafter.mask_embed)
        return torch.where((input_ids >= V)[..., None], masked, real)
