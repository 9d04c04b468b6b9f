"""What an import may hold: runs of another machine as JSON, checked in every part.

They are a stranger's words and numbers: every field is known, of its type, finite and bounded.
"""

import json
import math
from dataclasses import MISSING, fields
from typing import Any, Final

from gpt2demo.config import InputError, RunConfig, shown
from gpt2demo.records import OutOfMemory, RunMemory, RunRecord, RunSummary, StepMetrics

FORMAT: Final = 1  # of the exported JSON
MAX_IMPORT_CHARS: Final = 8 * 2**20
MAX_IMPORT_STEPS: Final = 10_000  # of one run
MAX_IMPORT_TEXT: Final = 4_000  # characters of one text
MAX_IMPORT_ITEMS: Final = 100  # of one list or table, steps apart

# What an imported run may say of its device: the fields of device.DeviceInfo but for `support`.
_DEVICE_NUMBERS: Final = frozenset(
    ("index", "memory_total_bytes", "memory_free_bytes", "cores", "torch_threads")
)
DEVICE_FIELDS: Final = _DEVICE_NUMBERS | {
    *("type", "name", "compute_capability", "architecture", "driver_version", "torch_version"),
    *("cuda_version", "hip_version", "python_version", "platform", "gpu", "problem"),
}
_MAY_BE_INFINITE: Final = ("loss", "final_loss", "loss_scale")
_FLAGS: Final = {f"{name}_flag": name for name in _MAY_BE_INFINITE}
_NOT_FINITE: Final = ("nan", "inf", "-inf")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def strict(text: str) -> Any:
    """The value of a strict JSON text.

    Raises:
        ValueError: it is none.
    """
    return json.loads(text, parse_constant=_no_constant)


def _refusal(what: str) -> InputError:
    return InputError("import", f"Nothing was imported: {what}.")


def read_runs(text: object, most: int) -> list[RunRecord]:
    """The checked runs of an import, at most `most`.

    Raises:
        InputError: (field "import") saying what is wrong.
    """
    if not isinstance(text, str):
        raise _refusal("the file is no text")
    if len(text) > MAX_IMPORT_CHARS:
        raise _refusal(
            f"the file has {len(text):,} characters; at most {MAX_IMPORT_CHARS:,} are allowed"
        )
    try:
        data = strict(text.removeprefix("\ufeff"))
    except json.JSONDecodeError as exc:
        place = f"line {exc.lineno:,}, column {exc.colno:,}"
        raise _refusal(f"the file is no JSON ({place})") from exc
    except (ValueError, RecursionError) as exc:
        raise _refusal("the file holds a number or a nesting that no run has") from exc
    runs = _list_of_runs(data)
    if not runs:
        raise _refusal("the file holds no run")
    if len(runs) > most:
        raise _refusal(f"the file holds {len(runs):,} runs; at most {most:,} are taken")
    records = []
    for number, run in enumerate(runs, 1):
        try:
            records.append(_read_run(run))
        except RecursionError as exc:
            raise _refusal(f"run {number} is nested too deep") from exc
        except ValueError as exc:  # an InputError too
            what = str(exc).removeprefix("not a run of gpt2demo: ").rstrip(".")
            what = what.replace("NoneType", "null")
            raise _refusal(f"run {number}: {what}") from exc
    return records


def _list_of_runs(data: Any) -> list[Any]:
    """The runs in what the JSON holds."""
    if isinstance(data, dict) and "gpt2demo" in data:
        version = data["gpt2demo"]
        if type(version) is not int or version < 1:
            raise _refusal(f"gpt2demo must be {FORMAT}, not {shown(version)}")
        if version > FORMAT:
            raise _refusal("the file was written by a newer version of gpt2demo")
        data = data.get("runs")
    elif isinstance(data, dict) and {"config", "steps"} & data.keys():
        data = [data]
    if not isinstance(data, list):
        raise _refusal("the file is neither an export nor a run of gpt2demo")
    return data


