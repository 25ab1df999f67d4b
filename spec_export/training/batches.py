"""Groups sequences of about one length into batches, so that little of a batch is padding.

Sequences are not packed after one another: no sequence sees another, and a drafter's attention
needs no mask between them.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from spec_export.drafters.layers import Batch
from spec_export.training.data import Example

POOL = 512  # sequences that are sorted by length together
AHEAD = 2  # batches that are read before they are asked for


class SequenceStore(Protocol):
    """Gives batches their sequences: stored features (`features.FeatureCache`) or only tokens."""

    @property
    def num_sequences(self) -> int: ...

    @property
    def length_N(self) -> np.ndarray:
        """Returns the number of tokens of each sequence, i64[number of sequences]."""
        ...

    @property
    def answers_N(self) -> np.ndarray:
        """Returns the number of answer tokens of each sequence, i64[number of sequences]."""
        ...

    def sequence(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns token i64[T], loss bool[T] (True at answer tokens) and feature [T, F]."""
        ...


class TokenStore:
    """Sequences without stored features: a `SequenceStore` whose features have width 0."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = examples
        self.length_N = np.array([len(example.token_T) for example in examples], np.int64)
        self.answers_N = np.array([example.loss_T.sum() for example in examples], np.int64)
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


def loaded(
    store: SequenceStore, groups: Iterable[np.ndarray], device: torch.device
) -> Iterator[Batch]:
    """Yields the sequences of each group, indices of `store`, as one right-padded batch on
    `device`. A thread reads the next batches meanwhile, for a GPU into pinned memory."""

    def padded(indices: np.ndarray) -> list[Tensor]:
        rows = [store.sequence(int(i)) for i in indices]
        pad = torch.nn.utils.rnn.pad_sequence
        parts = [pad(list(part), batch_first=True) for part in zip(*rows, strict=True)]
        parts.append(torch.tensor([len(row[0]) for row in rows]))
        return [part.pin_memory() for part in parts] if device.type == "cuda" else parts

    def on_device(parts: list[Tensor]) -> Batch:
        return Batch(*(part.to(device, non_blocking=True) for part in parts))

    with ThreadPoolExecutor(1) as reader:
        coming: deque[Future[list[Tensor]]] = deque()
        for indices in groups:
            coming.append(reader.submit(padded, indices))
            if len(coming) > AHEAD:
                yield on_device(coming.popleft().result())
        for batch in coming:
            yield on_device(batch.result())
