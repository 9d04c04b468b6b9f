"""Runs on a ZeroGPU Space, where a GPU exists only inside a call, in a forked process.

The package `spaces` forks that process, hands it a `Job`, and brings back what `_work` yields.
Everything that crosses pickles; the two processes share nothing else but the event that says Stop.
"""

import contextlib
import logging
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import torch

from gpt2demo.compiling import ensure_cache_folder
from gpt2demo.config import InputError, RunConfig
from gpt2demo.data import load_tokens
from gpt2demo.device import DeviceInfo, probe_device
from gpt2demo.ending import MUST_RESTART, cut_off
from gpt2demo.flops import flops_per_token
from gpt2demo.garbage import leave_out_the_program
from gpt2demo.inside import inspect_step
from gpt2demo.inspection import Inspection
from gpt2demo.probe import ProbeResult, probe_rates
from gpt2demo.records import RunSummary, StepMetrics
from gpt2demo.runner import measure
from gpt2demo.support import unmet
from gpt2demo.train import Progress

log = logging.getLogger(__name__)

MAX_LEASE_SECONDS: Final = 120  # what one call may ask for
PROBE_LEASE_SECONDS: Final = 40
INSPECT_LEASE_SECONDS: Final = 60

_MIN_LEASE_SECONDS: Final = 30
_MARGIN_SECONDS: Final = 8.0  # from the run's end to the lease's: the way there and back
_START_SECONDS: Final = 20.0  # until the first step: the process, CUDA, the weights
_COMPILE_SECONDS: Final = 60.0
_STEP_SECONDS: Final = 0.1  # of a step, launches and optimizer
_FLOPS_PER_SEC: Final = 1e13  # what any GPU lent so reaches; float64 may run at a fraction of it
_FLOPS_PER_SEC_FP64: Final = 5e11
_LATE_STEPS: Final = 3  # after Stop, until the worker is thought not to have heard of it
_ASKED: Final = "it was asked to"  # the worker's word for a reason that only the page knows

