"""How large a step's numbers are, and how many of them each number format would lose.

Tensors are counted one after the other in small pieces; none is kept.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import torch

from gpt2demo.inspection import BF16, FP16, FP16_SCALED, LOSS_SCALE, Outside, ValueHistogram

LOW: Final = -150  # of the histogram: floor(log2 |value|); what lies below is counted at the end
HIGH: Final = 128
INT8_LEVELS: Final = 127  # int8 with one scale a tensor: the largest value becomes 127

_PIECE: Final = 2**22  # values looked at in one go


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """The range of a floating-point format, as torch itself gives it."""

    id: str
    zero_up_to: float  # the largest magnitude that rounds to zero: half the smallest number
    smallest_normal: float  # below it numbers lose mantissa bits
    infinite_from: float  # the smallest magnitude that rounds to infinity


def _format(name: str, dtype: torch.dtype, scale: int = 1) -> Format:
    """`dtype`'s range; with `scale` that of numbers which are multiplied by it first."""
    limits = torch.finfo(dtype)
    top = limits.max / (2 - limits.eps)  # the largest power of two
    return Format(
        id=name,
        zero_up_to=limits.smallest_normal * limits.eps / 2 / scale,
        smallest_normal=limits.smallest_normal / scale,
        infinite_from=(limits.max + top * limits.eps / 2) / scale,
    )


FORMATS: Final = (
    _format("fp32", torch.float32),
    _format(BF16, torch.bfloat16),
    _format(FP16, torch.float16),
    _format(FP16_SCALED, torch.float16, LOSS_SCALE),
)


@dataclass(kw_only=True)
class Values:
    """Counts the values of the tensors that it is shown."""

    count: int = 0
    zeros: int = 0
    not_finite: int = 0
    int8_zeros: int = 0
    _counts: Counter[int] = field(default_factory=Counter)
    _powers: Counter[int] = field(default_factory=Counter)  # of these, exact powers of two
    _infinite: Counter[str] = field(default_factory=Counter)

    @torch.no_grad()
    def add(self, tensor: torch.Tensor, factor: float = 1.0) -> None:
        """Count the values of a floating-point tensor, each times `factor`, a power of two."""
        if tensor.numel() == 0:
            return
        pieces = tensor.detach().reshape(-1).split(_PIECE)
        before = self.zeros
        limit = max(self._add(_wide(piece, factor)) for piece in pieces) / (2 * INT8_LEVELS)
        if limit > 0:
            small = sum(int(torch.count_nonzero(_wide(p, factor) <= limit)) for p in pieces)
            self.int8_zeros += small - (self.zeros - before)

    def _add(self, magnitude: torch.Tensor) -> float:
        """Count one piece; its largest finite magnitude."""
        self.count += magnitude.numel()
        largest = float(magnitude.max())
        if not math.isfinite(largest):
            finite = magnitude[torch.isfinite(magnitude)]
            self.not_finite += magnitude.numel() - finite.numel()
            magnitude, largest = finite, float(finite.max()) if finite.numel() else 0.0
        zeros = magnitude.numel() - int(torch.count_nonzero(magnitude))
        self.zeros += zeros
        if largest == 0:
            return 0.0
        mantissa, exponent = torch.frexp(magnitude)  # 0.5 <= mantissa < 1; both 0 for a zero
        if magnitude.dtype == torch.float64:
            exponent = exponent.clamp(LOW + 1, HIGH + 1)
        self._tally(self._counts, exponent)
        self._counts[-1] -= zeros
        self._tally(self._powers, exponent[mantissa == 0.5])
        for known in FORMATS:
            if largest >= known.infinite_from:
                above = magnitude >= known.infinite_from
                self._infinite[known.id] += int(torch.count_nonzero(above))
        return largest

    @staticmethod
    def _tally(counts: Counter[int], exponent: torch.Tensor) -> None:
        """Count values by floor(log2), which is one less than frexp's exponent."""
        found = torch.bincount(exponent - (LOW + 1), minlength=HIGH - LOW + 1).tolist()
        counts.update({i + LOW: n for i, n in enumerate(found) if n})

    def histogram(self) -> ValueHistogram:
        """What was counted so far."""
        counts = {e: n for e, n in sorted(self._counts.items()) if n}
        return ValueHistogram(
            count=self.count,
            zeros=self.zeros,
            not_finite=self.not_finite,
            lowest=min(counts, default=None),
            highest=max(counts, default=None),
            counts=counts,
            outside={known.id: self._outside(known) for known in FORMATS},
            int8_zeros=self.int8_zeros,
        )

    def _outside(self, known: Format) -> Outside:
        """Both lower limits are powers of two, so the bins tell exactly."""
        zero = round(math.log2(known.zero_up_to))
        normal = round(math.log2(known.smallest_normal))
        lost = sum(n for e, n in self._counts.items() if e < zero) + self._powers[zero]
        below = sum(n for e, n in self._counts.items() if e < normal)
        return Outside(underflow=lost, subnormal=below - lost, overflow=self._infinite[known.id])


def _wide(piece: torch.Tensor, factor: float) -> torch.Tensor:
    """Magnitudes in at least float32, which holds every 16-bit format exactly."""
    magnitude = piece.abs() if piece.dtype == torch.float64 else piece.float().abs()
    return magnitude if factor == 1.0 else magnitude * factor
