"""What runs that belong together share: the form of a series, how its runs end, and ratios."""

from collections.abc import Sequence
from typing import Final, Protocol

from gpt2demo.config import WARMUP_STEPS, InputError, RunConfig
from gpt2demo.records import RunRecord, Timing

MIN_STEPS_FOR_SPREAD: Final = 3  # measured ones, where the spread comes from the steps
FAILED: Final = ("out of memory", "diverged", "error")  # would end the same way again
GIVEN_UP: Final = ("stopped", "interrupted")  # somebody wants no more of it


class Series(Protocol):
    """Several runs that belong together and follow each other, as a search for the limit does."""

    config: RunConfig  # what its runs have in common
    message: str  # what came of it; "" while it goes on

    @property
    def doing(self) -> str:
        """What goes on, for the status line."""
        ...

    def next_run(self) -> RunConfig | None:
        """The next run; None when it is over."""
        ...

    def runs_after(self) -> Sequence[RunConfig] | None:
        """The runs after the one given out last, as things stand; None = that cannot be told."""
        ...

    def ended(self, record: RunRecord, *, out_of_time: bool = False) -> None:
        """One of its runs is over; `out_of_time`: the server's limit of seconds stopped it."""
        ...


class Measured(Series, Protocol):
    """A series whose runs are held against each other; its results grow from run to run."""

    @property
    def runs_done(self) -> int:
        """Runs that have ended."""
        ...


def check_measurable(config: RunConfig, where: str) -> None:
    """Refuse runs that would be nothing but warm-up.

    Args:
        config: what the series' runs have in common.
        where: "in a race", for the sentence.

    Raises:
        InputError: naming steps.
    """
    if config.steps <= WARMUP_STEPS:
        raise InputError(
            "steps",
            f"steps must be at least {WARMUP_STEPS + 1} {where}, not {config.steps}: "
            f"the first {WARMUP_STEPS} are warm-up.",
        )


def speedup_between_quartiles(base: Timing, this: Timing) -> tuple[float, float] | None:
    """Where base's step time over this one's lies: base's p25 over this p75, and p75 over p25.

    None where either has too few measured steps for quartiles. Both above 1 = the middle halves of
    the steps do not overlap.
    """
    if min(base.steps_measured, this.steps_measured) < MIN_STEPS_FOR_SPREAD:
        return None
    return base.step_ms_p25 / this.step_ms_p75, base.step_ms_p75 / this.step_ms_p25
