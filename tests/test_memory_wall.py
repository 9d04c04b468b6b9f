"""A CPU with 4 GiB: no setting ends the process, each ends in a sentence with its figures."""

import json
import re
import subprocess
import sys

import pytest

GIB = 2**30

# The kernel refuses what goes beyond the limit; free memory is told as what is left of it.
PROGRAM = """
import json, re, resource, sys, time
import torch
from gpt2demo import host, runner
from gpt2demo.config import RunConfig
from gpt2demo.device import probe_device

LIMIT = 4 * 2**30
resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, 2 * LIMIT))

def status(name):
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(rf"^{name}:\\s+(\\d+)", file.read(), re.MULTILINE)[1])

most = LIMIT

def free():
    return min(LIMIT - status("VmRSS"), most)

host.memory_free_bytes = free
INFO, TOKENS = probe_device("cpu"), torch.arange(300_000) % 50257

def run(**settings):
    config = RunConfig(**({"device": "cpu", "steps": 3} | settings))
    t0 = time.perf_counter()
    summary = runner.execute(config, INFO, on_step=lambda _: None, tokens=TOKENS)
    out = summary.out_of_memory
    print(json.dumps([
        settings, summary.state, summary.message, summary.steps_done,
        out and [out.step, out.moment, sum(out.parts.values()), out.smaller_B, out.smaller_T],
        free(), status("VmHWM"), time.perf_counter() - t0,
    ]), flush=True)

SMALL = {"model": "tiny", "B": 2, "T": 16}
for settings in json.loads(sys.argv[1]):
    run(**settings)
run(**SMALL)

# a forecast that is far too low lets them start
honest = runner.Capacity.forecast
runner.Capacity.forecast = lambda self, config, sizes=None: honest(self, config, (1, 8))
run(model="tiny", B=256, T=1024, attention="sdpa")  # its first logits are 48 GiB
most = 2 * 2**30
# The tracker's wall, not the kernel's: that counts what is free within the heap too, of which
# the run before has left by chance so much that the next tensors find no room.
resource.setrlimit(resource.RLIMIT_DATA, (2 * LIMIT, 2 * LIMIT))
run(model="tiny", B=8, T=512)
run(model="tiny", B=8, T=512, precision="bf16", budget_gib=1.5)
runner.Capacity.forecast = honest
run(**SMALL)
"""
LARGEST = {"B": 256, "T": 1024}
TOO_LARGE = [
    {"model": "gpt2-xl", **LARGEST},
    {"model": "gpt2-xl", "B": 1, "T": 1},
    {"model": "gpt2-xl", **LARGEST, "precision": "fp64", "compile": True},
    {"model": "gpt2", **LARGEST},
    {"model": "gpt2", **LARGEST, "precision": "bf16", "attention": "sdpa", "optimizer": "fused"},
    {"model": "gpt2", "B": 4, "T": 1024},
    {"model": "gpt2", "B": 4, "T": 1024, "compile": True, "budget_gib": 4},
    {"model": "tiny", **LARGEST, "precision": "bf16"},
    # a budget that the machine has not got is no way around
    {"model": "gpt2", **LARGEST, "budget_gib": 1024},
    {"model": "gpt2-xl", "B": 1, "T": 1, "budget_gib": 1024},
    {"model": "tiny", **LARGEST, "precision": "bf16", "budget_gib": 1024},
    {"model": "tiny", **LARGEST, "compile": True, "budget_gib": 1024},
    # nor is one that is small: the tensor that goes too far is larger than the machine
    {"model": "tiny", **LARGEST, "budget_gib": 0.25},
]


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process's memory as Linux does")
def test_no_setting_ends_a_process_with_four_gib() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, json.dumps(TOO_LARGE)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    ends = [json.loads(line) for line in run.stdout.splitlines()]
    before, (small, *misjudged, last) = ends[: len(TOO_LARGE)], ends[len(TOO_LARGE) :]

    for settings, state, message, steps_done, out, free, peak, seconds in before:
        assert (state, steps_done) == ("out of memory", 0), settings
        step, moment, held, smaller_B, smaller_T = out
        assert (step, moment, held) == (None, "before the start", 0)
        need, *have = (float(found) for found in re.findall(r"([\d.]+) GiB", message))
        assert f"B={settings['B']}, T={settings['T']}" in message
        assert need > free / GIB or "budget_gib" in settings, message
        assert not have or have[0] == pytest.approx(free / GIB, abs=0.2)
        assert ("Lower" in message) == bool(smaller_B or smaller_T or "Lower both" in message)
        assert re.search(r"that should fit\.|Take a smaller model\.", message)
        assert peak < 2 * GIB
        assert seconds < 5

    for state, message in (small[1:3], last[1:3]):
        assert state == "finished", message
    assert len(misjudged) == 3
    left = small[5]
    for settings, state, message, steps_done, out, free, peak, _ in misjudged:
        assert (state, steps_done) == ("out of memory", 0), message
        step, moment, *_ = out
        assert (step, moment in ("forward", "backward")) == (0, True), settings
        assert re.search(r"in step 0 \(\w+\).*asking for [\d.]+ (GiB|MiB) more\.", message)
        assert peak < 4 * GIB
        assert min(left, 2 * GIB) - free < 0.1 * GIB  # what it took is there for the next run
    # the tracker stopped these two: with the next tensor, the logits or a copy of them, the tensors
    # would have been more than was allowed
    logits = 4 * 8 * 512 * 50257
    for (_, _, _, _, (_, _, held, _, _), _, _, _), allowed in zip(
        misjudged[1:], (1.75 * GIB, 1.5 * GIB), strict=True
    ):
        assert held <= allowed < held + logits
