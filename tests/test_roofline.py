"""The roofline's counts against torch's own counters, and what becomes of a missing rate."""

import contextlib
import functools
import json
import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from dispatched import Dispatched
from memory_tracker import AMP, autocast_of_a_gpu
from test_flops import CPU_KERNELS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from gpt2demo.config import MODELS, PRECISIONS, GPTConfig, RunConfig
from gpt2demo.flops import flops_per_token
from gpt2demo.json_file import strict_json
from gpt2demo.model import GPT
from gpt2demo.peaks import find_gpu
from gpt2demo.records import jsonable
from gpt2demo.roofline import HOST_WORK, PART_NAMES, Rates, step_forecast, training_rate
from gpt2demo.step_counts import FORMS, SHAPES, matmul_flops, operations, traffic


def rates(
    flops=1e12,
    bandwidth=1e11,
    launch=1e-6,
    device_type="cpu",
    precisions=PRECISIONS,
    tokens=128,
):
    """The same rate everywhere."""
    return Rates(
        device_type=device_type,
        tokens=tokens,
        flops_per_sec={
            p: {shape: dict.fromkeys(FORMS, flops) for shape in SHAPES} for p in precisions
        },
        copies=((2**20, bandwidth), (2**28, bandwidth)),
        launch_seconds=launch,
    )


@functools.cache
def fake_step(config, device_type):
    """The second step of `config` on fake tensors, under the rules of that kind of device: what the
    dispatcher ran, and FLOPs of the forward, of the backward and of lm_head by torch's counter.
    """
    amp = config.precision in AMP
    cuda = device_type == "cuda"
    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        if cuda and amp:
            stack.enter_context(autocast_of_a_gpu())
        torch.set_default_dtype(torch.float64 if config.precision == "fp64" else torch.float32)
        try:
            model = GPT(config.gpt, attention=config.attention)
        finally:
            torch.set_default_dtype(torch.float32)
        x = torch.zeros(config.B, config.T, dtype=torch.long)
        chosen = {"fused": True} if config.optimizer == "fused" else {"foreach": cuda}
        adamw = torch.optim.AdamW(model.parameters(), **chosen)
        for _ in range(2):
            counter = Dispatched(config)
            flops = FlopCounterMode(display=False, custom_mapping=CPU_KERNELS)
            with flops, counter:
                adamw.zero_grad()
                counter.phase = "forward"
                with torch.autocast(
                    "cpu", dtype=AMP.get(config.precision, torch.bfloat16), enabled=amp
                ):
                    logits, loss = model(x, x)
                del logits
                forward = flops.get_total_flops()
                counter.phase = "backward"
                loss.backward()
                counter.phase = "optimizer"
                adamw.step()
    lm_head = sum(flops.get_flop_counts()["GPT.lm_head"].values())
    return counter, forward, flops.get_total_flops() - forward, lm_head


SETTINGS = [
    ({"B": 2, "T": 64}, "cpu"),
    ({"B": 1, "T": 256, "precision": "bf16", "attention": "sdpa", "optimizer": "fused"}, "cpu"),
    ({"B": 2, "T": 128, "precision": "bf16"}, "cpu"),
    ({"B": 2, "T": 128, "precision": "bf16"}, "cuda"),
    ({"B": 1, "T": 1024, "precision": "fp16", "attention": "sdpa", "optimizer": "fused"}, "cuda"),
    ({"B": 1, "T": 64, "precision": "fp64", "attention": "sdpa"}, "cpu"),
    ({"B": 3, "T": 96, "vocab_size": 50304}, "cuda"),
    ({"B": 3, "T": 32, "optimizer": "fused"}, "cpu"),
]


@pytest.fixture(params=SETTINGS, ids=lambda setting: f"{setting[1]} {setting[0]}")
def setting(request, monkeypatch):
    """A run and the kind of device; the model is GPT-2's with two of its layers, for speed."""
    settings, device_type = request.param
    gpt = GPTConfig(n_layer=2)
    if settings["B"] == 3:  # medium's width, at which the position table has a weight's size
        gpt = replace(gpt, n_embd=1024, n_head=16)
    monkeypatch.setitem(MODELS, "tiny", gpt)
    return RunConfig(model="tiny", **settings), device_type


