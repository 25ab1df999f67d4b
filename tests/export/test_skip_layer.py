"""Skip-layer: its loss, every level's guesses, and what it shares with the target."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import onnx  # noqa: E402
from workshop import Workshop  # noqa: E402

import spec_runtime  # noqa: E402
from spec_export.build.drafters import load_module  # noqa: E402
from spec_export.drafters.layers import Batch  # noqa: E402
from spec_export.drafters.skip_layer import Config, Drafter  # noqa: E402
from spec_export.model import target  # noqa: E402
from spec_export.model.decoder import Backbone  # noqa: E402
from spec_export.training import checkpoint  # noqa: E402
from spec_runtime.bundle import manifest as bundles  # noqa: E402
from spec_runtime.engine import Engine  # noqa: E402
from spec_runtime.files.mapping import from_mapping, to_json  # noqa: E402
from spec_runtime.trees.grow import TreeBuilder  # noqa: E402

NAME = "skip_layer"


@pytest.fixture
def llama(workshop: Workshop) -> Any:
    return target.load(target.resolve(str(workshop.llama())))[0]


def make(llama: Any, **fields: Any) -> Drafter:
    ends = target.ends(Backbone.from_transformers(llama))
    return Drafter(Config(layers=1, **fields), ends, torch.arange(10, 98))


def make_batch(llama: Any, num_prompt: int = 4) -> Batch:
    """Two texts, the second one shorter."""
    token_BT = torch.randint(2, 98, (2, 12), generator=torch.Generator().manual_seed(1))
    length_B = torch.tensor([12, 9])
    row_T = torch.arange(12)
    loss_BT = (row_T >= num_prompt) & (row_T < length_B[:, None])
    with torch.no_grad():
        out = llama.model(token_BT, output_hidden_states=True)
    features = torch.cat([out.last_hidden_state, out.hidden_states[1]], -1)
    return Batch(token_BT, loss_BT, features, length_B)


def log_probs(drafter: Drafter, exit_D: Any) -> Any:
    """The formula, one row at a time, over the draft vocabulary."""
    n = exit_D * (exit_D.square().mean() + drafter.dims.norm_eps) ** -0.5 * drafter.norm
    if drafter.config.head == "trained":
        y = n @ drafter.block.weight
        n = n + y * torch.sigmoid(y)
    return torch.log_softmax(drafter.head_VD @ n, -1)


@pytest.mark.parametrize("head", ["target", "trained"])
@pytest.mark.parametrize("soft_weight", [0.0, 0.4])
def test_the_loss_is_the_papers(llama: Any, head: str, soft_weight: float) -> None:
    drafter, batch = make(llama, head=head, soft_weight=soft_weight), make_batch(llama)
    if head == "trained":
        torch.nn.init.normal_(drafter.block.weight, std=0.1)
    ids, _ = drafter.guesses(batch, 1)
    batch.token_BT[:, 2::2] = ids[:, :-1:2, 0, 0]  # every other answer is its guess
    loss, counts = drafter.loss(batch)
    losses, hits, rows = [], np.zeros(4, int), np.zeros(4, int)
    assert batch.feature_BTF is not None
    with torch.no_grad():
        for b in range(2):
            for p in range(1, int(batch.length_B[b]) - 1):
                label = int(batch.token_BT[b, p + 1]) - 10
                if not batch.loss_BT[b, p + 1] or label < 0:
                    continue
                final_D, exit_D = batch.feature_BTF[b, p].chunk(2)
                q_V = log_probs(drafter, exit_D)
                p_V = torch.softmax(drafter.head_VD @ final_D, -1)
                losses.append(-(1 - soft_weight) * q_V[label] - soft_weight * (p_V @ q_V))
                rows[:p] += 1  # guess k is read at position k + 1 at the earliest
                hits[:p] += int(q_V.argmax()) == label
    assert counts["count_K"].tolist() == rows.tolist()
    assert counts["correct_K"].tolist() == hits.tolist()
    assert 0 < hits[3] < hits[0] < rows[0] == len(losses)
    torch.testing.assert_close(loss, torch.stack(losses).mean(), rtol=1e-5, atol=1e-5)
    loss.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_the_early_exit_loss_is_layerskips(llama: Any) -> None:
    """Exits behind layers 2 (E), 3, 4 and 5, every other one of the last three a step."""
    ends = target.ends(Backbone.from_transformers(llama))
    config = Config(layers=2, head="target", soft_weight=0.0, exit_layers=(3, 4, 5), exit_every=2)
    drafter, batch = Drafter(config, ends), make_batch(llama)
    assert config.taps == (2, 3, 4, 5)
    torch.manual_seed(2)
    feature = torch.randn(2, 12, 5 * 64, requires_grad=True)
    live = Batch(batch.token_BT, batch.loss_BT, feature, batch.length_B)
    ids, _ = drafter.guesses(live, 1)
    assert int(ids[1, 4, 0, 0]) == int(log_probs(drafter, feature[1, 5, 64:128]).argmax())
    batch.token_BT[:, 2::2] = ids[:, :-1:2, 0, 0]  # every other answer is E's guess
    scale = {layer: sum(range(layer)) for layer in (2, 3, 4, 5)}  # e of the paper's layer l-1
    for step, active in enumerate([(2, 3, 5), (2, 4), (2, 3, 5)]):
        drafter.optimizer_step = step
        loss, counts = drafter.loss(live)
        expected, hits = torch.zeros(()), 0
        where = batch.loss_BT[:, 2:].nonzero().tolist()
        for layer in active:
            rows = feature[..., 64 * (layer - 1) : 64 * layer]
            for b, t in where:
                q_V, label = log_probs(drafter, rows[b, t + 1]), int(batch.token_BT[b, t + 2])
                expected = expected - scale[layer] * q_V[label] / len(where)
                hits += layer == 2 and int(q_V.argmax()) == label
        expected = expected / sum(scale[layer] for layer in active)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        assert int(counts["correct_K"][0]) == hits > 0
        got, wanted = (torch.autograd.grad(x, feature)[0] for x in (loss, expected))
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-7)
        for layer in (3, 4, 5):
            part = got[..., 64 * (layer - 1) : 64 * layer]
            assert bool(part.any()) == (layer in active)


def test_a_guess_is_the_one_before_it_a_token_later(llama: Any) -> None:
    drafter, batch = make(llama), make_batch(llama)
    ids, values = drafter.guesses(batch, 5)
    assert ids.shape == values.shape == (2, 11, 4, 5)
    for k in range(1, 4):
        assert torch.equal(ids[:, :-k, k], ids[:, k:, 0])
        assert torch.equal(values[:, :-k, k], values[:, k:, 0])
    assert batch.feature_BTF is not None
    with torch.no_grad():
        expected = log_probs(drafter, batch.feature_BTF[1, 4, 64:]).topk(5)
    torch.testing.assert_close(values[1, 3, 0], expected.values)
    assert torch.equal(ids[1, 3, 0], expected.indices + 10)


def test_the_whole_target_is_no_draft(llama: Any) -> None:
    backbone = Backbone.from_transformers(llama)
    drafter = Drafter(Config(layers=2), target.ends(backbone))
    with pytest.raises(ValueError, match="got layers 2, expected fewer than the target's 2"):
        drafter.export_from_target(backbone)


@pytest.fixture
def engine(workshop: Workshop) -> Engine:
    return spec_runtime.load(workshop.bundle(NAME), NAME, threads=1, lookup=False)


def test_every_level_guesses_as_pytorch_does(
    workshop: Workshop, engine: Engine, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node of each level, from its path alone. Tolerance 1e-3 as in the contract test."""
    proposer: Any = engine.proposer
    expand, seen = proposer._expand, []

    def recorded(nodes: TreeBuilder, first: int) -> Any:
        ids, values = yield from expand(nodes, first)
        tree = nodes.build()
        for node, row in enumerate(values.copy(), first):
            path = tree.token_N[tree.path(node)].tolist()
            seen.append((engine.target.length, path, ids[node - first].copy(), row))
        return ids, values

    monkeypatch.setattr(proposer, "_expand", recorded)
    prompt = engine.encode("say abc, 3")
    text = prompt + engine.generate(prompt, max_new_tokens=24, ignore_eos=True).token_ids
    saved = checkpoint.load_drafter(workshop.drafter(NAME))
    backbone = Backbone.from_transformers(llama)
    module = load_module(saved, backbone.config, target.ends(backbone))
    depths = []
    for length, path, ids, values in seen[::5]:
        with torch.no_grad():
            hidden = llama.model(torch.tensor([text[:length] + path]), output_hidden_states=True)
            expected_V = log_probs(module, hidden.hidden_states[1][0, -1])
        rank = {token: i for i, token in enumerate(module.draft_token_ids.tolist())}
        mine = [rank[i] for i in ids.tolist()]
        assert np.abs(values - expected_V[mine].numpy()).max() <= 1e-3
        assert np.abs(values - expected_V.topk(len(values)).values.numpy()).max() <= 1e-3
        depths.append(len(path))
    assert set(depths) == {1, 2, 3, 4}


