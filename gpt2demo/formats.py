"""How number formats hold a value: its bits, what it is rounded to, its range and its gaps.

A number comes exact, as a ratio of whole numbers, and is rounded once into every format: to the
nearest number, and to the even one of two that are as near (IEEE 754's default). TF32 is here by
its definition, 8 exponent and 10 mantissa bits.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from gpt2demo.literals import Number, parse_largest, parse_number


@dataclass(frozen=True, kw_only=True, slots=True)
class FloatFormat:
    """A binary floating-point format as IEEE 754 builds them: sign, exponent, mantissa."""

    name: str
    exponent_bits: int
    mantissa_bits: int  # without the leading 1 that is not stored

    @property
    def least_exponent(self) -> int:
        """The exponent of the smallest normal number; below it the gaps stay as they are."""
        return 2 - 2 ** (self.exponent_bits - 1)

    @property
    def largest(self) -> Fraction:
        """The largest finite number."""
        return (2 - Fraction(1, 2**self.mantissa_bits)) * Fraction(2) ** (1 - self.least_exponent)

    @property
    def smallest_normal(self) -> Fraction:
        """The smallest number that has all its mantissa bits."""
        return Fraction(2) ** self.least_exponent

    @property
    def smallest_subnormal(self) -> Fraction:
        """The smallest number above zero."""
        return self.smallest_normal / 2**self.mantissa_bits


FORMATS: Final[dict[str, FloatFormat]] = {
    "fp64": FloatFormat(name="fp64", exponent_bits=11, mantissa_bits=52),
    "fp32": FloatFormat(name="fp32", exponent_bits=8, mantissa_bits=23),
    "tf32": FloatFormat(name="TF32", exponent_bits=8, mantissa_bits=10),
    "bf16": FloatFormat(name="bf16", exponent_bits=8, mantissa_bits=7),
    "fp16": FloatFormat(name="fp16", exponent_bits=5, mantissa_bits=10),
}
INT8_MOST: Final = 127  # symmetric: -128 is left unused, as most quantizers do


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What one format makes of a number. The bits are texts of 0 and 1.

    `exact` is the value that the format holds, None where that is infinite or NaN; `error` is
    `exact` minus what was typed, and `gap` the distance to the next number away from zero (at the
    largest number: to the one before it). None = there is none.
    """

    sign: str
    exponent: str  # "" in int8
    mantissa: str
    negative: bool
    exact: Fraction | None
    error: Fraction | None
    gap: Fraction | None
    state: str  # what happened, in words

    @property
    def value(self) -> float | None:
        """The value as a float, with the sign of a zero; None where int8 holds nothing."""
        if self.exact is not None:
            return math.copysign(float(self.exact), -1 if self.negative else 1)
        if self.state == "NaN":
            return math.nan
        return None if not self.mantissa else -math.inf if self.negative else math.inf


def hold(number: Number, form: FloatFormat) -> Held:
    """The number as `form` holds it."""
    m, least = form.mantissa_bits, form.least_exponent
    infinity = (2**form.exponent_bits - 1) << m
    if number.nan:
        code = infinity + (1 << (m - 1))
    elif number.size is None:
        code = infinity
    elif not number.size:
        code = 0
    else:
        # in units of the gap at this size; a carry out of the mantissa lands in the exponent
        exponent = max(_log2(number.size), least)
        code = ((exponent - least) << m) + round(number.size / Fraction(2) ** (exponent - m))
        code = min(code, infinity)
    bits = f"{code:0{form.exponent_bits + m}b}"
    exact = gap = None
    if code < infinity:
        gap = Fraction(2) ** (max((code >> m) - 1, 0) + least - m)
        fraction = code & ((1 << m) - 1) | ((code >> m > 0) << m)
        exact = fraction * gap
    return Held(
        sign="1" if number.negative else "0",
        exponent=bits[: form.exponent_bits],
        mantissa=bits[form.exponent_bits :],
        negative=number.negative,
        gap=gap,
        state=_state(number, exact, form.smallest_normal),
        **_signed(number, exact),
    )


