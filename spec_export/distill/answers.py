"""Lets the target answer prompts and writes the answers down, to train drafters on them.

Prompts come from a file, or from the target itself, which samples them after the chat template's
user prefix. Rows {"prompt": ids, "response": ids}, or {"turns": […]} with several such pairs, as
`data.read` takes them, are appended batch by batch. A second file, the sidecar, records
the last whole batch. An interrupted run therefore goes on where it was and writes the same file.
conversations.py makes the rows of a batch; the engines in engines.py generate the tokens.
"""

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from spec_export.distill import needs, prompts
from spec_export.distill.config import DistillConfig
from spec_export.distill.conversations import Distiller, PromptIds, num_answer_tokens
from spec_export.distill.engines import AnswerEngine, choose, open_engine
from spec_export.distill.prompts import PromptRow
from spec_export.distill.server import ServerEngine
from spec_export.model import target
from spec_export.report import SILENT, Advance, Report
from spec_export.training import data, disk
from spec_export.training.checkpoint import collect_provenance
from spec_runtime.errors import UserError
from spec_runtime.files.mapping import from_mapping, parse_json
from spec_runtime.files.writing import locked, replacing, sha256, write_atomically

# A target that has ended no prompt in this many batches in a row is given up.
MAX_EMPTY_BATCHES = 20
FIRST_STEPS = 16  # of a run, before its speed tells the end: the first one reads the prompts


@dataclass(frozen=True)
class DistillResult:
    """Rows and answer tokens in the whole file; new tokens and seconds of only this run.

    The seconds count generating and not loading the target. `skipped` counts the prompts that are
    too long for the target's context.
    """

    out: Path
    engine: str
    rows: int
    answer_tokens: int
    new_tokens: int
    seconds: float
    skipped: int = 0


@dataclass(frozen=True)
class _Written:
    """The contents of `out` up to some row: rows, answer tokens and bytes."""

    rows: int = 0
    answer_tokens: int = 0
    size: int = 0

    def __post_init__(self) -> None:
        if min(self.rows, self.answer_tokens, self.size) < 0:
            raise UserError(f"got {self.rows} rows in {self.size} bytes, expected 0 or more")


@dataclass(frozen=True)
class _Sidecar:
    """The contents of `out` after its last whole batch, and (`finished`) after its last row.

    If a run wanted only some rows of the last batch, that batch does not count as whole. A later
    run that wants more rows makes it again.
    """

    settings: dict[str, Any]
    provenance: dict[str, Any]
    next_batch: int = 0
    rows: int = 0
    answer_tokens: int = 0
    size: int = 0
    finished: _Written | None = None

    def __post_init__(self) -> None:
        if self.next_batch < 0:
            raise UserError(f"got next_batch {self.next_batch}, expected 0 or more")
        _Written(self.rows, self.answer_tokens, self.size)


