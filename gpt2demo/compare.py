"""What a precision should buy on this device, and what it bought, in words with figures.

A step is the matmuls, which a precision can speed up, and a rest, which it cannot: the optimizer,
the elementwise operations and the kernel launches. So the speed-up stays below 1 / (1 - share of
the matmuls), however fast they become (Amdahl's law).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from gpt2demo.config import PRECISIONS, RunConfig
from gpt2demo.flops import flops_per_token
from gpt2demo.memory import forecast, num_params
from gpt2demo.peaks import find_gpu, peak_flops
from gpt2demo.race import BASELINE, MIN_STEPS_FOR_SPREAD, PrecisionResult
from gpt2demo.support import Support

if TYPE_CHECKING:  # device.py imports torch, which this module does without
    from gpt2demo.device import DeviceInfo

CAUSES: Final = (
    "baseline",
    "native",
    "native, less than expected",
    "native, more than expected",
    "emulated",
    "scalar fallback",
    "no effect",
    "step too small",
    "memory-bound",
    "too noisy",
    "unknown peak",
    "out of memory",
    "diverged",
    "failed",
    "not available",
    "not measured",
    "no baseline",
)

# What a step reaches of the datasheet's rates. Held against the five step times of the lesson on an
# A100 (1000 ms in fp32, 333 TF32, 300 bf16, 130 compiled, 96 with fused attention too; test_compare
# has the table): every one within a quarter. A probe's rates are achieved ones and count whole.
_OF_PEAK: Final = 0.85
_OF_BANDWIDTH: Final = 0.7
# torch's own time from one small operation to the next, Python and autograd included
_LAUNCH_SECONDS: Final = 10e-6
# torch.compile fuses the elementwise operations: the lesson's 300 ms become 130
_COMPILED: Final = 1 / 3

# Reads and writes of whole tensors in one step, counted from torch's operations (test_compare
# counts them again). In tensors of N*C numbers a layer: GELU 20, LayerNorm 10, residuals 12, bias
# gradients 9, gradients of q, k and v joined 6; written-out attention copies heads, 14 more.
_LAYER_PASSES: Final = {"sdpa": 57, "manual": 71}
# of a (B, n_head, T, T) tensor: scale, mask and softmax with their backward 13, and 6 by the
# matmuls around them, which wait for memory and not for arithmetic
_SCORE_PASSES: Final = 19
_LOGIT_PASSES: Final = 6  # of the (N, V) logits, by the cross-entropy
_EMBEDDING_PASSES: Final = 4  # of the (V, C) token embedding, by its two gradients
_OPTIMIZER_PASSES: Final = {"default": 21, "fused": 7}  # AdamW, of all weights
# autocast: a weight is rounded to 16 bits and its gradient widened again (6 bytes each), and so are
# a token's logits. (What smaller tensors save elsewhere, other casts cost; on a CPU, whose softmax
# stays in 16 bits, written-out attention at long T moves a quarter less than this.)
_CAST_BYTES: Final = 12
_LAYER_LAUNCHES: Final = {"sdpa": 30, "manual": 48}
_CAST_LAUNCHES: Final = 25  # a layer
_OTHER_LAUNCHES: Final = 80  # embeddings, loss, optimizer

_NEAR: Final = 1.25  # a forecast holds within this factor
_SAME: Final = 1.1  # below it nobody feels a difference
_UNCLEAR: Final = 1.15  # a spread around 1.0 may be as wide as this and still mean "the same"
_WIDE: Final = 2.0  # a spread as wide as this is held against no forecast
# fp32 FLOPs a byte that even a small CPU does: a step with fewer waits for memory everywhere
_SMALL_INTENSITY: Final = 4.0
_GIB: Final = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What one precision should do here, before it ran."""

    precision: str
    status: str  # one of support.STATUSES
    speedup: float | None  # forecast of fp32's step time over this one's; None = no figure
    seconds: float | None  # forecast of its own step
    shares: dict[str, float] | None  # part -> share of that step; they add up to 1
    ratio: float | None  # matmul rate over fp32's
    most: float | None  # the speed-up if matmuls took no time at all
    basis: str | None  # whose rates: "datasheet" or "probe"; None = not all are known
    words: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What one precision did, and why."""

    precision: str
    cause: str  # one of CAUSES
    words: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rates:
    flops: dict[str, float | None]  # achieved matmul FLOP/s by precision
    bandwidth: float | None  # achieved bytes/s
    launch_seconds: float
    basis: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """Where the time of one step goes, seconds."""

    matmul: float
    activations: float
    casts: float
    optimizer: float
    launching: float  # all launches together; a GPU works meanwhile
    overlaps: bool

    @property
    def launches(self) -> float:
        """What the device waits for launches."""
        busy = self.matmul + self.activations + self.casts
        return max(self.launching - busy, 0.0) if self.overlaps else self.launching

    @property
    def seconds(self) -> float:
        return self.matmul + self.activations + self.casts + self.optimizer + self.launches

    @property
    def most(self) -> float:
        """The speed-up if matmuls took no time."""
        return self.seconds / replace(self, matmul=0.0).seconds

    @property
    def shares(self) -> dict[str, float]:
        names = ("matmul", "activations", "casts", "optimizer", "launches")
        return {name: getattr(self, name) / self.seconds for name in names}


def expect(
    device: "DeviceInfo", config: RunConfig, probe: Mapping[str, float] | None = None
) -> dict[str, Expectation]:
    """What each precision should do on this device at these settings; runs nothing.

    Args:
        device: the machine; its `support` says what is native.
        config: the settings; its precision does not matter.
        probe: measured rates in place of the datasheet's: matmul FLOP/s by precision id,
            "bandwidth" in bytes/s, "launch" in seconds. What it lacks is unknown.
    """
    rates = _rates(device, probe)
    return {
        precision: _expectation(device, config, precision, rates) for precision in device.support
    }


def explain(
    device: "DeviceInfo",
    config: RunConfig,
    results: Sequence[PrecisionResult],
    probe: Mapping[str, float] | None = None,
) -> dict[str, Verdict]:
    """Why each precision of a race was as fast as it was.

    Args:
        device: the machine the race ran on.
        config: the race's settings; its precision does not matter.
        results: the race's, fp32 among them where a speed-up is to be judged.
        probe: as for `expect`.
    """
    expected = expect(device, config, probe)
    base = next((result for result in results if result.precision == BASELINE), None)
    verdicts = {}
    for result in results:
        cause, words = _verdict(device, config, result, base, expected)
        verdicts[result.precision] = Verdict(precision=result.precision, cause=cause, words=words)
    return verdicts


# --- the estimate


def _rates(device: "DeviceInfo", probe: Mapping[str, float] | None) -> _Rates:
    def of(value: float | None, share: float) -> float | None:
        return value * share if value and math.isfinite(value) and value > 0 else None

    if probe is not None:
        return _Rates(
            flops={p: of(probe.get(p), 1) for p in PRECISIONS},
            bandwidth=of(probe.get("bandwidth"), 1),
            launch_seconds=of(probe.get("launch"), 1) or 0.0,
            basis="probe",
        )
    name, memory = device.name, device.memory_total_bytes
    spec = find_gpu(name, memory)
    return _Rates(
        flops={p: of(peak_flops(name, memory, p), _OF_PEAK) for p in PRECISIONS},
        bandwidth=of(spec.bandwidth_bytes_per_sec if spec else None, _OF_BANDWIDTH),
        launch_seconds=_LAUNCH_SECONDS,
        basis="datasheet",
    )


def _traffic(config: RunConfig) -> tuple[float, float]:
    """Bytes that one step moves in float32 outside the matmuls: (activations, optimizer)."""
    gpt, N = config.gpt, config.tokens_per_step
    C, V, L = gpt.n_embd, gpt.vocab_size, gpt.n_layer
    numbers = L * _LAYER_PASSES[config.attention] * N * C + _LOGIT_PASSES * N * V
    if config.attention == "manual":
        numbers += L * _SCORE_PASSES * config.B * gpt.n_head * config.T**2
    numbers *= _COMPILED if config.compile else 1
    numbers += _EMBEDDING_PASSES * V * C
    return 4.0 * numbers, 4.0 * _OPTIMIZER_PASSES[config.optimizer] * num_params(gpt)


def _step(device: "DeviceInfo", config: RunConfig, precision: str, rates: _Rates) -> _Step | None:
    """One step of `precision`; None where a rate is unknown."""
    rate, bandwidth = rates.flops[precision], rates.bandwidth
    if rate is None or bandwidth is None:
        return None
    gpt, N = config.gpt, config.tokens_per_step
    L = gpt.n_layer
    wide = 2 if precision == "fp64" else 1
    activations, optimizer = (wide * count for count in _traffic(config))
    amp = precision in ("bf16", "fp16")
    matmul_weights = L * 12 * gpt.n_embd**2 + gpt.vocab_size * gpt.n_embd
    casts = _CAST_BYTES * (matmul_weights + N * gpt.vocab_size) if amp else 0.0
    launches = L * (_LAYER_LAUNCHES[config.attention] + (_CAST_LAUNCHES if amp else 0))
    if config.compile:
        casts, launches = casts * _COMPILED, launches * _COMPILED
    return _Step(
        matmul=flops_per_token(gpt, config.T) * N / rate,
        activations=activations / bandwidth,
        casts=casts / bandwidth,
        optimizer=optimizer / bandwidth,
        launching=(launches + _OTHER_LAUNCHES) * rates.launch_seconds,
        overlaps=device.type != "cpu",
    )


def _expectation(
    device: "DeviceInfo", config: RunConfig, precision: str, rates: _Rates
) -> Expectation:
    support = device.support[precision]
    there = support.status != "not available"
    same = there and (precision == BASELINE or support.status == "no effect")
    base = _step(device, config, BASELINE, rates)
    step = base if same else _step(device, config, precision, rates)
    if not there or _scalar(device, support):
        step = None  # a probe of forward matmuls misleads: the scalar loop is in the backward pass
    known = base is not None and step is not None
    told = Expectation(
        precision=precision,
        status=support.status,
        speedup=1.0 if same else base.seconds / step.seconds if known else None,
        seconds=step.seconds if step else None,
        shares=step.shares if step else None,
        ratio=base.matmul / step.matmul if known else None,
        most=base.most if base else None,
        basis=rates.basis if step else None,
        words="",
    )
    return replace(told, words=_before(config, support, told, base.shares if base else None))


def _scalar(device: "DeviceInfo", support: Support) -> bool:
    """Whether it runs in a CPU's scalar loop; `support` says so in its warning."""
    return device.type == "cpu" and "scalar loop" in (support.slow or "")


