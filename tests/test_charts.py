"""The chart's rows, the table of runs and its files, against numpy, pandas and csv."""

import json
import math

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2demo import charts
from gpt2demo.config import PRECISIONS, RunConfig
from gpt2demo.records import StepMetrics

LOSSES = st.one_of(
    st.floats(-50, 1e6, allow_nan=False), st.sampled_from([math.nan, math.inf, -math.inf])
)
MEASURED = st.lists(st.tuples(st.floats(0.01, 1e6), LOSSES, st.booleans()), max_size=300)


def steps_of(measured):
    return [
        StepMetrics(
            step=i,
            loss=loss,
            step_ms=step_ms,
            tokens_per_sec=128 / step_ms * 1000,
            is_warmup=i < 2,
            skipped=skipped,
        )
        for i, (step_ms, loss, skipped) in enumerate(measured)
    ]


@given(MEASURED, st.integers(9, 60), st.integers(0, 320))
def test_thinning_keeps_ends_and_extremes_within_the_limit(measured, limit, start):
    steps = steps_of(measured)
    rows = charts.delta_rows(steps, start, limit)
    expected = measured[start:]
    assert len(rows) <= limit
    numbers = [row[0] for row in rows]
    assert numbers == sorted(set(numbers))
    if len(expected) <= limit:
        assert numbers == list(range(start, len(measured)))
    if not expected:
        return
    assert (numbers[0], numbers[-1]) == (start, len(measured) - 1)
    assert set(range(start, min(2, len(measured)))) <= set(numbers)  # warm-up
    kept = np.array([measured[number][:2] for number in numbers])
    whole = np.array([pair[:2] for pair in expected])
    assert kept[:, 0].min() == whole[:, 0].min()
    assert kept[:, 0].max() == whole[:, 0].max()
    assert measured_extremes(measured, numbers) == measured_extremes(
        measured, range(start, len(measured))
    )
    finite = whole[np.isfinite(whole[:, 1]), 1]
    kept_finite = kept[np.isfinite(kept[:, 1]), 1]
    assert len(kept_finite) > 0 or len(finite) == 0
    if len(finite):
        assert (kept_finite.min(), kept_finite.max()) == (finite.min(), finite.max())
    assert np.isfinite(kept).all() == np.isfinite(whole).all()  # a NaN is never thinned away


def measured_extremes(measured, numbers):
    """Least and greatest time of the steps after warm-up: they set the chart's axis."""
    times = [measured[number][0] for number in numbers if number >= 2]
    return (min(times), max(times)) if times else None


@given(MEASURED)
def test_rows_are_strict_json_and_say_what_a_number_cannot(measured):
    rows = json.loads(json.dumps(charts.delta_rows(steps_of(measured), 0, 300), allow_nan=False))
    names = {"n": math.nan, "+": math.inf, "-": -math.inf}
    for row, (step_ms, loss, skipped) in zip(rows, measured, strict=True):
        flag = row[3] if len(row) == 4 else ""
        assert ("s" in flag) == skipped
        if math.isfinite(loss):
            assert row[1] == pytest.approx(loss, abs=5.001e-7)  # a half of the last digit
            assert flag in ("", "s")
        else:
            assert row[1] is None
            assert str(names[flag[0]]) == str(loss)
        # the log line's two decimals, and enough for a tokens/sec that is true to 0.01 %
        assert f"{row[2]:.2f}" in (f"{step_ms:.2f}", f"{round(step_ms, 4):.2f}")
        if step_ms >= 1:
            assert row[2] == pytest.approx(step_ms, rel=1e-4)


def test_a_long_run_keeps_every_spike():
    rng = np.random.default_rng(5)
    times = 100 + rng.normal(0, 1, 3000)
    spikes = rng.choice(np.arange(2, 3000), 40, replace=False)
    times[spikes] = 500 + rng.random(40)
    steps = steps_of([(ms, 9.0, False) for ms in times])
    rows = charts.snapshot_rows(steps)
    assert len(rows) <= 500
    # a bin holds about 30 steps, so spikes of one bin share a place; most bins hold one
    assert sum(row[2] > 400 for row in rows) >= 25
    drawn = np.interp(np.arange(3000), [row[0] for row in rows], [row[2] for row in rows])
    assert all(drawn[max(0, s - 32) : s + 33].max() > 499 for s in spikes)


def test_a_limit_without_room_for_a_bin_is_refused():
    with pytest.raises(ValueError, match="limit must be at least 9, not 8"):
        charts.delta_rows([], 0, 8)


def test_a_curve_describes_its_run():
    config = RunConfig(precision="bf16", B=2, T=64, steps=7)
    steps = steps_of([(10.0, 9.0, False)] * 3)
    assert charts.run_curve("a1", config, steps, live=True) == {
        "id": "a1",
        "label": "bf16 B=2 T=64",
        "precision": "bf16",
        "tokens": 128,
        "steps": 7,
        "warmup": 2,
        "live": True,
        "rows": [[0, 9.0, 10.0], [1, 9.0, 10.0], [2, 9.0, 10.0]],
    }


# ---------------------------------------------------------------- figure


def test_the_figure_is_three_panels_over_one_step_axis():
    figure = charts.base_figure()
    assert json.loads(json.dumps(figure, allow_nan=False)) == figure
    layout = go.Figure(layout=figure["layout"]).layout  # plotly's own validation
    domains = [layout[panel["layout"]].domain for panel in figure["panels"]]
    assert [panel["key"] for panel in figure["panels"]] == ["loss", "ms", "tps"]
    for (low, high), (_, next_high) in zip(domains, [*domains[1:], (0, -1)], strict=True):
        assert next_high < low < high <= 1
    assert {layout[panel["layout"]].anchor for panel in figure["panels"]} == {"x"}
    assert layout.xaxis.anchor == figure["panels"][-1]["axis"]
    assert layout.uirevision
    units = [note.text for note in layout.annotations if note.name.startswith("title-")]
    assert units == ["loss (nats per token)", "ms per step", "tokens per second"]


def luminance(colour):
    """Relative luminance as WCAG 2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def test_every_precision_has_its_own_readable_colour():
    assert tuple(charts.PALETTE) == PRECISIONS
    for theme, ground in (("light", 1.0), ("dark", luminance("#27272a"))):
        colours = [pair[theme] for pair in charts.PALETTE.values()]
        assert len(set(colours)) == len(colours)
        for colour in colours:
            high, low = sorted([luminance(colour), ground], reverse=True)
            # Okabe-Ito's orange is the faint one on white; its marker and dash help there
            assert (high + 0.05) / (low + 0.05) >= (2.2 if colour == "#e69f00" else 3.0)
