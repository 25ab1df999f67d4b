"""Exports drafters in the forms of other libraries and imports them again; names what has none."""

import dataclasses
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from importing import borrowed_target
from published_heads import medusa_log_q
from tiny_backbone import LLAMA3, YARN, longrope
from tiny_target import save_llama

from spec_export import drafters
from spec_export.cli import main
from spec_export.imports.drafters import exporter as export_drafter
from spec_export.imports.drafters import importer
from spec_export.model import target
from spec_export.model.decoder import Backbone
from spec_export.training.checkpoint import SavedDrafter, load_drafter, save_drafter
from spec_runtime.errors import UserError

N, VOCAB = 8, 98  # layers and tokens of the target
IDS = torch.arange(0, VOCAB, 2)  # the draft vocabulary
DEFAULT_TAPS = (2, N // 2, N - 3)
OURS = ("soft_weight", "ttt_steps", "decay")  # what no form says: how it was trained
SIZES = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "norm_eps")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("export") / "llama", num_hidden_layers=N)


@cache
def backbone_of(llama: Path) -> Backbone:
    return Backbone.from_transformers(target.load(target.resolve(str(llama)))[0])


Save = Callable[..., tuple[Path, Any]]


@pytest.fixture
def save(llama: Path, tmp_path: Path) -> Save:
    """Returns a function that saves a random drafter of a name and options, for this target or
    another, and returns its folder and the module."""

    def save(
        name: str, ids: torch.Tensor | None = None, model: Path = llama, **options: Any
    ) -> tuple[Path, Any]:
        torch.manual_seed(3)
        definition = drafters.load(name)
        config = definition.Config(**options)
        drafter = definition.Drafter(config, target.ends(backbone_of(model)), ids)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        out = save_drafter(
            tmp_path / name, drafter.state_dict(), name, config, {"target": model.name},
            None if ids is None else ids.numpy(), dtype=torch.float32,
        )  # fmt: skip
        return out, drafter

    return save


def export(folder: Path, form: str, llama: Path, out: Path) -> tuple[dict[str, Any], Any]:
    """Returns config and tensors of what was exported."""
    export_drafter.run(str(folder), form, str(llama), out)
    return (
        json.loads((out / "config.json").read_text()),
        safetensors.torch.load_file(out / "model.safetensors"),
    )


def require_equal(found: SavedDrafter, expected: SavedDrafter) -> None:
    assert found.state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        assert torch.equal(found.state[name], tensor), name
    ids, expected_ids = found.draft_token_ids, expected.draft_token_ids
    assert (ids if ids is None else ids.tolist()) == (
        expected_ids if expected_ids is None else expected_ids.tolist()
    )


# ---- EAGLE-3 ----

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 300.0}
EVERY_SIZE = {
    **{"intermediate_size": 40, "num_heads": 2, "num_kv_heads": 1, "head_dim": 12},
    **{"norm_eps": 1e-3, "rope": ROPE},
}
TRIPS: dict[str, tuple[str, torch.Tensor | None, dict[str, Any]]] = {
    "plain": ("speculators", IDS, {}),
    "the whole vocabulary": ("speculators", None, {"taps": (0, N)}),
    "each tap normed": ("speculators", IDS, {"fc_norm": True, "norm_output": True}),
    "as speculators trains": (
        "speculators",
        IDS,
        {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True, "layers": 2},
    ),
    "of Qwen3's layers": (
        "speculators",
        IDS,
        {"qk_norms": True, "layers": 3, "own_embedding": True, "taps": (5, 1)} | EVERY_SIZE,
    ),
    "windows": ("speculators", IDS, {"layers": 2, "sliding_layers": (1,), "window": 5}),
    "LLaMA 3's rotation": ("speculators", IDS, {"rope": LLAMA3}),
    "YaRN": ("speculators", IDS, {"rope": YARN}),
    "native": ("native", IDS, {"rope": ROPE, "num_guesses": 7, "max_width": 3, "top_k": 4}),
    "native, the whole vocabulary": ("native", None, {}),
    "native and of another width": (
        "native",
        IDS,
        {"own_embedding": True, "hidden_size": 24} | EVERY_SIZE,
    ),
}


