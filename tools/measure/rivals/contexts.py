"""Makes the prompts of a race: short ones as they are in the file, and long ones put together."""

from collections.abc import Callable, Sequence
from itertools import islice, zip_longest

from spec_runtime.errors import UserError
from spec_runtime.measure.prompts import BenchPrompt
from tools.measure.rivals.race import Context

Encode = Callable[[str], list[int]]  # a user's message to a prompt's ids, chat template included
TEXTS = ("summarization", "rag")  # the subsets whose prompts carry a text to read


def short(prompts: Sequence[BenchPrompt], encode: Encode, count: int, most_tokens: int) -> Context:
    """Returns `count` prompts, first turns, of at most `most_tokens` ids, evenly over the subsets.

    Raises UserError if no prompt is that short.
    """
    subsets: dict[str, list[BenchPrompt]] = {}
    for each in prompts:
        subsets.setdefault(each.category, []).append(each)
    in_turn = (each for row in zip_longest(*subsets.values()) for each in row if each is not None)
    fitting = ((each, encode(_text(each))) for each in in_turn)
    found = {str(each.id): ids for each, ids in fitting if len(ids) <= most_tokens}
    if not found:
        raise UserError(f"got no prompt of at most {most_tokens} tokens, expected some")
    return Context("short", dict(islice(found.items(), count)))


def long(prompts: Sequence[BenchPrompt], encode: Encode, count: int, num_tokens: int) -> Context:
    """Returns `count` prompts of at most `num_tokens` ids, and at least nine tenths of it.

    Each ends with one prompt that carries a text, of `TEXTS`' subsets where the file has them. In
    front of it stand the texts of the prompts before, as many as fit; the first begins with a word
    in its middle. Raises UserError if all texts together are too short.
    """
    carriers = [each for each in prompts if each.category in TEXTS] or list(prompts)
    step = max(1, len(carriers) // count)
    found: dict[str, list[int]] = {}
    for last in carriers[::step][:count]:
        at = carriers.index(last)
        words: list[str] = []
        for each in [*carriers[at + 1 :], *carriers[: at + 1]][::-1]:
            words = _text(each).split(" ") + ["\n\n"] * bool(words) + words
            if len(encode(" ".join(words))) >= num_tokens:
                break
        else:
            raise UserError(
                f"got prompts of {len(encode(' '.join(words)))} tokens in all, expected at least "
                f"{num_tokens} for a long prompt: give a file with longer texts, or a smaller "
                "--long-tokens"
            )
        found[str(last.id)] = _cut(words, encode, num_tokens)
    return Context("long", found)


def _cut(words: Sequence[str], encode: Encode, num_tokens: int) -> list[int]:
    """Returns the ids of the most last words that are at most `num_tokens`."""
    least, most = 1, len(words)  # how many words fit, and how many may
    while least < most:
        middle = (least + most + 1) // 2
        if len(encode(" ".join(words[-middle:]))) <= num_tokens:
            least = middle
        else:
            most = middle - 1
    return encode(" ".join(words[-least:]))


def _text(prompt: BenchPrompt) -> str:
    if isinstance(prompt.content, str):
        return prompt.content
    return prompt.content[-1]["content"]
