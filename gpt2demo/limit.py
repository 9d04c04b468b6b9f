"""Finding the largest B or T that really runs: which size to try next, and what was found."""

from dataclasses import dataclass, replace
from typing import Final

from gpt2demo.config import MAX_B, MODELS, InputError, RunConfig
from gpt2demo.fit import T_STEP, Capacity, largest
from gpt2demo.records import RunRecord

MAX_TRIES: Final = 6
TRY_STEPS: Final = 2  # AdamW's moments are born in the first, so only the second is the peak


@dataclass(kw_only=True, eq=False)
class LimitSearch:
    """The search along one axis, the other size fixed; it starts from the forecast.

    What fits, fits at every smaller size too, so each try halves what is left.
    """

    config: RunConfig
    axis: str  # "B" or "T"
    capacity: Capacity
    tries: int = 0
    message: str = ""  # what was found, once the search is over

    def __post_init__(self) -> None:
        if self.axis not in ("B", "T"):
            raise InputError("axis", "axis must be B or T.")
        self._unit = 1 if self.axis == "B" else T_STEP
        end = MAX_B if self.axis == "B" else MODELS[self.config.model].block_size
        self._most = end // self._unit
        self._passed = 0  # the largest that ran, in units
        self._failed = self._most + 1  # the smallest that did not
        self._guess = largest(self.config, self.axis, self.capacity) // self._unit
        self._hopeless = self._failed  # where the forecast is sure that nothing fits any more
        if self.capacity.total_bytes is not None:
            may_fail = largest(self.config, self.axis, self.capacity, also_may_fail=True)
            self._hopeless = may_fail // self._unit + 1

    def next_run(self) -> RunConfig | None:
        """The next try, two steps long; None when the search is over."""
        if self.message or self.tries == MAX_TRIES or self._failed - self._passed <= 1:
            self.message = self.message or self._found()
            return None
        self.tries += 1
        size = self._next_size() * self._unit
        return replace(self.config, **{self.axis: size}, steps=TRY_STEPS)

    def runs_after(self) -> None:
        """How many tries it takes, nobody knows before."""

    @property
    def doing(self) -> str:
        """What goes on, for the status line."""
        return f"Finding the largest {self.axis}, try {self.tries} of at most {MAX_TRIES}"

    def ended(self, record: RunRecord, *, out_of_time: bool = False) -> None:
        """Note how a try ended: "finished", "out of memory", or anything that ends the search."""
        unit, state = record.config[self.axis] // self._unit, record.summary.state
        if state == "finished":
            self._passed = max(self._passed, unit)
        elif state == "out of memory":
            self._failed = min(self._failed, unit)
        else:
            self.message = f"The search ended: a try was {state}. {self._found()}"

    def _next_size(self) -> int:
        if self.tries == 1:
            return max(self._guess, 1)
        upper = min(self._failed, self._hopeless)
        if upper - self._passed > 1:
            return (self._passed + upper) // 2
        return self._passed + 1  # the forecast says no: make sure

    def _found(self) -> str:
        axis, unit = self.axis, self._unit
        other = f"T={self.config.T}" if axis == "B" else f"B={self.config.B}"
        ran = f"The largest {axis} that ran at {other} is {self._passed * unit}"
        if self._failed > self._most:
            if self._passed == self._most:
                return f"{ran}: that is the slider's end."
            return f"{ran}; no larger one was tried." if self._passed else "Nothing was tried."
        failed = f"{axis}={self._failed * unit} ran out of memory"
        return f"{ran}; {failed}." if self._passed else f"No {axis} ran at {other}: {failed}."
