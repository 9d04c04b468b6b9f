"""Number formats against numpy and ml_dtypes; TF32 against its definition in numpy's integers."""

import json
import math
import random
from decimal import Decimal, localcontext
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from gpt2demo import cli
from gpt2demo.config import InputError
from gpt2demo.formats import FORMATS, bits_report, hold, hold_int8
from gpt2demo.literals import Number, parse_largest, parse_number

COUNT = 10_000
TYPES = {
    "fp64": (np.float64, np.uint64),
    "fp32": (np.float32, np.uint32),
    "bf16": (ml_dtypes.bfloat16, np.uint16),
    "fp16": (np.float16, np.uint16),
}
EDGES = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 5e-324, 1.7976931348623157e308]
EDGES.append(float(np.finfo(np.float32).max))


def number(x: float) -> Number:
    """A float as the number that its text would give, without the text."""
    negative = math.copysign(1, x) < 0
    if not math.isfinite(x):
        return Number(negative=negative, size=None, nan=math.isnan(x))
    return Number(negative=negative, size=Fraction(abs(x)))


def code(held) -> int:
    return int(held.sign + held.exponent + held.mantissa, 2)


def tf32_codes(x: np.ndarray) -> np.ndarray:
    """The 19 bits of TF32: float32's bits, rounded to nearest even at the 13th from the right."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return (bits + np.uint64(0xFFF) + ((bits >> np.uint64(13)) & np.uint64(1))) >> np.uint64(13)


def expected_codes(name: str, x: np.ndarray) -> np.ndarray:
    """What numpy or ml_dtypes makes of `x`; for bf16 and TF32 `x` must be exact in float32."""
    if name == "tf32":
        return tf32_codes(x)
    kind, unsigned = TYPES[name]
    source = x.astype(np.float32) if name == "bf16" else x
    with np.errstate(over="ignore", under="ignore"):
        return source.astype(kind).view(unsigned).astype(np.uint64)


def random_values(name: str) -> np.ndarray:
    """Values over more than the format's whole range, exact in float32 for bf16 and TF32."""
    rng = np.random.default_rng(list(name.encode()))
    low, high = {"fp64": (-1074, 1024), "fp16": (-28, 18)}.get(name, (-152, 128.2))
    with np.errstate(over="ignore", under="ignore"):
        x = np.exp2(rng.uniform(low, high, COUNT)) * rng.choice([-1.0, 1.0], COUNT)
        x = np.concatenate([x, EDGES])
        return x.astype(np.float32).astype(np.float64) if name in ("bf16", "tf32") else x


