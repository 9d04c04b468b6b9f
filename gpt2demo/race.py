"""Several precisions as one fair race of ordinary runs: which run is next, and what they show."""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gpt2demo.config import PRECISIONS, InputError, RunConfig, shown
from gpt2demo.flops import mfu
from gpt2demo.records import RunRecord, Timing, timing
from gpt2demo.series import FAILED, GIVEN_UP, check_measurable, speedup_between_quartiles
from gpt2demo.support import Support

MAX_ROUNDS: Final = 20
MIN_ROUNDS_FOR_SPREAD: Final = 3
BASELINE: Final = "fp32"


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionResult:
    """One precision in a race so far. None = not measured, or unknown.

    Medians and quartiles are over the measured steps of all its runs, warm-up left out. With rounds
    the speed-up is the median of the rounds' own ratios, so it need not be the ratio of these.
    """

    precision: str
    state: str  # "waiting" before its first run ended, "not available", or one of records.STATES
    message: str  # the last run's own sentence
    steps_done: int
    steps_measured: int
    step_ms_median: float | None
    step_ms_p25: float | None
    step_ms_p75: float | None
    tokens_per_sec_median: float | None
    speedup: float | None  # fp32's time over this one's; 2.0 = twice as fast
    speedup_low: float | None
    speedup_high: float | None
    # where low and high come from: "rounds" (see `_interval`), or "quartiles" (fp32's p25 over this
    # p75, fp32's p75 over this p25)
    spread: str | None
    mfu: float | None  # against the peak of this very precision, 1.0 = the peak
    peak_memory_bytes: int | None  # the most of all its runs
    max_loss_difference: float | None  # nats: the largest |loss - fp32's loss| of a common step
    skipped_steps: int  # by the gradient scaler, of all its runs
    joules_per_1000_tokens: float | None
    round_ms_medians: tuple[float | None, ...]  # a round each; None = that run measured nothing


