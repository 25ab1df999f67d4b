"""Lets the target answer prompts and writes the answers down, to train drafters on them.

Prompts come from a file, or from the target itself, which samples them behind the chat template's
user prefix. Rows {"prompt": ids, "response": ids}, as `data.read` takes them, are appended batch by
batch. A second file beside them, the sidecar, records the last whole batch, so that an interrupted
run goes on where it was and ends with the same file. The engines in engines.py generate the tokens.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from spec_export import target
from spec_export.distill.engines import (
    ENGINES,
    PRECISIONS,
    AnswerEngine,
    GenerationParams,
    choose,
    open_engine,
)
from spec_export.training import data
from spec_export.training.checkpoint import collect_provenance
from spec_runtime.files import sha256, write_atomically

# Prompts are sampled from the target's own distribution, without its improbable tail.
PROMPT_TEMPERATURE = 1.0
PROMPT_TOP_K = 100
# A target that has ended no prompt in so many batches in a row is given up.
MAX_EMPTY_BATCHES = 20


class DistillError(ValueError):
    """Prompts, settings or files that cannot be used."""


@dataclass(frozen=True)
class DistillConfig:
    """The settings of one distillation run.

    Attributes:
        model: the target as `target.resolve` takes it; None means the demo.
        out: the JSON Lines file to write; its sidecar is `<out>.state.json`.
        prompts: JSON Lines of {"prompt": text or ids} with an optional "source"; None lets the
            target sample its own.
        num_prompts: rows to write; None means the whole prompts file, or 1000 sampled ones.
        max_new_tokens: tokens of the longest answer, end token included.
        max_prompt_tokens: tokens of the longest sampled prompt; longer ones are left out.
        temperature: the answers' sampling temperature; 0 is greedy.
        batch_size: prompts that the engine gets at once; an interruption loses at most these.
        resume: go on with `out` if it exists already; without it that is an error.
    """

    model: str | None
    out: Path
    prompts: Path | None = None
    num_prompts: int | None = None
    max_new_tokens: int = 256
    max_prompt_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    batch_size: int = 64
    engine: str = "auto"
    precision: str = "fp32"
    resume: bool = True

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_new_tokens", "max_prompt_tokens", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DistillError(f"{name} is {value}, expected at least 1")
        if self.temperature < 0:
            raise DistillError(f"temperature is {self.temperature}, expected 0 (greedy) or more")
        if self.engine not in ENGINES:
            raise DistillError(f"engine is {self.engine!r}, expected one of {', '.join(ENGINES)}")
        if self.precision not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise DistillError(f"precision is {self.precision!r}, expected one of {known}")


@dataclass(frozen=True)
class DistillResult:
    """Rows and answer tokens in the whole file; new tokens and seconds of this run alone."""

    out: Path
    engine: str
    rows: int
    answer_tokens: int
    new_tokens: int
    seconds: float


@dataclass(frozen=True)
class _PromptIds:
    """A prompt's token ids, without the chat template's, and the source that its row named."""

    ids: list[int]
    source: str | None = None


@dataclass(frozen=True)
class _Sidecar:
    """The contents of `out` after its last whole batch, and (`finished`) after its last row.

    A batch of which only some rows were wanted is not whole: if more rows are asked for later, the
    batch is made again.
    """

    settings: dict[str, Any]
    provenance: dict[str, Any]
    next_batch: int = 0
    rows: int = 0
    answer_tokens: int = 0
    size: int = 0
    finished: dict[str, int] | None = None


def run(config: DistillConfig, console: Console | None = None) -> DistillResult:
    """Writes `config.out`, or the rest of it; see the module docstring.

    Raises ValueError if the target, the prompts, the settings or the files cannot be used.
    """
    console = console or Console(stderr=True)
    source = target.resolve(config.model)
    tokenizer = target.load_tokenizer(source)
    given = None if config.prompts is None else _read_prompts(config.prompts, tokenizer)
    goal = config.num_prompts or (1000 if given is None else len(given))
    if given is not None and goal > len(given):
        raise DistillError(f"num_prompts is {goal}, {config.prompts} holds {len(given)}")
    engine_name = choose(config.engine, source)
    state = _open_sidecar(config, _settings(config, source, engine_name))

    if state.finished is not None and state.finished["rows"] == goal:
        done = state.finished
        console.print(f"{config.out} is complete: {done['rows']} rows")
        return DistillResult(config.out, engine_name, goal, done["answer_tokens"], 0, 0.0)
    if state.rows > goal:
        raise DistillError(f"{config.out} holds {state.rows} rows already, expected fewer: {goal}")

    start = time.perf_counter()
    num_new = 0
    with console.status(f"loading {source.name} ({engine_name}, {config.precision})"):
        engine = open_engine(engine_name, source, config.precision, config.batch_size)
    distiller = _Distiller(config, engine, tokenizer, source, given)
    _write_sidecar(config.out, state)  # first, so that no file is ever without a sidecar
    _truncate(config.out, state.size)
    rows, answer_tokens, num_empty = state.rows, state.answer_tokens, 0
    with _progress(console, goal, rows) as advance, open(config.out, "ab") as file:
        while rows < goal:
            kept, whole = distiller.batch(state.next_batch, goal - rows)
            num_empty = 0 if kept else num_empty + 1
            if num_empty == MAX_EMPTY_BATCHES:
                raise DistillError(
                    f"the target ended no prompt within {config.max_prompt_tokens} tokens in "
                    f"{num_empty} batches: raise max_prompt_tokens, or give prompts"
                )
            file.write("".join(json.dumps(row) + "\n" for row in kept).encode())
            file.flush()
            os.fsync(file.fileno())
            tokens = sum(len(row["response"]) for row in kept)
            rows, answer_tokens = rows + len(kept), answer_tokens + tokens
            num_new += tokens
            if whole:
                state = replace(
                    state,
                    next_batch=state.next_batch + 1,
                    rows=rows,
                    answer_tokens=answer_tokens,
                    size=file.tell(),
                )
            finished = {"rows": rows, "answer_tokens": answer_tokens, "size": file.tell()}
            state = replace(state, finished=finished if rows == goal else None)
            _write_sidecar(config.out, state)
            advance(rows, num_new)
    seconds = time.perf_counter() - start
    return DistillResult(config.out, engine.name, rows, answer_tokens, num_new, seconds)


class _Distiller:
    """Makes the prompts and answers of a batch; a batch depends on its number alone."""

    def __init__(
        self,
        config: DistillConfig,
        engine: AnswerEngine,
        tokenizer: Any,
        source: target.Source,
        given: list[_PromptIds] | None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.given = given
        self.prefix, self.suffix = data.chat_affixes(tokenizer)
        self.end_ids = _end_ids(source, tokenizer)
        self.special_ids = set(tokenizer.all_special_ids) | set(self.end_ids)
        if given is None and not self.prefix:
            raise DistillError(
                f"{source.name} has no chat template to sample prompts behind, give a prompts file"
            )

    def batch(self, number: int, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """Returns the first `limit` rows of batch `number`, and whether these are all its rows."""
        if self.given is None:
            prompts = self._sampled(number)
        else:
            size = self.config.batch_size
            prompts = self.given[number * size : (number + 1) * size]
        whole = len(prompts) <= limit
        prompts = prompts[:limit]
        if not prompts:
            return [], whole
        inputs = [self.prefix + prompt.ids + self.suffix for prompt in prompts]
        context = self.engine.max_length
        longest = max(len(ids) for ids in inputs) + self.config.max_new_tokens
        if context is not None and longest > context:
            raise DistillError(
                f"a prompt with {self.config.max_new_tokens} new tokens takes {longest}, expected "
                f"at most {context}, the target's context: shorten it, or lower max_new_tokens"
            )
        answers = self.engine.generate(
            inputs,
            GenerationParams(
                max_new_tokens=self.config.max_new_tokens,
                temperature=self.config.temperature,
                top_k=0,
                seed=_seed(self.config.seed, number, "answers"),
                end_ids=self.end_ids,
            ),
        )
        rows = [
            {
                "prompt": prompt.ids,
                "response": answer,
                **({} if prompt.source is None else {"source": prompt.source}),
            }
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return rows, whole

    def _sampled(self, number: int) -> list[_PromptIds]:
        """Returns user messages that the target makes up.

        Messages that it does not end, or that have special tokens inside, are left out.
        """
        params = GenerationParams(
            max_new_tokens=self.config.max_prompt_tokens,
            temperature=PROMPT_TEMPERATURE,
            top_k=PROMPT_TOP_K,
            seed=_seed(self.config.seed, number, "prompts"),
            end_ids=self.end_ids,
        )
        drawn = self.engine.generate([self.prefix] * self.config.batch_size, params)
        return [
            _PromptIds(ids[:-1])
            for ids in drawn
            if len(ids) > 1 and ids[-1] in self.end_ids and not self.special_ids & set(ids[:-1])
        ]


def _read_prompts(path: Path, tokenizer: Any) -> list[_PromptIds]:
    """Returns a file's prompts, text tokenised; raises DistillError on a row without one."""
    prompts = []
    for where, row in data.read_rows(path):
        prompt = row.get("prompt")
        if isinstance(prompt, str):
            prompt = tokenizer.encode(prompt, add_special_tokens=False)
        valid = isinstance(prompt, list) and all(
            type(i) is int and 0 <= i < len(tokenizer) for i in prompt
        )
        if not prompt or not valid:
            raise DistillError(f'{where}: expected "prompt": a text or token ids, not empty')
        prompts.append(_PromptIds(prompt, row.get("source")))
    if not prompts:
        raise DistillError(f"{path} holds no prompts")
    return prompts


