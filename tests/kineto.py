"""A GPU's trace as kineto hands it to torch, whose own parser then makes the profiler's events.

The events answer through names that the real class has, and nothing else. The linking is kineto's:
an operation has a correlation id; what the innermost operation starts is linked to it, both the
runtime's call on the CPU and the kernel on the GPU; a range of `record_function` appears on the GPU
once more, under its own name.
"""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch._C._autograd import DeviceType, _KinetoEvent, _ProfilerResult
from torch.autograd.profiler_util import EventList

_REAL = frozenset(dir(_KinetoEvent))
_UNSAID = {
    "is_async": False,
    "is_user_annotation": False,
    "is_python_function": False,
    "is_hidden_event": False,
    "overload_name": "",
    "activity_type": "",
    "metadata_json": "",
    "flow_start": False,
    "sequence_nr": -1,
    "stack": (),
    "shapes": (),
    "dtypes": (),
    "concrete_inputs": (),
    "structured_input_shapes": (),
    "structured_input_strides": (),
    "kwinputs": {},
    "extra_meta": {},
}


class Event:
    """One event; what it was not given is nothing: 0, empty."""

    def __init__(self, **given: object) -> None:
        assert set(given) <= _REAL, set(given) - _REAL
        self._given = _UNSAID | given

    def __getattr__(self, name: str):
        if name not in _REAL:
            raise AttributeError(f"a kineto event has no {name}")
        return lambda: self._given.get(name, 0)


class Trace:
    """Events by the CPU's clock in us; the GPU comes later by `LATE` and works in turn."""

    LATE = 1000.0

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._ids = itertools.count(1)
        self._gpu = self.LATE

    def op(
        self,
        name: str,
        start: float,
        end: float,
        *,
        shapes: Sequence[Sequence[int]] = (),
        kernels: Sequence[tuple[str, float]] = (),
        thread: int = 1,
    ) -> None:
        """An operation, and the kernels that itself started: their names and us."""
        number = next(self._ids)
        self._cpu(name, start, end, thread, correlation_id=number, shapes=shapes)
        for kernel, us in kernels:
            at = start + (end - start) / 2
            launch = {"correlation_id": next(self._ids), "linked_correlation_id": number}
            self._cpu("cudaLaunchKernel", at, at + 0.1, thread, **launch)
            self._on_gpu(kernel, us, **launch)

    def range(self, name: str, start: float, end: float, *, us: float = 9e5) -> None:
        """A range of `record_function`, and its shadow on the GPU."""
        number = next(self._ids)
        self._cpu(name, start, end, 1, correlation_id=number, is_user_annotation=True)
        self._on_gpu(name, us, linked_correlation_id=number, is_user_annotation=True)

    def events(self) -> EventList:
        """What `torch.profiler.profile.events()` makes of it."""
        result = SimpleNamespace(events=lambda: self._events, trace_start_ns=lambda: 0)
        assert set(vars(result)) <= set(dir(_ProfilerResult))
        parse = torch.autograd.profiler.profile._parse_kineto_results
        events = EventList(parse(SimpleNamespace(use_device="cuda"), result), use_device="cuda")
        events._build_tree()
        return events

    def _cpu(self, name: str, start: float, end: float, thread: int, **given: object) -> None:
        self._add(
            name, start, end, device_type=DeviceType.CPU, start_thread_id=thread,
            end_thread_id=thread, **given,
        )  # fmt: skip

    def _on_gpu(self, name: str, us: float, **given: object) -> None:
        self._add(name, self._gpu, self._gpu + us, device_type=DeviceType.CUDA, **given)
        if not given.get("is_user_annotation"):
            self._gpu += us

    def _add(self, name: str, start: float, end: float, **given: object) -> None:
        times = {"start_ns": round(start * 1000), "end_ns": round(end * 1000)}
        duration = times["end_ns"] - times["start_ns"]
        self._events.append(Event(name=name, duration_ns=duration, **times, **given))