# --- what is counted


def test_flops_are_those_that_torch_counts(setting):
    config, device_type = setting
    # left out on both sides: all that is no matmul
    _, forward, backward, lm_head = fake_step(config, device_type)
    flops = matmul_flops(config)
    assert sum(part["forward"] for part in flops.values()) == pytest.approx(forward, rel=1e-6)
    assert sum(
        part["input_gradient"] + part["weight_gradient"] for part in flops.values()
    ) == pytest.approx(backward, rel=1e-6)
    assert sum(flops["classifier"].values()) == pytest.approx(lm_head, rel=1e-6)


def test_flops_agree_with_the_models():
    config = RunConfig(B=3, T=40)
    total = sum(sum(part.values()) for part in matmul_flops(config).values())
    assert total == flops_per_token(config.gpt, config.T) * config.tokens_per_step


def test_bytes_are_those_that_torch_moves(setting):
    config, device_type = setting
    measured = dict(fake_step(config, device_type)[0].moved)
    counted = defaultdict(int)
    for item in traffic(config, device_type):
        counted[item.part] += item.total_bytes
    if config.precision == "fp16":  # this step has no scaler, which reads and writes gradients
        measured["gradients"] += 2 * measured["optimizer"] // 7
    assert counted.keys() == measured.keys()
    assert set(counted) <= set(PART_NAMES)
    for part, size in measured.items():
        assert counted[part] == pytest.approx(size, rel=0.01), part


def test_operations_are_those_that_torch_dispatches(setting):
    config, device_type = setting
    ran = fake_step(config, device_type)[0].operations
    tensors = 12 * config.gpt.n_layer + 4
    loop = config.optimizer == "default" and device_type == "cpu"
    assert operations(config, device_type) - tensors * (10 if loop else 2) == (
        ran["forward"] + ran["backward"]
    )
    if loop:
        assert ran["optimizer"] == 10 * tensors
    else:  # and a few kernels over all tensors
        assert ran["optimizer"] <= 2 * tensors + 20


# --- what follows from it


def test_a_step_by_hand():
    config = RunConfig(B=4, T=32, precision="bf16", optimizer="fused")
    told = step_forecast(config, rates(flops=2e11, bandwidth=2e10, launch=2e-6))
    C, N, V = 768, 128, 50257
    parts = told.parts_ms
    assert parts["layers"] == pytest.approx(6 * 12 * 12 * C * C * N / 2e11 * 1e3)
    assert parts["classifier"] == pytest.approx(6 * V * C * N / 2e11 * 1e3)
    assert parts["loss"] == pytest.approx(6 * N * V * 4 / 2e10 * 1e3)
    assert parts["optimizer"] == pytest.approx(7 * 4 * 124_439_808 / 2e10 * 1e3, rel=0.002)
    assert parts["launches"] == pytest.approx(told.operations * HOST_WORK * 2e-3)
    assert sum(parts.values()) == pytest.approx(told.ms_per_step)
    assert told.tokens_per_sec == pytest.approx(N / told.ms_per_step * 1000)
    matmuls = parts["layers"] + parts["classifier"] + parts["attention"]
    assert told.matmul_share == pytest.approx(matmuls / told.ms_per_step)
    assert list(parts) == list(PART_NAMES)
    assert told.missing == ()
    assert told.notes == ()


def test_each_form_has_its_own_rate():
    one = rates(flops=1e12)
    slow = {
        "fp32": {
            "mlp": {"forward": 1e12, "input_gradient": 1e12, "weight_gradient": 0.5e12},
            "classifier": dict.fromkeys(FORMS, 0.25e12),
        }
    }
    config = RunConfig()
    fast, slower = (
        step_forecast(config, measured).parts_ms
        for measured in (one, replace(one, flops_per_sec=slow))
    )
    assert slower["layers"] == pytest.approx(fast["layers"] * 4 / 3)
    assert slower["classifier"] == pytest.approx(fast["classifier"] * 4)
    assert slower["optimizer"] == fast["optimizer"]
    # work over time: layers 85 and classifier 39 million weights
    layers, classifier = 12 * 12 * 768**2, 50257 * 768
    assert training_rate(config, replace(one, flops_per_sec=slow)) == pytest.approx(
        (layers + classifier) / (layers * 4 / 3 + classifier * 4) * 1e12
    )