def _end_ids(source: target.Source, tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids that end an answer: the tokenizer's, then the generation config's."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    config = target.load_generation_config(source)
    more = None if config is None else config.eos_token_id
    ids += more if isinstance(more, list) else [] if more is None else [more]
    if not ids:
        raise DistillError(f"{source.name} has no end-of-text token, expected one")
    return tuple(dict.fromkeys(ids))


def _seed(seed: int, batch: int, purpose: str) -> int:
    """Returns a seed of 31 bits for one batch; nothing carries over from the batch before."""
    digest = hashlib.blake2b(f"{seed} {batch} {purpose}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


# ---- the sidecar ----


def _settings(config: DistillConfig, source: target.Source, engine: str) -> dict[str, Any]:
    """Returns the settings that must not change between the parts of one file."""
    settings = asdict(config)
    for name in ("out", "num_prompts", "resume", "model"):
        del settings[name]
    settings |= {"target": source.name, "engine": engine, "prompts": None}
    if config.prompts is not None:
        settings["prompts"] = sha256(config.prompts)
    return settings


def _sidecar_path(out: Path) -> Path:
    return out.with_name(out.name + ".state.json")


def _open_sidecar(config: DistillConfig, settings: dict[str, Any]) -> _Sidecar:
    """Returns the sidecar to go on from, a new one if there is no file yet.

    Raises DistillError if the file may not be resumed, was changed, or has other settings.
    """
    path = _sidecar_path(config.out)
    if not config.out.exists():
        return _Sidecar(settings, collect_provenance())
    if not config.resume:
        raise DistillError(f"{config.out} exists: resume it, remove it or choose another file")
    try:
        state = _Sidecar(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DistillError(
            f"cannot go on with {config.out}: no usable {path.name} ({error}), remove both"
        ) from error
    changed = [
        f"{name} was {state.settings.get(name)!r}, got {value!r}"
        for name, value in settings.items()
        if state.settings.get(name) != value
    ]
    if changed:
        raise DistillError(f"cannot go on with {config.out}: {'; '.join(changed)}")
    expected = (state.finished or {"size": state.size})["size"]
    if config.out.stat().st_size < expected:
        raise DistillError(
            f"{config.out} has {config.out.stat().st_size} bytes, expected {expected}: it was "
            "changed, remove it and its sidecar"
        )
    return state


def _write_sidecar(out: Path, state: _Sidecar) -> None:
    path = _sidecar_path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(state), indent=1) + "\n")


def _truncate(path: Path, size: int) -> None:
    """Cuts the file behind its last whole batch: removes rows of an interrupted batch."""
    with open(path, "ab") as file:
        file.truncate(size)


@contextmanager
def _progress(console: Console, goal: int, rows: int) -> Iterator[Any]:
    """Shows a bar over rows with answer tokens a second; yields `advance(rows, new_tokens)`."""
    columns = (
        TextColumn("distilling"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    start = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("distilling", total=goal, completed=rows, speed="")

        def advance(rows: int, new_tokens: int) -> None:
            rate = new_tokens / max(time.perf_counter() - start, 1e-9)
            progress.update(task, completed=rows, speed=f"{rate:.0f} tokens/s")

        yield advance
