"""How long a run and its series will still take: what the waits in the line are told from."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Final

from gpt2demo.config import RunConfig
from gpt2demo.records import RunSummary
from gpt2demo.run import Run

# what a step's time does not hang on; one server's runs are all on one device
_NO_MATTER: Final = ("steps", "seed", "lr", "text", "device")
_MATTERS: Final = [f.name for f in fields(RunConfig) if f.name not in _NO_MATTER]

Paces = Mapping[tuple[Any, ...], RunSummary]  # what a step's time hangs on -> the last such run


def alike(config: RunConfig) -> tuple[Any, ...]:
    """What two runs share whose steps take equally long on one device."""
    return tuple(getattr(config, name) for name in _MATTERS)


def paces(ended: Iterable[Run]) -> Paces:
    """What each kind of run took: of all that have ended, the last one at the end."""
    return {
        alike(run.config): run.summary
        for run in ended
        if run.summary and run.summary.step_ms_median is not None
    }


def seconds_to_go(run: Run, known: Paces, most: float) -> float | None:
    """Seconds until a run is over, with all runs of its series that follow it.

    A running run's come from its own steps, any other's from an equal run before it: all that one
    took, more or less the steps that it differs by.

    Args:
        run: one that runs or waits.
        known: what runs before it took.
        most: how many seconds a run may take.

    Returns:
        None while a part of it is not known.
    """
    after = run.series.runs_after() if run.series else ()
    if after is None:
        return None
    own = run.seconds_left
    parts = [_whole(run.config, known) if own is None else own]
    parts += [_whole(config, known) for config in after]
    return None if None in parts else sum(min(part, most) for part in parts)


def _whole(config: RunConfig, known: Paces) -> float | None:
    """All of a run that has not started."""
    summary = known.get(alike(config))
    if summary is None:
        return None
    more = config.steps - summary.steps_done
    return max(summary.seconds + more * summary.step_ms_median / 1000, 0.0)
