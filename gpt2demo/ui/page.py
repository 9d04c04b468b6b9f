"""The page: one narrow column of controls, and beside it the tabs; who listens to what."""

import functools
from typing import Any, Final

import gradio as gr
from starlette.middleware import Middleware

from gpt2demo.config import RunConfig
from gpt2demo.hub import Hub
from gpt2demo.shipped import asset
from gpt2demo.table import shown_table
from gpt2demo.ui.api import add_api
from gpt2demo.ui.board_tab import board_tab
from gpt2demo.ui.compare_tab import compare_tab
from gpt2demo.ui.controls import FIELDS, MEMORY_FIELDS, controls
from gpt2demo.ui.downloads import LINKS, LINKS_SCRIPT, download_routes
from gpt2demo.ui.guard import PlainAnswers, guard
from gpt2demo.ui.handlers import Page
from gpt2demo.ui.inside_tab import connect_inside, inside_tab
from gpt2demo.ui.link import LINKED
from gpt2demo.ui.listening import AT_ONCE, EACH, PRIVATE, SHOWING
from gpt2demo.ui.live import live_view, plotly_route
from gpt2demo.ui.memory_tab import failure_panel, memory_tab
from gpt2demo.ui.precision_tab import precision_tab
from gpt2demo.ui.present import LINK, head
from gpt2demo.ui.specs_tab import specs_tab
from gpt2demo.ui.staircase_tab import staircase_tab
from gpt2demo.ui.uploads import sweeping
from gpt2demo.ui.watching import Watching

_STYLES: Final = (
    *("page.css", "style.css", "memory.css", "fit_map.css"),
    *("precision.css", "inside.css", "staircase.css"),
)
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
                        live = live_view()
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
        # names of their own, or they would take /stop and its like from the API
        demo.load(page.owner, token, [token, live], api_name="page_owner", **PRIVATE)
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
            listen(start, [token, *given], shown, api_name=f"page_{name}", **PRIVATE)

        def around(seen: object, request: gr.Request) -> tuple[Any, ...]:
            return (
                *page.around(seen),
                *failure.state(),
                *compare.results(request),
                *stairs.results(request),
            )

        def at_settings(*values: Any) -> tuple[Any, ...]:
            return *memory.show(*values), compare.expectations(*values), compare.found(*values)

        # Each thing shown has one event that shows it: of two, the older answer may come last. And
        # they are few: at every run's start and end a room of pages asks for all of it.
        live.tick(
            around,
            token,
            [
                *(column.stop, table, column.device),
                *(failure.box, failure.panel, failure.smaller_B, failure.smaller_T, failure.run_id),
                *(compare.figure, compare.table, compare.verdicts),
                *(stairs.said, stairs.figure, stairs.table, stairs.rungs),
            ],
            api_name="page_around",
            **SHOWING,
        )
        gr.on(
            [live.tick, *(component.change for component in of_memory)],
            at_settings,
            of_memory,
            [
                *(column.memory_bar, memory.details, memory.fit_map, memory.found),
                *(compare.expected, compare.probed),
            ],
            api_name="page_settings",
            **SHOWING,
        )
        compare.probe.click(
            compare.run_probe,
            of_memory,
            compare.probing,
            api_name="page_probe",
            **PRIVATE,
        )
        gr.on(
            [board_opened.select, board.whose.change, live.tick],
            board.show,
            [token, board.whose],
            [board.table, board.note],
            api_name="page_board",
            **SHOWING,
        )
        board.upload.upload(
            board.take,
            [token, board.upload],
            board.imported,
            api_name="page_import",
            **EACH,  # two files in a row are two imports
        )
        connect_inside(inside, precision, of_memory, [inside_opened, precision_opened])
        linked = column.named(LINKED, budget_gib=memory.budget_gib)
        demo.load(page.fill, None, [*linked, shared], api_name="page_fill", **AT_ONCE)
        memory.card.input(
            page.card, memory.card, memory.budget_gib, api_name="page_card", **SHOWING
        )
        memory.fit_map.select(page.pick, None, [column.B, column.T], api_name="page_pick", **EACH)
        column.stop.click(page.stop, token, None, api_name="page_stop", **AT_ONCE)
        column.precision.change(
            page.note, column.precision, column.note, api_name="page_note", **SHOWING
        )
        column.text.change(
            lambda chosen: gr.update(visible=chosen == "own"),
            column.text,
            column.own,
            api_name="page_text",
            **SHOWING,
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
        "max_threads": hub.settings.max_pages,  # a script that streams a run holds one
        "state_session_capacity": hub.settings.max_pages,  # 190 KiB each, kept after it is closed
        "max_file_size": most,
        "app_kwargs": {
            "routes": [*plotly_route(), *Watching(hub).routes(), *download_routes(hub)],
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
