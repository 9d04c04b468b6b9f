"""Will it fit: verdicts, limits and sentences against measured peaks and plain searches."""

import json
import math
import re
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from memory_tracker import measured

from gpt2demo.config import ATTENTIONS, OPTIMIZERS, PRECISIONS, InputError, RunConfig
from gpt2demo.fit import (
    CARDS,
    FITS,
    MAP_B,
    MAP_T,
    MAY_FAIL,
    UNKNOWN,
    WILL_NOT_FIT,
    Capacity,
    capacity_for,
    card,
    fit_map,
    largest,
    smaller_that_fits,
)
from gpt2demo.fit_words import PART_NAMES, advice, basis, compare_words, report, sentence

MIB = 2**20
GIB = 2**30
# what a CPU process holds beside the live tensors, at most (190-300 MiB were measured)
CPU_SCRATCH = 512 * MIB
# live tensors times this is the most that a GPU's allocator takes (simulated over 56 settings)
FRAGMENTATION = 1.13
CONTEXT = 430 * MIB  # the largest driver context that was measured
WORKSPACES = {"8.6": 16.25 * MIB, "9.0": 64 * MIB, None: 64 * MIB}  # cuBLAS, two of them

# GPT-2's peaks on a GPU with written-out attention at T=1024, float32, as the memory study
# measured them before there was this code (MiB of tensors)
STUDY_MIB = {4: 8473, 8: 15461}


def tiny(**settings) -> RunConfig:
    return RunConfig(model="tiny", **({"B": 4, "T": 256} | settings))


def live(config: RunConfig, device_type: str = "cpu") -> int:
    """The measured peak of tensors, by a tracker that knows no forecast."""
    return measured(config, device_type).peak_bytes


def verdict(config: RunConfig, capacity: Capacity) -> str:
    return capacity.verdict(capacity.forecast(config))


# --- verdicts ---


