"""The live view: one gr.HTML whose own script draws everything that streams.

The value of the component is one JSON message at a time, made by `message`. The first message of
every stream is a snapshot (`reset=True`); later ones carry only what is new. The script counts
messages and rows, and when one is missing (gradio may merge two updates of one moment) it asks
the server once for a snapshot. `assets/live_chart.js` is the other end of this.
"""

import gzip
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import gradio as gr
import plotly
from plotly.offline import get_plotlyjs_version
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from gpt2demo import charts
from gpt2demo.shipped import asset

_PLOTLY_JS: Final = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
_TEXTS: Final = {
    "empty": "Press Run: loss, ms per step and tokens per second of every step appear here.",
    "failed": "The chart's script did not load. Reload the page.",
}


def _plotly_path() -> str:
    # the version in the name lets browsers keep the file for ever; below /gradio_api because
    # gradio's Node front passes no other path of ours on to Python
    return f"/gradio_api/plotly-{get_plotlyjs_version()}.min.js"


def live_view(snapshot: Callable[[gr.Request], str]) -> gr.HTML:
    """The component with elem_id "live": tiles, legend, chart, status line and log.

    Args:
        snapshot: called when a page has missed a message; returns what `message` makes of the
            whole state with `reset=True`. The request has cookies and headers but no
            session_hash; a status without "mine" leaves the page's own knowledge of it alone.
    """

    def _snapshot(_data: object, request: gr.Request) -> str:
        return snapshot(request)

    _snapshot.__name__ = "snapshot"  # what the script calls
    setup = {
        "figure": charts.base_figure(),
        "palette": charts.PALETTE,
        "dashes": charts.DASHES,
        "symbols": charts.SYMBOLS,
        "texts": _TEXTS,
    }
    return gr.HTML(
        elem_id="live",
        # rendered again at every update, and equal every time: the script's nodes stay
        html_template='<div class="live"></div>',
        js_on_load=plot_script("live_chart.js", setup),
        apply_default_css=False,
        server_functions=[_snapshot],
    )


def plot_script(name: str, setup: dict[str, Any]) -> str:
    """A component's `js_on_load`: its setup, what all charts share, and the file `name`."""
    known = {**setup, "plotly": _plotly_path()}
    parts = [asset(part).read_text(encoding="utf-8") for part in ("plot.js", name)]
    return "\n".join([f"const setup = {json.dumps(known)};", *parts])


@cache
def _plotly_gzip() -> bytes:
    return gzip.compress(_PLOTLY_JS.read_bytes(), compresslevel=6, mtime=0)


def _serve_plotly(request: Request) -> Response:
    """plotly.js as installed; not async, so that compressing it stalls nobody."""
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
    kind = "text/javascript; charset=utf-8"
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return Response(_plotly_gzip(), media_type=kind, headers=headers)
    return FileResponse(_PLOTLY_JS, media_type=kind, headers=headers)


def plotly_route() -> list[Route]:
    """The route of the plotly.js that the script loads, for `launch(app_kwargs={"routes": ...})`.

    It is the file of the installed plotly package: the page needs no other host.
    """
    return [Route(_plotly_path(), _serve_plotly)]


def _short(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures with six significant digits."""
    return {
        key: float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in figures.items()
    }


def message(
    n: int,
    *,
    reset: bool = False,
    runs: Sequence[dict[str, Any]] | None = None,
    start: dict[str, Any] | None = None,
    rows: tuple[str, int, int, list[list[Any]]] | None = None,
    end: tuple[str, str] | None = None,
    drop: Sequence[str] = (),
    status: dict[str, Any] | None = None,
    tiles: dict[str, Any] | None = None,
    partial: bool = False,
) -> str:
    """One message to the script as compact JSON. The script applies the parts in this order.

    Args:
        n: the stream's counter; each message one more than the last.
        reset: a snapshot: everything known is thrown away, `runs` taken instead.
        runs: the runs of a snapshot (`charts.run_curve`), the oldest first.
        start: a run that begins (`charts.run_curve` with no steps).
        rows: (run id, from, to, `charts.delta_rows`): what steps from..to-1 of the run add.
        end: (run id, state): the run is over, its curve becomes a thin one.
        drop: ids of curves that are no longer drawn.
        status: the status line: state, text, done, steps, left_s, line, mine, page. When `page`
            changes the component ticks, so that the rest of the page is fetched. `text` is read
            aloud when it changes, so it holds no running numbers.
        tiles: the headline figures: ms, p25, p75, tps, loss, mem_gib, mem_note, mfu, mfu_note,
            warmup. None = unknown; the note says why. A snapshot without tiles = nothing to show.
        partial: status and tiles hold only `changes`; otherwise each is whole.

    Raises:
        ValueError: when a figure is NaN or infinite, which JSON cannot hold.
    """
    parts: dict[str, Any] = {"n": n}
    if reset:
        parts |= {"reset": True, "runs": list(runs or []), "tiles": None}
    if start is not None:
        parts["start"] = start
    if rows is not None:
        parts["run"], parts["from"], parts["to"], parts["rows"] = rows
    if end is not None:
        parts["end"] = {"id": end[0], "state": end[1]}
    if drop:
        parts["drop"] = list(drop)
    if status:
        parts["status"] = _short(status)
    if tiles:
        parts["tiles"] = _short(tiles)
    if partial and (status or tiles):
        parts["partial"] = True
    return json.dumps(parts, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def changes(before: dict[str, Any] | None, now: dict[str, Any] | None) -> dict[str, Any]:
    """What a page that knows `before` has to hear of `now`: the new fields, None for gone ones.

    The texts of status and tiles hardly ever change; without them an update is a third smaller.
    """
    before, now = before or {}, now or {}
    gone = dict.fromkeys(before.keys() - now.keys())
    return gone | {key: now[key] for key in now if key not in before or before[key] != now[key]}
