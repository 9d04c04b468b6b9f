import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt2demo.records import (
    STATES,
    OutOfMemory,
    RunMemory,
    RunRecord,
    RunSummary,
    StepMetrics,
    from_jsonable,
    jsonable,
    log_line,
    timing,
)

# a busy machine is no fault of the code
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def step(number: int = 0, **changes: object) -> StepMetrics:
    values = {"step": number, "loss": 9.5, "step_ms": 100.0, "tokens_per_sec": 1280.0}
    return StepMetrics(**(values | {"is_warmup": number < 2} | changes))


def strict(value: object) -> str:
    """JSON as a strict parser takes it: no NaN, no Infinity."""
    return json.dumps(value, allow_nan=False)


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def load(text: str) -> object:
    return json.loads(text, parse_constant=no_constant)


# --- NaN and infinity ---


@pytest.mark.parametrize(
    ("value", "flag"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")]
)
def test_a_number_that_json_lacks_is_null_with_a_flag_beside(value: float, flag: str) -> None:
    record = jsonable(dataclasses.asdict(step(3, loss=value)))
    assert record["loss"] is None
    assert record["loss_flag"] == flag
    assert load(strict(record)) == record
    assert repr(from_jsonable(record)["loss"]) == flag
    assert "loss_flag" not in from_jsonable(record)


def test_finite_numbers_and_other_values_have_no_flag() -> None:
    plain = {"a": 1.5, "b": None, "c": [1, {"d": "nan"}], "e": True, "f": "inf", "g": 0.0}
    assert jsonable(plain) == plain
    assert from_jsonable(plain) == plain


def test_only_a_flag_beside_a_null_is_a_flag() -> None:
    for kept in (
        {"mps_flag": "nan"},  # nothing beside it
        {"mps": 1, "mps_flag": "nan"},
        {"mps": None, "mps_flag": "yes"},
        {"mps": None, "mps_flag": None},
        {"mps": None, "mps_flag": ["nan"]},
        {"_flag": "nan"},
        {"mps": None, "mps_flag": 10**400},
    ):
        assert from_jsonable(kept) == kept


def test_lists_hold_null_for_such_a_number() -> None:
    value = {"rows": [1.0, math.nan, (math.inf, {"x": -math.inf})]}
    assert load(strict(jsonable(value))) == {
        "rows": [1.0, None, [None, {"x": None, "x_flag": "-inf"}]]
    }


keys = st.text(max_size=8).filter(lambda key: not key.endswith("_flag"))
jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=10,
)


@unhurried
@given(jsons)
def test_everything_becomes_strict_json(value: object) -> None:
    load(strict(jsonable(value)))


def equal(a: object, b: object) -> bool:
    """Equality in which a NaN equals a NaN and 1 is not 1.0."""
    return repr(a) == repr(b)


@unhurried
@given(st.dictionaries(keys, st.floats() | st.dictionaries(keys, st.floats(), max_size=3)))
def test_dicts_come_back_as_they_were(value: dict[str, object]) -> None:
    back = from_jsonable(load(strict(jsonable(value))))
    assert {key: repr(back[key]) for key in back} == {key: repr(value[key]) for key in value}


# --- a whole run ---

