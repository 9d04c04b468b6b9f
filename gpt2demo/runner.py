"""One run from its settings to its record, with every ending put into words."""

import contextlib
import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

import torch

from gpt2demo import accelerator
from gpt2demo.compiling import ensure_cache_folder
from gpt2demo.config import InputError, RunConfig
from gpt2demo.data import load_tokens
from gpt2demo.device import DeviceInfo, memory_free_bytes, resolve_device
from gpt2demo.flops import flops_per_token, mfu
from gpt2demo.oom import WillNotFit, advice, check_cpu_memory, is_out_of_memory
from gpt2demo.peaks import peak_flops
from gpt2demo.records import RunSummary, StepMetrics, timing
from gpt2demo.train import Progress, train

log = logging.getLogger(__name__)

_TRIED: Final = re.compile(r"tried to allocate ([\d.]+) ?(\w+)", re.IGNORECASE)


def check_device(config: RunConfig, info: DeviceInfo) -> None:
    """Refuse a precision that the device cannot run at all.

    Raises:
        InputError: naming the precision and the reason.
    """
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

    Raises:
        InputError: the text cannot be trained on. Everything else ends as a state.
    """
    progress = progress or Progress()
    steps: list[StepMetrics] = []
    started = time.perf_counter()
    reason: str | None = None
    failure: tuple[str, str] | None = None  # (state, message)
    device = resolve_device(config.device)

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
        if device.type == "cpu":
            check_cpu_memory(config, memory_free_bytes(device))
        with contextlib.closing(train(config, tokens, device, should_stop, progress)) as run:
            for step in run:
                steps.append(step)
                on_step(step)
    except InputError:
        raise
    except KeyboardInterrupt:
        failure = _interruption(config, steps)
    except BaseException as exc:  # the tokenizer's panic is no Exception
        at = f"in step {len(steps)}" if progress.phase == "training" else f"while {progress.phase}"
        failure = _failure(exc, config, at)
    # Only here, outside the except block, is the exception gone and with it the traceback that
    # pins the model's tensors.
    accelerator.free_memory(device)
    if failure and failure[0] == "out of memory":
        failure = failure[0], f"{failure[1]} {advice(config, device.type, _free(info, device))}"
    return _summary(config, info, progress, steps, time.perf_counter() - started, reason, failure)


def _free(info: DeviceInfo, device: torch.device) -> int | None:
    free = memory_free_bytes(device)
    return info.memory_total_bytes if free is None else free


def interrupted(
    config: RunConfig,
    info: DeviceInfo,
    progress: Progress,
    steps: list[StepMetrics],
    seconds: float,
) -> RunSummary:
    """The summary of a run that was interrupted outside `execute`: what was measured until now."""
    return _summary(config, info, progress, steps, seconds, None, _interruption(config, steps))


def _interruption(config: RunConfig, steps: list[StepMetrics]) -> tuple[str, str]:
    return "interrupted", f"Interrupted after {len(steps)} of {config.steps} steps."


def _failure(exc: BaseException, config: RunConfig, at: str) -> tuple[str, str]:
    """State and sentence of a run that an exception ended; the sentence holds no path."""
    if is_out_of_memory(exc):
        settings = f"B={config.B}, T={config.T}, {config.precision}, {config.model}"
        if isinstance(exc, WillNotFit):
            return "out of memory", f"Out of memory ({settings}): {exc}"
        tried = _TRIED.search(str(exc))
        asked = f", asking for {tried[1]} {tried[2]} more" if tried else ""
        return "out of memory", f"Out of memory {at} ({settings}){asked}."
    log.error("a run ended with an error", exc_info=exc)
    return "error", (
        f"The run ended {at} with an error ({type(exc).__name__}). "
        "The log has the details; the next run starts afresh."
    )


def _summary(
    config: RunConfig,
    info: DeviceInfo,
    progress: Progress,
    steps: list[StepMetrics],
    seconds: float,
    reason: str | None,
    failure: tuple[str, str] | None,
) -> RunSummary:
    measured = timing(steps)
    last = steps[-1] if steps else None
    if failure:
        state, message = failure
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
        steps_done=len(steps),
        seconds=seconds,
        compile_seconds=progress.compile_seconds,
        **asdict(measured),
        final_loss=last.loss if last else None,
        skipped_steps=sum(step.skipped for step in steps),
        parameters=progress.parameters,
        flops_per_token=per_token,
        peak_flops=peak,
        mfu=mfu(per_token, measured.tokens_per_sec_median, peak),
        peak_memory_bytes=last.peak_memory_bytes if last else None,
    )
