"""Checks that drafters' graphs guess as their modules do, in all forms and precisions.

Tolerance between eager and ONNX Runtime: 1e-4 absolute on log-probabilities, both float32 with
other orders of summation (measures 3e-5 at most; a wrong row, position or state moves them by
tenths).
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from formulas import backbone, features_of, make_batch, width_of
from graphs import Runner, open_model
from tiny_backbone import VOCAB, chain
from torch import Tensor

from spec_export.drafters.layers import Batch
from spec_export.graphs.quantize import quantize
from spec_export.graphs.slots import to_slots

TOLERANCE = 1e-4


def has_cache(model: ir.Model) -> bool:
    return any(value.name == "position_ids" for value in model.graph.inputs)


def check_guesses(ids_KC: np.ndarray, log_prob_KC: np.ndarray, log_q_KV: Tensor) -> np.ndarray:
    """Returns how far log-probabilities are from the best ones of `log_q_KV`, and from what their
    ids carry there (close ones may change places)."""
    assert ids_KC.shape == log_prob_KC.shape
    assert all(len(set(row)) == len(row) for row in ids_KC.tolist())
    best_KC = log_q_KV.topk(ids_KC.shape[1]).values.numpy()
    theirs_KC = log_q_KV.gather(1, torch.from_numpy(ids_KC)).numpy()
    return np.abs([log_prob_KC - best_KC, log_prob_KC - theirs_KC])


def every_log_q(drafter: Any, batch: Batch) -> Tensor:
    """Returns the module's log-probability of every token, [T-1, K, VOCAB], of one sequence."""
    ids, log_probs = drafter.guesses(batch, len(drafter.draft_token_ids))
    empty = torch.full((*ids.shape[1:3], VOCAB), -torch.inf)
    return empty.scatter_(-1, ids[0], log_probs[0])


# ---- drafters that guess in one pass ----


def check_one_pass(
    drafter: Any, folder: Path, tolerances: dict[str, float], of_rows: Any = np.max
) -> ir.Model:
    """Checks both forms of the graph "drafter", and the quantised ones by the precisions'
    `tolerances` on `of_rows` the differences. With a table of bigrams the graph's pairs are the
    module's of the same candidates, in every precision. Returns the graph."""
    model = drafter.export(backbone().config)["drafter"]
    form = "stateless"
    if has_cache(model):
        _check_one_pass(drafter, model, folder / "contiguous", "contiguous", TOLERANCE)
        form = "slots"
        to_slots(model)
    _check_one_pass(drafter, model, folder / form, form, TOLERANCE)
    for precision, tolerance in tolerances.items():
        graph = quantize(model.clone(), precision)
        _check_one_pass(drafter, graph, folder / precision, form, tolerance, of_rows)
    return model


def _check_one_pass(
    drafter: Any, model: ir.Model, folder: Path, form: str, tolerance: float, of_rows: Any = np.max
) -> None:
    batch = make_batch((24,), width_of(drafter))
    log_q_RKV = every_log_q(drafter, batch)
    K, C = drafter.runtime_config()["num_guesses"], drafter.config.top_k
    feature_TF = features_of(batch)[0].numpy()
    for t, got in guesses_by_chunk(drafter, model, folder, form, batch, feature_TF):
        assert got["guess_ids"].shape == (K, C)
        apart = check_guesses(got["guess_ids"], got["guess_log_probs"], log_q_RKV[t])
        assert of_rows(apart) <= tolerance, (form, t)
        check_pairs(drafter, got)


def check_pairs(drafter: Any, got: dict[str, np.ndarray]) -> None:
    """Checks the pairs of a graph with a table of bigrams against the module's."""
    if drafter.bigrams is not None:
        K, C = got["guess_ids"].shape
        index_KC = drafter.draft_index_V[torch.from_numpy(got["guess_ids"])]
        pair_KCC = drafter.bigrams(index_KC, torch.tensor(got["guess_log_probs"])).numpy()
        assert got["pair_log_probs"].shape == (K - 1, C, C)
        assert np.abs(got["pair_log_probs"] - pair_KCC).max() <= TOLERANCE


