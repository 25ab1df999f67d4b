"""Reads training data: rows of JSON Lines become token sequences with a loss mask.

There are four row schemas, see `read`; text is tokenised through the target's chat template.
"""

import hashlib
import logging
import lzma
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief, parse_json

logger = logging.getLogger(__name__)

XZ_MAGIC = b"\xfd7zXZ\x00"
SIDECAR = ".state.json"  # after the name of an answers file: what distill knows of it
SCHEMAS = (
    '{"prompt", "response"}, {"turns"}, {"tokens", "loss_mask"}, {"messages"}, {"conversations"} '
    'or {"instruction", "output"}'
)
# Roles by the names that ShareGPT and others give them. A template may know more roles than users
# and assistants, but an assistant of another name would be no answer.
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "model", "assistant"), "assistant"),
    **{role: role for role in ("system", "developer", "tool", "function", "ipython")},
}
# Stands for the user's text. A chat template must keep it as it is and must not contain it.
SENTINEL = "specsplit0user0text"


@dataclass(frozen=True, eq=False)
class Example:
    """One sequence: `token_T` int32 ids, `loss_T` bool, True at the answer's tokens, which are to
    be predicted."""

    token_T: np.ndarray
    loss_T: np.ndarray
    source: str | None = None


def read(
    paths: str | Path | Sequence[str | Path],
    tokenizer: Any,
    max_length: int,
    sources: Collection[str] | None = None,
) -> list[Example]:
    """Returns every row of `paths` (JSON Lines, plain or xz), in order, cut to `max_length` tokens.

    Row schemas: {"prompt": ids, "response": ids} (self-distilled: the chat template's text around a
    user message is added), {"turns": [{"prompt": ids, "response": ids}, …]} (a conversation of
    these), both perhaps with the "system" message that was before them, {"tokens": ids,
    "loss_mask": 0/1} and texts as `as_messages` takes them (answers are the assistant's). Any row
    may carry a "source" and the "temperature" of its answers. Rows of one token and rows left
    without an answer token are dropped, and their number logged.

    Args:
        tokenizer: the target's transformers tokenizer.
        sources: keep only rows whose "source" is listed, "" meaning rows without one; None = all.
    Raises:
        UserError: a file or row cannot be read, no row has a listed source, or no example is left.
    """
    reader = _RowReader(tokenizer)
    examples: list[Example] = []
    seen: set[str] = set()
    num_dropped = 0
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        for where, row in read_rows(path):
            source = row.get("source")
            if source is not None and not isinstance(source, str):
                raise UserError(f'{where}: "source" is {source!r:.80}, expected a string')
            seen.add(source or "")
            if sources is not None and (source or "") not in sources:
                continue
            token_T, loss_T = reader.sequence(row, where)
            if len(token_T) < 2 or not loss_T[:max_length].any():
                num_dropped += 1
                continue
            examples.append(Example(token_T[:max_length], loss_T[:max_length], source))
    unknown = sorted(set(sources or ()) - seen)
    if unknown:
        raise UserError(f"no row has source {unknown}, expected some of {sorted(seen)}")
    if num_dropped:
        logger.warning("dropped %d rows without an answer in %d tokens", num_dropped, max_length)
    if not examples:
        raise UserError(
            f"no training example in {paths}: give other files, or raise max_length ({max_length})"
        )
    return examples


def read_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("file:line", object) for each line that is not empty.

    A file compressed by xz is recognised by its first bytes. Raises UserError on a file that cannot
    be read and on a line that is not a JSON object.
    """
    try:
        with open(path, "rb") as file:
            compressed = file.read(len(XZ_MAGIC)) == XZ_MAGIC
        with lzma.open(path, "rb") if compressed else open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    row = parse_json(line)
                except ValueError as error:  # also UnicodeDecodeError
                    raise UserError(
                        f"{where}: not JSON ({error}), expected one object a line"
                    ) from error
                if not isinstance(row, dict):
                    raise UserError(
                        f"{where}: got {type(row).__name__}, expected an object like {SCHEMAS}"
                    )
                yield where, row
    except UserError:
        raise
    except (OSError, EOFError, lzma.LZMAError, ValueError) as error:  # ValueError: NUL in a path
        raise UserError(f"cannot read {path}: {error}, expected JSON Lines, plain or xz") from error


def system_text(system: Any, where: str) -> str | None:
    """Returns a row's system message, None for an empty one; raises UserError if it is no text."""
    if not isinstance(system, str | None):
        raise UserError(f'{where}: "system" is {type(system).__name__}, expected a text')
    return system or None


