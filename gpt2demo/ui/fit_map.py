"""The fit map: B x T as a heat map of what fits into the device's memory, and a way to choose both.

The value of the component is one JSON message, made by `fit_map_message`; `assets/fit_map.js`
draws it. Every message is whole: one that got lost is made good by the next.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import gradio as gr

from gpt2demo import charts
from gpt2demo.map_figure import frontier_lines, map_figure, place
from gpt2demo.ui.live import plot_script

_GIB: Final = 2**30
_CODES: Final = {"fits": "f", "may fail": "m", "will not fit": "w", "unknown": "u"}
_LABEL: Final = "Fit map: peak memory for every B (sequences a step) and T (tokens a sequence)"
_SHOWN_LABELS: Final = 5  # of runs at one B and T
_SHOWN_MARKS: Final = 30
_TEXTS: Final = {
    "empty": "The map of what fits appears here: peak memory for every B and T.",
    "failed": "The map's script did not load. Reload the page.",
    "hint": "Click a cell to set B and T, or reach it with the arrow keys and press Enter.",
    "keys": "Fit map: arrow keys move over its cells, Enter sets B and T.",
    "unknown": (
        "The memory of this device is unknown: the map shows the peak in GiB, without a limit."
    ),
}


def fit_map_view() -> gr.HTML:
    """The component with elem_id "fit-map": the map, its legend and a sentence below.

    Its value is what `fit_map_message` makes; None or "" shows the empty state. A click on a cell
    fires `select` with the cell's B and T, a click on a mark with the mark's own. The listener
    takes them from the event::

        def choose(event: gr.EventData) -> tuple[int, int]:
            return event.B, event.T

        fit_map.select(choose, outputs=[B, T])

    They come from a browser: what uses them must check them as it checks any slider.
    """
    setup = {
        "figure": map_figure(),
        "palette": charts.PALETTE,
        "codes": {code: verdict for verdict, code in _CODES.items()},
        "texts": _TEXTS,
    }
    return gr.HTML(
        elem_id="fit-map",
        # rendered again at every update, and equal every time: the script's nodes stay
        html_template=(
            f'<div class="fit-map" role="group" aria-label="{_LABEL}">'
            f'<p class="fit-map-empty">{_TEXTS["empty"]}</p></div>'
        ),
        js_on_load=plot_script("fit_map.js", setup),
        apply_default_css=False,
    )


def _marks(
    marks: Sequence[Mapping[str, Any]], B: Sequence[int], T: Sequence[int]
) -> list[dict[str, Any]]:
    """The newest marks with their places; those of one B, T and outcome are one."""
    labels: dict[tuple[int, int], list[str]] = {}
    spots: dict[tuple[int, int, bool], None] = {}  # as a set that keeps its order
    for mark in marks[-_SHOWN_MARKS:]:
        labels.setdefault((mark["B"], mark["T"]), []).append(mark["label"])
        spots[mark["B"], mark["T"], mark["passed"]] = None
    return [
        {
            "B": b,
            "T": t,
            "x": place(t, T),
            "y": place(b, B),
            "passed": passed,
            "labels": labels[b, t][-_SHOWN_LABELS:],
        }
        for b, t, passed in spots
    ]


def fit_map_message(
    fit_map: Mapping[str, Any],
    capacity_bytes: int | None,
    current: tuple[int, int],
    precision: str,
    frontiers: Mapping[str, Sequence[int]],
    marks: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The component's value as compact JSON, about 3 KB.

    Args:
        fit_map: `fit.fit_map`: the grid `B` and `T`, and `peak_bytes` and `verdict` as rows of B
            with columns of T.
        capacity_bytes: the memory that a run may use; None = unknown: no limit, no frontier.
        current: B and T as they are set now; they may lie between the grid's.
        precision: the id of the precision that the map is of.
        frontiers: precision id -> for every T of the grid the largest B that fits, 0 = none.
        marks: real runs in the order of their end, each with B, T, `passed` (False = out of
            memory) and `label`, the line shown for it.
    """
    B, T = fit_map["B"], fit_map["T"]
    known = capacity_bytes is not None
    message = {
        "B": list(B),
        "T": list(T),
        "gib": [[float(f"{peak / _GIB:.5g}") for peak in row] for row in fit_map["peak_bytes"]],
        "verdict": ["".join(_CODES[verdict] for verdict in row) for row in fit_map["verdict"]],
        "capacity": float(f"{capacity_bytes / _GIB:.5g}") if known else None,
        "current": {
            "B": current[0],
            "T": current[1],
            "x": place(current[1], T),
            "y": place(current[0], B),
        },
        "lines": frontier_lines(frontiers, B, precision) if known else [],
        "marks": _marks(marks, B, T),
    }
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