def random_table(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Returns a table of bigrams that has a third of all pairs."""
    rng = np.random.default_rng(3)
    ids = np.sort(ids)
    previous, behind = np.nonzero(rng.random((len(ids), len(ids))) < 1 / 3)
    return {
        "previous": ids[previous].astype(np.int32),
        "next": ids[behind].astype(np.int32),
        "bias": rng.normal(size=len(behind)).astype(np.float32),
        "token": ids[::2].astype(np.int32),
        "unseen": -rng.random(len(ids[::2])).astype(np.float32),
    }


def guesses_by_chunk(
    drafter: Any, model: ir.Model, folder: Path, form: str, batch: Batch, feature_TF: np.ndarray
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Feeds the pairs of a sequence in chunks of uneven size, with mask rows after each as scratch.
    Gives each chunk's last row and what the graph guesses there."""
    token_T = batch.token_BT[0].numpy()
    config, outputs, t = drafter.config, drafter.output_names(), -1
    K = getattr(config, "num_masks", 0)
    mask_ids = VOCAB + np.arange(K)
    if form == "stateless":
        backend = open_model(model, folder, form, 1)
    else:
        runner = Runner(model, folder, form, 64)
    for c in (7, 1, 3, 1, 6, 5):
        rows = slice(t + 1, t + 1 + c)
        t += c
        if form == "stateless":
            yield t, backend.run({"features": feature_TF[t : t + 1]}, outputs)
            continue
        more = {}
        if getattr(config, "inputs", None) != "tokens":
            of_masks = feature_TF[[t] * K]
            if getattr(config, "mask_feature", None) == "zero":
                of_masks = np.zeros_like(of_masks)
            more["features"] = np.concatenate([feature_TF[rows], of_masks])[None]
        tokens = np.concatenate([token_T[1:][rows], mask_ids])
        yield t, runner.step(tokens, chain(c + K), outputs, range(c - 1, c + K), **more)
        runner.cache.commit(range(c))


# ---- drafters that run level by level ----


def check_levels(drafter: Any, folder: Path) -> None:
    """Checks paths of a batch through the start and step graphs.

    The nodes of a level are run together, in another order each time.
    """
    batch = make_batch((24,))
    token_T, T = batch.token_BT[0].numpy(), 24
    models = drafter.export(backbone().config)
    assert set(models) == {"start", "step"}
    states = _states(models["start"], features_of(batch)[0].numpy(), folder)
    step = open_model(models["step"], folder / "step", "stateless", 1)
    log_q_RKV = every_log_q(drafter, batch)
    generator = np.random.default_rng(0)
    for k in range(drafter.config.num_guesses):
        rows = [t for t in generator.permutation(list(states)) if t + 1 + k < T]
        assert len(rows) >= 3
        feeds = {
            "input_ids": token_T[np.array(rows) + 1 + k],
            "state": np.stack([states[t] for t in rows]),
            "level": np.array([k]),
        }
        outputs = step.run(feeds, ["guess_ids", "guess_log_probs", "state.out"])
        got = outputs["guess_log_probs"].copy()
        assert check_guesses(outputs["guess_ids"], got, log_q_RKV[rows, k]).max() <= TOLERANCE
        states |= dict(zip(rows, outputs["state.out"].copy(), strict=True))
    # In 8 bits nothing is lost, biases included: rounding moves a log-probability by hundredths
    # (0.11 at most), a lost term by several tenths. In 4 bits every row has guesses of its own.
    for precision, tolerance in (("int8", 0.15), ("int4", 1.5)):
        model = quantize(models["step"], precision)
        step = open_model(model, folder / precision, "stateless", 1)
        rounded = step.run(feeds, ["guess_log_probs"])["guess_log_probs"]
        assert rounded.shape == got.shape, precision
        assert np.abs(rounded - got).max() <= tolerance, precision


def _states(start: ir.Model, feature_TD: np.ndarray, folder: Path) -> dict[int, np.ndarray]:
    """Returns the start graph's state at some rows; one with a cache reads all pairs, in chunks."""
    if not has_cache(start):
        backend = open_model(start, folder / "start", "stateless", 1)
        return {
            t: backend.run({"features": feature_TD[t : t + 1]}, ["state"])["state"][0].copy()
            for t in (0, 3, 4, 9, 17)
        }
    of_form = []
    for form in ("contiguous", "slots"):
        runner = Runner(start, folder / form, form, 64)
        states, t = {}, 0
        for c in (5, 1, 3, 1, 7):
            features = feature_TD[None, t : t + c]
            outputs = runner.step([0] * c, chain(c), ["state"], [c - 1], features=features)
            runner.cache.commit(range(c))
            t += c
            states[t - 1] = outputs["state"][0]
        of_form.append(states)
        if form == "contiguous":
            to_slots(start)
    contiguous, states = of_form
    assert all(np.abs(states[t] - contiguous[t]).max() <= TOLERANCE for t in states)
    return states


# ---- drafters that run over a tree ----


def check_along_trees(
    model: ir.Model,
    folder: Path,
    form: str,
    expected_of: Callable[[Tensor, int], tuple[Tensor, Tensor | None]],
    feature_TD: np.ndarray | None = None,
    vocab: int = VOCAB,
) -> None:
    """Checks a graph with a row for each node.

    Tokens are committed in chunks, after each comes a random forest, level by level, of which
    nothing stays. With features, a node reads its parent's output "hidden". `expected_of` takes a
    node's text and the number of committed rows, and returns log q [V] and the hidden row.
    """
    runner, rng = Runner(model, folder, form, 64), np.random.default_rng(0)
    text, length = rng.integers(0, vocab, 24), 0
    has_features = feature_TD is not None
    outputs = ["guess_ids", "guess_log_probs", *(["hidden"] if has_features else [])]
    first = int(has_features)  # row t then reads token t + 1

    def check(path: list[int], got: dict[str, np.ndarray], row: int) -> None:
        tokens = np.concatenate([text[: first + length], np.array(path, np.int64)])
        log_q_V, hidden_D = expected_of(torch.from_numpy(tokens), length)
        ids, log_probs = got["guess_ids"][[row]], got["guess_log_probs"][[row]]
        assert ids.shape == (1, 5)
        assert check_guesses(ids, log_probs, log_q_V[None]).max() <= TOLERANCE
        if hidden_D is not None:
            assert np.abs(got["hidden"][row] - hidden_D.numpy()).max() <= TOLERANCE

    for c in (5, 1, 3, 6):
        more = {} if feature_TD is None else {"features": feature_TD[None, length : length + c]}
        got = runner.step(text[first + length :][:c], chain(c), outputs, [c - 1], **more)
        runner.cache.commit(range(c))
        length += c
        check([], got, 0)
        paths: list[list[int]] = []
        parents: list[int] = []
        hidden: dict[int, Any] = {-1: got.get("hidden", [None])[0]}
        level = [-1]
        for width in (2, 3, 3):
            begin, above = len(paths), rng.choice(level, width).tolist()
            for parent in above:
                parents.append(len(parents) if parent < 0 else parent)
                paths.append([*(paths[parent] if parent >= 0 else []), int(rng.integers(vocab))])
            feeds = runner.cache.place(np.array(parents), begin)
            feeds["input_ids"] = np.array([[path[-1] for path in paths[begin:]]])
            feeds["logit_rows"] = np.arange(width)
            if has_features:
                feeds["features"] = np.stack([hidden[parent] for parent in above])[None]
            result = runner.backend.run(feeds, outputs)
            got = {name: array.copy() for name, array in result.items()}
            level = list(range(begin, len(paths)))
            for row, node in enumerate(level):
                hidden[node] = got["hidden"][row] if has_features else None
                check(paths[node], got, row)
