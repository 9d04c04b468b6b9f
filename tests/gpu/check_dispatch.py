"""What CUDA's dispatcher does, without a GPU: `python -m tests.gpu.check_dispatch`.

It needs torch's CUDA build (its version ends in "+cu...") and g++. Fake tensors on "cuda" pass
through the autocast, autograd and optimizer that a GPU's pass through; only the kernels do not run.
What torch asks the driver on the way, a stub answers. Checked are the forecast of peak memory, byte
by byte; the operations of a step and the bytes that they move; and the table of casts.

Exit status: 0 all is so; 1 something is not; 2 torch is a CPU build, or there is no compiler.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from dispatched import Dispatched
from memory_tracker import AMP, MemoryTracker
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt2demo.casts import ForwardWatch
from gpt2demo.config import RunConfig
from gpt2demo.memory import forecast
from gpt2demo.model import GPT
from gpt2demo.step_counts import operations, traffic

MIB = 2**20
SLACK = 2048  # bytes: AdamW's step counters, a kernel's seed
STUBBED = "GPT2DEMO_STUBBED_CUDA"

# One device, no context, one stream; nothing is ever computed.
RUNTIME = """
namespace c10 { namespace cuda {
bool hasPrimaryContext(signed char) { return false; }
signed char device_count() noexcept { return 1; }
signed char device_count_ensure_non_zero() { return 1; }
signed char ExchangeDevice(signed char) { return 0; }
signed char MaybeExchangeDevice(signed char) { return 0; }
signed char current_device() { return 0; }
}}
extern "C" {
int cudaGetDevice(int* device) { *device = 0; return 0; }
int cudaSetDevice(int) { return 0; }
int cudaGetDeviceCount(int* count) { *count = 1; return 0; }
int cudaDeviceGetStreamPriorityRange(int* least, int* most) { *least = 0; *most = -1; return 0; }
int cudaStreamIsCapturing(void*, int* status) { *status = 0; return 0; }
int cudaGetLastError() { return 0; }
}
"""
DRIVER = """
extern "C" int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0; *active = 0; return 0;
}
"""

Attention = Callable[..., torch.Tensor]


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    """What SDPA takes for 16 bits from compute capability 8.0 on."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


def efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool
) -> torch.Tensor:
    """What SDPA takes for float32, and for float16 below 8.0."""
    attention = torch.ops.aten._scaled_dot_product_efficient_attention
    return attention(q, k, v, None, True, 0.0, is_causal)[0]


# settings, the fused kernel (None: written out, or SDPA without one), compute capability
SETTINGS: list[tuple[dict[str, object], Attention | None, str]] = [
    ({"B": 4, "T": 64}, None, "8.0"),
    ({"B": 4, "T": 64, "optimizer": "fused"}, None, "8.0"),
    ({"B": 4, "T": 1024}, None, "8.0"),
    ({"B": 4, "T": 1024, "precision": "bf16"}, None, "8.0"),
    ({"B": 8, "T": 1024, "precision": "bf16"}, None, "8.0"),
    ({"B": 8, "T": 128, "precision": "fp16", "vocab_size": 50304}, None, "7.5"),
    ({"B": 4, "T": 512, "precision": "fp64"}, None, "8.0"),
    ({"B": 4, "T": 1024, "attention": "sdpa"}, efficient, "8.0"),
    ({"B": 4, "T": 1024, "attention": "sdpa", "precision": "bf16"}, flash, "8.0"),
    ({"B": 3, "T": 333, "attention": "sdpa", "precision": "bf16"}, flash, "9.0"),
    ({"B": 8, "T": 1024, "attention": "sdpa", "precision": "fp16"}, efficient, "7.5"),
    ({"B": 4, "T": 1024, "attention": "sdpa", "precision": "bf16"}, None, "7.5"),
    ({"B": 4, "T": 512, "attention": "sdpa", "precision": "fp64"}, None, "8.0"),
    ({"model": "gpt2-medium", "B": 8, "T": 1024, "precision": "bf16"}, None, "8.0"),
]


