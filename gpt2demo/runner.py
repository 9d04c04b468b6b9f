"""One run from its settings to its record, with every ending put into words."""

import contextlib
import logging
import math
import re
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, replace
from typing import Final

import torch

from gpt2demo import accelerator, nvidia
from gpt2demo.compiling import ensure_cache_folder
from gpt2demo.config import InputError, RunConfig
from gpt2demo.data import load_tokens
from gpt2demo.device import DeviceInfo, memory_free_bytes, resolve_device
from gpt2demo.distributed import is_peer_gone
from gpt2demo.energy import EnergyMeter
from gpt2demo.fit import FITS, Capacity, advice, capacity_for, smaller_that_fits
from gpt2demo.flops import flops_per_token, mfu
from gpt2demo.malloc import give_back
from gpt2demo.memory import CONTEXT_BYTES, MemoryForecast
from gpt2demo.oom import WillNotFit, is_out_of_memory, is_poison, spill_note
from gpt2demo.peaks import peak_flops
from gpt2demo.ranks import ALONE, Ranks
from gpt2demo.records import OutOfMemory, RunMemory, RunSummary, StepMetrics, timing
from gpt2demo.train import Progress, train

log = logging.getLogger(__name__)

MUST_RESTART: Final = "The app must restart: until then no run can use the GPU."

_GIB: Final = 2**30
_UNITS: Final = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_TRIED: Final = re.compile(r"tried to allocate ([\d.]+) ?(\w+)", re.IGNORECASE)


def check_device(config: RunConfig, info: DeviceInfo) -> None:
    """Refuse what the device cannot run at all.

    Raises:
        InputError: naming the precision, or the memory budget, and the reason.
    """
    if config.budget_gib is not None and info.type not in ("cpu", "cuda"):
        raise InputError(
            "budget_gib", f"budget_gib: a memory budget cannot be emulated on {info.type}."
        )
    support = info.support[config.precision]
    if support.status == "not available":
        raise InputError(
            "precision", f"precision {config.precision} is not available here: {support.reason}"
        )


def execute(
    config: RunConfig,
    info: DeviceInfo,
    *,
    on_step: Callable[[StepMetrics], None],
    stop_reason: Callable[[], str | None] = lambda: None,
    progress: Progress | None = None,
    tokens: torch.Tensor | None = None,
    max_text_bytes: int = 16 * 2**20,
    ranks: Ranks = ALONE,
) -> RunSummary:
    """Run `config` to its end, whatever that is, and sum it up.

    Args:
        config: the settings; its device and precision are there (see `check_device`).
        info: the device, for the summary.
        on_step: called after every step, between two steps.
        stop_reason: asked before every step; a sentence's end ("its owner pressed Stop") ends the
            run as stopped.
        progress: what the run is doing now, for whoever watches.
        tokens: (n,) token ids, where the text is encoded already.
        max_text_bytes: the largest own text.
        ranks: this process among those that train together; then `tokens` must be given.

    Raises:
        InputError: the text cannot be trained on. Everything else ends as a state.
    """
    run = measure(
        config,
        info,
        stop_reason=stop_reason,
        progress=progress,
        tokens=tokens,
        max_text_bytes=max_text_bytes,
        ranks=ranks,
    )
    try:
        step = next(run)
        while True:
            try:
                on_step(step)
            except BaseException as exc:
                step = run.throw(exc)  # it ends the run as any other error does
            else:
                step = next(run)
    except StopIteration as end:
        return end.value


def measure(
    config: RunConfig,
    info: DeviceInfo,
    *,
    stop_reason: Callable[[], str | None] = lambda: None,
    progress: Progress | None = None,
    tokens: torch.Tensor | None = None,
    max_text_bytes: int = 16 * 2**20,
    ranks: Ranks = ALONE,
) -> Generator[StepMetrics, None, RunSummary]:
    """`execute` as a generator: yields the steps and returns the summary. Arguments as there.

    Raises:
        InputError: the text cannot be trained on. Everything else ends as a state.
    """
    progress = progress or Progress()
    steps: list[StepMetrics] = []
    started = time.perf_counter()
    reason: str | None = None
    failure: _Failure | None = None
    joules: float | None = None
    device = resolve_device(config.device)
    capacity = capacity_now(config, info, device, ranks)
    told = capacity.forecast(config)

    def should_stop() -> bool:
        nonlocal reason
        reason = stop_reason()
        return reason is not None

    try:
        if tokens is None:
            progress.phase = "loading the text"
            tokens, notes = load_tokens(config, max_text_bytes)
            progress.notes += notes
        ensure_cache_folder()
        if refusal := _refusal(config, capacity, told):
            progress.phase = "before the start"
            raise WillNotFit(refusal)
        with (
            _limit(config, info, device, capacity),
            nvidia.energy_counter(device) as read_joules,
            contextlib.closing(
                train(
                    *(config, tokens, device, should_stop, progress),
                    *(capacity.tracker_budget(), ranks),
                )
            ) as run,
        ):
            energy = EnergyMeter(read=read_joules, tokens_per_step=config.tokens_per_step)
            for step in run:
                steps.append(step)
                energy.after(step)
                joules = energy.joules_per_1000_tokens
                yield step
    except (InputError, GeneratorExit):
        raise
    except KeyboardInterrupt:
        failure = _interruption(config, steps, ranks)
    except BaseException as exc:  # the tokenizer's panic is no Exception
        progress.poisoned = is_poison(exc)
        failure = _failure(exc, config, progress, len(steps), ranks)
    # Only here, outside the except block, is the exception gone and with it the traceback that
    # pins the model's tensors.
    accelerator.free_memory(device)
    give_back()
    # where the compiler failed, the run was an ordinary one
    ran = replace(config, compile=progress.compiled) if progress.phase == "training" else config
    out_of_memory = None
    if failure and failure.state == "out of memory":
        failure = replace(failure, message=f"{failure.message} {advice(ran, capacity)}")
        out_of_memory = _out_of_memory(ran, capacity, progress, len(steps), failure)
    reserved = accelerator.reserved_peak_bytes(device)
    measured_ms = [step.step_ms for step in steps if not step.is_warmup]
    if note := spill_note(reserved, info.memory_total_bytes, measured_ms):
        progress.notes.append(note)
    return replace(
        _summary(
            *(config, info, progress, steps, time.perf_counter() - started),
            *(reason, failure, ranks),
        ),
        memory=_memory(ran, capacity, capacity.verdict(told), steps, reserved, out_of_memory),
        out_of_memory=out_of_memory,
        joules_per_1000_tokens=joules,
    )


