"""The lesson's ladder: which run comes next, what it is held against, and what is said of it."""

import functools
import re
import threading
import time
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from gpt2demo.config import GPTConfig, InputError, RunConfig, Settings
from gpt2demo.device import probe_device
from gpt2demo.hub import Hub
from gpt2demo.lesson import RUNGS
from gpt2demo.records import STATES, RunRecord, RunSummary, StepMetrics, timing
from gpt2demo.runner import execute
from gpt2demo.staircase import RungResult, Staircase
from gpt2demo.staircase_report import rung_notes, staircase_report
from gpt2demo.support import (
    Support,
    amd_support,
    cpu_support,
    mps_support,
    nvidia_support,
    xpu_support,
)

CONFIG = RunConfig(model="tiny", B=2, T=16, steps=8, seed=7, lr=1e-3)
NATIVE = {p: Support(status="native", reason="It is there.") for p in ("fp32", "tf32", "bf16")}
IDS = ["fp32", "tf32", "bf16", "compile", "sdpa", "vocab", "fused"]
NO_COMPILER = (
    "torch.compile did not work here: no C++ compiler (g++ or clang++) was found. "
    "The run goes on without it."
)
# precision, compile, attention, vocabulary, AdamW: the lesson's order, written out
LADDER = [
    ("fp32", False, "manual", 50257, "default"),
    ("tf32", False, "manual", 50257, "default"),
    ("bf16", False, "manual", 50257, "default"),
    ("bf16", True, "manual", 50257, "default"),
    ("bf16", True, "sdpa", 50257, "default"),
    ("bf16", True, "sdpa", 50304, "default"),
    ("bf16", True, "sdpa", 50304, "fused"),
]


def missing(*precisions: str) -> dict[str, Support]:
    lacks = {p: Support(status="not available", reason=f"No {p} here.") for p in precisions}
    return NATIVE | lacks


def settings(config: RunConfig) -> tuple:
    return (
        *(config.precision, config.compile, config.attention),
        *(config.vocab_size, config.optimizer),
    )


def record(config: RunConfig, step_ms, state: str = "finished", **summary) -> RunRecord:
    steps = tuple(
        StepMetrics(
            step=i,
            loss=9.0,
            step_ms=ms,
            tokens_per_sec=config.tokens_per_step / ms * 1000,
            is_warmup=i < 2,
        )
        for i, ms in enumerate(step_ms)
    )
    compiled = {"compiled": True, "compile_seconds": 9.0} if config.compile else {}
    return RunRecord(
        config=config.to_dict(),
        device={},
        steps=steps,
        summary=RunSummary(
            state=state,
            message=f"It {state}.",
            steps_done=len(steps),
            seconds=1.0,
            **asdict(timing(steps)) | compiled | summary,
        ),
    )


def climb(
    staircase: Staircase, endings: dict[str, dict] | None = None, ms: dict[str, float] | None = None
) -> list[RunConfig]:
    """The whole staircase; `endings` by rung: "state" and whatever else the summary holds."""
    ran = []
    while config := staircase.next_run():
        rung = staircase.doing.split(": ")[1].split(",")[0]
        at = next(r.id for r in RUNGS if rung in (r.name, r.name.split(",")[0]))
        ending = dict((endings or {}).get(at, {}))
        out_of_time = ending.pop("out_of_time", False)
        empty = ending.get("state") in ("out of memory", "diverged", "error")
        took = [] if empty else [(ms or {}).get(at, 100.0)] * config.steps
        staircase.ended(record(config, took, **ending), out_of_time=out_of_time)
        ran.append(config)
    return ran


def by_id(staircase: Staircase) -> dict[str, RungResult]:
    return {result.rung: result for result in staircase.results()}


# --- which run comes next


