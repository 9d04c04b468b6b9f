"""`inside`: one training step from inside: where its time goes, what is cast, its numbers."""

import argparse
import sys
from typing import Any

from gpt2demo.cli.options import (
    add_device_option,
    add_seed_option,
    add_step_options,
    add_verb,
    given_settings,
)
from gpt2demo.cli.output import Interruption, aligned, put_json, say, table
from gpt2demo.cli.run import EXIT_OTHER, EXIT_STATUS
from gpt2demo.config import RunConfig, default_sizes
from gpt2demo.inside_words import cast_words, clock_words, headline, time_words, value_words
from gpt2demo.inspection import Inspection
from gpt2demo.json_file import check_json_path


def add(verbs: Any) -> None:
    """The verb's parser."""
    plain = RunConfig()
    parser = add_verb(
        verbs,
        "inside",
        _inside,
        help="profile one step: its time by part, what autocast casts, how large its numbers are",
        description=(
            "Train a few steps on the built-in text and look into them: seconds by part, matmuls "
            "and tensor cores, the types of every operation, and what each number format would "
            "lose of weights, activations and gradients."
        ),
        epilog="0 printed, 2 refused input, 3 out of memory, 4 diverged, 130 interrupted, "
        "1 anything else",
    )
    parser.set_defaults(json=None)
    add_step_options(parser, plain, loop=False)
    add_seed_option(parser, plain)
    add_device_option(parser)
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="write JSON here (default -: stdout)"
    )


def _inside(args: argparse.Namespace, interruption: Interruption) -> int:
    given = given_settings(args)
    RunConfig(**given)  # refused before anything is imported
    if args.json not in (None, "-"):
        check_json_path(args.json)
    with interruption.deferred():
        from gpt2demo.device import probe_device, resolve_device
        from gpt2demo.inside import inspect_step

    device = resolve_device(given.get("device", "auto"))
    config = RunConfig(**default_sizes(device.type) | given | {"device": str(device)})
    found = inspect_step(
        config,
        probe_device(str(device)),
        stop_reason=lambda: "interrupted" if interruption.received else None,
    )
    if interruption.received:  # a run takes the interruption itself, as one of its endings
        raise KeyboardInterrupt
    if args.json is not None:
        put_json(args.json, found.to_dict())
    if args.json != "-":
        say("\n".join(_lines(found)), sys.stdout)
    return EXIT_STATUS.get(found.state, EXIT_OTHER)


def _lines(found: Inspection) -> list[str]:
    sections = [[headline(found), *found.notes], list(time_words(found))]
    if found.profile:
        whole = found.profile.step_seconds
        rows = [
            (part, f"{seconds * 1000:>12,.2f} ms  {seconds / whole:>6.1%}")
            for part, seconds in found.profile.parts.items()
        ]
        sections.append(aligned(rows))
    sections += [[clock_words(found, found.device_type)], list(cast_words(found))]
    if found.casts:
        rows = [("where", "operation", "input", "weight", "computes in", "output", "times")]
        rows += [
            (
                *(c.where, c.operation, " + ".join(c.inputs), c.weight or "-", c.compute),
                *(c.output, str(c.times)),
            )
            for c in found.casts.operations
        ]
        sections.append(table(rows))
    sections.append(list(value_words(found)))
    told = ["\n".join(filter(None, section)) for section in sections]
    return "\n\n".join(filter(None, told)).split("\n")
