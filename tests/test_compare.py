"""Expectations and verdicts: on every faked machine, against counted operations, and in words."""

import itertools
import json
import re
from dataclasses import asdict, replace

import pytest
from machines import MACHINES, fake

from gpt2demo.compare import CAUSES, Verdict, explain
from gpt2demo.config import PRECISIONS, RunConfig
from gpt2demo.device import DeviceInfo, probe_device
from gpt2demo.expectation import datasheet_rates, expect
from gpt2demo.lesson import RUNGS
from gpt2demo.race import PrecisionResult
from gpt2demo.roofline import Rates, step_forecast
from gpt2demo.step_counts import FORMS, SHAPES

LESSON = {"B": 16, "T": 1024}
PAGE = {"B": 4, "T": 1024}
FEW = {"B": 4, "T": 32}
FEWEST = {"B": 1, "T": 32}
LEAN = {"attention": "sdpa", "optimizer": "fused"}


@pytest.fixture(scope="module")
def devices(tmp_path_factory) -> dict[str, DeviceInfo]:
    found = {}
    for name, machine in MACHINES.items():
        with pytest.MonkeyPatch.context() as patch:
            fake(patch, tmp_path_factory.mktemp("machine"), machine)
            found[name] = probe_device()
    return found


def outcome(
    precision: str,
    speedup: float | None = None,
    low: float | None = None,
    high: float | None = None,
    *,
    fp32_ms: float = 1000.0,
    **changes,
) -> PrecisionResult:
    """A race's result; the spread is 2 % on both sides where none is given."""
    measured = speedup is not None
    plain = PrecisionResult(
        precision=precision,
        state="finished",
        message="Finished: 50 steps.",
        steps_done=50,
        steps_measured=48 if measured else 0,
        step_ms_median=fp32_ms / speedup if measured else None,
        step_ms_p25=fp32_ms / speedup * 0.99 if measured else None,
        step_ms_p75=fp32_ms / speedup * 1.01 if measured else None,
        tokens_per_sec_median=1000.0 if measured else None,
        speedup=speedup,
        speedup_low=low or (speedup * 0.98 if measured else None),
        speedup_high=high or (speedup * 1.02 if measured else None),
        spread="quartiles" if measured else None,
        mfu=None,
        peak_memory_bytes=None,
        max_loss_difference=0.01,
        skipped_steps=0,
        joules_per_1000_tokens=None,
        round_ms_medians=(fp32_ms / speedup if measured else None,),
    )
    return replace(plain, **changes)


FP32 = replace(outcome("fp32", 1.0), speedup_low=None, speedup_high=None, spread=None)


def judge(device: DeviceInfo, result: PrecisionResult, base=FP32, rates=None, **settings):
    config = RunConfig(**settings)
    return explain(device, config, [base, result], rates)[result.precision]


def probed(launch: float | None = None, bandwidth: float | None = None, **flops: float) -> Rates:
    """A probe that found one rate for every shape and form of a precision."""
    return Rates(
        device_type="cpu",
        tokens=128,
        flops_per_sec={
            p: {s: dict.fromkeys(FORMS, rate) for s in SHAPES} for p, rate in flops.items()
        },
        copies=() if bandwidth is None else ((2**20, bandwidth),),
        launch_seconds=launch,
    )


# --- device x setting x outcome

