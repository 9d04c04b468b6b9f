"""The staircase as a waterfall beside the lesson's, and as a table."""

from collections.abc import Sequence
from typing import Final

import pandas as pd
import plotly.graph_objects as go

from gpt2demo.charts import PALETTE
from gpt2demo.staircase import RungResult

_INK: Final = "#808080"  # readable on light and on dark ground: the figure follows no theme
_LOST: Final = "#d55e00"  # Okabe-Ito's vermilion: a rung that costs time
_TICKS: Final = {  # short enough for seven beside each other on a phone
    "fp32": "fp32",
    "tf32": "TF32",
    "bf16": "bf16",
    "compile": "compile",
    "sdpa": "SDPA",
    "vocab": "vocab",
    "fused": "fused",
}
_SHOWN_MARKS: Final = {
    "no effect": "no effect",
    "emulated": "emulated",
    "not compiled": "not compiled",
}
_COLUMNS: Final = (
    "rung",
    "state",
    "ms/step median",
    "p25",
    "p75",
    "x rung before",
    "x fp32",
    "lesson ms",
    "lesson x before",
    "lesson x fp32",
    "compile s",
    "ran as",
)


def staircase_table(results: Sequence[RungResult], labels: Sequence[str | None]) -> pd.DataFrame:
    """One row a rung, units in the column names, NA for what is unknown.

    Args:
        results: in the order of the rungs.
        labels: the settings that each rung ran with, in words; None = it did not run.
    """
    rows = [
        (
            r.name,
            ", ".join(filter(None, [r.state, _SHOWN_MARKS.get(r.mark or "")])),
            r.step_ms_median,
            r.step_ms_p25,
            r.step_ms_p75,
            r.speedup_before,
            r.speedup_first,
            r.lesson_ms,
            r.lesson_speedup_before,
            r.lesson_speedup_first,
            r.compile_seconds,
            label,
        )
        for r, label in zip(results, labels, strict=True)
    ]
    types = ["string", "string", *["Float64"] * 9, "string"]
    table = pd.DataFrame(
        {
            name: pd.array([row[i] for row in rows], dtype=types[i])
            for i, name in enumerate(_COLUMNS)
        }
    )
    ratios = [name for name in _COLUMNS if "x " in name]
    return table.round({name: 2 if name in ratios else 1 for name in _COLUMNS[2:-1]})


def staircase_figure(results: Sequence[RungResult]) -> go.Figure:
    """Each rung's ms/step as a bar, what it saved against the rung before as a hatched bar on top,
    and the lesson's A100 as diamonds on an axis of its own: the share of its own fp32 step.

    Both axes have fp32's step at the same height, so that the ratios compare by eye; without a
    measured fp32 rung the right axis has its own scale. A rung that was not measured has no bar
    but the reason below its name.
    """
    measured = [r for r in results if r.step_ms_median is not None]
    saved = [r for r in measured if r.saved_ms is not None and r.saved_ms > 0]
    lost = [r for r in measured if r.saved_ms is not None and r.saved_ms < 0]
    first = results[0].step_ms_median
    top = 1.15 * max([_top(r) for r in measured], default=1)
    figure = go.Figure(
        [
            _here(measured),
            _change("saved by it", saved, [r.step_ms_median for r in saved], _INK),
            _change("lost by it", lost, [r.step_ms_median + r.saved_ms for r in lost], _LOST),
            go.Scatter(
                name="lesson's A100: share of its fp32 step (right)",
                x=[r.rung for r in results],
                y=[1 / r.lesson_speedup_first for r in results],
                customdata=[r.lesson_ms for r in results],
                hovertemplate="lesson: %{y:.2f} of its fp32 step, %{customdata:,.0f} ms"
                "<extra></extra>",
                mode="lines+markers",
                line={"color": _INK, "dash": "dot", "width": 1.5},
                # white in black: seen on every bar and on either ground
                marker={
                    "symbol": "diamond",
                    "size": 12,
                    "color": "#ffffff",
                    "line": {"width": 2, "color": "#000000"},
                },
                yaxis="y2",
            ),
        ]
    )
    figure.update_layout(
        height=440,
        margin={"l": 40, "r": 34, "t": 10, "b": 72},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": _INK, "size": 12},
        legend={
            "orientation": "h",
            "y": 1.02,
            "x": 0,
            "yanchor": "bottom",
            "font": {"size": 13},
        },
        barmode="overlay",
        bargap=0.18,
        xaxis={
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [r.rung for r in results],
            "tickvals": [r.rung for r in results],
            "ticktext": [_tick(r) for r in results],
            "tickangle": 0,
            "fixedrange": True,
        },
        yaxis={"range": [0, top], "gridcolor": "#80808040", "zerolinecolor": _INK},
        yaxis2={
            "overlaying": "y",
            "side": "right",
            "range": [0, top / first if first else 1.15],
            "showgrid": False,
            "zeroline": False,
        },
    )
    return figure


def _here(measured: Sequence[RungResult]) -> go.Bar:
    return go.Bar(
        name="ms a step here (left)",
        x=[r.rung for r in measured],
        y=[r.step_ms_median for r in measured],
        marker={"color": [_colour(r) for r in measured]},
        customdata=[[r.name, r.step_ms_p25, r.step_ms_p75] for r in measured],
        hovertemplate="%{customdata[0]}: %{y:,.2f} ms a step (%{customdata[1]:,.2f} to "
        "%{customdata[2]:,.2f})<extra></extra>",
    )


def _top(result: RungResult) -> float:
    """How high a rung is drawn: its own bar and what it saved."""
    return result.step_ms_median + max(result.saved_ms or 0, 0)


def _tick(result: RungResult) -> str:
    """Its name, below it its ms a step, and why it is not the lesson's or was not measured."""
    lines = [_TICKS[result.rung]]
    words = _SHOWN_MARKS.get(result.mark or "", "")
    if result.step_ms_median is not None:
        lines.append(f"<b>{_short(result.step_ms_median)}</b>")
    elif result.state not in ("waiting", "not run"):
        words = result.state
    # a line a word or two: seven such ticks share a phone's width
    head, _, tail = words.rpartition(" ")
    lines += [f'<span style="font-size:11px">{part}</span>' for part in (head, tail) if part]
    return "<br>".join(lines)


def _change(name: str, rungs: Sequence[RungResult], bases: Sequence[float], colour: str) -> go.Bar:
    """Open bars between a rung and the one before it."""
    sign = "\u2212" if colour == _INK else "+"
    return go.Bar(
        name=name,
        x=[r.rung for r in rungs],
        base=bases,
        y=[abs(r.saved_ms) for r in rungs],
        text=[f"{sign}{_short(abs(r.saved_ms))}" for r in rungs],
        textposition="outside",
        textangle=0,
        cliponaxis=False,
        hovertemplate=f"{name} %{{y:,.2f}} ms a step<extra></extra>",
        marker={
            "color": "rgba(0,0,0,0)",
            "line": {"color": colour, "width": 1.5},
            "pattern": {"shape": "/", "fgcolor": colour, "size": 6, "solidity": 0.2},
        },
    )


def _colour(result: RungResult) -> str:
    """The precision's, in the light theme's shade where that is readable on dark ground too."""
    precision = result.config["precision"] if result.config else "fp32"
    return _INK if precision == "fp32" else PALETTE[precision]["light"]


def _short(ms: float) -> str:
    """A time for a narrow bar: "1,234", "84.2", "0.73"."""
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 1 else f"{ms:.2f}"