def run(config: DistillConfig, report: Report = SILENT) -> DistillResult:
    """Writes `config.out`, or the rest of it; see the module docstring.

    Raises UserError if the target, the prompts, the settings or the files cannot be used, and if
    another process writes to `config.out`.
    """
    config.require_files()
    source = target.resolve(config.model, report, config.base)
    tokenizer = target.load_tokenizer(source)
    affixes = data.chat_affixes(tokenizer)
    room = _room(target.context(source), affixes, config)
    given, num_skipped = None, 0
    if config.prompts is not None:
        every = [_tokenised(row, tokenizer) for row in prompts.read(config.prompts)]
        given = _fitting(every, room, tokenizer, config, report)
        num_skipped = len(every) - len(given)
    goal = config.num_prompts or (1000 if given is None else len(given))
    if given is not None and goal > len(given):
        skipped = f", and {num_skipped} that do not fit" if num_skipped else ""
        raise UserError(f"num_prompts is {goal}, {config.prompts} holds {len(given)}{skipped}")
    index, count = config.part
    first, goal = goal * index // count, goal * (index + 1) // count - goal * index // count
    given = None if given is None else given[first : first + goal]
    engine_name = "server" if config.server else choose(config.engine, source)
    settings = _settings(config, source, engine_name)
    config.out.parent.mkdir(parents=True, exist_ok=True)
    with locked(config.out):
        state = _open_sidecar(config, settings)
        if state.finished is not None and state.finished.rows == goal:
            report.line(f"{config.out} is complete: {goal} rows")
            tokens = state.finished.answer_tokens
            return DistillResult(config.out, engine_name, goal, tokens, 0, 0.0, num_skipped)
        if state.rows > goal:
            raise UserError(f"{config.out} holds {state.rows} rows already, expected fewer: {goal}")
        longest = config.max_prompt_tokens
        if given is not None:
            longest = max(sum(map(len, [each.ids, *each.more])) for each in given)
        if config.server:
            asked = ServerEngine(config.server, tokenizer, config.batch_size)
            report.line(f"asking {asked.model} at {config.server} for the answers of {source.name}")
            engine: AnswerEngine = asked
        else:
            needs.say(config, source, goal - state.rows, longest, report)
            report.line(f"loading {source.name} ({engine_name}, {config.precision})")
            engine = open_engine(engine_name, source, config.precision, config.batch_size)
        distiller = Distiller(config, engine, tokenizer, source, room, given)
        result = _write(config, report, distiller, state, goal)
    return replace(result, skipped=num_skipped)


def merge(parts: Sequence[Path], out: Path) -> DistillResult:
    """Joins all shards of one distillation in `out`, in their order, and writes its sidecar.

    Raises UserError if a shard is missing, given twice or not finished, or differs in a setting.
    """
    if out.exists():
        raise UserError(f"{out} exists: remove it or choose another file")
    states = {part: _sidecar_of(part) for part in parts}
    by_shard = {str(state.settings.get("shard")): part for part, state in states.items()}
    wanted = [f"{i}/{len(parts)}" for i in range(1, len(parts) + 1)]
    if sorted(by_shard) != sorted(wanted):
        got = ", ".join(sorted(by_shard))
        raise UserError(f"got shard {got} in {len(parts)} files, expected {', '.join(wanted)}")
    ordered = [by_shard[shard] for shard in wanted]
    provenance, first = states[ordered[0]].provenance, states[ordered[0]].settings
    written = []
    for part in ordered:
        state = states[part]
        if state.finished is None or state.finished.size != part.stat().st_size:
            raise UserError(f"{part} is not finished: distill its shard {state.settings['shard']}")
        differing = {name for name in first if first[name] != state.settings.get(name)} - {"shard"}
        if differing:
            text = f"{part} was written with another {min(differing)} than {ordered[0]}"
            raise UserError(f"{text}, expected one distillation's shards")
        written.append(state.finished)
    settings = {name: value for name, value in first.items() if name != "num_prompts"}
    rows, tokens, size = (
        sum(getattr(each, name) for each in written) for name in ("rows", "answer_tokens", "size")
    )
    with disk.writing("answers", out.parent), replacing(out) as temporary:
        with open(temporary, "wb") as file:
            for part in ordered:
                with open(part, "rb") as source:
                    shutil.copyfileobj(source, file)
        finished = _Written(rows, tokens, size)
        settings["shard"] = "1/1"
        _write_sidecar(out, _Sidecar(settings, provenance, finished=finished))
    return DistillResult(out, str(first["engine"]), rows, tokens, 0, 0.0)