def test_its_rows_are_the_targets_rows(engine: Engine) -> None:
    lender: Any = engine.target.lend()[0]
    own: Any = engine.proposer._backend  # type: ignore[attr-defined]
    assert set(own.buffers) == {"kv.0.k", "kv.0.v"} < set(lender.buffers)
    for name, cache in own.buffers.items():
        assert cache.data_ptr() == lender.buffers[name].data_ptr()
    engine.generate("ab", max_new_tokens=10, ignore_eos=True)
    assert own.capacity == lender.capacity


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_its_graph_points_into_the_targets_file(workshop: Workshop, precision: str) -> None:
    folder = workshop.bundle(NAME, precision) / "target"
    graph = onnx.load(folder / "skip_layer-drafter.onnx", load_external_data=False)
    place: dict[str, list[int]] = {}
    for tensor in graph.graph.initializer:
        if fields := {entry.key: entry.value for entry in tensor.external_data}:
            place.setdefault(fields["location"], []).append(int(fields["length"]))
    assert set(place) == {"target.bin", "skip_layer-drafter.bin"}
    assert sum(place["target.bin"]) > 2 * sum(place["skip_layer-drafter.bin"])
    # its own: head (80 of 98 tokens), block, and what is small
    own = (folder / "skip_layer-drafter.bin").stat().st_size
    width = 4 if precision == "fp32" else 1
    assert own < (80 + 64) * 64 * width * 1.3 + 4 * 80 * 2 + 4000


def test_the_contiguous_form_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    out = Path(shutil.copytree(workshop.bundle(NAME), tmp_path / "bundle"))
    manifest = to_json(bundles.read(out).manifest)
    manifest["drafters"][0]["graphs"]["drafter"]["form"] = "contiguous"
    bundles.write_manifest(out, from_mapping(bundles.Manifest, manifest, "manifest"))
    with pytest.raises(bundles.BundleError, match="got a graph of the contiguous form, expected"):
        spec_runtime.load(out, NAME, threads=1)
