"""Imports Medusa's heads and EAGLE-1's drafters as they are published, and refuses other ones."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from importing import require_refused, write
from lossless import require_lossless
from module_and_graph import Guesses, guesses_of
from published_heads import PublishedEagle, eagle_state, medusa_log_q, medusa_state
from tiny_target import save_llama

from spec_export.build import make_bundle
from spec_export.build.drafters import load_module
from spec_export.build.make_bundle import BuildOptions
from spec_export.imports.drafters import importer
from spec_export.imports.drafters.importer import Overrides, run
from spec_export.model import target
from spec_export.model.decoder import Backbone
from spec_export.model.hidden_states import features_and_taps
from spec_export.training.checkpoint import SavedDrafter, load_drafter
from spec_runtime.bundle import manifest as bundles
from spec_runtime.errors import UserError

D, VOCAB, T = 32, 98, 12
TOKENS = (torch.arange(3, 3 + T) * 7 % VOCAB).tolist()
EAGLE: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": D, "intermediate_size": 40, "hidden_act": "silu"},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5},
    **{"num_hidden_layers": 1, "vocab_size": VOCAB},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("heads") / "llama")


@pytest.fixture(scope="module")
def model(llama: Path) -> Any:
    return target.load(target.resolve(str(llama)))[0]


def imported(
    source: Path, llama: Path, model: Any, out: Path, has_graph: bool = True
) -> tuple[Any, list[Guesses], torch.Tensor]:
    """Returns the module of what was imported, its guesses and its graph's, if it is wanted, and
    the text's final features [T, D]."""
    saved = load_drafter(run(str(source), str(llama), out, is_measured=False))
    backbone = Backbone.from_transformers(model)
    module = load_module(saved, backbone.config, target.ends(backbone))
    token_T = torch.tensor(TOKENS)
    with torch.no_grad():
        (feature_BTD,) = features_and_taps(model.model, token_T[None], ())
    guesses = guesses_of(module, model, token_T, out / "graphs", 3)
    return module, list(itertools.islice(guesses, 1 + has_graph)), feature_BTD[0]


def require_guesses(guesses: list[Guesses], k: int, t: int, log_q_V: torch.Tensor) -> None:
    """Compares the ten best tokens of guess k after pair t, of module and graph, with the published
    ones."""
    for ids, log_probs, _ in guesses:
        got, best = log_probs[t, k, :10], log_q_V.topk(10).values
        torch.testing.assert_close(got, log_q_V[ids[t, k, :10]], rtol=0, atol=1e-4)
        torch.testing.assert_close(got, best, rtol=0, atol=1e-4)


MEDUSA: dict[str, tuple[int, int | None, dict[str, Any], str]] = {
    # blocks of a head, tokens of its output matrix, config, name of the file
    "v1": (1, VOCAB, {"medusa_num_heads": 2, "medusa_num_layers": 1}, "medusa_lm_head.pt"),
    "v1 of fewer tokens": (2, 90, {"medusa_num_layers": 2}, "medusa_lm_head.pt"),
    "v2": (2, None, {"version": "2"}, "medusa_lm_head.safetensors"),
    "v2 with shared blocks once": (1, None, {"medusa_num_layers": 3}, "medusa_lm_head.safetensors"),
}


@pytest.mark.parametrize("case", MEDUSA)
def test_medusas_heads_guess_as_they_are_published(
    case: str, llama: Path, model: Any, tmp_path: Path
) -> None:
    num_layers, V, config, name = MEDUSA[case]
    torch.manual_seed(1)
    state = medusa_state(3, num_layers, D, V)
    source = write(tmp_path / "heads", config, state, name)
    module, guesses, feature_TD = imported(source, llama, model, tmp_path / "out", case == "v1")
    runs = config.get("medusa_num_layers", num_layers)
    for i in range(3):  # blocks that a file holds once are run again
        for j in range(num_layers, runs):
            for part in ("weight", "bias"):
                state[f"{i}.{j}.linear.{part}"] = state[f"{i}.0.linear.{part}"]
    assert module.config.num_heads == 3
    assert len(module.draft_token_ids) == (V or VOCAB)
    for t in (0, 5):
        expected = medusa_log_q(state, runs, feature_TD[t], model.lm_head.weight.detach())
        for k in range(3):
            require_guesses(guesses, k, t, expected[k])


