"""Gives what an imported drafter guesses, as its module and as its exported graphs."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from graphs import Runner, open_model
from guessing import has_cache
from tiny_backbone import chain
from torch import Tensor

from spec_export.drafters.layers import Batch
from spec_export.graphs import trace
from spec_export.graphs.slots import to_slots
from spec_export.model.decoder import Backbone
from spec_export.model.hidden_states import features_and_taps

Guesses = tuple[Tensor, Tensor, Tensor | None]


def guesses_of(
    module: Any,
    hf_model: Any,
    token_T: Tensor,
    folder: Path,
    num_levels: int = 1,
    tap_TF: Tensor | None = None,
    fuses: bool = False,
) -> Iterator[Guesses]:
    """Yields twice what a drafter guesses behind each pair of a text: of the module, which reads
    transformers' features, and of its graph, which reads those of the target's graph, both in fp32.
    With taps given, f32[T, F], both read these. With `fuses` the target's graph also fuses them,
    which makes it a graph of its own for each kind of fusion, and takes seconds to trace.

    Guesses are token ids i64[R, K, Vd] and log-probabilities f32 of the whole draft vocabulary, and
    pairs f32[R, K-1, Vd, Vd] or None. A drafter that goes on level by level does so along the
    text's true tokens, and the graph's rows R end `num_levels` before the text does.
    """
    V = len(module.draft_token_ids)
    with torch.no_grad():
        final_BTD, *taps = features_and_taps(hf_model.model, token_T[None], module.config.taps)
        if tap_TF is not None:
            taps = [tap_TF[None]]
        features = torch.cat((final_BTD, *taps), -1)
        batch = Batch(token_T[None], token_T[None] >= 0, features, torch.tensor([len(token_T)]))
        ids, log_probs, pairs = module.guesses_with_pairs(batch, V)
    yield ids[0], log_probs[0], None if pairs is None else pairs[0]
    module.config = replace(module.config, top_k=V)
    backbone = Backbone.from_transformers(hf_model, range(hf_model.config.num_hidden_layers + 1))
    if fuses:
        backbone.add_fusion("drafter", module.fusion)
    if tap_TF is None:
        target = Runner(to_slots(trace.export_backbone(backbone)), folder / "target")
        tap_names = [f"taps.{i}" for i in module.config.taps]
        names = (
            ["fused.drafter"] if fuses else tap_names if module.fusion is not None else ["features"]
        )
        read = target.step(token_T.numpy(), chain(len(token_T)), names)
        parts = [torch.from_numpy(read[name]) for name in names]
    else:
        parts = list(tap_TF.chunk(len(module.config.taps), -1))
    with torch.no_grad():
        is_whole = fuses or module.fusion is None
        feature_TD = (parts[0] if is_whole else module.fusion(parts)).numpy()
    model = module.export(backbone.config)["drafter"]
    yield _graph_guesses(module, model, token_T.numpy(), feature_TD, folder / "drafter", num_levels)


def _graph_guesses(
    module: Any,
    model: ir.Model,
    token_T: np.ndarray,
    feature_TD: np.ndarray,
    folder: Path,
    num_levels: int,
) -> Guesses:
    if not has_cache(model):
        backend = open_model(model, folder, "stateless", 1)
        outputs = module.output_names()
        rows = [
            {name: x.copy() for name, x in backend.run({"features": each[None]}, outputs).items()}
            for each in feature_TD[: len(token_T) - num_levels]
        ]
    else:
        rows = list(_rows(module, model, token_T, feature_TD, folder, num_levels))
    ids, log_probs = (
        torch.from_numpy(np.stack([row[name] for row in rows]))
        for name in ("guess_ids", "guess_log_probs")
    )
    if "pair_log_probs" not in rows[0]:
        return ids, log_probs, None
    return ids, log_probs, torch.from_numpy(np.stack([row["pair_log_probs"] for row in rows]))


def _rows(
    module: Any,
    model: ir.Model,
    token_T: np.ndarray,
    feature_TD: np.ndarray,
    folder: Path,
    num_levels: int,
) -> Iterator[dict[str, np.ndarray]]:
    """Yields each pair's outputs; what comes after the pair is scratch."""
    goes_on = any(value.name == "hidden" for value in model.graph.outputs)
    outputs = ["guess_ids", "guess_log_probs", "hidden"] if goes_on else module.output_names()
    runner, config = Runner(to_slots(model), folder), module.runtime_config()
    V = config.get("mask_token_base", 0)
    for t in range(len(token_T) - num_levels):
        root, feature_1D = token_T[t + 1], feature_TD[t : t + 1]
        if goes_on:
            yield _levels(runner, token_T[t + 1 :][:num_levels], feature_1D, outputs)
        else:
            tokens, rows = [root, *range(V, V + config.get("num_masks", 0))], None
            if "block_size" in config:
                size = config["block_size"]
                tokens, rows = [0, V + root] + [2 * V] * (size - 1), range(1, 1 + size)
                rows, runner.block = rows[config["first_row"] :], 1
            others_MD = np.zeros((len(tokens) - 1, feature_TD.shape[1]), np.float32)
            features = np.concatenate([feature_1D, others_MD])[None]
            yield runner.step(tokens, chain(len(tokens)), outputs, rows, features=features)
            runner.cache.commit(range(1))


def _levels(
    runner: Runner, tokens: np.ndarray, feature_1D: np.ndarray, outputs: list[str]
) -> dict[str, np.ndarray]:
    """Runs and commits a pair, then the levels after it, each on the output of the one before."""
    levels = [runner.step(tokens[:1], chain(1), outputs, features=feature_1D[None])]
    runner.cache.commit(range(1))
    for k, token in enumerate(tokens[1:], 1):
        feeds = runner.cache.place(np.array(chain(k)), k - 1)
        feeds |= {"input_ids": np.array([[token]]), "logit_rows": np.array([0])}
        feeds["features"] = levels[-1]["hidden"][None]
        result = runner.backend.run(feeds, outputs)
        levels.append({name: array.copy() for name, array in result.items()})
    return {name: np.concatenate([level[name] for level in levels]) for name in outputs}
