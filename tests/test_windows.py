"""Checks models some of whose layers see only a sliding window: real graphs of a tiny target give
the greedy text of transformers, far beyond the window."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

from contract import PROMPTS  # noqa: E402
from cuda_standin import StandIn  # noqa: E402
from test_attention import calls  # noqa: E402
from workshop import FluentWorkshop  # noqa: E402

import spec_runtime  # noqa: E402
from spec_export.model import target  # noqa: E402
from spec_runtime.trees.tree import TokenTree  # noqa: E402

WINDOW = 16  # every prompt is longer
NUM_TOKENS = 48


# Generates with each drafter.
GENERATE = """
import ctypes, sys
import spec_runtime
from cuda_standin import zeroed

mark = ctypes.CDLL("libcudart.so.13").standin_mark
for name in sys.argv[2:]:
    mark(name.encode())
    engine = spec_runtime.load(sys.argv[1], name, threads=1, lookup=False, backend="cuda")
    print(name, len(engine.generate("say abc, 3", max_new_tokens=60, ignore_eos=True).token_ids))
"""


class WindowedWorkshop(FluentWorkshop):
    """A workshop whose target has a layer with a window and one without."""

    num_steps = 20

    def _llama(self) -> Path:
        folder = super()._llama()
        file = folder / "config.json"
        changes = {
            "model_type": "ministral",
            "architectures": ["MinistralForCausalLM"],
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        }
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        return folder


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> WindowedWorkshop:
    return WindowedWorkshop(tmp_path_factory.mktemp("windowed"))


@pytest.fixture(scope="module")
def bundle(windowed: WindowedWorkshop) -> Any:
    """Returns a function that builds a bundle, each once. Its drafters are one that guesses in one
    pass and one that shares the target's cache; or the target is its own draft model."""

    @cache
    def build(device: str, is_own_draft: bool = False) -> Path:
        out = windowed.folder / f"{device}-{is_own_draft}"
        options: dict[str, Any] = {"device": device, "precision": "fp32", "max_length": 192}
        if is_own_draft:
            return windowed.build(out, draft_model=str(windowed.llama()), **options)
        return windowed.build(out, "medusa", "skip_layer", **options)

    return build


@pytest.fixture(scope="module")
def transformers_text(windowed: WindowedWorkshop) -> Any:
    """Returns a function: the tokens that greedy generation by transformers adds to a prompt's."""
    model, _ = target.load(target.resolve(str(windowed.llama())))

    @cache
    def generate(*prompt_ids: int) -> list[int]:
        ids_BT = torch.tensor([prompt_ids])
        made = model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        return made[0, len(prompt_ids) :].tolist()

    return generate


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "drafter", "options"),  # with attention "bias" and "full_buffer"
    [
        *(("cpu", name, {}) for name in ("none", "prompt_lookup", "lookahead")),
        *(("cpu", name, {}) for name in ("skip_layer", "draft_model", "medusa")),
        ("cpu", "skip_layer", {"strict": True}),
        *(("cuda", name, {}) for name in ("none", "skip_layer", "medusa")),
    ],
)
def test_the_text_is_that_of_transformers(
    bundle: Any, transformers_text: Any, device: str, drafter: str, options: dict[str, Any]
) -> None:
    path = bundle(device, is_own_draft=drafter == "draft_model")
    engine = spec_runtime.load(path, drafter, threads=1, lookup=False, **options)
    num_accepted = 0

    def check(prompt_ids: list[int]) -> list[int]:
        assert len(prompt_ids) > WINDOW
        result = engine.generate(prompt_ids, max_new_tokens=NUM_TOKENS, ignore_eos=True)
        assert result.token_ids == transformers_text(*prompt_ids)
        nonlocal num_accepted
        num_accepted += NUM_TOKENS - 1 - result.stats.steps
        return result.token_ids

    for prompt in PROMPTS:
        prompt_ids = engine.encode(prompt)
        answer = check(prompt_ids)
    # a second turn keeps some rows of the answer; the next cuts the text inside of the window
    check([*prompt_ids, *answer[:30], *prompt_ids[:20]])
    check([*prompt_ids, *answer[:25]])
    if drafter == "draft_model":  # only guesses that nobody asks for are in vain
        assert num_accepted > 0.6 * NUM_TOKENS * len(PROMPTS)
    assert (num_accepted > 10) == (drafter != "none")


def test_rows_that_were_put_aside_keep_their_positions(bundle: Any) -> None:
    """Between copying and restoring them, every slot had a row at another position."""
    target = spec_runtime.load(bundle("cpu"), "none", threads=1).target
    tokens = np.random.default_rng(0).integers(2, 98, size=50).tolist()
    target.prefill(tokens[:40])
    rows = target.copy_rows(40)
    expected = target.prefill(tokens[40:])[0].row(0).copy()
    with target.alone():
        target.verify(TokenTree(np.array(tokens), np.zeros(50, np.int64)))
    target.restore_rows(rows, 40)
    assert np.array_equal(target.prefill(tokens[40:])[0].row(0), expected)


@pytest.mark.standin
def test_runs_are_captured_without_copies(bundle: Any, standin: StandIn, tmp_path: Path) -> None:
    """The tokens mean nothing there. Half precision is in test_cuda_matrix.py."""
    path = bundle("cuda")
    printed, sections = calls(standin, tmp_path, GENERATE, path, "medusa", "skip_layer")
    assert printed == "medusa 60\nskip_layer 60\n"
    assert all(sections[name].num_graph_launches > 2 for name in ("medusa", "skip_layer"))