# machine, settings, precision, speed-up (and its spread), cause, words
TABLE = [
    ("A100", LESSON, "tf32", (3.0,), "native", ("3.00x", "forecast 3.1x", "8.0x", "82 %", "4.2x")),
    ("A100", LESSON, "bf16", (3.33,), "native", ("about the forecast 3.8x", "spec ratio 16.0x")),
    ("A100", LESSON, "fp16", (4.2,), "native", ("16.0x", "elementwise operations take 17 %")),
    ("A100", LESSON, "fp64", (0.8,), "native", ("0.80x", "rated like fp32", "twice the memory")),
    ("A100", LESSON, "bf16", (1.2,), "native, less than expected", ("less than", "may hold it")),
    ("A100", LESSON, "tf32", (5.5,), "native, more than expected", ("more than", "85 %")),
    ("A100", LESSON, "tf32", (1.1, 0.7, 1.6), "too noisy", ("0.70x to 1.60x", "fair rounds")),
    ("A100", LESSON, "bf16", (3.0, 1.5, 4.0), "too noisy", ("1.50x to 4.00x", "anything")),
    ("A100", FEWEST, "bf16", (0.8,), "step too small", ("32 tokens", "only", "casts", "Raise B")),
    ("A100", FEWEST, "tf32", (1.0,), "step too small", ("launches take", "optimizer takes")),
    ("T4", PAGE, "tf32", (1.01,), "no effect", ("1.01x", "as expected", "7.5", "exactly as fp32")),
    ("T4", PAGE, "tf32", (1.4,), "too noisy", ("1.40x", "machine itself changed", "fair rounds")),
    ("T4", PAGE, "bf16", (0.81,), "emulated", ("0.81x", "7.5", "use fp16", "widens it to float32")),
    ("T4", PAGE, "bf16", (1.2,), "emulated", ("1.20x", "by way of float32", "memory traffic")),
    ("T4", PAGE, "fp16", (2.1,), "native", ("forecast 2.3x", "8.0x", "67 %", "2.3x is the most")),
    ("T4", FEWEST, "fp16", (1.0,), "step too small", ("only", "the optimizer takes")),
    ("V100", PAGE, "tf32", (0.98,), "no effect", ("7.0",)),
    ("V100", PAGE, "bf16", (0.5,), "emulated", ("7.0", "use fp16")),
    ("V100", PAGE, "fp16", (2.6,), "native", ("spec ratio 8.0x",)),
    ("GTX 1060", PAGE, "fp16", (0.95,), "emulated", ("0.95x", "1/64", "no gain")),
    ("GTX 1060", PAGE, "fp64", (0.05,), "native", ("0.05x", "spec ratio 1/32")),
    ("GTX 1650", PAGE, "fp16", (0.9,), "native", ("no tensor cores", "no forecast")),
    ("GTX 1650", PAGE, "bf16", (0.6,), "emulated", ("7.5", "slower than fp32")),
    ("RTX 3060", PAGE, "tf32", (1.1,), "native", ("rated like fp32", "a modest gain")),
    ("RTX 4090", PAGE, "bf16", (1.2,), "memory-bound", ("45 %", "SDPA", "torch.compile")),
    ("L4", PAGE, "bf16", (1.3,), "memory-bound", ("spec ratio 4.0x", "only 41 %")),
    ("L4", PAGE | LEAN, "bf16", (1.9,), "native", ("spec ratio 4.0x",)),
    ("A10G", PAGE, "tf32", (1.4,), "native", ("TF32 on tensor cores", "Not all of its rates")),
    ("RTX 4090 Laptop", PAGE, "bf16", (1.5,), "native", ("1.50x", "8.9", "no forecast")),
    ("RTX 4090 Laptop", PAGE, "bf16", (0.7,), "unknown peak", ("slower than fp32", "8.9")),
    ("H100", PAGE, "bf16", (2.9,), "native", ("spec ratio 14.8x",)),
    ("H200", FEW, "bf16", (0.9,), "step too small", ("waiting for launches", "128 tokens")),
    ("B200", LESSON, "tf32", (4.0,), "native", ("spec ratio 15.0x",)),
    ("MI300X", PAGE, "tf32", (1.7,), "native", ("spec ratio 4.0x",)),
    ("RX 6800", PAGE, "tf32", (1.0,), "no effect", ("gfx1030", "no TF32")),
    ("RX 6800", PAGE, "bf16", (0.7,), "emulated", ("gfx1030", "no bf16 units")),
    ("RX 6800", PAGE, "fp16", (1.05,), "unknown peak", ("no clear gain", "no matrix units")),
    ("Arc A770", PAGE, "tf32", (1.02,), "no effect", ("1.02x", "CUDA devices only")),
    ("Arc A770", PAGE, "bf16", (2.2,), "native", ("driver reports",)),
    ("Apple M2", PAGE, "tf32", (1.0,), "no effect", ("no TF32",)),
    ("Apple M2", PAGE, "fp16", (1.02,), "unknown peak", ("no clear gain", "Metal")),
    ("Apple M2", FEWEST, "bf16", (1.02,), "step too small", ("FLOPs for each byte", "Raise B")),
    ("CPU with avx512_bf16", FEW, "bf16", (1.58,), "native", ("avx512_bf16", "no forecast")),
    ("CPU with avx512_bf16", FEW, "tf32", (0.97,), "no effect", ("no TF32",)),
    ("CPU with avx512_bf16", FEW, "fp16", (0.02, 0.01, 0.03), "scalar fallback", ("170x",)),
    ("CPU with avx512_bf16", FEW, "fp64", (0.5,), "unknown peak", ("slower than fp32", "half")),
    ("CPU with AVX-512 alone", FEW, "bf16", (0.8,), "emulated", ("No bf16 instructions",)),
    ("CPU with AVX2 alone", FEW, "bf16", (0.04,), "scalar fallback", ("60x", "0.04x")),
    ("CPU with amx_fp16", FEW, "tf32", (1.6,), "emulated", ("1.60x", "AMX", "not equal")),
    ("Arm CPU with bf16", FEW, "fp16", (1.4,), "native", ("fp16_arith",)),
]


