"""The options that verbs share."""

import argparse
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from gpt2demo.config import (
    ATTENTIONS,
    MAX_B,
    MAX_SEED,
    MAX_STEPS,
    MODELS,
    OPTIMIZERS,
    PRECISIONS,
    VOCAB_SIZES,
    RunConfig,
    default_sizes,
)


def add_verb(
    verbs: Any, name: str, verb: Callable[..., int], *, help: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    """A verb's parser; `verb` is its function. An option that is not given is not there."""
    parser = verbs.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"exit status:\n  {epilog}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.set_defaults(verb=verb)
    return parser


def choice(values: Sequence[object], default: object) -> str:
    """The help of an option with these values."""
    return f"{', '.join(map(str, values))} (default {default})"


def add_size_options(
    parser: argparse.ArgumentParser, plain: RunConfig, *, loop: bool = True
) -> None:
    """The options that say how large a step is and, with `loop`, how many there are."""
    cpu, gpu = default_sizes("cpu"), default_sizes("cuda")
    longest = max(gpt.block_size for gpt in MODELS.values())

    def size(name: str, most: int) -> str:
        elsewhere = "" if cpu[name] == gpu[name] else f" on a CPU, {gpu[name]:,} elsewhere"
        return f"1 to {most:,} (default {cpu[name]:,}{elsewhere})"

    parser.add_argument("--model", metavar="NAME", help=choice(tuple(MODELS), plain.model))
    sizes = {
        "B": ("-B", "--batch-size", "sequences a step, " + size("B", MAX_B)),
        "T": ("-T", "--seq-len", "tokens a sequence, " + size("T", longest)),
    }
    for name, (short, long, text) in sizes.items():
        parser.add_argument(short, long, dest=name, metavar="N", type=number, help=text)
    if loop:
        parser.add_argument("--steps", metavar="N", type=number, help=size("steps", MAX_STEPS))


def add_step_options(
    parser: argparse.ArgumentParser, plain: RunConfig, *, precision: bool = True, loop: bool = True
) -> None:
    """The options that say what a step is: model, sizes, precision, and how it is computed.

    `loop`: those of many steps too, their number and torch.compile.
    """
    add_size_options(parser, plain, loop=loop)
    if precision:
        parser.add_argument("--precision", metavar="ID", help=choice(PRECISIONS, plain.precision))
    parser.add_argument("--attention", metavar="KIND", help=choice(ATTENTIONS, plain.attention))
    parser.add_argument("--optimizer", metavar="KIND", help=choice(OPTIMIZERS, plain.optimizer))
    if loop:
        parser.add_argument(
            "--compile",
            action=argparse.BooleanOptionalAction,
            help="use torch.compile (default no)",
        )
    parser.add_argument(
        "--vocab-size", metavar="N", type=number, help=choice(VOCAB_SIZES, plain.vocab_size)
    )


def add_seed_option(parser: argparse.ArgumentParser, plain: RunConfig) -> None:
    """The option that names the seed of the weights."""
    parser.add_argument(
        "--seed", metavar="N", type=number, help=f"0 to {MAX_SEED:,} (default {plain.seed})"
    )


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of a run that were given."""
    names = {f.name for f in fields(RunConfig)}
    return {name: value for name, value in vars(args).items() if name in names}


def number(text: str) -> int | float | str:
    """The number that was typed; what is none stays a text, for RunConfig to refuse by name."""
    if "_" not in text:  # Python takes 1_000 for a number
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(text)
    return text


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """The option that names the device."""
    parser.add_argument(
        "--device", metavar="NAME", help="auto, cpu, cuda, cuda:N, mps, xpu, xpu:N (default auto)"
    )
