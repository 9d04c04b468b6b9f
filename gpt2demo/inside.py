"""One training step from inside: where its time goes, what is cast, how large its numbers are.

The step is a step of an ordinary run (`runner.execute`): the same loop, the same checks, the same
endings. Instruments are put on between two steps and taken off after the next.
"""

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpt2demo.casts import ForwardWatch, state_types
from gpt2demo.config import WARMUP_STEPS, RunConfig
from gpt2demo.device import DeviceInfo, resolve_device
from gpt2demo.histogram import Values
from gpt2demo.inspection import CastTable, ClockReading, Inspection, StepProfile
from gpt2demo.model import GPT
from gpt2demo.records import StepMetrics
from gpt2demo.runner import check_device, execute
from gpt2demo.step_profile import ProfilerMissing, StepProfiler
from gpt2demo.support import has_tensor_cores
from gpt2demo.train import Progress

MAX_SECONDS: Final = 300.0  # then no further step is begun

_CLOCKED: Final = 3  # ordinary steps whose clock is read both ways; one on a CPU
_REPEATS: Final = 4  # of a step that the gradient scaler skipped: it has no gradients to show
_DONE: Final = "all of it was seen"
_OUT_OF_TIME: Final = f"it took more than {MAX_SECONDS:.0f} seconds"
_NOT_COMPILED: Final = (
    "Inspected without torch.compile: compiled code fuses the parts, and none can be told apart."
)


def inspect_step(
    config: RunConfig,
    info: DeviceInfo,
    *,
    stop_reason: Callable[[], str | None] = lambda: None,
    max_seconds: float = MAX_SECONDS,
) -> Inspection:
    """Run a few steps of `config` on the built-in text and look into them; nothing else may run.

    Two warm-up steps, ordinary ones for the clock, one under the profiler, one whose operations and
    values are watched. Every ending is a state with its sentence, as in a run.

    Args:
        config: the run; its text, steps and compile are not used.
        info: the device.
        stop_reason: asked before every step; a sentence's end stops the inspection there.
        max_seconds: no further step is begun after so long.

    Raises:
        InputError: the device lacks the precision, or cannot emulate the memory budget.
    """
    check_device(config, info)
    kinds = ["warm-up"] * WARMUP_STEPS + ["clock"] * (1 if info.type == "cpu" else _CLOCKED)
    kinds += ["profile", "watch"]
    plain = replace(config, text="builtin", steps=len(kinds) + _REPEATS, compile=False)
    work = _Work(info=info, device=resolve_device(plain.device), left=deque(kinds))
    started = time.perf_counter()

    def why_stop() -> str | None:
        if not work.left:
            return _DONE
        return stop_reason() or (
            _OUT_OF_TIME if time.perf_counter() - started > max_seconds else None
        )

    try:
        summary = execute(
            plain, info, on_step=work.on_step, stop_reason=why_stop, progress=work.progress
        )
    finally:
        work.close()
    done = summary.state == "stopped" and not work.left
    message = "Finished: one step was inspected." if done else summary.message
    for kind, name in (("clock", "clock"), ("profile", "profile"), ("watch", "casts")):
        if kind in work.left:
            work.missing.setdefault(name, message)
    return Inspection(
        config=plain.to_dict(),
        device_type=info.type,
        device_name=info.name,
        state="finished" if done else summary.state,
        message=message,
        notes=(*summary.notes, *([_NOT_COMPILED] if config.compile else [])),
        missing=work.missing,
        seconds=time.perf_counter() - started,
        clock=tuple(work.clock),
        profile=work.profile,
        casts=work.casts,
        values={name: seen.histogram() for name, seen in work.values.items() if seen.count},
        must_restart=work.progress.poisoned,
    )


class _Progress(Progress):
    """A run's progress that says when the loop goes on."""

    def __init__(self, told: Callable[[str], None]) -> None:
        object.__setattr__(self, "_told", told)
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "moment":
            self._told(value)


