"""The script for people with a GPU, without one: its grid, its rows and its exit status."""

import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from gpu import check_memory
from server import ROOT

from gpt2demo.config import RunConfig
from gpt2demo.device import probe_device
from gpt2demo.records import RunMemory, RunSummary

GIB = 2**30
INFO = replace(probe_device("cpu"), type="cuda", name="a GPU", memory_total_bytes=16 * GIB)
TOKENS = torch.arange(100)
CONFIG = RunConfig(B=4, T=1024, steps=3, device="cuda")


def ended(state: str, verdict: str, forecast: int = 1000, measured: int | None = 1000):
    """A run that ends so, in place of the real one."""

    def execute(config, info, *, on_step, tokens):
        assert tokens is TOKENS
        assert info.type == "cuda"
        memory = RunMemory(
            forecast_bytes=forecast * GIB,
            verdict=verdict,
            capacity_bytes=16 * GIB,
            measured_bytes=None if measured is None else measured * GIB,
            reserved_bytes=2000 * GIB,
            measured_by="max_memory_allocated",
        )
        return RunSummary(
            state=state, message="", steps_done=3, steps_measured=1, seconds=1.0, memory=memory
        )

    return execute


def status(capsys, *ends) -> tuple[int, str]:
    rows = [check_memory.check(CONFIG, INFO, TOKENS, execute) for execute in ends]
    return check_memory.report(rows), capsys.readouterr().out


GOOD = ended("finished", "fits", 1010)


def test_a_forecast_that_holds_is_status_0(capsys):
    code, shown = status(
        capsys,
        GOOD,
        ended("finished", "may fail", 951),
        ended("out of memory", "will not fit", 5000, None),
        ended("out of memory", "may fail", 5000, None),  # it was told so
    )
    assert code == 0
    heads, *rows = shown.splitlines()[:5]
    assert heads.split() == [
        *("setting", "forecast", "allocated", "reserved", "error", "verdict", "outcome")
    ]
    assert rows[0].split()[:3] == ["fp32", "B=4", "T=1024"]
    assert rows[0].split()[-6:] == ["1010.00", "1000.00", "2000.00", "+1.0%", "fits", "finished"]
    assert re.search(r"5000\.00 +- +2000\.00 +- +will not fit +out of memory$", rows[2])
    assert "2 peaks measured, the largest error 4.9%." in shown


@pytest.mark.parametrize("forecast", [1051, 949])
def test_an_error_above_five_percent_is_status_1(capsys, forecast):
    code, shown = status(capsys, GOOD, ended("finished", "fits", forecast))
    assert code == 1
    assert f"the forecast is {(forecast - 1000) / 10:+.1f}% off" in shown


@pytest.mark.parametrize("state", ["out of memory", "error", "diverged"])
def test_a_failure_after_fits_is_status_1(capsys, state):
    code, shown = status(capsys, GOOD, ended(state, "fits", 1000, None))
    assert code == 1
    assert f"it was told to fit and ended: {state}." in shown


def test_nothing_measured_is_no_success(capsys):
    code, shown = status(capsys, ended("out of memory", "will not fit", 5000, None))
    assert code == 1
    assert "Nothing was measured." in shown


def test_what_the_gpu_cannot_run_is_passed_over(capsys):
    support = {
        name: replace(one, status="not available", reason="No.")
        for name, one in INFO.support.items()
    }
    info = replace(INFO, support=support)
    row = check_memory.check(CONFIG, info, TOKENS, execute=None)
    assert row.cells()[-1] == "not available here"
    assert row.problem() is None


def test_the_grid_is_what_is_to_be_checked():
    configs = check_memory.grid("cuda:1")
    assert len(set(configs)) == len(configs)
    assert {(c.device, c.steps) for c in configs} == {("cuda:1", 3)}  # two steps and one more
    axes = {
        "B": {1, 4, 8, 16},
        "T": {256, 1024},
        "precision": {"fp32", "bf16"},
        "attention": {"manual", "sdpa"},
        "optimizer": {"default", "fused"},
    }
    plain = [c for c in configs if c.model == "gpt2" and c.precision in ("fp32", "bf16")]
    plain = [c for c in plain if c.budget_gib is None]
    assert len(plain) == math.prod(map(len, axes.values()))
    for name, values in axes.items():
        assert {getattr(c, name) for c in plain} == values
    assert {c.precision for c in configs if c.model == "tiny"} == {
        *("fp32", "tf32", "bf16", "fp16", "fp64")
    }
    assert [c for c in configs if c.budget_gib]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence():
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.gpu.check_memory"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
    )
    assert run.returncode == 2
    assert run.stderr == "There is no CUDA GPU here, so there is nothing to check.\n"
    assert run.stdout == ""


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")
@pytest.mark.parametrize(
    ("script", "needs"),
    [("check_dispatch", "torch's CUDA build and g++"), ("check_zero_gpu", "the package spaces")],
)
def test_what_needs_a_cuda_build_says_so(script, needs):
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", f"tests.gpu.{script}"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert needs in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is a CPU build")
def test_cudas_dispatcher_does_what_the_forecast_and_the_casts_say():
    command = [sys.executable, "-m", "tests.gpu.check_dispatch"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
