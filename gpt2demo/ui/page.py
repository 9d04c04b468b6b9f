"""The page: one narrow column of controls, and beside it the live view. Handlers stay thin."""

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from html import escape
from typing import Any, Final

import gradio as gr
from starlette.middleware import Middleware

from gpt2demo.config import InputError, RunConfig
from gpt2demo.hub import Hub
from gpt2demo.precision import PRECISION
from gpt2demo.shipped import asset
from gpt2demo.table import shown_table
from gpt2demo.tracking import PAGE_PROJECT
from gpt2demo.ui.api import add_api
from gpt2demo.ui.board_tab import board_tab
from gpt2demo.ui.compare_tab import compare_tab, race_inputs
from gpt2demo.ui.controls import FIELDS, MEMORY_FIELDS, config_of, controls, own_upload
from gpt2demo.ui.device_card import device_card, precision_note
from gpt2demo.ui.downloads import LINKS, LINKS_SCRIPT, download_routes
from gpt2demo.ui.guard import PlainAnswers, guard
from gpt2demo.ui.inside_tab import connect_inside, inside_tab
from gpt2demo.ui.link import LINKED, result_in, settings_in
from gpt2demo.ui.live import live_view, plotly_route
from gpt2demo.ui.memory_tab import failure_panel, memory_tab
from gpt2demo.ui.precision_tab import precision_tab
from gpt2demo.ui.present import LINK, head
from gpt2demo.ui.specs_tab import specs_tab
from gpt2demo.ui.staircase_tab import staircase_tab
from gpt2demo.ui.stream import Feed
from gpt2demo.ui.uploads import forget_upload, sweeping

log = logging.getLogger(__name__)

_STYLES: Final = (
    *("page.css", "style.css", "memory.css", "fit_map.css"),
    *("precision.css", "inside.css", "staircase.css"),
)
_UPDATE_SEC: Final = 0.25
_BEAT_SEC: Final = 3.0  # an idle stream says so, or a closed tab would never be noticed
_TITLE: Final = (
    '<header class="title"><h1>gpt2demo</h1>'
    "<p>Train GPT-2 here, live: what does a precision buy on this machine, and why?</p>"
    f"{LINK}</header>"
)
# gradio's own orange, red and greys have less contrast than 4.5
_READABLE: Final = {
    "button_primary_background_fill": "*primary_700",
    "button_primary_background_fill_dark": "*primary_700",
    "button_primary_background_fill_hover": "*primary_800",
    "button_primary_background_fill_hover_dark": "*primary_800",
    "button_primary_border_color": "*primary_700",
    "button_primary_border_color_dark": "*primary_700",
    "button_cancel_background_fill": "#b91c1c",
    "button_cancel_background_fill_dark": "#b91c1c",
    "button_cancel_background_fill_hover": "#991b1b",
    "button_cancel_background_fill_hover_dark": "#991b1b",
    "body_text_color_subdued": "*neutral_600",
}
_PRIVATE: Final[dict[str, Any]] = {
    "api_visibility": "private",
    "show_progress": "hidden",
    "concurrency_limit": None,
}