def hold_int8(number: Number, largest: Fraction) -> Held:
    """The number as int8 with one scale, largest / 127: what is beyond the largest saturates."""
    if number.nan:
        return Held(
            sign="", exponent="", mantissa="", negative=False,
            exact=None, error=None, gap=None, state="int8 has no NaN",
        )  # fmt: skip
    scale = largest / INT8_MOST
    code = INT8_MOST if number.size is None else min(round(number.size / scale), INT8_MOST)
    negative = number.negative and code > 0  # there is one zero only
    bits = f"{(-code if negative else code) & 0xFF:08b}"
    saturated = number.size is None or number.size > largest
    exact = code * scale
    return Held(
        sign=bits[0],
        exponent="",
        mantissa=bits[1:],
        negative=negative,
        gap=scale,
        state="saturated" if saturated else _state(number, exact, Fraction(0)),
        **_signed(number, exact),
    )


def _log2(size: Fraction) -> int:
    """The largest whole number up to log2(size), exactly; size is above 0."""
    guess = size.numerator.bit_length() - size.denominator.bit_length()
    return guess if Fraction(2) ** guess <= size else guess - 1


def _signed(number: Number, exact: Fraction | None) -> dict[str, Fraction | None]:
    """`exact` and `error` with the sign of the number."""
    if exact is None:
        return {"exact": None, "error": None}
    sign = -1 if number.negative else 1
    error = None if number.size is None else sign * (exact - number.size)
    return {"exact": sign * exact, "error": error}


def _state(number: Number, exact: Fraction | None, smallest_normal: Fraction) -> str:
    if number.nan:
        return "NaN"
    if number.size is None:
        return "infinite"
    if exact is None:
        return "overflow: infinite"
    if number.size and not exact:
        return "underflow: zero"
    how = "exact" if exact == number.size else "rounded"
    return how + (", subnormal" if 0 < exact < smallest_normal else "")


def bits_report(text: object, largest: object = "1") -> dict[str, Any]:
    """What every format makes of the typed number, for JSON.

    Args:
        text: the number as typed.
        largest: the largest value of the tensor that int8 is scaled for, as typed.

    Returns:
        `number`, `int8_largest` and `formats`: by format its bits, `value` (None where it is no
        finite float64, `value_text` then says what it is), `error` and `relative_error` (None
        where there is none or a float64 cannot hold it), `gap`, `largest`, `smallest_normal`,
        `smallest_subnormal` and `state`.

    Raises:
        InputError: either is refused.
    """
    number, scaled_for = parse_number(text), parse_largest(largest)
    told = {}
    for name, form in FORMATS.items():
        told[name] = _told(number, hold(number, form)) | {
            "largest": _float(form.largest),
            "smallest_normal": _float(form.smallest_normal),
            "smallest_subnormal": _float(form.smallest_subnormal),
        }
    told["int8"] = _told(number, hold_int8(number, scaled_for)) | {
        "largest": _float(scaled_for),
        "smallest_normal": None,
        "smallest_subnormal": None,
    }
    return {"number": str(text).strip(), "int8_largest": _float(scaled_for), "formats": told}


def _told(number: Number, held: Held) -> dict[str, Any]:
    value = held.value
    finite = value is not None and math.isfinite(value)
    relative = None if held.error is None or not number.size else abs(held.error) / number.size
    return {
        "sign": held.sign,
        "exponent": held.exponent,
        "mantissa": held.mantissa,
        "value": value if finite else None,
        "value_text": "none" if value is None else repr(value),
        "error": _float(held.error),
        "relative_error": _float(relative),
        "gap": _float(held.gap),
        "state": held.state,
    }


def _float(exact: Fraction | None) -> float | None:
    """As a float; None where that would be an overflow, or a zero that is none."""
    if exact is None:
        return None
    try:
        near = float(exact)
    except OverflowError:
        return None
    return None if exact and not near else near
