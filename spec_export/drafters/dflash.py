"""Defines DFlash, DFlash 2 and DSpark: a small transformer fills in a block of tokens at once,
reading the target's layers as rows of its own cache.

A *context row* i is what fc makes of the target's taps at position i. It has no token and is never
changed: each layer only makes a key and a value of it. A *block* of B rows stands behind the p
context rows, at positions p … p + B - 1: the root, and a mask B - 1 times. Its rows see all context
rows, and each other both ways.

    c_i = norm(fc [h_a ; h_b ; …])                            taps a, b, … at position i < p
    q = W_q norm(x),   [k v] = W_kv [c_0 … c_{p-1} ; norm(x)]     x the block's rows
    y = x + W_o attention,   out = y + mlp(norm(y))
    q_k = softmax(head · norm(out_k) + W_2 W_1[guess k-1])        the root before guess 0

In DFlash row k + 1 gives guess k, the token at its own position ("fill-in", B - 1 guesses); with
`sample_from_anchor`, as in DSpark, row k does, the token after its own (B guesses). The last term
is DSpark's Markov head; without one the guesses of a block do not know each other. Guesses that
could be a candidate's successors are chosen before that term, but for guess 0. A layer may be
*causal*, whose rows see no later row of the block, or have a window, whose rows see the positions
above their own less its width.

DFlash 2 has two convolutions in each layer, one around attention and one around the MLP f,

    x + mix_2(f(mix_1(norm(x)))),    mix(z)_j = Σ_τ (base_τ + (U norm(x)_j)_τ) ⊙ z_{j-τ}

over the block's rows alone, and a *selector*: a Markov head that reads the row as well, by
W_1[guess k-1] ⊙ P norm(out_k) in place of W_1[guess k-1], and chooses among the candidates only.

    L = Σ_k decay^k · CE(p_{t+2+k}, q_k),     p the target's distribution, k over the guesses
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import onnx_ir as ir
import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export.drafters.bigram_pairs import conditioned_log_probs
from spec_export.drafters.fields import AtLeastOne, AtLeastZero, Share
from spec_export.drafters.layers import Batch, CachedGraph, DecoderLayer, rotate
from spec_export.drafters.losses import IGNORED, position_weights
from spec_export.drafters.rollout import FusedConfig, FusedDrafter, attend_groups, choose_groups
from spec_export.model import decoder
from spec_export.model.ends import TargetEnds
from spec_export.model.modules.attention import key_positions
from spec_runtime.errors import UserError

AtLeastTwo = Annotated[int, Ge(2)]


@dataclass(frozen=True)
class Config(FusedConfig):
    """The settings of DFlash and DSpark; see FusedConfig.

    `block_size` rows make a block, the root among them, and `mask_token_id` is the token whose
    embedding the others have.

    - `sample_from_anchor`: a row guesses the token after its own, else the one at its own place.
    - `markov_rank`: the width of the Markov head, 0 for none.
    - `selector`: the Markov head is DFlash 2's selector.
    - `conv_size`, `conv_group`: the rows that a convolution of DFlash 2 reads, 0 for none, and the
      columns that share a row of U.
    - `causal_layers`: the layers whose rows see no later row of the block.
    - `own_head`: it has a head of its own, else the target's.
    - `anchor_fraction`: the share of rows behind which a training step puts a block.
    """

    layers: AtLeastOne = 2
    block_size: AtLeastTwo = 8
    mask_token_id: AtLeastZero = 0
    sample_from_anchor: bool = False
    markov_rank: AtLeastZero = 0
    selector: bool = False
    conv_size: AtLeastZero = 0
    conv_group: AtLeastOne = 16
    causal_layers: tuple[int, ...] = ()
    top_k: AtLeastOne = 16
    qk_norms: bool = True
    own_head: bool = False
    anchor_fraction: Share = 0.2
    soft_weight: Share = 0.5
    decay: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.selector and not self.markov_rank:
            raise UserError("got a selector of markov_rank 0, expected 1 or more")
        if self.sliding_layers and (self.window or 0) < self.block_size:
            raise UserError(
                f"got window {self.window} for layers {list(self.sliding_layers)}, expected the "
                f"{self.block_size} rows of a block or more"
            )

    @property
    def num_guesses(self) -> int:
        """Returns K, the guesses of a block."""
        return self.block_size - self.first_row

    @property
    def first_row(self) -> int:
        """Returns the row of a block that gives guess 0."""
        return 0 if self.sample_from_anchor else 1


class Drafter(FusedDrafter):
    """The trained part: fusion, layers and norm, and with a Markov head its two tables; see
    DrafterBase for what it borrows."""

    mixes_rows = True  # by convolutions, and a selector reads the root's row
    config: Config

    def __init__(
        self, config: Config, ends: TargetEnds, draft_token_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, ends, draft_token_ids)
        V = len(ends.embed_VD)
        if config.mask_token_id >= V:
            raise UserError(
                f"got mask_token_id {config.mask_token_id}, expected one below {V}, the rows of "
                "the target's embedding"
            )
        D = self.dims.hidden_size
        if config.conv_size and D % config.conv_group:
            raise UserError(
                f"got conv_group {config.conv_group}, expected a divisor of hidden size {D}"
            )
        layers = [ContextLayer(self.dims, config) for _ in range(config.layers)]
        self.add_parts(ends, layers, out_norm=True, own_head=config.own_head)
        if config.markov_rank:
            self.markov_read = nn.Parameter(torch.randn(V, config.markov_rank) * 0.02)
            self.markov_write = nn.Parameter(torch.zeros(len(self.head_VD), config.markov_rank))
        if config.selector:
            self.markov_hidden = nn.Parameter(torch.randn(D, config.markov_rank) * D**-0.5)

    @property
    def trains_output_head(self) -> bool:
        return self.config.own_head or self.config.markov_rank > 0

    # ---- rows ------------------------------------------------------------------------------------

    @property
    def head_rows(self) -> Tensor:
        """Returns what the rows of `scored` are multiplied with, [Vd, D + r]."""
        head = self.plain_head
        if not self.config.markov_rank:
            return head
        return torch.cat((head, self.markov_write.to(head.dtype)), -1)

    @property
    def plain_head(self) -> Tensor:
        """Returns the head [Vd, D] without a Markov head's columns."""
        return self.head if self.config.own_head else self.head_VD

    def scored(self, out: Tensor, previous: Tensor) -> Tensor:
        """Returns the rows [..., D + r] whose product with `head_rows` are a guess's logits, from
        what the head reads [..., D] and the token before the guess, i64[...]; -1 is none."""
        if not self.config.markov_rank:
            return out
        read = F.embedding(previous.clamp(min=0), self.markov_read).to(out.dtype)
        if self.config.selector:
            read = read * (out @ self.markov_hidden.to(out.dtype))
        return torch.cat((out, torch.where((previous >= 0)[..., None], read, 0.0)), -1)

    def blocks(self, batch: Batch, anchor_BA: Tensor) -> Tensor:
        """Returns the rows [B, A, K, D] that give the guesses, before the norm, of the blocks whose
        roots stand behind the rows anchor_BA i64[B, A]: row t is position t, its root token t + 1.
        """
        assert batch.feature_BTF is not None, "DFlash reads taps"
        assert self.fusion is not None
        config, token_BR = self.config, batch.token_BT[:, 1:]
        _, *taps = batch.feature_BTF[:, :-1].split(self.target_width, -1)
        context = self.fusion(taps)
        R, S = context.shape[1], config.block_size
        mask = torch.full((*anchor_BA.shape, S - 1), config.mask_token_id, device=anchor_BA.device)
        ids = torch.cat((token_BR.gather(1, anchor_BA)[..., None], mask), -1)
        x = self.embedding_table[ids].to(context.dtype)
        position_R = torch.arange(R, device=x.device)
        position = anchor_BA[..., None] + 1 + torch.arange(S, device=x.device)
        visible_BA1R = (position_R <= anchor_BA[..., None])[:, :, None]
        near_BASR = visible_BA1R & (position_R > position[..., None] - (config.window or 0))
        group = torch.ones(S, S, dtype=torch.bool, device=x.device)
        for i, layer in enumerate(self.layers):
            _, k, v = layer.heads(context)
            k = rotate(k, self.cos[:R], self.sin[:R]).transpose(1, 2)
            read, kernel = layer.attention_conv.before(layer.normed(x, layer.attention_norm))
            q, own_k, own_v = layer.heads(read)
            q, own_k = (rotate(each, self.cos[position], self.sin[position]) for each in (q, own_k))
            v, own_v = v.to(k.dtype).transpose(1, 2), own_v.to(own_k.dtype)
            visible = near_BASR if i in config.sliding_layers else visible_BA1R
            own = group.tril() if i in config.causal_layers else group
            mixed = attend_groups(q, own_k, own_v, k, v, visible, own)
            x = layer.finish_block(x, mixed, kernel)
        return x[:, :, config.first_row :]

    @property
    def target_width(self) -> int:
        """Returns the width of the target's rows."""
        return self.head_VD.shape[1]

    def loss(
        self, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a batch, f32 scalar, and each guess's top-1 hits `correct_K` and
        labelled rows `count_K`, i64[K].

        A guess's loss is a mean over the blocks where its token is an answer's and in the draft
        vocabulary. Blocks stand behind a random `anchor_fraction` of the rows with a first guess.
        """
        config, K = self.config, self.config.num_guesses
        assert batch.feature_BTF is not None, "DFlash reads taps"
        label_BRK = self.labels(batch, K)
        has_label_BR = label_BRK[..., 0] != IGNORED
        anchor_BA, label_BAK = choose_groups(
            label_BRK, has_label_BR, config.anchor_fraction, generator
        )
        b, a, k = (label_BAK != IGNORED).nonzero(as_tuple=True)
        before = anchor_BA[b, a] + 1 + k  # the position of the token before the guess
        out = self.output_rows(self.blocks(batch, anchor_BA)[b, a, k])
        return self.loss_of_guesses(
            self.scored(out, batch.token_BT[b, before]),
            label_BAK[b, a, k],
            k,
            position_weights(K, config.decay),
            batch.feature_BTF[b, before],
            self.head_rows if self.trains_output_head else None,
        )

    @torch.no_grad()
    def guesses(self, batch: Batch, top_k: int) -> tuple[Tensor, Tensor]:
        """Returns the top guesses behind every real row: token ids i64 and log-probabilities f32,
        both [B, T-1, K, top_k]. Of a Markov head guess 0 alone knows the token before it; with a
        selector its probabilities are among the top guesses only."""
        return self._guesses(batch, top_k)[1:]

    def _guesses(self, batch: Batch, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what the head reads [B, T-1, K, D], and what `guesses` does."""
        B, T = batch.token_BT.shape
        anchor_BA = torch.arange(T - 1, device=batch.token_BT.device).expand(B, T - 1)
        out = self.output_rows(self.blocks(batch, anchor_BA))
        if self.config.selector:
            ids, log_probs = self.top_guesses(out, lambda rows: rows, top_k, self.plain_head)
            first = self.first_selected(
                batch.token_BT[:, 1:], out[:, :, 0], self.draft_index_V[ids[:, :, 0]],
                log_probs[:, :, 0],
            )  # fmt: skip
            ids[:, :, 0], log_probs[:, :, 0] = self.draft_token_ids[first[0]], first[1]
            return out, ids, log_probs
        previous = torch.full(out.shape[:-1], -1, device=out.device)
        previous[..., 0] = batch.token_BT[:, 1:]
        rows = self.scored(out, previous)
        return out, *self.top_guesses(rows, lambda rows: rows, top_k, self.head_rows)

    @torch.no_grad()
    def guesses_with_pairs(self, batch: Batch, top_k: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns what DrafterBase does, with the pairs of the Markov head if there is one."""
        out, ids, log_probs = self._guesses(batch, top_k)
        if not self.config.markov_rank:
            return ids, log_probs, None
        return ids, log_probs, self.pairs(self.draft_index_V[ids], log_probs, out)

    def pairs(self, index: Tensor, log_probs: Tensor, out: Tensor) -> Tensor:
        """Returns the log-probability f32[..., K-1, C, C] of candidate c of guess k + 1 after
        candidate p of guess k, entry [k, p, c], by the Markov head.

        index i64[..., K, C] are the candidates' rows of the draft vocabulary, log_probs f32[..., K,
        C] their log-probabilities without it, and out [..., K, D] what the head reads. What the
        candidates leave of the distribution is taken as one more, without a bias; with a selector
        they leave nothing.
        """
        before, behind = self.draft_token_ids[index[..., :-1, :]], index[..., 1:, :]
        if self.config.selector:
            return self.selected(before, out[..., 1:, :], behind, log_probs[..., 1:, :])
        read = F.embedding(before, self.markov_read)
        write = F.embedding(behind, self.markov_write)
        bias = (read @ write.transpose(-1, -2)).float()
        return conditioned_log_probs(log_probs[..., 1:, :], bias)

    def selected(self, before: Tensor, out: Tensor, index: Tensor, log_probs: Tensor) -> Tensor:
        """Returns the selector's log-probabilities f32[..., P, C] of candidates, rows `index`
        i64[..., C] of the draft vocabulary with these log_probs [..., C], after the tokens `before`
        i64[..., P], where the head reads out [..., D]."""
        gate = out @ self.markov_hidden.to(out.dtype)
        read = F.embedding(before, self.markov_read) * gate.unsqueeze(-2)
        write = F.embedding(index, self.markov_write)
        edge = (read @ write.transpose(-1, -2)).float()
        return torch.log_softmax(log_probs.unsqueeze(-2) + edge, -1)

    def first_selected(
        self, root: Tensor, out: Tensor, index: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the candidates of guess 0, rows i64[..., C] of the draft vocabulary, best first,
        and their log-probabilities after the root i64[...]; see `selected`."""
        chosen = self.selected(root.unsqueeze(-1), out, index, log_probs).squeeze(-2)
        top = chosen.topk(chosen.shape[-1], dim=-1)
        return index.gather(-1, top.indices), top.values

    # ---- export ----------------------------------------------------------------------------------

    def runtime_config(self) -> dict[str, Any]:
        """Returns what the proposer reads: see `spec_runtime/proposers/block.py`."""
        return {
            "block_size": self.config.block_size,
            "first_row": self.config.first_row,
            "mask_token_base": len(self.embed_VD),
            "num_guesses": self.config.num_guesses,
            "top_k": self.config.top_k,
        }

    def output_names(self) -> list[str]:
        pairs = ["pair_log_probs"] if self.config.markov_rank else []
        return ["guess_ids", "guess_log_probs", *pairs]

    def export(self, target: decoder.DecoderConfig) -> dict[str, ir.Model]:
        """Returns the graph "drafter" in the contiguous form.

        Its inputs are input_ids i64[1,N], features f32[1,N,D] (fused taps), position_ids, mask,
        logit_rows i64[M] and the caches; its outputs guess_ids i64[M,C], guess_log_probs f32[M,C]
        and the caches. Ids below V = mask_token_base are those of context rows, whose tokens are
        not read; the root has its token + V, a mask 2V. A row of logits gives one guess. With a
        Markov head there is the output pair_log_probs f32[K-1,C,C] over the first K rows of logits.
        """
        config = self.cache_config(target)
        graph = _DrafterGraph(self, config)
        return self.export_graph(graph, config, "dflash", more_outputs=())


class Convolution(nn.Module):
    """DFlash 2's convolution around attention or an MLP, see the module docstring; nothing happens
    where `size` is 0. `before` and `after` are mix_1 and mix_2; is_block bool[..., N, 1] says which
    rows are a block's, by default all.
    """

    def __init__(self, width: int, size: int, group: int) -> None:
        super().__init__()
        self.size, self.group = size, group
        if size:
            base = torch.zeros(2, size, width)
            base[:, 0] = 1
            self.base = nn.Parameter(base)
            self.project = nn.Parameter(torch.zeros(width, 2 * size * width // group))

    def before(self, x: Tensor, is_block: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns mix_1 of normed rows x [..., N, D], and what `after` reads."""
        if not self.size:
            return x, None
        dynamic = (x @ self.project.to(x.dtype)).unflatten(-1, (2, self.size, -1, 1))
        wide = dynamic.expand(*dynamic.shape[:-1], self.group).flatten(-2)
        kernel = wide + self.base.to(x.dtype)
        return self._mix(x, kernel[..., 0, :, :], is_block), kernel[..., 1, :, :]

    def after(self, x: Tensor, kernel: Tensor | None, is_block: Tensor | None = None) -> Tensor:
        """Returns mix_2 of rows x [..., N, D]."""
        return x if kernel is None else self._mix(x, kernel, is_block)

    def _mix(self, x: Tensor, kernel: Tensor, is_block: Tensor | None) -> Tensor:
        x = x if is_block is None else torch.where(is_block, x, 0.0)
        mixed = kernel[..., 0, :] * x
        for step in range(1, self.size):
            behind = F.pad(x, (0, 0, step, 0))[..., : x.shape[-2], :]
            mixed = mixed + kernel[..., step, :] * behind
        return mixed


class ContextLayer(DecoderLayer):
    """The decoder layer of a block, which makes keys and values of context rows too."""

    def __init__(self, dims: Any, config: Config) -> None:
        super().__init__(dims, qk_norms=config.qk_norms)
        sizes = (dims.hidden_size, config.conv_size, config.conv_group)
        self.attention_conv, self.mlp_conv = Convolution(*sizes), Convolution(*sizes)

    def finish_block(self, x: Tensor, attended: Tensor, kernel: Tensor | None) -> Tensor:
        """Returns what `finish` does, of a block's rows x [..., S, D] and their heads."""
        x = x + self.attention_conv.after(attended @ self.out, kernel)
        read, kernel = self.mlp_conv.before(self.normed(x, self.mlp_norm))
        gate, up = (read @ self.gate_up).chunk(2, dim=-1)
        return x + self.mlp_conv.after((F.silu(gate) * up) @ self.down, kernel)

    def traceable(self, config: decoder.DecoderConfig) -> nn.Module:
        convolutions = (self.attention_conv, self.mlp_conv)
        return _TraceableContextLayer(super().traceable(config), *convolutions)


class _TraceableContextLayer(nn.Module):
    """A `ContextLayer` over a cache; `layer` is the same layer in its ordinary form. Of a context
    row only the key and the value are used; its output is dropped."""

    def __init__(self, layer: Any, attention_conv: Convolution, mlp_conv: Convolution) -> None:
        super().__init__()
        self.layer, self.attention_conv, self.mlp_conv = layer, attention_conv, mlp_conv

    def forward(self, x: Any, past: Any, shared: Any) -> tuple[Any, list[Tensor]]:
        rows, context, is_block = x
        layer = self.layer
        read, kernel = self.attention_conv.before(layer.attention_norm(rows), is_block)
        mixed, caches = layer.attention(torch.where(is_block, read, context), past, shared)
        summed = rows + self.attention_conv.after(mixed, kernel, is_block)
        read, kernel = self.mlp_conv.before(layer.mlp_norm(summed), is_block)
        out = summed + self.mlp_conv.after(layer.mlp(read), kernel, is_block)
        return (out, context, is_block), caches


class _DrafterGraph(CachedGraph):
    """The graph "drafter": context rows and a block over a cache, top-k guesses out."""

    def __init__(self, drafter: Drafter, config: decoder.DecoderConfig) -> None:
        super().__init__(drafter, drafter.layers, config)
        self.norm = decoder.RMSNorm(drafter.norm, config.norm_eps)
        self.max_length = config.max_length

    def forward(self, input_ids: Tensor, features: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        drafter: Drafter = self.drafter
        config, V = drafter.config, len(drafter.embed_VD)
        is_mask = input_ids >= 2 * V
        token = torch.where(is_mask, config.mask_token_id, (input_ids - V).clamp(min=0))
        rows = F.embedding(token, drafter.embedding_table)
        is_block = (input_ids >= V)[..., None]
        step, logit_rows, old = self.shared_inputs(inputs)
        x, caches = (rows, features.to(rows.dtype), is_block), list[Tensor]()
        steps = self._steps(step)
        for i, layer in enumerate(self.layers):
            x, new = layer(x, old[2 * i : 2 * i + 2], steps[i])
            caches += new
        out_MD = self.norm(x[0].index_select(1, logit_rows).view(-1, drafter.dims.hidden_size))
        # The root stands in the row of guess 0, or before it; the rows of other guesses are masks.
        before_M = (logit_rows - config.first_row).clamp(min=0)
        previous = torch.where(is_mask, -1, token)[0].index_select(0, before_M)
        if config.selector:
            index_MC, log_prob_MC = self._selected(out_MD, previous)
        else:
            logits_MV = F.linear(drafter.scored(out_MD, previous), drafter.head_rows)
            index_MC, log_prob_MC = drafter.top_draft_tokens(logits_MV, config.top_k)
        outputs = [drafter.draft_token_ids[index_MC], log_prob_MC]
        if config.markov_rank:
            # Of a fixed shape, as in ParallelSpec: a run of the prompt has fewer rows, and the last
            # one repeated.
            K = config.num_guesses
            rows_of = (index_MC, log_prob_MC, out_MD)
            padded = [torch.cat((x, x[-1:].expand(K, -1))) for x in rows_of]
            outputs.append(drafter.pairs(*(x.index_select(0, torch.arange(K)) for x in padded)))
        return (*outputs, *caches)

    def _steps(self, step: decoder.SharedInputs) -> list[decoder.SharedInputs]:
        """Returns each layer's shared inputs, with the mask for the layer's kind."""
        config = self.drafter.config
        kinds = [
            (i in config.causal_layers, i in config.sliding_layers) for i in range(config.layers)
        ]
        if not any(map(any, kinds)):
            return [step] * config.layers
        key, position = key_positions(step.mask), step.position_ids.view(1, 1, -1, 1)
        masks = {}
        for is_causal, is_sliding in dict.fromkeys(kinds):
            mask = step.mask
            if is_causal:
                mask = mask & (key <= position)
            if is_sliding and config.window < self.max_length:
                mask = mask & (key > position - config.window)
            masks[is_causal, is_sliding] = replace(step, mask=mask)
        return [masks[kind] for kind in kinds]

    def _selected(self, out_MD: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the best candidates of each row, those behind a root by the selector."""
        drafter: Drafter = self.drafter
        logits_MV = F.linear(out_MD, drafter.plain_head)
        index, log_prob = drafter.top_draft_tokens(logits_MV, drafter.config.top_k)
        first, chosen = drafter.first_selected(previous.clamp(min=0), out_MD, index, log_prob)
        is_first = (previous >= 0)[:, None]
        return torch.where(is_first, first, index), torch.where(is_first, chosen, log_prob)
