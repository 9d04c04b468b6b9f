"""The Inside tab: where one step's time goes, and why the clock needs a synchronize."""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

import gradio as gr

from gpt2demo.charts import enlarged
from gpt2demo.config import InputError
from gpt2demo.hub import Hub
from gpt2demo.inside_figure import PART_COLOURS, parts_figure
from gpt2demo.inside_words import clock_words, headline, shape, time_words
from gpt2demo.inspection import Inspection
from gpt2demo.ui.controls import step_config
from gpt2demo.ui.inside_precision import CastsAndValues
from gpt2demo.ui.listening import PRIVATE, SHOWING
from gpt2demo.ui.present import chart_scale
from gpt2demo.ui.words import paragraphs, said

_INTRO: Final = (
    "<p>One training step of the chosen settings, on this device and on the built-in text, under "
    "torch's profiler. It takes a few steps of time; runs that are started meanwhile wait "
    "for its end.</p>"
)
_WAITING: Final = "Inspect one step: where its time goes appears here."
_INSPECTING: Final = "Inspecting: a few steps, one of them under the profiler."
_SYNCHRONIZE: Final = "<h2>Why the clock needs a synchronize</h2>"
_SHOWN_MATMULS: Final = 6


@dataclass(kw_only=True)
class InsideTab:
    """The tab's components and its handlers."""

    hub: Hub
    inspect: gr.Button
    inspecting: gr.HTML  # how this page's own inspection goes
    seen: gr.Textbox  # never seen itself: another text after each inspection of this page
    headline: gr.HTML
    figure: gr.Plot
    words: gr.HTML
    both: gr.Checkbox
    clock: gr.HTML

    def run(self, *values: Any) -> Iterator[tuple[str, str, Any]]:
        """Inspect a step of the controls' settings, `values` as MEMORY_FIELDS: for both tabs that
        it goes on, then why it could not be, or nothing; and what makes them show it.
        """
        yield said(_INSPECTING), said(_INSPECTING), gr.update()
        try:
            self.hub.inspect(step_config(values))
        except InputError as exc:
            yield said(str(exc)), said(str(exc)), gr.update()
        else:
            yield said(""), said(""), secrets.token_hex(4)

    def show(self, request: gr.Request) -> tuple[str, Any, str]:
        """Headline, figure and words of this server's last inspection."""
        found = self.hub.inspection
        if found is None:
            return said(_WAITING), gr.update(visible=False), ""
        if found.profile is None:
            told = paragraphs(time_words(found))
            return said(headline(found)), gr.update(visible=False), told
        figure = enlarged(parts_figure(found.profile), chart_scale(request))
        return said(headline(found)), gr.update(visible=True, value=figure), _time_html(found)

    def clock_html(self, both: object) -> str:
        """The readings where they are asked for, else the true one alone."""
        found = self.hub.inspection
        if both is True:
            return said(clock_words(found, self.hub.device.type))
        if found is None or found.step_ms is None:
            return ""
        return said(f"One step, read after a synchronize: {found.step_ms:,.1f} ms.")


def inside_tab(hub: Hub) -> InsideTab:
    """Build the tab's components in the Blocks that is open."""
    gr.HTML(_INTRO, elem_classes="tab-intro", apply_default_css=False)
    inspect = gr.Button("Inspect one step", variant="primary", elem_id="inspect")
    inspecting = gr.HTML(said(""), elem_id="inspecting", apply_default_css=False)
    seen = gr.Textbox(visible="hidden")
    head = gr.HTML(said(_WAITING), elem_id="inside-headline", apply_default_css=False)
    figure = gr.Plot(visible=False, elem_id="parts", show_label=False)
    words = gr.HTML(elem_id="inside-words", apply_default_css=False)
    gr.HTML(_SYNCHRONIZE, elem_classes="heading", apply_default_css=False)
    both = gr.Checkbox(
        False, label="Show the time read without a synchronize beside it", elem_id="both-clocks"
    )
    clock = gr.HTML(elem_id="clock", apply_default_css=False)
    return InsideTab(
        hub=hub,
        inspect=inspect,
        inspecting=inspecting,
        seen=seen,
        headline=head,
        figure=figure,
        words=words,
        both=both,
        clock=clock,
    )


def connect_inside(
    inside: InsideTab,
    precision: CastsAndValues,
    settings: Sequence[Any],
    tabs: Sequence[gr.Tab],
) -> None:
    """Put the listeners on: one inspection fills both tabs.

    Args:
        inside: the tab Inside.
        precision: the sections of the tab Precision.
        settings: the controls' components in the order of MEMORY_FIELDS.
        tabs: both tabs, which show the last inspection when they are opened.
    """
    gr.on(
        [inside.inspect.click, precision.inspect.click],
        inside.run,
        list(settings),
        [inside.inspecting, precision.inspecting, inside.seen],
        api_name="page_inspect",
        **PRIVATE,
    )

    def show(request: gr.Request) -> tuple[Any, ...]:
        return *inside.show(request), *precision.show(request)

    shows = [*(tab.select for tab in tabs), inside.seen.change]
    gr.on(
        shows,
        show,
        None,
        [
            *(inside.headline, inside.figure, inside.words),
            *(precision.headline, precision.casts, precision.figure, precision.words),
        ],
        api_name="page_inside",
        **SHOWING,
    )
    gr.on(
        [*shows, inside.both.change],
        inside.clock_html,
        inside.both,
        inside.clock,
        api_name="page_clock",
        **SHOWING,
    )


def _time_html(found: Inspection) -> str:
    told = found.profile
    assert told is not None
    rows = "".join(
        f'<tr><td><i style="background:{PART_COLOURS[part]}"></i>{escape(part)}</td>'
        f"<td>{seconds * 1000:,.1f}</td><td>{seconds / told.step_seconds:.1%}</td></tr>"
        for part, seconds in told.parts.items()
    )
    matmuls = "".join(
        f"<tr><td>{escape(m.part)}</td><td>{escape(shape(m))}</td><td>{m.times}</td>"
        f"<td>{m.flops / 1e9:,.3g}</td><td>{m.seconds * 1000:,.2f}</td></tr>"
        for m in told.matmuls[:_SHOWN_MATMULS]
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in found.notes)
    return (
        f'{paragraphs(time_words(found))}<div class="probe inside"><table><thead><tr>'
        "<th>part</th><th>ms</th><th>of the step</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
        "<table><thead><tr><th>part</th><th>largest matmuls</th><th>times</th>"
        f"<th>GFLOP each</th><th>ms each</th></tr></thead><tbody>{matmuls}</tbody></table>"
        f"{notes}</div>"
    )
