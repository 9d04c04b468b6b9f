"""`memory`: the forecast of a run's peak memory; nothing runs, and torch is not needed."""

import argparse
import sys
from typing import Any

from gpt2demo.cli.options import (
    add_device_option,
    add_step_options,
    add_verb,
    given_settings,
    number,
)
from gpt2demo.cli.output import Interruption, aligned, gib, put_json, say
from gpt2demo.config import RunConfig, default_sizes
from gpt2demo.fit import Capacity, card, fit_map
from gpt2demo.fit_words import PART_NAMES, compare_words, report
from gpt2demo.json_file import check_json_path

_MARKS = {"fits": ".", "may fail": "?", "will not fit": "#", "unknown": " "}


def add(verbs: Any) -> None:
    """The verb's parser."""
    parser = add_verb(
        verbs,
        "memory",
        _memory,
        help="forecast the peak memory of a run, part by part, and say whether it fits",
        description="Forecast the peak memory of a run from its settings alone; nothing runs.",
        epilog="0 printed, 2 refused input, 1 anything else",
    )
    parser.set_defaults(json=None, map=False, capacity_gib=None)
    add_step_options(parser, RunConfig())
    parser.add_argument(
        "--capacity-gib",
        metavar="X",
        type=number,
        help="the memory of a CUDA card, 0.25 to 1,024 (default: what --device has free)",
    )
    add_device_option(parser)
    parser.add_argument("--map", action="store_true", help="forecast the whole grid of B and T too")
    parser.add_argument("--json", metavar="FILE", help="write JSON here; - is stdout")


def _memory(args: argparse.Namespace, interruption: Interruption) -> int:
    given = given_settings(args)
    RunConfig(**given)  # refused before anything is imported
    if args.json not in (None, "-"):
        check_json_path(args.json)
    if args.capacity_gib is not None:
        capacity, device_type = card(args.capacity_gib), "cuda"
        config = RunConfig(**default_sizes(device_type) | given)
    else:
        config, capacity = _here(given, interruption)
    told = report(config, capacity)
    grid = fit_map(config, capacity) if args.map else None
    data = told | {"config": config.to_dict()} | ({"map": grid} if grid else {})
    if args.json is not None:
        put_json(args.json, data)
    if args.json == "-":
        return 0
    rows = [
        ("verdict", f"{told['verdict']}, {gib(told['capacity_bytes'])} to be had"),
        ("peak", f"{gib(told['peak_bytes'])} ({told['phase']})"),
        *((PART_NAMES[name], gib(count)) for name, count in told["parts"].items() if count),
        ("advice", told["sentence"]),
        ("bf16", compare_words(config, capacity)),
        ("basis", told["basis"]),
    ]
    lines = aligned(rows)
    if grid:
        lines += ["", "B down, T across: . fits  ? may fail  # will not fit", *_drawn(grid)]
    say("\n".join(lines), sys.stdout)
    return 0


def _here(given: dict[str, Any], interruption: Interruption) -> tuple[RunConfig, Capacity]:
    """The run on this machine's device, and the memory that is free there."""
    with interruption.deferred():
        from gpt2demo.device import probe_device, resolve_device
        from gpt2demo.runner import capacity_now

    device = resolve_device(given.get("device", "auto"))
    config = RunConfig(**default_sizes(device.type) | given | {"device": str(device)})
    return config, capacity_now(config, probe_device(str(device)), device)


def _drawn(grid: dict[str, Any]) -> list[str]:
    lines = [" " * 5 + "".join(f"{T:>5}" for T in grid["T"])]
    for B, row in reversed(list(zip(grid["B"], grid["verdict"], strict=True))):
        lines.append(f"{B:>5}" + "".join(f"{_MARKS[verdict]:>5}" for verdict in row))
    return lines