@pytest.mark.parametrize("name", FORMATS)
def test_bits_are_those_of_an_independent_conversion(name):
    x = random_values(name)
    wanted = expected_codes(name, x)
    held = [hold(number(v), FORMATS[name]) for v in x.tolist()]
    wrong = [
        (v, h, int(w))
        for v, h, w in zip(x.tolist(), held, wanted, strict=True)
        if not math.isnan(v) and code(h) != w
    ]
    assert wrong == []
    nans = [h for v, h in zip(x.tolist(), held, strict=True) if math.isnan(v)]
    assert nans
    assert all(set(h.exponent) == {"1"} and "1" in h.mantissa for h in nans)
    # the sample really reaches every kind of number
    assert {h.state for h in held} >= {
        "exact", "infinite", "NaN",
        *(["rounded", "rounded, subnormal", "overflow: infinite", "underflow: zero"]
          if name != "fp64" else ["exact, subnormal"]),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16"])
def test_halfway_goes_to_the_even_one_and_a_little_more_does_not(name):
    form = FORMATS[name]
    rng = np.random.default_rng(7)
    codes = rng.integers(0, (2**form.exponent_bits - 1) << form.mantissa_bits, 500)
    odd = 0
    for c in codes.tolist():
        field, mantissa = c >> form.mantissa_bits, c & (2**form.mantissa_bits - 1)
        gap = Fraction(2) ** (max(field, 1) - 1 + form.least_exponent - form.mantissa_bits)
        here = (mantissa + (2**form.mantissa_bits if field else 0)) * gap
        middle = here + gap / 2
        assert code(hold(Number(negative=False, size=middle), form)) == c + (c & 1)
        above = middle + gap / 2**80
        assert code(hold(Number(negative=False, size=above), form)) == c + 1
        odd += c & 1
        if name != "fp32":  # numpy's own answer; these midpoints are float32 numbers
            wanted = expected_codes(name, np.array([float(middle)]))[0]
            assert wanted == c + (c & 1)
    assert 200 < odd < 300


def test_what_is_typed_is_rounded_once():
    """Halfway in float32 but for its last digit: a way over float64 would lose that digit."""
    text = "16777217.0000000001"
    assert float(np.float32(float(text))) == 16777216  # rounded twice
    assert hold(parse_number(text), FORMATS["fp32"]).value == 16777218


def test_every_value_and_error_is_exact():
    rng = random.Random(5)
    for _ in range(500):
        text = f"{rng.choice(['', '-'])}{rng.uniform(0.1, 10):.{rng.randint(1, 17)}f}e"
        text += str(rng.randint(-6, 3))
        for name, (kind, _) in TYPES.items():
            held = hold(parse_number(text), FORMATS[name])
            if name in ("fp64", "fp32"):  # numpy reads the text; rounded twice is as good here
                assert held.value == float(kind(float(text)))
            with localcontext() as exact:
                exact.prec = 200
                difference = Decimal(held.value) - Decimal(text)
                assert held.error == Fraction(difference), (name, text)


@pytest.mark.parametrize("name", TYPES)
def test_ranges_are_those_of_finfo(name):
    kind, _ = TYPES[name]
    told, form = ml_dtypes.finfo(kind), FORMATS[name]
    assert form.largest == Fraction(float(told.max))
    assert form.smallest_normal == Fraction(float(told.smallest_normal))
    assert form.smallest_subnormal == Fraction(float(told.smallest_subnormal))


def test_tf32_has_the_range_of_its_bits():
    def value(bits):
        return Fraction(float(np.uint32(bits).view(np.float32)))

    form = FORMATS["tf32"]
    assert form.largest == value(0x7F7FE000)
    assert form.smallest_normal == value(0x00800000)
    assert form.smallest_subnormal == value(0x00002000)


@pytest.mark.parametrize("name", [*TYPES, "tf32"])
def test_the_gap_leads_to_the_next_number(name):
    rng = np.random.default_rng(11)
    form = FORMATS[name]
    infinity = (2**form.exponent_bits - 1) << form.mantissa_bits
    sample = [0, 1, 2**form.mantissa_bits - 1, 2**form.mantissa_bits, infinity - 2]
    codes = np.array([*sample, *rng.integers(0, infinity - 1, 500)], np.uint64)
    if name == "tf32":
        here, there = ((c << np.uint64(13)).astype(np.uint32).view(np.float32)
                       for c in (codes, codes + np.uint64(1)))  # fmt: skip
    else:
        kind, unsigned = TYPES[name]
        here = codes.astype(unsigned).view(kind)
        there = np.nextafter(here, kind(np.inf))
    for x, y in zip(here, there, strict=True):
        held = hold(number(float(x)), form)
        assert held.gap == Fraction(float(y)) - Fraction(float(x))
        assert held.error == 0
    assert hold(Number(negative=False, size=form.largest), form).gap == form.largest - Fraction(
        float(here[4])
    )
    assert hold(number(math.inf), form).gap is None


def test_int8_rounds_and_saturates_as_numpy_does():
    rng = np.random.default_rng(3)
    x = (rng.normal(0, 0.6, COUNT)).astype(np.float32).astype(np.float64)
    # x * 127 is exact in float64: 24 and 7 bits
    wanted = np.clip(np.rint(x * 127), -127, 127).astype(np.int8)
    assert {-127, 127, 0} <= set(wanted.tolist())
    for v, w in zip(x.tolist(), wanted.tolist(), strict=True):
        held = hold_int8(number(v), Fraction(1))
        assert int(held.sign + held.mantissa, 2) == w & 0xFF
        assert held.exact == Fraction(w, 127)
        assert (held.state == "saturated") == (abs(v) > 1)
    # halves go to the even one: the scale is 1
    for v, w in ((0.5, 0), (1.5, 2), (2.5, 2), (-3.5, -4), (126.5, 126), (127.5, 127)):
        assert hold_int8(number(v), Fraction(127)).exact == w
    assert hold_int8(number(math.nan), Fraction(1)).value is None
    assert hold_int8(number(-math.inf), Fraction(3)).exact == -3


@pytest.mark.parametrize(
    ("text", "size", "negative"),
    [
        ("0.1", Fraction(1, 10), False),
        (" 1e-8\n", Fraction(1, 10**8), False),
        ("-0", 0, True),
        ("+.5", Fraction(1, 2), False),
        ("5.", 5, False),
        ("007", 7, False),
        ("-1/3", Fraction(1, 3), True),
        ("0X1P-3", Fraction(1, 8), False),
        ("0x.8", Fraction(1, 2), False),
        ("1e400", 10**400, False),
        ("1e-1100", Fraction(1, 10**1100), False),
        ("inf", None, False),
        ("-Infinity", None, True),
    ],
)
def test_what_people_type_is_read_exactly(text, size, negative):
    assert parse_number(text) == Number(negative=negative, size=size)


def test_hexadecimal_is_read_as_python_reads_it():
    rng = np.random.default_rng(1)
    for v in rng.normal(0, 1e3, 200).tolist():
        read = parse_number(v.hex())
        assert (read.size, read.negative) == (Fraction(abs(float.fromhex(v.hex()))), v < 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not empty"),
        ("   ", "not empty"),
        ("words", "not 'words'"),
        ("1" * 10_000, "at most 100 characters"),
        ("1e99999", "exponent from -1,100 to 1,100, not '1e99999'"),
        ("1e" + "9" * 90, "exponent"),
        ("0x1p9999", "exponent"),
        ("1/0", "divided by zero"),
        *((text, f"not {text!r}") for text in ("0x", "e5", ".", "-", "1_000", "1,5", "½", "1 2")),
        ("<b>1</b>", "not '<b>1</b>'"),
        ("٣", "not"),  # Python's own int() takes it
        (None, "not None"),
        (0.1, "not 0.1"),
    ],
)
def test_everything_else_is_refused_in_words(text, words):
    with pytest.raises(InputError, match="number must") as refused:
        parse_number(text)
    assert words in str(refused.value)
    assert refused.value.field == "number"
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "words", "", "1e31", "1e-31", None])
def test_int8_needs_a_largest_value(text):
    with pytest.raises(InputError, match="1e-30 to 1e30") as refused:
        parse_largest(text)
    assert refused.value.field == "largest"


