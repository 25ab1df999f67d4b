"""Answers jobs on standard input, in JSON Lines: what every worker in Python shares.

A worker is started with its settings as one JSON object. It opens its model, prints
{"version": …} and then answers each line

    {"ids": [1, 2, 3], "max_new_tokens": 64}

with one line, whose seconds begin with the prompt's ids and end with the last new token:

    {"tokens": [7, 8, …], "first": 1, "prefill_seconds": 0.1, "seconds": 0.9}

`first` tokens came with the prompt's own pass, which took `prefill_seconds` of all `seconds`:
speculative decoders may accept several at once. A failure is a line {"error": …}. This file runs
in the environments of others: it imports nothing but Python's own modules.
"""

import json
import os
import sys
import time
import traceback


class Watch:
    """Times one job: call `tick` with the number of new tokens whenever there are some."""

    def __init__(self):
        self.begin = time.perf_counter()
        self.first = None
        self.prefill_seconds = 0.0

    def tick(self, num_tokens):
        """Takes the time of the first call, which must have all tokens that came at once."""
        if self.first is None:
            self.prefill_seconds = time.perf_counter() - self.begin
            self.first = num_tokens

    def reply(self, tokens):
        """Returns the answer to a job whose last token is just there."""
        return {
            "tokens": [int(token) for token in tokens],
            "first": self.first or 0,
            "prefill_seconds": self.prefill_seconds,
            "seconds": time.perf_counter() - self.begin,
        }


def serve(open_engine):
    """Opens an engine with the settings of the command line and answers jobs until there are none.

    `open_engine(settings)` returns the engine's version and a function of a prompt's ids and of
    the number of new tokens, which returns what `Watch.reply` does.
    """
    # What libraries print goes to standard error, so that the lines of replies stay whole.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(content):
        print(json.dumps(content), file=replies, flush=True)

    try:
        version, generate = open_engine(json.loads(sys.argv[1]))
        reply({"version": version})
        for line in sys.stdin:
            job = json.loads(line)
            reply(generate(job["ids"], job["max_new_tokens"]))
    except Exception as error:
        traceback.print_exc()
        reply({"error": f"{type(error).__name__}: {error}"})
