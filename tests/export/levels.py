"""Checks drafters that run level by level: their loss against a naive one, their graphs by a walk.

Tolerance between eager and ONNX Runtime: 1e-4 absolute on log-probabilities, both float32 with
other orders of summation (measures about 1e-6; a wrong level or state moves them by tenths).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from formulas import check_loss_and_gradient
from graphs import Runner, open_model
from this_cpu import SATURATES
from tiny_backbone import HEAD_DIM, HEADS, VOCAB, chain
from torch import Tensor

from spec_export import target
from spec_export.decoder import Backbone
from spec_export.drafters.layers import Batch
from spec_export.graphs.quantize import quantize
from spec_export.graphs.slots import to_slots

TOLERANCE = 1e-4
D = HEADS * HEAD_DIM


def make_drafter(
    module: Any, backbone: Backbone, vocabulary: Tensor | None = None, **config: Any
) -> Any:
    """Makes a drafter with random weights, so that every one of them matters."""
    torch.manual_seed(1)
    drafter = module.Drafter(module.Config(**config), target.ends(backbone), vocabulary)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return drafter


def make_batch(lengths: tuple[int, ...] = (14,), seed: int = 2) -> Batch:
    """Returns random tokens and features; every token is an answer's."""
    torch.manual_seed(seed)
    B, T = len(lengths), max(lengths)
    length_B = torch.tensor(lengths)
    is_token_BT = torch.arange(T) < length_B[:, None]
    token_BT = torch.where(is_token_BT, torch.randint(VOCAB, (B, T)), 0)
    return Batch(token_BT, is_token_BT, 3 * torch.randn(B, T, D), length_B)


def rms(x: Tensor) -> Tensor:
    """Returns x over its root mean square."""
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def check_loss(drafter: Any, logits_of: Callable[[Tensor, list[int]], Tensor]) -> None:
    """Compares loss, counts and gradient with Σ_k mean_t of −(1−s) log q(label) − s Σ p log q.

    `logits_of` takes the features of the first t + 1 positions and the path's tokens, and returns
    the logits of the next guess by the paper's formula.
    """
    K, soft = drafter.config.num_guesses, drafter.config.soft_weight
    batch = make_batch()
    batch.loss_BT[0, :5] = False
    batch.loss_BT[0, 9] = False  # like a user's turn between two answers
    with torch.no_grad():  # this makes a guess right
        ids, _ = drafter.guesses(batch, 1)
        batch.token_BT[0, 13] = ids[0, 11, 0, 0]

    def reference(drafter: Any, batch: Batch) -> tuple[Tensor, list[int], list[int]]:
        vocabulary = drafter.draft_token_ids.tolist()
        tokens, answer = batch.token_BT[0].tolist(), batch.loss_BT[0].tolist()
        assert batch.feature_BTF is not None
        feature_TD, T = batch.feature_BTF[0], len(tokens)
        expected, correct_K, count_K = torch.zeros(()), [0] * K, [0] * K
        for k in range(K):
            losses = []
            for t in range(T - 2 - k):
                wanted = tokens[t + 2 + k]
                if not answer[t + 2 + k] or wanted not in vocabulary:
                    continue
                logits_V = logits_of(feature_TD[: t + 1], tokens[t + 1 : t + 2 + k])
                log_q_V = torch.log_softmax(logits_V, -1)
                p_V = torch.softmax(drafter.head_VD @ feature_TD[t + 1 + k], -1)
                label = vocabulary.index(wanted)
                losses.append(-(1 - soft) * log_q_V[label] - soft * (p_V * log_q_V).sum())
                correct_K[k] += int(log_q_V.argmax() == label)
            count_K[k] = len(losses)
            expected = expected + torch.stack(losses).mean()
        return expected, correct_K, count_K

    check_loss_and_gradient(drafter, batch, reference)


