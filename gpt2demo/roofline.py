"""How long a step should take, and where its time goes, from what a device was measured to do.

Three sums: the matmuls' FLOPs over their measured rates, the bytes that all else reads and writes
over the measured bandwidth, and the operations that the host starts times what one start costs.
What is counted (`step_counts`) is the eager step. torch.compile fuses what lies between the
matmuls: there the counts are scaled by one factor.
"""

import bisect
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from gpt2demo.config import RunConfig
from gpt2demo.memory import fused_sdpa
from gpt2demo.step_counts import (
    CLASSIFIER,
    FORMS,
    MLP,
    attention_products,
    matmul_flops,
    operations,
    traffic,
)

# The parts of a step, in the order in which a page shows them.
PART_NAMES: Final = {
    "layers": "the layers' matmuls",
    "classifier": "the classifier's matmuls",
    "attention": "attention's products",
    "scores": "softmax, mask and layouts of attention",
    "activations": "LayerNorm, GELU, residuals, biases",
    "loss": "cross-entropy",
    "casts": "autocast's casts",
    "gradients": "the tied gradient, unscaling",
    "optimizer": "AdamW",
    "launches": "starting operations",
}
_MATMULS: Final = ("layers", "classifier", "attention")

# What modules, autograd and Python do around an operation, in bare elementwise operations. Found
# with models 12 layers deep whose tensors hold next to nothing (64 wide, 64 tokens in the
# vocabulary, 8 in the step): forward, backward and optimizer took 2.4 to 3.7 times their operations
# times the launch overhead, over both attentions, fp32 and bf16, on a CPU with torch 2.13.
HOST_WORK: Final = 3.0

# What torch.compile leaves of the elementwise traffic and of the operations to start: the lesson's
# step on an A100 went from 300 to 130 ms by it alone.
_FUSED: Final = 1 / 3
_FUSABLE: Final = ("scores", "activations", "loss", "casts")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What one device was measured to do. A figure that is missing is unknown."""

    device_type: str  # "cpu", "cuda", ...
    tokens: int  # B*T that the matmuls were measured for
    # precision -> one of SHAPES -> one of FORMS -> FLOP/s
    flops_per_sec: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    # (bytes of the block, bytes/s read and written), small blocks first: caches are faster
    copies: tuple[tuple[int, float], ...] = ()
    launch_seconds: float | None = None  # host seconds to start one tiny operation

    def matmul(self, precision: str, shape: str, form: str) -> float | None:
        """FLOP/s of one form at one shape; None = unknown."""
        return _positive(self.flops_per_sec.get(precision, {}).get(shape, {}).get(form))

    def bandwidth(self, block_bytes: float) -> float | None:
        """Bytes/s, reads and writes counted, over a tensor of this size; None = unknown.

        Between two measured sizes the logarithms are interpolated; outside the nearest counts.
        """
        copies = [(size, rate) for size, rate in self.copies if size > 0 and _positive(rate)]
        if not copies:
            return None
        right = bisect.bisect_left(copies, (block_bytes, 0.0))
        if right in (0, len(copies)):
            return copies[min(right, len(copies) - 1)][1]
        (small, low), (large, high) = copies[right - 1 : right + 1]
        share = math.log(block_bytes / small) / math.log(large / small)
        return low * (high / low) ** share


@dataclass(frozen=True, kw_only=True, slots=True)
class StepForecast:
    """One step as forecast. None = a rate that it needs is unknown."""

    ms_per_step: float | None
    tokens_per_sec: float | None
    parts_ms: dict[str, float | None]  # the keys of PART_NAMES; they add up to ms_per_step
    # the step if arithmetic took no time; attention's products still read and write
    ms_without_matmuls: float | None
    matmul_share: float | None  # layers, classifier and attention's products over all
    flops: dict[str, dict[str, int]]  # FLOPs a step: layers, classifier, attention -> form
    traffic_bytes: dict[str, int]  # part -> bytes read and written, products left out
    operations: int  # that the host starts
    missing: tuple[str, ...]  # what was not measured
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The forecast for JSON."""
        return asdict(self)


def training_rate(config: RunConfig, rates: Rates) -> float | None:
    """FLOP/s over a whole step's layers and classifier: all FLOPs over all time; None = unknown."""
    flops = matmul_flops(config)
    seconds = 0.0
    total = 0
    for part, shape in (("layers", MLP), ("classifier", CLASSIFIER)):
        for form in FORMS:
            rate = rates.matmul(config.precision, shape, form)
            if rate is None:
                return None
            seconds += flops[part][form] / rate
            total += flops[part][form]
    return total / seconds


