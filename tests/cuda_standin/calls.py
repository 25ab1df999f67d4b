"""Reads the stand-in's log: what was called between two marks, and what it adds up to."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Calls:
    """The calls of one section of a log. `kernels` and `copies` are those outside of a graph,
    `captured_kernels` and `captured_copies` those that were put into one; a copy is its direction
    and its bytes, such as ("H2D", 64), and a fill counts as one of direction "fill".
    """

    kernels: list[str] = field(default_factory=list)
    captured_kernels: list[str] = field(default_factory=list)
    copies: list[tuple[str, int]] = field(default_factory=list)
    captured_copies: list[tuple[str, int]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    num_graph_launches: int = 0
    num_waits: int = 0
    device_bytes: int = 0  # allocated in this section, whatever was freed

    def add(self, line: str) -> None:
        """Counts one line of the log."""
        kind, _, rest = line.partition(" ")
        if kind in ("kernel", "copy", "fill"):
            where, _, what = rest.partition(" ")
            is_captured = where == "captured"
            if kind == "kernel":
                (self.captured_kernels if is_captured else self.kernels).append(what)
            else:
                direction, num_bytes = (
                    f"fill {what}".split()[-2:] if kind == "fill" else what.split()[:2]
                )
                copies = self.captured_copies if is_captured else self.copies
                copies.append((direction, int(num_bytes)))
                self.num_waits += what.endswith("waiting")
        elif kind == "violation":
            self.violations.append(rest)
        elif kind == "wait":
            self.num_waits += 1
        elif line.startswith("graph launch"):
            self.num_graph_launches += 1
        elif line.startswith("allocate device"):
            self.device_bytes += int(rest.split()[1])


def read_calls(log: Path) -> dict[str, Calls]:
    """Returns the sections of a log by the texts of the marks that begin them; "" is what comes
    before the first. Marks of equal text are one section."""
    sections = {"": Calls()}
    section = sections[""]
    for line in log.read_text().splitlines():
        if line.startswith("mark "):
            section = sections.setdefault(line.removeprefix("mark "), Calls())
        else:
            section.add(line)
    return sections
