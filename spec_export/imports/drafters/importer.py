"""Imports a drafter of another library for one target, and measures whether it was read rightly."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spec_export import drafters, reference
from spec_export.drafters.layers import Batch
from spec_export.imports.drafters import dflash, eagle1, eagle3, gguf_files, medusa, pard
from spec_export.imports.drafters.folder import Reading, open_folder
from spec_export.imports.drafters.parts import exact_dtype
from spec_export.model import target
from spec_export.model.decoder import Backbone
from spec_export.model.hidden_states import features_and_taps
from spec_export.report import SILENT, Report
from spec_export.training import recipe
from spec_export.training.checkpoint import (
    SavedDrafter,
    collect_provenance,
    non_finite,
    require_drafter_folder,
    save_drafter,
)
from spec_export.training.validate import validate
from spec_runtime.errors import UnsupportedModelError, UserError
from spec_runtime.files.mapping import brief

ANSWER_TOKENS = 48  # of each prompt that is measured
# Each has `matches`, which looks at a folder's config and tensors, and `read`.
FORMATS = (pard, dflash, eagle3, medusa, eagle1)
MAX_MEASURED = 8192  # tokens; the shipped prompts with their answers have far fewer
POOR = 1.3  # a chain's accepted length below which other readings are measured too


@dataclass(frozen=True)
class Overrides:
    """What the user decides about a reading; None leaves it to the files."""

    taps: tuple[int, ...] | None = None
    norm_output: bool | None = None
    norm_before_residual: bool | None = None
    alignment: str | None = None  # of block drafters: anchor or fill-in

    def given(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if value is not None}


def run(
    source: str,
    model: str | target.Source | None,
    out: Path,
    overrides: Overrides = Overrides(),
    is_measured: bool = True,
    report: Report = SILENT,
) -> Path:
    """Writes the drafter that `read` returns to `out`, which is returned."""
    require_drafter_folder(out)
    saved = read(source, model, overrides, is_measured, report)
    ids, facts = saved.draft_token_ids, saved.provenance
    dtype = exact_dtype(saved.state)
    return save_drafter(out, saved.state, saved.name, saved.config, facts, ids, dtype=dtype)


def read(
    source: str,
    model: str | target.Source | None,
    overrides: Overrides = Overrides(),
    is_measured: bool = True,
    report: Report = SILENT,
) -> SavedDrafter:
    """Returns the drafter in `source`, a folder, GGUF file or hub id, as one of ours.

    Says what was read, what is doubtful, and the length that a chain of its guesses has on answers
    of the target, which only that loads as a whole. Where that is poor, says that of other
    readings. Raises UserError if the drafter does not fit the target, and UnsupportedModelError,
    with its name, for what is not known.
    """
    theirs = target.resolve(source, report)
    ours = model if isinstance(model, target.Source) else target.resolve(model, report)
    folder = (
        gguf_files.open_file(theirs.path / theirs.gguf_file)
        if theirs.gguf_file
        else open_folder(target.local_folder(theirs))
    )
    form: Any = next((each for each in FORMATS if each.matches(folder)), None)
    if form is None:
        raise UnsupportedModelError(
            f"got {source} without the tensors of a drafter that can be imported, expected those "
            f"of {', '.join(each.SHOWS for each in FORMATS)}"
        )
    outline, weights, tokenizer = target.open_weights(ours)  # its tables are read when needed
    length = min(outline.config.max_position_embeddings, MAX_MEASURED)
    backbone = Backbone.deferred(outline.config, weights, max_length=length)
    try:
        found: Reading = form.read(folder, backbone, overrides.given())
    except RuntimeError as error:  # torch joins no tensors of different widths
        raise UserError(f"{source}: got tensors that do not fit: {brief(error)}") from error
    found.require_tokenizer(tokenizer)
    found.source = source
    found.config |= folder.search()
    prints = target.fingerprint(ours)
    if folder.is_whole_model and target.fingerprint(theirs) != prints:
        found.doubts.append(
            f"the layers in {source} were trained with its heads, and the target is another "
            f"model: --target {source}"
        )
    report.line(f"{theirs.name}: {found.format}'s {found.name}; {'; '.join(found.said)}")
    for doubt in found.doubts:
        report.warning(f"doubt: {doubt}")
    about: dict[str, Any] = {"format": found.format, "source": source, "files": folder.hashes()}
    about |= {"doubts": found.doubts}
    module, facts = _module(found, backbone), {}
    if is_measured:
        with report.status("loading the target"):
            hf_model, tokenizer = target.load(ours)
        answers = _answers(hf_model, tokenizer, report)
        about["chain_length"] = _measure(found, answers, hf_model, backbone, report)
        length = _accepted_length(module, answers, hf_model, module.config.top_k)
        facts["validation"] = {"accepted_length": length, "answers": len(answers)}
    provenance = collect_provenance(
        imported=about, target=ours.name, target_fingerprint=prints, **facts
    )
    ids = None if found.draft_token_ids is None else found.draft_token_ids.numpy()
    state = module.state_dict()
    if broken := non_finite(state):
        raise UserError(f"{source}: got NaN or infinity in {', '.join(broken)}, expected numbers")
    return SavedDrafter(found.name, asdict(module.config), state, ids, provenance, Path(source))


def _module(found: Reading, backbone: Backbone) -> Any:
    """Returns the drafter; raises UserError, with their names, if tensors do not fit."""
    definition = drafters.load(found.name)
    config = recipe.build_config(definition.Config, found.config, f"{found.source}'s config")
    try:
        module = definition.Drafter(config, target.ends(backbone), found.draft_token_ids)
    except UserError as error:
        raise type(error)(f"{found.source}: {error}") from error
    SavedDrafter(found.name, {}, dict(found.state), None, {}, Path(found.source)).load_into(module)
    return module.eval()


# ---- measuring ----


def _answers(hf_model: Any, tokenizer: Any, report: Report = SILENT) -> list[Batch]:
    """Returns the shipped prompts with the target's greedy answers, a batch each."""
    batches, prompts = [], reference.prompts()
    with report.progress("the target's answers") as advance:
        for i, text in enumerate(prompts):
            prompt = torch.tensor([reference.encode(tokenizer, text)])
            with torch.inference_mode():
                token_BT = hf_model.generate(
                    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ANSWER_TOKENS,
                    do_sample=False, pad_token_id=0,
                )  # fmt: skip
            is_answer_BT = torch.arange(token_BT.shape[1])[None] >= prompt.shape[1]
            length_B = torch.tensor([token_BT.shape[1]])
            batches.append(Batch(token_BT.clone(), is_answer_BT, None, length_B))
            advance(i + 1, len(prompts))
    return batches