def as_messages(row: dict[str, Any], where: str) -> Any:
    """Returns the messages, {"role", "content"} each, of a row of texts; None for any other row.

    Such rows are {"messages": […]}, ShareGPT's {"conversations": [{"from": "human", "value": …}]}
    and Alpaca's {"instruction", "input", "output"}, whose input may be missing; any may have
    further keys, and a "system" message, which then is the first. Answers before the first question
    are left out, as other trainers do. Raises UserError for a conversation that is not such a list,
    and for a role that is none of `ROLES`.
    """
    messages, system = _own_messages(row, where), system_text(row.get("system"), where)
    if messages is None:
        return None
    if not isinstance(messages, list) or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages
    ):
        raise UserError(f'{where}: "messages" is not a list of {{"role", "content"}}')
    known = [{**each, "role": _role(each["role"], where)} for each in messages]
    if system is not None:
        known.insert(0, {"role": "system", "content": system})
    first = next((i for i, each in enumerate(known) if each["role"] == "user"), len(known))
    return [each for each in known[:first] if each["role"] != "assistant"] + known[first:]


def _role(name: str, where: str) -> str:
    """Returns the role that a speaker of this name has; raises UserError for an unknown one."""
    role = ROLES.get(name.strip().lower())
    if role is None:
        raise UserError(
            f"{where}: got a message of {name!r:.40}, expected one of {', '.join(ROLES)}"
        )
    return role


def _own_messages(row: dict[str, Any], where: str) -> Any:
    """Returns what `as_messages` does, without the row's "system"."""
    if "messages" in row:
        return row["messages"]
    if "conversations" in row:
        turns = row["conversations"]
        if isinstance(turns, list) and all(isinstance(t, dict) and "role" in t for t in turns):
            return turns  # as SpecForge writes them
        if not isinstance(turns, list) or not all(
            isinstance(turn, dict) and isinstance(turn.get("from"), str) and "value" in turn
            for turn in turns
        ):
            raise UserError(f'{where}: "conversations" is not a list of {{"from", "value"}}')
        return [{"role": turn["from"], "content": turn["value"]} for turn in turns]
    if isinstance(row.get("instruction"), str):
        more = row.get("input") or ""
        asked = f"{row['instruction']}\n\n{more}".strip() if isinstance(more, str) else more
        answer = [{"role": "assistant", "content": row["output"]}] if "output" in row else []
        return [{"role": "user", "content": asked}, *answer]
    return None


def require_target(paths: Sequence[Path], name: str, fingerprint: str) -> None:
    """Raises UserError if the sidecar of a file says that another model wrote its answers.

    The model's fingerprint decides; the name does where an older version kept none. A file without
    a sidecar is taken on trust.
    """
    for path in paths:
        sidecar = path.with_name(path.name + SIDECAR)
        if not sidecar.is_file():
            continue
        try:
            settings = parse_json(sidecar.read_bytes())["settings"]
            writer, its_fingerprint = settings["target"], settings.get("fingerprint")
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"cannot read {sidecar}: {_reason(error)}, expected what distill wrote beside "
                f"{path.name}; remove it to take the answers on trust"
            ) from error
        is_same = its_fingerprint == fingerprint if its_fingerprint else writer == name
        if not is_same:
            other = "" if writer != name else " of the same name with other weights"
            raise UserError(
                f"{path} holds answers of {writer}{other}, expected those of the target {name}: "
                "distill them anew, or set data.allow_other_target = true to train on them"
            )


