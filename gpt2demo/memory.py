"""Forecast of the peak memory of one training step, from the settings alone.

Every tensor that lives at the three moments that can be the peak is counted; the largest sum is
the forecast. It is the sum of live tensors: what an allocator or a driver adds comes on top.
"""

from dataclasses import dataclass

from gpt2demo.config import GPTConfig, RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryForecast:
    """The forecast peak of one run, in bytes of live tensors."""

    peak_bytes: int
    phase: str  # the moment of the peak


def num_params(gpt: GPTConfig) -> int:
    """The weights of a model, the tied classifier counted once."""
    C = gpt.n_embd
    layer = 12 * C * C + 13 * C
    return gpt.vocab_size * C + gpt.block_size * C + gpt.n_layer * layer + 2 * C


def forecast(config: RunConfig, device_type: str) -> MemoryForecast:
    """The peak of a run of at least two steps (AdamW's moments are born in the first).

    Args:
        config: the run; of `compile` no account is taken, a compiled step needs less.
        device_type: "cpu", "cuda", ...: manual attention's softmax and the default AdamW differ.
    """
    gpt = config.gpt
    B, T, C, V, L = config.B, config.T, gpt.n_embd, gpt.vocab_size, gpt.n_layer
    N = B * T
    amp = config.precision in ("bf16", "fp16")
    on_cpu = device_type == "cpu"
    w = 8 if config.precision == "fp64" else 4  # bytes of a weight, a gradient, a softmax
    e = 2 if amp else w  # bytes of what a matmul returns
    manual = config.attention == "manual"

    P = w * num_params(gpt)
    base = P + 16 * N  # weights; idx and targets are int64
    if manual:
        base += w * L * gpt.block_size**2  # the causal mask, a buffer a layer
    moments = 2 * P

    act = (2 * w + 14 * e) * N * C + 4 * w * N  # kept for backward, one layer
    scores = B * gpt.n_head * T * T
    if not manual and (on_cpu or w == 4):
        act += w * B * gpt.n_head * T  # the fused kernel keeps a logsumexp a row
    elif not manual:
        act += w * scores  # no GPU kernel takes float64: torch falls back to plain matmuls
    elif amp and on_cpu:
        act += 2 * scores + T * T
    elif amp:
        act += 6 * scores + T * T  # float32 softmax output and its 16-bit copy
    else:
        act += w * scores + T * T
    copies = 24 * C * C if amp else 0  # 16-bit copies of the layer's weights
    saved = L * (act + copies) + (w + e) * N * C + 2 * w * N + 8 * T + (2 * V * C if amp else 0)

    # default AdamW: foreach copies all weights, elsewhere a plain loop copies the largest twice
    foreach = device_type in ("cuda", "xpu")
    temporary = 0 if config.optimizer == "fused" else P if foreach else 2 * w * V * C
    # the position table's gradient is the last: only its (T, C) rows are there yet
    gradients = P - w * C * (gpt.block_size - T)
    live = base + moments
    phases = {
        "cross-entropy backward": live + saved + 3 * w * N * V,
        "gradient of the token embedding": live + gradients + 2 * w * V * C + 8 * T,
        "optimizer step": live + P + temporary,
    }
    phase = max(phases, key=phases.__getitem__)
    return MemoryForecast(peak_bytes=phases[phase], phase=phase)