def _write(
    config: DistillConfig, report: Report, distiller: Distiller, state: _Sidecar, goal: int
) -> DistillResult:
    """Appends batches to `config.out` until it has `goal` rows."""
    num_empty = 0
    state = replace(state, finished=None)  # whose last rows are cut off with their batch
    with disk.writing("answers", config.out.parent):
        _write_sidecar(config.out, state)  # first, so that no file is ever without a sidecar
        _truncate(config.out, state.size)
    rows, answer_tokens = state.rows, state.answer_tokens
    report.line(_first_step(config, goal - rows))
    with report.progress("answers") as advance, open(config.out, "ab") as file:
        pace = _Pace(advance, rows, goal, config.turns * config.max_new_tokens)
        while rows < goal:
            kept, whole = distiller.batch(state.next_batch, goal - rows, pace.within_batch)
            num_empty = 0 if kept else num_empty + 1
            if num_empty == MAX_EMPTY_BATCHES:
                raise UserError(
                    f"the target ended no prompt within {config.max_prompt_tokens} tokens in "
                    f"{num_empty} batches: raise max_prompt_tokens, or give prompts"
                )
            tokens = sum(num_answer_tokens(row) for row in kept)
            rows, answer_tokens = rows + len(kept), answer_tokens + tokens
            with disk.writing("answers", config.out.parent):
                file.write("".join(json.dumps(row) + "\n" for row in kept).encode())
                file.flush()
                os.fsync(file.fileno())
                written = _Written(rows, answer_tokens, file.tell())
                if whole:
                    state = replace(state, next_batch=state.next_batch + 1, **asdict(written))
                state = replace(state, finished=written if rows == goal else None)
                _write_sidecar(config.out, state)
            pace.add_batch(len(kept), tokens)
    return DistillResult(
        config.out, distiller.engine.name, rows, answer_tokens, pace.num_tokens, pace.seconds
    )


def _first_step(config: DistillConfig, missing: int) -> str:
    """Says what the engine does before the first answer is there."""
    number = min(config.batch_size, missing)
    if config.prompts is None:
        return f"the target writes {config.batch_size} prompts, then {number} answers at once"
    return f"the target writes {number} answers at once, of {config.max_new_tokens} tokens at most"


class _Pace:
    """Reports how many answers there are, how fast they come and when the last is there."""

    def __init__(self, advance: Advance, rows: int, goal: int, longest: int) -> None:
        """rows: answers that an earlier run has written. longest: tokens that a row may have."""
        self._advance, self._rows, self._goal, self._longest = advance, rows, goal, longest
        self._missing, self._started = goal - rows, time.perf_counter()
        self.num_tokens = self._num_steps = 0
        advance(rows, goal)

    @property
    def seconds(self) -> float:
        """The seconds since the first batch began."""
        return time.perf_counter() - self._started

    def within_batch(self, num_ended: int, num_tokens: int) -> None:
        """Hears of the batch that is being written, see `OnTokens`."""
        self._num_steps += 1
        if self._num_steps >= FIRST_STEPS:
            self._say(num_ended, num_tokens)

    def add_batch(self, rows: int, tokens: int) -> None:
        """Adds a whole batch."""
        self._rows, self.num_tokens = self._rows + rows, self.num_tokens + tokens
        self._say(0, 0)

    def _say(self, num_ended: int, num_tokens: int) -> None:
        num_whole = self._missing - (self._goal - self._rows)  # rows of this run's whole batches
        rate = (self.num_tokens + num_tokens) / max(self.seconds, 1e-9)
        note = f"{rate:.1f} tokens/s" if rate < 10 else f"{rate:.0f} tokens/s"
        length = self.num_tokens / num_whole if num_whole else float(self._longest)
        if not num_whole:
            note += f", if all have {self._longest} tokens"
        tokens_left = max(0.0, (self._goal - self._rows) * length - num_tokens)
        self._advance(self._rows + num_ended, self._goal, note, tokens_left / max(rate, 1e-9))


def _tokenised(row: PromptRow, tokenizer: Any) -> PromptIds:
    """Returns a row's prompts as token ids; raises UserError for ids that the target lacks."""
    messages = [_ids(message, tokenizer, row.where) for message in row.messages]
    return PromptIds(messages[0], row.source, row.where, tuple(messages[1:]), row.system)


def _ids(message: str | list[int], tokenizer: Any, where: str) -> list[int]:
    if isinstance(message, str):
        message = data.encode(tokenizer, message, where)
    if not message or max(message) >= len(tokenizer):
        raise UserError(
            f'{where}: expected "prompt": a text or token ids below {len(tokenizer)}, not empty'
        )
    return message


