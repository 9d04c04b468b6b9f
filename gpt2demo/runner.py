"""One run from its settings to its summary, however it ends."""

import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Final

import torch

from gpt2demo import accelerator, nvidia
from gpt2demo.compiling import ensure_cache_folder
from gpt2demo.config import InputError, RunConfig
from gpt2demo.data import load_tokens
from gpt2demo.device import DeviceInfo, memory_free_bytes, resolve_device
from gpt2demo.ending import Failure, failed, interruption, ran_out, run_memory, summed_up
from gpt2demo.energy import EnergyMeter
from gpt2demo.fit import FITS, Capacity, capacity_for
from gpt2demo.fit_words import advice, sdpa_words
from gpt2demo.garbage import leave_out_the_program
from gpt2demo.malloc import give_back
from gpt2demo.memory import CONTEXT_BYTES, MemoryForecast
from gpt2demo.oom import WillNotFit, is_poison, spill_note
from gpt2demo.ranks import ALONE, Ranks
from gpt2demo.records import RunSummary, StepMetrics
from gpt2demo.train import Progress, train

_GIB: Final = 2**30


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
    failure: Failure | None = None
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
        if note := sdpa_words(config, capacity):
            progress.notes.append(note)
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
        failure = interruption(config, steps, ranks)
    except BaseException as exc:  # the tokenizer's panic is no Exception
        progress.poisoned = is_poison(exc)
        failure = failed(exc, config, progress, len(steps), ranks)
    # Only here, outside the except block, is the exception gone and with it the traceback that
    # pins the model's tensors.
    accelerator.free_memory(device)
    leave_out_the_program()  # with all that a first run imports
    give_back()
    # where the compiler failed, the run was an ordinary one
    ran = replace(config, compile=progress.compiled) if progress.phase == "training" else config
    out_of_memory = None
    if failure and failure.state == "out of memory":
        failure = replace(failure, message=f"{failure.message} {advice(ran, capacity)}")
        out_of_memory = ran_out(ran, capacity, progress, len(steps), failure)
    reserved = accelerator.reserved_peak_bytes(device)
    measured_ms = [step.step_ms for step in steps if not step.is_warmup]
    if note := spill_note(reserved, info.memory_total_bytes, measured_ms):
        progress.notes.append(note)
    return replace(
        summed_up(
            *(config, info, progress, steps, time.perf_counter() - started),
            *(reason, failure, ranks),
        ),
        memory=run_memory(ran, capacity, capacity.verdict(told), steps, reserved, out_of_memory),
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
