"""Forecast of the peak memory of one training step, from the settings alone.

Every tensor that lives at the three moments that can be the peak is counted, part by part; the
largest sum is the forecast. What a GPU holds beside the tensors is added as parts of their own.
"""

from dataclasses import asdict, dataclass
from typing import Any, Final

from gpt2demo.config import GPTConfig, RunConfig

_MIB: Final = 2**20

# The driver's context with torch's kernels took 274 to 430 MiB on several GPUs: the most counts.
CONTEXT_BYTES: Final = 430 * _MIB
# cuBLAS takes a workspace a handle and stream; forward and backward have a thread each.
_WORKSPACES: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryParts:
    """What lives at one moment, bytes."""

    weights: int = 0  # with manual attention's causal masks
    gradients: int = 0
    moments: int = 0  # AdamW's two
    activations: int = 0  # saved for backward, with autocast's 16-bit copies of weights
    logits: int = 0  # and the loss's own copies of them
    temporary: int = 0  # the optimizer's
    workspaces: int = 0  # cuBLAS's, inside torch's allocator
    context: int = 0  # the driver's and the kernels', outside it

    @property
    def tensors(self) -> int:
        """The sum of live tensors: what a tracker of tensors measures."""
        return self.allocated - self.workspaces

    @property
    def allocated(self) -> int:
        """Tensors and workspaces: what `max_memory_allocated` measures."""
        state = self.weights + self.gradients + self.moments
        return state + self.activations + self.logits + self.temporary + self.workspaces


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryForecast:
    """The forecast peak of one run."""

    phase: str  # the moment of the peak
    parts: MemoryParts  # at that moment; they add up to the peak
    largest_tensor_bytes: int  # what a check that comes after an allocation overshoots by

    @property
    def peak_bytes(self) -> int:
        """All that the device gives up."""
        return self.parts.allocated + self.parts.context

    @property
    def live_bytes(self) -> int:
        """Tensors alone."""
        return self.parts.tensors

    def to_dict(self) -> dict[str, Any]:
        """The forecast for JSON."""
        return {
            "peak_bytes": self.peak_bytes,
            "live_bytes": self.live_bytes,
            "phase": self.phase,
            "parts": asdict(self.parts),
        }


def num_params(gpt: GPTConfig) -> int:
    """The weights of a model, the tied classifier counted once."""
    C = gpt.n_embd
    layer = 12 * C * C + 13 * C
    return gpt.vocab_size * C + gpt.block_size * C + gpt.n_layer * layer + 2 * C


def fused_sdpa(precision: str, device_type: str, compute_capability: str | None) -> bool:
    """Whether SDPA trains through a fused kernel there, and not through plain matmuls that keep the
    scores.

    As torch's sdp_utils.cpp has it: no kernel of a GPU takes float64, NVIDIA's take bfloat16 from
    compute capability 8.0 on (an unknown one counts as that), MPS has none that trains.
    """
    if device_type == "cuda":
        old = compute_capability is not None and int(compute_capability.split(".")[0]) < 8
        return precision != "fp64" and not (precision == "bf16" and old)
    return device_type == "cpu" or (device_type != "mps" and precision != "fp64")


def workspace_bytes(device_type: str, compute_capability: str | None) -> int:
    """cuBLAS's workspaces as torch sizes them: 32 MiB each from compute capability 9.0 on, else
    8.1 MiB; an unknown capability counts as the larger. Nothing is known of other devices.
    """
    if device_type != "cuda":
        return 0
    old = compute_capability is not None and int(compute_capability.split(".")[0]) < 9
    # torch's default: ":4096:2:16:8", in KiB and how many
    return _WORKSPACES * ((2 * 4096 + 8 * 16) * 1024 if old else 32 * _MIB)


