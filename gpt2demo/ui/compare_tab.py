"""The Compare tab: several precisions as one race, what to expect, what came out, and why."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import compress
from typing import Any, Final

import gradio as gr

from gpt2demo.charts import enlarged
from gpt2demo.compare import Verdict, explain
from gpt2demo.compare_figure import race_table, speedup_figure
from gpt2demo.config import PRECISIONS, InputError, RunConfig
from gpt2demo.expectation import Expectation, expect
from gpt2demo.hub import Hub
from gpt2demo.pace import alike, paces
from gpt2demo.precision import PRECISION
from gpt2demo.race import MAX_ROUNDS
from gpt2demo.roofline import step_forecasts
from gpt2demo.support import Support
from gpt2demo.ui.controls import FIELDS, step_config
from gpt2demo.ui.present import chart_scale
from gpt2demo.ui.probe_words import probe_words
from gpt2demo.ui.words import said, word_list

_INTRO: Final = (
    "<p>The same model, B, T, seed and batches in several precisions, one run after the other; the "
    "curves of the Run tab lie over each other. With rounds every precision runs once a round, in "
    "turning order, so that a machine that drifts favours none.</p>"
)
_NOT_PROBED: Final = (
    "Probe: the matmul rates, the memory's bandwidth and the launch overhead, measured; the "
    "expectations below then use them."
)
_WAITING: Final = "Race them: times, speed-ups and the reasons appear here."


@dataclass(kw_only=True)
class CompareTab:
    """The tab's components and its handlers."""

    hub: Hub
    precisions: dict[str, gr.Checkbox]
    rounds: gr.Slider
    race: gr.Button
    expected: gr.HTML
    figure: gr.Plot
    table: gr.Dataframe
    verdicts: gr.HTML
    probe: gr.Button
    probing: gr.HTML  # how this page's own probe goes
    probed: gr.HTML

    def run_probe(self, *values: Any) -> Iterator[str]:
        """Measure the device, of which all pages hear: that it goes on, then why it could not be,
        or nothing.
        """
        yield said("Probing: this takes about 8 seconds.")
        try:
            self.hub.probe(step_config(values).tokens_per_step)
        except InputError as exc:
            yield said(str(exc))
        else:
            yield said("")

    def found(self, *values: Any) -> str:
        """The last probe at the controls' settings: rates, and the step that follows from them."""
        found = self.hub.probed
        if found is None:
            return said(_NOT_PROBED)
        try:
            config = step_config(values)
        except InputError as exc:
            return said(str(exc))
        told = step_forecasts(config, found.rates, PRECISIONS)
        return probe_words(found, told, self._measured(config))

    def _measured(self, config: RunConfig) -> dict[str, float]:
        """Median ms/step of this server's newest run of these settings, by precision."""
        known = paces(list(self.hub.finished))  # a copy: runs end meanwhile
        configs = {p: alike(replace(config, precision=p)) for p in PRECISIONS}
        return {p: known[key].step_ms_median for p, key in configs.items() if key in known}

    def expectations(self, *values: Any) -> str:
        """What each precision should do at the controls' settings, `values` as MEMORY_FIELDS."""
        try:
            config = step_config(values)
        except InputError as exc:  # a field is empty while it is typed
            return word_list({"": str(exc)})
        told = expect(self.hub.device_info, config, self.hub.rates())
        return word_list({precision: told[precision].words for precision in PRECISIONS})

    def results(self, request: gr.Request) -> tuple[Any, Any, str]:
        """Figure, table and verdicts of the last race; the figure as large as the page's type."""
        race = self.hub.race
        if race is None:
            return None, None, said(_WAITING)  # hidden as they were built: see `listening`
        if not race.runs_done:
            return gr.update(visible=False), gr.update(visible=False), said(_WAITING)
        results = race.results()
        device = self.hub.device_info
        rates = self.hub.rates()
        expected = expect(device, race.config, rates)
        told = explain(device, race.config, results, rates)
        figure = enlarged(speedup_figure(results, expected), chart_scale(request))
        return (
            gr.update(visible=True, value=figure),
            gr.update(visible=True, value=race_table(results)),
            said(race.message or race.doing + ".") + _verdicts(told, expected),
        )


def compare_tab(hub: Hub) -> CompareTab:
    """Build the tab's components in the Blocks that is open."""
    gr.HTML(_INTRO, elem_classes="tab-intro", apply_default_css=False)
    with gr.Row(elem_id="precisions"):
        precisions = {
            precision: _chosen(precision, support)
            for precision, support in hub.device_info.support.items()
        }
    with gr.Row():
        rounds = gr.Slider(1, MAX_ROUNDS, 1, step=1, label="Rounds", elem_id="rounds")
        race = gr.Button("Race them", variant="primary", elem_id="race")
    probe = gr.Button("Probe this device (about 8 s)", elem_id="probe")
    probing = gr.HTML(said(""), elem_id="probing", apply_default_css=False)
    probed = gr.HTML(said(_NOT_PROBED), elem_id="probed", apply_default_css=False)
    expected = gr.HTML(elem_id="expected", apply_default_css=False)
    verdicts = gr.HTML(said(_WAITING), elem_id="verdicts", apply_default_css=False)
    figure = gr.Plot(visible=False, elem_id="speedups", show_label=False)
    table = gr.Dataframe(
        visible=False, interactive=False, elem_id="race-table", pinned_columns=1, buttons=[]
    )
    return CompareTab(
        hub=hub,
        precisions=precisions,
        rounds=rounds,
        race=race,
        expected=expected,
        figure=figure,
        table=table,
        verdicts=verdicts,
        probe=probe,
        probing=probing,
        probed=probed,
    )


def _chosen(precision: str, support: Support) -> gr.Checkbox:
    """One precision's box; greyed, with the reason, where it does not run."""
    there = support.status != "not available"
    return gr.Checkbox(
        # what takes minutes a step, and what nobody trains in, is chosen on purpose only
        there and precision != "fp64" and not support.slow,
        label=PRECISION[precision].name,
        info=support.status if there else f"Not available: {support.reason}",
        interactive=there,
        min_width=150,
        elem_id=f"race-{precision}",
    )


def _verdicts(told: Mapping[str, Verdict], expected: Mapping[str, Expectation]) -> str:
    rows = "".join(
        f"<dt>{escape(precision)}</dt><dd><b>{escape(verdict.cause)}</b> {escape(verdict.words)}"
        f'<span class="expected">Expected: {escape(expected[precision].words)}</span></dd>'
        for precision, verdict in told.items()
    )
    return f'<dl class="words">{rows}</dl>'


def race_inputs(values: Sequence[Any]) -> tuple[list[str], Any, Sequence[Any]]:
    """Precisions, rounds, and the settings in the order of FIELDS; the values as a race's inputs:
    a truth by precision, in the order of PRECISIONS, the rounds, the settings.
    """
    count = len(PRECISIONS)
    chosen, (rounds, *settings) = values[:count], values[count:]
    assert len(settings) == len(FIELDS)
    return list(compress(PRECISIONS, chosen)), rounds, settings
