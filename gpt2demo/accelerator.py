"""Torch's device calls that a run needs, for every kind of device; a CPU has nothing to do."""

import contextlib
import gc

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it, so that a clock tells the truth."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    """Start counting the allocator's peak anew."""
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
            torch.accelerator.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most bytes that tensors held at once since `reset_peak_memory`; None where no counter is.

    It is the allocator's `max_memory_allocated`: live tensors, without the allocator's reserve and
    without the context. A CPU has no such counter.
    """
    if device.type == "cpu":
        return None
    try:
        # backends without the counter (MPS) raise, or answer 0 while a model is in memory
        return int(torch.accelerator.max_memory_allocated(device)) or None
    except (RuntimeError, AttributeError, NotImplementedError):
        return None


def free_memory(device: torch.device) -> None:
    """Give back what dropped tensors held: collect cycles, then empty the allocator's cache."""
    # A backward that failed leaves its unfinished work, and the gradients in it, in this thread's
    # queue until the next backward: let there be one.
    torch.zeros((), requires_grad=True).backward()
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
