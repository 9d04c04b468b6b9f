"""What memory a run really takes: torch's own counter on a GPU, a tracker of tensors on a CPU."""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from gpt2demo import accelerator
from gpt2demo.config import WARMUP_STEPS, RunConfig


class _Storage(weakref.ref):
    """A storage that is followed."""

    __slots__ = ("key",)
    key: int


class MemoryTracker(TorchDispatchMode):
    """Follows each storage that operations inside the mode return, from its birth to its death.

    Raises:
        torch.OutOfMemoryError: inside the mode, when the tensors outgrow `budget_bytes`.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        super().__init__()
        self.budget_bytes = budget_bytes
        self.peak_bytes = 0
        self._live_bytes = 0
        self._sizes: dict[int, int] = {}
        self._references: dict[int, _Storage] = {}
        # Those that died and are still counted. A callback of Python code could swallow a Ctrl-C
        # that comes while it runs; a list's own append cannot.
        self._dead: deque[_Storage] = deque()
        self._last_dim: dict[int, int] = {}  # of the tensor that a storage was born with

    def register(self, *tensors: torch.Tensor, counted: bool = True) -> None:
        """Follow the storages of these tensors too; views of one storage count once."""
        for tensor in tensors:
            self._bury()  # a new storage may lie where a dead one did
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._sizes:
                continue
            size = storage.nbytes() if counted else 0
            if self.budget_bytes is not None and self._live_bytes + size > self.budget_bytes:
                raise torch.OutOfMemoryError(_refusal(size, self.budget_bytes, self._live_bytes))
            self._sizes[key] = size
            self._last_dim[key] = tensor.shape[-1] if tensor.dim() else 1
            reference = self._references[key] = _Storage(storage, self._dead.append)
            reference.key = key
            self._live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    @property
    def live_bytes(self) -> int:
        """Bytes of the tensors that live now."""
        self._bury()
        return self._live_bytes

    def live_with_last_dim(self, size: int) -> int:
        """Bytes of the living tensors whose last dimension is `size`."""
        self._bury()
        return sum(self._sizes[key] for key, last_dim in self._last_dim.items() if last_dim == size)

    def forget(self) -> None:
        """Follow nothing any more; the peak stays."""
        self._references.clear()
        self._sizes.clear()
        self._last_dim.clear()
        self._dead.clear()

    def _bury(self) -> None:
        while self._dead:
            key = self._dead.popleft().key
            self._live_bytes -= self._sizes.pop(key)
            del self._references[key], self._last_dim[key]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.register(*(leaf for leaf in tree_iter(out) if isinstance(leaf, torch.Tensor)))
        return out


def _refusal(size: int, budget: int, live: int) -> str:
    return (
        f"out of memory: Tried to allocate {size / 2**20:.2f} MiB. {live / 2**30:.2f} of "
        f"{budget / 2**30:.2f} GiB are taken."
    )


class MemoryMeter:
    """The memory of one run: its peak, and what lived when it failed.

    On a CPU the first steps, which are warm-up, run under a `MemoryTracker`; with the second step
    AdamW's state is complete and every later step takes the same. Compiled code shows its tensors
    to nobody: such a run is not measured on a CPU.
    """

    def __init__(self, config: RunConfig, device: torch.device, budget_bytes: int | None) -> None:
        self._device = device
        self._vocab_size = config.vocab_size
        self._tracker = MemoryTracker(budget_bytes) if device.type == "cpu" else None
        self._over = False  # the steps that are followed

    def start(self, model: torch.nn.Module, tokens: torch.Tensor, *, compiled: bool) -> None:
        """Count from here on: the weights are there, and batches are views of `tokens`."""
        if compiled:
            self._tracker = None
        if self._tracker:
            self._tracker.register(tokens, counted=False)
            self._tracker.register(*model.parameters(), *model.buffers())

    @contextlib.contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Around one step."""
        if self._tracker is None or step >= WARMUP_STEPS:
            yield
            return
        with self._tracker:
            yield
        if step == WARMUP_STEPS - 1:
            self._tracker.forget()
            self._over = True

    def peak_bytes(self) -> int | None:
        """The most bytes of tensors at once so far; None = not measured."""
        if self._tracker:
            return self._tracker.peak_bytes
        return accelerator.peak_memory_bytes(self._device)

    def at_failure(
        self, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
    ) -> dict[str, int]:
        """What lives now, in bytes: weights, gradients, AdamW's moments, and the rest.

        A CPU's rest is told apart: logits, and everything else ("activations"). Empty = unknown,
        as on a CPU after the steps that are followed.
        """
        live = accelerator.allocated_bytes(self._device)
        if self._tracker:
            live = None if self._over else self._tracker.live_bytes
        if live is None or model is None:
            return {}
        parameters = list(model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        if isinstance(model, DistributedDataParallel):  # its buckets are there from the start
            gradients = parameters
        state = optimizer.state.values() if optimizer else ()
        parts = {
            "weights": _nbytes([*parameters, *model.buffers()]),
            "gradients": _nbytes(gradients),
            "moments": _nbytes([t for s in state for t in s.values() if torch.is_tensor(t)]),
        }
        if self._tracker:
            parts["logits"] = self._tracker.live_with_last_dim(self._vocab_size)
        return parts | {"activations": max(live - sum(parts.values()), 0)}


def _nbytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