# --- words before the race


def _before(
    config: RunConfig,
    support: Support,
    told: Expectation,
    fp32: Mapping[str, float] | None,
) -> str:
    """The words; `fp32` holds the shares of fp32's step."""
    if support.status == "not available":
        return f"Not available: {support.reason}"
    if told.precision == BASELINE:
        at = f" {_capital(_share(config, fp32))}." if fp32 else ""
        return f"The baseline, 1.0x. {support.reason}{at}"
    if support.status == "no effect":
        return f"No effect, expect 1.0x. {support.reason}"
    if told.speedup is None or fp32 is None:
        return support.reason if support.status == "emulated" else f"{support.reason} {_NO_RATE}"
    about = f"expect about {_times(told.speedup)}"
    if support.status == "emulated":
        # where these rates do not say slower, the reason would contradict them
        why = support.reason if told.speedup < 1 or told.precision == "tf32" else _BY_FLOAT32
        return f"Emulated, {_ratio(told)}: {about}. {why}"
    if _rated_alike(told):
        return f"Native, {_ratio(told)}: {about}. {support.reason}"
    return f"Native, {_ratio(told)}, but {_share(config, fp32)}: {about}.{_costly(told)}"


_NO_RATE: Final = "Not all of its rates are known here, so there is no forecast."
_BY_FLOAT32: Final = (
    "It is emulated by way of float32, so the matmuls themselves gain nothing; 16-bit tensors may "
    "still save memory traffic."
)


