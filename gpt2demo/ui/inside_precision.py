"""What one real step says about precision: what autocast casts, and how large the numbers are."""

from dataclasses import dataclass
from html import escape
from typing import Any, Final

import gradio as gr

from gpt2demo.charts import enlarged
from gpt2demo.hub import Hub
from gpt2demo.inside_figure import values_figure
from gpt2demo.inside_words import GRADIENTS, cast_words, headline, percent, value_words
from gpt2demo.inspection import (
    BF16,
    FP16,
    FP16_SCALED,
    LOSS_SCALE,
    Inspection,
    ValueHistogram,
)
from gpt2demo.ui.present import chart_scale
from gpt2demo.ui.words import paragraphs, said

_CASTS: Final = "<h2>What autocast really casts</h2>"
_VALUES: Final = "<h2>How large a step's numbers are</h2>"
_WAITING: Final = (
    "Inspect one step of the chosen settings: the types of every operation, and the size of "
    "GPT-2's own weights, activations and gradients, appear here."
)
_LEGEND: Final = (
    "Green: float16's range, from 2^-14 to 2^16; paler: down to 2^-24, where it loses bits. bf16 "
    "and float32 reach from 2^-126 to 2^128, beyond both ends. Gradients are shown without "
    "float16's loss scale."
)
_SHORT: Final = ("bfloat16", "float16")


@dataclass(kw_only=True)
class CastsAndValues:
    """The sections' components and what they show; `inside_tab.connect_inside` puts the listeners
    on.
    """

    hub: Hub
    inspect: gr.Button
    inspecting: gr.HTML  # how this page's own inspection goes
    headline: gr.HTML
    casts: gr.HTML
    figure: gr.Plot
    words: gr.HTML

    def show(self, request: gr.Request) -> tuple[str, str, Any, str]:
        """Headline, casts, figure and words of this server's last inspection."""
        found = self.hub.inspection
        if found is None:
            return said(_WAITING), "", gr.update(visible=False), ""
        head = said(headline(found))
        casts = paragraphs(cast_words(found)) + _cast_table(found)
        if not found.values:
            return head, casts, gr.update(visible=False), paragraphs(value_words(found))
        figure = gr.update(visible=True, value=enlarged(values_figure(found), chart_scale(request)))
        return head, casts, figure, _value_html(found)


def casts_and_values(hub: Hub) -> CastsAndValues:
    """Build the sections' components in the Blocks that is open."""
    gr.HTML(_CASTS, elem_classes="heading", apply_default_css=False)
    inspect = gr.Button("Inspect one step", variant="primary", elem_id="inspect-casts")
    inspecting = gr.HTML(said(""), elem_id="inspecting-casts", apply_default_css=False)
    head = gr.HTML(said(_WAITING), elem_id="casts-headline", apply_default_css=False)
    casts = gr.HTML(elem_id="casts", apply_default_css=False)
    gr.HTML(_VALUES, elem_classes="heading", apply_default_css=False)
    figure = gr.Plot(visible=False, elem_id="values", show_label=False)
    words = gr.HTML(elem_id="values-words", apply_default_css=False)
    return CastsAndValues(
        hub=hub,
        inspect=inspect,
        inspecting=inspecting,
        headline=head,
        casts=casts,
        figure=figure,
        words=words,
    )


def _cast_table(found: Inspection) -> str:
    if found.casts is None:
        return ""
    rows = "".join(
        f"<tr><td>{escape(c.where)}</td><td>{escape(c.operation)}</td>"
        f"{_type(' + '.join(c.inputs))}{_type(c.weight or '')}{_type(c.compute)}"
        f"{_type(c.output)}<td>{c.times}</td></tr>"
        for c in found.casts.operations
    )
    return (
        '<div class="probe inside"><table id="cast-table"><thead><tr><th>where</th>'
        "<th>operation</th><th>input</th><th>weight</th><th>computes in</th><th>output</th>"
        f"<th>times</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _type(name: str) -> str:
    """A cell; the 16-bit types stand out by weight and colour."""
    short = any(part in _SHORT for part in name.split(" + "))
    kind = " class=short" if short else ""
    return f"<td{kind}>{escape(name)}</td>"


def _value_html(found: Inspection) -> str:
    rows = "".join(_value_row(name, values) for name, values in found.values.items())
    return (
        f'<p class="found">{escape(_LEGEND)}</p>{paragraphs(value_words(found))}'
        '<div class="probe inside"><table id="value-table"><thead><tr><th></th>'
        "<th>fp16: to zero</th><th>fewer bits</th><th>infinite</th>"
        f"<th>times {LOSS_SCALE:,}: to zero</th><th>bf16: to zero</th><th>int8: to zero</th>"
        f"</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _value_row(name: str, values: ValueHistogram) -> str:
    fp16 = values.outside[FP16]
    scaled = values.outside[FP16_SCALED]
    cells = [
        name,
        percent(values, fp16.underflow),
        percent(values, fp16.subnormal),
        percent(values, fp16.overflow),
        percent(values, scaled.underflow) if name in GRADIENTS else "",
        percent(values, values.outside[BF16].underflow),
        percent(values, values.int8_zeros),
    ]
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
