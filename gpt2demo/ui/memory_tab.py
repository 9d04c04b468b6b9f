"""The Memory tab: forecast, fit map, smaller cards, the search for the limit, and what failed."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Final

import gradio as gr

from gpt2demo.config import PRECISIONS, InputError, RunConfig
from gpt2demo.fit import CARDS, Capacity, fit_map, largest
from gpt2demo.fit_words import basis, compare_words
from gpt2demo.hub import Hub
from gpt2demo.run import Run
from gpt2demo.table import forecast_errors
from gpt2demo.ui.controls import step_config
from gpt2demo.ui.fit_map import fit_map_message, fit_map_view
from gpt2demo.ui.memory_bar import forecast_bar, out_of_memory_panel

_SAME: Final = {"tf32": "fp32", "fp16": "bf16"}  # SDPA's kernel apart
_INTRO: Final = (
    "<p>Before a run: what its peak will hold, from the settings alone. On a CPU a smaller card is "
    "emulated by following every tensor of the first two steps and stopping at the first that goes "
    "beyond the budget; on an NVIDIA GPU by torch's own limit on its allocator.</p>"
)


@dataclass(kw_only=True)
class MemoryTab:
    """The tab's components and its handlers."""

    hub: Hub
    details: gr.HTML
    fit_map: gr.HTML
    card: gr.Dropdown
    budget_gib: gr.Number
    find_B: gr.Button
    find_T: gr.Button
    found: gr.HTML

    def show(self, *values: Any) -> tuple[str, str, str, str]:
        """The small bar, the tab's words, the map, and what a search found; `values` in the order
        of MEMORY_FIELDS.
        """
        search = self.hub.search
        return *self._forecast(values), _found(search.message if search else "")

    def _forecast(self, values: Sequence[Any]) -> tuple[str, str, str]:
        try:
            config = step_config(values)
        except InputError as exc:  # a field is empty while it is typed
            refused = f'<section class="memory"><p class="memory-words">{escape(str(exc))}</p>'
            return refused + "</section>", "", ""
        capacity = self.hub.capacity(config)
        return (
            forecast_bar(config, capacity),
            self._words(config, capacity),
            self._map(config, capacity),
        )

    def _words(self, config: RunConfig, capacity: Capacity) -> str:
        paragraphs = [compare_words(config, capacity), basis(config, self.hub.device.type)]
        paragraphs += _errors(tuple(self.hub.finished))
        text = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs)
        bar = forecast_bar(config, capacity, with_legend=True)
        return f'{bar}<div class="memory-more">{text}</div>'

    def _map(self, config: RunConfig, capacity: Capacity) -> str:
        grid = fit_map(config, capacity)
        frontiers: dict[str, list[int]] = {}
        for precision in PRECISIONS:
            twin = _twin(replace(config, precision=precision), capacity)
            frontiers[precision] = (
                frontiers[twin]
                if twin in frontiers
                else [
                    largest(replace(config, precision=precision, T=T), "B", capacity)
                    for T in grid["T"]
                ]
            )
        return fit_map_message(
            grid,
            capacity.total_bytes,
            (config.B, config.T),
            config.precision,
            frontiers,
            list(filter(None, (_mark(run, config, capacity) for run in list(self.hub.finished)))),
        )


def memory_tab(hub: Hub) -> MemoryTab:
    """Build the tab's components in the Blocks that is open."""
    can_emulate = hub.device.type in ("cpu", "cuda")
    gr.HTML(_INTRO, elem_classes="memory-intro", apply_default_css=False)
    with gr.Row(visible=can_emulate):
        card = gr.Dropdown(
            [("This device's own memory", 0.0)]
            + [(f"{gib} GiB: {names}", float(gib)) for gib, names in CARDS.items()],
            value=0.0,
            label="Emulate a card of",
            elem_id="card",
        )
        budget_gib = gr.Number(0, label="or of so many GiB (0: its own)", elem_id="budget_gib")
    details = gr.HTML(elem_id="memory-details", apply_default_css=False)
    view = fit_map_view()
    with gr.Row():
        find_B = gr.Button("Find the largest B for this T", elem_id="find_B")
        find_T = gr.Button("Find the largest T for this B", elem_id="find_T")
    found = gr.HTML(_found(""), elem_id="found", apply_default_css=False)
    return MemoryTab(
        hub=hub,
        details=details,
        fit_map=view,
        card=card,
        budget_gib=budget_gib,
        find_B=find_B,
        find_T=find_T,
        found=found,
    )


@dataclass(kw_only=True)
class FailurePanel:
    """Shown above the results after a run out of memory, with a way on."""

    hub: Hub
    box: gr.Column
    panel: gr.HTML
    smaller_B: gr.Button
    smaller_T: gr.Button
    run_id: gr.Textbox  # never seen; a gr.State would cost every page a second open connection

    def state(self) -> tuple[Any, Any, Any, Any, str]:
        """Updates of box, panel, the two buttons and the run's id."""
        run = self.hub.failure()
        failed = run.summary.out_of_memory if run and run.summary else None
        if run is None or failed is None:
            return gr.update(visible=False), "", "", "", ""  # plain values: see `listening`

        def button(axis: str, size: int | None) -> Any:
            return gr.update(visible=bool(size), value=f"Run with {axis}={size} instead")

        return (
            gr.update(visible=True),
            out_of_memory_panel(run.record()),
            button("B", failed.smaller_B),
            button("T", failed.smaller_T),
            run.id,
        )


def failure_panel(hub: Hub) -> FailurePanel:
    """Build the panel, hidden."""
    with gr.Column(visible=False, elem_id="failure") as box:
        panel = gr.HTML(elem_id="failure-panel", apply_default_css=False)
        with gr.Row():
            smaller_B = gr.Button(elem_id="smaller_B", variant="primary")
            smaller_T = gr.Button(elem_id="smaller_T", variant="primary")
    return FailurePanel(
        hub=hub,
        box=box,
        panel=panel,
        smaller_B=smaller_B,
        smaller_T=smaller_T,
        run_id=gr.Textbox(visible=False),
    )


@functools.lru_cache(maxsize=1)
def _errors(runs: tuple[Run, ...]) -> list[str]:
    """`forecast_errors` of the finished runs: they change far less often than the sliders do."""
    return forecast_errors([run.record() for run in runs])


def _found(text: str) -> str:
    hint = (
        "Real runs of two steps, at most six, from the forecast's answer on. Stop ends the search."
    )
    return f'<p class="found" aria-live="polite">{escape(text or hint)}</p>'


def _twin(config: RunConfig, capacity: Capacity) -> str:
    """The first of the precisions that take the same memory, byte for byte."""
    twin = replace(config, precision=_SAME.get(config.precision, config.precision))
    alike = capacity.lacks_kernel(config) == capacity.lacks_kernel(twin)
    return twin.precision if alike else config.precision


def _mark(run: Run, config: RunConfig, capacity: Capacity) -> dict[str, Any] | None:
    """The run as a mark on the map of `config`; None where it says nothing of it."""
    same = ("model", "attention", "optimizer", "compile", "vocab_size", "budget_gib")
    if any(getattr(run.config, f) != getattr(config, f) for f in same):
        return None
    if len({_twin(c, capacity) for c in (run.config, config)}) > 1:
        return None
    state = run.state
    if state != "out of memory" and len(run.steps) < 2:
        return None  # the second step is the peak
    return {
        "B": run.config.B,
        "T": run.config.T,
        "passed": state != "out of memory",
        "label": f"{run.config.label}: {'out of memory' if state == 'out of memory' else 'ran'}",
    }
