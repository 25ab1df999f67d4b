"""Decodes prompts plainly and with one or more drafters, and sums up what each way cost."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spec_runtime.errors import UserError
from spec_runtime.loop.stats import Stats, ratio
from spec_runtime.measure import audit
from spec_runtime.measure.prompts import BenchPrompt

if TYPE_CHECKING:
    from spec_runtime import Engine, GenerationResult
    from spec_runtime.sampling import SamplingOptions


@dataclass(frozen=True)
class Turn:
    """One turn of a prompt, decoded both ways.

    ``is_compared`` is False where an earlier answer already differs: the two ways then continue
    different conversations. ``divergence`` is None where the tokens are the same or not compared.
    """

    plain: "GenerationResult"
    speculative: "GenerationResult"
    is_compared: bool = True
    divergence: audit.Divergence | None = None


@dataclass(frozen=True)
class Pair:
    """A prompt decoded both ways, turn by turn."""

    prompt: BenchPrompt
    turns: tuple[Turn, ...]

    @property
    def divergence(self) -> tuple[int, audit.Divergence] | None:
        """The first difference and the turn (from 1) that has it; None if there is none."""
        for number, turn in enumerate(self.turns, 1):
            if turn.divergence is not None:
                return number, turn.divergence
        return None


@dataclass
class BenchReport:
    """Holds the prompts that were decoded, and the turns that did not fit the context:
    {"prompt", "turn", "reason"}."""

    pairs: list[Pair] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)


def run(
    engines: Sequence["Engine"],
    prompts: Iterable[BenchPrompt],
    max_new_tokens: int,
    on_prompt: Callable[[], None] = lambda: None,
    on_skip: Callable[[str], None] = lambda reason: None,
    *,
    system: str | None = None,
    sampling: "SamplingOptions | None" = None,
    num_before: int = 0,
) -> list[BenchReport]:
    """Decodes each prompt plainly and with each engine, and returns a report for each engine.

    The engines share one target. Which of them goes first rotates from prompt to prompt, so that
    none of them always meets the warmer machine. A prompt of several turns is a chat: each way of
    decoding gets the next question after its own earlier answers, and the whole conversation is
    prefilled anew. ``sampling`` (None: greedy) holds for all, except that plain decoding always
    draws from the target, since typical acceptance would make it greedy. A caller who brings
    the prompts in several calls says how many came ``num_before``: the turns rotate on, and only
    the very first prompt is decoded once more beforehand to warm up.

    Calls ``on_prompt`` after each prompt. A turn longer than the context is skipped, and the later
    turns with it; ``on_skip`` gets the reason.
    """
    options: SamplingOptions = {**(sampling or {}), "max_new_tokens": max_new_tokens}
    plain_options: SamplingOptions = {**options, "acceptance": "target_sampling"}
    contenders = [(engines[0].with_drafter("none"), plain_options)]
    contenders += [(engine, options) for engine in engines]
    reports = [BenchReport() for _ in engines]

    def skip(prompt: BenchPrompt, turn: int, error: UserError) -> None:
        for report in reports:
            report.skipped.append({"prompt": prompt.id, "turn": turn, "reason": str(error)})
        where = f"prompt {prompt.id}" + (f", turn {turn}," if turn > 1 else "")
        on_skip(f"{where} skipped: {error}")

    num_done = num_before
    for prompt in prompts:
        chats = [_Chat(*contender, system, prompt) for contender in contenders]
        first = num_done % len(chats)
        for turn, question in enumerate((prompt.content, *prompt.later_turns), 1):
            try:
                for chat in chats:
                    chat.ask(question)
            except UserError as error:
                skip(prompt, turn, error)
                break
            if num_done == 0 and turn == 1:  # page in weights and buffers outside the timing
                for chat in chats:
                    chat.warm_up()
            for chat in chats[first:] + chats[:first]:
                chat.answer()
        plain, *others = chats
        if plain.results:
            for report, other in zip(reports, others, strict=True):
                report.pairs.append(Pair(prompt, _compare(plain, other, engines[0])))
            num_done += 1
        on_prompt()
    return reports


class _Chat:
    """The conversation about one prompt that one way of decoding has."""

    def __init__(
        self, engine: "Engine", options: "SamplingOptions", system: str | None, prompt: BenchPrompt
    ) -> None:
        self.prompt = prompt
        self.results: list[GenerationResult] = []
        self.prompt_ids: list[list[int]] = []  # of each answered turn, the whole conversation
        self._engine, self._options, self._system = engine, options, system
        self._messages: list[dict[str, str]] = []
        self._asked: list[int] = []

    def ask(self, question: str | list[dict[str, str]]) -> None:
        """Encodes the next turn. Raises UserError if the conversation does not fit the context."""
        if not self.results:  # a first turn may do without a chat template
            self._asked = self._engine.encode(question, system=self._system)
        if isinstance(question, str):
            question = [{"role": "user", "content": question}]
        self._messages = [*self._messages, *question]
        if self.results:
            self._asked = self._engine.encode(self._messages, system=self._system)

    def warm_up(self) -> None:
        self._engine.generate(self._asked, max_new_tokens=8, reuse=False)

    def answer(self) -> None:
        result = self._engine.generate(self._asked, reuse=False, **self._options)
        self.results.append(result)
        self.prompt_ids.append(self._asked)
        self._messages.append({"role": "assistant", "content": result.text})


def _compare(plain: _Chat, other: _Chat, engine: "Engine") -> tuple[Turn, ...]:
    """Pairs the turns of two chats and finds the first difference; overwrites the target's KV."""
    turns: list[Turn] = []
    for prompt_ids, ours, theirs in zip(
        plain.prompt_ids, plain.results, other.results, strict=True
    ):
        is_compared = all(turn.is_compared and turn.divergence is None for turn in turns)
        divergence = None
        if is_compared:
            divergence = audit.compare(
                plain.prompt.id, prompt_ids, ours.token_ids, theirs.token_ids, engine.target
            )
        turns.append(Turn(ours, theirs, is_compared, divergence))
    return tuple(turns)