def test_every_rung_is_the_one_before_with_one_change_more():
    controls = replace(
        CONFIG, precision="fp64", attention="sdpa", optimizer="fused", compile=True, budget_gib=2
    )
    ran = climb(Staircase(controls, NATIVE))
    assert [settings(config) for config in ran] == LADDER
    kept = {"model": "tiny", "B": 2, "T": 16, "steps": 8, "seed": 7, "lr": 1e-3, "budget_gib": 2}
    for config in ran:
        assert {name: getattr(config, name) for name in kept} == kept


def test_the_lessons_figures():
    results = Staircase(CONFIG, NATIVE).results()
    assert [result.rung for result in results] == IDS
    assert [result.lesson_ms for result in results] == [1000, 333, 300, 130, 96, 93, 90]
    ms = np.array([1000, 333, 300, 130, 96, 93, 90])
    before = [result.lesson_speedup_before for result in results]
    assert before[0] is None
    assert before[1:] == pytest.approx(ms[:-1] / ms[1:])
    assert [r.lesson_speedup_first for r in results] == pytest.approx(1000 / ms)


def test_a_rung_without_effect_runs_and_is_marked_with_the_devices_reason():
    support = nvidia_support((7, 5), "Tesla T4", None)
    staircase = Staircase(CONFIG, support)
    assert [settings(config) for config in climb(staircase)] == LADDER
    found = by_id(staircase)
    assert (found["tf32"].state, found["tf32"].mark) == ("finished", "no effect")
    assert found["tf32"].reason == rung_notes(staircase)["tf32"] == support["tf32"].reason
    assert (found["bf16"].mark, found["bf16"].reason) == ("emulated", support["bf16"].reason)
    assert {result.mark for rung, result in found.items() if rung not in ("tf32", "bf16")} == {None}


def test_what_the_device_lacks_is_a_row_and_in_no_later_rung():
    staircase = Staircase(CONFIG, missing("bf16"))
    ran = climb(staircase)
    assert [config.precision for config in ran] == ["fp32"] + ["tf32"] * 5
    assert [settings(c)[1:] for c in ran[2:]] == [rung[1:] for rung in LADDER[3:]]
    bf16 = by_id(staircase)["bf16"]
    assert (bf16.state, bf16.mark, bf16.config) == ("not available", "not available", None)
    assert rung_notes(staircase)["bf16"] == "No bf16 here."
    assert by_id(staircase)["compile"].before == "tf32"
    assert "The later rungs ran without bf16." in staircase.message


@pytest.mark.parametrize("state", ["out of memory", "diverged"])
def test_what_a_later_rung_may_mend_stays_in_it(state):
    staircase = Staircase(CONFIG, NATIVE)
    ran = climb(staircase, {"fp32": {"state": state}, "compile": {"state": state}})
    assert [settings(config) for config in ran] == LADDER
    found = by_id(staircase)
    assert found["compile"].state == state
    assert found["compile"].step_ms_median is None
    assert found["sdpa"].before == "bf16"  # the last that was measured
    assert found["bf16"].speedup_first is None  # fp32 was not
    assert staircase.message.startswith("The staircase is over. TF32: 100.0 ms a step; ")


@pytest.mark.parametrize(
    "ending",
    [
        {"state": "error"},
        {"state": "stopped", "out_of_time": True},
        {"compiled": False, "notes": ("Another note.", NO_COMPILER)},
    ],
)
def test_a_change_that_does_not_work_here_is_in_no_later_rung(ending):
    staircase = Staircase(CONFIG, NATIVE)
    ran = climb(staircase, {"compile": ending})
    assert [config.compile for config in ran] == [False] * 3 + [True] + [False] * 3
    assert [settings(c)[2:] for c in ran] == [rung[2:] for rung in LADDER]
    assert staircase.message.startswith(
        "The staircase is over. The later rungs ran without torch.compile. fp32: 100.0 ms a step; "
    )
    compiled = by_id(staircase)["compile"]
    note = rung_notes(staircase)["compile"]
    if "compiled" in ending:  # measured all the same, and said what ran instead
        assert (compiled.mark, compiled.step_ms_median, note) == (
            "not compiled",
            100.0,
            NO_COMPILER,
        )
    else:
        assert note.endswith("The rungs after it run without it.")