def _ratio(told: Expectation) -> str:
    """ "spec ratio 8.0x", "measured matmul ratio 2.3x", "spec ratio 1/32"."""
    assert told.ratio is not None
    kind = "spec ratio" if told.basis == "datasheet" else "measured matmul ratio"
    low = told.ratio < 0.5
    return f"{kind} {f'1/{1 / told.ratio:.0f}' if low else _times(told.ratio)}"


def _costly(told: Expectation) -> str:
    """Why a native precision may lose: only autocast adds work."""
    return " Autocast's own casts cost more than it saves." if told.speedup < 0.995 else ""


def _rated_alike(told: Expectation) -> bool:
    """Whether matmuls are no faster than in fp32, so that their share limits nothing."""
    return told.ratio is not None and told.ratio < _SAME


def _share(config: RunConfig, fp32: Mapping[str, float]) -> str:
    """ "at B*T=128 tokens only 31 % of the fp32 step is matmul"."""
    only = "only " if fp32["matmul"] < 0.5 else ""
    waits = f" and {_percent(fp32['launches'])} waiting for launches"
    return (
        f"at B*T={config.tokens_per_step:,} tokens {only}{_percent(fp32['matmul'])} of the fp32 "
        f"step is matmul{waits if fp32['launches'] >= 0.1 else ''}"
    )


