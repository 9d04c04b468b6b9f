"""The probe: what it measures, that it keeps to its time, and that it leaves nothing behind."""

import argparse
import json
import math
import statistics
import time
import types
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from gpt2demo import probe as module
from gpt2demo import train as loop
from gpt2demo.cli import probe as verb
from gpt2demo.cli.output import Interruption
from gpt2demo.config import MODELS, PRECISIONS, GPTConfig, InputError, RunConfig
from gpt2demo.data import load_tokens
from gpt2demo.device import probe_device
from gpt2demo.json_file import strict_json
from gpt2demo.probe import probe_rates
from gpt2demo.records import jsonable
from gpt2demo.roofline import step_forecast
from gpt2demo.step_counts import FORMS, SHAPES
from gpt2demo.support import Support
from gpt2demo.train import train

SMALL = GPTConfig(vocab_size=1000, n_embd=32)  # its matmuls take microseconds
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def info():
    native = Support(status="native", reason="Here for the tests.")
    return replace(probe_device("cpu"), support=dict.fromkeys(PRECISIONS, native))


BLOCKS = module._COPY_BYTES


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads wait for each other on a busy CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_time(monkeypatch):
    """Probe and loop read the clock of this thread's own work, which other programs do not move.

    The tests of the bound itself go back to the wall's.
    """
    clock = types.SimpleNamespace(perf_counter=time.thread_time)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(loop, "time", clock)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """The probe's own blocks and samples take longer than these tests have."""
    monkeypatch.setattr(module, "_COPY_BYTES", (2**14, 2**18, 2**20))
    monkeypatch.setattr(module, "_SAMPLE_SECONDS", 0.0005)


def small(info, tokens=16, seconds=1.0, **other):
    return probe_rates(info, tokens, **{"gpt": SMALL, "seconds": seconds} | other)


def three(fault):
    """Replacements of the three products that do `fault(result's dtype, flops)` first."""

    def forward(x, w, b):
        fault(x.dtype, 2 * len(x) * w.numel())
        return F.linear(x, w, b)

    def input_gradient(g, w):
        fault(g.dtype, 2 * len(g) * w.numel())
        return g.mm(w)

    def weight_gradient(g, x):
        fault(g.dtype, 2 * g.numel() * x.shape[1])
        return g.t().mm(x)

    return {
        "_forward": forward,
        "_input_gradient": input_gradient,
        "_weight_gradient": weight_gradient,
    }


def patch(monkeypatch, replacements):
    for name, replacement in replacements.items():
        monkeypatch.setattr(module, name, replacement)


# --- what is measured


def test_every_precision_shape_and_form_has_a_rate(info):
    found = small(info)
    assert found.rates.flops_per_sec.keys() == set(PRECISIONS)
    for shapes in found.rates.flops_per_sec.values():
        assert shapes.keys() == set(SHAPES)
        for forms in shapes.values():
            assert forms.keys() == set(FORMS)
            assert all(math.isfinite(rate) and rate > 0 for rate in forms.values())
    assert found.skipped == {}
    assert not found.stopped
    assert (found.tokens, found.rates.tokens, found.device_type) == (16, 16, "cpu")
    assert found.device_name == info.name
    assert [size for size, _ in found.rates.copies] == [2**14, 2**18, 2**20]
    assert BLOCKS == tuple(sorted(BLOCKS))
    assert found.bandwidth_bytes_per_sec == found.rates.copies[-1][1]
    assert 1e-8 < found.launch_seconds < 1e-3
    assert found.seconds < 3
    assert json.loads(strict_json(jsonable(found.to_dict())))["rates"]["tokens"] == 16


def test_the_training_mix_is_work_over_time(info):
    found = small(info, precisions=["fp32"])
    rate = found.rates.flops_per_sec["fp32"]
    # weights of GPT-2's layers and classifier: the same FLOPs in every form
    layers, classifier = 12 * 12 * 768**2, 50257 * 768
    seconds = sum(
        weights / rate[shape][form]
        for shape, weights in (("mlp", layers), ("classifier", classifier))
        for form in FORMS
    )
    mix = found.training_flops_per_sec["fp32"]
    assert mix == pytest.approx(3 * (layers + classifier) / seconds)
    rates = [rate[shape][form] for shape in SHAPES for form in FORMS]
    assert min(rates) < mix < max(rates)


def test_share_of_the_peak_where_one_is_known(info):
    assert small(info, precisions=["fp32"]).peak_share == {"fp32": None}
    card = replace(info, name="NVIDIA A100-SXM4-40GB", memory_total_bytes=42505273344)
    found = small(card, precisions=["fp32", "bf16"])
    for name, peak in {"fp32": 19.5e12, "bf16": 312e12}.items():
        assert found.peak_share[name] == pytest.approx(found.training_flops_per_sec[name] / peak)


