"""The command line: the same runs and figures without a browser. Each verb is one module.

Torch takes seconds to import, so only a verb that needs it does: help and refusals come at once.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Final

from gpt2demo.cli import (
    bits,
    compare,
    device,
    inside,
    memory,
    probe,
    run,
    serve,
    specs,
    staircase,
)
from gpt2demo.cli.output import Interruption, OutputLostError, say
from gpt2demo.cli.processes import MeetingError
from gpt2demo.cli.run import EXIT_INTERRUPTED, EXIT_OTHER
from gpt2demo.config import InputError
from gpt2demo.ranks import check_alone, first_to_speak

EXIT_REFUSED: Final = 2

__all__ = ["Interruption", "build_parser", "main"]


def main(argv: Sequence[str] | None = None, interruption: Interruption | None = None) -> int:
    """Run one command line, `argv` without the program's name; its exit status comes back.

    Raises:
        SystemExit: argparse's own, after --help (0) and an unknown or incomplete option (2).
    """
    args = build_parser().parse_args(argv)
    speaks = first_to_speak()
    try:
        if args.name != "run":
            check_alone(args.name)
        return args.verb(args, interruption or Interruption())
    except InputError as exc:
        refusal, status = str(exc), EXIT_REFUSED
    except KeyboardInterrupt:
        refusal, status = "Interrupted; nothing was measured.", EXIT_INTERRUPTED
    except OutputLostError as exc:
        refusal, status = str(exc), EXIT_OTHER
    except MeetingError as exc:  # process 0 may be the one that is not there
        refusal, status, speaks = str(exc), EXIT_OTHER, True
    if refusal and speaks:
        with contextlib.suppress(OutputLostError):
            say(f"gpt2demo: {refusal}", sys.stderr)
    return status


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs; `args.verb` is the verb's function."""
    parser = argparse.ArgumentParser(
        prog="gpt2demo" if os.path.basename(sys.argv[0]) == "gpt2demo" else "python -m gpt2demo",
        description="Train GPT-2 and see what a precision buys on this machine.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB", dest="name")
    for verb in (run, compare, staircase, probe, inside, memory, device, bits, specs, serve):
        verb.add(verbs)
    return parser
