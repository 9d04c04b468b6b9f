"""What a precision should buy on this device, before it runs, in words with figures.

A step is the matmuls, which a precision can speed up, and a rest, which it cannot: the optimizer,
the elementwise operations and the kernel launches. So the speed-up stays below 1 / (1 - share of
the matmuls), however fast they become (Amdahl's law).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from gpt2demo.config import PRECISIONS, RunConfig
from gpt2demo.peaks import find_gpu, peak_flops
from gpt2demo.race import BASELINE
from gpt2demo.roofline import Rates, StepForecast, step_forecasts, training_rate
from gpt2demo.step_counts import FORMS, SHAPES
from gpt2demo.support import Support

if TYPE_CHECKING:  # device.py imports torch, which this module does without
    from gpt2demo.device import DeviceInfo

# What a step reaches of the datasheet's rates. Held against the seven step times of the lesson on
# an A100 (`lesson.RUNGS`): every one within a fifth. A probe's rates are achieved ones and count
# whole.
_OF_PEAK: Final = 0.85
_OF_BANDWIDTH: Final = 0.7
# the host's time to start one small operation on a GPU
_LAUNCH_SECONDS: Final = 4e-6

SAME: Final = 1.1  # a factor below which nobody feels a difference


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

    @property
    def rated_alike(self) -> bool:
        """Whether matmuls are no faster than in fp32, so that their share limits nothing."""
        return self.ratio is not None and self.ratio < SAME


def expect(
    device: "DeviceInfo", config: RunConfig, rates: Rates | None = None
) -> dict[str, Expectation]:
    """What each precision should do on this device at these settings; runs nothing.

    Args:
        device: the machine; its `support` says what is native.
        config: the settings; its precision does not matter.
        rates: a probe's, in place of the datasheet's. What it lacks is unknown.
    """
    basis = "datasheet" if rates is None else "probe"
    rates = datasheet_rates(device) if rates is None else rates
    steps = step_forecasts(config, rates, PRECISIONS)
    told = {}
    for precision, support in device.support.items():
        step = steps[_same_as(precision, support)]
        if support.status == "not available" or runs_scalar(device, support):
            step = None  # forward matmuls mislead: the scalar loop is in the backward pass
        ratio = _ratio_of_rates(config, rates, _same_as(precision, support))
        told[precision] = _expectation(precision, support, step, steps[BASELINE], ratio, basis)
    return {
        precision: replace(
            expectation,
            words=_words(config, device.support[precision], expectation, told[BASELINE].shares),
        )
        for precision, expectation in told.items()
    }


def datasheet_rates(device: "DeviceInfo") -> Rates:
    """What a step should reach of the datasheet's peaks; what is unknown is missing."""
    name, memory = device.name, device.memory_total_bytes
    spec = find_gpu(name, memory)
    bandwidth = spec.bandwidth_bytes_per_sec if spec else None
    peaks = {precision: peak_flops(name, memory, precision) for precision in PRECISIONS}
    return Rates(
        device_type=device.type,
        tokens=0,
        flops_per_sec={
            precision: {shape: dict.fromkeys(FORMS, peak * _OF_PEAK) for shape in SHAPES}
            for precision, peak in peaks.items()
            if peak
        },
        copies=((1, bandwidth * _OF_BANDWIDTH),) if bandwidth else (),
        launch_seconds=_LAUNCH_SECONDS,
    )


def runs_scalar(device: "DeviceInfo", support: Support) -> bool:
    """Whether it runs in a CPU's scalar loop; `support` says so in its warning."""
    return device.type == "cpu" and "scalar loop" in (support.slow or "")


def _same_as(precision: str, support: Support) -> str:
    """What really runs: a precision without effect is fp32."""
    return BASELINE if support.status == "no effect" else precision


def _ratio_of_rates(config: RunConfig, rates: Rates, precision: str) -> float | None:
    this, fp32 = (training_rate(replace(config, precision=p), rates) for p in (precision, BASELINE))
    return this / fp32 if this and fp32 else None


