"""The endpoints for scripts, over a real server with gradio's own client."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from server import ROOT, Server, page

from gpt2demo import cli
from gpt2demo.records import RunSummary, StepMetrics

TINY = {"model": "tiny", "B": 1, "T": 8}
ENDPOINTS = {
    "/train": [
        "model", "precision", "B", "T", "steps", "seed", "attention", "optimizer", "compile",
        "vocab_size", "lr", "text", "budget_gib",
    ],
    "/compare": [
        "precisions", "rounds", "model", "B", "T", "steps", "seed", "attention", "optimizer",
        "compile", "vocab_size", "lr",
    ],
    "/staircase": ["model", "B", "T", "steps", "seed"],
    "/probe": ["B", "T"],
    "/inside": [
        "model", "precision", "B", "T", "seed", "attention", "optimizer", "vocab_size",
    ],
    "/stop": ["stop_token"],
    "/status": [],
    "/device": [],
    "/memory": [
        "model", "precision", "B", "T", "steps", "attention", "optimizer", "compile", "vocab_size",
        "capacity_gib", "map",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api")
    with page(folder, GPT2DEMO_MAX_STEPS="3000", GPT2DEMO_ORPHAN_SECONDS="2") as server:
        yield server
        assert "Traceback" not in server.log


@contextmanager
def connected(server: Server) -> Iterator[Client]:
    client = Client(server.url, verbose=False, analytics_enabled=False)
    try:
        yield client
    finally:
        client.predict(api_name="/stop")
        client.close()
        server.wait_idle()


@pytest.fixture
def client(server):
    with connected(server) as client:
        yield client


def train(client: Client, **settings) -> list[dict]:
    return list(client.submit(api_name="/train", **(TINY | settings)))


def test_a_run_streams_a_dict_a_step_and_then_the_summary(client):
    first, *steps, last = train(client, steps=5, precision="bf16")
    assert set(first) == {"run_id", "stop_token", "config", "warnings"}
    assert first["config"]["precision"] == "bf16"
    assert [step["step"] for step in steps] == list(range(5))
    for step in steps:
        assert StepMetrics(**step).tokens_per_sec * step["step_ms"] / 1000 == pytest.approx(8)
    summary = RunSummary(**last["summary"])
    assert summary.state == "finished"
    assert summary.step_ms_median == sorted(step["step_ms"] for step in steps[2:])[1]


def test_the_same_seed_gives_the_same_losses_and_another_does_not(client):
    runs = [[r["loss"] for r in train(client, steps=2, seed=seed)[1:-1]] for seed in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]


def test_every_setting_arrives(client):
    chosen = {
        "precision": "tf32", "seed": 3, "attention": "sdpa", "optimizer": "fused",
        "vocab_size": 50304, "lr": 0.001, "steps": 1, "budget_gib": 8.0,
    }  # fmt: skip
    first = train(client, text="The quick brown fox jumps over the lazy dog again.", **chosen)[0]
    settings = TINY | chosen | {"compile": False, "text": "own", "device": "cpu"}
    assert first["config"] == settings


def test_stop_by_the_same_client_and_by_token(client, server):
    stops = [
        lambda _: client.predict(api_name="/stop"),
        lambda token: server.post("stop", token),
    ]
    for stop in stops:
        job = client.submit(api_name="/train", **TINY, steps=3000)
        token = next(iter(job))["stop_token"]
        assert "somebody else" in server.post("stop", "")["message"]
        assert stop(token) == {"message": "Stopping after this step."}
        assert job.result(timeout=30)["summary"]["state"] == "stopped"


def test_a_second_run_waits_in_line_and_is_told_so(client, server):
    job = client.submit(api_name="/train", **TINY, steps=3000)
    rows = iter(job)
    token = next(rows)["stop_token"]
    for _ in range(4):
        next(rows)
    with connected(server) as second:
        waiting = second.submit(api_name="/train", **TINY, steps=1)
        told = iter(waiting)
        assert "run_id" in next(told)
        assert next(told)["line"].startswith("2nd in line, about ")
        assert server.post("status")["waiting"] == 1
        with connected(server) as third, connected(server) as fourth:
            race = iter(third.submit(api_name="/compare", **TINY, precisions="fp32", rounds=1))
            assert "stop_token" in next(race)
            assert next(race)["line"].startswith("3rd in line, ")
            climb = iter(fourth.submit(api_name="/staircase", **TINY))
            climbers = next(climb)["stop_token"]
            assert next(climb)["line"].startswith("4th in line, ")
            server.post("stop", climbers)  # out of the line
            server.post("stop", token)
            assert waiting.result(timeout=30)["summary"]["state"] == "finished"
            *lines, result = race
            assert all("line" in told for told in lines)
            assert result["message"].startswith("The race is over.")


def test_a_client_that_drops_leaves_a_run_that_ends_soon(server):
    url = f"{server.url}/gradio_api/call/train"
    event = httpx.post(url, json={"data": plain_data(steps=3000)}, timeout=10).json()["event_id"]
    with httpx.stream("GET", f"{url}/{event}", timeout=20) as stream:
        lines = stream.iter_lines()
        while "step_ms" not in next(lines):
            pass
    server.wait_idle()  # its limit is two seconds without a watcher here
    assert server.post("status")["state"] == "idle"


@pytest.mark.parametrize("name", ["B", "T", "steps"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, None, "8", 1e9, [4], {"a": 1}])
def test_a_bad_number_is_refused_in_words_before_anything_starts(server, name, value):
    refusal = refused(server, **{name: value})
    assert refusal.startswith(f"{name} must be a whole number from 1 to ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("precision", None), ("precision", "FP16"), ("precision", ["fp16"]), ("T", 1025),
        ("lr", 0), ("lr", "fast"), ("seed", -1), ("compile", "yes"), ("vocab_size", 50258),
        ("model", "gpt3"), ("attention", 1), ("optimizer", {}), ("text", None), ("text", ""),
    ],
)  # fmt: skip
def test_a_bad_choice_is_refused_in_words(server, name, value):
    refusal = refused(server, **{name: value})
    assert name in refusal
    assert "Traceback" not in refusal
    assert str(ROOT) not in refusal


@pytest.mark.parametrize("name", ["B", "T", "steps", "lr", "seed", "vocab_size"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_python_writes_into_json_beside_the_standard_is_refused(server, name, value):
    assert refused(server, **{name: value}).startswith(name)


def plain_data(**settings) -> list:
    """The values of /train's plain HTTP form, which takes all of them in order."""
    plain = {
        "model": "tiny", "precision": "fp32", "B": 1, "T": 8, "steps": 2, "seed": 1,
        "attention": "manual", "optimizer": "default", "compile": False, "vocab_size": 50257,
        "lr": 3e-4, "text": "builtin", "budget_gib": 0,
    } | settings  # fmt: skip
    return [plain[name] for name in ENDPOINTS["/train"]]


