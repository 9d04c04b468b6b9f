"""What the page does when a button is pressed or a control moves; what it knows lies in the hub."""

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import gradio as gr
import pandas as pd

from gpt2demo.config import InputError, RunConfig
from gpt2demo.hub import Hub
from gpt2demo.precision import PRECISION
from gpt2demo.run import Run
from gpt2demo.table import shown_table
from gpt2demo.tracking import PAGE_PROJECT
from gpt2demo.ui.compare_tab import race_inputs
from gpt2demo.ui.controls import config_of, own_upload
from gpt2demo.ui.device_card import device_card, precision_note
from gpt2demo.ui.link import LINKED, result_in, settings_in
from gpt2demo.ui.uploads import forget_upload
from gpt2demo.ui.watching import known_owner

log = logging.getLogger(__name__)


class Page:
    """The page's handlers; what they know lies in the hub, or is told by the browser."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub

    def owner(self, token: object) -> tuple[str, str]:
        """The browser's own token, made at its first visit; for it, and for its live view."""
        owner = known_owner(token)
        return owner, owner

    def around(self, token: object) -> tuple[Any, Any, str]:
        """Stop, the table and the device panel; asked for by the live view when they change."""
        mine = isinstance(token, str) and bool(self.hub.mine(token))
        return gr.update(interactive=mine), _table(tuple(self.hub.finished)), self.device_html()

    def device_html(self) -> str:
        """The device panel with the memory that is free now."""
        return device_card(self.hub.device_info, self.hub.memory_free_bytes())

    def run(self, token: object, track: object, *values: Any) -> Any:
        """Put a run with these settings (in the order of FIELDS) into the line; `track` is True
        where trackio is to log it.
        """
        with refusals():
            config = self._config(values)
            project = PAGE_PROJECT if track is True else None
            self.hub.submit(config, known_owner(token), project)
            return self._forget(values)

    def find_limit(self, axis: str, token: object, *values: Any) -> Any:
        """Put a search for the largest B or T into the line."""
        with refusals():
            self.hub.find_limit(self._config(values), axis, known_owner(token))
            return self._forget(values)

    def compare(self, token: object, *values: Any) -> Any:
        """Put a race of several precisions into the line."""
        with refusals():
            precisions, rounds, settings = race_inputs(values)
            self.hub.compare(self._config(settings), precisions, rounds, known_owner(token))
            return self._forget(settings)

    def climb(self, token: object, *values: Any) -> Any:
        """Put the lesson's staircase into the line."""
        with refusals():
            self.hub.climb(self._config(values), known_owner(token))
            return self._forget(values)

    def _config(self, values: Sequence[Any]) -> RunConfig:
        """The controls' settings, within this server's limits."""
        return config_of(values, self.hub.settings.max_text_mib)

    def _forget(self, values: Sequence[Any]) -> Any:
        """Delete the upload that a run has taken; what the upload's component shows then."""
        if upload := own_upload(values):
            forget_upload(upload)
            return None
        return gr.update()

    def run_smaller(self, axis: str, token: object, run_id: object) -> None:
        """Run what should fit in place of the run that ran out of memory."""
        with refusals():
            name = run_id if isinstance(run_id, str) else ""
            self.hub.run_smaller(name, axis, known_owner(token))

    def stop(self, token: object) -> None:
        """Stop the visitor's own run."""
        message = self.hub.stop(token if isinstance(token, str) else "")
        if not message.startswith("Stopping"):  # the status line says that already
            gr.Info(message)

    def card(self, gib: object) -> float:
        """A smaller card was chosen: its GiB, for the budget's field."""
        with refusals():
            if not isinstance(gib, int | float):  # a call that no choice made
                raise InputError("card", "A card is told by its GiB.")
            return float(gib)

    def pick(self, event: gr.EventData) -> tuple[Any, Any]:
        """A cell of the fit map was clicked: its B and T for the sliders."""
        with refusals():
            try:
                B, T = event.B, event.T
            except (AttributeError, TypeError):  # a call that no click made
                raise InputError("B", "A cell of the map is told by its B and T.") from None
            chosen = RunConfig(B=B, T=T)
            return chosen.B, chosen.T

    def fill(self, request: gr.Request) -> list[Any]:
        """The controls as the page's link sets them, and the result that it carries."""
        query = dict(request.query_params)
        try:
            found, said = settings_in(query), result_in(query)
        except InputError as exc:
            found, said = {}, f"The link was not taken: {exc}"
        shown = f'<p class="said">{escape(said)}</p>'
        updates = [gr.update(value=found[n]) if n in found else gr.update() for n in LINKED]
        return [*updates, gr.update(value=shown, visible=bool(said))]

    def note(self, precision: Any) -> str:
        """What the chosen precision is, and how it fares here."""
        if not isinstance(precision, str) or precision not in PRECISION:
            return ""
        return precision_note(self.hub.device_info, precision)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """A refusal inside becomes a message on the page; so does any error, without its text."""
    try:
        yield
    except InputError as exc:
        raise gr.Error(str(exc), title="Not started", print_exception=False) from None
    except Exception:
        log.exception("a run could not be started")
        raise gr.Error(
            "The run could not be started. The server's log has the details.",
            title="Not started",
            print_exception=False,
        ) from None


@functools.lru_cache(maxsize=1)
def _table(runs: tuple[Run, ...]) -> pd.DataFrame:
    """The finished runs' table: all pages of a room ask for the same one."""
    return shown_table([run.record() for run in runs])
