"""What one open page is told: a snapshot first, then only what is new.

A `Feed` looks at the hub, never changes it, and turns what it sees into the live view's messages.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gpt2demo.charts import DRAWN_CURVES, delta_rows, run_curve
from gpt2demo.flops import flops_per_token, mfu
from gpt2demo.hub import Hub
from gpt2demo.memory import forecast
from gpt2demo.peaks import peak_flops
from gpt2demo.records import Timing, timing
from gpt2demo.run import Run
from gpt2demo.ui.live import changes, message

_GIB = 2**30
_DOING = {
    "loading": "Loading the text and building the model.",
    "lending": "Waiting for a GPU.",
    "compiling": "Compiling. These seconds are not counted as a step.",
    "stopping": "Stopping after this step.",
}


class Feed:
    """The messages for one page. `owner` decides what "mine" means; `pages`: how many are open."""

    def __init__(self, hub: Hub, owner: str, pages: Callable[[], int] = lambda: 1) -> None:
        self._hub = hub
        self._owner = owner
        self._pages = pages
        self._run: Run | None = None  # the one whose rows are being sent
        self._sent = 0  # of its steps
        self._known: set[str] = set()  # runs that were sent to their end
        self._drawn: list[str] = []  # finished curves on the page, oldest first
        self._status: dict[str, Any] | None = None
        self._tiles: dict[str, Any] | None = None

    def snapshot(self) -> str:
        """Everything there is; the first message of every stream."""
        finished = list(self._hub.finished)
        self._known = {run.id for run in finished}
        shown = [run for run in finished if run.steps][1 - DRAWN_CURVES :]
        self._drawn = [run.id for run in shown]
        run = self._hub.current
        self._run = run if run and run.id not in self._known else None
        curves = [run_curve(run.id, run.config, run.steps, live=False) for run in shown]
        self._sent = 0
        if self._run:
            self._sent = len(self._run.steps)
            steps = self._run.steps[: self._sent]
            curves.append(run_curve(self._run.id, self._run.config, steps, live=True))
        self._status = self.status()
        self._tiles = self.figures()
        return message(reset=True, runs=curves, status=self._status, tiles=self._tiles)

    def news(self) -> str | None:
        """What is new since the last message, or None."""
        parts: dict[str, Any] = {}
        if self._run is None and (run := self._next_run()):
            self._run, self._sent = run, 0
            parts["start"] = run_curve(run.id, run.config, [], live=True)
        if run := self._run:
            ended = run.summary  # read before the steps: after it there are no more of them
            count = len(run.steps)
            if count > self._sent and "start" not in parts:  # in the next one: messages stay small
                parts["rows"] = (run.id, delta_rows(run.steps[:count], self._sent))
                self._sent = count
            if ended and self._sent == count:
                parts["end"] = (run.id, ended.state)
                parts["drop"] = self._finish(run)
        status, tiles = self.status(), self.figures()
        if changed := changes(self._status, status):
            parts["status"] = changed
        if changed := changes(self._tiles, tiles):
            parts["tiles"] = changed
        self._status, self._tiles = status, tiles
        return message(partial=True, **parts) if parts else None

    def status(self) -> dict[str, Any]:
        """The status line: what goes on, how far it is, and the viewer's own place in the line."""
        hub, run = self._hub, self._shown_run()
        status: dict[str, Any] = {
            "line": self._line(),
            "mine": bool(run and run.owner == self._owner),
            "page": self._page(),
            "stop": bool(hub.mine(self._owner)),
            "room": 1 << (self._pages() - 1).bit_length(),  # a power of two changes seldom
        }
        if hub.measuring and not (run and run.summary is None):
            nothing = {"done": 0, "steps": 0, "left_s": None}
            return status | {"state": "measuring", "text": hub.measuring} | nothing
        if run is None:
            waits = bool(hub.waiting)
            return status | {"state": "waiting" if waits else "idle", "text": "Ready.", "done": 0}
        state = run.state
        if run.summary:
            found = run.series.message if run.series else ""
            text = " ".join(filter(None, [run.summary.message, *run.summary.notes, found]))
        else:
            text = _DOING.get(state, f"Training: {run.config.label}.")
            if run.series and state == "running":
                text = f"{run.series.doing}. {text}"
        left = None if run.summary else run.seconds_left
        return status | {
            "state": state,
            "text": text,
            "done": len(run.steps),
            "steps": run.config.steps,
            "left_s": left if left is None else round(left, 1),
        }

    def _next_run(self) -> Run | None:
        """The oldest run that this page has not seen the end of."""
        current = self._hub.current
        runs = [*self._hub.finished, *([current] if current else [])]
        return next((run for run in runs if run.id not in self._known), None)

    def _finish(self, run: Run) -> list[str]:
        """Note that the page has all of `run`; returns the curves that make room for it."""
        self._run = None
        self._known = {r.id for r in self._hub.finished if r.id in self._known} | {run.id}
        if not run.steps:
            return [run.id]  # nothing of it was drawn
        self._drawn.append(run.id)
        dropped = self._drawn[: 1 - DRAWN_CURVES]
        self._drawn = self._drawn[1 - DRAWN_CURVES :]
        return dropped

    def _shown_run(self) -> Run | None:
        """The run that status and tiles speak of: the one going on, else the last one."""
        current = self._hub.current
        return self._run or current or (self._hub.finished[-1] if self._hub.finished else None)

    def _page(self) -> str:
        """Changes whenever the page around the live view does: the tables, the device, what was
        probed. A run's start counts only where it hides a failure, or a series tells of it: at
        every change a room of pages asks for all of it.
        """
        hub = self._hub
        current, failed = hub.current, hub.failure()
        shown = (
            failed.id if failed else "",
            current.id if current and current.series else "",
            hub.finished[-1].id if hub.finished else "",
            *(hub.device_info.name or "", hub.probes, hub.board.imports),
        )
        return "/".join(map(str, shown))

    def _line(self) -> str | None:
        """The viewer's place in the line, or how many wait."""
        for run in self._hub.mine(self._owner):
            if line := waiting_line(self._hub, run):
                return line
        count = len(self._hub.waiting)
        return f"{count} in line" if count else None

    def figures(self) -> dict[str, Any] | None:
        """The headline figures; None before the first run."""
        run = self._shown_run()
        return None if run is None else _tiles(run, len(run.steps))