def refused(server: Server, **settings) -> str:
    """The error that the endpoint's plain HTTP form answers."""
    before = server.post("status")
    url = f"{server.url}/gradio_api/call/train"
    body = json.dumps({"data": plain_data(**settings)})
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(url, content=body, headers=headers, timeout=10)
    answer.raise_for_status()
    stream = httpx.get(f"{url}/{answer.json()['event_id']}", timeout=20).text
    assert server.post("status") == before
    event, data = stream.strip().splitlines()[-2:]
    assert event == "event: error", stream
    return json.loads(data.removeprefix("data: "))["error"]


def test_status_tells_what_goes_on(client, server):
    assert server.post("status")["state"] == "idle"
    job = client.submit(api_name="/train", **TINY, steps=3000)
    rows = iter(job)
    for _ in range(5):
        next(rows)
    status = server.post("status")
    assert status["state"] == "running"
    assert status["label"] == "fp32 B=1 T=8 tiny"
    assert 0 < status["steps_done"] < status["steps"] == 3000
    assert math.isfinite(status["step_ms_median"])
    assert "stop_token" not in json.dumps(status)
    client.predict(api_name="/stop")
    job.result(timeout=30)


def test_memory_is_the_command_lines(client, capsys):
    settings = {"precision": "bf16", "B": 16, "T": 1024, "steps": 3}
    told = client.predict(api_name="/memory", **settings, capacity_gib=16, map=True)
    argv = "memory --precision bf16 -B 16 -T 1024 --steps 3 --capacity-gib 16 --map --json -"
    assert cli.main(argv.split()) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("config")["B"] == 16
    assert told == printed
    assert sum(told["parts"].values()) == told["peak_bytes"]
    assert told["verdict"] == "will not fit"
    assert "map" not in client.predict(api_name="/memory", **settings)


def test_memory_of_this_device_is_what_the_run_is_held_against(client):
    told = client.predict(api_name="/memory", **TINY)
    memory = train(client)[-1]["summary"]["memory"]
    assert memory["forecast_bytes"] == told["peak_bytes"]
    assert memory["capacity_bytes"] == pytest.approx(told["capacity_bytes"], rel=0.1)
    assert memory["measured_bytes"] == pytest.approx(told["peak_bytes"], rel=0.005)


@pytest.mark.parametrize("capacity", [0.2, -1, 2000, "16", [16]])
def test_memory_refuses_a_card_that_cannot_be(client, capacity):
    with pytest.raises(AppError, match=r"capacity_gib must be a number from 0\.25 to 1,024"):
        client.predict(api_name="/memory", capacity_gib=capacity)


def test_a_race_streams_results_and_ends_with_verdicts(client):
    alone = [row["loss"] for row in train(client, steps=4, precision="bf16")[1:-1]]
    race = {"precisions": "fp32,tf32,bf16", "rounds": 2, "steps": 4}
    first, *told = client.submit(api_name="/compare", **TINY, **race)
    assert list(first) == ["stop_token"]
    assert len(told) >= 2
    last = told[-1]
    assert last["message"].startswith("The race of 2 rounds is over. Fastest: ")
    assert list(last["results"]) == list(last["expected"]) == list(last["verdicts"])
    for precision, result in last["results"].items():
        assert result["state"] == "finished", precision
        assert result["steps_measured"] == 4  # two rounds, two steps each after warm-up
        assert last["verdicts"][precision]["words"]
    assert last["results"]["tf32"]["max_loss_difference"] == 0.0
    fp32 = [row["loss"] for row in train(client, steps=4)[1:-1]]
    widest = max(abs(a - b) for a, b in zip(alone, fp32, strict=True))
    # a precision inside a race is the same run as alone
    assert last["results"]["bf16"]["max_loss_difference"] == pytest.approx(widest, abs=1e-12)


