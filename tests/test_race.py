"""The race: which run comes next, and what its figures say, with numpy as the second opinion."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest

from gpt2demo.config import PRECISIONS, InputError, RunConfig
from gpt2demo.race import MAX_ROUNDS, PrecisionResult, Race, _interval
from gpt2demo.records import RunRecord, RunSummary, StepMetrics, timing

CONFIG = RunConfig(model="tiny", B=2, T=16, steps=12, seed=7)
TRUE_MS = {"fp32": 100.0, "tf32": 60.0, "bf16": 40.0, "fp16": 45.0, "fp64": 800.0}


def record(
    config: RunConfig,
    step_ms: list[float],
    *,
    state: str = "finished",
    losses: list[float] | None = None,
    **summary,
) -> RunRecord:
    """A run whose steps took so long; the first two are warm-up."""
    losses = losses or [10.0 - 0.1 * i for i in range(len(step_ms))]
    steps = tuple(
        StepMetrics(
            step=i,
            loss=loss,
            step_ms=ms,
            tokens_per_sec=config.tokens_per_step / ms * 1000,
            is_warmup=i < 2,
        )
        for i, (ms, loss) in enumerate(zip(step_ms, losses, strict=True))
    )
    return RunRecord(
        config=config.to_dict(),
        device={},
        steps=steps,
        summary=RunSummary(
            state=state,
            message=f"It {state}.",
            steps_done=len(steps),
            seconds=sum(step_ms) / 1000,
            **asdict(timing(steps)),
            **summary,
        ),
    )


@dataclass
class Machine:
    """Runs a race on its own clock; `speed(fraction of the race that is over)` slows it down."""

    slower: Callable[[float], float] = lambda done: 1.0
    jitter: float = 0.01

    def run(self, race: Race) -> list[str]:
        """The whole race; the order in which precisions ran."""
        total, done, ran = race.runs_left * race.config.steps, 0, []
        random = np.random.default_rng(3)
        while config := race.next_run():
            ran.append(config.precision)
            step_ms = []
            for _ in range(config.steps):
                noise = 1 + self.jitter * random.standard_normal()
                step_ms.append(TRUE_MS[config.precision] * self.slower(done / total) * noise)
                done += 1
            race.ended(record(config, step_ms))
        return ran


def by_precision(race: Race) -> dict[str, PrecisionResult]:
    return {result.precision: result for result in race.results()}


# --- which run comes next


def test_one_round_runs_each_precision_once_in_order():
    race = Race(CONFIG, ["bf16", "fp32", "tf32"])
    assert race.runs_left == 3
    assert Machine().run(race) == ["bf16", "fp32", "tf32"]
    assert (race.runs_left, race.runs_done) == (0, 3)
    assert race.next_run() is None


def test_runs_differ_in_nothing_but_the_precision():
    race = Race(replace(CONFIG, precision="fp64", B=3, lr=1e-3), PRECISIONS, rounds=2)
    runs = []
    while config := race.next_run():
        runs.append(config)
        race.ended(record(config, [1.0] * 12))
    assert {replace(config, precision="fp32") for config in runs} == {
        replace(race.config, precision="fp32")
    }
    assert sorted(config.precision for config in runs) == sorted(PRECISIONS * 2)


@pytest.mark.parametrize("count", range(1, 6))
def test_the_order_favours_none(count):
    precisions = PRECISIONS[:count]
    race = Race(CONFIG, precisions, rounds=MAX_ROUNDS)
    for rounds in range(2, 2 * count + 1, 2):  # every even number of rounds
        orders = [race.order(number) for number in range(rounds)]
        assert all(sorted(order) == sorted(precisions) for order in orders)
        for a, b in itertools.combinations(precisions, 2):
            before = sum(order.index(a) < order.index(b) for order in orders)
            assert before == rounds / 2
    places = [order.index(p) for order in orders for p in precisions]
    assert np.bincount(places).tolist() == [rounds] * count
    firsts = [order[0] for order in orders]
    assert {firsts.count(p) for p in precisions} == {2}


def test_rounds_are_run_whole_one_after_the_other():
    race = Race(CONFIG, ["fp32", "tf32", "bf16"], rounds=4)
    ran = Machine().run(race)
    assert [tuple(ran[i : i + 3]) for i in range(0, 12, 3)] == [
        ("fp32", "tf32", "bf16"),
        ("bf16", "tf32", "fp32"),
        ("tf32", "bf16", "fp32"),
        ("fp32", "bf16", "tf32"),
    ]


def test_what_goes_on_is_said():
    race = Race(CONFIG, ["fp32", "bf16"], rounds=2)
    said = []
    while config := race.next_run():
        said.append(race.doing)
        race.ended(record(config, [1.0] * 12, state="diverged"))
    assert said == [
        "Race of fp32, bf16: run 1 of 4",
        "Race of fp32, bf16: run 2 of 3",
    ]
    race = Race(CONFIG, ["fp32"])
    race.next_run()
    assert race.doing == "Race of fp32: run 1 of 1"


@pytest.mark.parametrize(
    ("precisions", "rounds", "field", "words"),
    [
        (["fp8"], 1, "precisions", "'fp8'"),
        (["fp32", "fp32"], 1, "precisions", "fp32 once"),
        ([], 1, "precisions", "at least one"),
        ("fp32", 1, "precisions", "a list"),
        (None, 1, "precisions", "a list"),
        ([["fp32"]], 1, "precisions", "['fp32']"),
        ([None], 1, "precisions", "None"),
        (["fp32"], 0, "rounds", "from 1 to 20, not 0"),
        (["fp32"], 21, "rounds", "from 1 to 20, not 21"),
        (["fp32"], 2.5, "rounds", "2.5"),
        (["fp32"], float("nan"), "rounds", "nan"),
        (["fp32"], True, "rounds", "True"),
        (["fp32"], "3", "rounds", "'3'"),
        (["fp32"], None, "rounds", "None"),
    ],
)
def test_refusals(precisions, rounds, field, words):
    with pytest.raises(InputError) as refusal:
        Race(CONFIG, precisions, rounds)
    assert refusal.value.field == field
    assert words in str(refusal.value)


def test_a_race_of_warm_up_alone_is_refused():
    with pytest.raises(InputError, match="at least 3") as refusal:
        Race(replace(CONFIG, steps=2), ["fp32"])
    assert refusal.value.field == "steps"
    assert Race(replace(CONFIG, steps=3), ["fp32"], 3.0).rounds == 3


# --- endings


@pytest.mark.parametrize("state", ["out of memory", "diverged", "error"])
def test_a_precision_that_failed_is_not_tried_again(state):
    race = Race(CONFIG, ["fp32", "bf16", "fp64"], rounds=3)
    ran = []
    while config := race.next_run():
        ran.append(config.precision)
        fails = config.precision == "fp64"
        race.ended(
            record(config, [] if fails else [5.0] * 12, state=state if fails else "finished")
        )
    assert ran.count("fp64") == 1
    assert (ran.count("fp32"), ran.count("bf16")) == (3, 3)
    assert by_precision(race)["fp64"].state == state
    assert by_precision(race)["fp64"].speedup is None
    assert by_precision(race)["bf16"].state == "finished"
    assert race.message == ("The race of 3 rounds is over. Fastest: fp32, 5.0 ms a step (median).")


def test_a_failure_in_a_later_round_keeps_what_was_measured():
    race = Race(CONFIG, ["fp32", "bf16"], rounds=2)
    for state in ("finished", "finished", "out of memory", "finished"):
        config = race.next_run()
        ms = {"fp32": 100.0, "bf16": 50.0}[config.precision]
        race.ended(record(config, [ms] * (12 if state == "finished" else 0), state=state))
    bf16 = by_precision(race)["bf16"]
    assert bf16.state == "out of memory"
    assert bf16.round_ms_medians == (50.0, None)
    assert bf16.speedup == 2.0


@pytest.mark.parametrize("state", ["stopped", "interrupted"])
def test_a_stopped_run_ends_the_race(state):
    race = Race(CONFIG, ["fp32", "bf16", "fp16"])
    race.ended(record(race.next_run(), [100.0] * 12))
    race.ended(record(race.next_run(), [50.0] * 6, state=state))
    assert race.next_run() is None
    assert race.message == (
        f"The race ended: the bf16 run was {state}. "
        "Fastest: bf16, 50.0 ms a step (median), 2.00x as fast as fp32 (2.00x to 2.00x)."
    )
    assert [result.state for result in race.results()] == ["finished", state, "waiting"]
    assert race.results()[1].steps_measured == 4


def test_a_run_that_the_servers_limit_stopped_does_not_end_the_race():
    race = Race(CONFIG, ["fp16", "fp32"], rounds=2)
    race.ended(record(race.next_run(), [5e4] * 4, state="stopped"), out_of_time=True)
    assert race.runs_left == 2
    assert Machine().run(race) == ["fp32", "fp32"]
    fp16 = by_precision(race)["fp16"]
    assert (fp16.state, fp16.steps_measured) == ("stopped", 2)
    assert fp16.speedup == pytest.approx(100 / 5e4, rel=0.02)


def test_a_precision_that_the_device_lacks_takes_no_part():
    race = Race(CONFIG, ["fp64", "fp32"], rounds=2)
    race.refused("fp64", "Metal has no float64.")
    assert Machine().run(race) == ["fp32", "fp32"]
    fp64 = by_precision(race)["fp64"]
    assert (fp64.state, fp64.message) == ("not available", "Metal has no float64.")


def test_a_run_that_was_not_given_out_is_refused():
    race = Race(CONFIG, ["fp32", "bf16"])
    with pytest.raises(ValueError, match="bf16"):
        race.ended(record(replace(CONFIG, precision="bf16"), [1.0] * 12))


def test_nothing_measured_is_said():
    race = Race(CONFIG, ["fp32"])
    race.ended(record(race.next_run(), [], state="out of memory"))
    assert race.next_run() is None
    assert race.message == "The race is over. No step was measured."


# --- figures


def test_figures_of_one_round_against_numpy():
    random = np.random.default_rng(5)
    race = Race(replace(CONFIG, steps=23), ["fp32", "bf16"])
    ms = {p: random.lognormal(4, 0.3, 23) for p in race.precisions}
    while config := race.next_run():
        race.ended(record(config, ms[config.precision].tolist()))
    fp32, bf16 = race.results()
    for result in (fp32, bf16):
        measured = ms[result.precision][2:]
        assert result.steps_measured == 21
        assert result.step_ms_median == pytest.approx(np.median(measured))
        assert result.step_ms_p25 == pytest.approx(np.percentile(measured, 25))
        assert result.step_ms_p75 == pytest.approx(np.percentile(measured, 75))
        assert result.tokens_per_sec_median == pytest.approx(np.median(32000 / measured))
        assert result.round_ms_medians == (result.step_ms_median,)
    a, b = ms["fp32"][2:], ms["bf16"][2:]
    assert bf16.speedup == pytest.approx(np.median(a) / np.median(b))
    assert bf16.spread == "quartiles"
    assert bf16.speedup_low == pytest.approx(np.percentile(a, 25) / np.percentile(b, 75))
    assert bf16.speedup_high == pytest.approx(np.percentile(a, 75) / np.percentile(b, 25))
    assert (fp32.speedup, fp32.spread, fp32.speedup_low) == (1.0, None, None)


@pytest.mark.parametrize("rounds", [2, 3, 6, 9, 20])
def test_figures_of_rounds_against_numpy(rounds):
    random = np.random.default_rng(rounds)
    race = Race(CONFIG, ["tf32", "fp32"], rounds=rounds)
    ms = {"tf32": [], "fp32": []}
    while config := race.next_run():
        ms[config.precision].append(random.lognormal(3, 0.5, 12))
        race.ended(record(config, ms[config.precision][-1].tolist()))
    tf32, fp32 = race.results()
    medians = {p: np.median(np.array(runs)[:, 2:], axis=1) for p, runs in ms.items()}
    ratios = medians["fp32"] / medians["tf32"]
    assert tf32.round_ms_medians == pytest.approx(medians["tf32"].tolist())
    assert tf32.step_ms_median == pytest.approx(np.median(np.array(ms["tf32"])[:, 2:]))
    assert tf32.steps_measured == 10 * rounds
    assert tf32.speedup == pytest.approx(np.median(ratios))
    if rounds < 3:
        assert tf32.spread == "quartiles"
        assert tf32.speedup_low == pytest.approx(fp32.step_ms_p25 / tf32.step_ms_p75)
    else:
        cut = {3: 0, 6: 0, 9: 1, 20: 5}[rounds]  # sign test tables, two-sided 5 %
        assert tf32.spread == "rounds"
        assert tf32.speedup_low == pytest.approx(np.sort(ratios)[cut])
        assert tf32.speedup_high == pytest.approx(np.sort(ratios)[-1 - cut])


@pytest.mark.parametrize("n", [6, 9, 13, 20])
def test_the_interval_of_rounds_holds_the_true_median(n):
    random = np.random.default_rng(n)
    samples = random.lognormal(0, 1, (4000, n))  # its median is 1
    held = [low <= 1 <= high for low, high in map(_interval, samples.tolist())]
    assert np.mean(held) > 0.94


def test_few_steps_give_a_speedup_but_no_spread():
    race = Race(replace(CONFIG, steps=4), ["fp32", "bf16"])
    Machine().run(race)
    bf16 = race.results()[1]
    assert bf16.speedup == pytest.approx(2.5, rel=0.05)
    assert (bf16.speedup_low, bf16.speedup_high, bf16.spread) == (None, None, None)


def test_without_fp32_no_speedup_is_known():
    race = Race(CONFIG, ["tf32", "bf16"], rounds=3)
    Machine(jitter=0).run(race)
    for result in race.results():
        assert result.step_ms_median == TRUE_MS[result.precision]
        assert (result.speedup, result.spread, result.max_loss_difference) == (None, None, None)
    assert race.message.endswith("is over. Fastest: bf16, 40.0 ms a step (median).")


def test_before_any_run_all_wait():
    race = Race(CONFIG, ["bf16", "fp32"])
    for result in race.results():
        assert (result.state, result.steps_done, result.speedup) == ("waiting", 0, None)
        assert result.step_ms_median is None
    assert race.message == ""


def test_loss_differences_are_over_the_common_steps():
    race = Race(CONFIG, ["fp32", "bf16", "fp16", "tf32"])
    losses = {
        "fp32": [10.0, 9.5, 9.0, 8.5],
        "bf16": [10.0, 9.4, 9.02, 8.5],
        "fp16": [10.0, 9.51, math.nan],
        "tf32": [math.inf],
    }
    while config := race.next_run():
        these = losses[config.precision]
        state = "finished" if math.isfinite(these[-1]) else "diverged"
        race.ended(record(config, [9.0] * len(these), losses=these, state=state))
    found = [result.max_loss_difference for result in race.results()]
    assert found == [0.0, pytest.approx(0.1), pytest.approx(0.01), None]


def test_each_precision_has_its_own_peak_memory_energy_and_skips():
    race = Race(CONFIG, ["fp32", "fp16"], rounds=2)
    given = {
        "fp32": {"peak_flops": 1e9, "peak_memory_bytes": 500},
        "fp16": {"peak_flops": 8e9, "peak_memory_bytes": 400, "skipped_steps": 1},
    }
    joules = iter([4.0, 3.0, 2.0, 8.0])  # fp32, fp16, fp16, fp32
    while config := race.next_run():
        race.ended(
            record(
                config,
                [TRUE_MS[config.precision]] * 12,
                flops_per_token=1e6,
                joules_per_1000_tokens=next(joules),
                **given[config.precision],
            )
        )
    fp32, fp16 = race.results()
    assert fp32.mfu == pytest.approx(1e6 * 320 / 1e9)
    assert fp16.mfu == pytest.approx(1e6 * 32 / 0.045 / 8e9)
    assert (fp32.peak_memory_bytes, fp16.peak_memory_bytes) == (500, 400)
    assert (fp32.skipped_steps, fp16.skipped_steps) == (0, 2)
    assert (fp32.joules_per_1000_tokens, fp16.joules_per_1000_tokens) == (6.0, 2.5)


def test_what_no_record_carries_is_unknown():
    race = Race(CONFIG, ["fp32"])
    Machine().run(race)
    [fp32] = race.results()
    assert (fp32.mfu, fp32.peak_memory_bytes, fp32.joules_per_1000_tokens) == (None, None, None)


def test_results_are_strict_json():
    race = Race(CONFIG, PRECISIONS, rounds=3)
    for _ in range(4):
        config = race.next_run()
        race.ended(record(config, [3.0] * 3, losses=[1.0, 2.0, math.nan], state="diverged"))
    back = json.loads(json.dumps([asdict(r) for r in race.results()], allow_nan=False))
    assert [row["precision"] for row in back] == list(PRECISIONS)


# --- fairness


def ranking(race: Race) -> list[str]:
    known = [result for result in race.results() if result.speedup]
    return [r.precision for r in sorted(known, key=lambda r: r.speedup, reverse=True)]


FOUR = ("fp32", "tf32", "bf16", "fp16")
TRUE_RANKING = ["bf16", "fp16", "tf32", "fp32"]


@pytest.mark.parametrize("rounds", [3, 4, 5, 8])
def test_a_machine_that_gets_twice_as_slow_half_way_gives_the_same_ranking(rounds):
    calm, slowed = (Race(CONFIG, FOUR, rounds=rounds) for _ in range(2))
    Machine().run(calm)
    Machine(slower=lambda done: 2.0 if done > 0.47 else 1.0).run(slowed)
    assert ranking(calm) == ranking(slowed) == TRUE_RANKING
    for before, after in zip(calm.results(), slowed.results(), strict=True):
        assert after.speedup == pytest.approx(before.speedup, rel=0.03)
    # the round in which it happened lies far off, and the spread says so
    widths = [
        max(r.speedup_high / r.speedup_low for r in race.results()[1:]) for race in (calm, slowed)
    ]
    assert widths[0] < 1.1
    assert widths[1] > 1.5


def test_the_same_machine_misleads_a_race_without_rounds():
    race = Race(CONFIG, FOUR)
    Machine(slower=lambda done: 2.0 if done > 0.47 else 1.0).run(race)
    assert ranking(race) != TRUE_RANKING


@pytest.mark.parametrize("rounds", [2, 4, 6])
def test_a_steady_drift_favours_none(rounds):
    race = Race(CONFIG, FOUR, rounds=rounds)
    Machine(slower=lambda done: 1 + done).run(race)
    for result in race.results():
        expected = TRUE_MS["fp32"] / TRUE_MS[result.precision]
        assert result.speedup == pytest.approx(expected, rel=0.06)