@pytest.mark.parametrize("with_context", [False, True])
@pytest.mark.parametrize("capability", WORKSPACES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpus_verdict_stands_where_the_measured_tensors_say(precision, capability, with_context):
    config = tiny(precision=precision, B=8, T=512)
    tensors = live(config, "cuda")
    beside = WORKSPACES[capability] + (CONTEXT if with_context else 0)

    def at(total: float) -> str:
        return verdict(
            config,
            Capacity(
                total_bytes=int(total),
                device_type="cuda",
                compute_capability=capability,
                with_context=with_context,
            ),
        )

    assert at(0.999 * tensors + beside) == WILL_NOT_FIT
    assert at(1.001 * tensors + beside) == MAY_FAIL
    assert at(0.999 * FRAGMENTATION * tensors + beside) == MAY_FAIL
    assert at(1.001 * FRAGMENTATION * tensors + beside) == FITS


def test_a_cpus_verdict_leaves_the_process_its_scratch():
    config = tiny()
    tensors = live(config)

    def at(free: float) -> str:
        return verdict(config, capacity_for(config, "cpu", int(free)))

    assert at(tensors + 1.01 * CPU_SCRATCH) == FITS
    assert at(tensors + 0.99 * CPU_SCRATCH) == WILL_NOT_FIT
    assert at(0) == WILL_NOT_FIT


def test_a_budget_on_a_cpu_is_exact_but_for_the_forecasts_own_error():
    config = tiny()
    tensors = live(config)

    def at(share: float, machine: int | None = None) -> str:
        capacity = Capacity(total_bytes=int(share * tensors), tracked=True, machine_bytes=machine)
        return verdict(config, capacity)

    assert at(0.99) == WILL_NOT_FIT
    assert at(1.0) == MAY_FAIL
    assert at(1.01) == FITS
    # a budget is no more memory than the machine has
    assert at(5, machine=tensors + CPU_SCRATCH + MIB) == FITS
    assert at(5, machine=tensors + CPU_SCRATCH - MIB) == WILL_NOT_FIT


CARDS_OF_8 = {
    "an emulated card, old": capacity_for(RunConfig(budget_gib=8), "cuda", 15 * GIB, "6.1"),
    "an emulated card, new": capacity_for(RunConfig(budget_gib=8), "cuda", 140 * GIB, "9.0"),
    "a card that is not here": card(8),
    "the card itself, its context taken": capacity_for(
        RunConfig(), "cuda", 8 * GIB - 300 * MIB, "6.1"
    ),
}


@pytest.mark.parametrize("capacity", CARDS_OF_8.values(), ids=CARDS_OF_8)
def test_the_learner_with_8_gib(capacity):
    """Out of memory at T=1024 with B=16, 8 and 4, while B=2 ran: here is the explanation."""

    def at(B: int, **settings) -> str:
        return verdict(RunConfig(B=B, T=1024, **settings), capacity)

    assert [at(B) for B in (16, 8, 4, 2)] == [WILL_NOT_FIT] * 3 + [FITS]
    for B, mib in STUDY_MIB.items():
        told = capacity.forecast(RunConfig(B=B, T=1024))
        assert told.live_bytes / MIB == pytest.approx(mib, rel=0.002)
        assert told.live_bytes > 8 * GIB  # the tensors alone
    # half the bytes a number is not half the memory
    assert at(4, precision="bf16") == WILL_NOT_FIT
    # what does help
    assert at(4, attention="sdpa") == FITS
    for B in (4, 8, 16):
        said = sentence(RunConfig(B=B, T=1024), capacity)
        found = re.match(r"Lower B to (\d+), or T to (\d+): that should fit\. ", said)
        assert 2 <= int(found[1]) <= 3
        assert "saved activations" in said


def test_unknown_memory_is_called_unknown():
    for device_type in ("cpu", "mps", "xpu", "cuda"):
        config = RunConfig(B=256, T=1024)
        capacity = capacity_for(config, device_type, None)
        assert capacity.total_bytes is None
        assert verdict(config, capacity) == UNKNOWN
        assert capacity.refusal(capacity.forecast(config)) is None
        assert capacity.tracker_budget() is None
        assert sentence(config, capacity).startswith("Largest part, saved activations: ")
        told = report(config, capacity)
        assert (told["verdict"], told["capacity_bytes"]) == (UNKNOWN, None)
        assert told["largest_B"] is told["largest_T"] is None
        assert {v for row in fit_map(config, capacity)["verdict"] for v in row} == {UNKNOWN}


# --- whose memory, and how much of it ---


def test_the_whole_device_is_a_runs_without_a_budget():
    for device_type in ("cuda", "xpu", "mps"):
        capacity = capacity_for(RunConfig(), device_type, 7 * GIB, "8.6")
        assert capacity == Capacity(
            total_bytes=7 * GIB, device_type=device_type, compute_capability="8.6"
        )
        assert capacity.tracker_budget() is None  # torch's allocator counts
        # its context is in memory already: it is not asked for again
        assert capacity.forecast(RunConfig()).parts.context == 0
    on_cpu = capacity_for(RunConfig(), "cpu", 7 * GIB)
    assert on_cpu.total_bytes == 7 * GIB - CPU_SCRATCH
    assert not on_cpu.tracked
    # the net below a wrong forecast: above what is told to fit, below what the machine has
    assert on_cpu.total_bytes < on_cpu.tracker_budget() < 7 * GIB
    assert capacity_for(RunConfig(), "cpu", 1).total_bytes == 0


def test_a_budget_on_a_gpu_holds_the_context_too():
    config = RunConfig(budget_gib=8)
    capacity = capacity_for(config, "cuda", 20 * GIB, "8.6")
    assert capacity.total_bytes == 8 * GIB
    assert capacity.forecast(config).parts.context == CONTEXT
    assert capacity.compute_capability == "8.6"
    assert not capacity.tracked
    # a budget beyond the card is the card: what is free, and the context that is not
    assert capacity_for(config, "cuda", 5 * GIB).total_bytes == 5 * GIB + CONTEXT
    assert capacity_for(config, "cuda", None).total_bytes == 8 * GIB


def test_a_budget_on_a_cpu_is_the_trackers():
    config = RunConfig(budget_gib=0.25)
    capacity = capacity_for(config, "cpu", 20 * GIB)
    assert capacity.total_bytes == capacity.tracker_budget() == GIB // 4
    assert (capacity.tracked, capacity.machine_bytes) == (True, 20 * GIB)
    assert capacity_for(config, "cpu", None).machine_bytes is None


def test_cards_that_need_not_be_here():
    for gib in CARDS:
        capacity = card(gib)
        assert (capacity.total_bytes, capacity.device_type) == (gib * GIB, "cuda")
        assert capacity.with_context
    assert list(CARDS) == sorted(CARDS)
    for wrong in (0, 2000, math.nan, "8", None, True):
        with pytest.raises(InputError, match="capacity_gib") as caught:
            card(wrong)
        assert caught.value.field == "capacity_gib"


# --- limits ---

configs = st.builds(
    RunConfig,
    model=st.sampled_from(("tiny", "gpt2", "gpt2-medium", "gpt2-xl")),
    precision=st.sampled_from(PRECISIONS),
    B=st.integers(1, 256),
    T=st.integers(1, 1024),
    steps=st.integers(1, 2),
    attention=st.sampled_from(ATTENTIONS),
    optimizer=st.sampled_from(OPTIMIZERS),
    compile=st.booleans(),
)
sizes = st.floats(27, 38).map(lambda power: int(2**power))  # 128 MiB to 256 GiB
capacities = st.builds(
    Capacity, total_bytes=sizes, device_type=st.sampled_from(("cuda", "xpu", "mps"))
) | st.one_of(
    st.builds(Capacity, total_bytes=sizes, device_type=st.just("cuda"), with_context=st.just(True)),
    st.builds(Capacity, total_bytes=sizes, tracked=st.just(True), machine_bytes=st.none() | sizes),
    sizes.map(lambda free: capacity_for(RunConfig(), "cpu", free)),
)


def plain_search(config: RunConfig, axis: str, capacity: Capacity, wanted=(FITS,)) -> list[int]:
    """Every size of the slider at which the whole forecast says that it fits."""
    sizes = range(1, 257) if axis == "B" else range(8, 1025, 8)
    return [s for s in sizes if verdict(replace(config, **{axis: s}), capacity) in wanted]


@given(configs, capacities, st.sampled_from(("B", "T")))
@example(RunConfig(B=16, T=1024), card(8), "B")
@example(RunConfig(B=16, T=1024), card(8), "T")
@example(RunConfig(), card(1024), "B")
@example(RunConfig(), card(1), "T")
def test_limits_are_those_of_a_plain_search(config, capacity, axis):
    fitting = plain_search(config, axis, capacity)
    assert largest(config, axis, capacity) == max(fitting, default=0)
    with_band = plain_search(config, axis, capacity, (FITS, MAY_FAIL))
    assert largest(config, axis, capacity, also_may_fail=True) == max(with_band, default=0)
    size = getattr(config, axis)
    smaller = dict(zip("BT", smaller_that_fits(config, capacity), strict=True))[axis]
    assert smaller == max((s for s in fitting if s < size), default=0)
    told = report(config, capacity)
    assert told[f"largest_{axis}"] == max(fitting, default=0)


def test_forecasts_are_kept_and_a_text_is_not():
    text = "an own text " * 1000
    config, count = RunConfig(text=text), sys.getrefcount(text)
    capacity = card(16)
    told = capacity.forecast(config)
    assert capacity.forecast(replace(config, text=text + "!")) is told
    assert capacity.forecast(replace(config, seed=1, text="own")) == told
    assert sys.getrefcount(text) == count


@given(configs, capacities)
@example(RunConfig(B=8, T=1024), card(8))
@example(RunConfig(B=8, T=1024), card(3))
@example(RunConfig(B=256, T=1024), card(3))
@example(RunConfig(B=1, T=1), card(1))
def test_advice_promises_nothing_that_does_not_fit(config, capacity):
    said = advice(config, capacity)

    def fits(**smaller: int) -> bool:
        assert all(1 <= size < getattr(config, name) or size == 1 for name, size in smaller.items())
        return verdict(replace(config, **smaller), capacity) == FITS

    if found := re.fullmatch(r"Lower B to (\d+), or T to (\d+): that should fit\.", said):
        assert fits(B=int(found[1]))
        assert fits(T=int(found[2]))
    elif found := re.fullmatch(r"Lower ([BT]) to (\d+): that should fit\.", said):
        assert fits(**{found[1]: int(found[2])})
        assert int(found[2]) < getattr(config, found[1])
    elif found := re.fullmatch(r"Lower both, to B=1 and T=(\d+): that should fit\.", said):
        assert fits(B=1, T=int(found[1]))
        assert not plain_search(config, "B", capacity)[: config.B - 1]  # no B alone
    else:
        assert said == "Take a smaller model."
        shorter = range(8, config.T, 8)
        assert not any(verdict(replace(config, B=1, T=T), capacity) == FITS for T in shorter)


def with_margin(live_bytes: float, device_type: str) -> int:
    """What a run takes from the device, by the margins that the memory study measured."""
    if device_type == "cpu":
        return int(live_bytes + CPU_SCRATCH)
    return int(live_bytes * FRAGMENTATION + 64 * MIB)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("fitting", [1, 3])
def test_the_proposed_batch_is_the_largest_whose_measured_peak_fits(fitting, device_type):
    def need(B: int) -> int:
        return with_margin(live(tiny(B=B, T=1024), device_type), device_type)

    config = tiny(B=8, T=1024)
    free = (need(fitting) + need(fitting + 1)) // 2
    said = advice(config, capacity_for(config, device_type, free))
    B = int(re.match(r"Lower B to (\d+), or T to \d+: that should fit\.", said)[1])
    assert B == fitting
    T = int(re.search(r"T to (\d+)", said)[1])
    assert with_margin(live(tiny(B=8, T=T), device_type), device_type) <= free
    assert with_margin(live(tiny(B=8, T=T + 8), device_type), device_type) > free


def test_a_shorter_sequence_is_proposed_where_no_batch_fits():
    def need(T: int) -> int:
        return with_margin(live(tiny(B=1, T=T)), "cpu")

    for B in (1, 8):
        config = tiny(B=B, T=1024)
        free = (need(256) + need(264)) // 2
        said = advice(config, capacity_for(config, "cpu", free))
        if B == 1:
            assert said == "Lower T to 256: that should fit."
        else:
            T = int(re.fullmatch(r"Lower T to (\d+): that should fit\.", said)[1])
            assert with_margin(live(tiny(B=8, T=T)), "cpu") <= free
    # AdamW's state alone is nearly all: B=8 fits at no length
    config = tiny(B=200, T=1024)
    floor = live(tiny(B=1, T=8))
    said = advice(config, capacity_for(config, "cpu", floor + CPU_SCRATCH + MIB))
    T = int(re.fullmatch(r"Lower both, to B=1 and T=(\d+): that should fit\.", said)[1])
    assert live(tiny(B=1, T=T)) <= floor + MIB


def test_advice_without_known_memory_names_no_size_that_fits():
    unknown = Capacity(total_bytes=None, device_type="mps")
    said = advice(RunConfig(B=8, T=512), unknown)
    assert said == "Lower B below 8 or T below 512, or take a smaller model."
    said = advice(RunConfig(B=1, T=512), unknown)
    assert said == "Lower T below 512, or take a smaller model."
    assert advice(RunConfig(B=1, T=1), unknown) == "Take a smaller model."
    # AdamW's state alone is more than this: no B and no T helps
    assert advice(RunConfig(B=8, T=1024), card(1)) == "Take a smaller model."


# --- the wall of a CPU run ---


def gib(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"([\d.]+) (?:of|GiB)", text)]


