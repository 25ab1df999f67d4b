"""Draft, verify, accept: speculative decoding by hand, on the parts of a bundle.

python examples/speculative.py bundles/smollm2-135m-instruct "Explain tides to a child."

Prints the answer with a bar after each pass of the target: what stands between two bars took one
pass, where plain decoding takes a pass for each token.
"""

import argparse
import sys
from collections.abc import Iterator

import spec_runtime
from spec_runtime.loop.accept import by_target_sampling
from spec_runtime.loop.step import Step


def decode(
    engine: spec_runtime.Engine, prompt: list[int], max_new_tokens: int
) -> Iterator[list[int]]:
    """Yields the tokens that each pass gives, those of greedy decoding; stops after EOS."""
    target, proposer, ends = engine.target, engine.proposer, engine.tokenizer.eos
    reads = engine.wants  # the target's hidden states, if the drafter reads them

    # One pass reads the prompt: the cache then has a row of keys and values for each of its tokens,
    # and the last row's logits give the first token of the answer.
    proposer.truncate(0)
    verified, features = target.prefill(prompt, reads)
    tokens = [int(verified.row(0).argmax())]
    proposer.start(prompt, features, reused=0)
    yield tokens
    remaining = max_new_tokens - 1

    while remaining > 0 and tokens[-1] not in ends:
        # Draft: a tree of guesses. Its root is the last token, which has no row yet. A path of
        # depth d gives at most d + 1 tokens, with the target's own after it.
        tree = proposer.propose(tokens[-1], engine.budget.within(remaining - 1))

        # Verify: one pass over all nodes, each of which attends to the text and to its ancestors.
        verified = target.verify(tree, reads)
        choice_N = verified.argmax_N.tolist()

        # Accept: walk from the root to the child that carries the target's own choice, as long as
        # there is one. The choice that no child carries is the bonus, so that each pass gives at
        # least the token that plain decoding would have given.
        path, bonus = by_target_sampling(tree, choice_N.__getitem__)
        tokens = [*tree.token_N[path[1:]].tolist(), bonus]

        # Commit: the rows of the path stay where they are in the cache, the others are free again.
        # The drafter hears what became of its tree, and reads the target's hidden states there.
        features = verified.features(path) if reads.features else None
        target.commit(path)
        proposer.commit(Step(tokens, len(path) - 1, path, features, verified, tree=tree))
        tokens = until(tokens, ends)
        remaining -= len(tokens)
        yield tokens


def until(tokens: list[int], ends: tuple[int, ...]) -> list[int]:
    """Returns the tokens up to the first one that ends an answer, that one included."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ends), tokens)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle")
    parser.add_argument("question")
    parser.add_argument("--drafter", help="one of the bundle's; none decodes plainly")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    arguments = parser.parse_args()
    # Without a profile the bundle's trees are drafted in every step, whether they pay or not.
    engine = spec_runtime.load(arguments.bundle, arguments.drafter, profile=False)
    with engine, engine.target.alone():
        prompt = engine.encode(arguments.question)
        passes = list(decode(engine, prompt, arguments.max_new_tokens))
        print("|".join(engine.tokenizer.decode(tokens) for tokens in passes))
    length = sum(map(len, passes[1:])) / max(1, len(passes) - 1)
    print(f"accepted length {length:.2f}", file=sys.stderr)


if __name__ == "__main__":
    main()
