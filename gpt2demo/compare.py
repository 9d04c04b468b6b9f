"""What a precision bought on this device, and why, in words with figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from gpt2demo.config import RunConfig
from gpt2demo.expectation import (
    BY_FLOAT32,
    NO_RATE,
    SAME,
    Expectation,
    cost_words,
    expect,
    percent,
    ratio_words,
    runs_scalar,
    share_words,
    times,
)
from gpt2demo.memory import forecast
from gpt2demo.race import BASELINE, PrecisionResult
from gpt2demo.roofline import Rates
from gpt2demo.series import MIN_STEPS_FOR_SPREAD
from gpt2demo.step_counts import matmul_flops, traffic
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

_NEAR: Final = 1.25  # a forecast holds within this factor
_UNCLEAR: Final = 1.15  # a spread around 1.0 may be as wide as this and still mean "the same"
_WIDE: Final = 2.0  # a spread as wide as this is held against no forecast
# fp32 FLOPs a byte that even a small CPU does: a step with fewer waits for memory everywhere
_SMALL_INTENSITY: Final = 4.0
_GIB: Final = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What one precision did, and why."""

    precision: str
    cause: str  # one of CAUSES
    words: str


def explain(
    device: "DeviceInfo",
    config: RunConfig,
    results: Sequence[PrecisionResult],
    rates: Rates | None = None,
) -> dict[str, Verdict]:
    """Why each precision of a race was as fast as it was.

    Args:
        device: the machine the race ran on.
        config: the race's settings; its precision does not matter.
        results: the race's, fp32 among them where a speed-up is to be judged.
        rates: as for `expect`.
    """
    expected = expect(device, config, rates)
    base = next((result for result in results if result.precision == BASELINE), None)
    verdicts = {}
    for result in results:
        cause, words = _verdict(device, config, result, base, expected)
        verdicts[result.precision] = Verdict(precision=result.precision, cause=cause, words=words)
    return verdicts


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
        peak = "" if result.mfu is None else f", {percent(result.mfu)} of its peak"
        return "baseline", f"1.00x, the baseline: {step_ms}{peak}. {support.reason}"
    if result.speedup is None or base is None:
        return "no baseline", f"{step_ms}; without a measured fp32 run no speed-up is known."
    if noise := _noise(support, result, base):
        return "too noisy", noise
    if support.status == "no effect":
        return "no effect", f"{_measured(result)}: no effect, as expected. {support.reason}"
    if support.status == "emulated":
        slower = result.speedup < 1 or result.precision == "tf32"
        why = support.reason if slower else BY_FLOAT32
        if slower and device.compute_capability and result.precision == "bf16":
            why += " PyTorch widens it to float32 for every matmul and rounds back."
        cause = "scalar fallback" if runs_scalar(device, support) else "emulated"
        return cause, f"{_measured(result)}: {why}"
    cause, words = _native(device, support, config, result, base, expected)
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
        if 1 / SAME <= x <= SAME:
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
    device: "DeviceInfo",
    support: Support,
    config: RunConfig,
    result: PrecisionResult,
    base: PrecisionResult,
    expected: Mapping[str, Expectation],
) -> tuple[str, str]:
    """Cause and words of a precision that the device has units for."""
    told, fp32 = expected[result.precision], expected[BASELINE].shares
    if told.speedup is None or told.most is None or fp32 is None:
        return _native_unknown(device, support, config, result)
    less = result.speedup_high < told.speedup / _NEAR
    more = result.speedup_low > told.speedup * _NEAR
    compared = "less than" if less else "more than" if more else "about"
    held = f", {compared} the forecast {times(told.speedup)}: native, {ratio_words(told)}"
    reached = _reached(result, base)
    if more:
        taken = "85 % of its peak" if told.basis == "datasheet" else "the probe's rate"
        return (
            "native, more than expected",
            f"{held}. The estimate is rough, it takes every matmul at {taken}{reached}.",
        )
    if told.rated_alike:
        return "native, less than expected" if less else "native", f"{held}. {support.reason}"
    if fp32["matmul"] < 0.5:
        small = fp32["activations"] < fp32["optimizer"] + fp32["launches"]
        advice = "Raise B or T." if small else _fewer_bytes(config)
        return (
            "step too small" if small else "memory-bound",
            f"{held}, but {share_words(config, fp32)}; {_rest(fp32)}.{cost_words(told)} {advice}",
        )
    if less:
        return (
            "native, less than expected",
            f"{held}{reached}. Short kernels, a power limit or other programs may hold it back.",
        )
    bound = f"so {times(told.most)} is the most; {_rest(fp32)}"
    return "native", f"{held}, but {share_words(config, fp32)}, {bound}."


def _native_unknown(
    device: "DeviceInfo", support: Support, config: RunConfig, result: PrecisionResult
) -> tuple[str, str]:
    """The same where no forecast can be made."""
    if result.speedup >= SAME or support.slow:
        return "native", f": {support.reason} {NO_RATE}"
    fp32 = replace(config, precision=BASELINE)
    flops = sum(sum(forms.values()) for forms in matmul_flops(fp32).values())
    intensity = flops / sum(item.total_bytes for item in traffic(fp32, device.type))
    if intensity < _SMALL_INTENSITY:
        return "step too small", (
            f": native, but at B*T={config.tokens_per_step:,} tokens the matmuls do only "
            f"{intensity:.1f} FLOPs for each byte that the optimizer and the rest move: memory "
            "sets the pace. Raise B or T."
        )
    gain = "slower than fp32" if result.speedup < 1 / SAME else "no clear gain"
    return "unknown peak", f", {gain}. {support.reason} {NO_RATE}"


def _rest(fp32: Mapping[str, float]) -> str:
    """Where the rest of the fp32 step goes: "the optimizer takes 46 %, elementwise work 20 %"."""
    rest = sorted((share, name) for name, share in fp32.items() if name in _REST)[::-1]
    large = [part for part in rest if part[0] >= 0.1] or rest[:1]
    parts = [f"{_REST[name]} {percent(share)}" for share, name in large]
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
        f"; {result.precision} reaches {percent(result.mfu)} of its peak, "
        f"fp32 {percent(base.mfu)} of its own"
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


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
