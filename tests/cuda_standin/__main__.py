"""Prints the stand-in's environment for a shell; README.md shows how to use it."""

import os
import shlex
import sys
from pathlib import Path

from . import StandIn, UnavailableError


def main() -> None:
    log = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else None
    try:
        environment = StandIn.build().environment(log)
    except UnavailableError as error:
        sys.exit(f"error: {error}")
    for name, value in environment.items():
        if os.environ.get(name) != value:
            print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
