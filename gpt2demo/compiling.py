"""torch.compile with its seconds counted apart from the steps, and a way on where it fails."""

import getpass
import os
import tempfile
import time
from typing import Final

import torch
from torch import nn

from gpt2demo.config import RunConfig
from gpt2demo.oom import is_out_of_memory
from gpt2demo.precision import PRECISION, autocast

# what torch's compiler says, and what it means to the person who chose it
_MISSING: Final = {
    "InvalidCxxCompiler": "no C++ compiler (g++ or clang++) was found",
    "CppCompileError": "the C++ compiler failed",
    "TritonMissing": "the package triton is missing",
    "GPUTooOldForTriton": "this GPU is too old for triton",
    "Failed to find C compiler": "triton found no C compiler (gcc or clang)",
    "CalledProcessError": "triton's C compiler failed (it needs Python's headers)",
}

_CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"  # torch's own variable


def ensure_cache_folder() -> None:
    """See to it that torch's compiler has a cache folder that it may write to.

    Torch's optimizers import the compiler, whether it is used or not, and that import fails where
    its folder cannot be made or belongs to somebody else. Then it gets a fresh one.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = f"uid_{os.getuid()}"
    usual = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    folder = os.environ.get(_CACHE, usual)
    try:
        os.makedirs(folder, exist_ok=True)
        usable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        usable = False
    if not usable:
        os.environ[_CACHE] = tempfile.mkdtemp(prefix="gpt2demo-")


def compile_model(
    model: nn.Module, config: RunConfig, device: torch.device
) -> tuple[nn.Module, float, str | None]:
    """Compile `model` by one forward and backward of the run's own shape; no weight changes.

    Returns:
        the compiled model, the seconds it took, and None; or, where compiling fails, `model`
        itself, the seconds, and a sentence that names the reason and what runs instead.

    Raises:
        whatever says out of memory: that is the run's end, not the compiler's.
    """
    t0 = time.perf_counter()
    note = None
    if _skips(config, device):
        note = (
            "torch.compile leaves bf16 alone on this GPU, which has no bf16 units. "
            "The run goes on without it."
        )
        return model, 0.0, note
    x = torch.zeros(config.B, config.T, dtype=torch.long, device=device)
    try:
        compiled = torch.compile(model)
        with autocast(PRECISION[config.precision], device.type):
            _, loss = compiled(x, x)
        loss.backward()  # the backward graph is compiled when it first runs
    except Exception as exc:
        if is_out_of_memory(exc):
            raise
        compiled = model
        note = f"torch.compile did not work here: {_reason(exc)}. The run goes on without it."
    model.zero_grad()
    return compiled, time.perf_counter() - t0, note


def _skips(config: RunConfig, device: torch.device) -> bool:
    """Whether torch's compiler would leave the model as it is, with no more than a warning.

    So it does where a GPU only emulates bfloat16 (`_check_triton_bf16_support` in
    torch/_inductor/compile_fx.py).
    """
    bf16 = PRECISION[config.precision].autocast_dtype is torch.bfloat16
    cuda = device.type == "cuda"
    return bf16 and cuda and not torch.cuda.is_bf16_supported(including_emulation=False)


def _reason(exc: BaseException) -> str:
    text = f"{type(exc).__name__} {exc}"
    for sign, reason in _MISSING.items():
        if sign in text:
            return reason
    return f"it ended with {type(exc).__name__}"
