"""Runs that belong together, one after the other in this process, as `compare` and `staircase`
want them.
"""

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from gpt2demo.cli.options import given_settings
from gpt2demo.cli.output import Interruption, put_json, say
from gpt2demo.cli.run import EXIT_INTERRUPTED
from gpt2demo.config import RunConfig, default_sizes
from gpt2demo.json_file import check_json_path
from gpt2demo.records import RunRecord, RunSummary, StepMetrics
from gpt2demo.series import Series

if TYPE_CHECKING:
    from gpt2demo.device import DeviceInfo


_Series = TypeVar("_Series", bound=Series)


def run_series(
    args: argparse.Namespace,
    interruption: Interruption,
    begin: Callable[[RunConfig, "DeviceInfo"], _Series],
    name: Callable[[RunConfig], str],
    report: Callable[["DeviceInfo", _Series], dict[str, Any]],
) -> tuple[_Series, "DeviceInfo", int]:
    """Run a whole series on the device that `args` name, and print a line after every run.

    Args:
        args: the verb's; --json of theirs is looked at before anything is imported.
        interruption: a signal ends the series; what was measured is in it.
        begin: makes the series of the settings and the device.
        name: what a run's line begins with.
        report: the series as --json writes it; also where a signal finds this thread in a step.

    Returns:
        the series, the device, and 0, or 130 where it was interrupted.

    Raises:
        InputError: a setting, the device or the file was refused.
    """
    if args.json not in (None, "-"):
        check_json_path(args.json)
    with interruption.deferred():
        from gpt2demo.device import probe_device, resolve_device
        from gpt2demo.runner import execute

    given = given_settings(args)
    device = resolve_device(given.get("device", "auto"))
    info = probe_device(str(device))
    config = RunConfig(**default_sizes(device.type) | given | {"device": str(device)})
    series = begin(config, info)
    if args.json is not None:
        interruption.last_words = lambda: put_json(args.json, report(info, series))
    out, status = series_output(args), 0
    try:
        while run := series.next_run():
            steps: list[StepMetrics] = []
            summary = execute(run, info, on_step=steps.append)
            series.ended(
                RunRecord(
                    config=run.to_dict(),
                    device=info.to_dict(),
                    steps=tuple(steps),
                    summary=summary,
                )
            )
            say(f"{name(run)}: {_ms(summary)}. {' '.join([summary.message, *summary.notes])}", out)
            if interruption.received or summary.state == "interrupted":
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    interruption.held = True
    return series, info, status


def series_output(args: argparse.Namespace) -> TextIO | None:
    """Where the lines go: stderr where stdout is the JSON's."""
    return sys.stderr if args.json == "-" else sys.stdout


def _ms(summary: RunSummary) -> str:
    ms = summary.step_ms_median
    return "not measured" if ms is None else f"{ms:,.2f} ms a step"
