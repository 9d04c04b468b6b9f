"""The five precisions: what each sets in torch, and a scope that sets it and puts it back."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """One way to train: the matmul mode, what autocast computes in, and whether losses scale."""

    id: str
    name: str  # as the page writes it
    matmul_mode: str  # for torch.set_float32_matmul_precision
    autocast_dtype: torch.dtype | None  # None = no autocast
    scales_gradients: bool
    weight_dtype: torch.dtype
    meaning: str  # one or two plain sentences, true on every machine


PRECISION: Final[dict[str, Precision]] = {
    p.id: p
    for p in (
        Precision(
            id="fp32",
            name="float32",
            matmul_mode="highest",
            autocast_dtype=None,
            scales_gradients=False,
            weight_dtype=torch.float32,
            meaning="Every number has 32 bits, inside the matmuls too. PyTorch's default.",
        ),
        Precision(
            id="tf32",
            name="TF32",
            matmul_mode="high",
            autocast_dtype=None,
            scales_gradients=False,
            weight_dtype=torch.float32,
            meaning=(
                "Tensors stay float32; a matmul rounds its inputs to 10 mantissa bits and adds "
                "up in float32."
            ),
        ),
        Precision(
            id="bf16",
            name="bf16 autocast",
            matmul_mode="highest",
            autocast_dtype=torch.bfloat16,
            scales_gradients=False,
            weight_dtype=torch.float32,
            meaning=(
                "Matmuls run in bfloat16: float32's range, 7 mantissa bits. Weights, LayerNorm and "
                "loss stay float32."
            ),
        ),
        Precision(
            id="fp16",
            name="fp16 autocast + GradScaler",
            matmul_mode="highest",
            autocast_dtype=torch.float16,
            scales_gradients=True,
            weight_dtype=torch.float32,
            meaning=(
                "Matmuls run in float16: 10 mantissa bits, small range. The loss is scaled up so "
                "that small gradients do not vanish."
            ),
        ),
        Precision(
            id="fp64",
            name="float64",
            matmul_mode="highest",
            autocast_dtype=None,
            scales_gradients=False,
            weight_dtype=torch.float64,
            meaning="Every number has 64 bits: twice the memory. A yardstick, not a way to train.",
        ),
    )
}


@contextlib.contextmanager
def precision_scope(precision: Precision) -> Iterator[None]:
    """Set the process-wide float32 matmul mode of `precision`; put the old one back at the end.

    The mode belongs to the whole process: two scopes must not be open at the same time.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision.matmul_mode)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def autocast(precision: Precision, device_type: str) -> torch.autocast:
    """The autocast context for forward and loss; one that changes nothing where none is asked."""
    return torch.autocast(
        device_type,
        dtype=precision.autocast_dtype or torch.bfloat16,  # fp64 and fp32: named but not enabled
        enabled=precision.autocast_dtype is not None,
    )


def grad_scaler(precision: Precision, device_type: str) -> torch.amp.GradScaler:
    """The gradient scaler; a disabled one passes losses and steps through unchanged.

    It must name the device in use: a "cuda" scaler on a CPU switches itself off.
    """
    return torch.amp.GradScaler(device_type, enabled=precision.scales_gradients)