def _measure(
    found: Reading, answers: list[Batch], hf_model: Any, backbone: Backbone, report: Report
) -> float:
    """Returns the accepted length of chains by this reading, and reports it; where it is poor, also
    that of other readings, and which is best."""
    length = _chain_length(found, answers, hf_model, backbone)
    report.line(f"accepted length of its chains on {len(answers)} answers: {length:.2f}")
    if length >= POOR:
        return length
    lengths = {"as read": length}
    if found.others:
        with report.progress("other readings") as advance:
            for i, (words, fields) in enumerate(found.others.items()):
                other = replace(found, config=found.config | fields)
                lengths[words] = _chain_length(other, answers, hf_model, backbone)
                advance(i + 1, len(found.others), f"{words}: {lengths[words]:.2f}")
        rows = [(words, f"{each:.2f}") for words, each in lengths.items()]
        report.table(("reading", "accepted length"), rows)
    best = max(lengths, key=lambda words: lengths[words])
    if best == "as read":
        report.warning("no other reading is better: was it trained for this target?")
    else:
        report.warning(f"the best reading is another one: import it again with {best}")
    return length


def _chain_length(found: Reading, answers: list[Batch], hf_model: Any, backbone: Backbone) -> float:
    return _accepted_length(_module(found, backbone), answers, hf_model, 1)


def _accepted_length(module: Any, answers: list[Batch], hf_model: Any, top_k: int) -> float:
    """Returns the accepted length of trees from the best `top_k` guesses, as training simulates
    it."""

    def guesses(batch: Batch) -> tuple[Any, Any, None]:
        with torch.inference_mode():
            states = features_and_taps(hf_model.model, batch.token_BT, module.config.taps)
            tapped = replace(batch, feature_BTF=torch.cat(states, -1))
            return (*module.guesses(tapped, top_k), None)

    return validate(answers, guesses).accepted_length