@pytest.mark.parametrize("state", ["stopped", "interrupted"])
def test_a_stop_ends_it_and_keeps_what_is_measured(state):
    staircase = Staircase(CONFIG, NATIVE)
    ran = climb(staircase, {"bf16": {"state": state}}, {"fp32": 80.0, "bf16": 40.0})
    assert len(ran) == 3
    assert staircase.next_run() is None
    assert [r.state for r in staircase.results()] == [
        *("finished", "finished", state),
        *["not run"] * 4,
    ]
    assert staircase.message == (
        f"The staircase ended: the rung bf16 was {state}. fp32: 80.0 ms a step; "
        "bf16: 40.0 ms, 2.00x as fast. On the lesson's A100 it was 3.3x."
    )


def test_nothing_measured_is_said():
    staircase = Staircase(CONFIG, NATIVE)
    climb(staircase, {rung: {"state": "out of memory"} for rung in IDS})
    assert staircase.message == "The staircase is over. No step was measured."


def test_refusals():
    with pytest.raises(InputError, match="at least 3 on the staircase, not 2") as refusal:
        Staircase(replace(CONFIG, steps=2), NATIVE)
    assert refusal.value.field == "steps"
    staircase = Staircase(CONFIG, NATIVE)
    with pytest.raises(ValueError, match="no run was given out"):
        staircase.ended(record(CONFIG, [1.0] * 8))
    staircase.ended(record(staircase.next_run(), [1.0] * 8))
    with pytest.raises(ValueError, match="no run was given out"):
        staircase.ended(record(CONFIG, [1.0] * 8))


# --- figures and words


def test_figures_against_numpy():
    random = np.random.default_rng(5)
    config = replace(CONFIG, steps=23)
    staircase = Staircase(config, NATIVE)
    times = {rung: random.lognormal(4 - 0.3 * i, 0.1, 23) for i, rung in enumerate(IDS)}
    for rung in IDS:
        staircase.ended(record(staircase.next_run(), times[rung].tolist()))
    found = by_id(staircase)
    for i, rung in enumerate(IDS):
        result, measured = found[rung], times[rung][2:]
        assert result.step_ms_median == pytest.approx(np.median(measured))
        assert result.step_ms_p25 == pytest.approx(np.percentile(measured, 25))
        assert result.step_ms_p75 == pytest.approx(np.percentile(measured, 75))
        assert result.speedup_first == pytest.approx(
            np.median(times["fp32"][2:]) / np.median(measured)
        )
        if i:
            below = times[IDS[i - 1]][2:]
            assert result.saved_ms == pytest.approx(np.median(below) - np.median(measured))
            assert result.speedup_before == pytest.approx(np.median(below) / np.median(measured))
            assert result.speedup_before_low == pytest.approx(
                np.percentile(below, 25) / np.percentile(measured, 75)
            )
            assert result.speedup_before_high == pytest.approx(
                np.percentile(below, 75) / np.percentile(measured, 25)
            )
    assert (found["fp32"].saved_ms, found["fp32"].speedup_before) == (None, None)
    assert found["compile"].compile_seconds == 9.0


@pytest.mark.parametrize(
    ("fp32", "bf16", "said"),
    [
        ([100.0] * 8, [50.0] * 8, "Saves 50.0 ms a step: 2.00x the speed of TF32"),
        ([100.0] * 8, [125.0] * 8, "Costs 25.0 ms a step: 0.80x the speed of TF32"),
        ([100.0, 100, 90, 92, 94, 106, 108, 110], [95.0] * 8, "No clear change: 1.05x"),
        ([100.0] * 4, [50.0] * 4, "2.00x the speed of TF32, from too few steps to judge."),
    ],
)
def test_a_gain_is_claimed_only_where_the_steps_show_one(fp32, bf16, said):
    config = replace(CONFIG, steps=len(fp32))
    staircase = Staircase(config, missing("tf32"))
    staircase.ended(record(staircase.next_run(), fp32))
    staircase.ended(record(staircase.next_run(), bf16))
    # TF32 is not here: the rung is held against fp32 and says so
    assert rung_notes(staircase)["bf16"].startswith(said.replace("TF32", "fp32"))


