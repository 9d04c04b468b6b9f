"""What a run's training draws from the power line, where the GPU counts it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from gpt2demo.config import WARMUP_STEPS
from gpt2demo.records import StepMetrics

# NVML renews its counter some ten to fifty times a second: what is shorter is not judged
_SHORTEST_SEC: Final = 1.0


@dataclass(kw_only=True, slots=True)
class EnergyMeter:
    """Joules and tokens from the end of warm-up to the last step, gaps between steps included.

    `read` gives the joules that the device has used so far; None = it has no counter.
    """

    read: Callable[[], float | None]
    tokens_per_step: int
    clock: Callable[[], float] = time.perf_counter
    _start: tuple[float, float] | None = field(default=None, init=False)  # seconds, joules
    _joules_per_1000_tokens: float | None = field(default=None, init=False)

    def after(self, step: StepMetrics) -> None:
        """Take note of a step; to be called right after it, before the next."""
        joules, now = self.read(), self.clock()
        if joules is None:
            self._start = None
        elif step.step == WARMUP_STEPS - 1:
            self._start = now, joules
        elif self._start and now - self._start[0] >= _SHORTEST_SEC:
            tokens = (step.step - WARMUP_STEPS + 1) * self.tokens_per_step
            self._joules_per_1000_tokens = (joules - self._start[1]) / tokens * 1000

    @property
    def joules_per_1000_tokens(self) -> float | None:
        """None = not counted, or not for a second."""
        return self._joules_per_1000_tokens
