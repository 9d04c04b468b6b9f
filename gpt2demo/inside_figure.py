"""An inspected step as figures: its parts as one stacked bar, its numbers as histograms."""

from typing import Any, Final

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gpt2demo.charts import PALETTE
from gpt2demo.inspection import Inspection, StepProfile, ValueHistogram

_INK: Final = "#808080"  # readable on light and on dark ground: the figure follows no theme
# Not the precisions' colours; each part stands in the table below as well.
PART_COLOURS: Final = {
    "classifier": "#3b528b",
    "MLP": "#21918c",
    "attention": "#5ec962",
    "LayerNorm and rest": "#b8a6d9",
    "cross-entropy": "#c2417c",
    "backward": "#c9a227",
    "optimizer": "#8c8c8c",
    "waiting": "#5a5a5a",
}
# float16 as log2: its smallest number, its smallest with all mantissa bits, and its end
FP16_SMALLEST: Final = -24
FP16_NORMAL: Final = -14
FP16_END: Final = 16

_LEAST: Final = -50  # of the axis: what lies below is drawn there
_MOST: Final = 18
_BELOW: Final = "2^-50 and less"


def parts_figure(profile: StepProfile) -> go.Figure:
    """The step as one bar, its parts in the order in which they happen."""
    whole = profile.step_seconds
    bars = [
        go.Bar(
            name=part,
            x=[seconds * 1000],
            y=[""],
            orientation="h",
            marker={"color": PART_COLOURS[part]},
            text=[f"{part}<br>{seconds / whole:.0%}"],
            textposition="inside",
            textangle=0,
            insidetextanchor="middle",
            hovertemplate=f"{part}: %{{x:,.1f}} ms ({seconds / whole:.1%})<extra></extra>",
        )
        for part, seconds in profile.parts.items()
        if seconds > 0
    ]
    figure = go.Figure(bars)
    _plain(figure, height=140)
    figure.update_layout(
        barmode="stack",
        uniformtext={"minsize": 12, "mode": "hide"},  # what does not fit stands in the table
        showlegend=False,  # the table below has the colours
        xaxis={"title": "ms of one step", "gridcolor": "#80808040", "rangemode": "tozero"},
        yaxis={"showticklabels": False},
        margin={"l": 10, "r": 10, "t": 6, "b": 40},
    )
    return figure


def values_figure(found: Inspection) -> go.Figure:
    """Histograms of log2 |value| below each other, with the ends of float16's range.

    bf16 and float32 reach from 2^-126 to 2^128 and so beyond both ends of the axis.
    """
    names = list(found.values)
    figure = make_subplots(
        rows=len(names),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.06,
        subplot_titles=[_title(name, found.values[name]) for name in names],
    )
    green = PALETTE["fp16"]["dark"]
    for row, name in enumerate(names, 1):
        x, y, texts = _columns(found.values[name])
        figure.add_bar(
            x=x,
            y=y,
            customdata=texts,
            marker={"color": _INK},
            showlegend=False,
            hovertemplate="%{customdata}: %{y:.2g} %<extra></extra>",
            row=row,
            col=1,
        )
        for low, high, opacity in (
            (FP16_SMALLEST, FP16_NORMAL, 0.14),
            (FP16_NORMAL, FP16_END, 0.3),
        ):
            figure.add_vrect(
                x0=low, x1=high, fillcolor=green, opacity=opacity, line_width=0, row=row, col=1
            )
    _plain(figure, height=110 * len(names) + 60)
    figure.update_layout(
        bargap=0.08,
        margin={"l": 44, "r": 10, "t": 24, "b": 40},
    )
    figure.update_annotations(font={"size": 13, "color": _INK}, xanchor="left", x=0)
    figure.update_yaxes(gridcolor="#80808040", rangemode="tozero", ticksuffix=" %", nticks=4)
    places = [-48, -36, FP16_SMALLEST, FP16_NORMAL, 0, FP16_END]
    figure.update_xaxes(range=[_LEAST - 1, _MOST], tickvals=places, gridcolor="#80808040")
    ticks = [f"2<sup>{e}</sup>" for e in places]
    figure.update_xaxes(ticktext=ticks, title="|value|", row=len(names), col=1)
    return figure


def _columns(values: ValueHistogram) -> tuple[list[float], list[float], list[str]]:
    """Middle of each column, its share in percent, and its words; the smallest are one column."""
    shares: dict[int, float] = {}
    for exponent, count in values.counts.items():
        at = min(max(exponent, _LEAST), _MOST - 1)
        shares[at] = shares.get(at, 0.0) + 100 * (values.share(count) or 0.0)
    texts = [_BELOW if at == _LEAST else f"2^{at} to 2^{at + 1}" for at in shares]
    return [at + 0.5 for at in shares], list(shares.values()), texts


def _title(name: str, values: ValueHistogram) -> str:
    zeros = values.zeros / values.count if values.count else 0.0
    more = f", {zeros:.1%} are zero" if values.zeros else ""
    return f"{name}: {values.count:,}{more}"


def _plain(figure: go.Figure, *, height: int) -> None:
    """Transparent, with ink that is readable on either ground."""
    layout: dict[str, Any] = {
        "height": height,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": _INK, "size": 13},
    }
    figure.update_layout(layout)
