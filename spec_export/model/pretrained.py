"""Loads configs, tokenizers and models with transformers, from the files of people we do not know.

transformers raises nearly anything on damaged files, fills tensors that a checkpoint lacks with
random numbers, and asks on standard input whether to run code that lies in a model's folder. Here,
whatever is wrong with the files is a UserError of one line, every tensor is accounted for, and no
such code is ever run.
"""

import logging
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from spec_export.model import annex, checkpoint, decoder, foreign_json, named_templates
from spec_export.model.checkpoint import ModelTensors, SafetensorsFiles, Sound, require_none
from spec_export.model.families import EXPERTS, FAMILIES, wrappers
from spec_export.model.files import require_tokenizer, require_whole, weight_files
from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief

ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")  # the first that is there
# Arguments that every call of `from_pretrained` has to be given.
OPTIONS: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
MIN_BITS = 1.5  # of a weight in the densest form that there is


def read_config(folder: Path, gguf_file: str | None, has_weights: bool = True) -> Any:
    """Returns the transformers config of a model of a supported family.

    Weights are not read. Raises UserError if the files are damaged, or the model is not supported
    or needs code of its own, and if weights that it should have are not there.
    """
    from transformers import AutoConfig

    fields, form = None, None
    if gguf_file:
        header = annex.gguf_header.read(folder / gguf_file)
        fields = annex.gguf_config.config_fields(header)
        annex.gguf_weights.require_readable(header)
    else:
        form = annex.quantised.find(require_whole(folder, has_weights), folder)
    with _reading(folder / (gguf_file or "config.json")):
        config: Any = (
            AutoConfig.for_model(**fields)
            if fields
            else AutoConfig.from_pretrained(str(folder), **OPTIONS)
        )
    config = wrappers.text_config(config)
    for field in foreign_json.QUANTISATIONS if form else ():
        if hasattr(config, field):
            delattr(config, field)  # by which transformers would ask for another library
    decoder.require_supported(config)
    if has_weights:
        _require_weights_for(config, weight_files(folder, gguf_file))
    return config


def read_tokenizer(folder: Path, gguf_file: str | None) -> Any:
    """Returns a transformers tokenizer that encodes by the folder's own tokenizer.json.

    That of a GGUF file is built from the file's metadata. Only of a folder that has neither is it
    made by transformers. Raises UserError if the files are damaged or say too little.
    """
    from transformers import AutoTokenizer

    if gguf_file:
        return _read_gguf_tokenizer(folder / gguf_file)
    if (folder / annex.lora.CONFIG).is_file():
        require_tokenizer(folder)
    else:
        require_whole(folder, has_weights=False)
    with _reading(folder, "the tokenizer of "):
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), **OPTIONS)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = named_templates.joined(template)
    if template is not None and not isinstance(template, str):
        got = type(template).__name__
        raise UserError(f"{folder}: got a chat template that is {got}, expected a text")
    own = tokenizer_file(folder)
    if own is None:
        tokenizer.chat_template = template
        return tokenizer
    with _reading(folder, "the tokenizer of "):
        encoder = tokenizers.Tokenizer.from_file(str(own))
    names = tokenizer.special_tokens_map
    wrapped = _wrapped(encoder, names, tokenizer.all_special_tokens, template)
    wrapped.response_template = getattr(tokenizer, "response_template", None)
    return wrapped


def tokenizer_file(folder: Path) -> Path | None:
    """Returns the folder's tokenizer.json, None if it has none."""
    path = folder / "tokenizer.json"
    return path if path.is_file() else None


def _read_gguf_tokenizer(path: Path) -> Any:
    vocabulary = annex.gguf_vocabulary.read(path)
    with _reading(path, "the tokenizer of "):
        encoder = annex.gguf_tokenizer.build(vocabulary)
    annex.gguf_tokenizer.require_own_tokens(vocabulary, encoder, path)
    ids = {
        "bos_token": vocabulary.bos,
        "eos_token": vocabulary.ends[0],
        "unk_token": vocabulary.unk,
        "pad_token": vocabulary.pad,
    }
    names = {name: vocabulary.tokens[i] for name, i in ids.items() if i is not None}
    return _wrapped(encoder, names, (), vocabulary.template)


