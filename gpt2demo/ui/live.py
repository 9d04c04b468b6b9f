"""The live view: one gr.HTML whose own script draws everything that streams.

Its value is the browser's own token, with which the script asks for the page's stream
(`ui/watching.py`): JSON messages, made by `message`. The first is a snapshot (`reset=True`), and so
is the first after a lost connection; later ones carry only what is new. `assets/live_chart.js` is
the other end of this.
"""

import gzip
import json
from collections.abc import Sequence
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
    "lost": "The connection to the server is lost. This page keeps trying.",
    "full": "As many pages are open as this server takes. This page keeps trying.",
}


# ours lie below /gradio_api: gradio's Node front passes no other path on to Python
STREAM_PATH: Final = "/gradio_api/live"


def _plotly_path() -> str:
    # the version in the name lets browsers keep the file for ever
    return f"/gradio_api/plotly-{get_plotlyjs_version()}.min.js"


def live_view() -> gr.HTML:
    """The component with elem_id "live": tiles, legend, chart, status line and log."""
    setup = {
        "figure": charts.base_figure(),
        "palette": charts.PALETTE,
        "dashes": charts.DASHES,
        "symbols": charts.SYMBOLS,
        "texts": _TEXTS,
        "stream": STREAM_PATH,
    }
    return gr.HTML(
        elem_id="live",
        html_template='<div class="live"></div>',
        js_on_load=plot_script("live_chart.js", setup),
        apply_default_css=False,
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
    *,
    reset: bool = False,
    runs: Sequence[dict[str, Any]] | None = None,
    start: dict[str, Any] | None = None,
    rows: tuple[str, list[list[Any]]] | None = None,
    end: tuple[str, str] | None = None,
    drop: Sequence[str] = (),
    status: dict[str, Any] | None = None,
    tiles: dict[str, Any] | None = None,
    partial: bool = False,
) -> str:
    """One message to the script as compact JSON. The script applies the parts in this order.

    Args:
        reset: a snapshot: everything known is thrown away, `runs` taken instead.
        runs: the runs of a snapshot (`charts.run_curve`), the oldest first.
        start: a run that begins (`charts.run_curve` with no steps).
        rows: (run id, `charts.delta_rows`): what is new of the run's steps.
        end: (run id, state): the run is over, its curve becomes a thin one.
        drop: ids of curves that are no longer drawn.
        status: the status line: state, text, done, steps, left_s, line, mine, page, stop, room.
            When `page`, or `stop` (the viewer has something to stop), changes, the component
            ticks, so that the rest of the page is fetched, the later the more pages are open
            (`room`). `text` is read aloud when it changes, so it holds no running numbers.
        tiles: the headline figures: ms, p25, p75, tps, loss, mem_gib, mem_note, mfu, mfu_note,
            warmup. None = unknown; the note says why. A snapshot without tiles = nothing to show.
        partial: status and tiles hold only `changes`; otherwise each is whole.

    Raises:
        ValueError: when a figure is NaN or infinite, which JSON cannot hold.
    """
    parts: dict[str, Any] = {}
    if reset:
        parts |= {"reset": True, "runs": list(runs or []), "tiles": None}
    if start is not None:
        parts["start"] = start
    if rows is not None:
        parts["run"], parts["rows"] = rows
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