# Reaches a forked worker, which a threading.Event does not.
STOP: Any = multiprocessing.get_context("fork").Event()


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run as its worker is given it."""

    config: RunConfig  # without an own text's words
    tokens: bytes  # int64: the text is encoded before the GPU is lent
    lease_seconds: int


Row = DeviceInfo | Progress | StepMetrics | RunSummary
Lend = Callable[..., Callable[[Callable[..., Iterator[Any]]], Callable[..., Iterator[Any]]]]


class ZeroGPU:
    """The GPU that is lent for every run: a source of rows for the hub.

    Args:
        lend: `spaces.GPU`, or what stands in for it.
        max_seconds: the most that a run may take on this server.
    """

    device = torch.device("cuda", 0)

    def __init__(self, lend: Lend, *, max_seconds: int) -> None:
        self.info = _not_met()
        self._most = min(max_seconds, MAX_LEASE_SECONDS)
        self._run = lend(duration=_duration)(_work)
        self._probe = lend(duration=PROBE_LEASE_SECONDS)(_probe)
        self._inspect = lend(duration=INSPECT_LEASE_SECONDS)(_inspect)
        self._renew = False

    def new_stop(self) -> Any:
        """The event that stops the next run; there is one run at a time."""
        global STOP
        if self._renew:  # a worker that was killed may have held its lock
            STOP, self._renew = multiprocessing.get_context("fork").Event(), False
        STOP.clear()
        return STOP

    def execute(
        self,
        config: RunConfig,
        info: DeviceInfo,
        *,
        on_device: Callable[[DeviceInfo], None],
        on_step: Callable[[StepMetrics], None],
        stop_reason: Callable[[], str | None],
        progress: Progress,
        tokens: torch.Tensor | None = None,
        max_text_bytes: int = 16 * 2**20,
    ) -> RunSummary:
        """`runner.execute` with the run in a worker.

        Args and errors as there, and `on_device`: called with the GPU's facts once it is lent.
        """
        started = time.perf_counter()
        notes: tuple[str, ...] = ()
        if tokens is None:
            progress.phase = "loading the text"
            tokens, notes = load_tokens(config, max_text_bytes)
            progress.notes += notes
        _prepare()
        lease = lease_seconds(config, self._most)
        job = Job(config=config, tokens=tokens.numpy().tobytes(), lease_seconds=lease)
        progress.phase = "waiting for a GPU"
        steps: list[StepMetrics] = []
        summary: RunSummary | None = None
        lent: float | None = None  # when
        reason: str | None = None
        late = 0
        ending: tuple[str, str] | None = None  # state and message
        try:
            with contextlib.closing(self._run(job)) as rows:
                for row in rows:
                    match row:
                        case DeviceInfo():
                            lent = time.perf_counter()
                            self.info = info = row
                            on_device(row)
                        case Progress():
                            _copy(row, progress, notes)
                        case StepMetrics():
                            steps.append(row)
                            on_step(row)
                            late += reason is not None
                        case RunSummary():
                            summary = row
                    reason = reason or stop_reason()
                    if reason:
                        STOP.set()
                    if late == _LATE_STEPS:
                        break
        except Exception as exc:
            ending = self._ended_by(exc, config, job, lent, len(steps), summary)
        if summary:
            message = summary.message.replace(_ASKED, reason or _ASKED)
            return replace(summary, message=message, notes=(*notes, *summary.notes))
        if ending is None and reason:
            ending = "stopped", f"Stopped after {len(steps)} of {config.steps} steps: {reason}."
        if ending is None:
            ending = "error", f"The run ended after {_done(steps, config)} without a result."
        return cut_off(config, info, progress, steps, time.perf_counter() - started, *ending)

    def probe(self, tokens: int) -> tuple[DeviceInfo, ProbeResult]:
        """The GPU's facts and rates (`probe.probe_rates`); lends it for this.

        Raises:
            InputError: no GPU was lent, or its worker failed.
        """
        _prepare()
        return self._found(self._probe(tokens))

    def inspect(self, config: RunConfig) -> tuple[DeviceInfo, Inspection]:
        """The GPU's facts and one step from inside (`inside.inspect_step`); lends it for this.

        Raises:
            InputError: no GPU was lent, or its worker failed.
        """
        _prepare()
        return self._found(self._inspect(config))

    def _found(self, rows: Iterator[Any]) -> tuple[DeviceInfo, Any]:
        """The two rows of a worker that measures: the device's facts, and what it found."""
        try:
            with contextlib.closing(rows):
                self.info, found = next(rows), next(rows)
        except Exception as exc:
            if refusal := _refusal(exc):
                raise InputError("device", refusal) from None
            log.error("a measurement on ZeroGPU ended with an error", exc_info=exc)
            raise InputError("device", "The GPU's process failed; try again.") from None
        return self.info, found

    def _ended_by(
        self,
        exc: Exception,
        config: RunConfig,
        job: Job,
        lent: float | None,
        done: int,
        summary: RunSummary | None,
    ) -> tuple[str, str] | None:
        """State and message of a run that an error outside `measure` ended."""
        self._renew = True
        if summary:
            return None  # all of it was there, and its worker was given up
        of = f"{done} of {config.steps} steps"
        if lent is not None and time.perf_counter() - lent > job.lease_seconds - 1:
            return "stopped", (
                f"Stopped after {of}: the GPU was lent for {job.lease_seconds} seconds, "
                f"and they ended in the middle of a step."
            )
        if refusal := _refusal(exc):
            return "error", refusal
        log.error("a run on ZeroGPU ended with an error", exc_info=exc)
        return "error", (
            f"The GPU's process ended after {of}. The log has the details; the next run gets a "
            f"new one."
        )


def lease_seconds(config: RunConfig, most: int = MAX_LEASE_SECONDS) -> int:
    """For how long the GPU is asked for: a careful guess, as a shorter lease is lent sooner.

    A run that would take longer is stopped before the lease's end.
    """
    rate = _FLOPS_PER_SEC_FP64 if config.precision == "fp64" else _FLOPS_PER_SEC
    flops = flops_per_token(config.gpt, config.T) * config.tokens_per_step
    seconds = _START_SECONDS + _MARGIN_SECONDS + config.steps * (_STEP_SECONDS + flops / rate)
    seconds += _COMPILE_SECONDS if config.compile else 0
    return int(min(max(seconds, _MIN_LEASE_SECONDS), most))


