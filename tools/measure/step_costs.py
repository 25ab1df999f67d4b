"""Measures what a pass of the target costs on this CPU: by precision, context and nodes.

    python -m tools.measure.step_costs --bundles DIR --operators --json steps.json

DIR/fp32, DIR/int8 and DIR/int4 are bundles. A context is a number of committed tokens, and a
pass verifies a chain of nodes after it. In every repeat each size has its turn; a repeat's time
is the median of its runs. Prints the median of the repeats, their range, and how much longer a pass
is than one over a single node of the same context, and of the first context.

`--operators` adds, for one and for eight nodes, which kinds of operators the time goes to. That is
measured apart, under ONNX Runtime's profiler, which slows short operators down: its times say what
matters, and not what a pass costs.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import spec_runtime
from spec_runtime.backends.session import ort
from spec_runtime.errors import UserError
from spec_runtime.files.machine import default_threads
from spec_runtime.loop.target import Target
from spec_runtime.trees.tree import TokenTree
from tools.docs.render import shown
from tools.figures import command_line, parse, run, spread, write

NOTE = "random tokens; not recorded: prompts, bundle"
PROFILED_NODES = (1, 8)
FEW = 0.02  # an operator with a smaller share of a profile is counted among the others


def main(words: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, "--threads", "--json")
    parser.add_argument("--bundles", type=Path, required=True)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "int8", "int4"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[200, 1500])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 8, 12, 16])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--operators", action="store_true")
    arguments = parse(parser, words)
    figures: dict[str, Any] = {"threads": arguments.threads or default_threads()}
    figures |= {"repeats": arguments.repeats, "runs": arguments.runs, "passes": {}, "operators": {}}
    for precision in arguments.precisions:
        folder = arguments.bundles / precision
        figures["passes"][precision] = measured(folder, arguments)
        print(f"{precision}\n{shown('steps', figures['passes'][precision])}", flush=True)
        if arguments.operators:
            figures["operators"][precision] = [
                profiled(folder, context, nodes, arguments.threads, arguments.runs)
                for context in arguments.contexts
                for nodes in PROFILED_NODES
            ]
    write(arguments.json, figures, threads=arguments.threads, note=NOTE)


def measured(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each context and number of nodes, times in milliseconds."""
    target = spec_runtime.load(
        folder, drafter="none", threads=arguments.threads, profile=False
    ).target
    require_context(folder, target, arguments.contexts)
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    for _ in range(arguments.repeats):
        for context in arguments.contexts:
            with holding(target, context):
                for nodes in arguments.nodes:
                    times[context, nodes].append(pass_ms(target, nodes, arguments.runs))
    first = statistics.median(times[arguments.contexts[0], arguments.nodes[0]])
    rows = []
    for (context, nodes), found in times.items():
        median = statistics.median(found)
        rows.append(
            {
                "context": context,
                "nodes": nodes,
                "ms": spread(found),
                "over_one_node": median / statistics.median(times[context, arguments.nodes[0]]),
                "over_first": median / first,
            }
        )
    return rows


def require_context(folder: Path, target: Target, contexts: Sequence[int]) -> None:
    """Raises UserError unless the bundle has room for the contexts."""
    if not 0 < min(contexts) <= max(contexts) < target.max_length:
        raise UserError(
            f"got contexts {', '.join(map(str, contexts))}, expected 1 to {target.max_length - 1}, "
            f"which {folder} has room for"
        )


@contextmanager
def holding(target: Target, context: int) -> Iterator[None]:
    """Has this many committed tokens in the target while the block runs."""
    tokens = np.random.default_rng(context).integers(0, target.vocab_size, context)
    with target.alone():
        target.prefill(tokens.tolist())
        yield


def pass_ms(target: Target, nodes: int, runs: int) -> float:
    """Returns the median time of a pass over this many nodes, none of which is committed."""
    tree = TokenTree.chain(list(range(nodes)))
    return 1000 * median_s(lambda: target.verify(tree), runs)


def median_s(run: Callable[[], object], runs: int) -> float:
    """Returns the median time of a run in seconds, after three to warm up."""
    seconds = []
    for _ in range(3 + runs):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[3:])


def profiled(
    folder: Path, context: int, nodes: int, threads: int | None, runs: int
) -> dict[str, Any]:
    """Returns the milliseconds of a pass by kind of operator, under the profiler."""
    with tempfile.TemporaryDirectory() as scratch, profiling(Path(scratch)) as sessions:
        target = spec_runtime.load(folder, drafter="none", threads=threads, profile=False).target
        with holding(target, context):
            pass_ms(target, nodes, runs)
        events = [
            event
            for session in sessions
            for event in json.loads(Path(session.end_profiling()).read_text())
        ]
    # Of the prompt's passes and others before them, no event is counted.
    runs_seen = [each for each in events if each["name"] == "model_run"][-runs:]
    totals: dict[str, float] = defaultdict(float)
    for each in events:
        if each["name"].endswith("_kernel_time") and each["ts"] >= runs_seen[0]["ts"]:
            totals[each["args"]["op_name"]] += each["dur"] / 1000 / len(runs_seen)
    whole = sum(totals.values())
    by_time = sorted(totals.items(), key=lambda item: -item[1])
    largest = {name: ms for name, ms in by_time if ms >= FEW * whole}
    largest["others"] = whole - sum(largest.values())
    return {"context": context, "nodes": nodes, "ms": largest}


@contextmanager
def profiling(folder: Path) -> Iterator[list[Any]]:
    """Lets sessions that open in the block be profiled; gives them."""
    sessions: list[Any] = []
    open_session = ort.InferenceSession

    def open_profiled(model: Any, options: Any = None, *others: Any, **more: Any) -> Any:
        if options is None:  # a trial of ONNX Runtime's own, not a graph of the bundle
            return open_session(model, *others, **more)
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profile")
        sessions.append(open_session(model, options, *others, **more))
        return sessions[-1]

    ort.InferenceSession = open_profiled
    try:
        yield sessions
    finally:
        ort.InferenceSession = open_session


if __name__ == "__main__":
    run(main)