def sight(hub: Hub) -> tuple[Any, ...]:
    """What all news comes from: while it stays equal, no page that is up to date has any."""
    nobody = Feed(hub, "")
    line = [(run.id, hub.wait_seconds(run)) for run in list(hub.waiting)]
    return nobody.status(), nobody.figures(), line


def waiting_line(hub: Hub, run: Run) -> str | None:
    """ "2nd in line, about 40 s"; None once the run has left the line."""
    place = hub.place(run)
    return f"{ordinal(place)} in line{_about(hub.wait_seconds(run))}" if place else None


def ordinal(place: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th, 21st."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place}{'th' if place % 100 in (11, 12, 13) else ending}"


def _about(seconds: float | None) -> str:
    if seconds is None:
        return ", time not known yet"
    if seconds < 90:
        return f", about {math.ceil(seconds)} s"
    return f", about {math.ceil(seconds / 60)} min"


@functools.lru_cache(maxsize=4)
def _timing(run: Run, count: int) -> Timing:
    """The run's figures after `count` steps; all pages ask for the same ones."""
    return timing(run.steps[:count])


@functools.lru_cache(maxsize=8)
def _forecast_bytes(run: Run, count: int) -> int:
    """What torch's counter, or the tracker, should read after `count` steps."""
    config = replace(run.config, steps=min(max(count, 1), run.config.steps, 2))
    capability = run.device.compute_capability
    told = forecast(config, run.device.type, compute_capability=capability)
    return told.parts.allocated


def _tiles(run: Run, count: int) -> dict[str, Any]:
    measured = _timing(run, count)
    last = run.steps[count - 1] if count else None
    device, config = run.device, run.config
    speed = measured.tokens_per_sec_median
    peak = peak_flops(device.name, device.memory_total_bytes, config.precision)
    share = mfu(flops_per_token(config.gpt, config.T), speed, peak)
    memory = last.peak_memory_bytes if last else None
    told = _forecast_bytes(run, min(count, 2))
    mem_note = f"forecast {told / _GIB:.2f} GiB"
    if memory is not None:
        mem_note += f" ({(told - memory) / memory:+.1%})"
    else:
        mem_note += "; not counted" if device.type == "cpu" else "; no counter here"
    if peak is not None:
        mfu_note = f"of {peak / 1e12:.4g} TFLOP/s" if share is not None else ""
    else:
        mfu_note = f"no peak known for {config.precision} on this {_kind(device.type)}"
    return {
        "ms": measured.step_ms_median,
        "p25": measured.step_ms_p25,
        "p75": measured.step_ms_p75,
        "tps": speed,
        "loss": last.loss if last and math.isfinite(last.loss) else None,
        "mem_gib": None if memory is None else memory / _GIB,
        "mem_note": mem_note if last else "",
        "mfu": share,
        "mfu_note": mfu_note,
        "warmup": speed is None and run.summary is None,
    }


def _kind(device_type: str) -> str:
    return "CPU" if device_type == "cpu" else "device"
