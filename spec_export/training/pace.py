"""Predicts when a training run ends, from its last steps and its last validation."""

from collections import deque
from dataclasses import dataclass, field

RECENT_STEPS = 100


@dataclass
class Pace:
    """The seconds that this process's last steps and its last validation have taken."""

    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    validation_seconds: float = 0.0  # before the first one its time is not known, nor counted

    def seconds_left(
        self, num_steps: int, num_validations: int, time_left: float | None
    ) -> float | None:
        """Returns the seconds that these steps and validations will take, None before a step.

        `time_left` is the rest of the run's time, after which it validates once more; None
        means that it has no such limit. 10 steps of 2 s and 2 validations of 5 s take 30 s, or 17 s
        where 12 s are left.
        """
        if not self.step_seconds:
            return None
        by_steps = num_steps * sum(self.step_seconds) / len(self.step_seconds)
        by_steps += num_validations * self.validation_seconds
        if time_left is None:
            return by_steps
        last_validation = self.validation_seconds if num_validations else 0.0
        return min(by_steps, max(0.0, time_left) + last_validation)


def validations_left(step: int, total_steps: int, every: int) -> int:
    """Returns how many validations follow after step `step`; the last step always has one.

    With one every 3 steps, 7 steps in all have three, at 3, 6 and 7.
    """
    regular = total_steps // every - step // every
    return regular + (total_steps % every > 0 and step < total_steps)