def test_heads_lie_in_the_files_of_a_whole_model(llama: Path, model: Any, tmp_path: Path) -> None:
    """The model's own folder is the target; another target is a doubt."""
    torch.manual_seed(1)
    whole = tmp_path / "whole"
    shutil.copytree(llama, whole)
    state = medusa_state(2, 1, D, VOCAB)
    tensors = safetensors.torch.load_file(whole / "model.safetensors")
    tensors |= {f"medusa_head.{name}": tensor for name, tensor in state.items()}
    safetensors.torch.save_file(tensors, whole / "model.safetensors")
    _, guesses, feature_TD = imported(whole, whole, model, tmp_path / "out", False)
    head = model.lm_head.weight.detach()
    require_guesses(guesses, 1, 4, medusa_log_q(state, 1, feature_TD[4], head)[1])
    assert load_drafter(tmp_path / "out").provenance["imported"]["doubts"] == []
    run(str(whole), str(llama), tmp_path / "other", is_measured=False)
    (doubt,) = load_drafter(tmp_path / "other").provenance["imported"]["doubts"]
    assert "were trained with its heads" in doubt


@pytest.mark.parametrize(
    "options",
    [
        {"rope_theta": 300.0, "bias": True},
        {"num_hidden_layers": 2, "bias": False},
        {"num_hidden_layers": 2, "bias": True, "qkv_bias": True},
    ],
)
def test_eagle_1_guesses_as_it_is_published(
    options: dict[str, Any], llama: Path, model: Any, tmp_path: Path
) -> None:
    """Levels 0 to 2 along true tokens, within 1e-4."""
    torch.manual_seed(1)
    config = EAGLE | options
    state = eagle_state(config, options["bias"])
    embed_VD = model.model.embed_tokens.weight.detach()
    stored = state | {"embed_tokens.weight": embed_VD.bfloat16()}  # as rounded as theirs may be
    source = write(tmp_path / "eagle", config, stored, "pytorch_model.bin")
    is_whole = "qkv_bias" in options
    _, guesses, feature_TD = imported(source, llama, model, tmp_path / "out", is_whole)
    published = PublishedEagle(state, config, embed_VD)
    for t in (0, 6):
        for k, row in enumerate(published.levels(feature_TD[: t + 1], TOKENS, 3)):
            log_q_V = torch.log_softmax(model.lm_head.weight.detach() @ row, -1)
            require_guesses(guesses, k, t, log_q_V)


def test_eagle_1_reads_gemmas_embedding_without_its_scale(tmp_path: Path) -> None:
    """EAGLE looks tokens up in the target's table as it is stored, copied or not."""
    gemma = save_llama(tmp_path / "gemma", family="gemma", head_dim=16, num_attention_heads=2)
    model = target.load(target.resolve(str(gemma)))[0]
    torch.manual_seed(1)
    state, embed_VD = eagle_state(EAGLE, True), model.model.embed_tokens.weight.detach()
    for name, stored in (("bare", {}), ("copied", {"embed_tokens.weight": embed_VD.clone()})):
        source = write(tmp_path / name, EAGLE, state | stored, "model.safetensors")
        _, guesses, feature_TD = imported(source, gemma, model, tmp_path / f"{name}-out", False)
        for k, row in enumerate(
            PublishedEagle(state, EAGLE, embed_VD).levels(feature_TD[:7], TOKENS, 2)
        ):
            log_q_V = torch.log_softmax(model.lm_head.weight.detach() @ row, -1)
            require_guesses(guesses, k, 6, log_q_V)


