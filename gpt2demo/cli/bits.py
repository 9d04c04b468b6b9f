"""`bits`: a number bit by bit in every format; neither torch nor a device is needed."""

import argparse
import sys
from typing import Any

from gpt2demo.cli.options import add_verb
from gpt2demo.cli.output import Interruption, aligned, say
from gpt2demo.formats import FORMATS, bits_report
from gpt2demo.json_file import strict_json


def add(verbs: Any) -> None:
    """The verb's parser."""
    parser = add_verb(
        verbs,
        "bits",
        _bits,
        help="show a number bit by bit in fp64, fp32, TF32, bf16, fp16 and int8",
        description=(
            "Show a number bit by bit in every format: its value there, the error, the gap to the "
            "next number, and the range."
        ),
        epilog="0 printed, 2 refused input, 1 anything else",
    )
    parser.set_defaults(json=False, largest="1")
    parser.add_argument(
        "number",
        metavar="NUMBER",
        help="0.1, 1e-8, 1/3, 0x1p-3, inf, nan; a negative one after --, as in: bits -- -1e-8",
    )
    parser.add_argument(
        "--int8-largest",
        dest="largest",
        metavar="X",
        help="the largest value of the tensor that int8 is scaled for (default 1)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _bits(args: argparse.Namespace, interruption: Interruption) -> int:
    told = bits_report(args.number, args.largest)
    if args.json:
        say(strict_json(told), sys.stdout)
        return 0
    lines = []
    for name, held in told["formats"].items():
        bits = " ".join(filter(None, (held["sign"], held["exponent"], held["mantissa"])))
        rows = [
            ("bits", bits or "none"),
            ("value", f"{held['value_text']} ({held['state']})"),
            ("error", _error(held)),
            ("gap", _figure(held["gap"], "none")),
            ("range", _range(held)),
        ]
        title = FORMATS[name].name if name in FORMATS else name
        lines += [title, *(f"  {line}" for line in aligned(rows))]
    say("\n".join(lines), sys.stdout)
    return 0


def _error(held: dict[str, Any]) -> str:
    if held["relative_error"] is None:
        return _figure(held["error"], "none: no finite difference")
    error = _figure(held["error"], "smaller than a float64 can hold")
    share = held["relative_error"]
    return f"{error} ({'all' if share == 1 else f'{share:.3g}'} of the number)"


def _range(held: dict[str, Any]) -> str:
    if held["smallest_normal"] is None:
        return f"-{held['largest']:.6g} to {held['largest']:.6g}, evenly spaced"
    return (
        f"{held['smallest_subnormal']:.3g} (subnormal), {held['smallest_normal']:.3g} (normal) "
        f"to {held['largest']:.6g}"
    )


def _figure(x: float | None, unknown: str) -> str:
    return unknown if x is None else f"{x:.3g}"
