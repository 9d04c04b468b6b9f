"""One run in the hub, from the line to its end; pages look at it while its thread fills it."""

import contextvars
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch

from gpt2demo.config import RunConfig
from gpt2demo.device import DeviceInfo
from gpt2demo.records import RunRecord, RunSummary, StepMetrics, timing
from gpt2demo.series import Series
from gpt2demo.train import Progress

_STATES: Final = {"waiting for a GPU": "lending", "compiling": "compiling", "training": "running"}


class StopFlag(Protocol):
    """What tells a run to stop: a threading.Event, or one that other processes see too."""

    def set(self) -> None:
        """Stop after this step."""
        ...

    def is_set(self) -> bool:
        """Whether it was told."""
        ...


@dataclass(kw_only=True, eq=False)
class Run:
    """One run in the hub. `steps` only grows, and only its own thread appends to it."""

    id: str
    owner: str  # a token that only its owner holds
    config: RunConfig
    device: DeviceInfo
    tokens: torch.Tensor | None = None  # an own text, encoded; None = the config names a corpus
    track: str | None = None  # trackio's project; None = the run is not logged there
    steps: list[StepMetrics] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    summary: RunSummary | None = None
    started: float | None = None  # the hub's clock, seconds
    free_bytes: int | None = None  # of the device's memory, when the run started
    series: Series | None = None  # the run is one of several that belong together
    stop_reason: str | None = None
    out_of_time: bool = False  # the server's limit of seconds stopped it
    kept: bool = False  # it is on the board, or being written there
    stop: StopFlag
    # the asking request's: a GPU that is lent is lent to whoever pressed Run
    context: contextvars.Context | None = field(default_factory=contextvars.copy_context)

    @property
    def state(self) -> str:
        """Where the run is: waiting, lending, loading, compiling, running, stopping, or how it
        ended.
        """
        if self.summary:
            return self.summary.state
        if self.started is None:
            return "waiting"
        if self.stop.is_set():
            return "stopping"
        return _STATES.get(self.progress.phase, "loading")

    @property
    def seconds_left(self) -> float | None:
        """The steps to go times the median step; None until one step is measured."""
        measured = timing(self.steps)
        if measured.step_ms_median is None:
            return None
        return (self.config.steps - len(self.steps)) * measured.step_ms_median / 1000

    def record(self, summary: RunSummary | None = None) -> RunRecord:
        """The finished run as it is written; one that has not ended needs a `summary`."""
        summary = summary or self.summary
        assert summary, "the run has not ended"
        return RunRecord(
            config=self.config.to_dict(),
            device=self.device.to_dict(),
            steps=tuple(self.steps),
            summary=summary,
        )
