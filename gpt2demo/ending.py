"""How a run ended: its state and sentence, its memory, and its summary."""

import logging
import math
import re
from dataclasses import asdict, dataclass, replace
from typing import Final

from gpt2demo.config import RunConfig
from gpt2demo.device import DeviceInfo
from gpt2demo.distributed import is_peer_gone
from gpt2demo.fit import Capacity, smaller_that_fits
from gpt2demo.flops import flops_per_token, mfu
from gpt2demo.oom import WillNotFit, is_out_of_memory
from gpt2demo.peaks import peak_flops
from gpt2demo.ranks import ALONE, Ranks
from gpt2demo.records import OutOfMemory, RunMemory, RunSummary, StepMetrics, timing
from gpt2demo.train import Progress

log = logging.getLogger(__name__)

MUST_RESTART: Final = "The app must restart: until then no run can use the GPU."

_GIB: Final = 2**30
_UNITS: Final = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_TRIED: Final = re.compile(r"tried to allocate ([\d.]+) ?(\w+)", re.IGNORECASE)


def interrupted(
    config: RunConfig,
    info: DeviceInfo,
    progress: Progress,
    steps: list[StepMetrics],
    seconds: float,
    ranks: Ranks = ALONE,
) -> RunSummary:
    """The summary of a run that was interrupted outside `execute`: what was measured until now."""
    state, message = "interrupted", interruption(config, steps, ranks).message
    return cut_off(config, info, progress, steps, seconds, state, message, ranks)


def cut_off(
    config: RunConfig,
    info: DeviceInfo,
    progress: Progress,
    steps: list[StepMetrics],
    seconds: float,
    state: str,
    message: str,
    ranks: Ranks = ALONE,
) -> RunSummary:
    """The summary of a run whose `execute` never returned: what was measured until now, ending in
    one of `records.STATES` with a sentence for the visitor.
    """
    failure = Failure(state=state, message=message)
    return summed_up(config, info, progress, steps, seconds, None, failure, ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How a run failed, without the exception itself."""

    state: str
    message: str
    asked_bytes: int | None = None  # of memory that was not to be had


def interruption(config: RunConfig, steps: list[StepMetrics], ranks: Ranks) -> Failure:
    """A signal ended it."""
    message = f"Interrupted after {len(steps)} of {config.steps} steps."
    if ranks.ddp:  # torchrun ends all processes by a signal when one of them ends
        message = f"{message[:-1]}: by a signal, or because one of the processes ended."
    return Failure(state="interrupted", message=message)


def failed(
    exc: BaseException, config: RunConfig, progress: Progress, done: int, ranks: Ranks
) -> Failure:
    """State and sentence of a run that an exception ended; the sentence holds no path."""
    training = progress.phase == "training"
    at = f"in step {done} ({progress.moment})" if training else f"while {progress.phase}"
    if is_out_of_memory(exc):
        settings = f"B={config.B}, T={config.T}, {config.precision}, {config.model}"
        if isinstance(exc, WillNotFit):
            return Failure(state="out of memory", message=f"Out of memory ({settings}): {exc}")
        asked = _asked_bytes(str(exc))
        more = "" if asked is None else f", asking for {_size(asked)} more"
        message = f"Out of memory {at} ({settings}){more}."
        return Failure(state="out of memory", message=message, asked_bytes=asked)
    if ranks.ddp and is_peer_gone(exc):
        message = (
            f"One of the {ranks.world_size} processes ended {at}; the others cannot go on alone."
        )
        return Failure(state="error", message=message)
    log.error("a run ended with an error", exc_info=exc)
    if progress.poisoned:
        return Failure(state="error", message=f"The GPU failed {at}. {MUST_RESTART}")
    message = (
        f"The run ended {at} with an error ({type(exc).__name__}). "
        "The log has the details; the next run starts afresh."
    )
    return Failure(state="error", message=message)


def _asked_bytes(text: str) -> int | None:
    """The allocation that failed, from the allocator's words."""
    found = _TRIED.search(text)
    unit = _UNITS.get(found[2].lower()) if found else None
    return None if found is None or unit is None else round(float(found[1]) * unit)


def _size(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / 2**20:.2f} MiB"


def ran_out(
    config: RunConfig, capacity: Capacity, progress: Progress, done: int, failure: Failure
) -> OutOfMemory:
    """The moment at which memory ran out, after `done` steps, and what should fit instead."""
    training = progress.phase == "training"
    B, T = (None, None) if capacity.total_bytes is None else smaller_that_fits(config, capacity)
    return OutOfMemory(
        step=done if training else None,
        moment=progress.moment if training else progress.phase,
        asked_bytes=failure.asked_bytes,
        parts=progress.held_bytes,
        capacity_bytes=capacity.total_bytes,
        smaller_B=B,
        smaller_T=T,
    )


def run_memory(
    config: RunConfig,
    capacity: Capacity,
    verdict: str,
    steps: list[StepMetrics],
    reserved: int | None,
    out_of_memory: OutOfMemory | None,
) -> RunMemory:
    """Forecast beside measured. A run that was stopped after one step is held against the forecast
    of one; a run out of memory has no peak to measure.
    """
    measured = steps[-1].peak_memory_bytes if steps and not out_of_memory else None
    done = replace(config, steps=len(steps)) if steps and not out_of_memory else config
    gpu = capacity.device_type != "cpu"
    by = "max_memory_allocated" if gpu else "tensors followed through the first two steps"
    return RunMemory(
        forecast_bytes=capacity.forecast(done).parts.allocated,
        verdict=verdict,
        capacity_bytes=capacity.total_bytes,
        measured_bytes=measured,
        reserved_bytes=reserved if steps else None,
        measured_by=by if measured is not None else None,
    )


def summed_up(
    config: RunConfig,
    info: DeviceInfo,
    progress: Progress,
    steps: list[StepMetrics],
    seconds: float,
    reason: str | None,
    failure: Failure | None,
    ranks: Ranks,
) -> RunSummary:
    """The run in figures; `reason` is why it was stopped, `failure` how it failed."""
    measured = timing(steps)
    last = steps[-1] if steps else None
    if failure:
        state, message = failure.state, failure.message
    elif last and not math.isfinite(last.loss):
        state = "diverged"
        message = (
            f"Diverged at step {last.step}: the loss is {last.loss}. "
            f"A lower learning rate than {config.lr:g} often helps."
        )
    elif reason:
        state = "stopped"
        message = f"Stopped after {len(steps)} of {config.steps} steps: {reason}."
    else:
        state, message = "finished", f"Finished: {len(steps)} steps."
    per_token = flops_per_token(config.gpt, config.T)
    peak = peak_flops(info.name, info.memory_total_bytes, config.precision)
    return RunSummary(
        state=state,
        message=message,
        notes=tuple(progress.notes),
        world_size=ranks.world_size,
        steps_done=len(steps),
        seconds=seconds,
        compile_seconds=progress.compile_seconds,
        compiled=None if progress.compile_seconds is None else progress.compiled,
        **asdict(measured),
        final_loss=last.loss if last else None,
        skipped_steps=sum(step.skipped for step in steps),
        parameters=progress.parameters,
        flops_per_token=per_token,
        peak_flops=peak,
        mfu=mfu(per_token, measured.tokens_per_sec_median, peak and peak * ranks.world_size),
        peak_memory_bytes=last.peak_memory_bytes if last else None,
    )
