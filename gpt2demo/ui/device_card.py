"""The device panel: what the machine is, and what each precision means on it."""

from html import escape

from gpt2demo.device import DeviceInfo, warnings_for
from gpt2demo.precision import PRECISION

_GIB = 2**30


def device_card(info: DeviceInfo, memory_free_bytes: int | None) -> str:
    """The panel as HTML; whatever comes from the machine is escaped.

    Args:
        info: the probe.
        memory_free_bytes: free now; None = unknown.
    """
    rows = "".join(
        f'<div class="precision-row"><dt>{escape(_short(precision))}</dt>'
        f'<dd><b class="status status-{support.status.replace(" ", "-")}">'
        f"{escape(support.status)}</b> {escape(support.reason)}</dd></div>"
        for precision, support in info.support.items()
    )
    problem = f'<p class="device-problem">{escape(info.problem)}</p>' if info.problem else ""
    return (
        f'<section class="device" aria-label="Device"><h2>{escape(info.name or "unknown device")}'
        f'</h2><p class="device-facts">{escape(_facts(info, memory_free_bytes))}</p>{problem}'
        f'<dl class="precisions">{rows}</dl></section>'
    )


def precision_note(info: DeviceInfo, precision: str) -> str:
    """What the chosen precision is and, where it is slow here, a warning; as HTML."""
    meaning = escape(PRECISION[precision].meaning)
    warning = " ".join(warnings_for(info, precision))
    warned = f'<p class="warning">{escape(warning)}</p>' if warning else ""
    return f'<div class="precision-note"><p>{meaning}</p>{warned}</div>'


def _short(precision: str) -> str:
    return {"tf32": "TF32"}.get(precision, precision)


def _facts(info: DeviceInfo, free: int | None) -> str:
    def gib(count: int | None) -> str:
        return "unknown" if count is None else f"{count / _GIB:.1f} GiB"

    facts = [f"Memory {gib(info.memory_total_bytes)}, free {gib(free)}"]
    if info.type == "cpu":
        cores = f" with {info.cores} cores" if info.cores else ""
        facts.append(f"CPU{cores}, no compute capability")
    elif info.compute_capability:
        facts.append(f"compute capability {info.compute_capability}")
    if info.architecture:
        facts.append(info.architecture)
    if info.type != "cpu" or info.driver_version:
        facts.append(f"driver {info.driver_version or 'unknown'}")
    built_for = f"CUDA {info.cuda_version}" if info.cuda_version else None
    built_for = f"ROCm {info.hip_version}" if info.hip_version else built_for
    facts.append(f"torch {info.torch_version}" + (f" ({built_for})" if built_for else ""))
    return " · ".join(facts)