# --- words after it


def _verdict(
    device: "DeviceInfo",
    config: RunConfig,
    result: PrecisionResult,
    base: PrecisionResult | None,
    expected: Mapping[str, Expectation],
) -> tuple[str, str]:
    """Cause and words."""
    support = device.support[result.precision]
    after = f"after {_counted(result.steps_done, 'step')}"
    if support.status == "not available":
        return "not available", f"Not available: {support.reason}"
    if result.state == "out of memory":
        return "out of memory", _out_of_memory(device, config, result)
    if result.state == "diverged":
        return "diverged", (
            f"Diverged {after}: the loss is no longer finite{_at_speed(result)}. "
            f"A lower learning rate than {config.lr:g} often helps."
        )
    if result.state == "error":
        return "failed", f"Failed {after}{_at_speed(result)}. {result.message}".rstrip()
    if result.step_ms_median is None:
        return "not measured", f"Not measured: {result.state}, {after}. {support.reason}"
    step_ms = f"{result.step_ms_median:.1f} ms a step"
    if result.precision == BASELINE:
        peak = "" if result.mfu is None else f", {_percent(result.mfu)} of its peak"
        return "baseline", f"1.00x, the baseline: {step_ms}{peak}. {support.reason}"
    if result.speedup is None or base is None:
        return "no baseline", f"{step_ms}; without a measured fp32 run no speed-up is known."
    if noise := _noise(support, result, base):
        return "too noisy", noise
    if support.status == "no effect":
        return "no effect", f"{_measured(result)}: no effect, as expected. {support.reason}"
    if support.status == "emulated":
        slower = result.speedup < 1 or result.precision == "tf32"
        why = support.reason if slower else _BY_FLOAT32
        if slower and device.compute_capability and result.precision == "bf16":
            why += " PyTorch widens it to float32 for every matmul and rounds back."
        cause = "scalar fallback" if _scalar(device, support) else "emulated"
        return cause, f"{_measured(result)}: {why}"
    cause, words = _native(support, config, result, base, expected)
    return cause, f"{_measured(result)}{words}{_skipped(result)}"


def _noise(support: Support, result: PrecisionResult, base: PrecisionResult) -> str | None:
    """Why this speed-up must not be judged, or None."""
    x, low, high = result.speedup, result.speedup_low, result.speedup_high
    if low is None or high is None:
        fewest = min(result.steps_measured, base.steps_measured)
        return (
            f"{x:.2f}x from {_counted(fewest, 'measured step')}: too few to judge, "
            f"at least {MIN_STEPS_FOR_SPREAD} are needed."
        )
    remedy = _REMEDY[result.spread]
    if support.status == "no effect":
        if 1 / _SAME <= x <= _SAME:
            return None
        return (
            f"{x:.2f}x, yet {result.precision} runs exactly as fp32 does here: the machine itself "
            f"changed between the runs. {remedy}"
        )
    unclear = low < 1 < high and high / low > _UNCLEAR
    too_wide = support.status == "native" and high / low > _WIDE
    if not unclear and not too_wide:
        return None
    if result.spread == "rounds":
        pairs = zip(base.round_ms_medians, result.round_ms_medians, strict=False)
        faster = [fp32 > this for fp32, this in pairs if fp32 and this]
        found = f"faster than fp32 in {sum(faster)} of {len(faster)} rounds, from"
    else:
        found = "the middle half of the steps allows anything from"
    return f"{x:.2f}x, too noisy to judge: {found} {low:.2f}x to {high:.2f}x. {remedy}"


_REMEDY: Final = {
    "rounds": "Something else uses the machine: close it and race again.",
    "quartiles": "Race in 3 or more fair rounds on a machine that does nothing else.",
}