def test_float32_is_as_fast_as_another_clock_says(info):
    N, C, out = 128, 768, 3072
    weights = [torch.randn(out, C) for _ in range(12)]
    x = torch.randn(N, C)

    def by_hand():
        taken = []
        for i in range(20):
            t0 = time.thread_time()
            x @ weights[i % 12].T
            taken.append(time.thread_time() - t0)
        return 2 * N * C * out / statistics.median(taken[3:])

    ratios = []
    for _ in range(5):  # a busy machine is not equally busy for both
        before = by_hand()
        gpt = GPTConfig(vocab_size=64)
        found = probe_rates(info, N, gpt=gpt, precisions=["fp32"], seconds=0.3)
        ratios.append(
            found.rates.flops_per_sec["fp32"]["mlp"]["forward"] * 2 / (before + by_hand())
        )
        if 0.5 < ratios[-1] < 2:
            return
    pytest.fail(f"probe against a clock of the test's own: {ratios}")


def test_bandwidth_is_as_wide_as_numpy_says(info, monkeypatch):
    monkeypatch.setattr(module, "_COPY_BYTES", (2**27,))
    source = np.ones(2**25, dtype=np.float32)  # 128 MiB
    target = np.ones_like(source)

    def by_numpy():
        taken = []
        for _ in range(3):
            t0 = time.thread_time()
            np.copyto(target, source)
            taken.append(time.thread_time() - t0)
        return 2 * source.nbytes / statistics.median(taken)

    ratios = []
    for _ in range(5):
        found = small(info, precisions=["fp32"], seconds=1.0)
        ratios.append(found.bandwidth_bytes_per_sec / by_numpy())
        if 1 / 3 < ratios[-1] < 3:
            return
    pytest.fail(f"probe against numpy: {ratios}")


def test_a_real_step_takes_about_as_long_as_forecast(info, monkeypatch):
    monkeypatch.setattr(module, "_COPY_BYTES", (2**18, 2**23, 2**26))
    config = RunConfig(model="tiny", B=4, T=32, steps=5)
    tokens, _ = load_tokens(config, 2**20)
    ratios = []
    for _ in range(4):
        found = probe_rates(info, 128, gpt=MODELS["tiny"], precisions=["fp32"], seconds=0.5)
        told = step_forecast(config, found.rates)
        steps = [step.step_ms for step in train(config, tokens, CPU) if not step.is_warmup]
        ratios.append(told.ms_per_step / statistics.median(steps))
        if 1 / 3 < ratios[-1] < 3:
            return
    pytest.fail(f"forecast over measured: {ratios}")


# --- in the modes of a run, which are put back


def test_products_run_in_the_mode_and_type_of_their_precision(info, monkeypatch):
    seen = set()

    def look(dtype, flops):
        seen.add((torch.get_float32_matmul_precision(), dtype, torch.is_autocast_enabled("cpu")))
        assert not torch.is_grad_enabled()

    patch(monkeypatch, three(look))
    expected = {
        "fp32": ("highest", torch.float32, {False}),
        "tf32": ("high", torch.float32, {False}),
        "bf16": ("highest", torch.bfloat16, {True, False}),  # on around the forward only
        "fp16": ("highest", torch.float16, {True, False}),
        "fp64": ("highest", torch.float64, {False}),
    }
    for name, (mode, dtype, autocasts) in expected.items():
        seen.clear()
        small(info, precisions=[name], seconds=0.1)
        assert seen == {(mode, dtype, on) for on in autocasts}


@pytest.fixture
def modes(monkeypatch):
    """Every mode that was set, in order."""
    asked = []
    real = torch.set_float32_matmul_precision
    monkeypatch.setattr(
        torch, "set_float32_matmul_precision", lambda mode: (asked.append(mode), real(mode))
    )
    return asked


def state():
    return (
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.random.get_rng_state().tolist(),
    )


def test_modes_are_put_back(info, modes):
    before = state()
    small(info, precisions=["tf32", "bf16"], seconds=0.1)
    assert state() == before
    assert modes.count("high") == 2  # once a shape
    assert modes[-1] == before[0]


def test_modes_and_memory_are_given_back_after_an_error_too(info, modes, monkeypatch):
    held, freed = [], []

    def fail(g, w):
        held.append(weakref.ref(w))
        raise ValueError("shapes do not match")

    monkeypatch.setattr(module, "_input_gradient", fail)
    real = module.accelerator.free_memory
    monkeypatch.setattr(
        module.accelerator, "free_memory", lambda device: (freed.append(device), real(device))
    )
    before = state()
    with pytest.raises(ValueError, match="shapes do not match"):
        small(info, precisions=["tf32"])
    assert state() == before
    assert modes == ["high", before[0]]
    assert freed == [CPU]
    assert held[0]() is None


# --- in the time it has