def check_graphs(drafter: Any, backbone: Backbone, folder: Path) -> None:
    """Paths of a batch through the start and step graphs give the module's teacher-forced guesses.

    The nodes of a level are run together, in another order each time.
    """
    batch = make_batch((24,))
    token_T, T = batch.token_BT[0].numpy(), 24
    assert batch.feature_BTF is not None
    feature_TD = batch.feature_BTF[0].numpy()
    models = drafter.export(backbone.config)
    is_cached = any(value.name == "position_ids" for value in models["start"].graph.inputs)
    if is_cached:
        runner = Runner(models["start"], folder / "contiguous", "contiguous", 64)
        contiguous = states_by_pairs(runner, feature_TD)
        runner = Runner(to_slots(models["start"]), folder / "slots", "slots", 64)
        states = states_by_pairs(runner, feature_TD)
        assert states.keys() == contiguous.keys()
        assert all(np.abs(states[t] - contiguous[t]).max() <= TOLERANCE for t in states)
    else:
        start = open_model(models["start"], folder / "start", "stateless", 1)
        rows = [0, 3, 4, 9, 17]
        states = {
            t: start.run({"features": feature_TD[t : t + 1]}, ["state"])["state"][0].copy()
            for t in rows
        }
    step = open_model(models["step"], folder / "step", "stateless", 1)
    top_k, K = drafter.config.top_k, drafter.config.num_guesses
    _, best = drafter.guesses(batch, top_k)
    every_id, every_log_prob = drafter.guesses(batch, len(drafter.draft_token_ids))
    generator = np.random.default_rng(0)
    for k in range(K):
        rows = [t for t in generator.permutation(list(states)) if t + 1 + k < T]
        assert len(rows) >= 3
        feeds = {
            "input_ids": token_T[np.array(rows) + 1 + k],
            "state": np.stack([states[t] for t in rows]),
            "level": np.array([k]),
        }
        outputs = step.run(feeds, ["guess_ids", "guess_log_probs", "state.out"])
        for t, ids, log_probs, state in zip(
            rows,
            torch.from_numpy(outputs["guess_ids"]),
            outputs["guess_log_probs"],
            outputs["state.out"].copy(),
            strict=True,
        ):
            assert np.abs(log_probs - best[0, t, k].numpy()).max() <= TOLERANCE, (t, k)
            # the ids carry these probabilities in eager mode too (close ones may change places)
            table_V = torch.full((VOCAB,), -torch.inf)
            table_V[every_id[0, t, k]] = every_log_prob[0, t, k]
            assert np.abs(table_V[ids].numpy() - log_probs).max() <= TOLERANCE
            states[t] = state
    check_quantized(models["step"], folder, feeds, outputs["guess_log_probs"].copy())


def check_quantized(
    model: Any, folder: Path, feeds: dict[str, np.ndarray], log_probs_NC: np.ndarray
) -> None:
    """In 8 bits nothing is lost, biases included: the products' rounding moves a log-probability
    by hundredths here (0.11 through four products and a head), a lost term by several tenths. In 4
    bits every row still has guesses of its own."""
    for precision, tolerance in (("int8", 0.3 if SATURATES else 0.15), ("int4", 1.5)):
        step = open_model(quantize(model, precision, SATURATES), folder / precision, "stateless", 1)
        got = step.run(feeds, ["guess_log_probs"])["guess_log_probs"]
        assert got.shape == log_probs_NC.shape, precision
        assert np.abs(got - log_probs_NC).max() <= tolerance, precision


def states_by_pairs(runner: Runner, feature_TD: np.ndarray) -> dict[int, np.ndarray]:
    """Returns the start graph's state at the last pair of each of some uneven chunks."""
    states, t = {}, 0
    for c in (5, 1, 3, 1, 7):
        features = feature_TD[None, t : t + c]
        outputs = runner.step([0] * c, chain(c), ["state"], [c - 1], features=features)
        runner.cache.commit(range(c))
        t += c
        states[t - 1] = outputs["state"][0]
    return states


def check_configuration(drafter: Any, backbone: Backbone) -> None:
    """The configuration given to the proposer is what it needs, and matches the graphs."""
    config = drafter.runtime_config()
    assert config["num_guesses"] == drafter.config.num_guesses
    assert config["max_width"] == drafter.config.max_width
    assert config["taps"] == []
    assert config["top_k"] == drafter.config.top_k
    assert set(drafter.export(backbone.config)) == {"start", "step"}