@pytest.mark.parametrize("text", ["0.1", "-0", "1e400", "1e-400", "1e-1100", "nan", "-inf", "1/3"])
def test_the_report_is_strict_json(text):
    told = json.loads(json.dumps(bits_report(text), allow_nan=False))
    assert list(told["formats"]) == [*FORMATS, "int8"]
    for name, held in told["formats"].items():
        if name in FORMATS:
            assert len(held["sign"] + held["exponent"] + held["mantissa"]) == (
                1 + FORMATS[name].exponent_bits + FORMATS[name].mantissa_bits
            )
        # an error that a float64 cannot hold is unknown, never zero
        assert held["error"] != 0 or held["state"].startswith("exact")


def test_the_verb_prints_json_and_lines(capsys):
    assert cli.main(["bits", "0.1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["formats"]["bf16"]["value"] == float(ml_dtypes.bfloat16(0.1))
    assert told["formats"]["fp32"]["error"] == pytest.approx(1.490116e-9, rel=1e-6)
    assert cli.main(["bits", "--int8-largest", "2", "--", "-1e-8"]) == 0
    lines = capsys.readouterr().out
    assert "1 00000 0000000000" in lines
    assert "-0.0 (underflow: zero)" in lines
    assert "range  -2 to 2" in lines


@pytest.mark.parametrize("text", ["words", "", "1" * 10_000])
def test_the_verb_refuses_in_words(capsys, text):
    assert cli.main(["bits", text]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gpt2demo: number must be")
    assert err.count("\n") == 1
