"""What a probe found, as HTML: rates against the datasheet's, and the step that follows."""

from collections.abc import Mapping
from html import escape

from gpt2demo.probe import ProbeResult
from gpt2demo.roofline import StepForecast


def probe_words(
    found: ProbeResult, told: Mapping[str, StepForecast], measured_ms: Mapping[str, float]
) -> str:
    """A table, one row a precision, and the figures that are the same for all.

    Args:
        found: the probe.
        told: the forecast step by precision.
        measured_ms: median ms/step of real runs of the same settings, where there are any.
    """
    rows = "".join(_row(p, found, told[p], measured_ms.get(p)) for p in told)
    bandwidth, launch = found.bandwidth_bytes_per_sec, found.launch_seconds
    facts = [
        f"Probed in {found.seconds:.1f} s for {found.tokens:,} tokens a step",
        "bandwidth " + ("unknown" if bandwidth is None else f"{bandwidth / 1e9:.1f} GB/s"),
        "one launch " + ("unknown" if launch is None else f"{launch * 1e6:.1f} microseconds"),
    ]
    notes = "".join(f"<p>{escape(note)}</p>" for note in found.notes)
    skipped = "".join(
        f"<p>{escape(what)}: {escape(why)}</p>" for what, why in found.skipped.items()
    )
    return (
        f'<div class="probe"><p>{escape("; ".join(facts))}.</p><table><thead><tr>'
        "<th>precision</th><th>matmuls, TFLOP/s</th><th>of its peak</th>"
        "<th>forecast, ms/step</th><th>measured, ms/step</th><th>error</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>{notes}{skipped}</div>"
    )


def _row(precision: str, found: ProbeResult, told: StepForecast, measured_ms: float | None) -> str:
    rate = found.training_flops_per_sec.get(precision)
    share = found.peak_share.get(precision)
    error = ""
    if told.ms_per_step is not None and measured_ms:
        error = f"{(told.ms_per_step / measured_ms - 1) * 100:+.0f} %"
    cells = [
        precision,
        "unknown" if rate is None else f"{rate / 1e12:.3g}",
        "no peak known" if share is None else f"{share * 100:.0f} %",
        "unknown" if told.ms_per_step is None else f"{told.ms_per_step:,.1f}",
        "not run yet" if measured_ms is None else f"{measured_ms:,.1f}",
        error,
    ]
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