numbers = st.floats()
maybe = st.none() | numbers
counts = st.integers(0, 2**53)
steps_made = st.builds(
    StepMetrics,
    step=counts,
    loss=numbers,
    step_ms=numbers,
    tokens_per_sec=numbers,
    is_warmup=st.booleans(),
    skipped=st.booleans(),
    loss_scale=maybe,
    peak_memory_bytes=st.none() | counts,
)
run_memories = st.builds(
    RunMemory,
    forecast_bytes=counts,
    verdict=st.text(),
    capacity_bytes=st.none() | counts,
    measured_bytes=st.none() | counts,
    reserved_bytes=st.none() | counts,
    measured_by=st.none() | st.text(),
)
out_of_memories = st.builds(
    OutOfMemory,
    step=st.none() | counts,
    moment=st.text(),
    asked_bytes=st.none() | counts,
    parts=st.dictionaries(keys, counts, max_size=4),
    capacity_bytes=st.none() | counts,
    smaller_B=st.none() | counts,
    smaller_T=st.none() | counts,
)
summaries = st.builds(
    RunSummary,
    state=st.sampled_from(STATES),
    message=st.text(),
    notes=st.lists(st.text(), max_size=3).map(tuple),
    world_size=st.integers(1, 64),
    steps_done=counts,
    steps_measured=counts,
    seconds=numbers,
    compile_seconds=maybe,
    compiled=st.none() | st.booleans(),
    step_ms_median=maybe,
    step_ms_p25=maybe,
    step_ms_p75=maybe,
    tokens_per_sec_median=maybe,
    final_loss=maybe,
    skipped_steps=counts,
    parameters=st.none() | counts,
    flops_per_token=maybe,
    peak_flops=maybe,
    mfu=maybe,
    peak_memory_bytes=st.none() | counts,
    joules_per_1000_tokens=st.none() | st.floats(0, 1e9),
    memory=st.none() | run_memories,
    out_of_memory=st.none() | out_of_memories,
)
parts = st.dictionaries(keys, st.none() | st.text() | st.floats() | counts | st.booleans())
records = st.builds(
    RunRecord,
    config=parts,
    device=st.dictionaries(keys, parts | st.text(), max_size=3),
    steps=st.lists(steps_made, max_size=4).map(tuple),
    summary=summaries,
)


def test_the_strategies_fill_every_field() -> None:
    for kind, strategy in (
        (StepMetrics, steps_made),
        (RunMemory, run_memories),
        (OutOfMemory, out_of_memories),
        (RunSummary, summaries),
    ):
        filled = strategy.wrapped_strategy.kwargs
        assert list(filled) == [field.name for field in dataclasses.fields(kind)]


@unhurried
@given(records)
def test_a_record_survives_strict_json(record: RunRecord) -> None:
    text = strict(record.to_dict())
    back = RunRecord.from_dict(load(text))
    assert equal(back.steps, record.steps)
    assert equal(back.summary, record.summary)
    assert back.config.keys() == record.config.keys()
    assert all(equal(back.config[key], record.config[key]) for key in record.config)
    assert back.device.keys() == record.device.keys()
    assert strict(back.to_dict()) == text


def test_the_json_has_the_documented_parts() -> None:
    summary = RunSummary(
        state="diverged", message="Diverged.", steps_done=1, steps_measured=0, seconds=0.5
    )
    record = RunRecord(
        config={"B": 4}, device={"type": "cpu"}, steps=(step(0, loss=math.nan),), summary=summary
    )
    data = load(strict(record.to_dict()))
    assert list(data) == ["config", "device", "steps", "summary"]
    assert data["steps"] == [
        {
            "step": 0,
            "loss": None,
            "loss_flag": "nan",
            "step_ms": 100.0,
            "tokens_per_sec": 1280.0,
            "is_warmup": True,
            "skipped": False,
            "loss_scale": None,
            "peak_memory_bytes": None,
        }
    ]
    assert data["summary"]["state"] == "diverged"
    assert {"state", "step_ms_median", "tokens_per_sec_median", "mfu"} <= data["summary"].keys()
    assert data["summary"]["mfu"] is None


MEMORY = RunMemory(
    forecast_bytes=1010,
    verdict="fits",
    capacity_bytes=2000,
    measured_bytes=1000,
    reserved_bytes=None,
    measured_by="max_memory_allocated",
)
FAILURE = OutOfMemory(
    step=0,
    moment="backward",
    asked_bytes=512,
    parts={"weights": 300, "gradients": 0},
    capacity_bytes=2000,
    smaller_B=2,
    smaller_T=None,
)


def good() -> dict[str, object]:
    summary = RunSummary(
        state="finished",
        message="",
        steps_done=1,
        steps_measured=0,
        seconds=1.0,
        notes=("a",),
        memory=MEMORY,
        out_of_memory=FAILURE,
    )
    return RunRecord(config={}, device={}, steps=(step(),), summary=summary).to_dict()


def test_whole_numbers_are_floats_where_a_float_belongs() -> None:
    data = good()
    data["steps"][0]["step_ms"] = 812  # as another program writes 812.0
    data["summary"]["mfu"] = 1
    record = RunRecord.from_dict(data)
    assert equal((record.steps[0].step_ms, record.summary.mfu), (812.0, 1.0))


def changed(path: str, value: object) -> dict[str, object]:
    data = good()
    *way, last = path.split(".")
    place = data
    for name in way:
        place = place[int(name) if name.isdigit() else name]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return data


