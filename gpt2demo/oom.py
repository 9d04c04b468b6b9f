"""What counts as out of memory, and the gate that keeps a CPU run from ending the process."""

from dataclasses import replace
from typing import Final

import torch

from gpt2demo.config import RunConfig
from gpt2demo.memory import forecast

_GIB: Final = 2**30

# Torch's own class is not the only way it says so (lower case for the comparison).
_TEXTS: Final = (
    "out of memory",
    "_status_alloc_failed",  # cuBLAS, cuDNN, hipBLAS
    "cublas_status_not_initialized",  # cuBLAS finds no room for its handle
    "defaultcpuallocator: can't allocate memory",
    "not enough memory: you tried to allocate",
)

# Beside the live tensors a CPU process holds oneDNN's and the allocator's scratch.
_CPU_OVERHEAD_BYTES: Final = 512 * 2**20
# A GPU's allocator needs up to 1.13 times the live tensors (simulated over 56 settings), and cuBLAS
# takes two workspaces of 32 MiB at most.
_GPU_FRAGMENTATION: Final = 1.13
_GPU_OVERHEAD_BYTES: Final = 64 * 2**20

_SMALLER: Final = "Take a smaller model."
_SHORTER: Final = tuple(2**k for k in range(10, -1, -1))  # lengths to propose, longest first


class WillNotFit(torch.OutOfMemoryError):
    """The forecast says that the run does not fit; the message names need and free memory."""


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether `exc` says that memory ran out, by its class or by its text.

    A shape error, or any other error that names a size, does not.
    """
    if isinstance(exc, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(exc, RuntimeError) and any(text in str(exc).lower() for text in _TEXTS)


def cpu_need_bytes(config: RunConfig) -> int:
    """What a CPU run will take from the machine: the forecast and the process's own scratch."""
    return forecast(config, "cpu").peak_bytes + _CPU_OVERHEAD_BYTES


def check_cpu_memory(config: RunConfig, free_bytes: int | None) -> None:
    """Refuse a CPU run that the machine cannot hold.

    Linux promises memory that it does not have and ends the whole process when it is used, so on
    a CPU the wall must stand before the first allocation.

    Raises:
        WillNotFit: (a torch.OutOfMemoryError) naming need and free memory in GiB.
    """
    need = cpu_need_bytes(config)
    if free_bytes is not None and need > free_bytes:
        raise WillNotFit(
            f"The run needs about {need / _GIB:.1f} GiB and {free_bytes / _GIB:.1f} GiB are free."
        )


def advice(config: RunConfig, device_type: str, free_bytes: int | None) -> str:
    """What to lower after an out-of-memory, in one sentence.

    It names sizes only where the forecast and what comes on top of it stay within `free_bytes`.
    """
    B, T = config.B, config.T
    if free_bytes is None:
        lower = [f"{name} below {size}" for name, size in (("B", B), ("T", T)) if size > 1]
        return f"Lower {' or '.join(lower)}, or take a smaller model." if lower else _SMALLER
    for b in range(B - 1, 0, -1):
        if _need_bytes(replace(config, B=b), device_type) <= free_bytes:
            return f"Lower B: at T={T}, B={b} should fit."
    for t in _SHORTER:
        if t < T and _need_bytes(replace(config, B=1, T=t), device_type) <= free_bytes:
            return f"Lower T: at B=1, T={t} should fit."
    return _SMALLER


def _need_bytes(config: RunConfig, device_type: str) -> float:
    if device_type == "cpu":
        return cpu_need_bytes(config)
    live = forecast(config, device_type).peak_bytes
    return live * _GPU_FRAGMENTATION + _GPU_OVERHEAD_BYTES