def _native(
    support: Support,
    config: RunConfig,
    result: PrecisionResult,
    base: PrecisionResult,
    expected: Mapping[str, Expectation],
) -> tuple[str, str]:
    """Cause and words of a precision that the device has units for."""
    told, fp32 = expected[result.precision], expected[BASELINE].shares
    if told.speedup is None or told.most is None or fp32 is None:
        return _native_unknown(support, config, result)
    less = result.speedup_high < told.speedup / _NEAR
    more = result.speedup_low > told.speedup * _NEAR
    compared = "less than" if less else "more than" if more else "about"
    held = f", {compared} the forecast {_times(told.speedup)}: native, {_ratio(told)}"
    reached = _reached(result, base)
    if more:
        taken = "85 % of its peak" if told.basis == "datasheet" else "the probe's rate"
        return (
            "native, more than expected",
            f"{held}. The estimate is rough, it takes every matmul at {taken}{reached}.",
        )
    if _rated_alike(told):
        return "native, less than expected" if less else "native", f"{held}. {support.reason}"
    if fp32["matmul"] < 0.5:
        small = fp32["activations"] < fp32["optimizer"] + fp32["launches"]
        advice = "Raise B or T." if small else _fewer_bytes(config)
        return (
            "step too small" if small else "memory-bound",
            f"{held}, but {_share(config, fp32)}; {_rest(fp32)}.{_costly(told)} {advice}",
        )
    if less:
        return (
            "native, less than expected",
            f"{held}{reached}. Short kernels, a power limit or other programs may hold it back.",
        )
    return (
        "native",
        f"{held}, but {_share(config, fp32)}, so {_times(told.most)} is the most; {_rest(fp32)}.",
    )


def _native_unknown(
    support: Support, config: RunConfig, result: PrecisionResult
) -> tuple[str, str]:
    """The same where no forecast can be made."""
    if result.speedup >= _SAME or support.slow:
        return "native", f": {support.reason} {_NO_RATE}"
    intensity = (
        flops_per_token(config.gpt, config.T) * config.tokens_per_step / sum(_traffic(config))
    )
    if intensity < _SMALL_INTENSITY:
        return "step too small", (
            f": native, but at B*T={config.tokens_per_step:,} tokens the matmuls do only "
            f"{intensity:.1f} FLOPs for each byte that the optimizer and the rest move: memory "
            "sets the pace. Raise B or T."
        )
    gain = "slower than fp32" if result.speedup < 1 / _SAME else "no clear gain"
    return "unknown peak", f", {gain}. {support.reason} {_NO_RATE}"


def _rest(fp32: Mapping[str, float]) -> str:
    """Where the rest of the fp32 step goes: "the optimizer takes 46 %, elementwise work 20 %"."""
    rest = sorted((share, name) for name, share in fp32.items() if name in _REST)[::-1]
    large = [part for part in rest if part[0] >= 0.1] or rest[:1]
    parts = [f"{_REST[name]} {_percent(share)}" for share, name in large]
    return ", ".join(parts)


_REST: Final = {
    "activations": "elementwise operations take",
    "optimizer": "the optimizer takes",
    "launches": "launches take",
}


def _fewer_bytes(config: RunConfig) -> str:
    ways = ["SDPA attention"] if config.attention == "manual" else []
    ways += [] if config.compile else ["torch.compile"]
    if not ways:
        return "Memory traffic sets the pace."
    return f"{' and '.join(ways)} would move fewer bytes."


def _reached(result: PrecisionResult, base: PrecisionResult) -> str:
    """How near each came to its own peak; empty where that is unknown."""
    if result.mfu is None or base.mfu is None:
        return ""
    return (
        f"; {result.precision} reaches {_percent(result.mfu)} of its peak, "
        f"fp32 {_percent(base.mfu)} of its own"
    )


def _skipped(result: PrecisionResult) -> str:
    if result.skipped_steps * 4 < max(result.steps_done, 1):
        return ""
    return (
        f" The scaler skipped the optimizer in {result.skipped_steps} of {result.steps_done} "
        "steps, which flatters the time."
    )


def _out_of_memory(device: "DeviceInfo", config: RunConfig, result: PrecisionResult) -> str:
    """What it wanted beside what there is."""
    told = forecast(
        replace(config, precision=result.precision),
        device.type,
        compute_capability=device.compute_capability,
        with_context=device.type == "cuda",
    )
    total = device.memory_total_bytes
    if config.budget_gib is not None:
        total = round(config.budget_gib * _GIB)
    has = "" if total is None else f", and there are {total / _GIB:.1f} GiB"
    return (
        f"Out of memory{_at_speed(result)}: at B={config.B}, T={config.T} a step is forecast to "
        f"take {told.peak_bytes / _GIB:.1f} GiB{has}. Lower B or T."
    )


def _measured(result: PrecisionResult) -> str:
    low, high = result.speedup_low, result.speedup_high
    return f"{result.speedup:.2f}x ({low:.2f}x to {high:.2f}x)"


def _at_speed(result: PrecisionResult) -> str:
    return "" if result.speedup is None else f" (until then {result.speedup:.2f}x)"


def _times(factor: float) -> str:
    """A forecast factor: "3.2x", below one "0.67x"."""
    return f"{factor:.1f}x" if factor >= 0.995 else f"{factor:.2f}x"


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]
