"""What tests of tuning share: costs, the times of verify, and bundles opened anew."""

from pathlib import Path
from typing import Any

from toy_backend import ToyTarget

import spec_runtime
from spec_runtime.engine import Engine
from spec_runtime.pace.costs import Costs
from spec_runtime.pace.profile import Key

KEY = Key("0" * 64, "some cpu", 2, "int8", "parallelspec")


# a step with a tree costs 15 ms, a plain one 10: one and a half tokens break even
COSTS = Costs(((1, 9.0), (4, 13.0)), draft=1.0, level=0.0, host=1.0, plain=10.0, prefill=1.0)


def convex(n: int) -> float:
    return 10 + 0.3 * n + 0.02 * n * n


def stepped(n: int) -> float:
    return 10.0 + 4 * (-(-n // 8) - 1)


def opened_anew(graphs: list[ToyTarget], folder: Path, **options: Any) -> Engine:
    """Loads a bundle whose first graph opened is the target's, as `patch_graphs` expects."""
    graphs.clear()  # the next one is a target's
    return spec_runtime.load(folder, **options)