def test_a_machine_that_changed_is_not_taken_for_an_effect():
    staircase = Staircase(CONFIG, nvidia_support((7, 5), "Tesla T4", None))
    climb(staircase, ms={"tf32": 70.0, "bf16": 60.0})
    notes = rung_notes(staircase)
    assert notes["tf32"].startswith("It runs exactly as fp32 does here: 1.43x is the machine's own")
    # and the reason of an emulated one says "slower" only where it was
    assert notes["bf16"].startswith("Saves 10.0 ms a step: 1.17x")
    slow = Staircase(CONFIG, nvidia_support((7, 5), "Tesla T4", None))
    climb(slow, ms={"bf16": 160.0})
    assert "slower than fp32" in rung_notes(slow)["bf16"]


MACHINES = {
    **{str(cc): nvidia_support(cc, None, None) for cc in ((5, 0), (6, 1), (7, 5), (8, 0), (9, 0))},
    "MI300X": amd_support("gfx942", None),
    "MI355X": amd_support("gfx950", None),
    "RX 6800": amd_support("gfx1030", None),
    "CPU": cpu_support({}, onednn_bf16=False, onednn_fp16=False),
    "AMX": cpu_support({"amx_fp16": True}, onednn_bf16=True, onednn_fp16=True),
    "Apple": mps_support(),
    "Arc": xpu_support(has_bf16=False, has_fp16=True, has_fp64=False),
    "none": missing("tf32", "bf16"),
}
ENDINGS = [
    *({"state": state} for state in STATES),
    {"state": "stopped", "out_of_time": True},
    {"compiled": False, "notes": (NO_COMPILER,)},
]


@pytest.mark.parametrize("machine", MACHINES)
def test_every_note_is_one_or_two_sentences(machine):
    for ending in ENDINGS:
        for at in (*IDS, None):
            for factor in (1.0, 0.5, 2.0):
                staircase = Staircase(CONFIG, MACHINES[machine])
                ms = {rung: 100 * factor**i for i, rung in enumerate(IDS)}
                climb(staircase, {at: ending} if at else {}, ms)
                for rung, note in rung_notes(staircase).items():
                    assert 1 <= len(re.findall(r"[.!?](?=\s|$)", note)) <= 2, (rung, note)
                    assert note.endswith(".")


def test_the_report_is_strict_json():
    info = probe_device("cpu")
    staircase = Staircase(CONFIG, info.support)
    climb(staircase)
    told = staircase_report(info, staircase)
    assert list(told) == ["config", "device", "message", "lesson", "rungs"]
    assert not {"precision", "compile", "vocab_size"} & set(told["config"])
    assert [rung["rung"] for rung in told["rungs"]] == IDS
    assert all(rung["note"] for rung in told["rungs"])
    assert told["lesson"] == {"device": "A100", "model": "gpt2", "B": 16, "T": 1024}


# --- through the hub


class Stage:
    """Stands in for runner.execute: every rung at once, but one of them waits to be stopped."""

    def __init__(self, wait_at: str = "") -> None:
        self.wait_at = wait_at
        self.started: list[RunConfig] = []
        self.there = threading.Event()

    def __call__(self, config, info, *, on_step, stop_reason, **_) -> RunSummary:
        self.started.append(config)
        made = record(config, [100.0] * config.steps)
        for step in made.steps[:4]:
            on_step(step)
        if config.attention == self.wait_at:
            self.there.set()
            end = time.monotonic() + 20
            while not (reason := stop_reason()):
                assert time.monotonic() < end
                time.sleep(0.005)
            return replace(made.summary, state="stopped", message=reason, steps_done=4)
        for step in made.steps[4:]:
            on_step(step)
        return made.summary