@dataclass(eq=False)
class Race:
    """Ordinary runs that differ in nothing but their precision, one after the other.

    Every round runs every precision once, `config.steps` steps each, from the same seed and so with
    the same weights and batches. The order turns from round to round and every other round goes
    backwards: over an even number of rounds each precision runs as often before any other as after
    it, so a machine that warms up or gets busy favours none.

    A precision that ran out of memory, diverged or failed is not tried again; a run that was
    stopped ends the race.

    Args:
        config: all settings but the precision.
        precisions: ids in the order of the results. Without fp32 no speed-up is known.
        rounds: how often each runs; 1 = one run each.

    Raises:
        InputError: an unknown precision, one named twice, none, rounds outside 1..20, or so few
            steps that all are warm-up.
    """

    config: RunConfig
    precisions: Sequence[str]
    rounds: int = 1
    message: str = field(default="", init=False)  # what was found, once the race is over

    def __post_init__(self) -> None:
        self.precisions = _checked_precisions(self.precisions)
        self.rounds = _checked_rounds(self.rounds)
        check_measurable(self.config, "in a race")
        self._line = deque(
            (number, precision) for number in range(self.rounds) for precision in self.order(number)
        )
        self._round: dict[str, int] = {}  # precision -> the round of its last run
        self._records: dict[str, dict[int, RunRecord]] = {p: {} for p in self.precisions}
        self._refused: dict[str, str] = {}  # precision -> why the device does not run it
        self._ended_early = ""

    def order(self, number: int) -> tuple[str, ...]:
        """The order of a round; rounds count from 0."""
        turn = number // 2 % len(self.precisions)
        turned = (*self.precisions[turn:], *self.precisions[:turn])
        return turned[::-1] if number % 2 else turned

    @property
    def runs_done(self) -> int:
        """Runs that have ended."""
        return sum(len(records) for records in self._records.values())

    @property
    def runs_left(self) -> int:
        """Runs still to be handed out by `next_run`, as far as is known."""
        return len(self._line)

    @property
    def doing(self) -> str:
        """What goes on, for the status line."""
        total = self.runs_done + self.runs_left + 1
        return f"Race of {', '.join(self.precisions)}: run {self.runs_done + 1} of {total}"

    def next_run(self) -> RunConfig | None:
        """The next run; None when the race is over, and then `message` says what was found."""
        if self.message or not self._line:
            self.message = self.message or self._found()
            return None
        number, precision = self._line.popleft()
        self._round[precision] = number
        return replace(self.config, precision=precision)

    def runs_after(self) -> list[RunConfig]:
        """The runs still to be given out, as far as is known."""
        configs = {p: replace(self.config, precision=p) for p in self.precisions}
        return [configs[precision] for _, precision in self._line]

    def ended(self, record: RunRecord, *, out_of_time: bool = False) -> None:
        """Take the run that `next_run` gave out last for that precision, however it ended.

        Args:
            record: the run.
            out_of_time: it was stopped by the server's limit of seconds and not by a person: the
                race goes on without this precision.

        Raises:
            ValueError: no such run was given out.
        """
        precision, state = record.config["precision"], record.summary.state
        if precision not in self._round:
            raise ValueError(f"no run in {precision} was given out")
        self._records[precision][self._round[precision]] = record
        if state in FAILED or (state == "stopped" and out_of_time):
            self._leave(precision)
        elif state in GIVEN_UP:
            self._line.clear()
            self._ended_early = f"The race ended: the {precision} run was {state}."

    def refused(self, precision: str, reason: str) -> None:
        """The device does not run this precision at all: it takes no part."""
        self._refused[precision] = reason
        self._leave(precision)

    def leave_out_missing(self, support: Mapping[str, Support]) -> None:
        """Refuse every precision that is not available on a device, by its `DeviceInfo.support`."""
        for precision in self.precisions:
            if support[precision].status == "not available":
                self.refused(precision, support[precision].reason)

    def results(self) -> list[PrecisionResult]:
        """What is known so far, in the order of `precisions`."""
        return [self._result(precision) for precision in self.precisions]

    def _leave(self, precision: str) -> None:
        self._line = deque(entry for entry in self._line if entry[1] != precision)

    def _result(self, precision: str) -> PrecisionResult:
        # copies: pages ask while the runs' thread adds to them
        runs, base_runs = dict(self._records[precision]), dict(self._records.get(BASELINE, {}))
        records = list(runs.values())
        measured, medians = _times(runs), self._round_medians(runs)
        state, message = "waiting", ""
        if records:  # the last one that did not finish, else the last
            unlike = [r for r in records if r.summary.state != "finished"]
            last = (unlike or records)[-1].summary
            state, message = last.state, last.message
        if precision in self._refused:
            state, message = "not available", self._refused[precision]
        speedup = low = high = spread = None
        if precision == BASELINE:
            speedup = None if measured.step_ms_median is None else 1.0
        elif base_runs:
            base = _times(base_runs)
            pairs = zip(self._round_medians(base_runs), medians, strict=True)
            ratios = [fp32 / this for fp32, this in pairs if fp32 and this]
            speedup = statistics.median(ratios) if ratios else None
            if len(ratios) >= MIN_ROUNDS_FOR_SPREAD:
                (low, high), spread = _interval(ratios), "rounds"
            elif ratios and (between := speedup_between_quartiles(base, measured)):
                (low, high), spread = between, "quartiles"
        return PrecisionResult(
            precision=precision,
            state=state,
            message=message,
            steps_done=sum(len(r.steps) for r in records),
            steps_measured=measured.steps_measured,
            step_ms_median=measured.step_ms_median,
            step_ms_p25=measured.step_ms_p25,
            step_ms_p75=measured.step_ms_p75,
            tokens_per_sec_median=measured.tokens_per_sec_median,
            speedup=speedup,
            speedup_low=low,
            speedup_high=high,
            spread=spread,
            mfu=_mfu(records, measured.tokens_per_sec_median),
            peak_memory_bytes=max(
                (r.summary.peak_memory_bytes for r in records if r.summary.peak_memory_bytes),
                default=None,
            ),
            max_loss_difference=_loss_difference(runs, base_runs),
            skipped_steps=sum(r.summary.skipped_steps for r in records),
            joules_per_1000_tokens=_energy(records),
            round_ms_medians=medians,
        )

    def _round_medians(self, runs: Mapping[int, RunRecord]) -> tuple[float | None, ...]:
        return tuple(
            timing(runs[number].steps).step_ms_median if number in runs else None
            for number in range(self.rounds)
        )

    def _found(self) -> str:
        rounds = f" of {self.rounds} rounds" if self.rounds > 1 else ""
        over = self._ended_early or f"The race{rounds} is over."
        measured = [result for result in self.results() if result.step_ms_median is not None]
        if not measured:
            return f"{over} No step was measured."
        best = min(measured, key=lambda result: result.step_ms_median)
        found = f"{over} Fastest: {best.precision}, {best.step_ms_median:.1f} ms a step (median)"
        if best.speedup is None or best.precision == BASELINE:
            return f"{found}."
        if best.speedup_low is None:
            return f"{found}, {best.speedup:.2f}x as fast as fp32."
        spread = f"{best.speedup_low:.2f}x to {best.speedup_high:.2f}x"
        return f"{found}, {best.speedup:.2f}x as fast as fp32 ({spread})."


