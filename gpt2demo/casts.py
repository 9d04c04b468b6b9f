"""What autocast really casts: each operation of a real forward pass with the types it saw."""

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from gpt2demo.inspection import Cast

# operations that move or rename numbers and compute none
_MOVES: Final = frozenset(
    (
        *("_to_copy", "clone", "copy_", "contiguous", "detach", "alias", "lift_fresh"),
        *("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze"),
        *("squeeze", "slice", "select", "split", "split_with_sizes", "as_strided", "narrow"),
    )
)
_LAYER: Final = re.compile(r"\.\d+(?=\.|$)")


class ForwardWatch(contextlib.ExitStack):
    """While open, every operation of the forward pass leaves its types, and shows its output.

    Python's calls are seen before autocast casts (a function mode), the kernels they end in
    afterwards (a dispatch mode); global module hooks say in which module the model is. Nothing of
    the model is kept.

    Args:
        forward: asked at every operation: whether this is the forward pass.
        on_output: shown the floating-point output of every operation that computes.
    """

    def __init__(
        self, forward: Callable[[], bool], on_output: Callable[[torch.Tensor], None]
    ) -> None:
        super().__init__()
        self._forward, self._on_output = forward, on_output
        self._names: dict[int, str] = {}  # id of a module -> its path
        self._path: list[str] = []
        self._seen: dict[tuple[Any, ...], int] = {}
        # of the operation under way, a type a kernel
        self._kernels: list[torch.dtype] | None = None

    def __enter__(self) -> "ForwardWatch":
        """Start to watch."""
        super().__enter__()
        self.callback(hooks.register_module_forward_pre_hook(self._entered).remove)
        self.callback(hooks.register_module_forward_hook(self._left, always_call=True).remove)
        self.enter_context(_Kernels(self))
        self.enter_context(_Calls(self))
        return self

    def operations(self) -> tuple[Cast, ...]:
        """What was seen, in order."""
        return tuple(
            Cast(
                where=where,
                operation=operation,
                inputs=inputs,
                weight=weight,
                compute=compute,
                output=output,
                times=times,
            )
            for (where, operation, inputs, weight, compute, output), times in self._seen.items()
        )

    def _entered(self, module: nn.Module, inputs: object) -> None:
        if not self._path:
            self._names = {id(m): name for name, m in module.named_modules()}
        self._path.append(self._names.get(id(module), ""))

    def _left(self, module: nn.Module, inputs: object, output: object) -> None:
        if self._path:
            self._path.pop()

    def call(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """One call of the model's code, carried out and noted."""
        if not self._path or self._kernels is not None or not self._forward():
            return func(*args, **kwargs)
        self._kernels = []
        try:
            out = func(*args, **kwargs)
            computed = self._kernels
        finally:
            self._kernels = None
        if computed and isinstance(out, torch.Tensor) and out.is_floating_point():
            self._note(func, (args, kwargs), computed, out)
            self._on_output(out)
        return out

    def kernel(self, name: str, tensors: list[torch.Tensor]) -> None:
        """One kernel, below autocast."""
        dtypes = [t.dtype for t in tensors if t.is_floating_point()]
        if self._kernels is not None and name not in _MOVES and dtypes:
            # one that is given two types computes in the wider one
            self._kernels.append(functools.reduce(torch.promote_types, dtypes))

    def _note(
        self,
        func: Callable[..., Any],
        given: object,
        computed: list[torch.dtype],
        out: torch.Tensor,
    ) -> None:
        tensors = [leaf for leaf in tree_iter(given) if isinstance(leaf, torch.Tensor)]
        weights = [t for t in tensors if isinstance(t, nn.Parameter)]
        inputs = [t for t in tensors if not isinstance(t, nn.Parameter)]
        name = getattr(func, "__name__", str(func)).strip("_")
        key = (
            _LAYER.sub(".*", self._path[-1].removeprefix("transformer.")) or "GPT",
            name,
            tuple(dict.fromkeys(type_name(t.dtype) for t in inputs)),
            type_names(t.dtype for t in weights) if weights else None,
            type_names(computed),
            type_name(out.dtype),
        )
        self._seen[key] = self._seen.get(key, 0) + 1


class _Calls(TorchFunctionMode):
    """Python's calls of torch."""

    def __init__(self, watch: ForwardWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._watch.call(func, args, kwargs or {})


class _Kernels(TorchDispatchMode):
    """The kernels, after autograd and autocast."""

    def __init__(self, watch: ForwardWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten":  # prim::device and its like compute nothing
            given, result = (
                [leaf for leaf in tree_iter(some) if isinstance(leaf, torch.Tensor)]
                for some in ((args, kwargs), out)
            )
            # one that returns a wider type than it was given, as CUDA's softmax of float16 does,
            # computes in that; further results are its own notes: a logsumexp
            self._watch.kernel(func.overloadpacket.__name__, [*given, *result[:1]])
        return out


def state_types(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[str, str, str]:
    """Types of the weights, of their gradients, and of AdamW's moments."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = optimizer.state.values() if optimizer else ()
    moments = [t for s in state for t in s.values() if torch.is_tensor(t) and t.dim()]
    return (
        type_names(p.dtype for p in parameters),
        type_names(g.dtype for g in gradients),
        type_names(m.dtype for m in moments),
    )


def type_name(dtype: torch.dtype) -> str:
    """ "float32" of torch.float32."""
    return str(dtype).removeprefix("torch.")


def type_names(dtypes: Any) -> str:
    """Each type once, with "+" between; "none" where there is none."""
    return " + ".join(dict.fromkeys(map(type_name, dtypes))) or "none"
