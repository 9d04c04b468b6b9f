"""What was seen of one training step, as it is shown and written."""

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from gpt2demo.records import jsonable

CLASSIFIER: Final = "classifier"
MLP_PART: Final = "MLP"
ATTENTION: Final = "attention"
REST: Final = "LayerNorm and rest"
LOSS: Final = "cross-entropy"
BACKWARD: Final = "backward"
OPTIMIZER: Final = "optimizer"
WAITING: Final = "waiting"  # of the device, for the CPU to launch something
PARTS: Final = (CLASSIFIER, MLP_PART, ATTENTION, REST, LOSS, BACKWARD, OPTIMIZER)

BF16: Final = "bf16"  # keys of `ValueHistogram.outside`
FP16: Final = "fp16"
FP16_SCALED: Final = "fp16, scaled"  # of values that are multiplied by LOSS_SCALE first
LOSS_SCALE: Final = 2**16  # GradScaler's first


@dataclass(frozen=True, kw_only=True, slots=True)
class Matmul:
    """The matmuls of one shape in one part of the step: (M, K) @ (K, N), `batch` times each."""

    part: str
    batch: int
    M: int
    N: int
    K: int
    times: int  # in one step
    flops: float  # of one of them
    seconds: float  # of one of them, on average


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """Where one step's time went. Shares are of the step; None = unknown."""

    step_seconds: float  # by the clock, with the profiler on
    parts: dict[str, float]  # part -> seconds; on a GPU of its kernels, and `WAITING` the rest
    matmul_share: float
    fused_attention_share: float  # SDPA's kernels, whose two matmuls nobody can tell apart
    tensor_core_share: float | None
    tensor_core_note: str  # how it is known, or why it is not
    matmuls: tuple[Matmul, ...]  # the largest first, by the FLOPs of one

    @property
    def accounted(self) -> float:
        """The sum of the parts over the step."""
        return sum(self.parts.values()) / self.step_seconds

    @property
    def largest_forward(self) -> Matmul | None:
        """The largest single matmul of the forward pass."""
        forward = [m for m in self.matmuls if m.part in PARTS[:5]]
        return forward[0] if forward else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cast:
    """One operation of the forward pass and its types; equal ones of many layers are one."""

    where: str  # the module as the checkpoint names it, layers as *: "h.*.attn.c_attn"
    operation: str  # as the code calls it: "linear"
    inputs: tuple[str, ...]  # types that it was called with, each once: "float32"
    weight: str | None  # of the parameters among them
    compute: str  # what its kernels were given, after the casts; " + " where they differ
    output: str
    times: int  # in one forward pass


@dataclass(frozen=True, kw_only=True, slots=True)
class CastTable:
    """The types of one training step. A name with "+" holds several types."""

    operations: tuple[Cast, ...]  # in the order of the forward pass
    weights: str
    gradients: str
    moments: str  # AdamW's state


@dataclass(frozen=True, kw_only=True, slots=True)
class Outside:
    """How many values a format does not hold as they are."""

    underflow: int  # become zero
    subnormal: int  # lie below its normal range: fewer mantissa bits
    overflow: int  # become infinite


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueHistogram:
    """The magnitudes of many values, and what each format would make of them."""

    count: int  # of all values
    zeros: int
    not_finite: int
    lowest: int | None  # floor(log2) of the smallest and the largest that are no zero
    highest: int | None
    counts: dict[int, int]  # floor(log2 |value|) -> how many; none of them is zero
    outside: dict[str, Outside]  # by format
    int8_zeros: int  # become zero in int8 with one scale a tensor

    @property
    def nonzero(self) -> int:
        """Finite values other than zero: what the shares are of."""
        return self.count - self.zeros - self.not_finite

    def share(self, count: int) -> float | None:
        """A share of the values that are no zero; None where there are none."""
        return count / self.nonzero if self.nonzero else None

    def to_dict(self) -> dict[str, Any]:
        """The histogram for JSON; the exponents are texts, as JSON has it."""
        data = asdict(self)
        return data | {"counts": {str(e): n for e, n in self.counts.items()}}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockReading:
    """One ordinary step, read from the clock both ways."""

    true_ms: float  # after a synchronize, as the whole page counts
    unsynchronized_ms: float  # when AdamW's step had returned, without waiting for the device


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What was seen of one step. What is None was not seen; `missing` says why."""

    config: dict[str, Any]
    device_type: str
    device_name: str | None
    state: str  # "finished", or how the run ended: one of records.STATES
    message: str  # in one sentence
    notes: tuple[str, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)  # "profile", "casts", ... -> why
    seconds: float  # that the inspection took
    clock: tuple[ClockReading, ...] = ()
    profile: StepProfile | None = None
    casts: CastTable | None = None
    # "weights", "activations", "gradients of activations", "gradients of weights"; the gradients
    # without float16's loss scale
    values: dict[str, ValueHistogram] = field(default_factory=dict)
    must_restart: bool = False  # the GPU works no more in this process

    @property
    def step_ms(self) -> float | None:
        """An ordinary step, without instruments: the median of the clock's true readings."""
        return statistics.median(r.true_ms for r in self.clock) if self.clock else None

    @property
    def unsynchronized_ms(self) -> float | None:
        """The same steps, read without a synchronize."""
        return statistics.median(r.unsynchronized_ms for r in self.clock) if self.clock else None

    def to_dict(self) -> dict[str, Any]:
        """The inspection as strict JSON takes it."""
        data = {**asdict(self), "step_ms": self.step_ms}
        data["unsynchronized_ms"] = self.unsynchronized_ms
        data["values"] = {name: found.to_dict() for name, found in self.values.items()}
        if self.profile:
            data["profile"]["accounted"] = self.profile.accounted
        return jsonable(data)
