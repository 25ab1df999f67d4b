"""Answers jobs on standard input, in JSON Lines: what every worker in Python shares.

A worker is started with its settings as one JSON object. It opens its model, prints
{"version": …} and then answers each line, a load in which each of `clients` takes the next prompt
when its last answer is finished,

    {"prompts": [[1, 2, 3], …], "clients": 4, "max_new_tokens": 64}

with one line: the answers in the order of the prompts, in seconds since the load began. `parts` are
when new tokens came, and how many at once: the first come with the prompt's own pass.

    {"seconds": 3.2, "answers": [{"sent": 0.0, "parts": [[0.1, 1], …], "tokens": [7, 8, …]}, …]}

With the setting `may_end` an answer ends with the text, else it has `max_new_tokens`. A failure is
a line {"error": …}.

This file runs in the environments of others: it imports nothing but Python's own modules.
"""

import json
import os
import sys
import time
import traceback


class Load:
    """Times the answers of one load: `take` gives the next prompt to a client that is free."""

    def __init__(self, prompts):
        self.begin = time.perf_counter()
        self.answers = []
        self._left = iter(prompts)

    def take(self):
        """Returns the answer to be filled by `add`, and its prompt's ids; None if none is left."""
        ids = next(self._left, None)
        if ids is None:
            return None
        answer = {"sent": self._now(), "parts": [], "tokens": []}
        self.answers.append(answer)
        return answer, ids

    def add(self, answer, tokens):
        """Takes the time of new tokens."""
        if tokens:
            answer["parts"].append((self._now(), len(tokens)))
            answer["tokens"] += map(int, tokens)

    def reply(self):
        """Returns the reply to a load whose last token is just there."""
        return {"seconds": self._now(), "answers": self.answers}

    def _now(self):
        return round(time.perf_counter() - self.begin, 5)


def serve(open_engine):
    """Opens an engine with the settings of the command line and answers jobs until there are none.

    `open_engine(settings)` returns the engine's version and a function of a load's values, which
    returns what `Load.reply` does.
    """
    # What libraries print goes to standard error, so that the lines of replies stay whole.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(content):
        print(json.dumps(content), file=replies, flush=True)

    try:
        version, answer = open_engine(json.loads(sys.argv[1]))
        reply({"version": version})
        for line in sys.stdin:
            reply(answer(**json.loads(line)))
    except Exception as error:
        traceback.print_exc()
        reply({"error": f"{type(error).__name__}: {error}"})
