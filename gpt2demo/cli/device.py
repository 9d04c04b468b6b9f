"""`device`: what this machine is, and what each precision means on it."""

import argparse
import sys
from typing import Any

from gpt2demo.cli.options import add_device_option, add_verb
from gpt2demo.cli.output import Interruption, aligned, gib, say
from gpt2demo.config import RunConfig
from gpt2demo.json_file import strict_json
from gpt2demo.records import jsonable


def add(verbs: Any) -> None:
    """The verb's parser."""
    device = add_verb(
        verbs,
        "device",
        _device,
        help="print what this machine is and what each precision means on it",
        description="Print what this machine is and what each precision means on it.",
        epilog="0 printed, 2 refused input (no such device), 1 anything else",
    )
    device.set_defaults(json=False, device="auto")
    add_device_option(device)
    device.add_argument("--json", action="store_true", help="print JSON")


def _device(args: argparse.Namespace, interruption: Interruption) -> int:
    RunConfig(device=args.device)
    with interruption.deferred():
        from gpt2demo.device import probe_device

    info = probe_device(args.device)
    if args.json:
        say(strict_json(jsonable(info.to_dict())), sys.stdout)
        return 0
    where = info.type if info.index is None else f"{info.type}:{info.index}"
    nvidia = info.type == "cuda" and info.hip_version is None
    absent = "unknown" if nvidia else "none: not an NVIDIA GPU"
    rows = [
        ("device", f"{where}, {info.name or 'name unknown'}"),
        ("memory", f"{gib(info.memory_total_bytes)} total, {gib(info.memory_free_bytes)} free"),
        ("compute capability", info.compute_capability or absent),
        ("driver", info.driver_version or ("none: a CPU" if info.type == "cpu" else "unknown")),
        ("torch", info.torch_version),
    ]
    rows += [("problem", info.problem)] if info.problem else []
    lines = [*aligned(rows), ""]
    lines += aligned([(name, f"{s.status:<13}  {s.reason}") for name, s in info.support.items()])
    say("\n".join(lines), sys.stdout)
    return 0
