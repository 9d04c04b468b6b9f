"""The memory bar: a peak's parts against the memory there is, as HTML that needs no script."""

from collections.abc import Mapping
from html import escape

from gpt2demo.config import RunConfig
from gpt2demo.fit import FITS, UNKNOWN, Capacity
from gpt2demo.fit_words import PART_NAMES, sentence
from gpt2demo.records import RunRecord

_GIB = 2**30


def forecast_bar(config: RunConfig, capacity: Capacity, *, with_legend: bool = False) -> str:
    """Forecast, verdict and the one sentence for settings that have not run yet."""
    told = capacity.forecast(config)
    verdict = capacity.verdict(told)
    head = f"Forecast peak {_gib(told.peak_bytes)}"
    if capacity.total_bytes is not None:
        of = "emulated" if config.budget_gib is not None else "to be had"
        head += f" of {_gib(capacity.total_bytes)} {of}"
    parts = {name: getattr(told.parts, name) for name in PART_NAMES}
    said = "memory unknown" if verdict == UNKNOWN else verdict
    label = "Memory forecast, part by part" if with_legend else "Memory forecast"
    return (
        f'<section class="memory" aria-label="{label}"><p class="memory-head">'
        f'{escape(head)} <b class="verdict {_css(verdict)}">{escape(said)}</b></p>'
        f"{bar(parts, capacity.total_bytes, with_legend=with_legend)}"
        f'<p class="memory-words">{escape(sentence(config, capacity))}</p></section>'
    )


def bar(
    parts: Mapping[str, int],
    capacity_bytes: int | None,
    asked_bytes: int = 0,
    *,
    with_legend: bool = True,
) -> str:
    """A stacked bar.

    Args:
        parts: bytes by part, the names of `fit_words.PART_NAMES`.
        capacity_bytes: where the wall stands; None = nobody knows.
        asked_bytes: an allocation that failed, drawn beyond the parts.
        with_legend: name every part below; without it the names come with the pointer.
    """
    shown = {name: count for name, count in parts.items() if count}
    pieces = [(name, PART_NAMES[name], count) for name, count in shown.items()]
    if asked_bytes:
        pieces.append(("asked", "asked for", asked_bytes))
    total = sum(count for _, _, count in pieces)
    scale = max(total, capacity_bytes or 0) or 1
    segments = "".join(
        f'<span class="part part-{name}" style="width:{100 * count / scale:.3f}%" '
        f'title="{escape(label)}: {_gib(count)}"></span>'
        for name, label, count in pieces
    )
    legend = "".join(
        f'<li><i class="part-{name}"></i>{escape(label)} {_gib(count)}</li>'
        for name, label, count in pieces
    )
    wall = ""
    if capacity_bytes is not None:
        at = 100 * capacity_bytes / scale
        wall = f'<span class="wall" style="left:{at:.3f}%" title="{_gib(capacity_bytes)}"></span>'
    return (
        f'<div class="memory-bar" role="img" aria-label="{escape(_spoken(pieces))}">'
        f"{segments}{wall}</div>"
        + (f'<ul class="memory-legend">{legend}</ul>' if with_legend else "")
    )


def out_of_memory_panel(record: RunRecord) -> str:
    """What lived when a run ran out of memory, and what it asked for."""
    failed = record.summary.out_of_memory
    assert failed, "only for a run out of memory"
    where = f"step {failed.step}, {failed.moment}" if failed.step is not None else failed.moment
    label = RunConfig(**record.config).label
    facts = [f"Out of memory: {label}", where]
    if failed.asked_bytes is not None:
        facts.append(f"asked for {_gib(failed.asked_bytes)} more")
    if failed.capacity_bytes is not None:
        facts.append(f"{_gib(failed.capacity_bytes)} to be had")
    drawn = ""
    if failed.parts:
        drawn = bar(failed.parts, failed.capacity_bytes, failed.asked_bytes or 0)
        drawn = f'<p class="memory-words">What lived at that moment:</p>{drawn}'
    elif memory := record.summary.memory:
        facts.append(f"forecast {_gib(memory.forecast_bytes)}")
    return (
        f'<section class="memory failed" aria-label="Out of memory">'
        f'<p class="memory-head">{escape(" · ".join(facts))}</p>{drawn}'
        f'<p class="memory-words">{escape(record.summary.message)}</p></section>'
    )


def _spoken(pieces: list[tuple[str, str, int]]) -> str:
    return ", ".join(f"{label} {_gib(count)}" for _, label, count in pieces)


def _gib(count: int) -> str:
    """GiB with two decimals; what is smaller than a hundredth in MiB or KiB."""
    for unit, name in ((_GIB, "GiB"), (2**20, "MiB")):
        if count >= unit / 100:
            return f"{count / unit:.2f} {name}"
    return f"{count / 1024:.1f} KiB"


def _css(verdict: str) -> str:
    return "verdict-" + ("fits" if verdict == FITS else verdict.replace(" ", "-"))