def require_vocabulary(examples: Iterable[Example], vocab_size: int) -> None:
    """Raises UserError on a token id that the target does not have.

    A tokenizer may know more ids than its model.
    """
    highest = max(int(example.token_T.max()) for example in examples)
    if highest >= vocab_size:
        raise UserError(f"token id {highest} in the data, expected ids below {vocab_size}")


def chat_affixes(tokenizer: Any, system: str | None = None) -> tuple[list[int], list[int]]:
    """Returns the ids that the chat template puts before a lone user message, and after it.

    Those before it hold the message `system`, or what the template says without one. Those after it
    lead up to the answer. Without a chat template they are the beginning-of-text id, if the
    tokenizer adds one, and nothing. SmolLM2-Instruct's decode to
    `<|im_start|>system\\n…<|im_end|>\\n<|im_start|>user\\n` and
    `<|im_end|>\\n<|im_start|>assistant\\n`. Raises UserError if the template has no place for
    `system`.
    """
    where = "the chat template"
    if not getattr(tokenizer, "chat_template", None):
        if system is not None:
            raise UserError(f"{where}: this tokenizer has none, which a system message needs")
        empty = encode(tokenizer, "", where, add_special_tokens=True)
        return [i for i in empty if i == tokenizer.bos_token_id], []
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": SENTINEL})
    text = _render(tokenizer, messages, True, where)
    if system is not None and system.strip() not in text:
        raise UserError(f"{where} leaves out a system message, expected one that shows it")
    before, found, after = text.partition(SENTINEL)
    if not found or SENTINEL in after:
        raise UserError(
            "the chat template does not show the user message exactly once, expected one that does"
        )
    return encode(tokenizer, before, where), encode(tokenizer, after, where)


def chat_joint(tokenizer: Any) -> list[int]:
    """Returns the ids that the chat template puts between an answer's text and the next message.

    They begin with the token that ends an answer. SmolLM2-Instruct's decode to
    `<|im_end|>\\n<|im_start|>user\\n`. Raises UserError if the template rewrites earlier turns or
    ends answers without a special token.
    """
    where = "the chat template"
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(f"{where}: this tokenizer has none, expected one for several turns")
    texts = [f"{SENTINEL}{number}" for number in range(3)]
    roles = ("user", "assistant", "user")
    messages = [{"role": r, "content": text} for r, text in zip(roles, texts, strict=True)]
    once = _render(tokenizer, messages[:1], True, where)
    text = _render(tokenizer, messages, True, where)
    before, _, rest = text.partition(texts[1])
    joint, found, _ = rest.partition(texts[2])
    ids = encode(tokenizer, joint, where) if found else []
    if before != once or not ids or ids[0] not in tokenizer.all_special_ids:
        raise UserError(
            f"{where} rewrites earlier turns or ends answers without a special token, expected one "
            "that only appends: distill one turn"
        )
    return ids


def split(examples: Sequence[Example], fraction: float) -> tuple[list[Example], list[Example]]:
    """Returns (train, validation): about `fraction` of the prompts validate.

    Only a hash of the prompt decides its side, so that the side stays when rows are added, and
    equal prompts never fall on both sides. If fraction > 0 and there are two prompts, neither side
    is empty. Raises UserError if there are fewer.
    """
    if fraction <= 0:
        return list(examples), []
    draws = [_prompt_draw(example) for example in examples]
    if len(set(draws)) < 2:
        raise UserError(
            f"{len(set(draws))} distinct prompts cannot be split, set validation_fraction = 0"
        )
    # At least the smallest draw validates, and at least the largest trains.
    limit = min(max(fraction, np.nextafter(min(draws), 1)), max(draws))
    train = [e for e, draw in zip(examples, draws, strict=True) if draw >= limit]
    validation = [e for e, draw in zip(examples, draws, strict=True) if draw < limit]
    return train, validation


def count_tokens(
    examples: Iterable[Example], vocab_size: int, prompt_weight: float = 0.0
) -> np.ndarray:
    """Returns how often each token is in an answer, float64[V]; a prompt's count `prompt_weight`.

    Ids have to be in the vocabulary, see `require_vocabulary`.
    """
    counts_V = np.zeros(vocab_size)
    for example in examples:
        counts_V += np.bincount(example.token_T[example.loss_T], minlength=vocab_size)
        if prompt_weight:
            prompt = example.token_T[~example.loss_T]
            counts_V += prompt_weight * np.bincount(prompt, minlength=vocab_size)
    return counts_V