def _read_run(data: Any) -> RunRecord:
    """One run, everything in it known, of the right kind and bounded.

    Raises:
        ValueError: saying what is wrong.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{shown(data)} is no run")
    for part, kind in (("config", dict), ("device", dict), ("steps", list), ("summary", dict)):
        if not isinstance(data.get(part), kind):
            raise ValueError(f"{part} is missing or no {'list' if kind is list else 'table'}")
    if len(data["steps"]) > MAX_IMPORT_STEPS:
        raise ValueError(f"it has more than {MAX_IMPORT_STEPS:,} steps")
    config = data["config"]
    _check_names("config", config, _fields(RunConfig) | _NAMES_OF_A_RUN)
    device = {name: value for name, value in data["device"].items() if name in DEVICE_FIELDS}
    _check_device(device)
    steps, summary = data["steps"], data["summary"]
    step_fields = _fields(StepMetrics)
    for number, step in enumerate(steps):
        _check_names(f"step {number}", step, step_fields)
        _check_bounds(f"step {number}", step)
        if step["step"] != number:
            raise ValueError(f"step {number} says that it is step {shown(step['step'])}")
    _check_names("summary", summary, _fields(RunSummary))
    for part, kind in (("memory", RunMemory), ("out_of_memory", OutOfMemory)):
        if summary.get(part) is not None:
            _check_names(part, summary[part], _fields(kind))
    _check_bounds("summary", summary)
    record = RunRecord.from_dict(
        {
            "config": RunConfig(**config).to_dict(),
            "device": device,
            "steps": steps,
            "summary": summary,
        }
    )
    if not record.summary.steps_done == len(steps) <= record.config["steps"]:
        raise ValueError("its settings, its summary and its steps differ in how many steps ran")
    return record


def _fields(kind: Any) -> dict[str, bool]:
    """The fields of a dataclass, and whether each must be there."""
    return {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(kind)}


# without these nobody knows what was measured; other settings may be newer than the file
_NAMES_OF_A_RUN: Final = dict.fromkeys(("model", "precision", "B", "T", "steps"), True)


def _check_names(what: str, data: Any, known: dict[str, bool]) -> None:
    """Refuse a field that is unknown or missing, and a flag (see `jsonable`) that flags nothing."""
    if not isinstance(data, dict):
        raise ValueError(f"{what} is no table")
    for name in data:
        if name in _FLAGS and data.get(_FLAGS[name], 0) is None and data[name] in _NOT_FINITE:
            continue
        if name not in known:
            raise ValueError(f"{what} has the unknown field {shown(name)}")
    for name, needed in known.items():
        if needed and name not in data:
            raise ValueError(f"{what} lacks {name}")


def _check_device(device: dict[str, Any]) -> None:
    """Refuse a field of another kind than the device's own."""
    if not isinstance(device.get("type"), str):
        raise ValueError("device lacks its type")
    for name, value in device.items():
        if value is not None and type(value) is not (int if name in _DEVICE_NUMBERS else str):
            raise ValueError(f"device: {name} is of type {type(value).__name__}")
    _check_bounds("device", device)


def _check_bounds(what: str, value: Any, name: str = "") -> None:
    """Refuse what a table, a figure or another browser could not take."""
    where = f"{what}: {name}" if name else what
    if isinstance(value, str):
        if len(value) > MAX_IMPORT_TEXT:
            raise ValueError(f"{where} has more than {MAX_IMPORT_TEXT:,} characters")
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            raise ValueError(f"{where} holds half a character") from exc
    elif isinstance(value, int):
        if not 0 <= value <= 2**53:
            raise ValueError(f"{where} is out of range")
    elif isinstance(value, float):
        if name not in _MAY_BE_INFINITE and not 0 <= value < math.inf:
            raise ValueError(f"{where} is out of range")
    elif isinstance(value, dict | list):
        if len(value) > MAX_IMPORT_ITEMS:
            raise ValueError(f"{where} has more than {MAX_IMPORT_ITEMS} items")
        for item in value:
            _check_bounds(where, item)
        if isinstance(value, dict):
            for key, item in value.items():
                _check_bounds(what, item, key)
