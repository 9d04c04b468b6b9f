"""The fit map as a figure: its layout, its colours, and where sizes lie between its grid lines.

The browser's script (`assets/fit_map.js`) draws what is described here. The axes count grid
positions 0, 1, 2...; the tick texts are the sizes of B and T at these positions.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Final

import plotly.graph_objects as go

from gpt2demo.charts import CONFIG, DASHES, PALETTE

# Each verdict's colours, from an empty memory to a full one. Blue against orange and brown stays
# apart for colour-blind eyes, and so do orange and brown by their lightness.
CELLS: Final[dict[str, dict[str, list[str]]]] = {
    "fits": {"light": ["#edf4fa", "#4f93c8"], "dark": ["#14283a", "#3f8fcb"]},
    "may fail": {"light": ["#f6bd60"] * 2, "dark": ["#dd9a35"] * 2},
    "will not fit": {"light": ["#8d655d"] * 2, "dark": ["#553833"] * 2},
    "unknown": {"light": ["#f2f2f2", "#707070"], "dark": ["#2a2a2e", "#b4b4ba"]},
}
_NAMES: Final = {"tf32": "TF32"}  # the others are called as their ids are


def place(size: float, grid: Sequence[int]) -> float:
    """Where a B or a T lies on its axis, in grid positions.

    Between two grid sizes it is linear in log2 of the size. Beyond the grid it goes on so for half
    a cell at most, to the map's edge; 0 or less lies on the lower edge, -0.5.
    """
    if size <= 0:
        return -0.5
    upper = min(max(bisect_right(grid, size), 1), len(grid) - 1)
    share = math.log2(size / grid[upper - 1]) / math.log2(grid[upper] / grid[upper - 1])
    return round(min(max(upper - 1 + share, -0.5), len(grid) - 0.5), 4)


def frontier_lines(
    frontiers: Mapping[str, Sequence[int]], grid: Sequence[int], chosen: str
) -> list[dict[str, Any]]:
    """The lines along the largest B that fits, equal ones as one, the chosen precision's last.

    Args:
        frontiers: precision id -> the largest B that fits at every T of the map, 0 = none.
        grid: the B of the map.
        chosen: the precision whose line is drawn strong.

    Returns:
        For every line its `name`, whether it is the `chosen` one, the `precision` that gives it
        its colour, its `dash`, `largest` B at every T, and their `y` in grid positions.
    """
    groups: dict[tuple[int, ...], list[str]] = {}
    for precision, largest in frontiers.items():
        groups.setdefault(tuple(largest), []).append(precision)
    order = list(PALETTE)
    lines = [
        {
            "name": " = ".join(_NAMES.get(p, p) for p in together),
            "chosen": chosen in together,
            "precision": chosen if chosen in together else together[0],
            "dash": "solid" if chosen in together else DASHES[order.index(together[0])],
            "largest": list(largest),
            "y": [place(B, grid) for B in largest],
        }
        for largest, together in groups.items()
    ]
    return sorted(lines, key=lambda line: line["chosen"])


def map_figure() -> dict[str, Any]:
    """The empty map: `layout`, `config`, and the colours of its `cells`.

    Ticks and ranges follow the grid, and colours the page's theme: the script sets them.
    """
    axis = {
        "automargin": False,
        "autorange": True,
        "fixedrange": False,
        "showgrid": False,
        "showline": False,
        "tickmode": "array",
        "ticks": "",
        "zeroline": False,
    }
    layout = go.Layout(
        autosize=True,
        margin={"l": 34, "r": 8, "t": 26, "b": 38, "pad": 2},
        font={"size": 11},
        showlegend=False,
        hovermode="closest",
        hoverdistance=4,  # px around a mark; everywhere else the cell below the pointer answers
        hoverlabel={"namelength": -1, "font": {"size": 12}, "align": "left"},
        dragmode="zoom",
        xaxis=axis | {"title": {"text": "T: tokens a sequence", "standoff": 4}},
        yaxis=axis,
        annotations=[
            {
                "text": "B: sequences a step",
                "x": 0,
                "y": 1,
                "xref": "paper",
                "yref": "paper",
                "xanchor": "left",
                "yanchor": "bottom",
                "xshift": -26,
                "yshift": 1,
                "borderpad": 0,
                "showarrow": False,
            }
        ],
    )
    return {
        "layout": layout.to_plotly_json(),
        "config": CONFIG | {"doubleClickDelay": 300},  # ms
        "cells": CELLS,
    }
