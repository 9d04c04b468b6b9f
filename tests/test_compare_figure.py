"""A race as a table and as bars."""

import dataclasses

import pandas as pd
import pytest

from gpt2demo.compare_figure import race_table, speedup_figure
from gpt2demo.config import RunConfig
from gpt2demo.device import probe_device
from gpt2demo.expectation import expect
from gpt2demo.race import Race
from gpt2demo.records import RunRecord, StepMetrics
from gpt2demo.runner import execute


@pytest.fixture(scope="module")
def race() -> Race:
    """A real one, of two precisions that ran and one that did not."""
    info = probe_device("cpu")
    race = Race(RunConfig(model="tiny", B=1, T=8, steps=4, device="cpu"), ["fp32", "bf16", "fp16"])
    race.refused("fp16", "not here")
    while run := race.next_run():
        steps: list[StepMetrics] = []
        summary = execute(run, info, on_step=steps.append)
        race.ended(RunRecord(config=run.to_dict(), device={}, steps=tuple(steps), summary=summary))
    return race


def test_the_table_has_a_row_a_precision_and_blanks_for_the_unknown(race: Race) -> None:
    results = race.results()
    table = race_table(results)
    assert list(table["precision"]) == ["fp32", "bf16", "fp16"]
    assert list(table["state"]) == ["finished", "finished", "not available"]
    for row, result in zip(table.to_dict("records"), results, strict=True):
        if result.step_ms_median is None:
            assert pd.isna(row["ms/step median"])
            assert pd.isna(row["speed-up"])
        else:
            assert row["ms/step median"] == pytest.approx(result.step_ms_median, abs=0.06)
            assert row["speed-up"] == pytest.approx(result.speedup, abs=0.006)
            assert row["peak memory GiB"] == pytest.approx(
                result.peak_memory_bytes / 2**30, abs=0.006
            )
        assert pd.isna(row["MFU %"])  # a CPU has no peak in the table


def test_bars_have_their_spread_and_the_expectation_beside(race: Race) -> None:
    results = [
        dataclasses.replace(result, speedup_low=result.speedup - 0.25, speedup_high=3.0)
        if result.precision == "bf16"
        else result
        for result in race.results()
    ]
    told = expect(probe_device("cpu"), race.config)
    bars, marks = speedup_figure(results, told).data
    assert list(bars.x) == ["fp32", "bf16"]  # fp16 was not measured: no bar, not a bar of zero
    assert list(bars.y) == [1.0, results[1].speedup]
    assert bars.error_y.arrayminus[1] == pytest.approx(0.25)
    assert bars.error_y.array[1] == pytest.approx(max(3.0 - results[1].speedup, 0))
    assert list(marks.x) == [p for p in ("fp32", "bf16", "fp16") if told[p].speedup is not None]