def test_the_wall_stands_at_the_measured_need():
    config = RunConfig(B=4, T=1024, optimizer="fused")
    need = live(config) + CPU_SCRATCH

    def refusal(free: int) -> str | None:
        capacity = capacity_for(config, "cpu", free)
        return capacity.refusal(capacity.forecast(config))

    assert refusal(int(1.001 * need)) is None
    assert gib(refusal(int(0.999 * need))) == pytest.approx([need / GIB] * 2, abs=0.06)
    assert gib(refusal(3 * GIB)) == pytest.approx([need / GIB, 3], abs=0.06)
    assert refusal(0).endswith("0.0 GiB are free.")
    # on other devices the run meets the wall itself
    on_gpu = capacity_for(config, "cuda", 1)
    assert on_gpu.refusal(on_gpu.forecast(config)) is None


def test_a_budget_lets_a_run_meet_the_wall_where_the_machine_can_bear_it():
    config = RunConfig(B=256, T=1024, budget_gib=4)

    def refusal(machine: float | None, config: RunConfig = config) -> str | None:
        capacity = capacity_for(config, "cpu", None if machine is None else int(machine * GIB))
        return capacity.refusal(capacity.forecast(config))

    # the tracker stops it after the tensor that goes too far; the largest are B*T*V float32 logits
    # and the B*12*T*T scores
    logits, scores = 4 * 256 * 1024 * 50257, 4 * 256 * 12 * 1024**2
    wall = 4 * GIB + max(logits, scores) + CPU_SCRATCH
    assert refusal(1.001 * wall / GIB) is None
    assert gib(refusal(0.99 * wall / GIB)) == pytest.approx(
        [wall / GIB, 0.99 * wall / GIB], abs=0.1
    )
    assert refusal(None) is None
    # a run that fits needs no more than it takes
    small = tiny(budget_gib=100)
    assert refusal((live(small) + CPU_SCRATCH + MIB) / GIB, small) is None
    assert refusal((live(small) + CPU_SCRATCH - MIB) / GIB, small)
    # weights that are more than the budget: nothing to run (1,557,611,200 of them, and the masks)
    xl = RunConfig(model="gpt2-xl", B=1, T=1, budget_gib=4)
    weights = 4 * (1_557_611_200 + 48 * 1024 * 1024)
    assert refusal(100, xl) == f"The weights alone take {weights / GIB:.2f} of 4.00 GiB."