def test_a_step_is_inspected_and_refused_in_words(client):
    found = client.predict(api_name="/inside", **TINY, precision="bf16")
    assert found["state"] == "finished"
    assert 0.9 < found["profile"]["accounted"] < 1.1
    logits = [c for c in found["casts"]["operations"] if c["where"] == "lm_head"]
    assert logits[0]["output"] == "bfloat16"
    assert found["values"]["weights"]["count"] == 3_382_080
    with pytest.raises(AppError, match="B must be a whole number"):
        client.predict(api_name="/inside", **TINY | {"B": 0})


def test_a_probe_measures_and_is_refused_while_something_runs(client, server):
    job = client.submit(api_name="/probe", B=1, T=32)
    while (status := server.post("status"))["state"] == "idle":
        assert not job.done()
    assert (status["state"], status["message"]) == ("measuring", "Probing this device.")
    with connected(server) as second:
        told = iter(second.submit(api_name="/train", **TINY, steps=1))
        assert "run_id" in next(told)
        assert next(told) == {"line": "1st in line, time not known yet"}
        found = job.result(timeout=60)
        assert [*told][-1]["summary"]["state"] == "finished"
    assert list(found) == ["config", "probe", "forecasts"]
    assert found["probe"]["tokens"] == 32
    assert found["probe"]["bandwidth_bytes_per_sec"] > 1e8
    assert found["forecasts"]["fp32"]["ms_per_step"] > 0
    job = client.submit(api_name="/train", **TINY, steps=3000)
    rows = iter(job)
    token = next(rows)["stop_token"]
    next(rows)
    for endpoint, settings in (("/probe", {"B": 1, "T": 32}), ("/inside", TINY)):
        with pytest.raises(AppError, match="Something runs here now"):
            client.predict(api_name=endpoint, **settings)
    server.post("stop", token)
    job.result(timeout=30)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"precisions": "fp32,fp99"}, "fp99"),
        ({"precisions": ""}, "precisions may hold"),
        ({"precisions": "fp32,fp32"}, "once only"),
        ({"rounds": 0}, "rounds must be a whole number from 1 to 20"),
        ({"steps": 2}, "steps must be at least 3"),
        ({"B": 0}, "B must be a whole number"),
    ],
)
def test_a_race_is_refused_in_words(client, server, setting, said):
    with pytest.raises(AppError, match=said):
        client.predict(api_name="/compare", **(TINY | {"steps": 4} | setting))
    assert server.post("status")["state"] == "idle"


def test_a_staircase_streams_its_rungs_until_it_is_stopped(client, server):
    job = client.submit(api_name="/staircase", **TINY, steps=150, seed=5)
    told = iter(job)
    token = next(told)["stop_token"]
    first = next(told)
    assert [rung["state"] for rung in first["rungs"][:2]] == ["finished", "waiting"]
    assert first["message"] == ""
    server.post("stop", token)
    *_, last = told
    assert last["message"].startswith("The staircase ended: the rung TF32 was stopped.")
    assert [rung["lesson_ms"] for rung in last["rungs"]] == [1000, 333, 300, 130, 96, 93, 90]
    assert last["rungs"][0]["config"]["seed"] == last["config"]["seed"] == 5
    with pytest.raises(AppError, match="steps must be at least 3 on the staircase, not 2"):
        client.predict(api_name="/staircase", **TINY, steps=2)


def test_a_budget_ends_a_run_in_words(client):
    summary = train(client, T=512, budget_gib=0.25)[-1]["summary"]
    assert summary["state"] == "out of memory"
    failed = summary["out_of_memory"]
    assert failed["capacity_bytes"] == 2**28
    again = train(client, T=failed["smaller_T"], budget_gib=0.25)[-1]["summary"]
    assert again["state"] == "finished"


def test_device_is_the_command_lines(client):
    device = client.predict(api_name="/device")
    assert device["type"] == "cpu"
    assert list(device["support"]) == ["fp32", "tf32", "bf16", "fp16", "fp64"]
    assert 0 < device["memory_free_bytes"] <= device["memory_total_bytes"]


def test_every_endpoint_is_documented_with_names_and_types(client):
    endpoints = client.view_api(return_format="dict")["named_endpoints"]
    assert {
        name: [p["parameter_name"] for p in info["parameters"]] for name, info in endpoints.items()
    } == ENDPOINTS
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, info in endpoints.items():
        assert f"| `{name}` |" in readme
        assert info["description"]
        for parameter in info["parameters"]:
            assert parameter["python_type"]["type"] in ("str", "int", "float", "bool")
            assert parameter["parameter_has_default"]
            assert f"`{parameter['parameter_name']}`" in readme
