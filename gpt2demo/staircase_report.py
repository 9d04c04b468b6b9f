"""The staircase in words, and for JSON."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from gpt2demo.lesson import FIRST, LESSON_RUN, RUNGS
from gpt2demo.records import jsonable
from gpt2demo.staircase import RungResult, Staircase

if TYPE_CHECKING:  # device.py imports torch, which this module does without
    from gpt2demo.device import DeviceInfo

_NAMES: Final = {rung.id: rung.name.removeprefix("+ ") for rung in RUNGS}
_WHAT: Final = {rung.id: rung.what for rung in RUNGS}
_SAME: Final = 1.1  # below it nobody feels a difference


def staircase_report(device: "DeviceInfo", staircase: Staircase) -> dict[str, Any]:
    """`config` (what all rungs share), `device`, `message`, `lesson`, and `rungs` (`RungResult`,
    each with its `note`), as strict JSON takes them.

    Args:
        device: where it ran.
        staircase: going on or over.
    """
    notes = rung_notes(staircase)
    config = staircase.config.to_dict()
    for name in ("precision", "attention", "optimizer", "compile", "vocab_size"):
        del config[name]
    return jsonable(
        {
            "config": config,
            "device": device.to_dict(),
            "message": staircase.message,
            "lesson": LESSON_RUN,
            "rungs": [
                asdict(result) | {"note": notes[result.rung]} for result in staircase.results()
            ],
        }
    )


def rung_notes(staircase: Staircase) -> dict[str, str]:
    """What each rung did here, by id: at most two sentences."""
    return {
        result.rung: _note(result, left_out=staircase.left_out(result.rung))
        for result in staircase.results()
    }


def _note(result: RungResult, *, left_out: bool) -> str:
    after = f"after {result.steps_done} step{'' if result.steps_done == 1 else 's'}"
    between = result.rung not in (FIRST.id, RUNGS[-1].id)  # rungs before it and after it
    onward = " The rungs after it run without it." if left_out and between else ""
    if result.state == "not available":
        return result.reason
    if result.state in ("waiting", "not run"):
        return result.reason or _WHAT[result.rung]
    if result.state == "out of memory":
        kept = " The rungs after it keep its change, they may need less." if between else ""
        return f"Out of memory {after}.{kept}"
    if result.state == "diverged":
        return f"Diverged {after}: the loss is no longer finite. A lower learning rate often helps."
    if result.state == "error":
        return f"It failed {after}, the log says why.{onward}"
    if result.mark == "not compiled":
        return result.reason
    if result.step_ms_median is None:
        return f"Not measured: {result.state} {after}.{onward}"
    if result.mark == "no effect":
        return _no_effect(result)
    if result.mark == "emulated":
        return _emulated(result)
    return f"{_gain(result)} {onward.strip() or _WHAT[result.rung]}"


def _gain(result: RungResult) -> str:
    """What the rung bought, in one sentence."""
    ratio, saved = result.speedup_before, result.saved_ms
    if ratio is None or saved is None:
        return "The others start from here."
    ids = list(_NAMES)
    adjacent = ids.index(result.rung) == ids.index(result.before) + 1
    of = "the rung before" if adjacent else _NAMES[result.before]
    low, high = result.speedup_before_low, result.speedup_before_high
    if low is None or high is None:
        return f"{ratio:.2f}x the speed of {of}, from too few steps to judge."
    held = f"{ratio:.2f}x the speed of {of} ({low:.2f}x to {high:.2f}x)"
    if low <= 1 <= high:
        return f"No clear change: {held}, the middle halves of their steps overlap."
    change = "Saves" if saved > 0 else "Costs"
    return f"{change} {abs(saved):,.1f} ms a step: {held}."


def _no_effect(result: RungResult) -> str:
    low, high = result.speedup_before_low, result.speedup_before_high
    if low is None or high is None or (low <= _SAME and high >= 1 / _SAME):
        return result.reason
    return (
        f"It runs exactly as fp32 does here: {result.speedup_before:.2f}x is the machine's own "
        "change from one run to the next. Close other programs and climb again."
    )


def _emulated(result: RungResult) -> str:
    """The device's reason; it says "slower", which a measured gain must not contradict."""
    ratio = result.speedup_before
    if result.rung != "bf16" or ratio is None or ratio <= 1:
        return result.reason
    return (
        f"{_gain(result)} Emulated all the same: its matmuls gain nothing, 16-bit tensors may save "
        "memory traffic."
    )
