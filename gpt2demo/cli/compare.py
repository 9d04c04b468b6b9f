"""`compare`: race several precisions, and say why each was as fast as it was."""

import argparse
from typing import TYPE_CHECKING, Any

from gpt2demo.cli.options import (
    add_device_option,
    add_step_options,
    add_verb,
    given_settings,
    number,
)
from gpt2demo.cli.output import Interruption, aligned, put_json, say
from gpt2demo.cli.run import EXIT_OTHER
from gpt2demo.cli.series import run_series, series_output
from gpt2demo.config import RunConfig
from gpt2demo.race import MAX_ROUNDS, Race
from gpt2demo.race_report import race_report

if TYPE_CHECKING:
    from gpt2demo.device import DeviceInfo

_PRECISIONS = "fp32,tf32,bf16"


def add(verbs: Any) -> None:
    """The verb's parser."""
    parser = add_verb(
        verbs,
        "compare",
        _compare,
        help="race several precisions and say why each was as fast as it was",
        description="Train the same steps in several precisions, one run after the other.",
        epilog="0 the race came to its end, 2 refused input, 130 interrupted (what "
        "was measured is\n  still written), 1 anything else",
    )
    parser.set_defaults(json=None, rounds=1, precisions=_PRECISIONS)
    parser.add_argument(
        "--precisions", metavar="LIST", help=f"ids with commas between (default {_PRECISIONS})"
    )
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=number,
        help=f"1 to {MAX_ROUNDS} (default 1): every round runs every precision, in turning order",
    )
    add_step_options(parser, RunConfig(), precision=False)
    add_device_option(parser)
    parser.add_argument(
        "--json", metavar="FILE", help="write the race here; - is stdout, with the log on stderr"
    )


def _compare(args: argparse.Namespace, interruption: Interruption) -> int:
    precisions = [name.strip() for name in args.precisions.split(",")]
    # refused before anything is imported
    Race(RunConfig(**{"steps": 20} | given_settings(args)), precisions, args.rounds)

    def begin(config: RunConfig, info: "DeviceInfo") -> Race:
        race = Race(config, precisions, args.rounds)
        race.leave_out_missing(info.support)
        return race

    race, info, status = run_series(
        args, interruption, begin, lambda run: run.precision, race_report
    )
    report = race_report(info, race)
    if status == 0 and not any(r["step_ms_median"] for r in report["results"].values()):
        status = EXIT_OTHER
    if args.json is not None:
        put_json(args.json, report)
    rows = [("race", race.message or "The race was interrupted.")]
    rows += [
        (precision, f"{verdict['cause']}: {verdict['words']}")
        for precision, verdict in report["verdicts"].items()
    ]
    say("\n".join(["", *aligned(rows)]), series_output(args))
    return status
