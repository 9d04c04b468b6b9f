"""What each precision means on a device: a status and a reason in plain words.

Pure judgement, no queries: `device.py` brings the facts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpt2demo.config import PRECISIONS
from gpt2demo.peaks import GpuSpec

STATUSES: Final = ("native", "emulated", "no effect", "not available", "unknown")

# fp32's arithmetic rate over fp64's: CUDA C++ Programming Guide, arithmetic throughput table
_FP64_FRACTION: Final = {
    **dict.fromkeys([(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)], 2),
    **dict.fromkeys([(5, 0), (5, 2), (5, 3), (6, 1), (6, 2), (7, 5)], 32),
    **dict.fromkeys([(8, 6), (8, 9), (10, 3), (12, 0)], 64),
}
# Turing chips of capability 7.5 that left the tensor cores out (TU116, TU117)
_NO_TENSOR_CORES: Final = re.compile(
    r"GTX 16\d\d|\bMX[45]50\b|\bT(400|500|550|600|1000|1200)\b|Quadro T[12]000|CMP 30HX"
)
_AMD_MATRIX_UNITS: Final = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
# Backward of large matmuls against fp32's, measured with torch 2.13 on CPUs without the
# instructions: the forward pass alone is some 2x slower, so a probe of it misleads.
_SCALAR_BACKWARD: Final = {"bf16": "up to 60x", "fp16": "up to 170x"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """How one precision runs on one device.

    - native: the device has units for it;
    - emulated: it runs through another type, by conversion;
    - no effect: it runs, but exactly as fp32 does;
    - not available: it does not run;
    - unknown: the device has not been met yet.
    """

    status: str  # one of STATUSES
    reason: str  # why, on this device, and what to expect
    slow: str | None = None  # a warning for before the start; None = nothing to warn of


def unusable(reason: str) -> dict[str, Support]:
    """Every precision not available, all for one reason."""
    return {precision: _missing(reason) for precision in PRECISIONS}


def unmet(reason: str) -> dict[str, Support]:
    """Every precision unknown, all for one reason."""
    return {precision: Support(status="unknown", reason=reason) for precision in PRECISIONS}


def has_tensor_cores(compute_capability: str, name: str | None) -> bool:
    """Whether an NVIDIA GPU of this compute capability, as "7.5", and name has tensor cores."""
    return int(compute_capability.split(".")[0]) >= 7 and not _NO_TENSOR_CORES.search(name or "")


def nvidia_support(
    capability: tuple[int, int], name: str | None, spec: GpuSpec | None
) -> dict[str, Support]:
    """Support on an NVIDIA GPU of this compute capability; `spec` adds the figures."""
    cc = f"{capability[0]}.{capability[1]}"
    fp32, tf32, fp16 = (_tflops(spec, precision) for precision in ("fp32", "tf32", "fp16"))
    support = {
        "fp32": _native(f"Full float32 in every matmul, no tensor cores{_after_colon(fp32)}."),
        "fp64": _fp64(spec, _FP64_FRACTION.get(capability)),
    }
    if capability >= (8, 0):
        chip = f"compute capability {cc}"
        support["tf32"] = _native(_on_units("TF32 on tensor cores", spec, "tf32", chip))
        if tf32 and _times(spec, "tf32", "fp32") < 1.2:
            # GeForce: equal on paper; fp32 matmuls stay further below their peak than TF32's
            support["tf32"] = _native(
                f"TF32 on tensor cores, rated like fp32 here ({tf32} TFLOP/s): a modest gain."
            )
        support["bf16"] = _native(_on_units("bf16 on tensor cores", spec, "bf16", chip))
        rate = f" ({fp16} TFLOP/s dense)" if fp16 else ""
        support["fp16"] = _native(
            f"Same tensor-core rate as bf16{rate}, but needs a gradient scaler."
        )
        return support
    tensor_cores = has_tensor_cores(cc, name)
    needs = f"needs compute capability 8.0; this GPU has {cc}."
    support["tf32"] = _same_as_fp32(f"TF32 {needs} It runs exactly as fp32.")
    support["bf16"] = _emulated(
        f"bf16 {needs} Emulated: slower than fp32{'; use fp16.' if tensor_cores else '.'}",
        slow=f"bf16 is emulated on this GPU (compute capability {cc}): "
        "expect slower steps than in fp32.",
    )
    if tensor_cores:
        rates = f": {fp16} TFLOP/s dense against {fp32} in fp32" if fp16 and fp32 else ""
        support["fp16"] = _native(f"fp16 on tensor cores{rates}. The one to use here.")
    elif capability >= (7, 0):
        support["fp16"] = Support(
            status="native",
            reason="fp16 units but no tensor cores: no gain in matmuls, often a loss.",
            slow="This GPU has fp16 units but no tensor cores: steps may be slower than in fp32.",
        )
    elif capability == (6, 1):
        support["fp16"] = _emulated(
            "fp16 units run at 1/64 of the fp32 rate: torch multiplies in float32, no gain."
        )
    elif capability >= (5, 3):
        support["fp16"] = _native(
            "fp16 units but no tensor cores, and matmuls add up in float32: little gain."
        )
    else:
        support["fp16"] = _emulated(
            "No fp16 units: stored as fp16, multiplied in float32, so no gain in speed."
        )
    return support


def amd_support(architecture: str, spec: GpuSpec | None) -> dict[str, Support]:
    """Support on an AMD GPU; `architecture` is its gfx name, as "gfx942:sramecc+:xnack-"."""
    gfx = architecture.split(":")[0]
    fp32, tf32 = _tflops(spec, "fp32"), _tflops(spec, "tf32")
    support = {
        "fp32": _native(f"Full float32 in every matmul{_after_colon(fp32)}."),
        "tf32": _same_as_fp32(f"This AMD GPU ({gfx}) has no TF32: it runs exactly as fp32."),
        "fp64": _fp64(spec, None),
    }
    if gfx.startswith("gfx94"):
        # torch's notes on numerical accuracy: 'high' reaches CDNA3's xf32 through hipBLASLt
        rates = f" ({tf32} TFLOP/s against {fp32})" if tf32 and fp32 else ""
        support["tf32"] = _native(f"TF32 as AMD's xf32{rates}; whether it is used depends on ROCm.")
    elif gfx.startswith("gfx95"):
        support["tf32"] = _emulated("CDNA4 has no TF32 units: the ROCm version decides what runs.")
    if gfx.startswith(_AMD_MATRIX_UNITS):
        support["bf16"] = _native(_on_units("bf16 on matrix units", spec, "bf16", gfx))
        support["fp16"] = _native(_on_units("fp16 on matrix units", spec, "fp16", gfx))
        return support
    support["bf16"] = _emulated(
        f"This AMD GPU ({gfx}) has no bf16 units. Emulated: slower than fp32.",
        slow="bf16 is emulated on this GPU: expect slower steps than in fp32.",
    )
    support["fp16"] = _native("Packed fp16 but no matrix units: a small gain at most.")
    return support


def cpu_support(
    capabilities: Mapping[str, object],
    *,
    threads: int | None = None,
    onednn_bf16: bool | None,
    onednn_fp16: bool | None,
) -> dict[str, Support]:
    """Support on a CPU.

    Args:
        capabilities: torch.cpu.get_capabilities(); empty when torch cannot say.
        threads: torch's threads, for the text.
        onednn_bf16: whether torch hands bf16 matmuls to oneDNN here; None = torch cannot say.
        onednn_fp16: the same for fp16.
    """

    def first(*flags: str) -> str | None:
        return next((flag for flag in flags if capabilities.get(flag)), None)

    on_threads = f" on {threads} threads" if threads and threads > 1 else ""
    support = {
        "fp32": _native(f"The CPU's own float32{on_threads}; what the others are held against."),
        "tf32": _same_as_fp32("This CPU has no TF32: 'high' changes nothing, it runs as fp32."),
        "bf16": _cpu_half("bf16", first("amx_bf16", "avx512_bf16", "bf16"), onednn_bf16),
        "fp16": _cpu_half("fp16", first("amx_fp16", "avx512_fp16", "fp16_arith"), onednn_fp16),
        "fp64": _native(
            "float64 in hardware, at about half the fp32 rate and in twice the memory."
        ),
    }
    if first("amx_fp16"):  # the one kind of CPU on which torch's oneDNN matmuls follow 'high'
        support["tf32"] = _emulated(
            "'high' lets oneDNN round float32 matmuls for AMX: near fp32, not equal."
        )
    return support


def _cpu_half(precision: str, instructions: str | None, onednn: bool | None) -> Support:
    """bf16 or fp16 on a CPU; matmuls that oneDNN does not take run in a scalar loop."""
    if instructions and onednn is not False:
        return _native(
            f"{precision} in hardware ({instructions}): faster in large matmuls, not in small ones."
        )
    if onednn:
        return _emulated(
            f"No {precision} instructions: converted to float32 and back, slower than fp32.",
            slow=f"This CPU has no {precision} instructions: expect slower steps than in fp32.",
        )
    times = _SCALAR_BACKWARD[precision]
    return _emulated(
        f"No usable {precision} instructions: backward runs {times} slower than in fp32.",
        slow=f"{precision} is very slow on this CPU: where a step takes 1 s in fp32, expect tens "
        "of seconds. The forward pass is usable, the backward pass runs in a scalar loop.",
    )


def mps_support() -> dict[str, Support]:
    """Support on an Apple GPU."""
    return {
        "fp32": _native("float32 through Metal, in the memory that the CPU uses too."),
        "tf32": _same_as_fp32("Apple GPUs have no TF32: 'high' changes nothing, it runs as fp32."),
        "bf16": _native("bf16 through Metal (macOS 14 or newer). Apple gives no rate: measure it."),
        "fp16": _native("fp16 through Metal. Apple gives no rate: measure it."),
        "fp64": _missing("Metal has no float64. This machine's CPU has it: choose cpu."),
    }


def xpu_support(*, has_bf16: bool, has_fp16: bool, has_fp64: bool) -> dict[str, Support]:
    """Support on an Intel GPU, from the flags among its properties."""
    support = {
        "fp32": _native("Full float32 in every matmul."),
        "tf32": _same_as_fp32("torch documents 'high' for CUDA devices only: it runs as fp32."),
        "fp64": _native("float64 in hardware, as the driver reports, in twice the memory.")
        if has_fp64
        else _missing("The driver reports no float64 units on this GPU."),
    }
    for precision, present in {"bf16": has_bf16, "fp16": has_fp16}.items():
        support[precision] = _native(f"{precision} in hardware, as the driver reports.")
        if not present:
            support[precision] = _emulated(
                f"The driver reports no {precision} units. Emulated: slower than fp32.",
                slow=f"{precision} is emulated on this GPU: expect slower steps than in fp32.",
            )
    return support


def _native(reason: str) -> Support:
    return Support(status="native", reason=reason)


def _emulated(reason: str, slow: str | None = None) -> Support:
    return Support(status="emulated", reason=reason, slow=slow)


def _same_as_fp32(reason: str) -> Support:
    return Support(status="no effect", reason=reason)


def _missing(reason: str) -> Support:
    return Support(status="not available", reason=reason)


def _tflops(spec: GpuSpec | None, precision: str) -> str | None:
    """A peak in TFLOP/s for reading: "19.5", "989", "0.2"."""
    flops = spec.peak_flops[precision] if spec else None
    if flops is None:
        return None
    return f"{flops / 1e12:.2g}" if flops < 1e12 else f"{flops / 1e12:.1f}".removesuffix(".0")


def _times(spec: GpuSpec | None, precision: str, other: str) -> float:
    """One precision's peak over another's; infinite when either is unknown."""
    peaks = [spec.peak_flops[p] if spec else None for p in (precision, other)]
    return peaks[0] / peaks[1] if peaks[0] and peaks[1] else float("inf")


def _after_colon(tflops: str | None) -> str:
    return f": {tflops} TFLOP/s" if tflops else ""


def _on_units(what: str, spec: GpuSpec | None, precision: str, chip: str) -> str:
    rate, fp32 = _tflops(spec, precision), _tflops(spec, "fp32")
    if rate and fp32:
        return f"{what}: {rate} TFLOP/s dense against {fp32} in fp32."
    return f"{what} ({chip}): faster than fp32 in large matmuls."


def _fp64(spec: GpuSpec | None, fraction: int | None) -> Support:
    """fp64, whose rate is fp32's over `fraction` where the spec does not tell."""
    fp64, fp32 = _tflops(spec, "fp64"), _tflops(spec, "fp32")
    if fp64 and fp32:
        fraction = round(_times(spec, "fp32", "fp64"))
    if fraction is None:
        return _native("float64 in hardware, at a rate unknown here and in twice the memory.")
    if fraction == 1 and fp64:
        return _native(f"float64 rated like fp32 here ({fp64} TFLOP/s), in twice the memory.")
    if fraction < 8:
        rate = f"{fp64} TFLOP/s against {fp32} in fp32" if fp64 and fp32 else "half the fp32 rate"
        return _native(f"float64 at {rate}, in twice the memory.")
    here = f" ({fp64} TFLOP/s)" if fp64 else ""
    return Support(
        status="native",
        reason=f"float64 runs at 1/{fraction} of the fp32 rate here{here}, in twice the memory.",
        slow=f"fp64 runs at 1/{fraction} of the fp32 rate on this GPU: expect far longer steps.",
    )
