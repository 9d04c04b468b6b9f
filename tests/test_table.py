"""The table of finished runs, its CSV and its JSON."""

import csv
import io
import json
import math
from dataclasses import asdict, replace

import pandas as pd
import pytest

from gpt2demo import table
from gpt2demo.config import RunConfig
from gpt2demo.records import RunMemory, RunRecord, RunSummary, StepMetrics


def step(number, loss, *, skipped=False):
    return StepMetrics(
        step=number, loss=loss, step_ms=250.0, tokens_per_sec=512.0, is_warmup=True, skipped=skipped
    )


def record(**changes):
    config = RunConfig(precision="bf16", text="a text of my own " * 9)
    summary = RunSummary(
        state="finished",
        message="20 steps in 5 s.",
        steps_done=20,
        steps_measured=18,
        seconds=5.2,
        step_ms_median=254.5,
        step_ms_p25=250.0,
        step_ms_p75=261.25,
        tokens_per_sec_median=502.9,
        final_loss=8.25,
        mfu=0.375,
        joules_per_1000_tokens=4.5,
        peak_memory_bytes=3 * 2**30,
        memory=RunMemory(
            forecast_bytes=3 * 2**30 + 3 * 2**28,
            verdict="fits",
            capacity_bytes=2**34,
            measured_bytes=3 * 2**30,
            reserved_bytes=None,
            measured_by="max_memory_allocated",
        ),
    )
    device = {"name": changes.pop("device", "NVIDIA H200")}
    return RunRecord(
        config=config.to_dict(),
        device=device,
        steps=(step(0, 9.0), step(1, math.nan, skipped=True)),
        summary=replace(summary, **changes),
    )


def unknown():
    names = ("step_ms_median", "step_ms_p25", "step_ms_p75", "tokens_per_sec_median")
    names += ("final_loss", "mfu", "joules_per_1000_tokens", "peak_memory_bytes", "memory")
    return record(state="out of memory", steps_done=0, **dict.fromkeys(names))


def test_the_table_has_a_row_a_run_with_units_in_its_columns():
    runs = table.runs_table([record(), unknown()])
    assert runs.loc[0].to_dict() == {
        "run": "bf16 B=4 T=32",
        "model": "gpt2",
        "precision": "bf16",
        "B": 4,
        "T": 32,
        "steps done": 20,
        "state": "finished",
        "ms/step median": 254.5,
        "ms/step p25": 250.0,
        "ms/step p75": 261.25,
        "tokens/sec median": 502.9,
        "loss (last step)": 8.25,
        "MFU %": 37.5,
        "J per 1,000 tokens": 4.5,
        "peak memory GiB": 3.0,
        "forecast GiB": 3.75,
        "forecast error %": 25.0,
        "attention": "manual",
        "optimizer": "default",
        "compile": False,
        "vocabulary": 50257,
        "lr": 3e-4,
        "seed": 1337,
        "text": "own",
        "device": "NVIDIA H200",
    }
    missing = runs.columns[runs.loc[1].isna()]
    assert list(missing) == [
        "ms/step median",
        "ms/step p25",
        "ms/step p75",
        "tokens/sec median",
        "loss (last step)",
        "MFU %",
        "J per 1,000 tokens",
        "peak memory GiB",
        "forecast GiB",
        "forecast error %",
    ]
    assert runs["ms/step median"].mean() == 254.5  # numbers, not objects
    assert list(table.runs_table([]).columns) == list(runs.columns)


def test_forecast_errors_are_told_by_device():
    def run(forecast, device):
        memory = replace(record().summary.memory, forecast_bytes=forecast, measured_bytes=1000)
        return record(memory=memory, device=device)

    runs = [run(1004, "A"), run(1019, "A"), run(1000, "A"), run(990, "B"), unknown()]
    assert table.forecast_errors(runs) == [
        "3 runs measured on A: median error 0.40 %, worst 1.90 %, none under the measurement.",
        "1 run measured on B: median error 1.00 %, worst 1.00 %, 1 under the measurement.",
    ]
    assert table.forecast_errors([unknown()]) == []


def test_a_last_loss_of_nan_is_unknown_in_the_table():
    assert table.runs_table([record(final_loss=math.nan)])["loss (last step)"][0] is pd.NA


def test_csv_reads_back_and_leaves_unknown_cells_empty():
    rows = list(csv.DictReader(io.StringIO(table.table_csv([record(), unknown()]))))
    assert float(rows[0]["MFU %"]) == 37.5
    assert rows[0]["device"] == "NVIDIA H200"
    assert rows[1]["MFU %"] == rows[1]["ms/step median"] == ""
    assert rows[1]["state"] == "out of memory"


@pytest.mark.parametrize(
    "hostile", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =1", "x\r=1"]
)
def test_no_cell_of_the_csv_is_a_formula(hostile):
    text = table.table_csv([record(device=hostile)])
    assert len(text.splitlines()) == 2  # one header, one run: no line of its own either
    cell = next(csv.DictReader(io.StringIO(text, newline="")))["device"]
    assert cell.startswith(("'", "x "))
    assert cell.endswith(hostile[-2:])


def test_json_is_strict_and_complete():
    records = [record(), record(final_loss=math.inf)]

    def refuse(constant):
        raise AssertionError(constant)

    data = json.loads(table.records_json(records), parse_constant=refuse)
    assert data[0]["steps"][1]["loss"] is None
    again = [RunRecord.from_dict(item) for item in data]
    assert again[1].summary == records[1].summary
    assert again[0].config == records[0].config
    first, second = again[0].steps
    assert first == records[0].steps[0]
    assert math.isnan(second.loss)
    assert asdict(second) | {"loss": 0} == asdict(records[0].steps[1]) | {"loss": 0}


def test_the_shown_table_is_rounded_and_newest_first():
    shown = table.shown_table([record(step_ms_median=254.4567), unknown()])
    assert list(shown["state"]) == ["out of memory", "finished"]
    assert shown["ms/step median"].iloc[1] == 254.5
    assert shown["ms/step median"].isna().iloc[0]