# --- words ---


@given(configs, capacities)
def test_the_sentence_names_the_largest_part(config, capacity):
    said = sentence(config, capacity)
    told = capacity.forecast(config)
    found = re.search(r"Largest part, (.+): ([\d.]+) of ([\d.]+) GiB\.( SDPA has no .+\.)?$", said)
    parts = {PART_NAMES[name]: size for name, size in report(config, capacity)["parts"].items()}
    assert parts[found[1]] == max(parts.values())
    assert float(found[2]) == pytest.approx(parts[found[1]] / GIB, abs=0.051)
    assert float(found[3]) == pytest.approx(told.peak_bytes / GIB, abs=0.051)
    fits = capacity.verdict(told) == FITS
    assert said.startswith("Largest part") == fits
    assert fits or said.startswith(advice(config, capacity))


FUSED = RunConfig(B=4, T=1024, optimizer="fused")


@pytest.mark.parametrize(
    ("config", "device_type", "said"),
    [
        # GPT-2 at B=4, T=1024: 8473 and 8454 MiB; 6111 and 4940; 6542 on a CPU
        (FUSED, "cuda", "saves nothing here: copies beside the float32 originals"),
        (replace(FUSED, attention="sdpa"), "cuda", "saves 19 % here, not half"),
        (FUSED, "cpu", "saves 23 % here, not half"),
        (RunConfig(B=1, T=8), "cuda", "saves nothing here: the peak is the optimizer step, all"),
        (tiny(B=1, T=8, optimizer="fused"), "cpu", "the peak is the gradient of the token emb"),
    ],
)
def test_what_bf16_saves_is_said_in_figures(config, device_type, said):
    words = compare_words(config, Capacity(total_bytes=None, device_type=device_type))
    assert words.startswith("bf16 does not halve memory")
    assert words.endswith("; fp16 is as bf16, TF32 as fp32).")
    assert said in words
    fp32, bf16 = (
        live(replace(config, precision=precision), device_type) / GIB
        for precision in ("fp32", "bf16")
    )
    found = re.search(r"([\d.]+) GiB in fp32, ([\d.]+) GiB in bf16", words)
    assert (float(found[1]), float(found[2])) == pytest.approx((fp32, bf16), abs=0.011)