def capacity_now(
    config: RunConfig, info: DeviceInfo, device: torch.device, ranks: Ranks = ALONE
) -> Capacity:
    """The memory that a run would find if it started now; processes share out a CPU's."""
    free = free_bytes_now(info, device)
    if free is not None and device.type == "cpu":
        free //= ranks.local_world_size
    capacity = capacity_for(config, device.type, free, info.compute_capability)
    return replace(capacity, ddp=ranks.ddp)


def free_bytes_now(info: DeviceInfo, device: torch.device) -> int | None:
    """Memory that a new run would find: what the driver calls free and what torch only keeps."""
    free = memory_free_bytes(device)
    return info.memory_total_bytes if free is None else free + accelerator.cached_bytes(device)


def _refusal(config: RunConfig, capacity: Capacity, told: MemoryForecast) -> str | None:
    """Why the run must not start, or None."""
    if capacity.tracked and config.compile and capacity.verdict(told) != FITS:
        return (
            f"The run is forecast to need {told.live_bytes / _GIB:.2f} GiB. Compiled code shows "
            f"its tensors to no tracker, so on a CPU the forecast alone decides."
        )
    return capacity.refusal(told)


def _limit(
    config: RunConfig, info: DeviceInfo, device: torch.device, capacity: Capacity
) -> contextlib.AbstractContextManager[None]:
    """A smaller card, emulated: what its context would leave of its memory."""
    if config.budget_gib is None or capacity.total_bytes is None or not info.memory_total_bytes:
        return contextlib.nullcontext()
    limit = max(capacity.total_bytes - CONTEXT_BYTES, 2**20)
    return accelerator.memory_limit(device, limit, info.memory_total_bytes)


def interrupted(
    config: RunConfig,
    info: DeviceInfo,
    progress: Progress,
    steps: list[StepMetrics],
    seconds: float,
    ranks: Ranks = ALONE,
) -> RunSummary:
    """The summary of a run that was interrupted outside `execute`: what was measured until now."""
    state, message = "interrupted", _interruption(config, steps, ranks).message
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
    failure = _Failure(state=state, message=message)
    return _summary(config, info, progress, steps, seconds, None, failure, ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Failure:
    """How a run failed, without the exception itself."""

    state: str
    message: str
    asked_bytes: int | None = None  # of memory that was not to be had


def _interruption(config: RunConfig, steps: list[StepMetrics], ranks: Ranks) -> _Failure:
    message = f"Interrupted after {len(steps)} of {config.steps} steps."
    if ranks.ddp:  # torchrun ends all processes by a signal when one of them ends
        message = f"{message[:-1]}: by a signal, or because one of the processes ended."
    return _Failure(state="interrupted", message=message)


def _failure(
    exc: BaseException, config: RunConfig, progress: Progress, done: int, ranks: Ranks
) -> _Failure:
    """State and sentence of a run that an exception ended; the sentence holds no path."""
    training = progress.phase == "training"
    at = f"in step {done} ({progress.moment})" if training else f"while {progress.phase}"
    if is_out_of_memory(exc):
        settings = f"B={config.B}, T={config.T}, {config.precision}, {config.model}"
        if isinstance(exc, WillNotFit):
            return _Failure(state="out of memory", message=f"Out of memory ({settings}): {exc}")
        asked = _asked_bytes(str(exc))
        more = "" if asked is None else f", asking for {_size(asked)} more"
        message = f"Out of memory {at} ({settings}){more}."
        return _Failure(state="out of memory", message=message, asked_bytes=asked)
    if ranks.ddp and is_peer_gone(exc):
        message = (
            f"One of the {ranks.world_size} processes ended {at}; the others cannot go on alone."
        )
        return _Failure(state="error", message=message)
    log.error("a run ended with an error", exc_info=exc)
    if progress.poisoned:
        return _Failure(state="error", message=f"The GPU failed {at}. {MUST_RESTART}")
    message = (
        f"The run ended {at} with an error ({type(exc).__name__}). "
        "The log has the details; the next run starts afresh."
    )
    return _Failure(state="error", message=message)


def _asked_bytes(text: str) -> int | None:
    """The allocation that failed, from the allocator's words."""
    found = _TRIED.search(text)
    unit = _UNITS.get(found[2].lower()) if found else None
    return None if found is None or unit is None else round(float(found[1]) * unit)


def _size(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / 2**20:.2f} MiB"


def _out_of_memory(
    config: RunConfig, capacity: Capacity, progress: Progress, done: int, failure: _Failure
) -> OutOfMemory:
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


def _memory(
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


def _summary(
    config: RunConfig,
    info: DeviceInfo,
    progress: Progress,
    steps: list[StepMetrics],
    seconds: float,
    reason: str | None,
    failure: _Failure | None,
    ranks: Ranks,
) -> RunSummary:
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
