"""Large type for a room: `?present=1` in the page's address.

Texts of our own are enlarged by `assets/present.css`, charts that a script of ours draws by the
`--chart-scale` that it sets, and figures that gradio draws by `chart_scale`.
"""

from typing import Final

import gradio as gr

from gpt2demo.shipped import asset

SCALE: Final = 1.8  # of charts and texts; assets/present.css holds the same
# The link changes this one parameter: a page that was opened dark, or with settings, stays so.
_SCRIPT: Final = """
if (new URLSearchParams(location.search).get("present") === "1")
  document.documentElement.classList.add("present");
document.addEventListener("click", (event) => {
  if (!event.target.closest?.("a.type")) return;
  event.preventDefault();
  const here = new URL(location.href);
  if (here.searchParams.get("present") === "1") here.searchParams.delete("present");
  else here.searchParams.set("present", "1");
  location.assign(here);
});
"""
LINK: Final = (
    '<a class="type" href="?present=1"><span class="type-large">Large type, for a room</span>'
    '<span class="type-normal">Normal type</span></a>'
)


def head() -> str:
    """What goes into the page's head."""
    style = asset("present.css").read_text(encoding="utf-8")
    return f"<script>{_SCRIPT}</script>\n<style>{style}</style>"


def chart_scale(request: gr.Request) -> float:
    """How much larger than usual the asking page shows the figures that gradio draws.

    The server does not know the screen: `?present=1` on a phone enlarges these figures too.
    """
    return SCALE if request.query_params.get("present") == "1" else 1.0