def over(hub: Hub) -> None:
    end = time.monotonic() + 20
    while hub.current or hub.waiting:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_the_hub_runs_the_rungs_one_after_the_other():
    stage = Stage()
    hub = Hub(Settings(max_steps=500), device="cpu", execute=stage)
    staircase = hub.climb(replace(CONFIG, text="secret words " * 40), "me")
    over(hub)
    assert hub.staircase is staircase
    assert [settings(config) for config in stage.started] == LADDER
    assert {config.text for config in stage.started} == {staircase.config.text} == {"own"}
    assert [run.series for run in hub.finished] == [staircase] * 7
    assert staircase.message.startswith("The staircase is over. fp32: 100.0 ms")
    assert hub.run_of(staircase) is None
    assert by_id(staircase)["tf32"].mark == "no effect"  # on any CPU but one with amx_fp16
    with pytest.raises(InputError, match="from 1 to 500 on this page"):
        hub.climb(replace(CONFIG, steps=501), "me")
    hub.device_info = replace(hub.device_info, support=missing("fp32", "tf32", "bf16"))
    with pytest.raises(InputError, match="fp32 is not available here: No fp32 here"):
        hub.climb(CONFIG, "me")
    assert hub.staircase is staircase
    hub.close()


def test_only_its_owner_stops_it_and_the_line_goes_on():
    stage = Stage(wait_at="sdpa")
    hub = Hub(Settings(), device="cpu", execute=stage)
    staircase = hub.climb(CONFIG, "me")
    assert stage.there.wait(20)
    assert hub.run_of(staircase) is hub.current
    with pytest.raises(InputError, match="go on already"):
        hub.climb(CONFIG, "me")
    hub.submit(replace(CONFIG, B=1), "other")
    hub.stop("other")  # only their own run leaves the line
    hub.submit(replace(CONFIG, B=1), "other")
    hub.stop("me")
    over(hub)
    assert [settings(config) for config in stage.started[:5]] == LADDER[:5]
    assert [config.B for config in stage.started[5:]] == [1]
    assert staircase.message.startswith("The staircase ended: the rung + SDPA was stopped. ")
    assert by_id(staircase)["sdpa"].steps_measured == 2
    assert by_id(staircase)["compile"].step_ms_median == 100.0
    hub.close()


# --- for real


# torch's compiler itself uses what it deprecates
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_rung_is_the_same_run_as_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # Traced, cut into forward and backward, and run by torch: the C++ code of three graphs takes
    # minutes, and that it computes the same is held by test_runner.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    small = {"n_layer": 1, "n_head": 1, "n_embd": 32}
    monkeypatch.setattr(
        RunConfig, "gpt", property(lambda run: GPTConfig(vocab_size=run.vocab_size, **small))
    )
    info = probe_device("cpu")
    staircase = Staircase(replace(CONFIG, B=1, T=8, steps=3, device="cpu"), info.support)
    losses = []
    while run := staircase.next_run():
        steps: list[StepMetrics] = []
        summary = execute(run, info, on_step=steps.append)
        staircase.ended(
            RunRecord(config=run.to_dict(), device={}, steps=tuple(steps), summary=summary)
        )
        losses.append([step.loss for step in steps])
    results = staircase.results()
    assert [result.state for result in results] == ["finished"] * 7
    assert [result.mark for result in results[3:]] == [None] * 4  # this machine has a compiler
    assert [result.compile_seconds is not None for result in results] == [False] * 3 + [True] * 4
    for result, found in zip(results, losses, strict=True):
        alone: list[StepMetrics] = []
        execute(RunConfig(**result.config), info, on_step=alone.append)
        assert [step.loss for step in alone] == found, result.name
    assert losses[1] == losses[0]  # TF32 on a CPU
    assert losses[2] != losses[0]
    assert losses[6] == pytest.approx(losses[5], rel=1e-4)  # fused AdamW is the same AdamW
