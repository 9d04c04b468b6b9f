"""What is measured: one record a step, one summary a run, and their JSON."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, Final, TypeVar, get_args, get_type_hints

STATES: Final = (
    "finished",
    "stopped",
    "out of memory",
    "diverged",
    "error",
    "interrupted",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One training step.

    `step_ms` is the time between two synchronizes around zero_grad, forward, loss, backward and
    optimizer step; batch loading, logging and everything else lie outside it.
    """

    step: int  # counted from 0, as the lesson's log does
    loss: float  # nats a token, before this step's update, the processes' mean; may be NaN or inf
    step_ms: float
    tokens_per_sec: float  # B*T / step time, all processes together
    is_warmup: bool  # the first steps: left out of every average
    skipped: bool = False  # the gradient scaler left the weights as they were
    loss_scale: float | None = None  # fp16's scale in this step, else None
    peak_memory_bytes: int | None = None  # the accelerator's peak so far; None = not measured


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMemory:
    """What a run was forecast to take of the device's memory, and what it took."""

    forecast_bytes: int  # of what `measured_by` counts, at the steps that were done
    verdict: str  # what the forecast said before the start
    capacity_bytes: int | None  # the memory that the run might use; None = unknown
    measured_bytes: int | None  # None = not measured
    reserved_bytes: int | None  # GPU: `max_memory_reserved`, tensors and the allocator's reserve
    measured_by: str | None

    @property
    def error(self) -> float | None:
        """(forecast - measured) / measured; below zero = the forecast was too low."""
        if not self.measured_bytes:
            return None
        return (self.forecast_bytes - self.measured_bytes) / self.measured_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """The moment at which memory ran out."""

    step: int | None  # None = before the first
    moment: str  # "fetching the batch", "forward", "backward", "optimizer", or what came before
    asked_bytes: int | None  # the allocation that failed; None = it was not said
    parts: dict[str, int]  # what lived then, bytes by part (weights, gradients, ...); {} = unknown
    capacity_bytes: int | None
    smaller_B: int | None  # the largest smaller B that should fit; 0 = none, None = unknown
    smaller_T: int | None  # the same for T


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """One run in figures. Medians and quartiles are over the steps that are not warm-up."""

    state: str  # one of STATES
    message: str  # the state in one sentence, for the visitor
    notes: tuple[str, ...] = ()  # what else happened ("runs without torch.compile: ...")
    world_size: int = 1  # processes that trained together, each on B*T tokens a step
    steps_done: int
    steps_measured: int  # steps_done less warm-up
    seconds: float  # wall clock from the start of the run to its end
    compile_seconds: float | None = None  # None = nothing was compiled
    compiled: bool | None = None  # torch.compile worked; None = it was not tried
    step_ms_median: float | None = None
    step_ms_p25: float | None = None
    step_ms_p75: float | None = None
    tokens_per_sec_median: float | None = None
    final_loss: float | None = None
    skipped_steps: int = 0
    parameters: int | None = None
    flops_per_token: float | None = None
    peak_flops: float | None = None  # dense peak FLOP/s of one device in this precision
    mfu: float | None = None  # model FLOPs utilization, 1.0 = the dense peak; None = unknown
    peak_memory_bytes: int | None = None
    joules_per_1000_tokens: float | None = None  # the GPU's own counter, without warm-up
    memory: RunMemory | None = None
    out_of_memory: OutOfMemory | None = None  # None = it did not run out


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A run as it is written and read: settings, machine, steps, summary."""

    config: dict[str, Any]
    device: dict[str, Any]
    steps: tuple[StepMetrics, ...] = field(repr=False)
    summary: RunSummary

    def to_dict(self) -> dict[str, Any]:
        """The record as strict JSON takes it (see `jsonable`)."""
        return jsonable(
            {
                "config": self.config,
                "device": self.device,
                "steps": [asdict(step) for step in self.steps],
                "summary": asdict(self.summary),
            }
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "RunRecord":
        """The record back from its JSON.

        Raises:
            ValueError: when a part is missing or has another shape.
        """
        try:
            parts = from_jsonable(data)
            for name, kind in (("config", dict), ("device", dict), ("steps", list)):
                if not isinstance(parts[name], kind):
                    raise TypeError(f"{name} is of type {type(parts[name]).__name__}")
            record = cls(
                config=parts["config"],
                device=parts["device"],
                steps=tuple(_read(StepMetrics, step) for step in parts["steps"]),
                summary=_read(RunSummary, parts["summary"]),
            )
        except (KeyError, TypeError, OverflowError, RecursionError) as exc:
            raise ValueError(f"not a run of gpt2demo: {exc}") from exc
        if record.summary.state not in STATES:
            raise ValueError(f"not a run of gpt2demo: state {record.summary.state!r}")
        return record


_Record = TypeVar("_Record")


def _read(kind: type[_Record], data: Any) -> _Record:
    """A dataclass from its JSON; a TypeError where a value has another type than its field."""
    if not isinstance(data, dict):
        raise TypeError(f"{kind.__name__} is of type {type(data).__name__}")
    hints = get_type_hints(kind)
    return kind(**{name: _value(name, value, hints.get(name)) for name, value in data.items()})


def _value(name: str, value: Any, hint: Any) -> Any:
    """One field's value from JSON."""
    if hint == tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise TypeError(f"{name} is no list of texts")
    if hint == dict[str, int]:
        if isinstance(value, dict) and all(type(item) is int for item in value.values()):
            return value
        raise TypeError(f"{name} is no table of whole numbers")
    allowed = get_args(hint) or (hint,)
    inner = next((kind for kind in allowed if is_dataclass(kind)), None)
    if inner and isinstance(value, dict):
        return _read(inner, value)
    if float in allowed and type(value) is int:  # JSON has one kind of number
        return float(value)
    if type(value) not in allowed:
        raise TypeError(f"{name} is of type {type(value).__name__}")
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Median and quartiles of the measured steps; None until there is one."""

    steps_measured: int
    step_ms_median: float | None = None
    step_ms_p25: float | None = None
    step_ms_p75: float | None = None
    tokens_per_sec_median: float | None = None


def timing(steps: Sequence[StepMetrics]) -> Timing:
    """The headline figures of `steps`, warm-up left out."""
    step_ms = [step.step_ms for step in steps if not step.is_warmup]
    if not step_ms:
        return Timing(steps_measured=0)
    p25, _, p75 = (
        statistics.quantiles(step_ms, n=4, method="inclusive") if len(step_ms) > 1 else step_ms * 3
    )
    return Timing(
        steps_measured=len(step_ms),
        step_ms_median=statistics.median(step_ms),
        step_ms_p25=p25,
        step_ms_p75=p75,
        tokens_per_sec_median=statistics.median(
            step.tokens_per_sec for step in steps if not step.is_warmup
        ),
    )


def log_line(step: StepMetrics) -> str:
    """The lesson's own log line."""
    return (
        f"step {step.step}, loss: {step.loss:.6f}, dt: {step.step_ms:.2f}ms, "
        f"tok/sec: {step.tokens_per_sec:.2f}"
    )


_FLAG: Final = "_flag"
_NOT_FINITE: Final = ("nan", "inf", "-inf")  # as Python writes them


def jsonable(value: Any) -> Any:
    """The value as strict JSON takes it, which has no NaN and no infinity.

    In a dict such a number becomes None and is named beside it: `{"loss": nan}` becomes
    `{"loss": None, "loss_flag": "nan"}`. In a list it becomes None. Tuples become lists.
    """
    if isinstance(value, dict):
        plain = {}
        for key, item in value.items():
            plain[key] = jsonable(item)
            if isinstance(item, float) and not math.isfinite(item):
                plain[key + _FLAG] = repr(item)
        return plain
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def from_jsonable(value: Any) -> Any:
    """The inverse of `jsonable` (lists stay lists, and None in a list stays None)."""
    if isinstance(value, dict):
        plain = {key: from_jsonable(item) for key, item in value.items()}
        for key in value:
            base = key.removesuffix(_FLAG)
            if key != base and plain[key] in _NOT_FINITE and plain.get(base, 0) is None:
                plain[base] = float(plain.pop(key))
        return plain
    if isinstance(value, list):
        return [from_jsonable(item) for item in value]
    return value
