"""What counts as out of memory, as a broken GPU, and as memory lent by the host."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from gpt2demo.oom import WillNotFit, is_out_of_memory, is_poison, spill_note

GIB = 2**30

# --- what counts as out of memory ---

OOM_TEXTS = [
    "CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has a total capacity of 7.79 GiB of "
    "which 1.02 GiB is free.",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other "
    "API call, so the stacktrace below might be incorrect.",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "HIP out of memory. Tried to allocate 2.00 GiB",
    "XPU out of memory. Tried to allocate 16.00 GiB",
    "MPS backend out of memory (MPS allocated: 17.91 GB, other allocations: 412.00 MB, max "
    "allowed: 18.13 GB). Tried to allocate 256.00 MB on private pool.",
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 12884901888 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried "
    "to allocate 12884901888 bytes.",
]
OTHER_TEXTS = [
    "mat1 and mat2 shapes cannot be multiplied (4096x768 and 1024x50257)",
    "The size of tensor a (1024) must match the size of tensor b (512) at non-singleton dimension",
    "shape '[4, 1024]' is invalid for input of size 4095",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`",
    "CUDA error: no kernel image is available for execution on the device",
    "Invalid device string: 'cuda:00'",
    "unsupported memory format option Preserve",
    "",
]


@pytest.mark.parametrize("text", OOM_TEXTS)
def test_runtime_errors_that_are_out_of_memory(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(ValueError(text))  # torch never raises that for memory


@pytest.mark.parametrize("text", OTHER_TEXTS)
def test_runtime_errors_that_are_something_else(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))


def test_out_of_memory_by_class() -> None:
    for kind in (torch.OutOfMemoryError, torch.cuda.OutOfMemoryError, MemoryError, WillNotFit):
        assert is_out_of_memory(kind(""))
    for other in (KeyboardInterrupt(), SystemExit("out of memory"), OSError(28, "No space left")):
        assert not is_out_of_memory(other)


def raised(action) -> Exception:
    with pytest.raises(RuntimeError) as caught:
        action()
    return caught.value


def test_errors_that_torch_really_raises() -> None:
    assert is_out_of_memory(raised(lambda: torch.empty(2**50)))
    a, idx = torch.ones(2, 3), torch.zeros(1, 4, dtype=torch.long)
    assert not is_out_of_memory(raised(lambda: a @ a))
    assert not is_out_of_memory(raised(lambda: a.view(2**50)))
    assert not is_out_of_memory(raised(lambda: a + torch.ones(2**10)))
    assert not is_out_of_memory(raised(lambda: F.embedding(idx.double(), a)))


# --- a GPU that works no more in this process ---

MORE = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile "
    "with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
# what CUDA calls sticky: "any further CUDA work will return the same error"
POISON_TEXTS = [
    f"CUDA error: device-side assert triggered\n{MORE}",
    f"CUDA error: an illegal memory access was encountered\n{MORE}",
    f"CUDA error: an illegal instruction was encountered\n{MORE}",
    f"CUDA error: misaligned address\n{MORE}",
    f"CUDA error: invalid program counter\n{MORE}",
    f"CUDA error: unspecified launch failure\n{MORE}",
    f"CUDA error: the launch timed out and was terminated\n{MORE}",
    f"CUDA error: operation not supported on global/shared address space\n{MORE}",
    f"CUDA error: hardware stack error\n{MORE}",
    f"CUDA error: uncorrectable ECC error encountered\n{MORE}",
    "HIP error: an illegal memory access was encountered\nHIP kernel errors might be "
    "asynchronously reported at some other API call.",
    "Triton Error [CUDA]: an illegal memory access was encountered",
    "CUDA driver error: an illegal memory access was encountered",
]
# the hint that torch adds to every CUDA error names a device-side assertion
HEALTHY_TEXTS = [
    f"CUDA error: out of memory\n{MORE}",
    f"CUDA error: invalid argument\n{MORE}",
    f"CUDA error: no kernel image is available for execution on the device\n{MORE}",
    f"CUDA error: invalid device ordinal\n{MORE}",
    f"CUDA error: too many resources requested for launch\n{MORE}",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`",
    "CUDA out of memory. Tried to allocate 1.53 GiB.",
    "mat1 and mat2 shapes cannot be multiplied (4096x768 and 1024x50257)",
    "misaligned address",  # nobody's, or a CPU's
    "",
]


@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
@pytest.mark.parametrize("text", POISON_TEXTS)
def test_errors_after_which_only_a_new_process_helps(text: str, kind: type[Exception]) -> None:
    assert is_poison(kind(text))
    assert not is_out_of_memory(kind(text))
    assert not is_poison(torch.OutOfMemoryError(text))
    for other in (ValueError, OSError, KeyboardInterrupt):
        assert not is_poison(other(text))


@pytest.mark.parametrize("text", HEALTHY_TEXTS)
def test_errors_that_leave_the_gpu_alone(text: str) -> None:
    assert not is_poison(RuntimeError(text))
    assert not is_poison(torch.OutOfMemoryError(text))


# --- host memory that a driver lends ---

SLOWER = [100.0] * 4 + [500.0] * 4


@pytest.mark.parametrize(
    ("reserved_gib", "total_gib", "step_ms"),
    [
        (None, 8, SLOWER),  # no counter
        (0, 8, SLOWER),
        (7.9, None, SLOWER),
        (7.9, 8, [100.0] * 8),  # full, and as fast as ever
        (7.9, 8, [100.0] * 4 + [300.0] * 4),  # three times: noise of a busy machine
        (7.9, 8, [500.0] * 4 + [100.0] * 4),  # got faster
        (7.9, 8, [100.0] * 7 + [5000.0]),  # one hiccup
        (7.9, 8, [100.0]),
        (7.9, 8, []),
        (4.0, 8, SLOWER),  # half empty: something else made it slow
        (8.0, 8, [100.0] * 8),
    ],
)
def test_no_sign_of_lent_memory(
    reserved_gib: float | None, total_gib: float | None, step_ms: list[float]
) -> None:
    reserved = None if reserved_gib is None else round(reserved_gib * GIB)
    assert spill_note(reserved, None if total_gib is None else total_gib * GIB, step_ms) is None


@pytest.mark.parametrize(
    ("reserved_gib", "step_ms", "said"),
    [
        (9.5, [], ("9.5 GiB", "8.0 GiB", "host memory")),  # more than there is
        (9.5, [100.0] * 8, ("9.5 GiB", "8.0 GiB", "host memory")),
        (7.9, SLOWER, ("from 100 to 500 ms", "nearly full", "host memory")),
        (7.9, [100.0, 400.0], ("from 100 to 400 ms",)),
        (7.9, [90.0, 110.0, 100.0, 900.0, 30.0, 700.0, 800.0], ("from 100 to 750 ms",)),
    ],
)
def test_lent_memory_is_said_with_its_figures(
    reserved_gib: float, step_ms: list[float], said: tuple[str, ...]
) -> None:
    note = spill_note(round(reserved_gib * GIB), 8 * GIB, step_ms)
    for words in (*said, "Lower B or T."):
        assert words in note