def step_forecast(config: RunConfig, rates: Rates) -> StepForecast:
    """The time of one step of `config`, and its parts, on the device that `rates` describes.

    On a CPU everything happens in turn and adds up. An accelerator works while the host runs ahead:
    the longer of the two counts, and `launches` is what the device waits for the host.

    Not counted: exp and tanh, which on CPUs take longer than their bytes; page faults; a clock that
    falls under load.
    """
    flops = matmul_flops(config)
    parts: dict[str, float | None] = dict.fromkeys(PART_NAMES, 0.0)  # seconds, then ms
    missing: list[str] = []

    def add(part: str, seconds: float | None) -> None:
        known = parts[part]
        parts[part] = None if seconds is None or known is None else known + seconds

    for part, shape in (("layers", MLP), ("classifier", CLASSIFIER)):
        for form in FORMS:
            rate = rates.matmul(config.precision, shape, form)
            if rate is None:
                missing.append(f"{config.precision} {shape} {form}")
            add(part, rate and flops[part][form] / rate)
    copied: list[float | None] = []
    for count, (product, product_bytes) in attention_products(config):
        bandwidth = rates.bandwidth(product_bytes)
        copied.append(bandwidth and count * product_bytes / bandwidth)
        add("attention", _longer(_arithmetic(config, rates, count * product), copied[-1]))
    moved: dict[str, int] = {}
    for item in traffic(config, rates.device_type):
        moved[item.part] = moved.get(item.part, 0) + item.total_bytes
        bandwidth = rates.bandwidth(item.tensor_bytes)
        left = _FUSED if config.compile and item.part in _FUSABLE else 1
        add(item.part, bandwidth and left * item.total_bytes / bandwidth)
    if not rates.bandwidth(1):
        missing.append("bandwidth")

    ops = operations(config, rates.device_type)
    launch = _positive(rates.launch_seconds)
    if launch is None:
        missing.append("launch overhead")
    host = launch and ops * HOST_WORK * launch * (_FUSED if config.compile else 1)
    work, matmuls = _sum(parts), _sum({part: parts[part] for part in _MATMULS})
    parts["launches"] = _waiting(host, work, rates.device_type)
    total = _sum(parts)
    others = None if work is None else work - (matmuls or 0.0) + sum(map(float, copied))
    rest = _sum({"work": others, "launches": _waiting(host, others, rates.device_type)})
    return StepForecast(
        ms_per_step=total and total * 1000,
        ms_without_matmuls=rest and rest * 1000,
        tokens_per_sec=total and config.tokens_per_step / total,
        parts_ms={part: None if s is None else s * 1000 for part, s in parts.items()},
        matmul_share=total and matmuls and matmuls / total,
        flops=flops,
        traffic_bytes=moved,
        operations=ops,
        missing=tuple(missing),
        notes=_notes(config, rates),
    )


def _waiting(host: float | None, work: float | None, device_type: str) -> float | None:
    """Seconds that the device waits for the host, which takes `host` to start `work` seconds."""
    if host is None or device_type == "cpu":
        return host
    return None if work is None else max(host - work, 0.0)


def _arithmetic(config: RunConfig, rates: Rates, flops: float) -> float | None:
    """Seconds at the MLP's rate over its three forms; None = unknown."""
    per_form = [rates.matmul(config.precision, MLP, form) for form in FORMS]
    if None in per_form:
        return None
    return flops * sum(1 / rate for rate in per_form if rate) / len(FORMS)


def _longer(arithmetic: float | None, copying: float | None) -> float | None:
    """The roofline proper: what takes longer."""
    return None if arithmetic is None or copying is None else max(arithmetic, copying)


def step_forecasts(
    config: RunConfig, rates: Rates, precisions: Iterable[str]
) -> dict[str, StepForecast]:
    """`step_forecast` by precision, all else as in `config`."""
    return {p: step_forecast(replace(config, precision=p), rates) for p in precisions}


def _notes(config: RunConfig, rates: Rates) -> tuple[str, ...]:
    notes = []
    N = config.tokens_per_step
    if rates.tokens and not 0.5 <= N / rates.tokens <= 2:
        notes.append(f"Rates measured for {rates.tokens:,} tokens a step, not for {N:,}.")
    if config.compile:
        notes.append(
            "torch.compile is counted as leaving a third of the elementwise traffic and launches."
        )
    if config.attention == "sdpa":
        notes.append("SDPA is counted at the MLP's rate; its kernel was not measured.")
        if not fused_sdpa(config.precision, rates.device_type, None):
            notes.append("It has no fused kernel here: plain matmuls take longer than counted.")
        if config.precision == "tf32" and rates.device_type == "cuda":
            notes.append(
                "On an NVIDIA GPU SDPA runs the same kernel in fp32 and TF32: TF32 gains nothing "
                "there."
            )
    return tuple(notes)


def _sum(parts: Mapping[str, float | None]) -> float | None:
    known = [seconds for seconds in parts.values() if seconds is not None]
    return sum(known) if len(known) == len(parts) else None


def _positive(rate: float | None) -> float | None:
    """The rate, or None where it is none to divide by."""
    return rate if rate is not None and math.isfinite(rate) and rate > 0 else None
