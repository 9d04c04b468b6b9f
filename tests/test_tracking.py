"""Runs in trackio: what is logged, that nothing leaves the machine, and that no failure counts."""

import asyncio
import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
import time

import gradio as gr
import pytest
from server import ROOT

from gpt2demo import cli, tracking
from gpt2demo.config import InputError
from gpt2demo.hub import Hub
from gpt2demo.ui.handlers import Page
from gpt2demo.ui.page import build_demo

TINY = ["run", "--model", "tiny", "--device", "cpu", "-B", "1", "-T", "8", "--steps", "3"]

# trackio's own names and parameters, and nothing else of it
FAKE = """
calls = []

def fail_in(name):
    if name == {fails!r}:
        raise RuntimeError("the disk of trackio is full")

class Run:
    name, id = "run", "1"

    def log(self, metrics, step=None):
        fail_in("log")
        calls.append((step, metrics))

def init(project, name=None, config=None, embed=True, auto_log_gpu=None, auto_log_cpu=None):
    print("* Trackio project initialized")
    fail_in("init")
    calls.append((project, name, config))
    return Run()

def finish():
    fail_in("finish")
    calls.append("finish")
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """fake(fails): a trackio in which the function of that name fails."""

    def install(fails=""):
        (tmp_path / "trackio.py").write_text(FAKE.format(fails=fails))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "trackio", raising=False)
        for name in tracking._REMOTE:
            monkeypatch.delenv(name, raising=False)

    yield install
    sys.modules.pop("trackio", None)


def test_without_trackio_the_option_is_refused_in_words(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main([*TINY, "--track", "demo"]) == 2
    assert "trackio, which is not installed" in capsys.readouterr().err
    assert not tracking.is_usable()


@pytest.mark.parametrize("name", ["", "a b", "../x", "x" * 65, "é", "registry-x", 3, None])
def test_an_unfit_project_is_refused(fake, name):
    fake()
    with pytest.raises(InputError, match="track must be"):
        tracking.check_project(name)


def test_a_trackio_that_would_send_is_refused(fake, monkeypatch):
    fake()
    assert tracking.is_usable()
    monkeypatch.setenv("TRACKIO_SPACE_ID", "somebody/space")
    with pytest.raises(InputError, match="unset TRACKIO_SPACE_ID"):
        tracking.check_project("demo")
    assert not tracking.is_usable()


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_a_failure_of_trackio_is_a_note_and_nothing_more(fake, fails, tmp_path, capsys):
    fake(fails)
    path = tmp_path / "out.json"
    assert cli.main([*TINY, "--track", "demo", "--json", str(path)]) == 0
    run = json.loads(path.read_text())
    assert [step["step"] for step in run["steps"]] == [0, 1, 2]
    assert run["summary"]["state"] == "finished"
    assert run["summary"]["notes"] == ["trackio could not log this run; the log has the details."]
    assert "* Trackio" not in capsys.readouterr().out


def test_a_run_of_the_page_is_logged_where_its_visitor_asks(fake):
    fake()
    hub = Hub(device="cpu")
    page = Page(hub)
    settings = ["tiny", "fp32", 1, 8, 2, "manual", "default", False, 50257, 0, 3e-4, 1]
    try:
        for track in (False, True, "yes"):  # anything but True is no
            page.run("o" * 32, track, *settings, "own", "some words of mine " * 9, None)
        end = time.monotonic() + 60
        while len(hub.finished) < 3:
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        hub.close()
    import trackio

    (project, label, config), *rows, last = trackio.calls  # of one run only
    assert project == tracking.PAGE_PROJECT
    assert label == hub.finished[1].config.label
    assert config["text"] == "own"
    assert "words" not in repr(trackio.calls)
    steps = hub.finished[1].steps
    assert [(n, row["loss"], row["step_ms"]) for n, row in rows] == [
        (step.step, step.loss, step.step_ms) for step in steps
    ]
    assert last == "finish"


@pytest.mark.parametrize("usable", [False, True])
def test_the_switch_is_there_only_where_trackio_is(monkeypatch, usable):
    monkeypatch.setattr(tracking, "is_usable", lambda: usable)
    hub = Hub(device="cpu")

    async def built():  # in a running loop: without one gradio opens two and leaves them open
        return build_demo(hub)

    try:
        demo = asyncio.run(built())
        switch = next(b for b in demo.blocks.values() if b.elem_id == "track")
        assert isinstance(switch, gr.Checkbox)
        assert switch.visible is usable
        assert switch.value is False
    finally:
        hub.close()


# Ends the process at the first look at the network; then the command line as it is.
SEALED = """
import os, sys

def hook(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        os.write(2, f"{event} {args}".encode())
        os._exit(77)

sys.addaudithook(hook)
from gpt2demo import cli
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.skipif(not tracking.is_installed(), reason="trackio is not installed")
def test_the_real_trackio_holds_every_row_and_sees_no_network(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SEALED, *TINY, "--track", "demo", "--json", "-"],
        # somebody is logged in: trackio would ask the Hub for the name
        env=os.environ | {"TRACKIO_DIR": str(tmp_path / "tracked"), "HF_TOKEN": "hf_" + "x" * 34},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)  # nothing of trackio's own words is in it
    assert run["summary"]["notes"] == [
        "trackio has 3 steps of this run: trackio show --project demo"
    ]
    (file,) = (tmp_path / "tracked").glob("*.db")
    with sqlite3.connect(file) as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
        ((config,),) = connection.execute("SELECT config FROM configs").fetchall()
    connection.close()
    assert [(n, json.loads(row)["loss"]) for n, row in rows] == [
        (step["step"], step["loss"]) for step in run["steps"]
    ]
    logged = json.loads(config)
    assert {name: logged[name] for name in run["config"]} == run["config"]
    assert logged["_Username"] is None


@pytest.mark.skipif(not tracking.is_installed(), reason="trackio is not installed")
def test_a_folder_that_trackio_cannot_write_is_said(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    done = subprocess.run(
        [sys.executable, "-m", "gpt2demo", *TINY, "--track", "demo"],
        env=os.environ | {"TRACKIO_DIR": str(blocked)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "trackio could not log this run" in done.stdout
