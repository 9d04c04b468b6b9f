"""Records to figures: the chart's rows, its layout and its palette.

The browser's script (`assets/live_chart.js`) draws what is described here: palette, dashes,
symbols and the three-panel layout have this module as their only source.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import plotly.graph_objects as go

from gpt2demo.config import WARMUP_STEPS, RunConfig
from gpt2demo.records import StepMetrics

PALETTE: Final[dict[str, dict[str, str]]] = {  # Okabe-Ito; the same on every chart of the page
    "fp32": {"light": "#000000", "dark": "#ffffff"},
    "tf32": {"light": "#0072b2", "dark": "#56b4e9"},  # its sky blue: readable on dark ground
    "bf16": {"light": "#e69f00", "dark": "#e69f00"},
    "fp16": {"light": "#009e73", "dark": "#00b585"},
    "fp64": {"light": "#756a94", "dark": "#b3a8d1"},
}
DASHES: Final = ("solid", "7px,3px", "2px,3px", "7px,3px,2px,3px", "12px,4px")
SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "triangle-down")
DRAWN_POINTS: Final = 500  # points of one drawn curve
DRAWN_CURVES: Final = 9  # runs of one chart

CONFIG: Final[dict[str, Any]] = {  # plotly's, of every chart that a script of ours draws
    "displaylogo": False,
    "displayModeBar": "hover",
    "modeBarButtons": [["autoScale2d", "toImage"]],
    "doubleClick": "autosize",
    "responsive": False,  # the script watches its own box
}

# key, title, y axis, bottom and top on the chart's height
_PANELS: Final = (
    ("loss", "loss (nats per token)", "yaxis", 0.672, 0.94),
    ("ms", "ms per step", "yaxis2", 0.336, 0.604),
    ("tps", "tokens per second", "yaxis3", 0.0, 0.268),
)


def _row(step: StepMetrics) -> list[Any]:
    """[step, loss, ms] or [step, loss, ms, flag].

    A loss that JSON cannot hold is None with flag "n" (NaN), "+" or "-" (infinite). "s" in the
    flag: the gradient scaler skipped the step.
    """
    loss: float | None = round(step.loss, 6)
    flag = ""
    if not math.isfinite(step.loss):
        flag = "n" if math.isnan(step.loss) else "+" if step.loss > 0 else "-"
        loss = None
    if step.skipped:
        flag += "s"
    # two decimals are what the log prints; short steps need more for a true tokens/sec
    row = [step.step, loss, round(step.step_ms, 2 if step.step_ms >= 100 else 4)]
    return [*row, flag] if flag else row


def _kept(steps: Sequence[StepMetrics]) -> Iterator[int]:
    """Which steps of one bin stay: least and greatest time and loss, and one without a loss."""
    finite = []
    broken = None
    for index, step in enumerate(steps):
        if math.isfinite(step.loss):
            finite.append(index)
        elif broken is None:
            broken = index
    yield min(range(len(steps)), key=lambda i: steps[i].step_ms)
    yield max(range(len(steps)), key=lambda i: steps[i].step_ms)
    if finite:
        yield min(finite, key=lambda i: steps[i].loss)
        yield max(finite, key=lambda i: steps[i].loss)
    if broken is not None:
        yield broken


def _thinned(steps: Sequence[StepMetrics], limit: int) -> list[list[Any]]:
    """At most `limit` rows: first, last, the warm-up steps, and every bin's extremes."""
    count = len(steps)
    if count <= limit:
        return [_row(step) for step in steps]
    chosen = {0, count - 1}
    chosen |= {i for i in range(min(count, WARMUP_STEPS)) if steps[i].is_warmup}
    bins = max(1, (limit - len(chosen)) // 5)  # a bin keeps at most five
    edges = [count * i // bins for i in range(bins + 1)]
    for low, high in pairwise(edges):
        # warm-up stays out of the bins: it would hide the slowest measured step
        inside = [i for i in range(low, high) if i not in chosen]
        if inside:
            chosen.update(inside[i] for i in _kept([steps[i] for i in inside]))
    return [_row(steps[i]) for i in sorted(chosen)]


def delta_rows(steps: Sequence[StepMetrics], start: int, limit: int = 20) -> list[list[Any]]:
    """The chart's rows of `steps[start:]`, thinned when there are more than `limit`.

    Thinning keeps the first and last step, the warm-up steps, and for each bin the steps with
    the least and greatest time and loss, so that no spike is lost.

    Returns:
        Rows `[step, loss, ms]` or `[step, loss, ms, flag]` in the order of the steps; loss in
        nats per token, None when it is not finite (flag "n", "+" or "-"); flag "s" = skipped.

    Raises:
        ValueError: when `limit` is below 9, which leaves no room for one bin.
    """
    if limit < 9:
        raise ValueError(f"limit must be at least 9, not {limit}.")
    return _thinned(steps[start:], limit)


def snapshot_rows(steps: Sequence[StepMetrics], points: int = DRAWN_POINTS) -> list[list[Any]]:
    """A whole run as at most `points` rows (see `delta_rows`)."""
    return delta_rows(steps, 0, points)


def run_curve(
    run_id: str, config: RunConfig, steps: Sequence[StepMetrics], *, live: bool
) -> dict[str, Any]:
    """A run as the live view takes it: who it is and its rows so far."""
    return {
        "id": run_id,
        "label": config.label,
        "precision": config.precision,
        "tokens": config.tokens_per_step,
        "steps": config.steps,
        "warmup": WARMUP_STEPS,
        "live": live,
        "rows": snapshot_rows(steps),
    }


def _note(name: str, text: str, x: float, y: float) -> go.layout.Annotation:
    side = "left" if x == 0 else "right"
    return go.layout.Annotation(
        name=name,
        text=text,
        x=x,
        y=y,
        xref="paper",
        yref="paper",
        xanchor=side,
        yanchor="bottom",
        align=side,
        showarrow=False,
        borderpad=0,
        yshift=2,
    )


def base_figure() -> dict[str, Any]:
    """The empty three-panel figure: `layout`, `config`, and its `panels` from top to bottom.

    One x axis (step) for all three panels, so that one hover shows all of them. Colours are left
    to the script, which takes them from the page's theme. The annotations named `note-<panel>`
    are the places where a panel says what lies outside its axis.
    """
    axis = {"automargin": False, "fixedrange": False, "nticks": 5, "zeroline": False}
    axis |= {"anchor": "x", "separatethousands": True, "showline": False, "ticks": ""}
    layout = go.Layout(
        autosize=True,
        margin={"l": 44, "r": 10, "t": 4, "b": 34, "pad": 0},
        font={"size": 11},
        showlegend=False,
        hovermode="x unified",
        hoversubplots="axis",
        hoverdistance=40,
        hoverlabel={"namelength": -1, "font": {"size": 11}},
        dragmode="zoom",
        uirevision="live",  # never changes: a zoom survives every update
        xaxis={
            "anchor": "y3",
            "title": {"text": "step", "standoff": 4},
            "zeroline": False,
            "showspikes": True,
            "spikemode": "across",
            "spikesnap": "hovered data",
            "spikethickness": 1,
            "spikedash": "dot",
            "nticks": 9,
            "separatethousands": True,
            "unifiedhovertitle": {"text": "step %{x}"},
        },
        annotations=[
            note
            for key, title, _, _, top in _PANELS
            for note in (_note(f"title-{key}", title, 0, top), _note(f"note-{key}", "", 1, top))
        ],
        **{
            name: axis
            | {"domain": [low, high], "rangemode": "normal" if key == "loss" else "tozero"}
            for key, _, name, low, high in _PANELS
        },
    )
    return {
        "layout": layout.to_plotly_json(),
        "config": dict(CONFIG),
        "panels": [
            {"key": key, "layout": name, "axis": name.replace("axis", "")}
            for key, _, name, _, _ in _PANELS
        ],
    }


def enlarged(figure: go.Figure, scale: float) -> go.Figure:
    """The figure for a room: its height, margins, texts and marker sizes `scale` times as large.

    The figure itself is changed. Whatever is to grow must be set in it: plotly's defaults stay.
    """
    layout = figure.layout
    layout.height *= scale
    layout.font.size *= scale
    for side in ("l", "r", "t", "b"):
        layout.margin[side] *= scale
    for trace in figure.select_traces({"type": "scatter"}):
        if trace.marker.size is not None:
            trace.marker.size *= scale
    return figure
