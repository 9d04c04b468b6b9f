"""A run's settings and rows for trackio, where that library is installed.

Nothing leaves the machine: trackio keeps its projects in SQLite files of its own (`TRACKIO_DIR`, or
a folder in the Hugging Face cache), and `trackio show` draws them. Whatever fails in it ends as a
note, never as the run's end.
"""

import contextlib
import importlib.util
import io
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, Final

from gpt2demo.config import InputError, RunConfig, shown
from gpt2demo.records import RunSummary, StepMetrics

log = logging.getLogger(__name__)

PAGE_PROJECT: Final = "gpt2demo"  # the project of the page's runs
# with one of these trackio would send what it is given to another machine
_REMOTE: Final = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_DATASET_ID")
_PROJECT: Final = re.compile(r"(?!registry-)[A-Za-z0-9_-]{1,64}")  # the prefix is trackio's own

Execute = Callable[..., RunSummary]  # runner.execute's form


def is_installed() -> bool:
    """Whether trackio is there; it is not imported."""
    return importlib.util.find_spec("trackio") is not None


def is_usable() -> bool:
    """Whether the page can offer it."""
    with contextlib.suppress(InputError):
        check_project(PAGE_PROJECT)
        return True
    return False


def check_project(project: object) -> None:
    """Refuse a project that could not be logged to.

    Raises:
        InputError: naming `track`: an unfit name, trackio is missing, or it is set up to send.
    """
    if not isinstance(project, str) or not _PROJECT.fullmatch(project):
        raise InputError(
            "track",
            "track must be a project's name of 1 to 64 letters (a to z), digits, - and _, not "
            f"{shown(project)}.",
        )
    if not is_installed():
        raise InputError(
            "track", "track needs the package trackio, which is not installed: pip install trackio"
        )
    if remote := [name for name in _REMOTE if os.environ.get(name)]:
        raise InputError(
            "track", f"track keeps runs on this machine: unset {' and '.join(remote)} first."
        )


def tracked(execute: Execute, project: str) -> Execute:
    """`execute` that also logs the run to trackio's `project`: its settings and every step.

    The summary's last note says where the run went, or that it could not be logged.
    """

    def execute_tracked(
        config: RunConfig, info: Any, *, on_step: Callable[[StepMetrics], None], **given: Any
    ) -> RunSummary:
        tracker = _Tracker(project, config, info.to_dict())

        def on_tracked_step(step: StepMetrics) -> None:
            tracker.step(step)
            on_step(step)

        summary = None
        try:
            summary = execute(config, info, on_step=on_tracked_step, **given)
        finally:
            note = tracker.finish()
        return replace(summary, notes=(*summary.notes, note))

    return execute_tracked


class _Tracker:
    """One run in trackio, and what went wrong with it."""

    def __init__(self, project: str, config: RunConfig, device: dict[str, Any]) -> None:
        self._project = project
        self._run: Any = None
        self._failed = False
        self._rows = 0
        with self._survived(), _offline(), contextlib.redirect_stdout(io.StringIO()):
            import trackio

            self._run = trackio.init(
                project=project,
                name=config.label,
                config=config.to_dict() | {"device_name": device["name"]},
                embed=False,  # opens no page in a notebook
                # threads of their own, which would take their share of the steps
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def step(self, step: StepMetrics) -> None:
        """Log one row; trackio's thread writes it."""
        row = asdict(step)
        number = row.pop("step")  # trackio has its own
        if self._run is not None:
            with self._survived():
                measured = {name: value for name, value in row.items() if value is not None}
                self._run.log(measured, step=number)
                self._rows += 1

    def finish(self) -> str:
        """Wait until everything is written; how it went, in one sentence."""
        with self._survived(), contextlib.redirect_stdout(io.StringIO()):
            if self._run is not None:
                import trackio

                trackio.finish()  # the thread's current run
                kept = self._kept()
                self._failed |= kept is not None and kept < self._rows
        if self._failed or self._run is None:
            return "trackio could not log this run; the log has the details."
        return f"trackio has {self._rows} steps of this run: trackio show --project {self._project}"

    def _kept(self) -> int | None:
        """How many rows really lie in trackio's file; None where this trackio cannot be asked."""
        try:
            from trackio.sqlite_storage import SQLiteStorage
        except ImportError:
            return None
        return len(SQLiteStorage.get_logs(self._project, self._run.name, run_id=self._run.id))

    @contextlib.contextmanager
    def _survived(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            if not self._failed:
                log.exception("trackio failed")
            self._failed = True


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Keep huggingface_hub from the network: trackio asks it who is logged in."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