def _wrapped(
    encoder: tokenizers.Tokenizer,
    names: Mapping[str, Any],
    special: Iterable[str],
    template: str | None,
) -> Any:
    """Returns a transformers tokenizer that encodes by `encoder`, just as it is.

    names: special tokens by their names, such as "eos_token". special: more of them. Those that the
    encoder does not have are left out: transformers would add them.
    """
    from transformers import PreTrainedTokenizerFast

    found = {
        name: text
        for name, text in names.items()
        if isinstance(text, str) and encoder.token_to_id(text) is not None
    }
    more = [text for text in special if encoder.token_to_id(text) is not None]
    more = [text for text in more if text not in found.values()]
    wrapped: Any = PreTrainedTokenizerFast(
        tokenizer_object=encoder, extra_special_tokens=more, chat_template=template, **found
    )
    wrapped._tokenizer = encoder  # transformers has changed the steps and tokens of its copy
    return wrapped


def read_generation_config(folder: Path, gguf_file: str | None) -> Any | None:
    """Returns transformers' generation config, None if the folder has none.

    That of a GGUF file has all ids that end an answer. Raises UserError if it is damaged.
    """
    from transformers import GenerationConfig

    if gguf_file:
        said = annex.gguf_vocabulary.read(folder / gguf_file)
        return GenerationConfig(
            bos_token_id=said.bos, eos_token_id=list(said.ends), pad_token_id=said.pad
        )
    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    foreign_json.read(path, foreign_json.GENERATION)
    with _reading(path):
        return GenerationConfig.from_pretrained(str(folder))


def open_model(
    folder: Path, gguf_file: str | None, config: Any, adapter: Any | None = None
) -> tuple[Any, Sound]:
    """Returns the transformers causal LM without its numbers, and its tensors by name, each read
    when it is asked for; a tied head has no tensor of its own.

    `config` is what `read_config` returned. adapter: is merged with the tensors. Raises UserError,
    with the tensors' names, if any is missing or unexpected, and if a file is damaged or holds a
    pickle that would run code. A tensor of another shape, or not finite, is found when it is read.
    """
    generation_config = read_generation_config(folder, gguf_file)
    where = folder / (gguf_file or "")
    # It warns of faults that are checked here, or of what was asked for.
    for name in ("modeling_utils", "activations"):
        logging.getLogger(f"transformers.{name}").addFilter(_is_error)
    with _reading(folder / (gguf_file or "config.json")):
        model = checkpoint.outline(config)
    if generation_config is not None:
        model.generation_config = generation_config
    tensors, unexpected = _tensors(folder, gguf_file, model)
    if adapter is not None:
        merged = annex.lora.Merged(tensors, adapter)
        what = "unknown to its base model"
        require_none(adapter.folder, "the adapter changes", what, merged.unexpected)
        tensors = merged
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, first in checkpoint.first_names(model).items():
        if name == first:
            continue
        # A file may hold a tied tensor twice; where the two differ, they are not tied.
        if name not in tensors or torch.equal(tensors[name], tensors[first]):
            del shapes[name]
    missing = shapes.keys() - tensors.keys()
    require_none(where, "the config asks for", "missing in the weights", missing)
    require_none(where, "the weights hold", "unknown to the config", unexpected)
    return model, Sound(tensors, shapes, where)


def _tensors(
    folder: Path, gguf_file: str | None, model: Any
) -> tuple[Mapping[str, Tensor], Collection[str]]:
    """Returns the files' tensors by name, and the names of those that the model does not have."""
    where = folder / (gguf_file or "")
    if gguf_file:
        header = annex.gguf_header.read(where)
        with _reading(where):
            gguf = annex.gguf_weights.GGUFWeights(
                header, annex.gguf_config.architecture(header), model
            )
        return gguf, gguf.unread
    stored: Mapping[str, Tensor] | None = quantised_weights(folder, gguf_file)
    with _reading(folder):
        made = ModelTensors(
            _stored(weight_files(folder, None)) if stored is None else stored, model
        )
    return made, made.unexpected


def read_tensors(files: list[Path], prefix: str = "") -> dict[str, Tensor]:
    """Returns the tensors of a drafter's files, all in memory; where names begin with `prefix` only
    those, without it.

    Raises UserError if the files are damaged or hold more than tensors.
    """
    with _reading(files[0]):
        stored = _stored(files)
        chosen = [name for name in stored if name.startswith(prefix)]
        if not chosen:
            return dict(stored)
        return {name.removeprefix(prefix): stored[name] for name in chosen}


