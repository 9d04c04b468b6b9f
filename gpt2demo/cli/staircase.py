"""`staircase`: run the lesson's ladder on this device, rung after rung."""

import argparse
from typing import TYPE_CHECKING, Any

from gpt2demo.cli.options import (
    add_device_option,
    add_seed_option,
    add_size_options,
    add_verb,
    given_settings,
)
from gpt2demo.cli.output import Interruption, aligned, put_json, say
from gpt2demo.cli.run import EXIT_OTHER
from gpt2demo.cli.series import run_series, series_output
from gpt2demo.config import RunConfig
from gpt2demo.lesson import RUNGS
from gpt2demo.series import check_measurable
from gpt2demo.staircase import WHERE, Staircase
from gpt2demo.staircase_report import staircase_report

if TYPE_CHECKING:
    from gpt2demo.device import DeviceInfo


def add(verbs: Any) -> None:
    """The verb's parser."""
    plain = RunConfig()
    parser = add_verb(
        verbs,
        "staircase",
        _staircase,
        help="run the lesson's ladder from fp32 to fused AdamW, rung after rung",
        description=(
            "Train the same steps seven times, each run with one change more: "
            f"{', '.join(rung.name for rung in RUNGS)}."
        ),
        epilog="0 the staircase came to its end, 2 refused input, 130 interrupted (what\n  was "
        "measured is still written), 1 anything else",
    )
    parser.set_defaults(json=None)
    add_size_options(parser, plain)
    add_seed_option(parser, plain)
    add_device_option(parser)
    parser.add_argument(
        "--json", metavar="FILE", help="write the rungs here; - is stdout, with the log on stderr"
    )


def _staircase(args: argparse.Namespace, interruption: Interruption) -> int:
    # refused before anything is imported
    check_measurable(RunConfig(**{"steps": 20} | given_settings(args)), WHERE)

    def begin(config: RunConfig, info: "DeviceInfo") -> Staircase:
        from gpt2demo.runner import check_device

        check_device(config, info)
        return Staircase(config, info.support)

    staircase, info, status = run_series(
        args, interruption, begin, lambda run: run.label, staircase_report
    )
    report = staircase_report(info, staircase)
    if status == 0 and not any(rung["step_ms_median"] for rung in report["rungs"]):
        status = EXIT_OTHER
    if args.json is not None:
        put_json(args.json, report)
    rows = [("staircase", staircase.message or "The staircase was interrupted.")]
    rows += [(rung["name"], _line(rung)) for rung in report["rungs"]]
    say("\n".join(["", *aligned(rows)]), series_output(args))
    return status


def _line(rung: dict[str, Any]) -> str:
    """ "84.2 ms a step, 1.31x against fp32 (lesson 3.00x). <the note>"."""
    mark = f"{rung['mark']} here: " if rung["mark"] else ""
    if rung["step_ms_median"] is None:
        return f"{rung['state']}. {mark}{rung['note']}"
    against = ""
    if rung["speedup_first"] is not None:
        against = (
            f", {rung['speedup_first']:.2f}x against fp32 "
            f"(lesson {rung['lesson_speedup_first']:.2f}x)"
        )
    return f"{rung['step_ms_median']:,.2f} ms a step{against}. {mark}{rung['note']}"
