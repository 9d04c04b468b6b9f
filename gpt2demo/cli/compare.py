"""`compare`: race several precisions, and say why each was as fast as it was."""

import argparse
import sys
from dataclasses import fields
from typing import Any

from gpt2demo.cli.options import add_device_option, add_step_options, add_verb, number
from gpt2demo.cli.output import Interruption, aligned, put_json, say
from gpt2demo.cli.run import EXIT_INTERRUPTED, EXIT_OTHER
from gpt2demo.config import RunConfig, default_sizes
from gpt2demo.json_file import check_json_path
from gpt2demo.race import MAX_ROUNDS, Race
from gpt2demo.race_report import race_report
from gpt2demo.records import RunRecord, StepMetrics

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
    names = {f.name for f in fields(RunConfig)}
    given = {name: value for name, value in vars(args).items() if name in names}
    precisions = [name.strip() for name in args.precisions.split(",")]
    # refused before anything is imported
    Race(RunConfig(**{"steps": 20} | given), precisions, args.rounds)
    if args.json not in (None, "-"):
        check_json_path(args.json)
    with interruption.deferred():
        from gpt2demo.device import probe_device, resolve_device
        from gpt2demo.runner import execute

    device = resolve_device(given.get("device", "auto"))
    info = probe_device(str(device))
    config = RunConfig(**default_sizes(device.type) | given | {"device": str(device)})
    race = Race(config, precisions, args.rounds)
    race.leave_out_missing(info.support)
    out = sys.stderr if args.json == "-" else sys.stdout
    status = 0
    try:
        while run := race.next_run():
            steps: list[StepMetrics] = []
            summary = execute(run, info, on_step=steps.append)
            race.ended(
                RunRecord(
                    config=run.to_dict(),
                    device=info.to_dict(),
                    steps=tuple(steps),
                    summary=summary,
                )
            )
            ms = "not measured"
            if summary.step_ms_median is not None:
                ms = f"{summary.step_ms_median:,.2f} ms a step"
            say(f"{run.precision}: {ms}. {summary.message}", out)
            if interruption.received or summary.state == "interrupted":
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    interruption.held = True
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
    say("\n".join(["", *aligned(rows)]), out)
    return status
