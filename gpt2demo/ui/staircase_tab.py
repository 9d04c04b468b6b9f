"""The Staircase tab: the lesson's ladder on this device, beside the lesson's own figures."""

from dataclasses import dataclass
from html import escape
from typing import Any, Final

import gradio as gr

from gpt2demo.charts import enlarged
from gpt2demo.config import RunConfig
from gpt2demo.hub import Hub
from gpt2demo.lesson import LESSON_RUN, RUNGS
from gpt2demo.staircase import RungResult
from gpt2demo.staircase_figure import staircase_figure, staircase_table
from gpt2demo.staircase_report import rung_notes
from gpt2demo.ui.present import chart_scale
from gpt2demo.ui.words import said

_LADDER: Final = " \u2192 ".join(rung.name for rung in RUNGS)
_INTRO: Final = (
    f"<p>The lesson's ladder, {escape(_LADDER)}: seven ordinary runs with the controls' model, B, "
    "T, steps and seed, each with one change more. The rungs set precision, attention, "
    "torch.compile, vocabulary and AdamW themselves. A rung without effect on this device runs "
    "all the same and says so.</p>"
)
_LESSON: Final = (
    f"The diamonds are the lesson's {LESSON_RUN['device']} with GPT-2 124M at "
    f"B={LESSON_RUN['B']}, T={LESSON_RUN['T']:,}: "
    f"{', '.join(f'{rung.lesson_ms:,.0f}' for rung in RUNGS)} ms. Those are other settings on "
    "another machine, so only the ratios compare."
)
_SCALES: Final = " Both scales have fp32's step at the same height."
_WAITING: Final = "Climb it: times, what every rung saved, and the reasons appear here."


@dataclass(kw_only=True)
class StaircaseTab:
    """The tab's components and what they show."""

    hub: Hub
    climb: gr.Button
    said: gr.HTML
    figure: gr.Plot
    table: gr.Dataframe
    rungs: gr.HTML

    def results(self, request: gr.Request) -> tuple[str, Any, Any, str]:
        """Message, figure, table and words of the last staircase."""
        staircase = self.hub.staircase
        if staircase is None:
            return said(_WAITING), None, None, ""  # hidden as they were built: see `listening`
        going = self.hub.run_of(staircase)
        if not (going or staircase.runs_done):  # taken out of the line
            return said(_WAITING), gr.update(visible=False), gr.update(visible=False), ""
        ended = staircase.message or "The staircase ended before its last rung."
        results = staircase.results()
        labels = [_label(result) for result in results]
        some = any(result.step_ms_median is not None for result in results)
        lesson = f"{_LESSON}{'' if results[0].step_ms_median is None else _SCALES}"
        figure = enlarged(staircase_figure(results), chart_scale(request)) if some else None
        return (
            said(f"{staircase.doing}." if going else ended),
            gr.update(visible=some, value=figure),
            gr.update(visible=True, value=staircase_table(results, labels)),
            (f'<p class="lesson">{escape(lesson)}</p>' if some else "")
            + _rungs(results, rung_notes(staircase)),
        )


def staircase_tab(hub: Hub) -> StaircaseTab:
    """Build the tab's components in the Blocks that is open."""
    gr.HTML(_INTRO, elem_classes="tab-intro", apply_default_css=False)
    climb = gr.Button("Climb the staircase (7 runs)", variant="primary", elem_id="climb")
    shown = gr.HTML(said(_WAITING), elem_id="staircase-said", apply_default_css=False)
    figure = gr.Plot(visible=False, elem_id="staircase", show_label=False)
    rungs = gr.HTML(elem_id="rungs", apply_default_css=False)
    table = gr.Dataframe(
        visible=False, interactive=False, elem_id="staircase-table", pinned_columns=1, buttons=[]
    )
    return StaircaseTab(hub=hub, climb=climb, said=shown, figure=figure, table=table, rungs=rungs)


def _label(result: RungResult) -> str | None:
    return None if result.config is None else RunConfig(**result.config).label


def _rungs(results: list[RungResult], notes: dict[str, str]) -> str:
    rows = "".join(
        f"<dt>{escape(result.name)}</dt><dd>{_mark(result)}{escape(notes[result.rung])}</dd>"
        for result in results
    )
    return f'<dl class="words rungs">{rows}</dl>'


def _mark(result: RungResult) -> str:
    if result.mark is None:
        return ""
    here = "" if result.mark == "not compiled" else " here"
    return f"<b>{escape(result.mark)}{here}</b> "