class Page:
    """The page's handlers; what they know lies in the hub, or is told by the browser."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._streams: dict[str, float] = {}  # session -> when its stream last asked for news

    def owner(self, token: object) -> str:
        """The browser's own token, made at its first visit."""
        return token if isinstance(token, str) and len(token) >= 32 else secrets.token_urlsafe(32)

    async def watch(self, token: object, request: gr.Request) -> AsyncIterator[str]:
        """The live view's messages, for as long as the page is open."""
        session = request.session_hash or ""
        if time.monotonic() - self._streams.get(session, -60.0) < 2 * _BEAT_SEC:
            return  # this page has a stream already
        feed = Feed(self.hub, self.owner(token))
        try:
            text = last = feed.snapshot()
            beat = time.monotonic()
            while True:
                self._streams[session] = time.monotonic()
                self.hub.seen()
                if text or time.monotonic() - beat > _BEAT_SEC:
                    # without news the last message goes out again, of which nothing is sent
                    last, beat = text or last, time.monotonic()
                    yield last
                await asyncio.sleep(_UPDATE_SEC)
                text = feed.news()
        finally:
            self._streams.pop(session, None)

    def around(self, token: object) -> tuple[Any, Any, str]:
        """Stop, the table and the device panel; asked for by the live view when they change.

        They are no outputs of the stream: gradio empties a component that a stream passes over.
        """
        mine = isinstance(token, str) and bool(self.hub.mine(token))
        table = shown_table([run.record() for run in list(self.hub.finished)])
        return gr.update(interactive=mine), table, self.device_html()

    def device_html(self) -> str:
        """The device panel with the memory that is free now."""
        return device_card(self.hub.device_info, self.hub.memory_free_bytes())

    def run(self, token: object, track: object, *values: Any) -> Any:
        """Put a run with these settings (in the order of FIELDS) into the line; `track` is True
        where trackio is to log it.
        """
        with refusals():
            config = config_of(values, self.hub.settings.max_text_mib)
            project = PAGE_PROJECT if track is True else None
            self.hub.submit(config, self.owner(token), project)
            return self._forget(values)

    def find_limit(self, axis: str, token: object, *values: Any) -> Any:
        """Put a search for the largest B or T into the line."""
        with refusals():
            self.hub.find_limit(
                config_of(values, self.hub.settings.max_text_mib), axis, self.owner(token)
            )
            return self._forget(values)

    def compare(self, token: object, *values: Any) -> Any:
        """Put a race of several precisions into the line."""
        with refusals():
            precisions, rounds, settings = race_inputs(values)
            config = config_of(settings, self.hub.settings.max_text_mib)
            self.hub.compare(config, precisions, rounds, self.owner(token))
            return self._forget(settings)

    def _forget(self, values: Sequence[Any]) -> Any:
        """Delete the upload that a run has taken; what the upload's component shows then."""
        if upload := own_upload(values):
            forget_upload(upload)
            return None
        return gr.update()

    def climb(self, token: object, *values: Any) -> Any:
        """Put the lesson's staircase into the line."""
        with refusals():
            self.hub.climb(config_of(values, self.hub.settings.max_text_mib), self.owner(token))
            return self._forget(values)

    def run_smaller(self, axis: str, token: object, run_id: object) -> None:
        """Run what should fit in place of the run that ran out of memory."""
        with refusals():
            name = run_id if isinstance(run_id, str) else ""
            self.hub.run_smaller(name, axis, self.owner(token))

    def stop(self, token: object) -> None:
        """Stop the visitor's own run."""
        message = self.hub.stop(token if isinstance(token, str) else "")
        if not message.startswith("Stopping"):  # the status line says that already
            gr.Info(message)

    def pick(self, event: gr.EventData) -> tuple[Any, Any]:
        """A cell of the fit map was clicked: its B and T for the sliders."""
        with refusals():
            chosen = RunConfig(B=event.B, T=event.T)
            return chosen.B, chosen.T

    def fill(self, request: gr.Request) -> list[Any]:
        """The controls as the page's link sets them, and the result that it carries."""
        query = dict(request.query_params)
        try:
            found, said = settings_in(query), result_in(query)
        except InputError as exc:
            found, said = {}, f"The link was not taken: {exc}"
        shown = f'<p class="said">{escape(said)}</p>'
        updates = [gr.update(value=found[n]) if n in found else gr.update() for n in LINKED]
        return [*updates, gr.update(value=shown, visible=bool(said))]

    def note(self, precision: Any) -> str:
        """What the chosen precision is, and how it fares here."""
        if not isinstance(precision, str) or precision not in PRECISION:
            return ""
        return precision_note(self.hub.device_info, precision)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """A refusal inside becomes a message on the page; so does any error, without its text."""
    try:
        yield
    except InputError as exc:
        raise gr.Error(str(exc), title="Not started", print_exception=False) from None
    except Exception:
        log.exception("a run could not be started")
        raise gr.Error(
            "The run could not be started. The server's log has the details.",
            title="Not started",
            print_exception=False,
        ) from None


