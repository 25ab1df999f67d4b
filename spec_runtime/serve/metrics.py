"""Counts what a server does, for Prometheus.

With several worker processes, each writes its counts to files that prometheus_client sums up.
"""

import os
import threading
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from spec_runtime import GenerationResult
from spec_runtime.batch.batch import Pass
from spec_runtime.loop.stats import PHASES

SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client reads this when it is imported
LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
STEPS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1, 2)
RATES = (1, 2, 5, 10, 20, 40, 60, 80, 100, 150, 200, 300, 400, 600, 1000, 2000)
ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
LENGTHS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12)


class Metrics:
    """Holds the metrics of one server process."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._noted: WeakKeyDictionary[object, tuple[int, int, int]] = WeakKeyDictionary()
        self._lock = threading.Lock()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"specsplit_{name}", about, labels, registry=registry)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"specsplit_{name}", about, buckets=buckets, registry=registry)

        def gauge(name: str, about: str) -> Gauge:
            name = f"specsplit_{name}"
            return Gauge(name, about, registry=registry, multiprocess_mode="livesum")

        self.requests = counter("requests", "Requests by address and status.", "path", "status")
        self.request_seconds = histogram("request_seconds", "From request to end.", LATENCIES)
        self.waiting = gauge("waiting_requests", "Requests that wait for the engine.")
        self.running = gauge("running_requests", "Requests that the engine answers.")
        self.streams = gauge("open_streams", "Streams that are being sent.")
        self.open_models = gauge("open_models", "Bundles that are open.")
        self._answers = counter("answers", "Answers by how they ended.", "finish_reason")
        self._tokens = counter("tokens", "Tokens by kind.", "kind")
        self._steps = counter("steps", "Verify passes of the target.")
        self._trials = counter("draft_trials", "Guesses that were judged, by depth.", "depth")
        self._accepts = counter("draft_accepts", "Guesses that were accepted, by depth.", "depth")
        self._phases = counter("phase_seconds", "Seconds of the engine by phase.", "phase")
        self._queue = histogram("queue_seconds", "Wait for the engine.", LATENCIES)
        self._first = histogram("first_token_seconds", "From request to first token.", LATENCIES)
        self._prefill = histogram("prefill_seconds", "Time to read the prompt.", LATENCIES)
        self._step = histogram("step_seconds", "From one step's text to the next's.", STEPS)
        self._opened = counter("openings", "Bundles opened for a request, by model.", "model")
        self._opening = counter("opening_seconds", "Time that it took, by model.", "model")
        self._lanes = counter("passes", "Passes of the target by lanes that shared them.", "lanes")
        self._nodes = counter("nodes", "Drafted nodes by lanes and what they got.", "lanes", "got")
        self._rows = histogram("pass_rows", "Rows of a pass, prompts' among them.", ROWS)
        self._pass = histogram("pass_seconds", "Time that a pass took.", STEPS)
        self._rate = histogram("tokens_per_second", "Decoding speed of answers.", RATES)
        self._length = histogram("accepted_length", "Tokens a verify pass, of answers.", LENGTHS)

    def scrape(self) -> bytes:
        """Returns all metrics in Prometheus' text format, summed over the worker processes."""
        if os.environ.get(SHARED_FOLDER):
            whole = CollectorRegistry()
            MultiProcessCollector(whole)
            return bytes(generate_latest(whole))
        return bytes(generate_latest(self._registry))

    def note(self, owner: object, running: int, waiting: int, streams: int) -> None:
        """Takes what one service answers now, from any thread; the gauges show the sums of all."""
        with self._lock:
            self._noted[owner] = (running, waiting, streams)
            sums = map(sum, zip(*self._noted.values(), strict=True))
            for gauge, total in zip((self.running, self.waiting, self.streams), sums, strict=True):
                gauge.set(total)

    def count_opening(self, model: str, seconds: float) -> None:
        """Counts a bundle that was opened because a request asked for it."""
        self._opened.labels(model).inc()
        self._opening.labels(model).inc(seconds)

    def count_chunk(self, seconds: float, is_first: bool) -> None:
        """Counts a chunk that came `seconds` after the one before, or after the request."""
        (self._first if is_first else self._step).observe(seconds)

    def count_pass(self, ran: Pass) -> None:
        """Counts a pass that lanes shared, or one lane's by itself."""
        self._lanes.labels(ran.lanes).inc()
        self._rows.observe(ran.rows)
        self._pass.observe(ran.seconds)
        for got, number in (("drafted", ran.drafted), ("granted", ran.granted)):
            self._nodes.labels(ran.lanes, got).inc(number)

    def count_end(self, reason: str) -> None:
        """Counts the end of a generation: its finish reason, also where there is no result."""
        self._answers.labels(reason).inc()

    def count_answer(self, result: GenerationResult, first_seconds: float) -> None:
        """Counts a finished generation, whose first token came after `first_seconds`."""
        stats = result.stats
        self.count_end(result.finish_reason)
        accepted = sum(stats.depth_accepts)
        for kind, number in (
            ("prompt", stats.prompt_tokens),
            ("reused", stats.reused_tokens),
            ("completion", len(result.token_ids)),
            ("drafted", stats.drafted_tokens),
            ("accepted", accepted),
        ):
            self._tokens.labels(kind).inc(number)
        for depth, trials in enumerate(stats.depth_trials, 1):
            self._trials.labels(depth).inc(trials)
            self._accepts.labels(depth).inc(stats.depth_accepts[depth - 1])
        for phase in PHASES:
            self._phases.labels(phase).inc(stats.timings[phase])
        self._queue.observe(max(0.0, first_seconds - stats.prefill_seconds))
        self._prefill.observe(stats.prefill_seconds)
        if stats.steps:
            self._steps.inc(stats.steps)
            self._length.observe(stats.accepted_length)
            self._rate.observe(stats.tokens_per_second)