def _checked_precisions(precisions: object) -> tuple[str, ...]:
    if isinstance(precisions, str) or not isinstance(precisions, Iterable):
        raise InputError("precisions", f"precisions must be a list, not {shown(precisions)}.")
    chosen = tuple(precisions)
    if not chosen:
        raise InputError("precisions", "precisions must name at least one precision.")
    for precision in chosen:
        if not isinstance(precision, str) or precision not in PRECISIONS:
            raise InputError(
                "precisions",
                f"precisions may hold {', '.join(PRECISIONS)}, not {shown(precision)}.",
            )
        if chosen.count(precision) > 1:
            raise InputError("precisions", f"precisions must name {precision} once only.")
    return chosen


def _checked_rounds(rounds: object) -> int:
    number = isinstance(rounds, int | float) and not isinstance(rounds, bool)
    if not number or not 1 <= rounds <= MAX_ROUNDS or rounds != int(rounds):
        raise InputError(
            "rounds", f"rounds must be a whole number from 1 to {MAX_ROUNDS}, not {shown(rounds)}."
        )
    return int(rounds)


def _interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Where the rounds' median ratio lies: the narrowest pair of sorted ratios around it that holds
    the true median with 95 % confidence, by the binomial distribution; up to eight rounds that is
    the smallest and the largest (three rounds: 75 %, five: 94 %).
    """
    ordered, n = sorted(ratios), len(ratios)
    outside = 0  # of 2**n outcomes, those in which the true median lies below the pair
    cut = 0
    for k in range(n // 2):
        outside += math.comb(n, k)
        if 2 * outside > 0.05 * 2**n:
            break
        cut = k
    return ordered[cut], ordered[n - 1 - cut]


def _times(runs: Mapping[int, RunRecord]) -> Timing:
    """Over the measured steps of all runs."""
    return timing([step for record in runs.values() for step in record.steps])


def _mfu(records: Sequence[RunRecord], tokens_per_sec: float | None) -> float | None:
    if not records or records[-1].summary.flops_per_token is None:
        return None
    last = records[-1].summary
    return mfu(last.flops_per_token, tokens_per_sec, last.peak_flops)


def _loss_difference(
    runs: Mapping[int, RunRecord], base_runs: Mapping[int, RunRecord]
) -> float | None:
    """Over the steps that both did in the same round; a loss that is not finite does not count."""
    differences = [
        abs(step.loss - base.loss)
        for number, record in runs.items()
        if number in base_runs
        for step, base in zip(record.steps, base_runs[number].steps, strict=False)
        if math.isfinite(step.loss) and math.isfinite(base.loss)
    ]
    return max(differences, default=None)


def _energy(records: Sequence[RunRecord]) -> float | None:
    """The median of the runs that measured their energy."""
    found = [record.summary.joules_per_1000_tokens for record in records]
    known = [joules for joules in found if joules is not None]
    return statistics.median(known) if known else None
