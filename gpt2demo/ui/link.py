"""A run's settings and result in a link, and the page filled from one."""

import math
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode

from gpt2demo.config import CORPORA, InputError, RunConfig
from gpt2demo.records import RunRecord

# what a link may set; an own text never travels
LINKED: Final = (
    *("model", "precision", "B", "T", "steps", "attention", "optimizer", "compile"),
    *("vocab_size", "budget_gib", "lr", "seed", "text"),
)
_NUMBERS: Final = ("B", "T", "steps", "vocab_size", "budget_gib", "lr", "seed")
_MOST_CHARS: Final = 60


def link(record: RunRecord) -> str:
    """The link, from its "?" on: what differs from the defaults, and what was measured where."""
    plain = RunConfig().to_dict()
    always = ("model", "precision", "B", "T", "steps")
    query = {
        name: record.config[name]
        for name in LINKED
        if (name in always or record.config.get(name) != plain[name])
        and record.config.get(name) is not None
        and not (name == "text" and record.config[name] not in CORPORA)
    }
    if record.summary.step_ms_median is not None:
        query["ms"] = f"{record.summary.step_ms_median:.6g}"
        query["on"] = str(record.device.get("name") or "")[:_MOST_CHARS]
    return "?" + urlencode(query)


def settings_in(query: Mapping[str, str]) -> dict[str, Any]:
    """The settings that a link sets, checked; {} where it sets none.

    Raises:
        InputError: naming the setting that cannot be.
    """
    found: dict[str, Any] = {}
    for name in LINKED:
        if name not in query:
            continue
        text = query[name]
        found[name] = text
        if name in _NUMBERS:
            try:
                found[name] = float(text)
            except ValueError:
                raise InputError(name, f"{name} must be a number, not {text[:20]!r}.") from None
        elif name == "compile":
            found[name] = {"True": True, "False": False}.get(text, text)
        elif name == "text" and text not in CORPORA:
            raise InputError("text", f"text must be one of {', '.join(CORPORA)} in a link.")
    config = RunConfig(**found)
    return {name: getattr(config, name) for name in found}


def result_in(query: Mapping[str, str]) -> str:
    """What the link says was measured, in one sentence; "" where it says nothing."""
    try:
        ms = float(query.get("ms", ""))
    except ValueError:
        return ""
    if not math.isfinite(ms) or ms <= 0:
        return ""
    where = query.get("on", "")[:_MOST_CHARS]
    return f"The link's own result: {ms:,.2f} ms a step{f' on {where}' if where else ''}."
