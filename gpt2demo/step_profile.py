"""One training step under torch's profiler: its seconds by part, its matmuls, its tensor cores."""

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.profiler import ProfilerActivity, record_function

from gpt2demo.inspection import (
    ATTENTION,
    BACKWARD,
    CLASSIFIER,
    LOSS,
    MLP_PART,
    OPTIMIZER,
    PARTS,
    REST,
    WAITING,
    Matmul,
    StepProfile,
)
from gpt2demo.kernel_names import on_tensor_cores, splits_float32
from gpt2demo.model import GPT, MLP, CausalSelfAttention

_PREFIX: Final = "gpt2demo: "
_MOMENTS: Final = {"forward": REST, "backward": BACKWARD, "optimizer": OPTIMIZER}
_ZERO_GRAD: Final = "Optimizer.zero_grad"  # torch's own range; it lies before "forward"
_MATMULS: Final = frozenset(("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"))
# Of SDPA's operations, from aten::scaled_dot_product_attention down to the one that launches, on a
# GPU aten::_flash_attention_forward: one kernel for two matmuls and the softmax between them
_FUSED: Final = re.compile(r"aten::\w*attention")


class ProfilerMissing(Exception):  # noqa: N818
    """There is no profile; the message says why."""


@dataclass(kw_only=True)
class StepProfiler:
    """Torch's profiler around one step, with a range for each part of it.

    `moment` is told when the loop goes on to forward, backward and optimizer; module hooks, put on
    from outside, tell the parts of the forward pass apart. The ranges follow each other without a
    gap, so that every kernel has exactly one.
    """

    device: torch.device
    tensor_cores: bool | None = None  # whether the device has any; None = unknown
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _profile: torch.profiler.profile | None = None
    _range: record_function | None = None
    _classifier: int = 0  # the module's id

    def start(self) -> None:
        """Begin, between two steps.

        Raises:
            ProfilerMissing: this torch, or this device, has no profiler that tells the truth.
        """
        if not torch.profiler.kineto_available():
            raise ProfilerMissing("this build of torch has no profiler")
        activities = [ProfilerActivity.CPU]
        if self.device.type != "cpu":
            wanted = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
            activity = wanted.get(self.device.type)
            if activity not in torch.profiler.supported_activities():
                raise ProfilerMissing(f"torch's profiler sees no kernels on {self.device.type}")
            activities.append(activity)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it writes lines of its own to stderr
        profile = torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True)
        try:
            self._stack.enter_context(profile)
        except RuntimeError as exc:  # another profiler is on, or the driver allows none
            raise ProfilerMissing(f"torch's profiler did not start ({type(exc).__name__})") from exc
        self._profile = profile
        self._stack.callback(hooks.register_module_forward_pre_hook(self._entered).remove)
        self._stack.callback(
            hooks.register_module_forward_hook(self._left, always_call=True).remove
        )

    def moment(self, name: str) -> None:
        """The loop goes on to this."""
        if self._profile and name in _MOMENTS:
            self._switch(_MOMENTS[name])

    def stop(self) -> None:
        """End, after the step or after what ended it."""
        self._switch(None)
        self._stack.close()

    def result(self, step_seconds: float) -> StepProfile:
        """The profile of the step that took so long.

        Raises:
            ProfilerMissing: it saw no kernel of the device.
        """
        assert self._profile, "start it first"
        return read(
            self._profile.events() or [],
            self.device.type,
            step_seconds,
            tensor_cores=self.tensor_cores,
        )

    def _switch(self, part: str | None) -> None:
        if self._range:
            self._range.__exit__(None, None, None)
        self._range = record_function(_PREFIX + part) if part else None
        if self._range:
            self._range.__enter__()

    def _entered(self, module: nn.Module, inputs: object) -> None:
        if isinstance(module, GPT):
            self._classifier = id(module.lm_head)
        if part := self._part(module):
            self._switch(part)

    def _left(self, module: nn.Module, inputs: object, output: object) -> None:
        if part := self._part(module):
            self._switch(LOSS if part == CLASSIFIER else REST)

    def _part(self, module: nn.Module) -> str | None:
        if isinstance(module, CausalSelfAttention):
            return ATTENTION
        if isinstance(module, MLP):
            return MLP_PART
        return CLASSIFIER if id(module) == self._classifier else None