def most_frequent_tokens(
    counts_V: np.ndarray, count: int, always: Iterable[int] = ()
) -> np.ndarray:
    """Returns the draft vocabulary, int64[count] ascending: the tokens with the highest counts.

    `counts_V` is `count_tokens` of the training rows, or a sum of such counts over more text. The
    ids `always` (pass the tokenizer's special ids and every end id) are in it whatever their
    frequency. Ties go to the lower id, and so do places that are left when every counted token is
    in: tokenizers learn common merges first. Raises UserError on a count or an id outside of the
    vocabulary, and if `always` has more ids than `count`.
    """
    vocab_size = len(counts_V)
    if not 1 <= count <= vocab_size:
        raise UserError(f"draft vocabulary of {count} tokens, expected 1 to {vocab_size}")
    forced = sorted({int(i) for i in always})
    if forced and not 0 <= forced[0] <= forced[-1] < vocab_size:
        raise UserError(f"ids to keep are {forced}, expected ids below {vocab_size}")
    if len(forced) > count:
        raise UserError(f"draft vocabulary of {count} tokens cannot hold {len(forced)} special ids")
    counts_V = counts_V.astype(np.float64)  # a copy
    counts_V[forced] = np.inf
    order = np.argsort(-counts_V, kind="stable")
    return np.sort(order[:count]).astype(np.int64)


def _prompt_draw(example: Example) -> float:
    """Returns a number in [0, 1) that depends only on the tokens before the first answer token."""
    prompt = example.token_T[: int(np.argmax(example.loss_T))]
    digest = hashlib.blake2b(prompt.astype("<i4").tobytes(), digest_size=6).digest()
    return int.from_bytes(digest, "little") / 2**48