@pytest.mark.parametrize("case", TRIPS)
def test_what_was_exported_is_imported_again(
    case: str, save: Save, llama: Path, tmp_path: Path
) -> None:
    form, ids, options = TRIPS[case]
    folder, drafter = save("eagle3", ids, **{"taps": DEFAULT_TAPS} | options)
    _, tensors = export(folder, form, llama, tmp_path / "exported")
    assert all(each.dtype != torch.bfloat16 for each in tensors.values())  # it would round
    again = load_drafter(
        importer.run(str(tmp_path / "exported"), str(llama), tmp_path / "again", is_measured=False)
    )
    require_equal(again, load_drafter(folder))
    sizes = {name: getattr(drafter.dims, name) for name in SIZES}
    expected = dataclasses.asdict(drafter.config) | sizes
    expected |= {name: list(expected[name]) for name in ("taps", "sliding_layers")}
    expected["rope"] = drafter.config.rope or backbone_of(llama).config.rope
    for name in expected.keys() - set(OURS):
        assert again.config[name] == expected[name], name


FLAGS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual", "qk_norms")
# A drafter, a form, and what of the drafter's options the form cannot say.
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    *(("eagle3", "native", {flag: True}, f"{flag} True, expected False") for flag in FLAGS),
    ("eagle3", "native", {"taps": (1, 4, 6)}, "taps [1, 4, 6], expected [2, 4, 5]"),
    ("eagle3", "native", {"layers": 2}, "layers 2, expected 1"),
    ("eagle3", "native", {"sliding_layers": (0,), "window": 9}, "sliding_layers [0], expected []"),
    ("eagle3", "native", {"head_dim": 16, "rope": ROPE}, "head_dim 16, expected 8"),
    ("eagle3", "native", {"rope": YARN}, "rope_type yarn, expected default"),
    ("eagle3", "speculators", {"hidden_size": 24, "own_embedding": True}, "hidden_size 24, expe"),
    ("eagle3", "speculators", {"rope": longrope(4)}, "rope_type longrope, expected default"),
    ("dflash", "speculators", {"own_head": True}, "own_head True, expected False"),
    ("dflash", "speculators", {"own_embedding": True}, "own_embedding True, expected False"),
    ("dflash", "speculators", {"qk_norms": False}, "qk_norms False, expected True"),
    ("dflash", "speculators", {"causal_layers": (0,)}, "causal_layers [0], expected []"),
    ("medusa", "native", {"num_layers": 2}, "num_layers 2 of weights of their own"),
]