def build_demo(hub: Hub) -> gr.Blocks:
    """The page over `hub`; launch it with `launch_options`."""
    page = Page(hub)
    with gr.Blocks(title="gpt2demo", analytics_enabled=False, fill_width=True) as demo:
        token = gr.BrowserState("", storage_key="gpt2demo-owner", secret="gpt2demo")
        gr.HTML(_TITLE, elem_id="title", apply_default_css=False)
        with gr.Row(elem_id="page"):
            with gr.Column(scale=0, min_width=392, elem_id="controls"):
                column = controls(hub, page.device_html(), page.note(RunConfig().precision))
            with gr.Column(scale=1, min_width=320, elem_id="results"):
                shared = gr.HTML(visible=False, elem_id="shared", apply_default_css=False)
                failure = failure_panel(hub)
                with gr.Tabs(elem_id="tabs"):
                    with gr.Tab("Run"):
                        live = live_view(lambda _request: Feed(hub, "").snapshot())
                        gr.HTML(
                            "<h2>Finished runs</h2>",
                            elem_classes="heading",
                            apply_default_css=False,
                        )
                        table = gr.Dataframe(
                            shown_table([]),
                            interactive=False,
                            elem_id="runs",
                            max_height=360,
                            pinned_columns=1,
                            buttons=[],
                        )
                        gr.HTML(
                            html_template=LINKS,
                            js_on_load=LINKS_SCRIPT,
                            elem_id="downloads",
                            apply_default_css=False,
                        )
                    with gr.Tab("Memory", elem_id="memory-tab"):
                        memory = memory_tab(hub)
                    with gr.Tab("Compare", elem_id="compare-tab"):
                        compare = compare_tab(hub)
                    with gr.Tab("Staircase", elem_id="staircase-tab"):
                        stairs = staircase_tab(hub)
                    with gr.Tab("Inside", elem_id="inside-tab") as inside_opened:
                        inside = inside_tab(hub)
                    with gr.Tab("Precision", elem_id="precision-tab") as precision_opened:
                        precision = precision_tab(hub)
                    with gr.Tab("Specs", elem_id="specs-tab"):
                        specs_tab(hub.device_info)
                    with gr.Tab("Board", elem_id="board-tab") as board_opened:
                        board = board_tab(hub)
        of_memory = column.named(MEMORY_FIELDS, budget_gib=memory.budget_gib)
        settings_of_run = column.named(FIELDS, budget_gib=memory.budget_gib)
        forecast = [column.memory_bar, memory.details, memory.fit_map]
        watched = {"fn": page.watch, "inputs": token, "outputs": live}
        # names of their own, or they would take /stop and its like from the API
        demo.load(page.owner, token, token, api_name="page_owner", **_PRIVATE).then(
            **watched, api_name="page_load", **_PRIVATE
        )
        starts = [
            (column.run.click, page.run, "run", [column.track, *settings_of_run]),
            (stairs.climb.click, page.climb, "climb", settings_of_run),
            (
                compare.race.click,
                page.compare,
                "compare",
                [*compare.precisions.values(), compare.rounds, *settings_of_run],
            ),
            *(
                (
                    button.click,
                    functools.partial(page.find_limit, axis),
                    f"find_{axis}",
                    settings_of_run,
                )
                for axis, button in (("B", memory.find_B), ("T", memory.find_T))
            ),
            *(
                (
                    button.click,
                    functools.partial(page.run_smaller, axis),
                    f"smaller_{axis}",
                    [failure.run_id],
                )
                for axis, button in (("B", failure.smaller_B), ("T", failure.smaller_T))
            ),
        ]
        for listen, start, name, given in starts:
            # an upload that was read is gone, on the page too
            shown = column.upload if column.upload in given else None
            listen(start, [token, *given], shown, api_name=f"page_{name}", **_PRIVATE).success(
                **watched, api_name=f"page_watch_{name}", **_PRIVATE
            )
        at_once: dict[str, Any] = {"queue": False, **_PRIVATE}
        # What shows a state must show the last one: gradio else drops an event that comes while
        # the answer to the one before is on its way.
        showing = at_once | {"trigger_mode": "always_last"}
        live.tick(
            page.around,
            token,
            [column.stop, table, column.device],
            api_name="page_around",
            **showing,
        )
        live.tick(
            failure.state,
            None,
            [failure.box, failure.panel, failure.smaller_B, failure.smaller_T, failure.run_id],
            api_name="page_failure",
            **showing,
        )
        live.tick(
            memory.results,
            of_memory,
            [*forecast, memory.found],
            api_name="page_results",
            **showing,
        )
        changed = [component.change for component in of_memory]
        for also, handler, shown, name in (
            (demo.load, memory.forecast, forecast, "forecast"),
            (demo.load, compare.expectations, compare.expected, "expect"),
            (live.tick, compare.found, compare.probed, "probed"),
        ):
            gr.on(
                [also, *changed],
                handler,
                of_memory,
                shown,
                api_name=f"page_{name}",
                **showing,
            )
        live.tick(
            compare.results,
            None,
            [compare.figure, compare.table, compare.verdicts],
            api_name="page_race",
            **showing,
        )
        stairs.show_on(live.tick, **showing)
        compare.probe.click(
            compare.run_probe,
            of_memory,
            [compare.probed, compare.expected],
            api_name="page_probe",
            **(_PRIVATE | {"show_progress": "minimal"}),
        )
        gr.on(
            [board_opened.select, board.whose.change, live.tick],
            board.show,
            [token, board.whose],
            [board.table, board.note],
            api_name="page_board",
            **showing,
        )
        board.upload.upload(
            board.take,
            [token, board.whose, board.upload],
            [board.table, board.note],
            api_name="page_import",
            **(at_once | {"trigger_mode": "multiple"}),  # two files in a row are two imports
        )
        connect_inside(inside, precision, of_memory, [inside_opened, precision_opened])
        linked = column.named(LINKED, budget_gib=memory.budget_gib)
        demo.load(page.fill, None, [*linked, shared], api_name="page_fill", **at_once)
        memory.card.input(float, memory.card, memory.budget_gib, api_name="page_card", **at_once)
        memory.fit_map.select(
            page.pick, None, [column.B, column.T], api_name="page_pick", **at_once
        )
        column.stop.click(page.stop, token, None, api_name="page_stop", **at_once)
        column.precision.change(
            page.note, column.precision, column.note, api_name="page_note", **showing
        )
        column.text.change(
            lambda chosen: gr.update(visible=chosen == "own"),
            column.text,
            column.own,
            api_name="page_text",
            **showing,
        )
        add_api(hub)
    # ZeroGPU asks for an end of gradio's queue; elsewhere the hub's own line is enough
    demo.queue(
        default_concurrency_limit=None, max_size=hub.settings.max_pages if hub.lender else None
    )
    guard(demo)
    return demo


def launch_options(hub: Hub) -> dict[str, Any]:
    """What `Blocks.launch` must be told for this page."""
    fonts = ["ui-sans-serif", "system-ui", "sans-serif"]
    mono = ["ui-monospace", "Consolas", "monospace"]
    most = hub.settings.max_text_mib * 2**20
    return {
        "max_threads": hub.settings.max_pages,  # every open page holds one
        "state_session_capacity": hub.settings.max_pages,  # 190 KiB each, kept after it is closed
        "max_file_size": most,
        "app_kwargs": {
            "routes": [*plotly_route(), *download_routes(hub)],
            "lifespan": sweeping,
            # as JSON a text may take several times its bytes
            "middleware": [Middleware(PlainAnswers, max_body_bytes=4 * most + 2**20)],
        },
        "theme": gr.themes.Default(font=fonts, font_mono=mono).set(**_READABLE),
        "css_paths": [asset(name) for name in _STYLES],
        "head": head(),
        "footer_links": ["api", "settings"],
        "run_history": False,
        "share": False,
        "enable_monitoring": False,
        "ssr_mode": False,
    }
