"""Provides what drafters share: their base class, a Llama-style decoder layer, graphs with a cache.

The base class borrows the target's frozen ends (embedding and LM head). A layer leaves attention to
its caller: in training each drafter has a mask of its own, and the traced graph has the backbone's
attention with a cache.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export.drafters.bigram_pairs import BigramPairs
from spec_export.drafters.losses import (
    IGNORED,
    Shortlist,
    draw_shortlist,
    head_cross_entropy,
    trained_head_cross_entropy,
)
from spec_export.graphs.trace import GraphInput, export, step_inputs
from spec_export.model import decoder
from spec_export.model.ends import LayerDims, TargetEnds
from spec_export.model.modules.attention import window_mask
from spec_export.model.modules.fusion import Fusion
from spec_runtime.errors import UserError


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences: token_BT i64, loss_BT bool (True at answer tokens), feature_BTF or
    None (the final feature, then each tap), length_B i64."""

    token_BT: Tensor
    loss_BT: Tensor
    feature_BTF: Tensor | None
    length_B: Tensor

    @property
    def is_token_BT(self) -> Tensor:
        """Returns which places hold tokens, bool[B, T]; the others are padding."""
        position_T = torch.arange(self.token_BT.shape[1], device=self.token_BT.device)
        return position_T < self.length_B[:, None].to(position_T.device)