def read(
    events: Iterable[Any],
    device_type: str,
    step_seconds: float,
    *,
    tensor_cores: bool | None = None,
) -> StepProfile:
    """A step's profile from the profiler's events (`torch.autograd.profiler_util.FunctionEvent`).

    On a CPU an operation takes the time between its begin and end. On a GPU the CPU only launches:
    there a part takes its kernels' time, each counted where it was launched, and what is left of
    the step the device has waited.

    Raises:
        ProfilerMissing: no kernel of a device that is no CPU was seen.
    """
    cpu = [e for e in events if e.device_type == torch.autograd.DeviceType.CPU and not e.is_async]
    ranges = [(e.time_range.start, e.time_range.end, part) for e in cpu if (part := _range_of(e))]
    on_cpu = device_type == "cpu"
    work = [_Work.of(e, ranges, on_cpu=on_cpu) for e in cpu if not _range_of(e)]
    inside = [w for w in work if w.part]
    if on_cpu:
        parts = dict.fromkeys(PARTS, 0.0)
        for start, end, part in ranges:
            parts[part] += (end - start) / 1e6
    else:
        if not any(w.kernels for w in inside):
            raise ProfilerMissing("torch's profiler saw no kernel of the device")
        parts = {part: sum(w.seconds for w in inside if w.part == part) for part in PARTS}
        parts[WAITING] = max(step_seconds - sum(parts.values()), 0.0)
    matmul = sum(w.seconds for w in inside if w.op in _MATMULS)
    fused = sum(w.seconds for w in inside if _FUSED.match(w.op))
    share, note = _on_tensor_cores(inside, device_type, step_seconds, tensor_cores)
    return StepProfile(
        step_seconds=step_seconds,
        parts=parts,
        matmul_share=matmul / step_seconds,
        fused_attention_share=fused / step_seconds,
        tensor_core_share=share,
        tensor_core_note=note,
        matmuls=_matmuls(inside),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """One operation without those inside it."""

    op: str
    part: str | None  # None = outside the step
    seconds: float
    shapes: Sequence[Sequence[int]]
    kernels: tuple[tuple[str, float], ...]  # name and seconds

    @classmethod
    def of(cls, event: Any, ranges: Sequence[tuple[float, float, str]], *, on_cpu: bool) -> "_Work":
        at = event.time_range.start
        part = next((part for start, end, part in ranges if start <= at <= end), None)
        # a range of ours is seen on the device too, as a kernel of its own name
        kernels = tuple((k.name, k.duration / 1e6) for k in event.kernels if k.name != event.name)
        taken = event.self_cpu_time_total / 1e6 if on_cpu else sum(s for _, s in kernels)
        return cls(
            op=event.name,
            part=part,
            seconds=taken,
            shapes=event.input_shapes or (),
            kernels=kernels,
        )


def _range_of(event: Any) -> str | None:
    """The part whose range the event is."""
    if event.name.startswith(_PREFIX):
        return event.name.removeprefix(_PREFIX)
    return OPTIMIZER if event.name.startswith(_ZERO_GRAD) else None


def _matmuls(work: Iterable[_Work]) -> tuple[Matmul, ...]:
    groups: dict[tuple[str, int, int, int, int], list[float]] = {}
    for w in work:
        tensors = [shape for shape in w.shapes if len(shape) >= 2]
        if w.op in _MATMULS and len(tensors) >= 2:
            left, right = tensors[-2:]  # addmm's first is the bias
            batch = left[0] if len(left) == 3 else 1
            key = (w.part or "", batch, left[-2], right[-1], left[-1])
            groups.setdefault(key, []).append(w.seconds)
    found = [
        Matmul(
            part=part,
            batch=batch,
            M=M,
            N=N,
            K=K,
            times=len(taken),
            flops=2.0 * batch * M * N * K,
            seconds=sum(taken) / len(taken),
        )
        for (part, batch, M, N, K), taken in groups.items()
    ]
    return tuple(sorted(found, key=lambda m: (m.flops, m.seconds), reverse=True))


def _on_tensor_cores(
    work: Iterable[_Work], device_type: str, step_seconds: float, tensor_cores: bool | None
) -> tuple[float | None, str]:
    """Share of the step in kernels that multiply on tensor cores, and how it is known."""
    if device_type == "cpu":
        return None, "a CPU's operations do not say which units they use"
    if device_type != "cuda" or torch.version.hip:
        return None, "only the names of NVIDIA's kernels say so"
    if tensor_cores is False:  # a GTX 1650 runs kernels that are named after them
        return 0.0, "this GPU has none"
    multiplies = [w for w in work if w.op in _MATMULS or _FUSED.match(w.op)]
    kernels = [kernel for w in multiplies for kernel in w.kernels]
    kinds = [(on_tensor_cores(name), seconds, name) for name, seconds in kernels]
    if unknown := [name for kind, _, name in kinds if kind is None]:
        return None, f"the name of a kernel does not say ({unknown[0][:60]})"
    note = "by the names of the kernels of matmuls and SDPA"
    if any(splits_float32(name) for name, _ in kernels):
        note += "; SDPA's kernel multiplies float32 there in three TF32 products"
    return sum(s for kind, s, _ in kinds if kind) / step_seconds, note
