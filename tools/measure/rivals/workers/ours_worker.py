"""Decodes with specsplit's runtime: plainly, or with a drafter, with and without prompt lookup."""

import sys
import time
from pathlib import Path

import protocol

sys.path.insert(0, str(Path(__file__).parents[4]))  # the checkout that this file is of

import spec_runtime
from spec_runtime.measure import provenance


def load(settings):
    """Opens a bundle; `drafter` None is the bundle's default, `lookup` None the bundle's choice."""
    return spec_runtime.load(
        settings["model"],
        settings["drafter"],
        settings["threads"],
        lookup=settings["lookup"],
        profile=settings["profile"],
    )


def open_engine(settings):
    engine = load(settings)

    def generate(ids, max_new_tokens):
        begin = time.perf_counter()
        result = engine.generate(ids, max_new_tokens=max_new_tokens, reuse=False)
        return {
            "tokens": result.token_ids,
            "first": 1,
            "prefill_seconds": result.stats.prefill_seconds,
            "seconds": time.perf_counter() - begin,
        }

    return provenance.git_commit() or spec_runtime.__name__, generate


if __name__ == "__main__":
    protocol.serve(open_engine)
