"""The Precision tab: what formats hold, and what a real step makes of them."""

from typing import Final

import gradio as gr

from gpt2demo.hub import Hub
from gpt2demo.ui.bits import bits_view, why_cards
from gpt2demo.ui.inside_precision import CastsAndValues, casts_and_values

_INTRO: Final = (
    "<p>What a format makes of a number: its bits, the value it is rounded to, the error, and the "
    "gap to the next number. Type one, or drag its size.</p>"
)


def precision_tab(hub: Hub) -> CastsAndValues:
    """Build the tab's components in the Blocks that is open."""
    gr.HTML(_INTRO, elem_classes="tab-intro", apply_default_css=False)
    bits_view()
    gr.HTML(why_cards(), elem_id="why", apply_default_css=False)
    return casts_and_values(hub)
