"""A measurement of live tensor memory that knows nothing of the forecast's formula.

`MemoryTracker` sees every operation that torch runs and follows each storage from its birth to its
death. On fake tensors it measures the step of a model of any size without its memory.
`profiled_peak` asks torch's profiler instead, which also sees inside operations and compiled code.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from gpt2demo.config import GPTConfig, RunConfig
from gpt2demo.model import GPT

AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of all storages that operations inside the mode return and that live."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.largest_bytes = 0  # of one storage
        self.peak_op = ""  # the operation that made the peak
        self.part = ""  # what the caller is doing now
        self.peak_part = ""
        self.part_peaks: dict[str, int] = {}  # part -> the most bytes while it was done
        self.ops: set[str] = set()
        self._storages: dict[int, weakref.ref | None] = {}

    def register(self, *tensors: torch.Tensor, counted: bool = True) -> None:
        """Follow the storages of these tensors; views of one storage count once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._storages:
                continue
            size = storage.nbytes() if counted else 0
            self.live_bytes += size
            self.largest_bytes = max(self.largest_bytes, size)
            # the key is free again when the storage dies, and so is the callback
            self._storages[key] = weakref.ref(
                storage, lambda _, key=key, size=size: self._died(key, size)
            )
        self.part_peaks[self.part] = max(self.part_peaks.get(self.part, 0), self.live_bytes)
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self.peak_part = self.part

    def _died(self, key: int, size: int) -> None:
        del self._storages[key]
        self.live_bytes -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = self.peak_bytes
        out = func(*args, **(kwargs or {}))
        self.ops.add(func.overloadpacket.__name__)
        self.register(*(leaf for leaf in tree_iter(out) if isinstance(leaf, torch.Tensor)))
        if self.peak_bytes > before:
            self.peak_op = func.overloadpacket.__name__
        return out


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most bytes until the end of one step, and where they were."""

    peak_bytes: int
    part: str  # forward, backward or optimizer
    op: str
    part_peaks: dict[str, int]  # of this step alone


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the tracker saw in the two steps of one setting."""

    after: tuple[Peak, Peak]  # step 1, step 2
    largest_bytes: int  # of one tensor
    ops: frozenset[str]
    weight_tensors: int

    @property
    def peak_bytes(self) -> int:
        """The peak of both steps."""
        return self.after[1].peak_bytes


@functools.cache
def measure(
    gpt: GPTConfig,
    *,
    precision: str,
    attention: str,
    B: int,
    T: int,
    optimizer: str,
    device_type: str = "cpu",
    fused_sdpa: bool = True,
) -> Measured:
    """Run the lesson's step twice on fake tensors and measure it.

    `device_type` "cuda" keeps the fake tensors on the CPU and applies CUDA's rules: the default
    AdamW is the foreach one, autocast is a GPU's, and SDPA of float64 has no kernel. "mps" does the
    same with the plain AdamW. `fused_sdpa` False takes SDPA's kernel away.
    """
    default = {"foreach": True} if device_type == "cuda" else {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        if device_type != "cpu" and precision in AMP:
            stack.enter_context(autocast_of_a_gpu())
        if not fused_sdpa or (device_type == "cuda" and precision == "fp64"):
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        torch.set_default_dtype(torch.float64 if precision == "fp64" else torch.float32)
        try:
            model = GPT(gpt, attention=attention)
        finally:
            torch.set_default_dtype(torch.float32)
        x = torch.zeros(B, T, dtype=torch.long)
        y = torch.zeros(B, T, dtype=torch.long)
        adamw = torch.optim.AdamW(
            model.parameters(), lr=3e-4, **({"fused": True} if optimizer == "fused" else default)
        )
        tracker = MemoryTracker()
        tracker.register(*model.parameters(), *model.buffers(), x, y)
        stack.enter_context(tracker)
        after = []
        for _ in range(2):
            tracker.part_peaks = {}
            adamw.zero_grad()
            tracker.part = "forward"
            with torch.autocast(
                "cpu", dtype=AMP.get(precision, torch.bfloat16), enabled=precision in AMP
            ):
                logits, loss = model(x, y)
            del logits
            tracker.part = "backward"
            loss.backward()
            tracker.part = "optimizer"
            adamw.step()
            after.append(
                Peak(
                    peak_bytes=tracker.peak_bytes,
                    part=tracker.peak_part,
                    op=tracker.peak_op,
                    part_peaks=tracker.part_peaks,
                )
            )
    return Measured(
        after=tuple(after),
        largest_bytes=tracker.largest_bytes,
        ops=frozenset(tracker.ops),
        weight_tensors=len(list(model.parameters())),
    )


def measured(config: RunConfig, device_type: str = "cpu", *, fused_sdpa: bool = True) -> Measured:
    """`measure` of a run's settings."""
    return measure(
        config.gpt,
        precision=config.precision,
        attention=config.attention,
        B=config.B,
        T=config.T,
        optimizer=config.optimizer,
        device_type=device_type,
        fused_sdpa=fused_sdpa,
    )


@contextlib.contextmanager
def autocast_of_a_gpu() -> Iterator[None]:
    """What autocast casts on a GPU and not on a CPU, and the other way round, while on a CPU.

    test_memory.py asks torch's dispatcher whether it is so.
    """
    with (
        mock.patch.object(F, "softmax", _softmax_in_float32),
        mock.patch.object(F, "cross_entropy", _cross_entropy_cast_late),
    ):
        yield


_softmax = F.softmax


def _softmax_in_float32(x: torch.Tensor, dim: int) -> torch.Tensor:
    return _softmax(x, dim=dim, dtype=torch.float32)


def _cross_entropy_cast_late(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.nll_loss(F.log_softmax(x, dim=-1).float(), y)


def profiled_peak(run: Callable[[], object]) -> int:
    """The most bytes that torch's allocator gave out at once during `run`, by its profiler."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        run()
    live = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert len(events) > 500
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
