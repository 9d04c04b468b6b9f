"""A race as a bar chart of speed-ups and as a table."""

from collections.abc import Mapping, Sequence
from typing import Final

import pandas as pd
import plotly.graph_objects as go

from gpt2demo.charts import PALETTE
from gpt2demo.expectation import Expectation
from gpt2demo.race import PrecisionResult

_GIB: Final = 2**30
_INK: Final = "#808080"  # readable on light and on dark ground: the figure follows no theme
_COLUMNS: Final = (
    "precision",
    "state",
    "ms/step median",
    "p25",
    "p75",
    "tokens/sec",
    "speed-up",
    "from",
    "to",
    "MFU %",
    "peak memory GiB",
    "|loss - fp32| max",
    "skipped steps",
    "J per 1,000 tokens",
)
_DECIMALS: Final = {"speed-up": 2, "from": 2, "to": 2, "peak memory GiB": 2, "|loss - fp32| max": 5}


def race_table(results: Sequence[PrecisionResult]) -> pd.DataFrame:
    """One row a precision, units in the column names, NA for what is unknown."""
    rows = [
        (
            r.precision,
            r.state,
            r.step_ms_median,
            r.step_ms_p25,
            r.step_ms_p75,
            r.tokens_per_sec_median,
            r.speedup,
            r.speedup_low,
            r.speedup_high,
            None if r.mfu is None else 100 * r.mfu,
            None if r.peak_memory_bytes is None else r.peak_memory_bytes / _GIB,
            r.max_loss_difference,
            r.skipped_steps,
            r.joules_per_1000_tokens,
        )
        for r in results
    ]
    types = ["string", "string", *["Float64"] * 10, "Int64", "Float64"]
    table = pd.DataFrame(
        {
            name: pd.array([row[i] for row in rows], dtype=types[i])
            for i, name in enumerate(_COLUMNS)
        }
    )
    return table.round({name: _DECIMALS.get(name, 1) for name in _COLUMNS[2:]})


def speedup_figure(
    results: Sequence[PrecisionResult], expected: Mapping[str, Expectation]
) -> go.Figure:
    """Measured speed-ups against fp32 as bars with their spread, the expectation as a mark beside.

    Colours are the light theme's where that is readable on dark ground too, else grey.
    """
    measured = [r for r in results if r.speedup is not None]
    colours = [_INK if r.precision == "fp32" else PALETTE[r.precision]["light"] for r in measured]
    above = [max((r.speedup_high or r.speedup) - r.speedup, 0) for r in measured]
    below = [max(r.speedup - (r.speedup_low or r.speedup), 0) for r in measured]
    figure = go.Figure(
        [
            go.Bar(
                name="measured",
                x=[r.precision for r in measured],
                y=[r.speedup for r in measured],
                marker={"color": colours},
                text=[f"{r.speedup:.2f}x" for r in measured],
                textposition="inside",
                insidetextanchor="start",  # below the whisker
                error_y={"type": "data", "array": above, "arrayminus": below, "color": _INK},
            ),
            go.Scatter(
                name="expected",
                x=[r.precision for r in results if expected[r.precision].speedup is not None],
                y=[
                    expected[r.precision].speedup
                    for r in results
                    if expected[r.precision].speedup is not None
                ],
                mode="markers",
                marker={"symbol": "diamond-open", "size": 12, "color": _INK, "line": {"width": 2}},
            ),
        ]
    )
    figure.add_hline(y=1, line={"color": _INK, "dash": "dot", "width": 1})
    figure.update_layout(
        height=300,
        margin={"l": 50, "r": 10, "t": 10, "b": 30},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": _INK, "size": 12},
        legend={"orientation": "h", "y": 1.12, "x": 0},
        yaxis={
            "title": "speed-up against fp32 (x)",
            "rangemode": "tozero",
            "gridcolor": "#80808040",
        },
        xaxis={"type": "category"},
    )
    return figure
