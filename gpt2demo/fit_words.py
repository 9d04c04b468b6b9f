"""A forecast in words: the verdict, what to change, what bf16 saves, and how far it was checked."""

from dataclasses import asdict, replace
from typing import Any, Final

from gpt2demo.config import RunConfig
from gpt2demo.fit import FITS, UNKNOWN, Capacity, largest, smaller_that_fits

_GIB: Final = 2**30

PART_NAMES: Final = {
    "weights": "weights",
    "gradients": "gradients",
    "moments": "AdamW's moments",
    "activations": "saved activations",
    "logits": "logits and loss",
    "temporary": "optimizer's temporary",
    "workspaces": "cuBLAS workspaces",
    "context": "CUDA context",
}
_SMALLER: Final = "Take a smaller model."
_LOSS: Final = "cross-entropy backward"  # the one of memory's phases that a precision moves


def sentence(config: RunConfig, capacity: Capacity) -> str:
    """The verdict's words: what to change, the largest part, and whether SDPA has no kernel."""
    told = capacity.forecast(config)
    parts = asdict(told.parts)
    name = max(parts, key=parts.__getitem__)
    digits = 1 if told.peak_bytes >= _GIB else 2  # "0.0 of 0.1 GiB" says nothing
    part, peak = (f"{size / _GIB:.{digits}f}" for size in (parts[name], told.peak_bytes))
    share = f"{PART_NAMES[name]}: {part} of {peak} GiB"
    words = [] if capacity.verdict(told) in (FITS, UNKNOWN) else [advice(config, capacity)]
    words += [f"Largest part, {share}.", sdpa_words(config, capacity) or ""]
    return " ".join(words).rstrip()


def advice(config: RunConfig, capacity: Capacity) -> str:
    """What to lower, in one sentence; it names sizes only where the forecast says that they fit."""
    if capacity.total_bytes is None:
        lower = [f"{n} below {size}" for n, size in (("B", config.B), ("T", config.T)) if size > 1]
        return f"Lower {' or '.join(lower)}, or take a smaller model." if lower else _SMALLER
    B, T = smaller_that_fits(config, capacity)
    to = [f"{name} to {size}" for name, size in (("B", B), ("T", T)) if size]
    if to:
        return f"Lower {', or '.join(to)}: that should fit."
    T = largest(replace(config, B=1), "T", capacity, config.T - 1)
    return f"Lower both, to B=1 and T={T}: that should fit." if T else _SMALLER


def compare_words(config: RunConfig, capacity: Capacity) -> str:
    """What bf16 saves against fp32 at this setting, in words and figures."""
    told = {p: capacity.forecast(replace(config, precision=p)) for p in ("fp32", "bf16", "fp16")}
    live = {p: forecast.live_bytes for p, forecast in told.items()}
    saved = 1 - live["bf16"] / live["fp32"]
    figures = f"{live['fp32'] / _GIB:.2f} GiB in fp32, {live['bf16'] / _GIB:.2f} GiB in bf16"
    if live["fp16"] == live["bf16"]:
        figures += "; fp16 is as bf16, TF32 as fp32"
    else:
        figures += f", {live['fp16'] / _GIB:.2f} GiB in fp16; TF32 is as fp32"
    if abs(saved) < 0.005 and told["bf16"].phase == told["fp32"].phase == _LOSS:
        what = "saves nothing here: copies beside the float32 originals take what it saves"
    elif abs(saved) < 0.005:
        what = f"saves nothing here: the peak is the {told['bf16'].phase}, all float32"
    elif saved > 0:
        what = f"saves {saved * 100:.0f} % here" + ("" if config.compile else ", not half")
    elif capacity.lacks_kernel(replace(config, precision="bf16")):
        what = f"takes {-saved * 100:.0f} % more here: SDPA has no fused kernel for it"
    else:
        what = f"takes {-saved * 100:.0f} % more here: it keeps copies beside the float32 originals"
    # compiled, the loss's tensors are 16-bit too: of the tiny model they are nearly all
    stay = (
        "halve everything: weights, gradients and AdamW's moments"
        if config.compile
        else "halve memory: weights, gradients, AdamW's moments and the loss"
    )
    return f"bf16 does not {stay} stay float32. It {what} ({figures})."


def sdpa_words(config: RunConfig, capacity: Capacity) -> str | None:
    """What it means that SDPA has no fused kernel for the run, in one sentence; None = it has."""
    if capacity.lacks_kernel(config):
        return (
            f"SDPA has no fused kernel for {config.precision} here: it keeps every score, as "
            "manual attention does."
        )
    if capacity.any_card and replace(capacity, compute_capability="7.5").lacks_kernel(config):
        return (
            f"SDPA has no fused kernel for {config.precision} below compute capability 8.0 (T4, "
            "V100): there it keeps every score."
        )
    return None


def basis(config: RunConfig, device_type: str) -> str:
    """How far the forecast was checked for such a setting, in one sentence."""
    on_cpu = device_type == "cpu"
    if config.compile:
        return (
            "Compiled: within 0.5 % of profiled steps on a CPU."
            if on_cpu
            else "Compiled: checked on CPUs only; on a GPU it may differ."
        )
    if on_cpu:
        return "Within 0.5 % of tracked steps."
    whose = "through CUDA's own dispatcher" if device_type == "cuda" else "with CUDA's rules"
    return f"Within 0.5 % of steps simulated {whose}; fragmentation comes on top."


def report(config: RunConfig, capacity: Capacity) -> dict[str, Any]:
    """Forecast, verdict and limits of one setting, for JSON: bytes, and the largest B at this T and
    T at this B that fit (0 = none, None = the device's memory is unknown).
    """
    told = capacity.forecast(config)
    known = capacity.total_bytes is not None
    return {
        **told.to_dict(),
        "verdict": capacity.verdict(told),
        "capacity_bytes": capacity.total_bytes,
        "sentence": sentence(config, capacity),
        "largest_B": largest(config, "B", capacity) if known else None,
        "largest_T": largest(config, "T", capacity) if known else None,
        "basis": basis(config, capacity.device_type),
    }