class DrafterBase(nn.Module):
    """The base of all drafters: holds what they borrow from the target, frozen and never saved.

    draft_token_ids i64[Vd] are the tokens that the drafter may guess (all by default), head_VD
    [Vd, D] is the target's LM head trimmed to them, and draft_index_V i64[V] leads from a token to
    its row of head_VD (IGNORED where it has none). With draft_token_ids = [1, 4] of V = 5 tokens
    draft_index_V is [−100, 0, −100, −100, 1]. `config` is the drafter's own Config, with `taps` and
    `top_k`. is_one_pass says that one run of the graph "drafter" makes all guesses.
    shares_target_cache says that it runs on the target's own layers and cache, so that
    `export_from_target(backbone)` takes the place of `export`. is_whole_model says that it is a
    language model by itself, whose largest activations row-wise int8 products do not survive.
    mixes_rows says that rows of its graph read their neighbours other than by attention.
    fuses_taps says that its features are what `fusion`, which the target's graph runs, makes of
    taps. With a `shortlist_size` each step's losses through the frozen head read a `shortlist` of
    that many tokens, which `forward` draws, in place of the draft vocabulary.
    """

    is_one_pass: ClassVar[bool] = False
    shares_target_cache: ClassVar[bool] = False
    is_whole_model: ClassVar[bool] = False
    mixes_rows: ClassVar[bool] = False
    fuses_taps: ClassVar[bool] = False
    fusion: Fusion | None
    draft_token_ids: Tensor
    draft_index_V: Tensor
    embed_VD: Tensor
    head_VD: Tensor
    cos: Tensor
    sin: Tensor
    bigrams: BigramPairs | None

    def __init__(self, config: Any, ends: TargetEnds, draft_token_ids: Tensor | None) -> None:
        super().__init__()
        self.config, self.dims = config, ends.dims
        head_VD = ends.head_VD  # shared, unless it is cut
        if draft_token_ids is None:
            draft_token_ids = torch.arange(ends.head_VD.shape[0])
        else:
            head_VD = head_VD[draft_token_ids].contiguous()
        draft_index_V = torch.full((ends.embed_VD.shape[0],), IGNORED)
        draft_index_V[draft_token_ids] = torch.arange(len(draft_token_ids))
        borrowed = {
            "draft_token_ids": draft_token_ids,
            "draft_index_V": draft_index_V,
            "embed_VD": ends.embed_VD,
            "head_VD": head_VD,
            "cos": ends.cos,
            "sin": ends.sin,
        }
        for name, tensor in borrowed.items():
            self.register_buffer(name, tensor, persistent=False)
        self.bigrams = None
        self.fusion = None
        self.shortlist_size = 0
        self.shortlist: Shortlist | None = None

    @property
    def trains_output_head(self) -> bool:
        """Returns whether some trained weights have a row for each token of the draft vocabulary.

        Such weights mean nothing with another draft vocabulary.
        """
        return False

    def trained_groups(self) -> list[tuple[float, list[nn.Parameter]]]:
        """Returns the trained parameters in groups, each with the factor of its learning rate.

        The factor multiplies the recipe's `train.lr`. Here all parameters share the factor 1.
        """
        return [(1.0, [p for p in self.parameters() if p.requires_grad])]

    def forward(
        self, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the drafter's `loss`: distributed training wraps only `forward`."""
        if self.shortlist_size:
            row_BT = self.draft_index_V[batch.token_BT]
            self.shortlist = draw_shortlist(
                row_BT[row_BT != IGNORED], len(self.head_VD), self.shortlist_size, generator
            )
        return self.loss(batch, generator)  # type: ignore[no-any-return, operator]

    def cross_entropy(
        self,
        rows_RD: Tensor,
        label_R: Tensor,
        weight_R: Tensor,
        target_RF: Tensor | None,
        soft_weight: float,
        head_VD: Tensor | None = None,
        bias_V: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns `losses.head_cross_entropy` through the target's frozen head, or through the
        trained `head_VD` with its bias. target_RF are the features that the target reads there."""
        teacher_RD = None
        if target_RF is not None:
            teacher_RD = target_RF[:, : self.head_VD.shape[1]].to(rows_RD.dtype)
        if head_VD is None:
            return head_cross_entropy(
                rows_RD, self.head_VD, label_R, weight_R, teacher_RD, soft_weight, self.shortlist
            )
        assert teacher_RD is not None, "trained heads read features"
        frozen_VD = self.head_VD.to(rows_RD.dtype)
        return trained_head_cross_entropy(
            rows_RD, head_VD, label_R, weight_R, teacher_RD, frozen_VD, soft_weight, bias_V
        )

    def loss_of_guesses(
        self,
        rows_RD: Tensor,
        label_R: Tensor,
        k_R: Tensor,
        weight_K: Tensor,
        target_RF: Tensor,
        head_VD: Tensor | None = None,
        bias_V: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns Σ_k weight_k · the mean cross-entropy of guess k's rows, f32 scalar, and each
        guess's top-1 hits `correct_K` and rows `count_K`, i64[K].

        k_R i64[R] says which guess a row makes; for the rest see `cross_entropy`.
        """
        count_K = torch.bincount(k_R, minlength=len(weight_K))
        weight_R = (weight_K.to(count_K.device) / count_K.clamp(min=1))[k_R]
        loss, is_top_R = self.cross_entropy(
            rows_RD, label_R, weight_R, target_RF, self.config.soft_weight, head_VD, bias_V
        )
        correct_K = torch.zeros_like(count_K).index_add_(0, k_R, is_top_R.long())
        return loss, {"correct_K": correct_K, "count_K": count_K}

    def labels(self, batch: Batch, num_guesses: int) -> Tensor:
        """Returns draft-vocabulary labels i64[B, T-1, K]: guess k of row t is token t + 2 + k.

        k counts from 0. Labels are IGNORED past the end, on tokens that carry no loss, and outside
        the draft vocabulary. Tokens 5 6 7 8, all answers, K = 2 and the whole vocabulary:
        [[7, 8], [8, −100], [−100, −100]].
        """
        label_BT = torch.where(batch.loss_BT, self.draft_index_V[batch.token_BT], IGNORED)
        return tokens_ahead(label_BT, num_guesses, IGNORED)

    def add_bigrams(self, table: Mapping[str, np.ndarray]) -> None:
        """Conditions the guesses by these arrays of bigrams.table. Raises UserError if the drafter
        knows its own guesses already, or if the table is that of another draft vocabulary."""
        if not self.is_one_pass:
            raise UserError(
                "got a table of bigrams, expected a drafter that guesses in one pass: others know "
                "what they guessed before"
            )
        self.bigrams = BigramPairs(table, self.draft_token_ids)

    def top_tokens(self, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Returns the best tokens of logits [..., Vd]: ids i64 and log-probabilities f32, both
        [..., top_k].

        The ids are the target's. Graphs are traced from this very function.
        """
        index, log_probs = self.top_draft_tokens(logits, top_k)
        return self.draft_token_ids[index], log_probs

    def top_draft_tokens(self, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Returns what `top_tokens` does, with rows of head_VD in place of the target's ids."""
        top = torch.log_softmax(logits.float(), -1).topk(top_k, dim=-1)
        return top.indices, top.values

    @torch.no_grad()
    def guesses_with_pairs(self, batch: Batch, top_k: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the drafter's `guesses`, token ids and log-probabilities [B, T-1, K, C], and with
        a table of bigrams the log-probability f32[B, T-1, K-1, C, C] of candidate c of guess k + 1
        after candidate p of guess k, entry [k, p, c]."""
        ids, log_probs = self.guesses(batch, top_k)  # type: ignore[operator]
        if self.bigrams is None:
            return ids, log_probs, None
        parts = [
            self.bigrams(self.draft_index_V[ids_NKC], log_prob_NKC)
            for ids_NKC, log_prob_NKC in zip(
                *(x.flatten(0, 1).split(256) for x in (ids, log_probs)), strict=True
            )
        ]
        return ids, log_probs, torch.cat(parts).unflatten(0, ids.shape[:2])

    @torch.no_grad()
    def top_in_chunks(
        self, logits_of: Callable[..., Tensor], rows: Sequence[Tensor], num_rows: int, top_k: int
    ) -> tuple[Tensor, Tensor]:
        """Returns `top_tokens` of the logits of all `rows`, tensors [N, ...], which are made of
        `num_rows` rows at a time: those of all at once would be gigabytes."""
        chunks = zip(*(x.split(num_rows) for x in rows), strict=True)
        tops = [self.top_tokens(logits_of(*chunk), top_k) for chunk in chunks]
        ids, log_probs = zip(*tops, strict=True)
        return torch.cat(ids), torch.cat(log_probs)

    def top_guesses(
        self,
        rows: Tensor,
        output_rows: Callable[[Tensor], Tensor],
        top_k: int,
        head_VD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the best tokens of hidden `rows` [..., D] through `output_rows` and this head, by
        default the shared one: ids i64 and log-probabilities f32, both [..., top_k]."""
        head = self.head_VD if head_VD is None else head_VD

        def logits_of(chunk: Tensor) -> Tensor:
            out = output_rows(chunk)
            return out @ head.to(out.dtype).T

        ids, log_probs = self.top_in_chunks(logits_of, [rows.flatten(0, -2)], 4096, top_k)
        shape = (*rows.shape[:-1], top_k)
        return ids.view(shape), log_probs.view(shape)

    # ---- export ----------------------------------------------------------------------------------

    def runtime_config(self) -> dict[str, Any]:
        """Returns what the proposer reads, as JSON values."""
        return level_config(self.config)

    def one_pass_config(self, inputs: str, num_masks: int, num_guesses: int) -> dict[str, Any]:
        """Returns what the proposer of rows with masks behind them reads, as JSON values: see
        `spec_runtime/proposers/heads.py`."""
        return {
            "inputs": inputs,
            "num_masks": num_masks,
            "num_guesses": num_guesses,
            "mask_token_base": len(self.embed_VD),
            "top_k": self.config.top_k,
        }

    def output_names(self) -> list[str]:
        """Returns the names of a graph's guesses, and with a table of bigrams of their pairs."""
        pairs = [] if self.bigrams is None else ["pair_log_probs"]
        return ["guess_ids", "guess_log_probs", *pairs]

    def one_pass_outputs(self, logits_MV: Tensor, num_masks: int) -> list[Tensor]:
        """Returns guess_ids i64 and guess_log_probs f32 [M, C] of the logits of a row and K masks,
        and with a table of bigrams pair_log_probs f32[K, C, C], see `BigramPairs`."""
        index_MC, log_prob_MC = self.top_draft_tokens(logits_MV, self.config.top_k)
        outputs = [self.draft_token_ids[index_MC], log_prob_MC]
        if self.bigrams is not None:
            # The pairs have a fixed shape, which axes of logit rows cannot give, and rows chosen
            # by a slice do not have for TensorRT. A run of the prompt has fewer rows, and the last
            # one repeated: nobody reads its guesses.
            K = num_masks
            padded = [torch.cat((x, x[-1:].expand(K, -1))) for x in (index_MC, log_prob_MC)]
            outputs.append(self.bigrams(*(x.index_select(0, torch.arange(K + 1)) for x in padded)))
        return outputs


def level_config(config: Any) -> dict[str, Any]:
    """Returns what the proposers that draft level by level read of a drafter's config."""
    return {"num_guesses": config.num_guesses, "max_width": config.max_width, "top_k": config.top_k}


def tokens_ahead(values_BT: Tensor, num_guesses: int, fill: int) -> Tensor:
    """Returns the values [B, T-1, K] of the tokens that are guessed: guess k of row t is token
    t + 2 + k. Past the end they are `fill`."""
    ahead_BT = F.pad(values_BT, (0, num_guesses), value=fill)[:, 2:]
    return ahead_BT.unfold(1, num_guesses, 1)[:, : values_BT.shape[1] - 1]


def noisy_features(
    batch: Batch, noise: float, generator: torch.Generator | None = None
) -> Tensor | None:
    """Returns the batch's features with uniform noise in ± noise / 2 · 512 / sequence length, as
    EAGLE has; the features themselves for noise 0."""
    feature_BTF = batch.feature_BTF
    if not noise or feature_BTF is None:
        return feature_BTF
    drawn = torch.rand(feature_BTF.shape, generator=generator).to(feature_BTF.device) - 0.5
    scale_B = noise * 512 / batch.length_B.to(drawn.device)
    return feature_BTF + (drawn * scale_B[:, None, None]).to(feature_BTF.dtype)


def fusion(num_inputs: int, width: int) -> nn.Parameter:
    """Returns a product over concatenated inputs of a like scale, f32[num_inputs * width, width].

    Before training it passes the first input on, with a little of the others.
    """
    weight = torch.randn(num_inputs, width, width) * 0.3 * width**-0.5
    weight[0] = torch.eye(width)
    return nn.Parameter(weight.flatten(0, 1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x [..., heads, Dh] with rotary embedding (the two halves of a head's first r columns
    are turned into each other).

    cos and sin [..., r/2] belong to each row's position. Columns past r stay as they are.
    """
    r = 2 * cos.shape[-1]
    first, second = x[..., :r].chunk(2, dim=-1)
    cos, sin = cos[..., None, :].to(x.dtype), sin[..., None, :].to(x.dtype)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, x[..., r:]), dim=-1)


class DecoderLayer(nn.Module):
    """A decoder layer: pre-norm attention and SwiGLU. Weights are stored [in, out], as the traced
    graph wants them.

    num_inputs: rows of D that its attention reads side by side. qk_norms: queries and keys are
    normed over each head before the rotation. input_norm: attention reads normed rows. has_bias:
    queries, keys and values have one. window: a row sees the positions above its own less this
    width, None for all up to its own.
    """

    attention_norm: nn.Parameter | None
    q_norm: nn.Parameter | None
    k_norm: nn.Parameter | None
    qkv_bias: nn.Parameter | None

    def __init__(
        self,
        dims: LayerDims,
        num_inputs: int = 1,
        qk_norms: bool = False,
        input_norm: bool = True,
        has_bias: bool = False,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.dims, self.window = dims, window
        D, qkv = dims.hidden_size, (dims.num_heads + 2 * dims.num_kv_heads) * dims.head_dim
        self.attention_norm = nn.Parameter(torch.ones(D)) if input_norm else None
        self.qkv = nn.Parameter(torch.empty(num_inputs * D, qkv))
        self.out = nn.Parameter(torch.empty(dims.num_heads * dims.head_dim, D))
        self.mlp_norm = nn.Parameter(torch.ones(D))
        self.gate_up = nn.Parameter(torch.empty(D, 2 * dims.intermediate_size))
        self.down = nn.Parameter(torch.empty(dims.intermediate_size, D))
        for weight in (self.qkv, self.out, self.gate_up, self.down):
            nn.init.normal_(weight, std=weight.shape[0] ** -0.5)
        for name in ("q_norm", "k_norm"):
            ones = nn.Parameter(torch.ones(dims.head_dim)) if qk_norms else None
            self.register_parameter(name, ones)
        self.qkv_bias = nn.Parameter(torch.zeros(qkv)) if has_bias else None

    def load_target_layer(self, tensors: dict[str, Tensor]) -> None:
        """Copies one of the target's own layers; `tensors` has this module's parameter names.

        Parameters of another shape than the target's keep their start, and so do all of them where
        there are no tensors, from a target whose layers are built otherwise.
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name in tensors and tensors[name].shape == parameter.shape:
                    parameter.copy_(tensors[name])

    def start_as_identity(self) -> None:
        """Sets both output products to 0, so that before training rows pass unchanged.

        A layer of the target would drown them: it adds to a residual stream that is some thirty
        times stronger than what a drafter feeds it.
        """
        nn.init.zeros_(self.out)
        nn.init.zeros_(self.down)

    def project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q [..., H, Dh], k and v [..., G, Dh] of x [..., D], before rotary embedding."""
        return self.heads(self.normed(x, self.attention_norm))

    def normed(self, x: Tensor, gain: Tensor | None) -> Tensor:
        """Returns x normed, or x itself if there is no gain."""
        if gain is None:
            return x
        return F.rms_norm(x, gain.shape, gain.to(x.dtype), self.dims.norm_eps)

    def heads(self, read: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what `project_qkv` does, of what the product reads."""
        d = self.dims
        product = read @ self.qkv
        if self.qkv_bias is not None:
            product = product + self.qkv_bias
        heads = product.unflatten(-1, (-1, d.head_dim))
        q, k, v = heads.split((d.num_heads, d.num_kv_heads, d.num_kv_heads), dim=-2)
        return self.normed(q, self.q_norm), self.normed(k, self.k_norm), v

    def causal(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Runs the layer over whole sequences x [B, T, D]: row t is at position t and sees rows
        0 … t. cos and sin are the whole tables."""
        q, k, v = self.project_qkv(x)
        cos, sin = cos[: x.shape[1]], sin[: x.shape[1]]
        q, k, v = rotate(q, cos, sin), rotate(k, cos, sin), v.to(q.dtype)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.finish(x, attended.transpose(1, 2).flatten(-2))

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: x [..., D] plus the projected heads [..., H*Dh], then the MLP."""
        x = x + attended @ self.out
        gate, up = (self.normed(x, self.mlp_norm) @ self.gate_up).chunk(2, dim=-1)
        return x + (F.silu(gate) * up) @ self.down

    def traceable(self, config: decoder.DecoderConfig) -> nn.Module:
        """Returns a layer of the backbone's kind with the same weights; its attention reads and
        writes a cache."""
        eps = self.dims.norm_eps
        attention_norm, q_norm, k_norm = (
            None if gain is None else decoder.RMSNorm(gain, eps)
            for gain in (self.attention_norm, self.q_norm, self.k_norm)
        )
        qkv = decoder.Projection(self.qkv.t(), self.qkv_bias)
        out = decoder.Projection(self.out.t())
        return decoder.Layer(
            attention_norm,
            decoder.Attention(config, qkv, out, q_norm, k_norm, window=self.window),
            decoder.RMSNorm(self.mlp_norm, eps),
            decoder.GatedMLP(
                decoder.Projection(self.gate_up.t()), decoder.Projection(self.down.t())
            ),
        )


class CachedGraph(nn.Module):
    """The base of graphs that run decoder layers over their caches.

    Its inputs are those of `trace.step_inputs`, the features second if there are any.
    """

    def __init__(
        self, drafter: nn.Module, layers: Iterable[DecoderLayer], config: decoder.DecoderConfig
    ) -> None:
        super().__init__()
        self.drafter: Any = drafter
        every = list(layers)
        self.layers = nn.ModuleList(layer.traceable(config) for layer in every)
        widths = {layer.window for layer in every if layer.window is not None}
        self.windows = sorted(width for width in widths if width < config.max_length)

    def shared_inputs(
        self, inputs: Sequence[Tensor]
    ) -> tuple[decoder.SharedInputs, Tensor, list[Tensor]]:
        """Returns what all layers read, the rows whose guesses are asked for, i64[M], and the
        caches, from the inputs that follow tokens and features."""
        position_ids, mask, logit_rows, write_index, src, perm, *caches = inputs
        cos, sin = self.drafter.cos, self.drafter.sin
        windows = {width: window_mask(mask, width) for width in self.windows}
        step = decoder.SharedInputs(position_ids, mask, write_index, src, perm, cos, sin, windows)
        return step, logit_rows, caches

    def run_layers(self, x: Any, inputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Returns the rows [1, M, D] that are asked for after all layers, and the caches."""
        step, logit_rows, old = self.shared_inputs(inputs)
        caches: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            x, new = layer(x, old[2 * i : 2 * i + 2], step)
            caches += new
        return x.index_select(1, logit_rows), caches


def export_cached(
    graph: nn.Module,
    config: decoder.DecoderConfig,
    dtype: torch.dtype,
    outputs: Sequence[str],
    name: str,
    *,
    feature_width: int = 0,
) -> ir.Model:
    """Returns a graph with caches of `dtype` for the layers of `config`, in the contiguous form.

    Its inputs are input_ids i64[1,N], features f32[1,N,F] if `feature_width` F is not 0,
    position_ids, mask, logit_rows i64[M], and the rest of `trace.step_inputs`. The new caches
    follow the `outputs`.
    """
    inputs = step_inputs(config, dtype)
    caches = [f"{given.name}.out" for given in inputs if given.name.startswith("kv.")]
    if feature_width:
        features = torch.zeros(1, inputs[0].example.shape[1], feature_width)
        inputs.insert(1, GraphInput("features", features, {1: "N"}))
    return export(graph, inputs, [*outputs, *caches], name)