def _expectation(
    precision: str,
    support: Support,
    step: StepForecast | None,
    base: StepForecast,
    ratio: float | None,
    basis: str,
) -> Expectation:
    there = support.status != "not available"
    same = there and (precision == BASELINE or support.status == "no effect")
    ms = step.ms_per_step if step else None
    known = ms is not None and base.ms_per_step is not None
    return Expectation(
        precision=precision,
        status=support.status,
        speedup=1.0 if same else base.ms_per_step / ms if known else None,
        seconds=None if ms is None else ms / 1000,
        shares=None if ms is None else _shares(step, ms),
        ratio=ratio if known else None,
        most=base.ms_per_step / base.ms_without_matmuls if base.ms_per_step else None,
        basis=None if ms is None else basis,
        words="",
    )


_SHARES: Final = {
    "matmul": ("layers", "classifier", "attention"),
    "activations": ("scores", "activations", "loss", "gradients"),
    "casts": ("casts",),
    "optimizer": ("optimizer",),
    "launches": ("launches",),
}


def _shares(step: StepForecast, ms: float) -> dict[str, float]:
    return {
        name: sum(step.parts_ms[part] or 0.0 for part in parts) / ms
        for name, parts in _SHARES.items()
    }


# --- words


def _words(
    config: RunConfig,
    support: Support,
    told: Expectation,
    fp32: Mapping[str, float] | None,
) -> str:
    """The words; `fp32` holds the shares of fp32's step."""
    if support.status == "not available":
        return f"Not available: {support.reason}"
    if told.precision == BASELINE:
        at = f" {_capital(share_words(config, fp32))}." if fp32 else ""
        return f"The baseline, 1.0x. {support.reason}{at}"
    if support.status == "no effect":
        return f"No effect, expect 1.0x. {support.reason}"
    if told.speedup is None or fp32 is None:
        return support.reason if support.status == "emulated" else f"{support.reason} {NO_RATE}"
    about = f"expect about {times(told.speedup)}"
    if support.status == "emulated":
        # where these rates do not say slower, the reason would contradict them
        why = support.reason if told.speedup < 1 or told.precision == "tf32" else BY_FLOAT32
        return f"Emulated, {ratio_words(told)}: {about}. {why}"
    if told.rated_alike:
        return f"Native, {ratio_words(told)}: {about}. {support.reason}"
    return (
        f"Native, {ratio_words(told)}, but {share_words(config, fp32)}: {about}.{cost_words(told)}"
    )


NO_RATE: Final = "Not all of its rates are known here, so there is no forecast."
BY_FLOAT32: Final = (
    "It is emulated by way of float32, so the matmuls themselves gain nothing; 16-bit tensors may "
    "still save memory traffic."
)


def ratio_words(told: Expectation) -> str:
    """ "spec ratio 8.0x", "measured matmul ratio 2.3x", "spec ratio 1/32"."""
    assert told.ratio is not None
    kind = "spec ratio" if told.basis == "datasheet" else "measured matmul ratio"
    low = told.ratio < 0.5
    return f"{kind} {f'1/{1 / told.ratio:.0f}' if low else times(told.ratio)}"


def cost_words(told: Expectation) -> str:
    """Why a native precision may lose: only autocast adds work."""
    return " Autocast's own casts cost more than it saves." if told.speedup < 0.995 else ""


def share_words(config: RunConfig, fp32: Mapping[str, float]) -> str:
    """ "at B*T=128 tokens only 31 % of the fp32 step is matmul"."""
    only = "only " if fp32["matmul"] < 0.5 else ""
    waits = f" and {percent(fp32['launches'])} waiting for launches"
    return (
        f"at B*T={config.tokens_per_step:,} tokens {only}{percent(fp32['matmul'])} of the fp32 "
        f"step is matmul{waits if fp32['launches'] >= 0.1 else ''}"
    )


def times(factor: float) -> str:
    """A forecast factor: "3.2x", below one "0.67x"."""
    return f"{factor:.1f}x" if factor >= 0.995 else f"{factor:.2f}x"


def percent(share: float) -> str:
    """A share of 1: "31 %"."""
    return f"{share * 100:.0f} %"


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]
