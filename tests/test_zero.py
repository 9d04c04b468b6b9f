"""Runs on a lent GPU: in a real forked process, behind a stand-in for the package `spaces`."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack

import pytest
from gradio_client import Client
from server import ROOT, page
from zero_gpu.device_api import device_api

from gpt2demo.config import PRECISIONS, RunConfig, Settings, on_zero_gpu
from gpt2demo.device import probe_device
from gpt2demo.runner import execute
from gpt2demo.zero import MAX_LEASE_SECONDS, lease_seconds

STAND_IN = ROOT / "tests" / "zero_gpu"
REAL = os.environ.get("GPT2DEMO_ZERO_GPU") == "real"  # tests/gpu/check_zero_gpu.py

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


@pytest.fixture(scope="module")
def scenes() -> dict:
    with ExitStack() as stack:
        script, env = "scenes.py", os.environ
        if REAL:
            api = stack.enter_context(device_api())
            script = "real.py"
            env = os.environ | {"SPACES_ZERO_GPU": "true", "SPACES_ZERO_DEVICE_API_URL": api}
        played = subprocess.run(
            [sys.executable, str(STAND_IN / script)],
            capture_output=True,
            text=True,
            timeout=240,
            env=env,
        )
    assert played.returncode == 0, played.stderr[-3000:]
    return json.loads(played.stdout.splitlines()[-1])


def of(scene: dict) -> tuple[str, str]:
    return scene["summary"]["state"], scene["summary"]["message"]


def test_a_run_happens_in_another_process_and_is_the_same_run(scenes):
    seen = scenes["ordinary"]
    assert of(seen) == ("finished", "Finished: 4 steps.")
    config = RunConfig(model="tiny", B=2, T=16, steps=4, device="cpu")
    steps = []
    here = execute(config, probe_device("cpu"), on_step=steps.append)
    assert [s["loss"] for s in seen["steps"]] == pytest.approx([s.loss for s in steps], abs=1e-4)
    for name in ("parameters", "flops_per_token", "steps_measured", "skipped_steps"):
        assert seen["summary"][name] == getattr(here, name)
    assert "running" in seen["states"]
    assert set(seen["states"]) <= {"lending", "loading", "running", "finished"}
    assert seen["board"] == ["finished"]


def test_the_device_is_unknown_until_a_worker_has_met_it(scenes):
    seen = scenes["ordinary"]
    before, after = seen["before"], seen["after"]
    assert before["device"]["name"] == "ZeroGPU"
    assert {s["status"] for s in before["device"]["support"].values()} == {"unknown"}
    assert before["free"] is before["notes"] is None
    assert after["platform"] == seen["device"]["platform"] != f"process {seen['pid']}"
    assert after["platform"].startswith("process ")
    assert after["type"] == "cpu"
    assert seen["free"] == after["memory_free_bytes"] > 0


def test_an_own_text_goes_along_as_tokens(scenes):
    assert of(scenes["own_text"])[0] == "finished"
    assert len(scenes["own_text"]["steps"]) == 4


def test_stop_reaches_the_worker_after_its_step(scenes):
    seen = scenes["stopped"]
    assert seen["said"] == "Stopping after this step."
    done = len(seen["steps"])
    assert done in (3, 4)
    assert of(seen) == (
        "stopped",
        f"Stopped after {done} of 500 steps: its owner pressed Stop.",
    )
    assert seen["then"] == "finished"


def test_a_worker_that_does_not_hear_is_left(scenes):
    seen = scenes["deaf"]
    state, message = of(seen)
    assert state == "stopped"
    assert message.endswith("its owner pressed Stop.")
    assert len(seen["steps"]) < 12


def test_out_of_memory_in_the_worker(scenes):
    seen = scenes["out_of_memory"]
    state, message = of(seen)
    assert state == "out of memory"
    assert "20.00 MiB" in message
    assert seen["summary"]["out_of_memory"]["asked_bytes"] == 20 * 2**20
    assert len(seen["steps"]) == 2
    assert seen["then"] == "finished"


def test_a_worker_that_dies_leaves_its_steps(scenes):
    seen = scenes["killed"]
    state, message = of(seen)
    assert state == "error"
    assert "ended after 2 of 4 steps" in message
    assert len(seen["steps"]) == 2
    assert seen["summary"]["final_loss"] == seen["steps"][-1]["loss"]
    assert seen["then"] == "finished"


def test_a_gpu_that_works_no_more_is_given_up_with_its_process(scenes):
    seen = scenes["poisoned"]
    state, message = of(seen)
    assert state == "error"
    assert message.endswith("The next run gets a new process.")
    assert "restart" not in message
    assert seen["then"] == "finished"


def test_an_exception_in_the_worker_is_told_without_its_text(scenes):
    state, message = of(scenes["failed_before_the_run"])
    assert state == "error"
    assert "ended after 0 of 4 steps" in message
    assert "secret" not in message
    assert scenes["failed_before_the_run"]["then"] == "finished"
    assert of(scenes["ended_without_a_word"]) == (
        "error",
        "The run ended after 0 of 4 steps without a result.",
    )


def test_a_run_ends_before_its_lease_does(scenes):
    seen = scenes["kept_to_its_lease"]
    state, message = of(seen)
    assert state == "stopped"
    assert message.endswith("steps: the GPU was lent for 6 seconds.")
    assert seen["summary"]["steps_done"] == len(seen["steps"]) > 0
    assert seen["summary"]["seconds"] < 6
    assert seen["summary"]["memory"]  # the worker's own summary, not one made up for it


def test_a_step_longer_than_the_lease_leaves_the_steps_before_it(scenes):
    seen = scenes["beyond_its_lease"]
    state, message = of(seen)
    assert state == "stopped"
    assert "ended in the middle of a step" in message
    assert len(seen["steps"]) == 1
    assert seen["then"] == "finished"


def test_a_quota_is_told_in_its_own_words(scenes):
    quota = "You have exceeded your free ZeroGPU quota (60s requested vs. 5s left)."
    assert of(scenes["refused"]) == ("error", f"No GPU was lent: {quota}")
    assert scenes["refused"]["probe"] == f"No GPU was lent: {quota}"


def test_the_gpu_is_asked_for_in_the_name_of_whoever_pressed_run(scenes):
    assert scenes["for_whom"]["seen"] == ["Ada", "Grace", "Edsger", "Edsger"]
    assert scenes["for_whom"]["race"].startswith("The race")


def test_the_probe_happens_in_the_worker_too(scenes):
    seen = scenes["probed"]
    assert seen["tokens"] == 64
    assert seen["worker"] != seen["here"]
    assert seen["device"] == "cpu"
    assert seen["rate"] > 0


def test_a_step_is_inspected_in_the_worker_too(scenes):
    seen = scenes["inspected"]
    assert (seen["state"], seen["device"]) == ("finished", "cpu")
    assert seen["worker"] != seen["here"]
    assert min(seen["parts"].values()) > 0
    assert seen["casts"] > 0
    assert seen["frozen"] > 100_000  # a collection copies nothing of the page's process
    assert seen["then"] == "finished"


def test_the_lease_grows_with_the_run_up_to_its_limit():
    runs = [RunConfig(T=1024, steps=steps) for steps in (1, 50, 1000)]
    leases = [lease_seconds(run) for run in runs]
    assert leases == sorted(leases)
    assert 30 <= leases[0] < leases[1] < leases[2] == MAX_LEASE_SECONDS
    assert lease_seconds(RunConfig(T=1024, compile=True, steps=1)) > leases[0] + 30
    assert all(lease_seconds(RunConfig(T=1024, precision=p)) <= 60 for p in PRECISIONS[:4])
    assert lease_seconds(runs[2], 45) == 45


@pytest.mark.parametrize(
    ("value", "there"), [("true", True), ("1", True), ("T", True), ("", False), ("no", False)]
)
def test_the_environment_decides(value, there):
    assert on_zero_gpu({"SPACES_ZERO_GPU": value}) is there
    assert on_zero_gpu({}) is False


def test_gradios_queue_has_an_end_there_and_only_there(scenes):
    # gradio's own end on ZeroGPU is 1
    assert scenes["queue"] == {"lent": Settings().max_pages, "own": 1 if REAL else None}


def test_everybody_watches_a_run_on_a_lent_gpu(tmp_path):
    with page(tmp_path, SPACES_ZERO_GPU="true", PYTHONPATH=str(STAND_IN)) as server:
        first, second = (
            Client(server.url, verbose=False, analytics_enabled=False) for _ in range(2)
        )
        assert first.predict(api_name="/device")["name"] == "ZeroGPU"
        going = first.submit(api_name="/train", model="tiny", B=1, T=8, steps=300)
        next(iter(going))
        waiting = second.submit(api_name="/train", model="tiny", B=1, T=8, steps=3)
        assert "run_id" in next(iter(waiting))
        assert "2nd in line" in next(iter(waiting))["line"]
        while server.post("status")["state"] != "running":
            pass
        assert second.predict(api_name="/device")["type"] == "cpu"  # of the worker
        assert first.predict(api_name="/stop")["message"] == "Stopping after this step."
        assert list(going)[-1]["summary"]["state"] == "stopped"
        *rows, last = waiting
        assert last["summary"]["state"] == "finished"
        assert [row["step"] for row in rows if "step" in row] == [0, 1, 2]
        assert "Traceback" not in server.log
        for client in (first, second):
            client.close()
