"""Torch's device calls that a run needs, for every kind of device; a CPU has nothing to do."""

import contextlib
import gc
from collections.abc import Iterator

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
    return _counter("max_memory_allocated", device)


def reserved_peak_bytes(device: torch.device) -> int | None:
    """The most bytes that the allocator took from the driver, `max_memory_reserved`; None = no
    counter.
    """
    return _counter("max_memory_reserved", device)


def allocated_bytes(device: torch.device) -> int | None:
    """Bytes of the tensors that live now, `memory_allocated`; None = no counter."""
    return _counter("memory_allocated", device)


def cached_bytes(device: torch.device) -> int:
    """What the allocator holds and no tensor uses: free for the next run, taken to the driver."""
    reserved = _counter("memory_reserved", device) or 0
    return max(reserved - (allocated_bytes(device) or 0), 0)


@contextlib.contextmanager
def memory_limit(device: torch.device, limit_bytes: int | None, total_bytes: int) -> Iterator[None]:
    """Let torch's CUDA allocator reserve no more than `limit_bytes` inside the scope.

    Args:
        device: a CUDA device; nothing happens on any other, or where `limit_bytes` is None.
        limit_bytes: the most bytes, up to `total_bytes`.
        total_bytes: the device's memory.
    """
    if limit_bytes is None or device.type != "cuda":
        yield
        return
    fraction = min(max(limit_bytes / total_bytes, 0.0), 1.0)
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(fraction, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def _counter(name: str, device: torch.device) -> int | None:
    """One of the allocator's counters. A CPU has none; backends without it raise, or answer 0
    while a model is in memory.
    """
    if device.type == "cpu":
        return None
    try:
        return int(getattr(torch.accelerator, name)(device)) or None
    except (RuntimeError, AttributeError, NotImplementedError):
        return None


def free_memory(device: torch.device) -> None:
    """Give back what dropped tensors held: collect cycles, then empty the allocator's cache."""
    # A backward that failed leaves its unfinished work, and the gradients in it, in this thread's
    # queue until the next backward: let there be one.
    torch.zeros((), requires_grad=True).backward()
    gc.collect()
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError):  # of a GPU that works no more
            torch.accelerator.empty_cache()