@pytest.mark.parametrize(("machine", "settings", "precision", "speedup", "cause", "words"), TABLE)
def test_verdicts(devices, machine, settings, precision, speedup, cause, words):
    verdict = judge(devices[machine], outcome(precision, *speedup), **settings)
    assert verdict.cause == cause, verdict.words
    for word in words:
        assert word in verdict.words, verdict.words


def test_the_table_reaches_every_cause_that_a_measured_run_has():
    others = {"baseline", "out of memory", "diverged", "failed", "not available"}
    others |= {"not measured", "no baseline"}
    assert {row[4] for row in TABLE} == set(CAUSES) - others


@pytest.mark.parametrize("B", [2, 1])
def test_the_learners_tf32_had_no_effect(devices, B):
    """About 8000 ms a step in fp32 and as much in TF32, on a GPU of the GTX 10 series."""
    base = outcome("fp32", 1.0, fp32_ms=8000)
    tf32 = outcome("tf32", 1.0, fp32_ms=8000)
    verdict = judge(devices["GTX 1060"], tf32, base, B=B, T=1024)
    assert verdict == Verdict(
        precision="tf32",
        cause="no effect",
        words=(
            "1.00x (0.98x to 1.02x): no effect, as expected. TF32 needs compute capability 8.0; "
            "this GPU has 6.1. It runs exactly as fp32."
        ),
    )


def test_the_learners_bf16_was_emulated(devices):
    """12000 ms a step where fp32 took 8000."""
    base = outcome("fp32", 1.0, fp32_ms=8000)
    bf16 = outcome("bf16", 8000 / 12000, fp32_ms=8000)
    verdict = judge(devices["GTX 1060"], bf16, base, B=2, T=1024)
    assert verdict == Verdict(
        precision="bf16",
        cause="emulated",
        words=(
            "0.67x (0.65x to 0.68x): bf16 needs compute capability 8.0; this GPU has 6.1. "
            "Emulated: slower than fp32. PyTorch widens it to float32 for every matmul and rounds "
            "back."
        ),
    )


def test_the_learner_was_told_before_the_run(devices):
    told = expect(devices["GTX 1060"], RunConfig(B=2, T=1024))
    assert (told["tf32"].speedup, told["bf16"].speedup) == (1.0, None)
    assert told["tf32"].words.startswith("No effect, expect 1.0x. TF32 needs compute")
    assert "Emulated: slower than fp32" in told["bf16"].words


# --- runs that ended otherwise


def test_out_of_memory_says_what_it_wanted_and_what_there_is(devices):
    failed = outcome("fp32", state="out of memory", steps_done=0)
    config = RunConfig(B=16, T=1024)
    verdict = explain(devices["GTX 1060"], config, [failed])["fp32"]
    assert verdict.cause == "out of memory"
    assert "at B=16, T=1024 a step is forecast to take 29." in verdict.words
    assert "there are 5.9 GiB. Lower B or T." in verdict.words
    small = explain(devices["A100"], replace(config, budget_gib=8.0), [failed])["fp32"]
    assert "there are 8.0 GiB" in small.words


@pytest.mark.parametrize(
    ("changes", "cause", "words"),
    [
        ({"state": "diverged", "steps_done": 7}, "diverged", ("after 7 steps", "0.0003")),
        ({"state": "error", "steps_done": 1, "message": "It failed."}, "failed", ("1 step. It",)),
        ({"state": "stopped", "steps_done": 1}, "not measured", ("stopped, after 1 step.",)),
        ({"state": "interrupted", "steps_done": 2}, "not measured", ("interrupted, after 2",)),
        ({"state": "waiting", "steps_done": 0}, "not measured", ("waiting, after 0 steps",)),
    ],
)
def test_other_endings(devices, changes, cause, words):
    for precision in ("fp32", "bf16"):
        verdict = judge(devices["A100"], outcome(precision, **changes))
        assert verdict.cause == cause
        for word in words:
            assert word in verdict.words, verdict.words


