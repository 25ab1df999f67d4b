"""Compiles grammars in a process of its own, which its parent ends if one takes too long.

It is run by its path, so that it starts without this package. Each line of its standard input is a
JSON value: the first one describes the tokenizer and the limit of memory, the others are grammars.
It prints a line once the tokenizer is open, and one after each grammar, whether that is valid or
not: the parent looks into this itself, since it compiles every grammar again that ended here. The
process ends with its input, so that it does not outlive its parent, even in a compilation.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

# Less than a thread of the parent has, in which the same grammar must not overflow the stack.
STACK_BYTES = 4 << 20
NICENESS = 5  # the parent's own threads go first


def main() -> None:
    """Hands the lines of the input to the thread that compiles, and ends with them."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to whole groups; the parent decides
        signal.signal(number, signal.SIG_IGN)
    opening = json.loads(sys.stdin.readline())
    sys.path[:] = opening["path"]
    grammars: SimpleQueue[str] = SimpleQueue()
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=compile_all, args=(opening, grammars), daemon=True).start()
    for line in sys.stdin:
        grammars.put(json.loads(line))
    os._exit(0)


def compile_all(opening: dict[str, Any], grammars: SimpleQueue[str]) -> None:
    """Compiles one grammar after the other; whatever goes wrong ends the process."""
    try:
        import llguidance

        tokenizer = llguidance.LLTokenizer(
            opening["definition"], n_vocab=opening["vocab_size"], eos_token=opening["eos"]
        )
        limit_memory(opening["max_bytes"])
        while True:
            print(flush=True)
            matcher = llguidance.LLMatcher(tokenizer, grammars.get(), log_level=0)
            with suppress(ValueError):  # of a grammar that is not valid
                matcher.compute_bitmask()
                matcher.compute_ff_tokens()
            del matcher
    finally:
        os._exit(1)


def limit_memory(more: int) -> None:
    """Lets the process take `more` bytes than it has now, where the system can tell and hold it to
    that; lets its threads wait for others, and a crash write no core file."""
    if sys.platform == "linux":
        import resource

        with open("/proc/self/statm") as file:
            data = int(file.read().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (data + more, data + more))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(NICENESS)


if __name__ == "__main__":
    main()