def test_a_gpu_whose_sdpa_has_no_kernel_for_bf16_is_told_of_it():
    """A T4: SDPA runs bf16 as plain matmuls in float32, fp16 as one kernel."""
    old, new = (
        Capacity(total_bytes=15 * GIB, device_type="cuda", compute_capability=capability)
        for capability in ("7.5", "8.0")
    )
    sdpa = replace(FUSED, attention="sdpa")
    without = {
        p: measured(replace(sdpa, precision=p), "cuda", fused_sdpa=p != "bf16").peak_bytes / GIB
        for p in ("fp32", "bf16", "fp16")
    }
    words = compare_words(sdpa, old)
    more = without["bf16"] / without["fp32"] - 1
    assert f"It takes {more:.0%}".replace("%", " %") in words
    assert "more here: SDPA has no fused kernel for it" in words
    found = re.search(
        r"([\d.]+) GiB in fp32, ([\d.]+) GiB in bf16, ([\d.]+) GiB in fp16; TF32", words
    )
    assert [float(x) for x in found.groups()] == pytest.approx([*without.values()], abs=0.011)
    for capacity, precision, told in ((old, "bf16", 1), (old, "fp16", 0), (new, "bf16", 0)):
        assert ("SDPA has no" in sentence(replace(sdpa, precision=precision), capacity)) == told
    assert "SDPA" not in sentence(replace(FUSED, precision="bf16"), old)
    # a card that need not be here may be old or new
    assert "(T4, V100): there it keeps" in sentence(replace(sdpa, precision="bf16"), card(16))
    assert "SDPA" not in sentence(replace(sdpa, precision="fp16"), card(16))
    # what once read as room enough
    large = replace(sdpa, B=9, precision="bf16")
    assert verdict(large, old) in (MAY_FAIL, WILL_NOT_FIT)
    assert verdict(large, new) == verdict(replace(large, precision="fp16"), old) == FITS


