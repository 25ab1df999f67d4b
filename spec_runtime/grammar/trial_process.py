"""Compiles grammars in a process of its own, which its parent ends if one takes too long.

It is run by its path, so that it starts without this package. Each line of its standard input is a
JSON value: the first one describes the tokenizer and the limit of memory, the others are grammars,
each with its probes. It prints a line once the tokenizer is open, and one after each grammar: what
is wrong with it, or null. Whether it is valid the parent sees itself, since it compiles every
grammar again that ended here. The process ends with its input, so that it does not outlive its
parent, even in a compilation.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

# Less than a thread of the parent has, in which the same grammar must not overflow the stack.
STACK_BYTES = 4 << 20
NICENESS = 10  # the parent's own threads go first
# Of the text that is written to try a grammar: its tokens, and the seconds after which it ends.
MAX_TOKENS, MAX_SECONDS = 24, 0.2


def main() -> None:
    """Hands the lines of the input to the thread that compiles, and ends with them."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to whole groups; the parent decides
        signal.signal(number, signal.SIG_IGN)
    if sys.platform != "win32":
        os.nice(NICENESS)
    opening = json.loads(sys.stdin.readline())
    sys.path[:] = opening["path"]
    grammars: SimpleQueue[tuple[str, list[str]]] = SimpleQueue()
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=compile_all, args=(opening, grammars), daemon=True).start()
    for line in sys.stdin:
        grammars.put(json.loads(line))
    os._exit(0)


def compile_all(opening: dict[str, Any], grammars: SimpleQueue[tuple[str, list[str]]]) -> None:
    """Compiles one grammar after the other; whatever goes wrong ends the process."""
    try:
        import llguidance

        tokenizer = llguidance.LLTokenizer(
            opening["definition"], n_vocab=opening["vocab_size"], eos_token=opening["eos"]
        )
        limit_memory(opening["max_bytes"])
        print(flush=True)
        while True:
            print(json.dumps(fault(llguidance, tokenizer, *grammars.get())), flush=True)
    finally:
        os._exit(1)


def fault(library: Any, tokenizer: Any, grammar: str, probes: Sequence[str]) -> str | None:
    """Returns why a grammar cannot be followed to its end, None if it can or is not valid.

    Writes some tokens of it: the first ones meet most of what is too much for the library, which
    compiles as it goes. A probe is a JSON schema of an object of which '{"' has to be a beginning;
    the library finds out in mid-answer that the patterns of names leave none.
    """
    matcher = library.LLMatcher(tokenizer, grammar, log_level=0)
    try:
        matcher.compute_bitmask()
        if matcher.is_error():
            return None
        for probe in probes:
            compiled = library.LLMatcher.grammar_from_json_schema(probe)
            other = library.LLMatcher(library.LLTokenizer("byte"), compiled, log_level=0)
            if not other.is_error() and other.try_consume_tokens(list(b'{"')) != 2:
                return "patternProperties leaves no names but those of properties"
        _write(matcher)
    except ValueError:  # of a grammar that is not valid
        return None
    if not matcher.is_error():
        return None
    reason, _, _ = matcher.get_error().strip().partition("\n")
    return f"it cannot be followed: {reason}"


def _write(matcher: Any) -> None:
    """Reads tokens that a matcher allows, the same ones each time; begins anew after the last."""
    draw = random.Random(0)
    until = time.thread_time() + MAX_SECONDS
    for number in range(MAX_TOKENS):
        mask = matcher.compute_bitmask()
        matcher.compute_ff_tokens()
        if matcher.is_error() or (number > 1 and time.thread_time() > until):
            return
        begin = draw.randrange(len(mask))
        after = mask[begin:].lstrip(b"\0")
        at = len(mask) - len(after) if after else len(mask) - len(mask.lstrip(b"\0"))
        bits = [bit for bit in range(8) if at < len(mask) and mask[at] >> bit & 1]
        if not bits or matcher.try_consume_tokens([8 * at + draw.choice(bits)]) != 1:
            return
        if matcher.is_stopped() and not matcher.reset():
            return


def limit_memory(more: int) -> None:
    """Lets the process take `more` bytes than it has now, where the system can tell and hold it to
    that; lets a crash write no core file."""
    if sys.platform == "linux":
        import resource

        with open("/proc/self/statm") as file:
            data = int(file.read().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (data + more, data + more))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