def _fitting(
    given: list[PromptIds], room: int, tokenizer: Any, config: DistillConfig, report: Report
) -> list[PromptIds]:
    """Returns the prompts that take at most `room` tokens with the chat template's text before
    them, and says how many are skipped.

    Raises UserError if none is left, or if the template has no place for a system message.
    """
    prefix = cache(lambda system: data.chat_affixes(tokenizer, system)[0])
    fitting, skipped = list[PromptIds](), list[str]()
    for prompt in given:
        tokens = len(prefix(prompt.system)) + len(prompt.ids)
        if tokens <= room:
            fitting.append(prompt)
        else:
            skipped.append(f"{prompt.where} has {tokens}")
    if not fitting:
        raise UserError(
            f"every prompt of {config.prompts} is longer than the {room} tokens that the target's "
            f"context leaves beside {config.max_new_tokens} new ones: lower max_new_tokens"
        )
    if skipped:
        report.line(
            f"warning: skipping {len(skipped)} of {len(given)} prompts, longer than the {room} "
            "tokens that the target's context leaves them, the chat template's among them: "
            f"{skipped[0]}"
        )
    return fitting


def _room(context: int, affixes: tuple[list[int], list[int]], config: DistillConfig) -> int:
    """Returns the tokens that a prompt may have, with the chat template's text before it, in a
    context of `context` tokens.

    Raises UserError if there is room for none.
    """
    prefix, suffix = map(len, affixes)
    around = prefix + suffix + config.max_new_tokens
    if around >= context:
        raise UserError(
            f"a prompt of one token with {config.max_new_tokens} new tokens takes {around + 1}, "
            f"expected at most {context}, the target's context: lower max_new_tokens"
        )
    return context - suffix - config.max_new_tokens


# ---- the sidecar ----


def _settings(config: DistillConfig, source: target.Source, engine: str) -> dict[str, Any]:
    """Returns the settings that must not change between the parts of one file."""
    settings = asdict(config)
    for name in ("out", "resume", "model", "server"):
        del settings[name]
    if config.shard == "1/1":
        del settings["num_prompts"]
    settings |= {"target": source.name, "engine": engine, "prompts": None}
    if isinstance(config.temperature, tuple):
        settings["temperature"] = list(config.temperature)  # as JSON gives it back
    settings["fingerprint"] = target.fingerprint(source)
    if config.prompts is not None:
        settings["prompts"] = sha256(config.prompts)
    return settings


def _sidecar_path(out: Path) -> Path:
    return out.with_name(out.name + data.SIDECAR)


def _sidecar_of(out: Path) -> _Sidecar:
    """Returns the sidecar of an answers file; raises UserError if it has none of this form."""
    path = _sidecar_path(out)
    try:
        return from_mapping(_Sidecar, parse_json(path.read_bytes()), path.name)
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot go on with {out}: no usable {path.name} ({error}), remove both"
        ) from error


def _open_sidecar(config: DistillConfig, settings: dict[str, Any]) -> _Sidecar:
    """Returns the sidecar to go on from, a new one if there is no file yet.

    Raises UserError if the file may not be resumed, was changed, or has other settings.
    """
    if not config.out.exists():
        return _Sidecar(settings, collect_provenance())
    state = _sidecar_of(config.out)
    changed = [
        f"{name} was {was!r:.60}, got {value!r:.60}"
        for name, value in settings.items()
        if (was := state.settings.get(name, value)) != value
    ]
    if changed:
        raise UserError(f"cannot go on with {config.out}: {'; '.join(changed)}")
    expected = state.size if state.finished is None else state.finished.size
    size = config.out.stat().st_size
    if size < expected:
        raise UserError(
            f"{config.out} has {size} bytes, expected {expected}: it was changed, remove it and "
            "its sidecar"
        )
    return replace(state, settings=settings)


def _write_sidecar(out: Path, state: _Sidecar) -> None:
    path = _sidecar_path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(state), indent=1) + "\n")


def _truncate(path: Path, size: int) -> None:
    """Cuts the file after its last whole batch: removes rows of an interrupted batch."""
    with open(path, "ab") as file:
        file.truncate(size)
