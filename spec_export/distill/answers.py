"""Self-distillation: let the target answer prompts, and keep the answers to train drafters on.

Prompts come from a file or from the target itself, sampled behind the chat template's user prefix.
Rows `{"prompt": ids, "response": ids}` (as `data.read` takes them) are appended batch by batch; a
sidecar remembers the last whole batch, so that an interrupted run goes on where it was and ends
with the same file. This file does not know how tokens are made: see distill_engines.
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
    Engine,
    GenerationParams,
    choose,
    open_engine,
)
from spec_export.training import data
from spec_export.training.checkpoint import collect_provenance

# How prompts are sampled: the target's own distribution, without its improbable tail.
PROMPT_TEMPERATURE = 1.0
PROMPT_TOP_K = 100
# A target that ends no prompt in so many batches in a row will not begin to.
MAX_EMPTY_BATCHES = 20


class DistillError(ValueError):
    """Prompts, settings or files that cannot be used."""


@dataclass(frozen=True)
class DistillConfig:
    """One distillation run.

    Attributes:
        model: as `target.resolve` takes it; None = the demo.
        out: the JSON Lines file to write; its sidecar is `<out>.state.json`.
        prompts: JSON Lines of {"prompt": text or ids} with an optional "source"; None = the target
            samples its own.
        num_prompts: rows to write; None = the whole file, or 1000 sampled ones.
        max_new_tokens: longest answer, end token included.
        max_prompt_tokens: longest sampled prompt; those not ended by then are left out.
        temperature: of the answers; 0 = greedy.
        batch_size: prompts handed to the engine at once; it sets how much an interruption loses.
        resume: go on with `out` where it exists; otherwise that is an error.
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
    """Rows and answer tokens in the file; tokens and seconds of this run alone."""

    out: Path
    engine: str
    rows: int
    answer_tokens: int
    new_tokens: int
    seconds: float


@dataclass(frozen=True)
class _Prompt:
    ids: list[int]
    source: str | None = None


@dataclass(frozen=True)
class _State:
    """The sidecar: what `out` holds after its last whole batch, and after the last row.

    A batch of which only some rows were wanted is not whole: asking for more rows redoes it.
    """

    settings: dict[str, Any]
    provenance: dict[str, Any]
    next_batch: int = 0
    rows: int = 0
    answer_tokens: int = 0
    size: int = 0
    finished: dict[str, int] | None = None


def run(config: DistillConfig, console: Console | None = None) -> DistillResult:
    """Write `config.out`; see the module docstring. ValueError where anything given is unusable."""
    console = console or Console(stderr=True)
    source = target.resolve(config.model)
    tokenizer = load_tokenizer(source)
    given = None if config.prompts is None else _read_prompts(config.prompts, tokenizer)
    goal = config.num_prompts or (1000 if given is None else len(given))
    if given is not None and goal > len(given):
        raise DistillError(f"num_prompts is {goal}, {config.prompts} holds {len(given)}")
    engine_name = choose(config.engine, source)
    state = _open_state(config, _settings(config, source, engine_name))

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
    _write_state(config.out, state)  # first, so that there is never a file without it
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
            _write_state(config.out, state)
            advance(rows, num_new)
    seconds = time.perf_counter() - start
    return DistillResult(config.out, engine.name, rows, answer_tokens, num_new, seconds)


def load_tokenizer(source: target.Source) -> Any:
    """The target's transformers tokenizer without the model: engines load that themselves."""
    from transformers import AutoTokenizer

    extra = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    try:
        return AutoTokenizer.from_pretrained(str(source.path), **extra)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DistillError(f"could not load the tokenizer of {source.path}: {reason}") from error


class _Distiller:
    """Prompts and answers of one batch after another; a batch depends on its number alone."""

    def __init__(
        self,
        config: DistillConfig,
        engine: Engine,
        tokenizer: Any,
        source: target.Source,
        given: list[_Prompt] | None,
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
        """The first `limit` rows of batch `number`, and whether that is all of them."""
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

    def _sampled(self, number: int) -> list[_Prompt]:
        """User messages the target makes up: those it ends, without special tokens inside."""
        params = GenerationParams(
            max_new_tokens=self.config.max_prompt_tokens,
            temperature=PROMPT_TEMPERATURE,
            top_k=PROMPT_TOP_K,
            seed=_seed(self.config.seed, number, "prompts"),
            end_ids=self.end_ids,
        )
        drawn = self.engine.generate([self.prefix] * self.config.batch_size, params)
        return [
            _Prompt(ids[:-1])
            for ids in drawn
            if len(ids) > 1 and ids[-1] in self.end_ids and not self.special_ids & set(ids[:-1])
        ]


def _read_prompts(path: Path, tokenizer: Any) -> list[_Prompt]:
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
        prompts.append(_Prompt(prompt, row.get("source")))
    if not prompts:
        raise DistillError(f"{path} holds no prompts")
    return prompts


def _end_ids(source: target.Source, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end an answer: the tokenizer's, then those of the checkpoint's generation config."""
    from transformers import GenerationConfig

    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if not source.gguf_file:
        try:
            more = GenerationConfig.from_pretrained(str(source.path)).eos_token_id
        except OSError:  # a checkpoint need not have one
            more = None
        ids += more if isinstance(more, list) else [] if more is None else [more]
    if not ids:
        raise DistillError(f"{source.name} has no end-of-text token, expected one")
    return tuple(dict.fromkeys(ids))


def _seed(seed: int, batch: int, purpose: str) -> int:
    """A seed for one batch, 31 bits: nothing carries over from the batch before."""
    digest = hashlib.blake2b(f"{seed} {batch} {purpose}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


# ---- the sidecar ----


def _settings(config: DistillConfig, source: target.Source, engine: str) -> dict[str, Any]:
    """What must not change between the parts of one file."""
    settings = asdict(config)
    for name in ("out", "num_prompts", "resume", "model"):
        del settings[name]
    settings |= {"target": source.name, "engine": engine, "prompts": None}
    if config.prompts is not None:
        settings["prompts"] = hashlib.sha256(config.prompts.read_bytes()).hexdigest()
    return settings


def _state_path(out: Path) -> Path:
    return out.with_name(out.name + ".state.json")


def _open_state(config: DistillConfig, settings: dict[str, Any]) -> _State:
    path = _state_path(config.out)
    if not config.out.exists():
        return _State(settings, collect_provenance())
    if not config.resume:
        raise DistillError(f"{config.out} exists: resume it, remove it or choose another file")
    try:
        state = _State(**json.loads(path.read_text(encoding="utf-8")))
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


def _write_state(out: Path, state: _State) -> None:
    path = _state_path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def _truncate(path: Path, size: int) -> None:
    """Drop what lies behind the last whole batch: rows of an interrupted one, half a line."""
    with open(path, "ab") as file:
        file.truncate(size)


@contextmanager
def _progress(console: Console, goal: int, rows: int) -> Iterator[Any]:
    """A bar over rows with answer tokens a second; yields `advance(rows, new_tokens)`."""
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