@pytest.mark.filterwarnings("ignore:max length")  # longrope's
@pytest.mark.parametrize(("name", "form", "options", "message"), REFUSED)
def test_what_a_form_cannot_say_is_refused_by_name(
    name: str, form: str, options: dict[str, Any], message: str, save: Save, llama: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    known: dict[str, Any] = {} if name == "medusa" else {"taps": DEFAULT_TAPS}
    folder, _ = save(name, IDS if name == "eagle3" else None, **known | options)
    with pytest.raises(UserError, match=re.escape(f"as {form}: got {message}")) as raised:
        export_drafter.run(str(folder), form, str(llama), tmp_path / "out")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_target_that_rotates_part_of_a_head_is_refused(save: Save, tmp_path: Path) -> None:
    model = save_llama(
        tmp_path / "phi3", family="phi3", num_hidden_layers=N, pad_token_id=0,
        rope_parameters={**ROPE, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    folder, _ = save("eagle3", IDS, model, taps=DEFAULT_TAPS)
    with pytest.raises(UserError, match="got rotary width 4, expected 8"):
        export_drafter.run(str(folder), "speculators", str(model), tmp_path / "out")


WRITTEN = (
    *("plain", "trained", "qwen3", "peagle"),
    *("dflash", "dspark", "dflash-trained", "dspark-trained"),
)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_drafter_of_speculators_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    """Tensors, types and keys are those that the library wrote, see written_by_speculators/; it
    reads what we write by them; see test_speculators.py for its logits. A confidence head, which
    ours do not have, stays away."""
    llama = borrowed_target(tmp_path / "llama")
    folder = Path(__file__).parent / "written_by_speculators" / name
    ours = importer.run(str(folder), str(llama), tmp_path / "ours", is_measured=False)
    config, tensors = export(ours, "speculators", llama, tmp_path / "out")
    theirs = safetensors.torch.load_file(folder / "model.safetensors")
    theirs = {key: each for key, each in theirs.items() if "confidence" not in key}
    assert tensors.keys() == theirs.keys()
    for each, tensor in theirs.items():
        assert tensors[each].dtype == tensor.dtype, each
        assert torch.equal(tensors[each], tensor), each
    written = json.loads((folder / "config.json").read_text())
    unlike = {"architectures", "embed_requires_grad", "speculators_config", "torch_dtype"}
    for key in config.keys() - unlike - {"transformer_layer_config"}:
        assert "confidence" in key or config[key] == written[key], key
    for key, value in config["transformer_layer_config"].items():
        if key != "max_position_embeddings":
            assert value == written["transformer_layer_config"][key], key
    assert config["speculators_config"].keys() == written["speculators_config"].keys()


# ---- Medusa ----


@pytest.mark.parametrize(
    ("ids", "options"),
    [
        (IDS, {}),
        (None, {"num_layers": 2, "num_heads": 2, "bias": True}),
        (IDS, {"heads": "own"}),
        (None, {"heads": "own", "num_heads": 1}),
    ],
)
def test_vllm_reads_medusas_heads(
    ids: torch.Tensor | None, options: dict[str, Any], save: Save, llama: Path, tmp_path: Path
) -> None:
    """Compares logits with vLLM's forward pass, by the names of its tensors, within 1e-5; what is
    imported again is what was exported."""
    folder, drafter = save("medusa", ids, **options)
    config, tensors = export(folder, "vllm-medusa", llama, tmp_path / "out")
    vocabulary = VOCAB if ids is None else len(ids)
    assert (config["vocab_size"], config["truncated_vocab_size"]) == (VOCAB, vocabulary)
    row_1D = torch.randn(1, 32)
    with torch.no_grad():
        expected = drafter.logits(drafter.blocks_of(row_1D))[0]
    for k in range(config["num_heads"]):
        x = row_1D
        for j in range(config["num_hidden_layers"]):
            y = x @ tensors.pop(f"blocks.{k}.layers.{j}.weight").T
            if config["medusa_fc_bias"]:
                y = y + tensors.pop(f"blocks.{k}.layers.{j}.bias")
            x = x + torch.nn.functional.silu(y)
        shared = config["original_lm_head"]
        head = tensors["lm_head.weight"] if shared else tensors.pop(f"lm_heads.{k}.weight")
        torch.testing.assert_close((x @ head.T)[0], expected[k], rtol=0, atol=1e-5)
    left = {"lm_head.weight"} if config["original_lm_head"] else set()
    assert tensors.keys() == left | (set() if ids is None else {"token_map"})
    if ids is not None:
        assert tensors["token_map"].tolist() == ids.tolist()
    again = load_drafter(
        importer.run(str(tmp_path / "out"), str(llama), tmp_path / "again", is_measured=False)
    )
    saved = load_drafter(folder)
    require_equal(again, saved)
    for name in ("num_heads", "num_layers", "heads", "bias"):
        assert again.config[name] == saved.config[name], name


@pytest.mark.parametrize(
    "options",
    [
        {"heads": "own", "bias": True, "top_k": 7},
        {"num_heads": 2, "num_layers": 2},  # of the same weights, as its authors' heads have them
    ],
)
def test_medusas_authors_read_its_heads(
    options: dict[str, Any], save: Save, llama: Path, tmp_path: Path
) -> None:
    """Its own forward pass gives the same log-probabilities, within 1e-5; what is imported again
    has the same weights, beside biases of 0 for none."""
    folder, drafter = save("medusa", None, **options)
    with torch.no_grad():
        for first, *others in drafter.blocks:
            for block in others:
                block.load_state_dict(first.state_dict())
    folder = save_drafter(
        folder, drafter.state_dict(), "medusa", drafter.config, {}, None, dtype=torch.float32
    )
    export_drafter.run(str(folder), "native", str(llama), tmp_path / "out")
    assert {each.name for each in (tmp_path / "out").iterdir()} == {
        "config.json", "medusa_lm_head.safetensors",
    }  # fmt: skip
    state = safetensors.torch.load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
    row_D, config = torch.randn(32), drafter.config
    with torch.no_grad():
        expected = torch.log_softmax(drafter.logits(drafter.blocks_of(row_D[None]))[0], -1)
    got = medusa_log_q(state, config.num_layers, row_D, drafter.head_VD)
    torch.testing.assert_close(torch.stack(got), expected, rtol=0, atol=1e-5)
    again = load_drafter(
        importer.run(str(tmp_path / "out"), str(llama), tmp_path / "again", is_measured=False)
    )
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state[name], tensor), name
    left = again.state.keys() - drafter.state_dict().keys()
    assert all(name.endswith("bias") and not again.state[name].any() for name in left)
    assert bool(left) is not config.bias
    for name in ("num_heads", "num_layers", "heads", "top_k"):
        assert again.config[name] == getattr(config, name), name


@pytest.mark.parametrize("text", ['{"rope": 1}', "[]", "{", '{"top_k": "x"}', '{"top_k": 0}'])
def test_a_faulty_search_is_refused(text: str, save: Save, llama: Path, tmp_path: Path) -> None:
    folder, _ = save("medusa", IDS)
    _, tensors = export(folder, "vllm-medusa", llama, tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    safetensors.torch.save_file(tensors, weights, {"format": "pt", "specsplit.search": text})
    with pytest.raises(UserError, match=r"specsplit\.search|top_k"):
        importer.run(str(tmp_path / "out"), str(llama), tmp_path / "again", is_measured=False)


def rewrite(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Replaces keys and tensors of what was exported."""
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | config))
    whole = safetensors.torch.load_file(folder / "model.safetensors") | tensors
    safetensors.torch.save_file(whole, folder / "model.safetensors")


def test_one_matrix_for_all_heads_that_is_not_the_targets_becomes_theirs(
    save: Save, llama: Path, tmp_path: Path
) -> None:
    folder, _ = save("medusa", None, num_heads=2)
    _, tensors = export(folder, "vllm-medusa", llama, tmp_path / "out")
    other = tensors["lm_head.weight"] + 1
    rewrite(tmp_path / "out", {}, {"lm_head.weight": other})
    out = importer.run(str(tmp_path / "out"), str(llama), tmp_path / "again", is_measured=False)
    state = load_drafter(out).state
    for k in range(2):
        assert torch.equal(state[f"output_heads.{k}"], other)


def test_one_matrix_for_all_heads_is_the_targets_with_the_scale_of_its_logits(
    save: Save, tmp_path: Path
) -> None:
    """vLLM scales no logits of heads, so that what the target stores would give other ones."""
    options: dict[str, Any] = {"family": "granite", "logits_scaling": 4.0}
    granite = save_llama(tmp_path / "granite", num_hidden_layers=2, **options)
    folder, _ = save("medusa", None, granite, num_heads=2)
    _, tensors = export(folder, "vllm-medusa", granite, tmp_path / "out")
    for factor, heads in ((1, "shared"), (4, "own")):
        rewrite(tmp_path / "out", {}, {"lm_head.weight": factor * tensors["lm_head.weight"]})
        again = tmp_path / f"again-{factor}"
        out = importer.run(str(tmp_path / "out"), str(granite), again, is_measured=False)
        assert load_drafter(out).config["heads"] == heads


def test_vllms_heads_may_be_whole_and_their_tokens_in_any_order(
    save: Save, llama: Path, tmp_path: Path
) -> None:
    """Heads of all tokens with a map are read as heads of the tokens in it."""
    folder, _ = save("medusa", None, heads="own", num_heads=2)
    export(folder, "vllm-medusa", llama, tmp_path / "whole")
    rewrite(tmp_path / "whole", {}, {"token_map": IDS.flip(0)})
    out = importer.run(str(tmp_path / "whole"), str(llama), tmp_path / "a", is_measured=False)
    found, state = load_drafter(out), load_drafter(folder).state
    assert found.draft_token_ids is not None
    assert found.draft_token_ids.tolist() == IDS.tolist()
    cut = {f"lm_heads.{k}.weight": state[f"output_heads.{k}"][IDS.flip(0)] for k in range(2)}
    rewrite(tmp_path / "whole", {}, cut)
    again = importer.run(str(tmp_path / "whole"), str(llama), tmp_path / "b", is_measured=False)
    for each in (found, load_drafter(again)):
        for k in range(2):
            assert torch.equal(each.state[f"output_heads.{k}"], state[f"output_heads.{k}"][IDS])


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"logit_scale": 2.0}, {}, "got logit_scale 2.0 in the config, expected 1"),
        ({}, {"token_map": IDS * 0}, "got token_map with ids that repeat"),
        ({}, {"token_map": IDS + 2}, "or are not among the target's 98 tokens"),
        ({}, {"lm_head.weight": torch.ones(40, 32)}, "got heads of 40 tokens, and ids of 49"),
        ({}, {"blocks.0.layers.0.bias": torch.ones(32)}, "got 0.0.linear.bias"),
        ({"medusa_fc_bias": True}, {}, "got no tensor 0.0.linear.bias"),
        ({}, {"blocks.1.layers.0.weight": torch.ones(30, 30)}, "expected the target's hidden si"),
    ],
)
def test_other_heads_of_vllm_are_refused_by_name(
    config: dict[str, Any], tensors: dict[str, Any], message: str, save: Save, llama: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    folder, _ = save("medusa", IDS, num_heads=2)
    export(folder, "vllm-medusa", llama, tmp_path / "out")
    rewrite(tmp_path / "out", config, tensors)
    with pytest.raises(UserError, match=message):
        importer.run(str(tmp_path / "out"), str(llama), tmp_path / "again", is_measured=False)


# ---- the command ----


def test_every_drafter_has_forms_or_a_reason() -> None:
    held = {name for names in export_drafter.FORMS.values() for name in names}
    assert {*export_drafter.NO_FORM, *held} == set(drafters.trainable())
    assert not set(export_drafter.NO_FORM) & held


def test_the_command(
    save: Save, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = save("medusa", IDS)
    arguments = ["export", str(folder), "--target", str(llama), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--format", "vllm-medusa"])
    assert not end.value.code
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "out")
    hydra, _ = save("hydra", IDS)
    for words, message in (
        ([*arguments, "--format", "vllm-medusa"], "holds other files"),
        ([*arguments, "--format", "native"], "got guesses among 49 tokens, expected all 98"),
        (["export", str(hydra), *arguments[2:], "--format", "native"], "got drafter hydra, expec"),
    ):
        if words[-1] == "native":
            words[words.index("--out") + 1] = str(tmp_path / "other")
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