def test_a_failure_after_measured_steps_keeps_its_speed(devices):
    for state in ("diverged", "error", "out of memory"):
        verdict = judge(devices["A100"], outcome("bf16", 3.0, state=state))
        assert "(until then 3.00x)" in verdict.words


def test_not_available_needs_no_run(devices):
    verdict = judge(devices["Apple M2"], outcome("fp64", state="not available", steps_done=0))
    assert verdict.cause == "not available"
    assert verdict.words == f"Not available: {devices['Apple M2'].support['fp64'].reason}"


def test_without_fp32_there_is_a_time_but_no_verdict(devices):
    tf32 = replace(outcome("tf32", 3.0), speedup=None, speedup_low=None, speedup_high=None)
    verdict = explain(devices["A100"], RunConfig(), [tf32])["tf32"]
    assert verdict.cause == "no baseline"
    assert verdict.words == "333.3 ms a step; without a measured fp32 run no speed-up is known."


def test_the_baseline_says_its_time_and_its_share_of_the_peak(devices):
    config = RunConfig(**LESSON)
    verdict = explain(devices["A100"], config, [replace(FP32, mfu=0.716)])["fp32"]
    assert verdict.cause == "baseline"
    assert "1.00x, the baseline: 1000.0 ms a step, 72 % of its peak." in verdict.words


def test_what_each_reached_of_its_own_peak_explains_a_shortfall(devices):
    base = replace(FP32, mfu=0.62)
    verdict = judge(devices["A100"], outcome("bf16", 1.5, mfu=0.058), base, **LESSON)
    assert "bf16 reaches 6 % of its peak, fp32 62 % of its own" in verdict.words


def test_skipped_optimizer_steps_are_said_where_they_are_many(devices):
    many = judge(devices["T4"], outcome("fp16", 2.1, skipped_steps=25), **PAGE)
    few = judge(devices["T4"], outcome("fp16", 2.1, skipped_steps=2), **PAGE)
    assert "skipped the optimizer in 25 of 50 steps" in many.words
    assert "skipped" not in few.words


# --- noise


def test_rounds_that_disagree_are_counted(devices):
    base = replace(FP32, round_ms_medians=(1000.0, 900.0, 1100.0, None))
    tf32 = outcome(
        "tf32", 1.25, 0.75, 1.4, spread="rounds", round_ms_medians=(800.0, 1200.0, 800.0, 5.0)
    )
    verdict = judge(devices["A100"], tf32, base, **LESSON)
    assert verdict.cause == "too noisy"
    assert "faster than fp32 in 2 of 3 rounds, from 0.75x to 1.40x" in verdict.words
    assert "Something else uses the machine" in verdict.words


def test_too_few_steps_are_not_judged(devices):
    bf16 = replace(
        outcome("bf16", 3.0), speedup_low=None, speedup_high=None, spread=None, steps_measured=1
    )
    verdict = judge(devices["A100"], bf16, **LESSON)
    assert verdict.cause == "too noisy"
    assert verdict.words == "3.00x from 1 measured step: too few to judge, at least 3 are needed."


def test_a_narrow_spread_around_one_is_a_finding_and_not_noise(devices):
    same = outcome("bf16", 1.0, 0.95, 1.05)
    assert judge(devices["A100"], same, **FEWEST).cause == "step too small"
    wide = outcome("bf16", 1.0, 0.9, 1.1)
    assert judge(devices["A100"], wide, **FEWEST).cause == "too noisy"


# --- what holds everywhere

SPEEDUPS = (None, 0.02, 0.67, 0.93, 1.0, 1.07, 1.5, 3.2, 40.0)
STATES = ("finished", "stopped", "out of memory", "diverged", "error")
MAY = {
    "native": {c for c in CAUSES if c.startswith("native")}
    | {"step too small", "memory-bound", "unknown peak", "baseline"},
    "emulated": {"emulated", "scalar fallback"},
    "no effect": {"no effect"},
    "not available": {"not available"},
}
ANY = {"too noisy", "out of memory", "diverged", "failed", "not measured", "no baseline"}