@pytest.fixture(scope="module")
def folders(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns a folder of each kind of drafter."""
    torch.manual_seed(1)
    root = tmp_path_factory.mktemp("folders")
    eagle = write(root / "eagle", EAGLE, eagle_state(EAGLE, True), "model.safetensors")
    heads = medusa_state(3, 1, D, VOCAB)
    return {"eagle": eagle, "medusa": write(root / "medusa", {}, heads, "medusa_lm_head.pt")}


def test_a_build_names_what_was_given(
    folders: dict[str, Path], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importer.reference, "prompts", lambda: ("say abc, 1",))
    read = importer.read

    def read_all_but_one(*given: Any, **options: Any) -> SavedDrafter:
        saved = read(*given, **options)
        return replace(saved, state=dict(sorted(saved.state.items())[1:]))

    monkeypatch.setattr(importer, "read", read_all_but_one)
    options = BuildOptions(
        model=str(llama), drafter_checkpoints=[folders["medusa"]], out=tmp_path / "bundle"
    )
    with pytest.raises(UserError, match=rf"^{folders['medusa']}\b.*blocks\.0\.0\.bias"):
        make_bundle.build(options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_build_gets_the_weights_that_a_folder_would_keep(
    llama: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    state = {name: each.to(dtype) for name, each in eagle_state(EAGLE, True).items()}
    folder = write(tmp_path / "theirs", EAGLE, state, "model.safetensors")
    read = importer.read(str(folder), str(llama), is_measured=False)
    kept = load_drafter(run(str(folder), str(llama), tmp_path / "ours", is_measured=False))
    assert read.state.keys() == kept.state.keys()
    assert all(torch.equal(each, kept.state[name]) for name, each in read.state.items())
    assert json.loads(json.dumps(read.config)) == kept.config


def test_an_imported_drafter_is_measured_and_changes_no_token(
    folders: dict[str, Path], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bundle holds both, int8 beside the fp32 target; build imports one of them itself."""
    monkeypatch.setattr(importer.reference, "prompts", lambda: ("say abc, 1",))
    eagle = run(str(folders["eagle"]), str(llama), tmp_path / "eagle")
    drafters = [eagle, folders["medusa"]]
    bundle = make_bundle.build(
        BuildOptions(str(llama), (), drafters, out=tmp_path / "bundle", lanes=1)
    )
    manifest = bundles.read(bundle).manifest
    for drafter in manifest.drafters:  # with this length the engine compares its own
        validation = manifest.provenance["drafters"][drafter.name]["validation"]
        assert drafter.expected_accepted_length == validation["accepted_length"] >= 1
    medusa = manifest.provenance["drafters"]["medusa"]["imported"]
    assert medusa["source"] == str(folders["medusa"])
    for imported in (medusa, load_drafter(eagle).provenance["imported"]):
        assert imported["chain_length"] >= 1
    require_lossless(bundle, folders)


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "an input norm": (
        "eagle", {}, {"layers.0.input_layernorm.weight": torch.ones(D)}, "a norm before the first",
    ),
    "biases": ("eagle", {"qkv_bias": True}, {}, "got qkv_bias True in the config, and weights wit"),
    "biases of queries only": (
        "eagle", {}, {"layers.0.self_attn.q_proj.bias": torch.ones(D)}, "got no tensor layers.0.se",
    ),
    "other biases": ("eagle", {"attention_bias": True}, {}, "got attention_bias True"),
    "biases of another width": (
        "eagle", {"qkv_bias": True},
        {f"layers.0.self_attn.{part}_proj.bias": torch.ones(D) for part in "qkv"}, "x.*qkv_bias",
    ),
    "a head": ("eagle", {}, {"lm_head.weight": torch.ones(VOCAB, D)}, "a head of its own"),
    "a tensor": ("eagle", {}, {"gate.weight": torch.ones(1)}, r"got gate\.weight, which no"),
    "a bias that is not there": ("eagle", {"bias": False}, {}, "got bias False in the config, and"),
    "another embedding": (
        "eagle", {}, {"embed_tokens.weight": torch.ones(VOCAB, D)}, "not the target's embedding",
    ),
    "another target's fc": ("eagle", {}, {"fc.weight": torch.ones(40, 80)}, "got fc of 40 rows"),
    "an unknown key": ("eagle", {"alpha": 0.5}, {}, "got alpha 0.5 in the config, a key that is"),
    "an activation": ("eagle", {"hidden_act": "gelu"}, {}, "got hidden_act 'gelu'"),
    "Medusa's unknown key": ("medusa", {"residual": 0.5}, {}, "got residual 0.5 in the config, a"),
    "Medusa's activation": ("medusa", {"hidden_act": "gelu"}, {}, "got hidden_act 'gelu' in the"),
    "Medusa's scale": ("medusa", {"logit_scale": 2.0}, {}, "got logit_scale 2.0 in the config"),
    "a head's bias": ("medusa", {}, {"0.1.bias": torch.ones(VOCAB)}, r"got 0\.1\.bias, which no"),
    "another target's heads": (
        "medusa", {}, {"0.0.linear.weight": torch.ones(40, 40)}, "expected the target's hidden",
    ),
    "a head more without blocks": (
        "medusa", {}, {"3.1.weight": torch.ones(VOCAB, D)}, r"got 3\.1\.weight, which no drafter",
    ),
    "a head of other tokens": ("medusa", {}, {"1.1.weight": torch.ones(90, D)}, "got heads of"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_by_name(
    case: str, folders: dict[str, Path], llama: Path, tmp_path: Path
) -> None:
    kind, config, tensors, message = REFUSED[case]
    file = next(path for path in folders[kind].iterdir() if path.suffix != ".json")
    loaded = torch.load(file) if file.suffix == ".pt" else safetensors.torch.load_file(file)
    own = json.loads((folders[kind] / "config.json").read_text())
    folder = write(tmp_path / "x", own | config, loaded | tensors, file.name)
    require_refused(folder, llama, tmp_path / "out", message)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_settings_of_eagle_3_are_not_for_them(
    kind: str, folders: dict[str, Path], llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"got --taps for .*, expected none: it has no such"):
        run(str(folders[kind]), str(llama), tmp_path / "out", Overrides(taps=(1,)))
