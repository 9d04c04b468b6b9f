"""torchrun: several processes train one model as one process would with the whole batch."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from server import ROOT

from gpt2demo import cli, distributed
from gpt2demo.config import InputError, RunConfig
from gpt2demo.data import DataLoaderLite, load_tokens
from gpt2demo.memory import forecast
from gpt2demo.ranks import ALONE, Ranks, ranks_from_env
from gpt2demo.train import train

TINY = ["run", "--model", "tiny", "--device", "cpu"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TWO = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@contextmanager
def torchrun(*args):
    """`torchrun -m gpt2demo ...` on two processes; ended with all that it started."""
    process = subprocess.Popen(
        [*TORCHRUN, "-m", "gpt2demo", *map(str, args)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)


def test_two_processes_train_as_one_with_twice_the_batch(tmp_path, capsys):
    sizes = ["-T", "16", "--steps", "8", "--seed", "3"]
    with torchrun(*TINY, "-B", "2", *sizes, "--json", tmp_path / "two.json") as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert cli.main([*TINY, "-B", "4", *sizes, "--json", str(tmp_path / "one.json")]) == 0
    two, one = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("two", "one"))
    losses = [[step["loss"] for step in run["steps"]] for run in (two, one)]
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-4)
    # one log, of one process
    assert re.findall(r"^step (\d+), loss", out, re.MULTILINE) == [str(n) for n in range(8)]
    assert "2 processes" not in err
    assert two["summary"]["world_size"] == 2
    assert one["summary"]["world_size"] == 1
    for step in two["steps"]:  # both processes' tokens
        assert step["tokens_per_sec"] * step["step_ms"] / 1000 == pytest.approx(2 * 2 * 16)
    memory = two["summary"]["memory"]
    assert memory["measured_bytes"] == pytest.approx(memory["forecast_bytes"], abs=1024)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_dies_ends_the_run_with_a_sentence(tmp_path, rank):
    path = tmp_path / "out.json"
    with torchrun(*TINY, "-B", "1", "-T", "8", "--steps", "9999", "--json", path) as process:
        for line in process.stdout:
            if line.startswith("step 3,"):
                break
        (killed,) = [
            child
            for child in psutil.Process(process.pid).children()
            if child.environ().get("RANK") == str(rank)
        ]
        start = time.monotonic()
        killed.kill()
        out, err = process.communicate(timeout=60)
        assert time.monotonic() - start < 30
    assert process.returncode != 0
    sentence = f"Process {rank} of 2 (counted from 0) ended after"
    assert (out + err).count(sentence) == 1
    assert ("gpt2demo: process 1: " + sentence in err) == (rank == 0)
    if rank == 0:  # nobody else writes its file
        assert not path.exists()
    else:
        summary = json.loads(path.read_text())["summary"]
        assert summary["state"] == "error"
        assert summary["message"].startswith(sentence)
        assert summary["steps_done"] >= 4


def test_a_text_that_is_too_short_for_both_is_refused_once(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(" the" * 17)  # enough for one process
    with torchrun(*TINY, "-B", "1", "-T", "16", "--text", text) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert out == ""
    refusal = "text has 17 tokens; one step of B=1 T=16 in 2 processes needs at least 33"
    assert err.count(refusal) == 1
    assert "in gpt2demo" not in err  # no traceback of ours


@pytest.mark.parametrize("n", [33, 64, 65, 100, 161])
def test_the_processes_together_cut_the_batches_of_one(n):
    tokens = torch.randint(0, 50257, (n,), generator=torch.Generator().manual_seed(n))
    whole = DataLoaderLite(tokens, 4, 8)
    parts = [DataLoaderLite(tokens, 2, 8, rank, 2) for rank in (0, 1)]
    for _ in range(9):  # over the text's end and on
        want = [batch.numpy() for batch in whole.next_batch()]
        got = [np.concatenate(pair) for pair in zip(*(p.next_batch() for p in parts), strict=True)]
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="33 are needed"):
        DataLoaderLite(tokens[:32], 2, 8, 0, 2)


@pytest.fixture
def group():
    """A group of this process alone: the buckets are those of any larger one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "settings",
    [
        {"B": 1, "T": 8, "steps": 3},  # the tied gradient is the peak
        {"B": 1, "T": 8, "steps": 1},  # the optimizer
        {"B": 4, "T": 128, "steps": 3},  # the loss
        {"B": 4, "T": 128, "steps": 1},
        {"B": 1, "T": 128, "steps": 2, "precision": "bf16", "optimizer": "fused"},
        {"B": 2, "T": 64, "steps": 2, "precision": "fp64", "attention": "sdpa"},
    ],
    ids=str,
)
def test_the_forecast_of_one_of_several_is_what_it_takes(group, settings):
    config = RunConfig(model="tiny", device="cpu", **settings)
    tokens, _ = load_tokens(config, 2**20, 2)
    *_, last = train(config, tokens, torch.device("cpu"), ranks=Ranks(world_size=2))
    told = forecast(config, "cpu", ddp=True).live_bytes
    assert last.peak_memory_bytes == pytest.approx(told, abs=16 * config.tokens_per_step + 1024)
    assert told > forecast(config, "cpu").live_bytes or settings == {"B": 1, "T": 8, "steps": 1}


def test_torchruns_variables():
    assert ranks_from_env({}) is ALONE
    assert ranks_from_env({"WORLD_SIZE": "8"}) is ALONE  # a batch system's, not torchrun's
    ranks = ranks_from_env(TWO)
    assert (ranks.rank, ranks.local_rank, ranks.world_size) == (1, 1, 2)
    assert ranks.ddp
    assert not ranks.master_process
    for wrong in ({"RANK": "x"}, {"RANK": "0"}, TWO | {"WORLD_SIZE": "-2"}):
        with pytest.raises(InputError, match="start with torchrun, or unset RANK"):
            ranks_from_env(wrong)


def test_the_device_of_a_process(monkeypatch):
    ranks = ranks_from_env(TWO)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert distributed.device_for("auto", ranks) == "cpu"
    with pytest.raises(InputError, match="which has 0: lower --nproc-per-node"):
        distributed.device_for("cuda", ranks)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert distributed.device_for("auto", ranks) == distributed.device_for("cuda", ranks)
    assert distributed.device_for("cuda", ranks) == "cuda:1"
    assert distributed.device_for("cpu", ranks) == "cpu"
    for name in ("cuda:1", "mps", "xpu"):
        with pytest.raises(InputError, match="a GPU of its own"):
            distributed.device_for(name, ranks)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="2 processes need as many GPUs"):
        distributed.device_for("auto", ranks)


@pytest.mark.parametrize("verb", ["compare", "memory", "probe", "device"])
def test_the_other_verbs_are_one_processs_work(monkeypatch, capsys, verb):
    for name, value in (TWO | {"RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    assert cli.main([verb]) == 2
    assert f"{verb} is one process's work" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert cli.main([verb]) == 2
    assert capsys.readouterr().err == ""  # said once
    monkeypatch.setenv("RANK", "x")
    assert cli.main(["run", "--model", "tiny"]) == 2
    assert "RANK must be a whole number" in capsys.readouterr().err