def forecast(
    config: RunConfig,
    device_type: str,
    *,
    compute_capability: str | None = None,
    with_context: bool = False,
    sizes: tuple[int, int] | None = None,
    ddp: bool = False,
    followed: bool | None = None,
) -> MemoryForecast:
    """The peak of a run; from its second step on AdamW's moments count too.

    Args:
        config: the run. Under `compile` the loss's tensors are of the compute dtype, as measured on
            CPUs; on a GPU nobody has measured it.
        device_type: "cpu", "cuda", ...: manual attention's softmax and the default AdamW differ.
        compute_capability: an NVIDIA GPU's, for cuBLAS's workspaces.
        with_context: count a CUDA context (not where the device's free memory is read from inside
            a process that has one).
        sizes: (B, T) in place of the config's.
        ddp: one process of several (DistributedDataParallel): the gradients' buckets live from the
            start to the end, and the tied gradient is copied into them. NCCL's own buffers lie
            outside torch's allocator and are not counted.
        followed: whether a tracker sees every operation, under which autograd adds no gradient in
            place; None = on a CPU, where one follows the first steps.
    """
    gpt = config.gpt
    B, T = sizes or (config.B, config.T)
    C, V, L = gpt.n_embd, gpt.vocab_size, gpt.n_layer
    N = B * T
    amp = config.precision in ("bf16", "fp16")
    on_cpu = device_type == "cpu"
    w = 8 if config.precision == "fp64" else 4  # bytes of a weight, a gradient, a softmax
    e = 2 if amp else w  # bytes of what a matmul returns
    manual = config.attention == "manual"

    P = w * num_params(gpt)
    weights = P
    if manual:
        weights += w * L * gpt.block_size**2  # the causal mask, a buffer a layer
    moments = 2 * P
    # AdamW's moments are born in the first optimizer step
    born = moments if config.steps > 1 else 0

    act = (2 * w + 14 * e) * N * C + 4 * w * N  # kept for backward, one layer
    scores = B * gpt.n_head * T * T
    if not manual and fused_sdpa(config.precision, device_type, compute_capability):
        act += w * B * gpt.n_head * T  # the fused kernel keeps a logsumexp a row
    elif not manual:
        act += w * scores + 3 * (w - e) * N * C  # plain matmuls, of q, k and v in full precision
    elif amp and on_cpu:
        act += 2 * scores + T * T
    elif amp:
        act += 6 * scores + T * T  # float32 softmax output and its 16-bit copy
    else:
        act += w * scores + T * T
    copies = 24 * C * C if amp else 0  # 16-bit copies of the layer's weights
    saved = L * (act + copies) + (w + e) * N * C + 2 * w * N + 8 * T + (2 * V * C if amp else 0)

    batch = 16 * N  # idx and targets are int64
    # cross-entropy's log-softmax, the loss's gradient of it, and what that is cast from or to: a
    # CPU's autocast lifts all of the loss to float32, others only what log-softmax returned
    logits = (3 * w if on_cpu else 2 * w + e) * N * V
    # the embedding's share of the tied gradient, and the sum: autocast's gradient of the classifier
    # lies as the weight does, and can be added to in place
    in_place = amp and not (on_cpu if followed is None else followed)
    embedding = (1 if in_place else 2) * w * V * C
    if config.compile:
        logits = 3 * e * N * V
        embedding = w * V * C + (e * V * C if amp else e * N * V)
    # default AdamW: foreach copies all weights, elsewhere a plain loop copies the largest twice
    foreach = device_type in ("cuda", "xpu")
    temporary = 0 if config.optimizer == "fused" else P if foreach else 2 * w * V * C
    # the position table's gradient is the last: only its (T, C) rows are there yet
    gradients = P - w * C * (gpt.block_size - T)
    if ddp:
        gradients = P + w * C * T
        embedding += w * V * C

    beside = {
        "weights": weights,
        "workspaces": workspace_bytes(device_type, compute_capability),
        "context": CONTEXT_BYTES if with_context and device_type == "cuda" else 0,
    }
    phases = {
        "cross-entropy backward": MemoryParts(
            gradients=P if ddp else 0,
            moments=born,
            activations=batch + saved,
            logits=logits,
            **beside,
        ),
        "gradient of the token embedding": MemoryParts(
            moments=born,
            gradients=gradients + embedding,
            activations=batch + 8 * T,
            **beside,
        ),
        "optimizer step": MemoryParts(
            moments=moments, gradients=P, temporary=temporary, activations=batch, **beside
        ),
    }
    phase = max(phases, key=lambda name: phases[name].tensors)
    return MemoryForecast(
        phase=phase,
        parts=phases[phase],
        largest_tensor_bytes=w * max(N * V, V * C, scores if manual else 0),
    )
