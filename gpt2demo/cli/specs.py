"""`specs`: the table of GPUs that MFU and the verdicts use, with this machine's row marked."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from gpt2demo.cli.options import add_device_option, add_verb
from gpt2demo.cli.output import Interruption, say, table
from gpt2demo.config import PRECISIONS, RunConfig
from gpt2demo.json_file import strict_json
from gpt2demo.peaks import GpuSpec, all_gpus, find_gpu


def add(verbs: Any) -> None:
    """The verb's parser."""
    parser = add_verb(
        verbs,
        "specs",
        _specs,
        help="print dense peaks, memory and bandwidth of GPUs, this machine's row marked",
        description=(
            "Print the table of GPUs that MFU and the verdicts use: dense TFLOP/s by precision, "
            "memory, bandwidth; this machine's row is marked, and an unknown figure is blank."
        ),
        epilog="0 printed, 2 refused input (no such device), 1 anything else",
    )
    parser.set_defaults(json=False, device="auto")
    add_device_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, with every row's sources")


def _specs(args: argparse.Namespace, interruption: Interruption) -> int:
    RunConfig(device=args.device)
    with interruption.deferred():
        from gpt2demo.device import probe_device

    info = probe_device(args.device)
    here = find_gpu(info.name, info.memory_total_bytes)
    if args.json:
        rows = [spec.to_dict() | {"this_machine": spec is here} for spec in all_gpus()]
        say(strict_json({"device": info.name, "gpus": rows}), sys.stdout)
        return 0
    name = info.name or "name unknown"
    said = f"{name}: marked with *" if here else f"{name}: not in the table"
    lines = [f"This machine: {said}.", "Peaks are dense TFLOP/s; blank = unknown.", ""]
    say("\n".join([*lines, *_lines(all_gpus(), here)]), sys.stdout)
    return 0


def _lines(specs: Sequence[GpuSpec], here: GpuSpec | None) -> list[str]:
    rows = [["", "GPU", *PRECISIONS, "GiB", "GB/s"]]
    for spec in specs:
        told = spec.to_dict()
        figures = [*told["dense_tflops"].values(), told["memory_gib"], told["bandwidth_gb_per_sec"]]
        cells = ["" if figure is None else f"{figure:g}" for figure in figures]
        rows.append(["*" if spec is here else "", spec.display_name, *cells])
    return table(rows, left=2)
