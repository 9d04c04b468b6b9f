"""What counts as out of memory."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from gpt2demo.oom import WillNotFit, is_out_of_memory

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