@pytest.mark.parametrize(
    "seconds_per_flop", [2e-8, 1e-7, 1e-6], ids=["1,000 times", "5,000 times", "50,000 times"]
)
def test_a_slow_fallback_does_not_break_the_bound(info, monkeypatch, seconds_per_flop):
    # fp16 without instructions: the backward forms run in a scalar loop
    def slow(dtype, flops):
        if dtype == torch.float16 and not torch.is_autocast_enabled("cpu"):
            time.sleep(flops * seconds_per_flop)

    patch(monkeypatch, three(slow))
    monkeypatch.setattr(module, "time", time)  # a sleep is no work
    gpt = GPTConfig(n_embd=64, vocab_size=4096)
    t0 = time.perf_counter()
    found = probe_rates(info, 256, gpt=gpt, precisions=["fp16", "fp32"], seconds=1.0)
    assert time.perf_counter() - t0 < 3.5
    # what is slow takes nothing from the others
    for shape in SHAPES:
        assert found.rates.flops_per_sec["fp32"][shape].keys() == set(FORMS)
    # it has a rate of its own size, at fewer tokens, or says why not
    for shape in SHAPES:
        for form in FORMS[1:]:
            rate = found.rates.matmul("fp16", shape, form)
            if rate is None:
                assert "too slow" in found.skipped[f"fp16 {shape} {form}"]
                continue
            # sleeping is not exact, and the product itself takes its time
            assert rate < 1.2 / seconds_per_flop
            assert rate > 0.1 / seconds_per_flop
            assert found.fewer_tokens["fp16"][shape][form] < 256
    assert any("fp16, mlp: measured at" in note for note in found.notes)
    if found.rates.matmul("fp16", "classifier", "weight_gradient") is None:
        assert found.training_flops_per_sec["fp16"] is None


def test_a_probe_without_time_still_ends_and_says_what_it_left_out(info, monkeypatch):
    monkeypatch.setattr(module, "time", time)
    t0 = time.perf_counter()
    found = probe_rates(info, 128, seconds=0.0, precisions=["fp32", "fp64"])
    assert time.perf_counter() - t0 < 8
    for form in FORMS:
        assert found.fewer_tokens["fp32"]["mlp"][form] == 1
        assert "too slow" in found.skipped[f"fp32 classifier {form}"]
    assert found.training_flops_per_sec == {"fp32": None, "fp64": None}
    assert step_forecast(RunConfig(), found.rates).ms_per_step is None


def test_more_tokens_than_any_device_needs_are_not_allocated(info, monkeypatch):
    most = []
    patch(monkeypatch, three(lambda dtype, flops: most.append(flops)))
    found = small(info, tokens=256 * 1024, precisions=["fp32"], seconds=2.0)
    assert max(most) <= 2 * module._MOST_TOKENS * 1000 * 32
    assert any("8,192" in note for note in found.notes)
    assert found.tokens == 256 * 1024


@pytest.mark.parametrize("after", [0, 1, 4, 6, 8, 11])
def test_it_stops_between_two_measurements(info, after):
    asked = []

    def should_stop():
        asked.append(1)
        return len(asked) > after

    found = small(info, should_stop=should_stop)
    assert found.stopped
    assert len(asked) == after + 1  # then nobody is asked again
    assert (found.launch_seconds is None) == (after == 0)
    measured = sum(len(forms) for s in found.rates.flops_per_sec.values() for forms in s.values())
    assert measured == max(after - 4, 0)  # launches and copies come first, then a shape's turn
    stopped = [what for what, why in found.skipped.items() if why == module._STOPPED]
    assert measured + len(stopped) == len(PRECISIONS) * len(SHAPES) * len(FORMS)
    assert torch.get_float32_matmul_precision() == "highest"


# --- what does not run


@pytest.mark.parametrize(
    "fault",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["class", "text"],
)
def test_out_of_memory_of_one_shape_is_noted(info, monkeypatch, fault):
    def forward(x, w, b):
        if w.shape[0] != 4 * SMALL.n_embd:  # the classifier
            raise fault
        return F.linear(x, w, b)

    freed = []
    monkeypatch.setattr(module, "_forward", forward)
    monkeypatch.setattr(module.accelerator, "free_memory", freed.append)
    found = small(info, precisions=["fp32"])
    assert found.skipped == {"fp32 classifier forward": "out of memory"}
    assert len(freed) == 2  # after it, and at the end
    assert found.rates.flops_per_sec["fp32"]["classifier"].keys() == set(FORMS[1:])
    assert found.training_flops_per_sec["fp32"] is None
    told = step_forecast(RunConfig(), found.rates)
    assert told.missing == ("fp32 classifier forward",)
    assert told.parts_ms["layers"] > 0


