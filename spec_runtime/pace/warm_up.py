"""Captures, while a bundle opens, the CUDA graphs that its requests will replay."""

import logging
import time

import numpy as np

from spec_runtime.backends import DeviceBackend
from spec_runtime.engine import Engine
from spec_runtime.pace.first_use import PROMPT
from spec_runtime.pace.measured import record
from spec_runtime.trees.budget import Budget

# Prompts of each width that is captured, and answers that run each shape twice. The last answer
# goes from the first width of masks to the second.
SHORT, LONG = (8, 48, 8, 48), 224
SHORT_TOKENS, LONG_TOKENS = 3, 48

log = logging.getLogger("spec_runtime")


def capture_shapes(engine: Engine) -> None:
    """Decodes a few short answers with the engine's drafter and plainly, and says how long that
    took and how much of the GPU's memory the graphs and their buffers have.

    A context that is too short for that is left to its requests.
    """
    target, backend = engine.target, engine.target.lend()[0]
    if target.max_length < LONG + LONG_TOKENS:
        return
    assert isinstance(backend, DeviceBackend), backend
    begin, before = time.perf_counter(), backend.free_bytes
    prompts = [(np.resize(PROMPT, n) % target.vocab_size).tolist() for n in (*SHORT, LONG)]
    for budget in dict.fromkeys((engine.budget, Budget(1))):
        record(engine, budget, prompts[:-1], SHORT_TOKENS, ignore_eos=True)
        record(engine, budget, prompts[-1:], LONG_TOKENS, ignore_eos=True)
    log.info(
        "captured CUDA graphs in %.1f s, which take %.0f MB of the GPU's memory",
        time.perf_counter() - begin,
        (before - backend.free_bytes) / 1e6,
    )