FOREIGN = [
    *(None, 1, "run", [], {}, [1, 2], {"config": {}}, {"steps": []}),
    *(changed(part, KeyError) for part in ("config", "device", "steps", "summary")),
    *(changed("config", value) for value in (None, [], "", "B=4", 4)),
    *(changed("device", value) for value in (None, [], "cpu", 4.5)),
    *(changed("steps", value) for value in (None, {}, "", "ab", 3, [None], [[]], [{}], ["x"])),
    *(changed("summary", value) for value in (None, [], {}, "finished", 0)),
    *(changed("summary.state", value) for value in (KeyError, None, "", "done", 1, ["finished"])),
    *(changed("summary.notes", value) for value in (None, "abc", [1], {"a": 1}, [None])),
    *(changed("summary.mfu", value) for value in ("0.5", True, [0.5], 10**400)),
    *(changed("summary.seconds", value) for value in (None, "1", KeyError, False)),
    *(changed("steps.0.step", value) for value in (1.0, "0", None, True, KeyError)),
    *(changed("steps.0.is_warmup", value) for value in (0, 1, None, "yes")),
    *(changed("steps.0.loss", value) for value in (None, "nan", [], True)),
    *(changed("steps.0.loss_flag", value) for value in ("nan", None, "other")),
    *(changed("summary.memory", value) for value in ([], {}, "fits", 1, True, [None])),
    *(
        changed(f"summary.memory.{name}", value)
        for name in ("capacity_bytes", "measured_bytes", "reserved_bytes")
        for value in (KeyError, "1000", 1.5, True, [], {})
    ),
    *(changed("summary.memory.forecast_bytes", value) for value in (KeyError, None, 1.0, "1")),
    *(changed("summary.memory.verdict", value) for value in (KeyError, None, 1, ["fits"])),
    *(changed("summary.memory.measured_by", value) for value in (KeyError, 1, ["tracker"])),
    *(changed("summary.out_of_memory", value) for value in ([], {}, "backward", 0, False)),
    *(
        changed(f"summary.out_of_memory.{name}", value)
        for name in ("step", "asked_bytes", "capacity_bytes", "smaller_B", "smaller_T")
        for value in (KeyError, "2", 2.5, True, [2], {})
    ),
    *(changed("summary.out_of_memory.moment", value) for value in (KeyError, None, 2, [])),
    *(
        changed("summary.out_of_memory.parts", value)
        for value in (KeyError, None, [], [1], "weights", 3)
    ),
    *(
        changed("summary.out_of_memory.parts.weights", value)
        for value in (None, 1.0, "1", True, [], {})
    ),
    changed("summary.memory.surprise", 1),
    changed("summary.out_of_memory.surprise", 1),
    changed("steps.0.surprise", 1),
    changed("summary.surprise", 1),
]


@pytest.mark.parametrize("data", FOREIGN, ids=lambda data: strict(data)[-60:])
def test_foreign_json_is_a_value_error(data: object) -> None:
    RunRecord.from_dict(good())  # so that the change is what is refused
    with pytest.raises(ValueError, match="not a run of gpt2demo"):
        RunRecord.from_dict(data)


def test_a_record_of_before_memory_was_measured_is_read() -> None:
    data = good()
    del data["summary"]["memory"], data["summary"]["out_of_memory"]
    summary = RunRecord.from_dict(data).summary
    assert (summary.memory, summary.out_of_memory) == (None, None)
    assert RunRecord.from_dict(changed("summary.memory", None)).summary.memory is None


def test_nested_records_come_back_as_records() -> None:
    summary = RunRecord.from_dict(load(strict(good()))).summary
    assert summary.memory == MEMORY
    assert summary.out_of_memory == FAILURE
    assert type(summary.out_of_memory.parts) is dict


@pytest.mark.parametrize(
    ("forecast", "measured", "error"),
    [
        (1000, 1000, 0.0),
        (1010, 1000, 0.01),  # the forecast was too high
        (750, 1000, -0.25),  # too low: the run takes a third more than was told
        (1000, None, None),
        (1000, 0, None),  # a counter that counts nothing
    ],
)
def test_the_forecasts_error_is_relative_to_what_was_measured(
    forecast: int, measured: int | None, error: float | None
) -> None:
    memory = dataclasses.replace(MEMORY, forecast_bytes=forecast, measured_bytes=measured)
    assert memory.error == error


