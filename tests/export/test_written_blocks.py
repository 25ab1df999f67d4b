"""Reads block drafters that their own libraries wrote, and guesses as these do.

Files and logits are in written_by_speculators/, see write_blocks.py there.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graphs import Runner
from importing import borrowed_target
from tiny_backbone import chain
from torch import Tensor

from spec_export.build.drafters import load_module
from spec_export.drafters.layers import Batch
from spec_export.graphs.slots import to_slots
from spec_export.imports.drafters.importer import run
from spec_export.model import target
from spec_export.model.decoder import Backbone
from spec_export.training.checkpoint import load_drafter
from spec_runtime.errors import UserError

FOLDER = Path(__file__).parent / "written_by_speculators"
NAMES = ("z-lab", "z-lab-defaults", "dflash", "dspark", "dflash-trained", "dspark-trained")
GRAPHS = ("z-lab", "dspark-trained")  # of the others' make see test_drafter_graphs.py
TOLERANCE = 1e-4
Golden = dict[str, Tensor]


def golden_of(name: str) -> Golden:
    with np.load(FOLDER / name / "golden.npz") as golden:
        return {key: torch.from_numpy(golden[key]) for key in golden}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return borrowed_target(tmp_path_factory.mktemp("written") / "llama")


def imported(name: str, llama: Path, out: Path) -> tuple[Any, Backbone]:
    """Returns our module of a drafter, and its target."""
    run(str(FOLDER / name), str(llama), out, is_measured=False)
    backbone = Backbone.from_transformers(target.load(target.resolve(str(llama)))[0])
    return load_module(load_drafter(out), backbone.config, target.ends(backbone)), backbone


def expected_of(golden: Golden, module: Any) -> tuple[Tensor, Tensor | None]:
    """Returns the library's log-probabilities f32[T-1, K, Vd] of guesses, the first one after its
    root, and f32[T-1, K-1, V, Vd] of the others after each token before them."""
    logits = golden["logits"][:, module.config.first_row :].clone()
    if "bias" not in golden:
        return torch.log_softmax(logits, -1), None
    after = torch.log_softmax(logits[:, 1:, None] + golden["bias"], -1)
    logits[:, 0] += golden["bias"][golden["tokens"][1:]]
    return torch.log_softmax(logits, -1), after


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_we_guess_as_the_library_does(name: str, llama: Path, tmp_path: Path) -> None:
    """All guesses of the module's whole blocks behind every root, and after every token before
    them; and of some graphs' over a cache, to which the context comes in chunks."""
    golden, (module, backbone) = golden_of(name), imported(name, llama, tmp_path / "out")
    check_module(golden, module)
    if name not in GRAPHS:
        return
    every = len(module.draft_token_ids)  # so that pairs leave nothing to a tail
    module.config = dataclasses.replace(module.config, top_k=every)
    model = module.export(backbone.config)["drafter"]
    check_graph(golden, module, Runner(model, tmp_path / "contiguous", "contiguous", 64))
    check_graph(golden, module, Runner(to_slots(model), tmp_path / "slots", "slots", 64))


def check_module(golden: Golden, module: Any) -> None:
    assert torch.equal(golden["head"], golden_of(NAMES[0])["head"])
    states, token_T = golden["states"], golden["tokens"]
    features = torch.cat((torch.zeros(len(states), len(golden["head"][0])), states), -1)
    is_token_T = torch.ones_like(token_T) > 0
    batch = Batch(token_T[None], is_token_T[None], features[None], torch.tensor([len(token_T)]))
    C = len(module.draft_token_ids)
    ids, log_probs, pairs = module.guesses_with_pairs(batch, C)
    ids, log_probs = ids[0], log_probs[0]
    index, (expected, after) = module.draft_index_V[ids], expected_of(golden, module)
    apart = (log_probs - expected.gather(-1, index)).abs().max()
    assert apart <= TOLERANCE
    assert (pairs is None) == (after is None)
    if after is not None:
        after_RKCV = after.gather(2, ids[:, :-1, :, None].expand(-1, -1, -1, C))
        wanted = after_RKCV.gather(3, index[:, 1:, None].expand(-1, -1, C, -1))
        assert (pairs[0] - wanted).abs().max() <= TOLERANCE


def check_graph(golden: Golden, module: Any, runner: Runner) -> None:
    expected, after = expected_of(golden, module)
    with torch.no_grad():
        fused_TD = module.fusion(golden["states"].chunk(3, -1)).numpy()
    V, D = golden["head"].shape
    first, size, root = module.config.first_row, module.config.block_size, 0
    for count in (3, 1, 1, 2, 1):
        context, root = fused_TD[root : root + count], root + count
        tokens = [0] * count + [V + int(golden["tokens"][root])] + [2 * V] * (size - 1)
        features = np.concatenate([context, np.zeros((size, D), np.float32)])[None]
        runner.block = count
        rows = range(count + first, count + size)
        got = runner.step(
            tokens, chain(count + size), module.output_names(), rows, features=features
        )
        found = {key: torch.from_numpy(each) for key, each in got.items()}
        index = module.draft_index_V[found["guess_ids"]]
        wanted = expected[root - 1].gather(1, index)
        assert (found["guess_log_probs"] - wanted).abs().max() <= TOLERANCE
        if after is not None:
            pairs = after[root - 1].gather(1, found["guess_ids"][:-1, :, None].expand(-1, -1, V))
            wanted = pairs.gather(2, index[1:, None].expand(-1, len(module.draft_token_ids), -1))
            assert (found["pair_log_probs"] - wanted).abs().max() <= TOLERANCE
        runner.cache.commit(range(count))
    assert root == len(golden["tokens"]) - 1


@pytest.mark.parametrize(
    ("name", "changes", "field", "expected"),
    [
        ("z-lab", {"block_size": 9, "dflash_config": {"block_size": 5}}, "block_size", 5),
        ("z-lab-defaults", {"num_target_layers": 7}, "taps", [2, 3, 5]),
        ("dspark", {"block_size": None}, "block_size", 8),
        (
            "z-lab",
            {"block_size": None, "dflash_config": None, "target_layer_ids": [0, 2, 7]},
            "",
            0,
        ),
    ],
)
def test_what_a_config_leaves_out(
    name: str, changes: dict[str, Any], field: str, expected: Any, llama: Path, tmp_path: Path
) -> None:
    """Nested keys count first, and defaults are those of the library; DeepSpec has none."""
    shutil.copytree(FOLDER / name, tmp_path / "x")
    config = json.loads((tmp_path / "x/config.json").read_text())
    for key, value in changes.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    (tmp_path / "x/config.json").write_text(json.dumps(config | {"mask_token_id": 5}))
    if field:
        run(str(tmp_path / "x"), str(llama), tmp_path / "out", is_measured=False)
        assert load_drafter(tmp_path / "out").config[field] == expected
    else:
        with pytest.raises(UserError, match="got block_size None in the config, expected 2 rows"):
            run(str(tmp_path / "x"), str(llama), tmp_path / "out", is_measured=False)
