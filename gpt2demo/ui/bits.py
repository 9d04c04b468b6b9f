"""A number bit by bit in every format: the component, and the words about the formats' ranges.

The browser computes what it shows (`assets/bits.js`), so that a drag answers at once; formats,
grammar and refusals come from formats.py and literals.py.
"""

from html import escape
from typing import Any, Final

import gradio as gr

from gpt2demo.formats import FORMATS, INT8_MOST, FloatFormat
from gpt2demo.literals import (
    LARGEST_RANGE,
    LARGEST_REFUSAL,
    MOST_CHARS,
    MOST_EXPONENT,
    PATTERNS,
    REFUSALS,
)
from gpt2demo.ui.live import plot_script

_EXAMPLES: Final = ("0.1", "1/3", "1.001", "65504", "70000", "1e-8", "3.4e38", "-0", "nan")
_AXIS: Final = {"low": -152, "high": 132}  # powers of 2: all of fp32's range, fp64 goes beyond
_LEGEND: Final = (
    "A filled cell is a 1. The bar below each format is its range on a logarithmic scale, from "
    "2^-152 to 2^132: dark where all mantissa bits hold, light where they run out (subnormal); "
    "the mark is the number."
)


def _short(x: float) -> str:
    """Three digits, as the page writes them: 3.4e38, 65,504."""
    if 1e-3 <= x < 1e6:
        return f"{x:,.6g}" if x < 1000 else f"{x:,.0f}"
    digits, exponent = f"{x:.2e}".split("e")
    return f"{digits}e{int(exponent)}"


def _described(name: str, form: FloatFormat) -> dict[str, Any]:
    least, normal = float(form.smallest_subnormal), float(form.smallest_normal)
    return {
        "id": name,
        "name": form.name,
        "exponent_bits": form.exponent_bits,
        "mantissa_bits": form.mantissa_bits,
        "shape": f"1 + {form.exponent_bits} + {form.mantissa_bits} bits",
        "range": (
            f"largest {_short(float(form.largest))}, smallest normal {_short(normal)}, smallest "
            f"subnormal {_short(least)}"
        ),
    }


def bits_view() -> gr.HTML:
    """The component with elem_id "bits": a field, a slider, and the number in every format."""
    int8 = {"id": "int8", "name": "int8", "shape": "8 bits and one scale a tensor", "range": ""}
    setup = {
        "formats": [*(_described(name, form) for name, form in FORMATS.items()), int8],
        "patterns": PATTERNS,
        "refusals": REFUSALS | {"largest": LARGEST_REFUSAL},
        "mostChars": MOST_CHARS,
        "mostExponent": MOST_EXPONENT,
        "int8Most": INT8_MOST,
        "largestRange": [f"{limit:g}" for limit in LARGEST_RANGE],
        "axis": _AXIS,
        "examples": _EXAMPLES,
        "legend": _LEGEND,
    }
    return gr.HTML(
        elem_id="bits",
        html_template='<div class="bits"></div>',
        js_on_load=plot_script("bits.js", setup),
        apply_default_css=False,
    )


def why_cards() -> str:
    """Why bf16 needs no scaler, fp16 does, and int8 is for inference: a figure and a few words."""
    bf16, fp16, fp32 = FORMATS["bf16"], FORMATS["fp16"], FORMATS["fp32"]
    digits = bf16.mantissa_bits + 1
    cards = {
        "bf16 needs no scaler": (
            f"up to {_short(float(bf16.largest))}",
            f"bf16 has fp32's {fp32.exponent_bits} exponent bits, so its range is fp32's: up to "
            f"{_short(float(fp32.largest))} there. Hardly anything that fp32 can hold overflows "
            f"or vanishes. The price is {digits} significant bits in place of "
            f"{fp32.mantissa_bits + 1}.",
        ),
        "fp16 needs one": (
            f"{_short(float(fp16.smallest_subnormal))} to {_short(float(fp16.largest))}",
            f"fp16 has {fp16.exponent_bits} exponent bits: what is larger becomes infinite, and "
            f"below {_short(float(fp16.smallest_subnormal) / 2)} everything becomes zero, small "
            "gradients first. The scaler multiplies the loss by a large factor before the backward "
            "pass. The gradients are divided by it before the optimizer step.",
        ),
        "int8 is for inference": (
            f"{2 * INT8_MOST + 1} values",
            "int8 holds 255 evenly spaced values and one scale for a whole tensor. Trained weights "
            "are of similar size, so they fit. Gradients spread over many powers of ten, and what "
            "lies below half a step becomes zero.",
        ),
    }
    return f'<div class="why-cards">{"".join(map(_card, cards.items()))}</div>'


def _card(card: tuple[str, tuple[str, str]]) -> str:
    title, (figure, words) = card
    return (
        f'<section class="why-card"><h3>{escape(title)}</h3><p class="why-figure">'
        f"{escape(figure)}</p><p>{escape(words)}</p></section>"
    )
