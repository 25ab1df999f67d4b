"""Groups sequences of about one length into batches, so that little of a batch is padding.

Sequences are not packed after one another: no sequence sees another, and a drafter's attention
needs no mask between them.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from spec_export.drafters.layers import Batch
from spec_export.training.data import Example

POOL = 512  # sequences that are sorted by length together


class SequenceStore(Protocol):
    """Gives batches their sequences: stored features (`features.FeatureCache`) or only tokens."""

    @property
    def num_sequences(self) -> int: ...

    @property
    def length_N(self) -> np.ndarray:
        """Returns the number of tokens of each sequence, i64[number of sequences]."""
        ...

    def sequence(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns token i64[T], loss bool[T] (True at answer tokens) and feature [T, F]."""
        ...


class TokenStore:
    """Sequences without stored features: a `SequenceStore` whose features have width 0."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = examples
        self.length_N = np.array([len(example.token_T) for example in examples], np.int64)
        self.num_sequences = len(examples)

    def sequence(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns token i64[T], loss bool[T] and feature f32[T, 0] of sequence i."""
        example = self._examples[i]
        token = torch.from_numpy(example.token_T.astype(np.int64))
        return token, torch.from_numpy(example.loss_T.copy()), torch.zeros(len(token), 0)


def by_length(pool: np.ndarray, length_N: np.ndarray, batch_tokens: int) -> list[np.ndarray]:
    """Returns the sequences of `pool`, indices into length_N, as batches of rising length.

    A batch has at most `batch_tokens` positions, padding included; a longer sequence is a batch of
    its own. Lengths 2, 4, 4 with batch_tokens = 8 make [0, 1] and [2].
    """
    batches: list[np.ndarray] = []
    group: list[int] = []
    for i in pool[np.argsort(length_N[pool], kind="stable")]:
        if group and (len(group) + 1) * length_N[i] > batch_tokens:
            batches.append(np.array(group))
            group = []
        group.append(i)
    batches.append(np.array(group))
    return batches


def epoch_batches(
    length_N: np.ndarray, batch_tokens: int, seed: int, epoch: int
) -> list[np.ndarray]:
    """Returns one epoch's batches of all sequences, in random order, as sequence indices.

    Sequences are drawn into pools of about `POOL`; each pool is cut by length.
    """
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(length_N))
    batches: list[np.ndarray] = []
    for pool in np.array_split(order, max(1, len(order) // POOL)):
        batches += by_length(pool, length_N, batch_tokens)
    return [batches[i] for i in rng.permutation(len(batches))]


def padding_share(length_N: np.ndarray, batches: Sequence[np.ndarray]) -> float:
    """Returns the share of the batches' positions that is padding.

    `batches` are indices of sequences, each padded to its batch's longest. Lengths 2, 4, 4 as
    [0, 1] and [2]: 2 of 12 positions.
    """
    positions = sum(len(batch) * int(length_N[batch].max()) for batch in batches)
    return 1 - sum(int(length_N[batch].sum()) for batch in batches) / positions


def padded(store: SequenceStore, indices: np.ndarray, device: torch.device) -> Batch:
    """Returns the sequences `indices` of `store` as one right-padded batch on `device`."""
    rows = [store.sequence(int(i)) for i in indices]
    pad = torch.nn.utils.rnn.pad_sequence
    token, loss, feature = (pad([row[part] for row in rows], batch_first=True) for part in range(3))
    length = torch.tensor([len(row[0]) for row in rows])
    return Batch(*(x.to(device) for x in (token, loss, feature, length)))