@pytest.mark.parametrize("machine", MACHINES)
def test_every_verdict_has_words_and_a_figure_and_contradicts_no_panel(devices, machine):
    device = devices[machine]
    configs = (RunConfig(**LESSON), RunConfig(**FEWEST, **LEAN), RunConfig(**PAGE, compile=True))
    seen = set()
    for config, speedup, width in itertools.product(configs, SPEEDUPS, (0.02, 0.4)):
        for state in STATES if config is configs[0] else STATES[:1]:
            spread = (speedup * (1 - width), speedup * (1 + width)) if speedup else ()
            results = [outcome(p, speedup, *spread, state=state) for p in PRECISIONS]
            results[0] = replace(results[0], speedup=speedup and 1.0)
            verdicts = explain(device, config, results)
            assert list(verdicts) == list(PRECISIONS)
            for precision, verdict in verdicts.items():
                words, status = verdict.words, device.support[precision].status
                seen.add(words)
                if status == "not available":
                    assert verdict.cause == "not available"
                    continue
                assert verdict.cause in MAY[status] | ANY
                assert re.search(r"\d", words)
                if speedup and state in ("finished", "stopped") and precision != "fp32":
                    assert words.startswith(f"{speedup:.2f}x"), words
                if speedup and speedup >= 1 and verdict.cause == "emulated":
                    assert "slower than fp32" not in words
        seen |= {told.words for told in expect(device, config).values()}
    for words in seen:
        assert words.endswith("."), words
        assert len(words) <= 330, f"{len(words)}: {words}"
        assert not re.search(r"None|\bnan\b|\binf\b|!|\.\.|  |\d{7}", words), words


@pytest.mark.parametrize("machine", MACHINES)
def test_every_expectation_agrees_with_the_panel(devices, machine):
    device = devices[machine]
    for settings in (LESSON, FEWEST | LEAN):
        told = expect(device, RunConfig(**settings))
        assert list(told) == list(PRECISIONS)
        json.dumps([asdict(expectation) for expectation in told.values()], allow_nan=False)
        for precision, expectation in told.items():
            assert expectation.status == device.support[precision].status
            if expectation.status == "no effect":
                assert (expectation.speedup, expectation.words[:10]) == (1.0, "No effect,")
            if expectation.status == "not available":
                assert expectation.speedup is None
            if expectation.status == "emulated":  # no datasheet knows it
                assert expectation.speedup is None
            if expectation.shares:
                assert sum(expectation.shares.values()) == pytest.approx(1)
            if expectation.speedup is None:  # no figure, so no forecast in the words
                assert "expect" not in expectation.words


# --- the estimate


def test_the_words_of_a_small_step(devices):
    told = expect(devices["T4"], RunConfig(B=4, T=32))["fp16"]
    assert told.words == (
        "Native, spec ratio 8.0x, but at B*T=128 tokens only 22 % of the fp32 step is matmul: "
        "expect about 1.0x."
    )


@pytest.mark.parametrize("settings", [LESSON, PAGE, LESSON | LEAN, PAGE | LEAN])
def test_the_estimate_keeps_amdahls_law(devices, settings):
    told = expect(devices["A100"], RunConfig(**settings))
    share, ratio = told["fp32"].shares["matmul"], 156 / 19.5
    law = 1 / ((1 - share) + share / ratio)
    assert told["tf32"].ratio == pytest.approx(ratio)
    # in TF32 the products of written-out attention wait for memory, and a short step for the host
    assert 0.8 * law < told["tf32"].speedup <= law * 1.001
    assert told["tf32"].speedup < told["tf32"].most <= 1.001 / (1 - share)
    if settings == LESSON | LEAN:
        assert told["tf32"].speedup == pytest.approx(law, rel=0.01)
        assert told["tf32"].most == pytest.approx(1 / (1 - share), rel=0.15)
    # bf16 and fp16 also cast, and fp16's scaler reads and writes every gradient once more; but
    # CUDA's softmax casts float16 itself, which for bfloat16 takes passes of their own
    assert told["tf32"].speedup < told["bf16"].speedup < told["tf32"].most
    low, high = (0.9, 1) if LEAN.items() <= settings.items() else (1, 1.2)
    assert low < told["fp16"].speedup / told["bf16"].speedup < high


def test_more_tokens_make_faster_matmuls_worth_more(devices):
    forecasts = [
        expect(devices["A100"], RunConfig(B=B, T=256, **LEAN))["bf16"].speedup
        for B in (1, 2, 4, 8, 16, 32, 64)
    ]
    assert forecasts == sorted(forecasts)
    assert forecasts[0] < 2
    assert forecasts[-1] > 5