def adapter_files(folder: Path) -> list[Path]:
    """Returns the file that holds an adapter's tensors; raises UserError if there is none."""
    files = [folder / name for name in ADAPTERS if (folder / name).is_file()]
    if not files:
        raise UserError(
            f"got the adapter {folder} without weights, expected {' or '.join(ADAPTERS)} in it"
        )
    return files[:1]


def read_adapter(folder: Path) -> Any:
    """Returns an adapter, whose tensors are read when they are needed.

    Raises UserError if it is damaged or of a kind that is not supported.
    """
    config = annex.lora.read_config(folder)
    with _reading(folder):
        stored = _stored(adapter_files(folder))
    return annex.lora.Adapter(folder, config, stored)


def _stored(files: list[Path]) -> Mapping[str, Tensor]:
    """Returns the tensors that a folder's files hold."""
    if files[0].suffix == ".safetensors":
        return SafetensorsFiles(files)
    return checkpoint.read_pickled(files)


def read_model(
    folder: Path,
    gguf_file: str | None,
    config: Any,
    adapter: Any | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Returns the transformers causal LM with its weights in `dtype`.

    See `open_model`. GGUF weights are dequantised. Raises UserError, with the tensors' names, also
    if any is of another shape or not finite.
    """
    outline, tensors = open_model(folder, gguf_file, config, adapter)
    whole = tensors.whole(dtype)
    with _reading(folder / (gguf_file or "")), _without_bars():
        model = type(outline).from_pretrained(
            None, config=config, state_dict=whole, dtype=dtype, **OPTIONS
        )
    model.generation_config = outline.generation_config
    return model


def quantised_weights(folder: Path, gguf_file: str | None) -> Any | None:
    """Returns the tensors of a folder with quantised matrices, None for any other.

    Raises UserError if they are damaged or in a form that cannot be read.
    """
    if gguf_file:
        return None
    config = foreign_json.read(folder / "config.json", foreign_json.CONFIG)
    form = annex.quantised.find(config, folder)
    if form is None:
        return None
    files = weight_files(folder, None)
    if files[0].suffix != ".safetensors":
        raise UserError(
            f"got quantised weights in {files[0]}, expected safetensors: pickles of them are not "
            "read"
        )
    with _reading(folder):
        stored = SafetensorsFiles(files)
    return annex.quantised.QuantisedWeights(stored, *form, folder)


# ---- checks ----


def _require_weights_for(config: Any, files: list[Path]) -> None:
    """Raises UserError if the config describes far more weights than the files can hold.

    transformers would make the rest up, which may take more memory than there is.
    """
    family, D = FAMILIES[config.model_type], config.hidden_size
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or D // heads
    products = (2 if family.mlp == "plain" else 3) * getattr(config, family.width)
    least = (config.vocab_size + config.num_hidden_layers * products) * D
    for kind in family.layers(config):
        least += D * (2 * heads * head_dim if kind.mixer == "attention" else D)
        if kind.mlp == "experts":  # rows of a router
            least += D * next(filter(None, (getattr(config, name, None) for name in EXPERTS)))
    size = sum(file.stat().st_size for file in files)
    if least * MIN_BITS > size * 8:
        raise UserError(
            f"the config of {files[0].parent} describes {least:.2g} weights or more, the weights' "
            f"files hold {size:.2g} bytes: they are not of one model, or incomplete"
        )


# ---- transformers ----


def _is_error(record: logging.LogRecord) -> bool:
    # a filter, because transformers prints more where a logger's level is set
    return record.levelno >= logging.ERROR


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keeps the library from drawing bars of its own: a log file would get each state of them, and
    a terminal shows them torn, between what a command draws itself."""
    from transformers.utils import logging as library

    were_shown = library.is_progress_bar_enabled()
    library.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            library.enable_progress_bar()


@contextmanager
def _reading(path: Path, what: str = "") -> Iterator[None]:
    """Turns what the library raises in the block into a UserError that names `path`.

    Nothing but one call of the library belongs into the block.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        raise UserError(
            f"could not load {what}{path}: a .bin file of it is damaged or holds more than "
            "tensors, which could run code; convert it to safetensors where you trust it"
        ) from error
    except BaseException as error:
        # transformers does not say what it raises, and a panic of tokenizers is a BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = brief(error)
        raise UserError(
            f"could not load {what}{path} (check the files): {type(error).__name__}: {reason}"
        ) from error