def test_a_cpu_is_not_asked_for_memory_that_it_has_not(info, monkeypatch):
    monkeypatch.setattr(module, "_COPY_BYTES", BLOCKS)
    monkeypatch.setattr(module, "memory_free_bytes", lambda device: 2**27)
    found = probe_rates(info, 16, precisions=["fp32"], seconds=0.5)
    assert found.rates.copies[-1][0] == 2**25
    assert "out of memory" in found.skipped["copies of 256 MiB"]
    assert any("blocks of 32 MiB" in note for note in found.notes)
    for shape in SHAPES:  # 226 MB of weights, 309 MB
        assert "out of memory" in found.skipped[f"fp32 {shape} forward"]
    assert found.rates.flops_per_sec == {}


def test_an_operation_that_torch_lacks_is_noted(info, monkeypatch):
    def lacking(dtype, flops):
        if dtype == torch.float16:
            raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    patch(monkeypatch, three(lacking))
    found = small(info, precisions=["fp16", "fp32"])
    assert {found.skipped[f"fp16 mlp {form}"] for form in FORMS} == {
        "torch has no such operation here"
    }
    assert "not measured at the MLP's shape" in found.skipped["fp16 classifier forward"]
    assert found.rates.flops_per_sec.keys() == {"fp32"}


def test_what_is_not_available_is_skipped_with_its_reason(info):
    none = Support(status="not available", reason="Metal has no float64.")
    found = small(replace(info, support=info.support | {"fp64": none}), precisions=["fp32", "fp64"])
    assert found.skipped == {"fp64": "Metal has no float64."}
    assert found.training_flops_per_sec.keys() == {"fp32"}
    with pytest.raises(InputError, match=r"Nothing can be measured.*no float64"):
        small(replace(info, support=dict.fromkeys(PRECISIONS, none)))


# --- the command line


@pytest.fixture
def command(info, monkeypatch):
    """Runs the verb with these arguments on a small model; its exit status."""

    def probe_small(info, tokens, **other):
        return probe_rates(info, tokens, gpt=SMALL, seconds=1.0, **other)

    monkeypatch.setattr(module, "probe_rates", probe_small)

    def run(*argv, interruption=None):
        parser = argparse.ArgumentParser()
        verb.add(parser.add_subparsers())
        args = parser.parse_args(["probe", "--device", "cpu", *argv])
        return args.verb(args, interruption or Interruption())

    return run


def test_the_verb_prints_words_and_units(command, capsys):
    assert command("-B", "2", "-T", "8") == 0
    text = capsys.readouterr().out
    for words in ("GB/s", "microseconds", "TFLOP/s", "ms/step", "16 tokens (B=2 T=8)"):
        assert words in text
    rows = [line.split() for line in text.splitlines() if line.startswith(PRECISIONS)]
    assert [row[0] for row in rows] == [*PRECISIONS, *PRECISIONS]  # matmuls, then steps
    assert all(float(cell) > 0 for row in rows[:5] for cell in row[1:8])
    assert all(float(row[1].replace(",", "")) > 0 and row[3].endswith("%") for row in rows[5:])
    assert "None" not in text


def test_the_verb_writes_json(command, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert command("--json", str(out)) == 0
    assert capsys.readouterr().out
    data = json.loads(out.read_text())
    assert data["config"]["B"] == 4
    assert data["probe"]["tokens"] == data["probe"]["rates"]["tokens"] == 128
    assert data["forecasts"].keys() == set(PRECISIONS)
    assert data["forecasts"]["bf16"]["ms_per_step"] > 0
    assert command("--json", "-", "-B", "1") == 0
    assert json.loads(capsys.readouterr().out)["probe"]["tokens"] == 32


def test_the_verb_says_unknown_where_nothing_was_measured(command, info, monkeypatch, capsys):
    def lacking(dtype, flops):
        if dtype == torch.float16:
            raise torch.OutOfMemoryError("out of memory")

    patch(monkeypatch, three(lacking))
    assert command() == 0
    text = capsys.readouterr().out
    fp16 = [line.split() for line in text.splitlines() if line.startswith("fp16 ")]
    assert set(fp16[0][1:]) == {"unknown"}
    assert fp16[1][1:4] == ["unknown"] * 3
    assert "fp16 mlp forward: out of memory" in text


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["-B", "0"], "B"),
        (["-T", "many"], "T"),
        (["--device", "cpu:1"], "device"),
        (["--json", "/nowhere/out.json"], "json"),
    ],
)
def test_the_verb_refuses_before_it_measures(command, monkeypatch, argv, named):
    monkeypatch.setattr(module, "probe_rates", None)
    with pytest.raises(InputError, match=named):
        command(*argv)


def test_an_interruption_ends_the_verb(command, capsys):
    with pytest.raises(KeyboardInterrupt):
        command(interruption=Interruption(received=True))
    assert capsys.readouterr().out == ""