@unhurried
@given(jsons)
def test_any_json_is_a_record_or_a_value_error(data: object) -> None:
    nested = [changed(f"summary.{name}", data) for name in ("memory", "out_of_memory")]
    nested.append(changed("summary.out_of_memory.parts", data))
    for foreign in (data, *nested, *(good() | {name: data} for name in ("steps", "summary"))):
        try:
            record = RunRecord.from_dict(foreign)
        except ValueError:
            continue
        assert isinstance(record.summary, RunSummary)


def test_deep_json_is_a_value_error() -> None:
    deep: object = []
    for _ in range(50_000):
        deep = [deep]
    with pytest.raises(ValueError, match="not a run of gpt2demo"):
        RunRecord.from_dict(good() | {"config": {"deep": deep}})


# --- medians and quartiles ---


@unhurried
@given(
    st.lists(
        st.tuples(st.floats(0.01, 1e7), st.floats(0.01, 1e9), st.booleans()),
        min_size=1,
        max_size=40,
    )
)
def test_medians_and_quartiles_are_numpys(rows: list[tuple[float, float, bool]]) -> None:
    steps = [
        step(i, step_ms=ms, tokens_per_sec=speed, is_warmup=warmup)
        for i, (ms, speed, warmup) in enumerate(rows)
    ]
    found = timing(steps)
    step_ms = np.array([ms for ms, _, warmup in rows if not warmup])
    speeds = np.array([speed for _, speed, warmup in rows if not warmup])
    assert found.steps_measured == len(step_ms)
    values = (found.step_ms_p25, found.step_ms_median, found.step_ms_p75)
    if len(step_ms) == 0:
        assert values == (None, None, None)
        assert found.tokens_per_sec_median is None
    else:
        assert values == pytest.approx(np.percentile(step_ms, [25, 50, 75]), rel=1e-12)
        assert found.tokens_per_sec_median == pytest.approx(np.percentile(speeds, 50), rel=1e-12)


def test_warmup_is_left_out() -> None:
    steps = [step(0, step_ms=9000.0, tokens_per_sec=1.0), step(1, step_ms=5000.0)]
    assert timing([]) == timing(steps) == timing(steps[:1])
    assert timing(steps).steps_measured == 0
    assert timing(steps).step_ms_median is None
    steps += [step(2, step_ms=120.0), step(3, step_ms=80.0), step(4, step_ms=90.0)]
    found = timing(steps)
    assert found.steps_measured == 3
    assert (found.step_ms_p25, found.step_ms_median, found.step_ms_p75) == (85.0, 90.0, 105.0)
    assert found.tokens_per_sec_median == 1280.0


def test_one_measured_step_is_its_own_median() -> None:
    found = timing([step(2, step_ms=7.0, tokens_per_sec=3.0)])
    assert (found.step_ms_p25, found.step_ms_median, found.step_ms_p75) == (7.0, 7.0, 7.0)
    assert found.tokens_per_sec_median == 3.0


def test_timings_names_are_the_summarys() -> None:
    names = {field.name for field in dataclasses.fields(RunSummary)}
    assert {field.name for field in dataclasses.fields(timing([]))} <= names


# --- the log line ---


def test_log_line_is_the_lessons() -> None:
    record = step(3, loss=9.8712345, step_ms=812.331, tokens_per_sec=157.5698)
    assert log_line(record) == "step 3, loss: 9.871234, dt: 812.33ms, tok/sec: 157.57"


@pytest.mark.parametrize(
    ("loss", "text"), [(math.nan, "nan"), (math.inf, "inf"), (0.0, "0.000000")]
)
def test_log_line_of_odd_losses(loss: float, text: str) -> None:
    line = log_line(step(0, loss=loss, step_ms=0.004, tokens_per_sec=1234567.891))
    assert line == f"step 0, loss: {text}, dt: 0.00ms, tok/sec: 1234567.89"


def test_records_are_frozen_and_hide_nothing_in_a_dict() -> None:
    for one in (step(), timing([]), MEMORY, FAILURE, RunRecord.from_dict(good())):
        assert not hasattr(one, "__dict__")
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, dataclasses.fields(one)[0].name, None)