@pytest.mark.parametrize(
    ("precision", "settings", "lesson_ms"),
    [
        ("fp32", {}, 1000),
        ("tf32", {}, 333),
        ("bf16", {}, 300),
        ("bf16", {"compile": True}, 130),
        ("bf16", {"compile": True, "attention": "sdpa"}, 96),
        ("bf16", {"compile": True, "attention": "sdpa", "vocab_size": 50304}, 93),
        ("bf16", {"compile": True, "vocab_size": 50304} | LEAN, 90),
    ],
)
def test_the_lessons_own_times_on_an_a100(devices, precision, settings, lesson_ms):
    """Its B=16, T=1024; the later ones as its video's chapters name them."""
    told = expect(devices["A100"], RunConfig(**LESSON, **settings))[precision]
    assert told.seconds * 1000 == pytest.approx(lesson_ms, rel=0.2)


def test_a_probe_stands_in_for_the_datasheet(devices):
    """Rates of a 2-core EPYC with avx512_bf16; the README has the measured step times."""
    device = devices["CPU with avx512_bf16"]
    rates = probed(fp32=162e9, bf16=366e9, fp16=1e9, bandwidth=37e9, launch=5e-6)
    for sizes, measured in (({"B": 4, "T": 32}, 890 / 565), ({"B": 2, "T": 128}, 1491 / 831)):
        told = expect(device, RunConfig(**sizes), rates)["bf16"]
        assert told.speedup == pytest.approx(measured, rel=0.1)
        assert told.basis == "probe"
        assert "measured matmul ratio 2.3x" in told.words
    verdict = judge(device, outcome("bf16", 890 / 565), rates=rates, **FEW)
    assert verdict.cause == "native"
    assert "about the forecast" in verdict.words
    # a forward matmul says nothing of the scalar loop in backward
    assert expect(device, RunConfig(), rates)["fp16"].speedup is None


def test_the_datasheet_forecasts_the_lessons_own_steps(devices):
    """Its seven figures, measured on an A100 by somebody else, within the README's 18 %."""
    rates, config = datasheet_rates(devices["A100"]), RunConfig(B=16, T=1024)
    off = []
    for rung in RUNGS:
        config = replace(config, **rung.change)
        off.append(step_forecast(config, rates).ms_per_step / rung.lesson_ms - 1)
    assert max(map(abs, off)) == pytest.approx(0.18, abs=0.005)
    assert abs(sum(off)) / len(off) < 0.1  # and not all to one side


def test_a_probe_gives_an_emulated_precision_a_figure(devices):
    rates = {"fp32": 4e12, "bf16": 2e12, "fp16": 4e12, "bandwidth": 150e9, "launch": 3e-6}
    told = expect(devices["GTX 1060"], RunConfig(**PAGE), probed(**rates))
    assert told["bf16"].speedup == pytest.approx(0.6, abs=0.1)
    assert told["bf16"].words.startswith("Emulated, measured matmul ratio 0.50x: expect about 0.")
    assert "slower than fp32" in told["bf16"].words
    faster = expect(devices["GTX 1060"], RunConfig(**PAGE), probed(**rates | {"bf16": 8e12}))[
        "bf16"
    ]
    assert "slower" not in faster.words


@pytest.mark.parametrize(
    "rates",
    [
        {},
        {"fp32": 1e12, "launch": 1e-6},
        {"fp32": 1e12, "bf16": 2e12, "launch": 1e-6},
        {"fp32": 1e12, "bf16": 2e12, "bandwidth": 1e11},
        {"fp32": 1e12, "bf16": 0.0, "bandwidth": 1e11, "launch": 1e-6},
        {"fp32": float("nan"), "bf16": 2e12, "bandwidth": 1e11, "launch": 1e-6},
        {"fp32": 1e12, "bf16": 2e12, "bandwidth": -1.0, "launch": 1e-6},
        {"fp32": 1e12, "bf16": float("inf"), "bandwidth": 1e11, "launch": 1e-6},
    ],
)
def test_what_a_probe_lacks_is_unknown(devices, rates):
    told = expect(devices["A100"], RunConfig(**PAGE), probed(**rates))
    assert told["bf16"].speedup is None
    assert "no forecast" in told["bf16"].words
    assert told["fp32"].speedup == 1.0
