"""The Specs tab: the table of GPUs that MFU and the verdicts use, this machine's row marked."""

from html import escape
from typing import Any, Final
from urllib.parse import urlsplit

import gradio as gr
import pandas as pd

from gpt2demo.config import PRECISIONS
from gpt2demo.device import DeviceInfo
from gpt2demo.peaks import GpuSpec, all_gpus, find_gpu

_INTRO: Final = (
    "<p>Published dense peaks: the sparse figures of data sheets, twice as high, are left out. "
    "Blank = no source gives the figure, or the GPU has no units for it. MFU and the verdicts read "
    "this very table. The menu beside a column's name sorts and filters by it.</p>"
)
# gradio gives its search field a title and no name, which not every screen reader speaks
_NAMED: Final = """
const named = () => {
  for (const field of document.querySelectorAll("#specs .search-input:not([aria-label])"))
    field.setAttribute("aria-label", "Filter the table of GPUs");
};
new MutationObserver(named).observe(document.body, { childList: true, subtree: true });
named();
"""
_HERE: Final = " (this machine)"
_NAMES: Final = {"tf32": "TF32"}  # the others are called as their ids are
_WIDTHS: Final = {"GPU": 210, "sources": 560, "notes": 900, "architecture": 210}  # px


def specs_table(here: GpuSpec | None) -> pd.DataFrame:
    """One row a GPU, `here` first and marked, NA for what is unknown; sources as Markdown links."""
    specs = sorted(all_gpus(), key=lambda spec: spec is not here)  # stable: the others keep order
    told = [spec.to_dict() for spec in specs]
    columns: dict[str, Any] = {
        "GPU": [_short(spec) + (_HERE if spec is here else "") for spec in specs]
    }
    for precision in PRECISIONS:
        columns[f"{_NAMES.get(precision, precision)} TFLOP/s"] = _numbers(
            [row["dense_tflops"][precision] for row in told]
        )
    columns |= {
        "memory GiB": _numbers([row["memory_gib"] for row in told]),
        "GB/s": _numbers([row["bandwidth_gb_per_sec"] for row in told]),
        "sources": [" ".join(map(_link, row["sources"])) for row in told],
        "maker": [row["name"].partition(" ")[0] for row in told],
        "architecture": [row["architecture"] for row in told],
        "notes": [row["notes"] for row in told],
    }
    return pd.DataFrame(columns)


def specs_tab(info: DeviceInfo) -> gr.Dataframe:
    """Build the tab's components in the Blocks that is open."""
    here = find_gpu(info.name, info.memory_total_bytes)
    gr.HTML(_INTRO, elem_classes="tab-intro", apply_default_css=False, js_on_load=_NAMED)
    gr.HTML(
        _about(info, here), elem_id="specs-here", elem_classes="tab-intro", apply_default_css=False
    )
    table = specs_table(here)
    return gr.Dataframe(
        _marked(table) if here else table,
        datatype=["markdown" if name == "sources" else _kind(table[name]) for name in table],
        interactive=False,
        elem_id="specs",
        column_widths=[_WIDTHS.get(name, 120) for name in table],
        show_search="filter",
        pinned_columns=1,
        max_height=560,
        wrap=True,
        buttons=[],
    )


def _short(spec: GpuSpec) -> str:
    """The name without its maker, which has a column of its own: a phone is narrow."""
    return spec.display_name.partition(" ")[2]


def _numbers(figures: list[float | None]) -> pd.api.extensions.ExtensionArray:
    return pd.array(figures, dtype="Float64")


def _kind(column: pd.Series) -> str:
    return "number" if pd.api.types.is_numeric_dtype(column) else "str"


def _link(address: str) -> str:
    """The address as a Markdown link that says whose it is."""
    parts = urlsplit(address)
    whose = parts.netloc.removeprefix("www.")
    if whose == "github.com":
        whose = "/".join(parts.path.split("/")[1:3])
    return f"[{whose}]({address})"


def _marked(table: pd.DataFrame) -> Any:
    """The table with its first row, this machine's, on a ground of its own."""
    ground = "background-color: color-mix(in srgb, #0072b2 28%, transparent); font-weight: 700"
    marked = table.style.apply(lambda row: [ground if row.name == 0 else ""] * len(row), axis=1)
    figures = [name for name in table if _kind(table[name]) == "number"]
    return marked.format("{:g}", subset=figures, na_rep="")


def _about(info: DeviceInfo, here: GpuSpec | None) -> str:
    """What this machine is in the table, in one sentence."""
    name = escape(info.name or "This device, whose name is unknown,")
    if here is None:
        why = "a CPU" if info.type == "cpu" else "its peaks are unknown here, and so is its MFU"
        return f"<p>This machine: {name} is not in the table ({why}).</p>"
    return f"<p>This machine: <b>{name}</b>, the first row.</p>"