def stub() -> int:
    """This script once more, with the stub before CUDA's own library; its exit status."""
    compiler = shutil.which("g++")
    if torch.version.cuda is None or compiler is None:
        print("This needs torch's CUDA build and g++.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        for name, source in (("runtime.so", RUNTIME), ("libcuda.so.1", DRIVER)):
            subprocess.run(
                [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", f"{folder}/{name}"],
                input=source,
                text=True,
                check=True,
            )
        stubbed = {STUBBED: "1", "LD_PRELOAD": f"{folder}/runtime.so", "LD_LIBRARY_PATH": folder}
        command = [sys.executable, "-m", "tests.gpu.check_dispatch"]
        return subprocess.run(command, env=os.environ | stubbed, check=False).returncode


@contextlib.contextmanager
def on_cuda(config: RunConfig, kernel: Attention | None):
    """A model and its batch, fake, on "cuda"; and SDPA as that kernel."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        # they would ask a GPU for its properties
        stack.enter_context(mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True))
        if kernel:
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", kernel))
        else:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        torch.set_default_dtype(torch.float64 if config.precision == "fp64" else torch.float32)
        try:
            with torch.device("cuda"):
                model = GPT(config.gpt, attention=config.attention)
        finally:
            torch.set_default_dtype(torch.float32)
        x, y = (torch.zeros(config.B, config.T, dtype=torch.long, device="cuda") for _ in range(2))
        yield model, x, y


def cast(config: RunConfig) -> torch.autocast:
    """The run's autocast."""
    dtype = AMP.get(config.precision, torch.bfloat16)
    return torch.autocast("cuda", dtype=dtype, enabled=config.precision in AMP)


def two_steps(config: RunConfig, kernel: Attention | None) -> tuple[MemoryTracker, Dispatched]:
    """Two steps: the most bytes that tensors took, and what the second one did."""
    # foreach is torch's choice on CUDA, but not for fake tensors
    kind = "fused" if config.optimizer == "fused" else "foreach"
    with on_cuda(config, kernel) as (model, x, y):
        adamw = torch.optim.AdamW(model.parameters(), **{kind: True})
        tracker = MemoryTracker()
        tracker.register(*model.parameters(), *model.buffers(), x, y)
        with tracker:
            for _ in range(2):
                did = Dispatched(config)
                with did:
                    adamw.zero_grad()
                    did.phase = "forward"
                    with cast(config):
                        logits, loss = model(x, y)
                    del logits
                    did.phase = "backward"
                    loss.backward()
                    did.phase = "optimizer"
                    adamw.step()
        return tracker, did


def miscounted(config: RunConfig, did: Dispatched) -> list[str]:
    """What `step_counts` counts otherwise than it was."""
    wrong = []
    listed = 2 * (
        12 * config.gpt.n_layer + 4
    )  # foreach's and fused's bookkeeping, as it is counted
    ran = did.operations["forward"] + did.operations["backward"]
    # at the full context a layer needs no slice of its mask
    if not 0 <= operations(config, "cuda") - listed - ran <= config.gpt.n_layer:
        wrong.append(f"{operations(config, 'cuda') - listed} operations, not {ran}")
    counted = Counter()
    for item in traffic(config, "cuda"):
        counted[item.part] += item.total_bytes
    if config.precision == "fp16":  # there is no scaler here, which reads and writes gradients
        passes = 7 if config.optimizer == "fused" else 20
        did.moved["gradients"] += 2 * did.moved["optimizer"] // passes
    for part in counted.keys() | did.moved.keys():
        if abs(counted[part] - did.moved[part]) > 0.01 * did.moved[part]:
            wrong.append(f"{part}: {counted[part]:,} bytes, not {did.moved[part]:,}")
    return wrong


def casts(precision: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Where and operation -> compute and output of one forward pass, attention written out."""
    config = RunConfig(model="tiny", B=2, T=16, precision=precision)
    with on_cuda(config, None) as (model, x, y):
        with ForwardWatch(lambda: True, lambda output: None) as watch, cast(config):
            model(x, y)
        return {(o.where, o.operation): (o.compute, o.output) for o in watch.operations()}


def main() -> int:
    """Check all; the exit status."""
    if STUBBED not in os.environ:
        return stub()
    print(f"torch {torch.__version__}")
    wrong = 0
    for settings, kernel, capability in SETTINGS:
        config = RunConfig(**settings)
        tracker, did = two_steps(config, kernel)
        found = tracker.peak_bytes
        told = forecast(config, "cuda", compute_capability=capability, followed=True).live_bytes
        faults = [f"off by {told - found:,} bytes"] if abs(told - found) > SLACK else []
        if config.attention == "manual" or kernel:  # nobody counts SDPA without a kernel
            faults += miscounted(config, did)
        wrong += len(faults)
        name = kernel.__name__ if kernel else "plain matmuls"
        print(f"{settings} ({name}, {capability}): {found / MIB:,.1f} MiB", flush=True)
        for fault in faults:
            print(f"  NOT SO: {fault}")
    for precision, short in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")):
        found = casts(precision)
        loss = "float32" if short == "float32" else f"{short} + float32"
        wanted = {
            ("lm_head", "linear"): (short, short),
            ("h.*.ln_1", "layer_norm"): ("float32", "float32"),
            ("h.*.attn", "softmax"): ("float32", "float32"),
            ("h.*.mlp.gelu", "gelu"): (short, short),
            ("GPT", "cross_entropy"): (loss, "float32"),
        }
        for key, types in wanted.items():
            off = found.get(key) != types
            wrong += off
            print(f"{precision} {': '.join(key)}: {found.get(key)}{' NOT SO' if off else ''}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
