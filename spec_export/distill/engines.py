"""Generates the target's answers with transformers or OpenVINO GenAI, behind one method.

Each engine is a thin adapter over a library's own batching, from token ids to token ids.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from spec_export.distill.config import is_installed
from spec_export.model import annex
from spec_export.model.target import Source
from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief

# The file type that a GGUF header names, by the type of its matrices.
_GGUF_FILES = {"F32": 0, "F16": 1, "Q8_0": 7}


@dataclass(frozen=True)
class GenerationParams:
    """The way to continue a batch of prompts.

    `temperature` is one for all prompts, or one for each. `top_k` 0 means all tokens; `seed`
    matters only if temperature > 0.
    """

    max_new_tokens: int
    temperature: float | tuple[float, ...]
    top_k: int
    seed: int
    end_ids: tuple[int, ...]

    def temperature_of(self, row: int) -> float:
        """Returns the temperature of one prompt of the batch."""
        return self.temperature[row] if isinstance(self.temperature, tuple) else self.temperature


class OnTokens(Protocol):
    """Hears of a batch while it is generated: how many of its answers have ended, and how many new
    tokens it has."""

    def __call__(self, num_ended: int, num_tokens: int) -> None: ...


def unheard(num_ended: int, num_tokens: int) -> None:
    """Does nothing: the `OnTokens` of a batch that nobody waits for."""


class AnswerEngine(Protocol):
    """A loaded target that answers prompts; the caller sees to it that they fit the context."""

    name: str

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: GenerationParams,
        on_tokens: OnTokens = unheard,
    ) -> list[list[int]]:
        """Returns the new tokens of each prompt, up to and with the first end id.

        The same batch and seed give the same tokens. `on_tokens` is called now and then, perhaps
        never.
        """
        ...


def choose(name: str, source: Source) -> str:
    """Returns `name`, or the engine that "auto" means on this machine.

    That is OpenVINO on a CPU, as far as it is installed and reads the target, else transformers.
    """
    if name != "auto":
        return name
    import torch

    is_known = source.adapter is None and source.gguf_file
    on_cpu = not torch.cuda.is_available()
    return "openvino" if on_cpu and is_known and is_installed() else "transformers"


def open_engine(name: str, source: Source, precision: str, batch_size: int) -> AnswerEngine:
    """Loads the target in the engine called `name`, openvino (installed) or transformers.

    Raises UserError if the engine cannot run the target.
    """
    if name == "openvino":
        return OpenVINOEngine(source, precision, batch_size)
    return TransformersEngine(source, precision)


class TransformersEngine:
    """Hugging Face generate on a left-padded batch: slow on a CPU, but it runs every target."""

    name = "transformers"

    def __init__(self, source: Source, precision: str) -> None:
        import torch
        import transformers

        from spec_export.model import target

        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        self.model, self.tokenizer = target.load(source, dtype)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model.to(self.device)
        # The checkpoint's own top-p or penalties must not change the target's distribution.
        self.model.generation_config = transformers.GenerationConfig()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: GenerationParams,
        on_tokens: OnTokens = unheard,
    ) -> list[list[int]]:
        """Returns the new tokens; prompts of one temperature are generated together."""
        rows_of: dict[float, list[int]] = {}
        for row in range(len(prompts)):
            rows_of.setdefault(params.temperature_of(row), []).append(row)
        answers: dict[int, list[int]] = {}
        for temperature, rows in rows_of.items():
            alike = replace(params, temperature=temperature)
            counted = _Counter(params.end_ids, len(rows), on_tokens, list(answers.values()))
            made = self._together([prompts[r] for r in rows], alike, counted)
            answers |= zip(rows, made, strict=True)
        return [answers[row] for row in range(len(prompts))]

    def _together(
        self, prompts: Sequence[Sequence[int]], params: GenerationParams, counted: "_Counter"
    ) -> list[list[int]]:
        """Returns the new tokens of prompts that have one temperature."""
        import torch
        import transformers

        temperature = params.temperature_of(0)
        width = max(len(prompt) for prompt in prompts)
        ids_BT = np.full((len(prompts), width), params.end_ids[0], dtype=np.int64)
        mask_BT = np.zeros_like(ids_BT)
        for row, prompt in enumerate(prompts):
            ids_BT[row, width - len(prompt) :] = prompt
            mask_BT[row, width - len(prompt) :] = 1
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {
                "do_sample": True,
                "temperature": temperature,
                "top_k": params.top_k,
                "top_p": 1.0,
            }
        config = transformers.GenerationConfig(
            max_new_tokens=params.max_new_tokens,
            eos_token_id=list(params.end_ids),
            pad_token_id=params.end_ids[0],
            **sampling,
        )
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.inference_mode():
            torch.manual_seed(params.seed)
            out_BT = self.model.generate(
                input_ids=torch.from_numpy(ids_BT).to(self.device),
                attention_mask=torch.from_numpy(mask_BT).to(self.device),
                generation_config=config,
                stopping_criteria=transformers.StoppingCriteriaList([counted]),
            )
        return [until_end(row, params.end_ids) for row in out_BT[:, width:].tolist()]


class _Counter:
    """Counts the tokens of a batch: transformers calls it after each step, as a reason to stop.

    `before` are the answers of the batch that are there already.
    """

    def __init__(
        self,
        end_ids: Sequence[int],
        num_rows: int,
        on_tokens: OnTokens,
        before: Sequence[Sequence[int]],
    ) -> None:
        self._end_ids, self._on_tokens = end_ids, on_tokens
        self._num_before, self._num_tokens = len(before), sum(map(len, before))
        self._has_ended_B = np.zeros(num_rows, bool)

    def __call__(self, ids_BT: Any, scores: Any, **more: Any) -> Any:
        self._num_tokens += int(np.sum(~self._has_ended_B))
        self._has_ended_B |= np.isin(ids_BT[:, -1].cpu().numpy(), self._end_ids)
        self._on_tokens(self._num_before + int(self._has_ended_B.sum()), self._num_tokens)
        return ids_BT.new_zeros(len(ids_BT), dtype=bool)


class OpenVINOEngine:
    """OpenVINO GenAI's continuous batching, on the CPU.

    It reads a GGUF file.
    """

    name = "openvino"

    def __init__(self, source: Source, precision: str, batch_size: int) -> None:
        import openvino_genai

        from spec_runtime.files.machine import default_threads

        kind = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}[precision]
        properties = {
            "INFERENCE_PRECISION_HINT": kind,
            # The defaults quantise the cache and the activations to 8 bits, which changes the
            # distribution.
            "KV_CACHE_PRECISION": kind,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
            "INFERENCE_NUM_THREADS": default_threads(),
        }
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = batch_size

        if source.adapter is not None or not source.gguf_file:
            raise UserError(
                f"got {source.name}, expected a GGUF file: choose engine transformers, or --server"
            )
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            copy = Path(folder) / "target.gguf"
            # OpenVINO's reader rounds the offsets of 4-bit blocks to integers, which changes every
            # greedy answer of the demo; float16 keeps 11 bits of a weight
            write_gguf(source.path / source.gguf_file, copy, "F16")
            try:
                self.pipeline = openvino_genai.ContinuousBatchingPipeline(
                    str(copy), scheduler, "CPU", properties
                )
            except RuntimeError as error:
                raise UserError(f"OpenVINO cannot load {source.name}: {brief(error)}") from error

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: GenerationParams,
        on_tokens: OnTokens = unheard,
    ) -> list[list[int]]:
        import openvino  # type: ignore[import-not-found]
        import openvino_genai

        configs = []
        for row in range(len(prompts)):
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = params.max_new_tokens
            config.stop_token_ids = set(params.end_ids)
            temperature = params.temperature_of(row)
            config.do_sample = temperature > 0
            if temperature > 0:
                config.temperature = temperature
                # Every request has its own generator: one seed for all gives equal answers.
                config.rng_seed = params.seed + row
                if params.top_k:
                    config.top_k = params.top_k
            configs.append(config)
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        handles = [
            self.pipeline.add_request(row, *given)
            for row, given in enumerate(zip(tensors, configs, strict=True))
        ]
        answers: list[list[int]] = [[] for _ in prompts]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            for answer, handle in zip(answers, handles, strict=True):
                while handle.can_read():
                    answer += (part for out in handle.read().values() for part in out.generated_ids)
            num_ended = sum(handle.get_status().name != "RUNNING" for handle in handles)
            on_tokens(num_ended, sum(map(len, answers)))
        return [until_end(answer, params.end_ids) for answer in answers]


def write_gguf(source: Path, destination: Path, kind: str) -> None:
    """Copies a GGUF file with its matrices as `kind`, F32, F16 or Q8_0, and its vectors as float32.

    Raises UserError if the file cannot be read or a weight is not finite as `kind`.
    """
    import gguf

    if len(annex.gguf_header.parts(source)) > 1:
        raise UserError(f"got {source}, a part of a split file: choose engine transformers")
    try:
        annex.gguf_header.read(source)
        reader = gguf.GGUFReader(source)
        architecture = reader.fields["general.architecture"].contents()
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"cannot read {source}: {error}, expected a GGUF file") from error
    writer = gguf.GGUFWriter(destination, architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        item_type = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(key, field.contents(), field.types[0], item_type)
    writer.add_file_type(_GGUF_FILES[kind])
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        kept_as = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        packed = gguf.quantize(values, kept_as)
        if kind == "F16" and not np.isfinite(packed).all():
            raise UserError(f"{tensor.name} exceeds float16, choose engine transformers")
        writer.add_tensor(tensor.name, packed, raw_dtype=kept_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def until_end(ids: list[int], end_ids: Sequence[int]) -> list[int]:
    """Returns the ids up to and with the first end id."""
    for position, token in enumerate(ids):
        if token in end_ids:
            return ids[: position + 1]
    return ids