def summarise(report: BenchReport) -> dict[str, Any]:
    """Returns ``overall`` and ``categories`` (by name, in the order met), each as `summary` gives,
    and ``skipped``."""
    categories: dict[str, list[Pair]] = {}
    for pair in report.pairs:
        categories.setdefault(pair.prompt.category, []).append(pair)
    return {
        "overall": summary(report.pairs),
        "categories": {name: summary(pairs) for name, pairs in categories.items()},
        "skipped": report.skipped,
    }


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Returns the figures of some prompts, all turns counted alike.

    ``speedup`` is the ratio of speeds, in tokens a second of decoding only: texts may differ in
    length at reduced precisions. ``speedup_end_to_end`` is the same with prefill's seconds and
    tokens counted too, and ``speedup_of_means``, as Spec-Bench averages, that of the means over
    prompts of these speeds. ``decode_time_ratio`` is the ratio of total decoding times, lengths
    included; where all answers are identical it equals ``speedup``. Plain decoding's figures begin
    with ``plain_``. ``identical`` is the share of prompts all of whose turns are identical, and
    ``divergences`` has the first difference of each of the others.
    """
    turns = [turn for pair in pairs for turn in pair.turns]
    plain, speculative = ([turn.plain for turn in turns], [turn.speculative for turn in turns])
    found = [pair.divergence for pair in pairs if pair.divergence is not None]
    total = Stats.total(result.stats for result in speculative)
    ours, theirs = _speed(speculative), _speed(plain)
    return {
        "prompts": len(pairs),
        "turns": len(turns),
        **ours,
        **{f"plain_{name}": value for name, value in theirs.items()},
        "speedup": ratio(ours["tokens_per_second"], theirs["tokens_per_second"]),
        "speedup_end_to_end": ratio(
            ours["end_to_end_tokens_per_second"], theirs["end_to_end_tokens_per_second"]
        ),
        "speedup_of_means": ratio(
            *(_sum_of_speeds(pairs, way) for way in ("speculative", "plain"))
        ),
        "decode_time_ratio": ratio(theirs["decode_seconds"], ours["decode_seconds"]),
        "accepted_length": total.accepted_length,
        "acceptance_by_depth": total.acceptance_by_depth,
        "identical": ratio(len(pairs) - len(found), len(pairs)),
        "divergences": [
            {"turn": turn, **dataclasses.asdict(divergence)} for turn, divergence in found
        ],
        "steps": total.steps,
        "nodes_per_step": ratio(total.drafted_tokens, total.steps),
        "timings": total.timings,
        "draft_ms": 1000 * ratio(total.timings["draft"], total.steps),
    }


def _speed(results: Sequence["GenerationResult"]) -> dict[str, Any]:
    """Returns what one way of decoding took: ``tokens`` are those of decoding, without the first of
    each answer, which prefill gives."""
    stats = Stats.total(result.stats for result in results)
    num_tokens = sum(len(result.token_ids) for result in results)
    return {
        "tokens_per_second": stats.tokens_per_second,
        "end_to_end_tokens_per_second": ratio(
            num_tokens, stats.prefill_seconds + stats.decode_seconds
        ),
        "tokens": stats.committed_tokens,
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "verify_ms": 1000 * ratio(stats.timings["verify"], stats.steps),
        "host_share": _host_share(stats),
    }


def _sum_of_speeds(pairs: Sequence[Pair], way: str) -> float:
    """Returns the sum over prompts of the tokens a second of one way, prefill counted too."""
    speeds = (_speed([getattr(turn, way) for turn in pair.turns]) for pair in pairs)
    return sum(each["end_to_end_tokens_per_second"] for each in speeds)


def _host_share(stats: Stats) -> float:
    """Returns the share of decoding's time that is spent outside of engine runs."""
    return ratio(stats.decode_seconds - stats.engine_seconds, stats.decode_seconds)