@pytest.mark.parametrize("attention", ["manual", "sdpa"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_more_tokens_a_larger_share_of_matmuls(attention, precision, device_type):
    measured = rates(flops=5e13, bandwidth=1e12, launch=4e-6, device_type=device_type)
    config = RunConfig(T=64, attention=attention, precision=precision)
    told = [step_forecast(replace(config, B=B), measured) for B in (1, 2, 4, 16, 64, 256)]
    shares = [step.matmul_share for step in told]
    assert shares == sorted(shares)
    assert shares[-1] > 4 * shares[0]
    times = [step.ms_per_step for step in told]
    assert times == sorted(times)


def test_default_adamw_moves_more_than_fused_and_autocast_less_than_float32_in_layers():
    def moved(**settings):
        return step_forecast(RunConfig(B=4, T=512, **settings), rates()).traffic_bytes

    assert moved()["optimizer"] == pytest.approx(20 / 7 * moved(optimizer="fused")["optimizer"])
    assert moved(precision="bf16")["activations"] < moved()["activations"]
    assert "casts" not in moved()
    assert moved(precision="fp64")["loss"] == 2 * moved()["loss"]
    assert moved(precision="fp16")["gradients"] > moved(precision="bf16")["gradients"]


def test_an_accelerator_waits_only_for_what_its_work_does_not_hide():
    config = RunConfig(B=4, T=1024, precision="bf16")
    busy = step_forecast(config, rates(flops=1e14, bandwidth=1e12, device_type="cuda"))
    assert busy.parts_ms["launches"] == 0
    idle = step_forecast(
        replace(config, B=1, T=8),
        rates(flops=1e15, bandwidth=1e13, launch=5e-6, device_type="cuda"),
    )
    assert idle.ms_per_step == pytest.approx(idle.operations * HOST_WORK * 5e-3)
    assert idle.parts_ms["launches"] > 0.9 * idle.ms_per_step
    # a CPU starts its operations itself
    cpu = step_forecast(config, rates(flops=1e14, bandwidth=1e12))
    assert cpu.parts_ms["launches"] == pytest.approx(cpu.operations * HOST_WORK * 1e-3)


@pytest.mark.parametrize(("precision", "lesson_ms"), [("fp32", 1000), ("tf32", 333), ("bf16", 300)])
def test_at_the_peaks_of_an_a100_the_lessons_steps_are_not_beaten(precision, lesson_ms):
    # a datasheet is a bound: the forecast from it lies below what the lesson measured, not far
    spec = find_gpu("NVIDIA A100-SXM4-40GB", 42505273344)
    peak = rates(flops=spec.peak_flops[precision], device_type="cuda", tokens=16 * 1024)
    peak = replace(peak, copies=((2**28, spec.bandwidth_bytes_per_sec),))
    told = step_forecast(RunConfig(B=16, T=1024, precision=precision), peak)
    assert 0.6 * lesson_ms < told.ms_per_step < lesson_ms


# --- bandwidth by size


def test_bandwidth_is_that_of_the_tensors_size():
    measured = replace(rates(), copies=((2**20, 8e10), (2**24, 2e10), (2**28, 1e10)))
    assert measured.bandwidth(1) == measured.bandwidth(2**20) == 8e10
    assert measured.bandwidth(2**22) == pytest.approx(4e10)
    assert measured.bandwidth(2**24) == pytest.approx(2e10)
    assert measured.bandwidth(2**28) == measured.bandwidth(2**40) == 1e10
    found = [measured.bandwidth(2**k) for k in range(18, 32)]
    assert found == sorted(found, reverse=True)
    assert replace(measured, copies=((2**28, 1e10),)).bandwidth(5) == 1e10


# --- what is not known


UNUSABLE = [None, 0, 0.0, -1.0, math.nan, math.inf]


@pytest.mark.parametrize("rate", UNUSABLE)
def test_a_rate_that_is_none_makes_the_step_unknown(rate):
    config = RunConfig()
    partly = rates()
    mlp = {**dict.fromkeys(FORMS, 1e12), "weight_gradient": rate}
    partly = replace(
        partly, flops_per_sec={"fp32": {"mlp": mlp, "classifier": dict.fromkeys(FORMS, 1e12)}}
    )
    told = step_forecast(config, partly)
    assert told.ms_per_step is told.tokens_per_sec is told.matmul_share is None
    assert told.parts_ms["layers"] is told.parts_ms["attention"] is None
    assert told.parts_ms["classifier"] > 0
    assert told.parts_ms["optimizer"] > 0
    assert told.missing == ("fp32 mlp weight_gradient",)
    assert training_rate(config, partly) is None


@pytest.mark.parametrize("rate", UNUSABLE)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_bandwidth_and_launches_may_be_unknown_too(rate, device_type):
    known = rates(device_type=device_type)
    for copies in ((), ((2**20, rate),), ((0, 1e10),)):
        told = step_forecast(RunConfig(precision="bf16"), replace(known, copies=copies))
        assert told.ms_per_step is None
        assert told.parts_ms["optimizer"] is told.parts_ms["casts"] is None
        assert told.parts_ms["layers"] > 0
        assert told.missing == ("bandwidth",)
    told = step_forecast(RunConfig(), replace(known, launch_seconds=rate))
    assert told.ms_per_step is told.parts_ms["launches"] is None
    assert told.missing == ("launch overhead",)


def test_nothing_known_is_no_error():
    told = step_forecast(RunConfig(), Rates(device_type="cpu", tokens=0))
    assert told.ms_per_step is None
    assert len(told.missing) == 8
    assert told.parts_ms["casts"] == 0  # fp32 casts nothing, at any rate
    assert json.loads(strict_json(jsonable(told.to_dict())))["operations"] == told.operations
    only_bf16 = step_forecast(RunConfig(), rates(precisions=("bf16",)))
    assert only_bf16.ms_per_step is None


@pytest.mark.parametrize("model", ["tiny", "gpt2-xl"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_setting_has_a_forecast(model, precision):
    for B, T in ((1, 1), (256, 1024)):
        config = RunConfig(model=model, precision=precision, B=B, T=T, compile=True)
        told = step_forecast(config, rates())
        assert 0 < told.matmul_share < 1
        assert all(ms >= 0 for ms in told.parts_ms.values())
        assert any("compile" in note for note in told.notes)
        assert any("measured for 128 tokens" in note for note in told.notes)


def test_sdpas_forecast_says_what_was_not_measured():
    def notes(precision, device_type, attention="sdpa"):
        config = RunConfig(precision=precision, attention=attention)
        return " ".join(step_forecast(config, rates(device_type=device_type)).notes)

    assert "kernel was not measured" in notes("bf16", "cuda")
    assert "kernel was not measured" in notes("tf32", "cpu")
    assert "no fused kernel here" in notes("fp64", "cuda")
    assert "no fused kernel here" in notes("fp32", "mps")
    assert "no fused kernel" not in notes("bf16", "cuda") + notes("fp64", "cpu")
    assert "the same kernel in fp32 and TF32" in notes("tf32", "cuda")
    for other in (("fp32", "cuda"), ("tf32", "cpu"), ("tf32", "cuda", "manual")):
        assert "the same kernel" not in notes(*other)


def test_host_work_is_what_a_step_of_next_to_nothing_shows():
    # the constant's own origin, loosely: a busy machine doubles either side
    gpt = GPTConfig(block_size=8, vocab_size=64, n_layer=12, n_head=2, n_embd=64)
    from time import perf_counter

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = GPT(gpt)
        adamw = torch.optim.AdamW(model.parameters())
        x, y = torch.zeros(1, 8, dtype=torch.long), torch.ones(1)
        steps, launches = [], []
        for _ in range(30):
            t0 = perf_counter()
            adamw.zero_grad()
            model(x, x)[1].backward()
            adamw.step()
            t1 = perf_counter()
            for _ in range(300):
                y.mul_(1.0)
            steps.append(t1 - t0)
            launches.append((perf_counter() - t1) / 300)
    finally:
        torch.set_num_threads(before)
    # the least of many: what nothing else disturbed
    factor = min(steps) / min(launches) / operations(RunConfig(), "cpu")
    assert HOST_WORK / 3 < factor < HOST_WORK * 3
