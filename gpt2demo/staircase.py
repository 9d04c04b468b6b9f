"""The lesson's staircase: seven ordinary runs, each one change faster than the one before it."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gpt2demo.config import RunConfig
from gpt2demo.lesson import FIRST, RUNGS, Rung
from gpt2demo.records import RunRecord, Timing, timing
from gpt2demo.series import GIVEN_UP, check_measurable, speedup_between_quartiles
from gpt2demo.support import Support

WHERE: Final = "on the staircase"
_START: Final = {  # what the first rung runs with, whatever the controls say
    "precision": "fp32",
    "attention": "manual",
    "optimizer": "default",
    "compile": False,
    "vocab_size": 50257,
}
MARKS: Final = ("no effect", "emulated", "not available", "not compiled")


@dataclass(frozen=True, kw_only=True, slots=True)
class RungResult:
    """One rung so far. None = not measured, or unknown."""

    rung: str  # its id
    name: str
    state: str  # "waiting", "not run", "not available", or one of records.STATES
    mark: str | None  # one of MARKS: why the rung is not the lesson's; None = it is
    reason: str  # what the device or the compiler says of the mark; "" = nothing
    message: str  # the run's own sentence
    config: dict[str, Any] | None  # the settings that ran
    steps_done: int
    steps_measured: int
    step_ms_median: float | None
    step_ms_p25: float | None
    step_ms_p75: float | None
    tokens_per_sec_median: float | None
    before: str | None  # the id of the last rung measured before this one
    saved_ms: float | None  # against `before`; below zero = slower
    speedup_before: float | None  # its step time over this one's; 2.0 = twice as fast
    speedup_before_low: float | None  # see series.speedup_between_quartiles
    speedup_before_high: float | None
    speedup_first: float | None  # against fp32
    compile_seconds: float | None
    peak_memory_bytes: int | None
    mfu: float | None
    lesson_ms: float
    lesson_speedup_before: float | None  # None for the first
    lesson_speedup_first: float


@dataclass(eq=False)
class Staircase:
    """The lesson's ladder as ordinary runs, each with the changes of the rungs before it.

    A rung without effect here is run and measured like any other. A change that the device lacks,
    that failed, that ran into the server's limit of seconds, or that torch could not compile is in
    no later rung; one that ran out of memory or diverged is, because what comes after it may mend
    that. A person's stop ends the staircase; what is measured stays.

    Args:
        config: model, B, T, steps, seed, learning rate, text, device and memory; the rungs set
            precision, attention, optimizer, compile and vocabulary themselves.
        support: of the device (`DeviceInfo.support`).

    Raises:
        InputError: so few steps that all are warm-up.
    """

    config: RunConfig
    support: Mapping[str, Support]
    message: str = field(default="", init=False)  # what was found, once it is over

    def __post_init__(self) -> None:
        check_measurable(self.config, WHERE)
        self.config = replace(self.config, **_START)
        self._line = deque(RUNGS)
        self._rung: Rung | None = None  # the one whose run was given out last
        self._climbed: dict[str, Any] = {}  # the changes that later rungs keep
        self._records: dict[str, RunRecord] = {}
        self._left_out: set[str] = set()  # rungs whose change no later rung has
        self._ended_early = ""

    @property
    def runs_done(self) -> int:
        """Runs that have ended."""
        return len(self._records)

    @property
    def doing(self) -> str:
        """What goes on, for the status line."""
        rung = self._rung or FIRST
        return f"Staircase: {rung.name}, rung {RUNGS.index(rung) + 1} of {len(RUNGS)}"

    def next_run(self) -> RunConfig | None:
        """The next rung's run; None when all are over, and then `message` says what was found."""
        while self._line and not self.message:
            rung = self._line.popleft()
            if self._status(rung) == "not available":
                self._left_out.add(rung.id)
                continue
            self._rung = rung
            return replace(self.config, **self._climbed | rung.change)
        self.message = self.message or self._found()
        return None

    def runs_after(self) -> list[RunConfig]:
        """The rungs still to be given out, if none from here on fails."""
        climbed, runs = self._climbed | (self._rung.change if self._rung else {}), []
        for rung in self._line:
            if self._status(rung) != "not available":
                climbed |= rung.change
                runs.append(replace(self.config, **climbed))
        return runs

    def ended(self, record: RunRecord, *, out_of_time: bool = False) -> None:
        """Take the run that `next_run` gave out last, however it ended.

        Args:
            record: the run.
            out_of_time: the server's limit of seconds stopped it, and not a person.

        Raises:
            ValueError: no run was given out.
        """
        rung = self._rung
        if rung is None or rung.id in self._records:
            raise ValueError("no run was given out")
        self._records[rung.id] = record
        state = record.summary.state
        no_compiler = "compile" in rung.change and _not_compiled(record)
        if state in GIVEN_UP and not out_of_time:
            self._line.clear()
            self._ended_early = f"The staircase ended: the rung {rung.name} was {state}."
        if state == "error" or out_of_time or no_compiler:
            self._left_out.add(rung.id)
        else:
            self._climbed |= rung.change

    def left_out(self, rung_id: str) -> bool:
        """Whether the rungs after this one run without its change."""
        return rung_id in self._left_out

    def results(self) -> list[RungResult]:
        """What is known so far, a result a rung, in their order."""
        records = dict(self._records)  # a copy: pages ask while the runs' thread adds to it
        times = {rung: timing(record.steps) for rung, record in records.items()}
        found: list[RungResult] = []
        before: str | None = None  # the last rung measured
        for index, rung in enumerate(RUNGS):
            found.append(self._result(index, records.get(rung.id), times, before))
            if found[-1].step_ms_median is not None:
                before = rung.id
        return found

    def _status(self, rung: Rung) -> str:
        """What the device makes of the rung's precision: one of support.STATUSES."""
        precision = rung.change.get("precision")
        return self.support[precision].status if precision else "native"

    def _result(
        self, index: int, record: RunRecord | None, times: Mapping[str, Timing], before: str | None
    ) -> RungResult:
        rung = RUNGS[index]
        measured = times.get(rung.id, Timing(steps_measured=0))
        ms, status = measured.step_ms_median, self._status(rung)
        mark, reason = None, ""
        if status != "native":
            mark, reason = status, self.support[rung.change["precision"]].reason
        if record and _not_compiled(record):
            mark = "not compiled"
            reason = " ".join(n for n in record.summary.notes if n.startswith("torch.compile"))
        state, summary = "not run" if self.message else "waiting", None
        if record:
            state, summary = record.summary.state, record.summary
        elif mark == "not available":
            state = mark
        base = times[before] if before and ms is not None else None
        first = times[FIRST.id].step_ms_median if FIRST.id in times else None
        between = speedup_between_quartiles(base, measured) if base else None
        low, high = between or (None, None)
        return RungResult(
            rung=rung.id,
            name=rung.name,
            state=state,
            mark=mark,
            reason=reason,
            message=summary.message if summary else "",
            config=record.config if record else None,
            steps_done=len(record.steps) if record else 0,
            steps_measured=measured.steps_measured,
            step_ms_median=ms,
            step_ms_p25=measured.step_ms_p25,
            step_ms_p75=measured.step_ms_p75,
            tokens_per_sec_median=measured.tokens_per_sec_median,
            before=before if base else None,
            saved_ms=base.step_ms_median - ms if base else None,
            speedup_before=base.step_ms_median / ms if base else None,
            speedup_before_low=low,
            speedup_before_high=high,
            speedup_first=first / ms if first and ms else None,
            compile_seconds=summary.compile_seconds if summary else None,
            peak_memory_bytes=summary.peak_memory_bytes if summary else None,
            mfu=summary.mfu if summary else None,
            lesson_ms=rung.lesson_ms,
            lesson_speedup_before=RUNGS[index - 1].lesson_ms / rung.lesson_ms if index else None,
            lesson_speedup_first=FIRST.lesson_ms / rung.lesson_ms,
        )

    def _found(self) -> str:
        over = self._ended_early or "The staircase is over."
        without = [rung.name.removeprefix("+ ") for rung in RUNGS if rung.id in self._left_out]
        if without:
            over += f" The later rungs ran without {' and '.join(without)}."
        measured = [result for result in self.results() if result.step_ms_median is not None]
        if not measured:
            return f"{over} No step was measured."
        first, last = measured[0], measured[-1]
        start = f"{over} {first.name}: {first.step_ms_median:,.1f} ms a step"
        if first is last:
            return f"{start}."
        ratio = first.step_ms_median / last.step_ms_median
        return (
            f"{start}; {last.name}: {last.step_ms_median:,.1f} ms, {ratio:.2f}x as fast. "
            f"On the lesson's A100 it was {first.lesson_ms / last.lesson_ms:.1f}x."
        )


def _not_compiled(record: RunRecord) -> bool:
    """The run asked for torch.compile, and went on without it."""
    return bool(record.config["compile"]) and record.summary.compiled is False