@given(configs, st.sampled_from(("cpu", "cuda", "xpu", "mps")))
@example(RunConfig(model="tiny", B=32, T=175, compile=True), "cpu")
def test_nobody_is_told_that_bf16_halves_memory(config, device_type):
    words = compare_words(config, Capacity(total_bytes=None, device_type=device_type))
    assert ("not halve memory" in words) != config.compile
    assert ("and the loss stay float32" in words) != config.compile
    fp32, bf16 = (float(found) for found in re.findall(r"([\d.]+) GiB in", words))
    rounded = 0.0051 + 0.01 / fp32  # the percentage is rounded, and so are the figures
    if found := re.search(r"saves (\d+) %", words):
        assert 1 - bf16 / fp32 == pytest.approx(int(found[1]) / 100, abs=rounded)
        assert int(found[1]) < 50 or config.compile  # the compiled loss is 16-bit too
        assert ("not half" in words) != config.compile
    elif found := re.search(r"takes (\d+) % more", words):
        assert bf16 / fp32 - 1 == pytest.approx(int(found[1]) / 100, abs=rounded)
    else:
        assert "saves nothing here" in words
        assert bf16 == pytest.approx(fp32, rel=2 * rounded)


def test_the_basis_says_what_was_checked_where():
    assert "tracked steps" in basis(RunConfig(), "cpu")
    assert "simulated" in basis(RunConfig(), "cuda")
    assert "profiled" in basis(RunConfig(compile=True), "cpu")
    assert "CPUs only" in basis(RunConfig(compile=True), "cuda")


def test_a_report_is_json():
    config = RunConfig(B=4, T=1024)
    told = report(config, card(8))
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert list(told) == [
        *("peak_bytes", "live_bytes", "phase", "parts"),
        *("verdict", "capacity_bytes", "sentence", "largest_B", "largest_T", "basis"),
    ]
    assert sum(told["parts"].values()) == told["peak_bytes"]
    assert set(told["parts"]) == set(PART_NAMES)
    assert told["capacity_bytes"] == 8 * GIB
    assert (told["verdict"], told["largest_B"]) == (WILL_NOT_FIT, 3)


# --- the map ---


@pytest.mark.parametrize(
    "capacity",
    [card(8), capacity_for(RunConfig(), "cpu", 8 * GIB), Capacity(total_bytes=GIB, tracked=True)],
    ids=["card", "cpu", "budget"],
)
def test_the_map_holds_what_single_forecasts_say(capacity):
    config = RunConfig(precision="bf16")
    found = fit_map(config, capacity)
    assert (found["B"], found["T"]) == (list(MAP_B), list(MAP_T))
    for table in (found["peak_bytes"], found["verdict"]):
        assert [len(row) for row in table] == [16] * 16
    for i, B in enumerate(MAP_B):
        for j, T in enumerate(MAP_T):
            told = capacity.forecast(replace(config, B=B, T=T))
            assert found["peak_bytes"][i][j] == told.peak_bytes
            assert found["verdict"][i][j] == capacity.verdict(told)
    assert {MAP_B[0], MAP_B[-1], MAP_T[-1]} == {1, 256, 1024}  # the sliders' ends
    assert json.loads(json.dumps(found)) == found
    # never worse to the left or below
    order = [FITS, MAY_FAIL, WILL_NOT_FIT]
    ranks = [[order.index(v) for v in row] for row in found["verdict"]]
    for row in (*ranks, *map(list, zip(*ranks, strict=True))):
        assert row == sorted(row)


def test_the_map_takes_milliseconds():
    taken = []
    for _ in range(5):
        t0 = time.process_time()  # of this process alone: others may be busy
        fit_map(RunConfig(), card(8))
        taken.append(time.process_time() - t0)
    assert statistics.median(taken) < 0.020


def test_the_map_needs_no_torch():
    program = """
import sys, time
from gpt2demo.config import RunConfig
from gpt2demo.fit import card, fit_map
t0 = time.process_time()
fit_map(RunConfig(), card(8))
print(time.process_time() - t0, "torch" in sys.modules)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    seconds, torch = run.stdout.split()
    assert float(seconds) < 0.5
    assert torch == "False"
