"""The Board tab: the runs that this server kept, everyone's or one's own, and those of others."""

import functools
import logging
from dataclasses import dataclass
from typing import Final

import gradio as gr
import pandas as pd

from gpt2demo.board import BoardRun
from gpt2demo.board_import import MAX_IMPORT_CHARS
from gpt2demo.config import InputError
from gpt2demo.corpora import read_upload
from gpt2demo.hub import Hub
from gpt2demo.table import shown_table
from gpt2demo.ui.downloads import BOARD_LINK, LINKS_SCRIPT
from gpt2demo.ui.link import link
from gpt2demo.ui.uploads import forget_upload
from gpt2demo.ui.words import said

log = logging.getLogger(__name__)

_INTRO: Final = (
    "<p>Runs that this server finished; they survive a restart. An export of another machine "
    "can be imported: one page then shows a T4, a laptop and an H100 side by side. A run's link "
    "fills the page with its settings.</p>"
)
_WHOSE: Final = [("Everyone's", "all"), ("Mine", "mine")]


@dataclass(kw_only=True)
class BoardTab:
    """The tab's components and its handlers."""

    hub: Hub
    whose: gr.Radio
    upload: gr.UploadButton
    imported: gr.HTML  # what became of the last import; apart: no news of the board hides it
    note: gr.HTML
    table: gr.Dataframe

    def show(self, token: object, whose: object) -> tuple[pd.DataFrame, str]:
        """The table and what is to be known of the board."""
        board = self.hub.board
        runs = board.runs(token if isinstance(token, str) else None)
        chosen = [run for run in runs if run.mine or whose != "mine"]
        text = f"{len(chosen)} of {len(runs)} runs." + (f" {board.note}" if board.note else "")
        return board_table(tuple(chosen)), said(text)

    def take(self, token: object, upload: object) -> str:
        """Import an uploaded export, which is gone then: what became of it."""
        try:
            if not isinstance(upload, str):
                raise InputError("import", "Choose a file to import.")
            export = read_upload(upload, MAX_IMPORT_CHARS)
            owner = token if isinstance(token, str) else ""
            count = self.hub.board.import_json(export, owner)
            text = "The file's run is" if count == 1 else f"The file's {count} runs are"
            text += " on the board."
        except InputError as exc:
            text = str(exc)
        finally:
            forget_upload(upload)
        return said(text)


def board_tab(hub: Hub) -> BoardTab:
    """Build the tab's components in the Blocks that is open."""
    gr.HTML(_INTRO, elem_classes="tab-intro", apply_default_css=False)
    with gr.Row():
        whose = gr.Radio(_WHOSE, value="all", label="Show", elem_id="whose")
        upload = gr.UploadButton(
            "Import an export (JSON)", type="filepath", file_types=[".json"], elem_id="import"
        )
    imported = gr.HTML(said(""), elem_id="imported", apply_default_css=False)
    note = gr.HTML(said(""), elem_id="board-note", apply_default_css=False)
    empty = board_table(())
    table = gr.Dataframe(
        empty,
        datatype=["markdown" if name == "link" else "str" for name in empty.columns],
        interactive=False,
        elem_id="board",
        max_height=480,
        pinned_columns=1,
        buttons=[],
    )
    gr.HTML(
        html_template=BOARD_LINK,
        js_on_load=LINKS_SCRIPT,
        elem_id="board-download",
        apply_default_css=False,
    )
    return BoardTab(hub=hub, whose=whose, upload=upload, imported=imported, note=note, table=table)


@functools.lru_cache(maxsize=8)  # nearly all pages of a room ask for the same one
def board_table(runs: tuple[BoardRun, ...]) -> pd.DataFrame:
    """One row a run, newest first: when, whose, its link, and the figures of the runs' table."""
    records = [run.record for run in reversed(runs)]  # shown_table turns them again
    table = shown_table(records).reset_index(drop=True)
    when = pd.to_datetime([run.added for run in runs], unit="s", utc=True)
    table.insert(1, "device ", table.pop("device"))
    table = table.rename(columns={"device ": "device"})
    table.insert(2, "link", pd.array([f"[open]({link(run.record)})" for run in runs], "string"))
    whose = ["imported" if run.imported else "mine" if run.mine else "" for run in runs]
    table.insert(3, "whose", pd.array(whose, "string"))
    table.insert(4, "when (UTC)", pd.array(list(when.strftime("%Y-%m-%d %H:%M")), "string"))
    return table
