"""The finished runs as a table, as CSV and as JSON."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

import pandas as pd

from gpt2demo.config import RunConfig
from gpt2demo.records import RunRecord

_GIB: Final = 2**30
_TEXT: Final = "string"
_COLUMNS: Final[dict[str, str]] = {
    "run": _TEXT,
    "model": _TEXT,
    "precision": _TEXT,
    "B": "Int64",
    "T": "Int64",
    "steps done": "Int64",
    "state": _TEXT,
    "ms/step median": "Float64",
    "ms/step p25": "Float64",
    "ms/step p75": "Float64",
    "tokens/sec median": "Float64",
    "loss (last step)": "Float64",
    "MFU %": "Float64",
    "J per 1,000 tokens": "Float64",
    "peak memory GiB": "Float64",
    "forecast GiB": "Float64",
    "forecast error %": "Float64",
    "attention": _TEXT,
    "optimizer": _TEXT,
    "compile": "boolean",
    "vocabulary": "Int64",
    "lr": "Float64",
    "seed": "Int64",
    "text": _TEXT,
    "device": _TEXT,
}
_SHOWN_DECIMALS: Final = {
    "ms/step median": 1,
    "ms/step p25": 1,
    "ms/step p75": 1,
    "tokens/sec median": 1,
    "loss (last step)": 4,
    "MFU %": 1,
    "J per 1,000 tokens": 2,
    "peak memory GiB": 2,
    "forecast GiB": 2,
    "forecast error %": 2,
}


def _cells(record: RunRecord) -> Iterable[Any]:
    """One table row; None where a figure is unknown."""
    config, summary = record.config, record.summary
    memory, told = summary.peak_memory_bytes, summary.memory
    yield RunConfig(**config).label
    yield from (config[name] for name in ("model", "precision", "B", "T"))
    yield from (summary.steps_done, summary.state)
    yield from (summary.step_ms_median, summary.step_ms_p25, summary.step_ms_p75)
    yield from (summary.tokens_per_sec_median, summary.final_loss)
    yield None if summary.mfu is None else summary.mfu * 100
    yield summary.joules_per_1000_tokens
    yield None if memory is None else memory / _GIB
    yield None if told is None else told.forecast_bytes / _GIB
    yield None if told is None or told.error is None else told.error * 100
    yield from (config[name] for name in ("attention", "optimizer", "compile", "vocab_size"))
    yield from (config[name] for name in ("lr", "seed", "text"))
    yield record.device.get("name")


def runs_table(records: Sequence[RunRecord]) -> pd.DataFrame:
    """The runs as a table, one row each, units in the column names, NA for what is unknown.

    A last loss that is NaN is NA as well; the state then says "diverged".
    """
    rows = [tuple(_cells(record)) for record in records]
    return pd.DataFrame(
        {
            name: pd.array([row[i] for row in rows], dtype=dtype)
            for i, (name, dtype) in enumerate(_COLUMNS.items())
        }
    )


def shown_table(records: Sequence[RunRecord]) -> pd.DataFrame:
    """`runs_table`, the newest run first, with as many digits as a reader wants."""
    return runs_table(records)[::-1].round(_SHOWN_DECIMALS)


def forecast_errors(records: Sequence[RunRecord]) -> list[str]:
    """How well the forecasts held, one sentence a device: over all runs whose memory was measured.

    "Under" is a forecast that was too low by more than a thousandth: the kind that hurts.
    """
    rows = [
        (record.device.get("name") or "this device", record.summary.memory.error * 100)
        for record in records
        if record.summary.memory and record.summary.memory.error is not None
    ]
    table = pd.DataFrame(rows, columns=["device", "error"])
    said = []
    for device, errors in table.groupby("device", sort=False)["error"]:
        count, under = len(errors), int((errors < -0.1).sum())
        off = errors.abs()
        said.append(
            f"{count} {'run' if count == 1 else 'runs'} measured on {device}: median error "
            f"{off.median():.2f} %, worst {off.max():.2f} %, "
            f"{under or 'none'} under the measurement."
        )
    return said


def _inert(cell: Any) -> Any:
    """The text so that no spreadsheet takes it for a formula, nor a part of it for a new line."""
    if not isinstance(cell, str):
        return cell
    line = " ".join(cell.splitlines()).replace("\t", " ")
    # spaces and what is not seen, as a byte order mark, do not save it
    first = next((sign for sign in line if sign.isprintable() and not sign.isspace()), "")
    return "'" + line if first in ("=", "+", "-", "@") else line


def table_csv(records: Sequence[RunRecord]) -> str:
    """`runs_table` as CSV with a header line; unknown cells are empty."""
    table = runs_table(records)
    for name in table.columns[table.dtypes == _TEXT]:
        table[name] = table[name].map(_inert)
    return table.to_csv(index=False)


def records_json(records: Sequence[RunRecord]) -> str:
    """The runs as strict JSON: a list of `RunRecord.to_dict`."""
    return json.dumps([record.to_dict() for record in records], allow_nan=False, indent=1)