def _prepare() -> None:
    """What no lease should pay: torch's optimizers import the compiler, a second or more; and a
    worker that collects would copy all of this process's memory.
    """
    ensure_cache_folder()
    import torch._dynamo  # noqa: F401

    leave_out_the_program()


def _duration(job: Job) -> int:
    """What `spaces` asks for, from the call's own arguments."""
    return job.lease_seconds


def _work(job: Job) -> Iterator[Row]:
    """One run in the forked worker, the only process that has the GPU."""
    torch.set_num_threads(1)  # OpenMP's other threads did not come along with the fork
    begun = time.monotonic()
    before: float | None = None
    longest = 0.0  # seconds from one step to the next

    def stop_reason() -> str | None:
        nonlocal before, longest
        now = time.monotonic()
        longest = max(longest, now - (before or now))
        before = now
        if STOP.is_set():
            return _ASKED
        if now - begun + longest > job.lease_seconds - _MARGIN_SECONDS:
            return f"the GPU was lent for {job.lease_seconds} seconds"
        return None

    info = probe_device("auto")
    yield info
    progress, told = Progress(), None
    run = measure(
        replace(job.config, device="auto"),
        info,
        stop_reason=stop_reason,
        progress=progress,
        tokens=torch.frombuffer(bytearray(job.tokens), dtype=torch.int64),
    )
    with contextlib.closing(run):
        while True:
            try:
                step = next(run)
            except StopIteration as end:
                summary: RunSummary = end.value
                break
            if progress != told:
                told = replace(progress, notes=list(progress.notes))
                yield told
            yield step
    if progress.poisoned:
        fresh = "The next run gets a new process."
        summary = replace(summary, message=summary.message.replace(MUST_RESTART, fresh))
    yield summary
    if progress.poisoned:
        os._exit(1)  # no other run may get this process


def _probe(tokens: int) -> Iterator[DeviceInfo | ProbeResult]:
    """The probe in the forked worker."""
    torch.set_num_threads(1)
    info = probe_device("auto")
    yield info
    yield probe_rates(info, tokens)


def _inspect(config: RunConfig) -> Iterator[DeviceInfo | Inspection]:
    """The inspection in the forked worker."""
    torch.set_num_threads(1)
    info = probe_device("auto")
    yield info
    most = INSPECT_LEASE_SECONDS - _START_SECONDS - _MARGIN_SECONDS
    found = inspect_step(replace(config, device="auto"), info, max_seconds=most)
    yield replace(found, must_restart=False)
    if found.must_restart:
        os._exit(1)  # no other run may get this process


def _copy(row: Progress, progress: Progress, notes: tuple[str, ...]) -> None:
    """What a worker is doing, into what the pages look at."""
    for field in fields(Progress):
        setattr(progress, field.name, getattr(row, field.name))
    progress.notes = [*notes, *row.notes]
    progress.poisoned = False  # of that process only


def _refusal(exc: Exception) -> str | None:
    """Why no GPU was lent, in ZeroGPU's own words: a quota, a queue. None = another error."""
    # gradio's error has both, and ZeroGPU's own have such a title
    title, message = getattr(exc, "title", ""), getattr(exc, "message", "")
    if not str(title).startswith("ZeroGPU") or title == "ZeroGPU worker error":
        return None
    return f"No GPU was lent: {message}"


def _done(steps: list[StepMetrics], config: RunConfig) -> str:
    return f"{len(steps)} of {config.steps} steps"


def _not_met() -> DeviceInfo:
    """A GPU of which nothing is known yet; what torch says of it outside a call is made up."""
    return DeviceInfo(
        type="cuda",
        index=0,
        name="ZeroGPU",
        memory_total_bytes=None,
        memory_free_bytes=None,
        compute_capability=None,
        architecture=None,
        driver_version=None,
        torch_version=str(torch.__version__),
        cuda_version=torch.version.cuda,
        hip_version=torch.version.hip,
        python_version=platform.python_version(),
        platform=platform.platform(),
        cores=None,
        torch_threads=None,
        gpu=None,
        problem="This Space is lent a GPU for every run; the first one tells what it is.",
        support=unmet("Known once a run has met the GPU."),
    )
