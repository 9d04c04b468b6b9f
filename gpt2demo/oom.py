"""What counts as out of memory, and what else a device's memory does to a run."""

import statistics
from collections.abc import Sequence
from typing import Final

import torch

# Torch's own class is not the only way it says so (lower case for the comparison).
_TEXTS: Final = (
    "out of memory",
    "_status_alloc_failed",  # cuBLAS, cuDNN, hipBLAS
    "cublas_status_not_initialized",  # cuBLAS finds no room for its handle
    "defaultcpuallocator: can't allocate memory",
    "not enough memory: you tried to allocate",
)
# After one of these every later call of the process fails too.
_POISON: Final = (
    "device-side assert triggered",  # its first words stand in the hint of every CUDA error
    "illegal memory access",
    "illegal instruction was encountered",
    "misaligned address",
    "unspecified launch failure",
    "the launch timed out and was terminated",  # a display's watchdog ended the kernel
    "invalid program counter",
    "operation not supported on global/shared address space",
    "hardware stack error",
    "uncorrectable ecc error",
)
_JUMP: Final = 3.0  # times as long as before: host memory is at least ten times slower
_NEARLY_FULL: Final = 0.9


class WillNotFit(torch.OutOfMemoryError):
    """The forecast says that the run does not fit; the message names need and free memory."""


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether `exc` says that memory ran out, by its class or by its text.

    A shape error, or any other error that names a size, does not.
    """
    if isinstance(exc, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(exc, RuntimeError) and any(text in str(exc).lower() for text in _TEXTS)


def is_poison(exc: BaseException) -> bool:
    """Whether `exc` leaves the process without a working GPU: only a new process has one again."""
    if isinstance(exc, torch.OutOfMemoryError) or not isinstance(exc, RuntimeError):
        return False
    text = str(exc).lower()
    return ("cuda" in text or "hip" in text) and any(words in text for words in _POISON)


def spill_note(
    reserved_bytes: int | None, total_bytes: int | None, step_ms: Sequence[float]
) -> str | None:
    """A sentence where a driver lent the GPU host memory instead of refusing; None = no sign.

    Windows does so by itself, and Linux with managed memory: no error, but steps that take many
    times as long.

    Args:
        reserved_bytes: the most that torch's allocator took.
        total_bytes: the device's own memory.
        step_ms: the measured steps, in order.
    """
    if not reserved_bytes or not total_bytes:
        return None
    if reserved_bytes > total_bytes:
        return (
            f"Torch holds {reserved_bytes / 2**30:.1f} GiB on a device of "
            f"{total_bytes / 2**30:.1f} GiB: the driver lent host memory, which is many times "
            f"slower. Lower B or T."
        )
    half = len(step_ms) // 2
    if half and reserved_bytes > _NEARLY_FULL * total_bytes:
        before, after = statistics.median(step_ms[:half]), statistics.median(step_ms[half:])
        if after > _JUMP * before:
            return (
                f"Steps went from {before:.0f} to {after:.0f} ms with the device's memory nearly "
                f"full: the driver may have moved tensors to host memory. Lower B or T."
            )
    return None