class _RowReader:
    """Turns rows into (token_T, loss_T); asks the tokenizer for its properties only once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.special_ids = set(tokenizer.all_special_ids)
        self.affixes = cache(partial(chat_affixes, tokenizer))
        self.joint: list[int] | None = None

    def sequence(self, row: dict[str, Any], where: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns a row's token ids int32[T] and loss mask bool[T]; raises UserError."""
        keys = row.keys() - {"source", "temperature"}
        if keys - {"system"} == {"prompt", "response"}:
            return self._conversation([row], system_text(row.get("system"), where), where)
        if keys - {"system"} == {"turns"}:
            turns = row["turns"]
            if not isinstance(turns, list) or not all(
                isinstance(turn, dict) and turn.keys() == {"prompt", "response"} for turn in turns
            ):
                raise UserError(f'{where}: "turns" is not a list of {{"prompt", "response"}}')
            return self._conversation(turns, system_text(row.get("system"), where), where)
        if keys == {"tokens", "loss_mask"}:
            tokens, mask = self._ids(row, "tokens", where), row["loss_mask"]
            if not isinstance(mask, list) or any(value not in (0, 1) for value in mask):
                raise UserError(
                    f'{where}: "loss_mask" holds other values, expected a list of 0 and 1'
                )
            if len(mask) != len(tokens):
                raise UserError(
                    f"{where}: loss_mask of {len(mask)} for {len(tokens)} tokens, expected as many"
                )
            return np.array(tokens, dtype=np.int32), np.array(mask, dtype=bool)
        messages = as_messages(row, where)
        if messages is not None:
            return self._chat(messages, where)
        raise UserError(f"{where}: got keys {sorted(keys)}, expected {SCHEMAS}")

    def _conversation(
        self, turns: list[dict[str, Any]], system: str | None, where: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of self-distilled turns; every answer carries loss."""
        before, suffix = self.affixes(system)
        pieces: list[tuple[list[int], bool]] = []
        for turn in turns:
            prompt, response = self._ids(turn, "prompt", where), self._ids(turn, "response", where)
            if pieces:
                if self.joint is None:
                    self.joint = chat_joint(self.tokenizer)
                # The end token is the answer's; one that was cut off has no turn after it.
                if pieces[-1][0][-1:] != self.joint[:1]:
                    raise UserError(
                        f"{where}: an answer with a turn after it ends without the chat "
                        "template's end token"
                    )
                before = self.joint[1:]
            pieces += [(before + prompt + suffix, False), (response, True)]
        return _joined(pieces)

    def _ids(self, row: dict[str, Any], key: str, where: str) -> list[int]:
        """Returns the row's token ids under `key`; raises UserError on ids of another tokenizer."""
        ids = row[key]
        if not isinstance(ids, list) or any(type(i) is not int for i in ids):
            raise UserError(f'{where}: "{key}" is not a list of token ids')
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise UserError(
                f'{where}: "{key}" holds ids from {min(ids)} to {max(ids)}, '
                f"expected 0 to {self.vocab_size - 1}: the data belong to another tokenizer"
            )
        return ids

    def _chat(self, messages: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns a conversation's tokens and loss mask.

        The template renders it turn by turn. The text that a turn adds after the template's own
        generation prompt is an answer.
        """
        valid = isinstance(messages, list) and all(
            isinstance(m, dict)
            and isinstance(m.get("role"), str)
            and isinstance(m.get("content"), str)
            for m in messages
        )
        if not valid:
            raise UserError(
                f'{where}: "messages" is not a list of {{"role", "content"}} with text in both'
            )
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError(
                f'{where}: "messages" need a chat template, and this tokenizer has none'
            )
        pieces: list[tuple[list[int], bool]] = []
        done = ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = _render(self.tokenizer, messages[:index], True, where)
            after = _render(self.tokenizer, messages[: index + 1], False, where)
            if not before.startswith(done) or not after.startswith(before):
                raise UserError(
                    f"{where}: the chat template rewrites earlier turns, expected one that only "
                    'appends: give {"tokens", "loss_mask"} rows instead'
                )
            pieces.append((encode(self.tokenizer, before[len(done) :], where), False))
            answer = encode(self.tokenizer, after[len(before) :], where)
            # The template's text after the end token, a newline, is never generated: no loss.
            ends = [i for i, token in enumerate(answer) if token in self.special_ids]
            cut = ends[-1] + 1 if ends else len(answer)
            pieces += [(answer[:cut], True), (answer[cut:], False)]
            done = after
        return _joined(pieces)


def _render(
    tokenizer: Any, messages: list[dict[str, Any]], generation_prompt: bool, where: str
) -> str:
    """Returns the chat template's text; raises UserError, which begins with `where`."""
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation_prompt
        )
    except Exception as error:  # the template is a program of its own, which may raise anything
        raise UserError(
            f"{where}: the chat template refuses the messages: {_reason(error)}"
        ) from error
    if not isinstance(text, str):
        raise UserError(f"{where}: the chat template gives {type(text).__name__}, expected a text")
    return text


def encode(tokenizer: Any, text: str, where: str, add_special_tokens: bool = False) -> list[int]:
    """Returns the text's token ids; raises UserError, which begins with `where`, if it has none.

    A chat template writes its own special tokens: the tokenizer adds any only if asked to.
    """
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the Rust library panics with what is no Exception
        raise UserError(f"{where}: the tokenizer cannot encode it: {_reason(error)}") from error
    return ids


def _reason(error: BaseException) -> str:
    """Returns what went wrong in a foreign program, in a few words."""
    return brief(error, 200) or type(error).__name__


def _joined(pieces: Sequence[tuple[list[int], bool]]) -> tuple[np.ndarray, np.ndarray]:
    tokens = [token for ids, _ in pieces for token in ids]
    loss = [answer for ids, answer in pieces for _ in ids]
    return np.array(tokens, dtype=np.int32), np.array(loss, dtype=bool)


def source_counts(examples: Iterable[Example]) -> dict[str, int]:
    """Returns the number of examples of each source ("" for none), for provenance."""
    return dict(sorted(Counter(example.source or "" for example in examples).items()))