@dataclass(kw_only=True)
class _Work:
    """The instruments, each on for its step. No tensor of the run is kept."""

    info: DeviceInfo
    device: torch.device
    left: deque[str]  # kinds of the steps to come; the first is under way
    missing: dict[str, str] = field(default_factory=dict)
    clock: list[ClockReading] = field(default_factory=list)
    profile: StepProfile | None = None
    casts: CastTable | None = None
    values: dict[str, Values] = field(default_factory=dict)
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _moment: str = ""
    _profiler: StepProfiler | None = None
    _watch: ForwardWatch | None = None
    _began: float = 0.0  # the clock when the gradients were dropped and forward began
    _returned: float | None = None  # the clock when AdamW's step had returned
    _scale: float = 1.0  # the loss scale of the step under way
    _model: weakref.ref = field(default=lambda: None)
    _optimizer: weakref.ref = field(default=lambda: None)

    def __post_init__(self) -> None:
        self.progress = _Progress(self._told)

    def close(self) -> None:
        """Take every instrument off."""
        self._open.close()

    def on_step(self, step: StepMetrics) -> None:
        """Between two steps: read the instruments of the one that ended, put on the next ones."""
        now = time.perf_counter()
        kind = self.left[0]
        self.close()
        if not step.skipped or kind == "warm-up":
            self._read(kind, step, now)
            self.left.popleft()
        before = step.loss_scale or 1.0
        self._scale = before / 2 if step.skipped else before
        if self.left:
            self._begin(self.left[0])

    def _told(self, moment: str) -> None:
        self._moment = moment
        if moment == "forward":
            self._began = time.perf_counter()
        if self._profiler:
            self._profiler.moment(moment)

    def _begin(self, kind: str) -> None:
        self._returned = self._profiler = self._watch = None
        if kind == "clock":
            self._open.callback(register_optimizer_step_post_hook(self._stepped).remove)
        elif kind == "profile":
            capability = self.info.compute_capability
            profiler = StepProfiler(
                device=self.device,
                tensor_cores=has_tensor_cores(capability, self.info.name) if capability else None,
            )
            try:
                profiler.start()
            except ProfilerMissing as exc:
                self.missing["profile"] = f"Not profiled: {exc}."
                return
            self._profiler = profiler
            self._open.callback(profiler.stop)
        elif kind == "watch":
            self.values = {
                name: Values()
                for name in (
                    *("weights", "activations"),
                    *("gradients of activations", "gradients of weights"),
                )
            }
            self._open.callback(register_optimizer_step_post_hook(self._stepped).remove)
            self._open.callback(hooks.register_module_forward_pre_hook(self._entered).remove)
            self._watch = ForwardWatch(lambda: self._moment == "forward", self._output)
            self._open.enter_context(self._watch)

    def _read(self, kind: str, step: StepMetrics, now: float) -> None:
        if kind == "clock" and self._returned is not None:
            # both come after the loop's own t0: what it does between t1 and here, and zero_grad
            t0 = min(now - step.step_ms / 1000, self._began)
            self.clock.append(
                ClockReading(true_ms=step.step_ms, unsynchronized_ms=(self._returned - t0) * 1000)
            )
        elif kind == "profile" and self._profiler:
            try:
                self.profile = self._profiler.result(step.step_ms / 1000)
            except ProfilerMissing as exc:
                self.missing["profile"] = f"Not profiled: {exc}."
        elif kind == "watch" and self._watch:
            model = self._model()
            assert model is not None, "the model is there until the run ends"
            weights, gradients, moments = state_types(model, self._optimizer())
            self.casts = CastTable(
                operations=self._watch.operations(),
                weights=weights,
                gradients=gradients,
                moments=moments,
            )
            for p in model.parameters():
                self.values["weights"].add(p)
                if p.grad is not None:
                    self.values["gradients of weights"].add(p.grad)

    def _entered(self, module: nn.Module, inputs: object) -> None:
        if isinstance(module, GPT):
            self._model = weakref.ref(module)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._returned = time.perf_counter()
        self._optimizer = weakref.ref(optimizer)

    def _output(self, output: torch.Tensor) -> None:
        """An operation's output; its gradient will be shown when backward makes it."""
        self.values["activations"].add(output)
        if output.requires_grad and output.dim():  # not the loss, whose gradient is 1
            counted, factor = self.values["gradients of activations"], 1 / self._scale
            output.register_hook(lambda gradient: counted.add(gradient, factor))
