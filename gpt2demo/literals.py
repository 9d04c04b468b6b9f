"""Reading a number that was typed, exactly; what is none is refused in words."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from gpt2demo.config import InputError, shown

MOST_CHARS: Final = 100
MOST_EXPONENT: Final = 1_100  # of 10 or 2: far beyond fp64, and still quick to compute
# ASCII only, and in a form that JavaScript reads as Python does: the page uses the same
PATTERNS: Final = {
    "decimal": r"([+-]?)([0-9]*)\.?([0-9]*)(?:[eE]([+-]?[0-9]+))?",
    "hex": r"([+-]?)0[xX]([0-9a-fA-F]*)\.?([0-9a-fA-F]*)(?:[pP]([+-]?[0-9]+))?",
    "ratio": r"([+-]?)([0-9]+)/([0-9]+)",
    "word": r"([+-]?)(?:(inf|infinity)|nan)",
}
REFUSALS: Final = {  # {shown} is what was typed
    "empty": "number must be a number such as 0.1, 1e-8 or 1/3, not empty.",
    "long": f"number must be at most {MOST_CHARS} characters long.",
    "other": "number must be a number such as 0.1, 1e-8, 1/3, 0x1p-3, inf or nan, not {shown}.",
    "exponent": f"number must have an exponent from -{MOST_EXPONENT:,} to {MOST_EXPONENT:,}, "
    "not {shown}.",
    "zero": "number must not be divided by zero, as in {shown}; inf is infinity.",
}
LARGEST_RANGE: Final = (1e-30, 1e30)  # of what int8 is scaled for
LARGEST_REFUSAL: Final = (
    "The largest value of the int8 tensor must be a number from 1e-30 to 1e30, not {shown}."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """What was typed, exactly: a sign and a size; size None = infinite or, if `nan`, no number."""

    negative: bool
    size: Fraction | None
    nan: bool = False


def parse_number(text: object) -> Number:
    """The number that was typed: decimal, hexadecimal (0x1p-3), a ratio (1/3), inf or nan.

    Raises:
        InputError: naming the field "number", what was typed and what is allowed.
    """
    if not isinstance(text, str):
        raise InputError("number", REFUSALS["other"].replace("{shown}", shown(text)))
    if len(text) > MOST_CHARS:
        raise InputError("number", REFUSALS["long"])
    typed = text.strip().lower()
    if not typed:
        raise InputError("number", REFUSALS["empty"])
    found = {kind: re.fullmatch(pattern, typed) for kind, pattern in PATTERNS.items()}
    refusal = "other"
    if match := found["word"]:
        return Number(negative=match[1] == "-", size=None, nan=match[2] is None)
    if match := found["ratio"]:
        if int(match[3]):
            return Number(negative=match[1] == "-", size=Fraction(int(match[2]), int(match[3])))
        refusal = "zero"
    # the hexadecimal pattern first: nothing fits both
    for kind, base, radix in (("hex", 16, 2), ("decimal", 10, 10)):
        match = found[kind]
        if match and (match[2] or match[3]):
            exponent = int(match[4] or 0)
            if abs(exponent) <= MOST_EXPONENT:
                digits = Fraction(int(match[2] + match[3], base), base ** len(match[3]))
                return Number(negative=match[1] == "-", size=digits * Fraction(radix) ** exponent)
            refusal = "exponent"
    raise InputError("number", REFUSALS[refusal].replace("{shown}", shown(text)))


def parse_largest(text: object) -> Fraction:
    """The largest value of an int8 tensor, which its 127 stands for.

    Raises:
        InputError: it is no number from 1e-30 to 1e30.
    """
    low, high = LARGEST_RANGE
    try:
        number = parse_number(text)
    except InputError:
        number = Number(negative=True, size=None)
    if number.negative or number.size is None or not low <= number.size <= high:
        raise InputError("largest", LARGEST_REFUSAL.replace("{shown}", shown(text)))
    return number.size
