"""What a page is sent: complete, small, and true for whoever joins when."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import gradio as gr
import httpx
import pytest
from browser import built, served

from gpt2demo.config import RunConfig, Settings
from gpt2demo.hub import Hub
from gpt2demo.records import RunSummary, StepMetrics
from gpt2demo.run import Run
from gpt2demo.ui import page as page_module
from gpt2demo.ui.handlers import Page
from gpt2demo.ui.stream import Feed, ordinal, waiting_line

# gradio's own statistics of its queue use what pandas 3 deprecates; building its app leaves event
# loops open, which are collected at some later moment
pytestmark = [
    pytest.mark.filterwarnings("ignore::pandas.errors.Pandas4Warning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Screen:
    """What live_chart.js keeps of the messages, written again from their description."""

    def __init__(self) -> None:
        self.n = None
        self.runs: dict[str, list[list]] = {}
        self.have: dict[str, int] = {}
        self.live: str | None = None
        self.status: dict = {}
        self.tiles: dict | None = None

    def show(self, text: str) -> None:
        message = json.loads(text, parse_constant=pytest.fail)
        assert self.n is None or message["n"] == self.n + 1
        self.n = message["n"]
        if message.get("reset"):
            self.runs, self.have, self.live, self.tiles = {}, {}, None, None
        for run in [*message.get("runs", []), *([message["start"]] if "start" in message else [])]:
            assert run["id"] not in self.runs
            self.runs[run["id"]] = list(run["rows"])
            self.have[run["id"]] = run["have"]
            if run["live"]:
                self.live = run["id"]
        if "rows" in message:
            assert message["run"] == self.live
            assert message["from"] == self.have[self.live]
            self.runs[self.live] += message["rows"]
            self.have[self.live] = message["to"]
        if "end" in message:
            assert message["end"]["id"] == self.live
            self.live = None
        for run_id in message.get("drop", []):
            del self.runs[run_id]
        whole = not message.get("partial")
        for part in ("status", "tiles"):
            if message.get(part):
                known = {} if whole else getattr(self, part) or {}
                setattr(self, part, known | message[part])


class Script:
    """A hub whose runs the test writes by hand."""

    def __init__(self) -> None:
        self.hub = Hub(Settings(max_finished=12), device="cpu", execute=lambda *_, **__: None)
        self.made = 0

    def start(self, owner: str = "me", **settings) -> Run:
        self.made += 1
        run = Run(
            id=f"run{self.made}",
            owner=owner,
            config=RunConfig(model="tiny", **settings),
            device=self.hub.device_info,
            stop=threading.Event(),
            started=0.0,
        )
        run.progress.phase = "training"
        self.hub.current = run
        return run

    def step(self, run: Run, count: int = 1, loss: float = 9.0) -> None:
        for _ in range(count):
            number = len(run.steps)
            run.steps.append(
                StepMetrics(
                    step=number,
                    loss=loss,
                    step_ms=100.0 + number,
                    tokens_per_sec=1280.0,
                    is_warmup=number < 2,
                )
            )

    def end(self, run: Run, state: str = "finished") -> None:
        run.summary = RunSummary(
            state=state, message=f"{state}.", steps_done=len(run.steps), steps_measured=0,
            seconds=1.0,
        )  # fmt: skip
        self.hub.finished.append(run)
        self.hub.current = None


@pytest.fixture
def script() -> Script:
    return Script()


def follow(feed: Feed, screen: Screen) -> None:
    while text := feed.news():
        screen.show(text)


def opened(script: Script, owner: str = "me") -> tuple[Feed, Screen]:
    feed, screen = Feed(script.hub, owner), Screen()
    screen.show(feed.snapshot())
    return feed, screen


def test_every_step_of_every_run_arrives_once(script):
    feed, screen = opened(script)
    for number in (3, 1, 7):
        run = script.start()
        for _ in range(number):
            script.step(run, 3)
            follow(feed, screen)
        script.end(run)
        follow(feed, screen)
        assert [row[0] for row in screen.runs[run.id]] == list(range(3 * number))
        assert screen.live is None
    assert len(screen.runs) == 3


def test_runs_that_came_and_went_between_two_looks_are_shown(script):
    feed, screen = opened(script)
    for _ in range(4):
        run = script.start()
        script.step(run, 2)
        script.end(run)
    follow(feed, screen)
    assert list(screen.runs) == ["run1", "run2", "run3", "run4"]
    assert all(len(rows) == 2 for rows in screen.runs.values())


def test_who_joins_late_sees_what_the_others_see(script):
    _, first = early = opened(script)
    for number in range(5):
        run = script.start()
        script.step(run, 10 + number)
        follow(early[0], first)
        _, late = opened(script)
        assert late.runs == first.runs
        assert late.live == first.live == run.id
        assert (late.status, late.tiles) == (first.status, first.tiles)
        script.end(run)
        follow(early[0], first)
    _, late = opened(script)
    assert (late.runs, late.live) == (first.runs, None)


def test_the_chart_keeps_its_last_nine_curves(script):
    feed, screen = opened(script)
    for _ in range(15):
        run = script.start()
        script.step(run)
        script.end(run)
        follow(feed, screen)
        _, late = opened(script)
        assert late.runs == screen.runs
    assert list(screen.runs) == [f"run{i}" for i in range(8, 16)]


def test_a_run_without_a_step_leaves_no_curve(script):
    feed, screen = opened(script)
    script.end(script.start(), "out of memory")
    follow(feed, screen)
    assert screen.runs == {}
    assert screen.status["state"] == "out of memory"


def test_the_status_knows_whose_run_it_is(script):
    feed, screen = opened(script, "me")
    other, others = opened(script, "another")
    run = script.start("me")
    script.step(run, 4)
    follow(feed, screen)
    follow(other, others)
    assert (screen.status["mine"], others.status["mine"]) == (True, False)
    assert "mine" not in json.loads(Feed(script.hub, "").snapshot())["status"]
    assert screen.status["left_s"] == pytest.approx(
        16 * 0.1025, abs=0.05
    )  # median of 102 and 103 ms
    run.stop.set()
    follow(feed, screen)
    assert (screen.status["state"], screen.status["text"]) == (
        "stopping",
        "Stopping after this step.",
    )


def test_tiles_warm_up_then_show_medians(script):
    feed, screen = opened(script)
    run = script.start()
    script.step(run, 2)
    follow(feed, screen)
    assert screen.tiles["warmup"]
    assert screen.tiles["ms"] is None
    script.step(run, 3)
    follow(feed, screen)
    assert not screen.tiles["warmup"]
    assert screen.tiles["ms"] == 103.0
    assert screen.tiles["mfu"] is None
    assert "no peak known" in screen.tiles["mfu_note"]
    script.step(run, 1, loss=float("nan"))
    follow(feed, screen)
    assert screen.tiles["loss"] is None
    assert screen.runs[run.id][-1][1] is None


def test_mfu_and_memory_of_a_known_gpu(script):
    script.hub.device_info = replace(
        script.hub.device_info,
        type="cuda",
        name="NVIDIA A100-SXM4-40GB",
        memory_total_bytes=42_298_834_944,
    )
    run = script.start(precision="bf16", B=16, T=1024)
    run.config = RunConfig(precision="bf16", B=16, T=1024)
    run.steps += [
        StepMetrics(
            step=i,
            loss=9.0,
            step_ms=100.0,
            tokens_per_sec=163_840.0,
            is_warmup=i < 2,
            peak_memory_bytes=20 * 2**30,
        )
        for i in range(3)
    ]
    _, screen = opened(script)
    # nanoGPT's own estimate: 6N + 12*L*H*Q*T FLOPs a token, N without the position table
    flops = 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024
    assert screen.tiles["mfu"] == pytest.approx(flops * 163_840 / 312e12, rel=0.01)
    assert screen.tiles["mfu_note"] == "of 312 TFLOP/s"
    assert screen.tiles["mem_gib"] == 20


@pytest.mark.parametrize(
    ("place", "text"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th"), (22, "22nd")],
)
def test_ordinals(place, text):
    assert ordinal(place) == text


def test_the_line_in_words(script):
    run = script.start()
    script.step(run, 4)
    info, stop = script.hub.device_info, threading.Event()
    waiting = Run(id="w", owner="b", config=RunConfig(), device=info, stop=stop)
    script.hub.waiting.append(waiting)
    assert waiting_line(script.hub, waiting) == "2nd in line, about 2 s"
    assert waiting_line(script.hub, run) is None
    run.steps.clear()
    assert waiting_line(script.hub, waiting) == "2nd in line, time not known yet"
    feed, screen = opened(script, "b")
    assert screen.status["line"] == "2nd in line, time not known yet"
    assert opened(script, "c")[1].status["line"] == "1 in line"
    assert feed.news() is None


# ------------------------------------------------------------------ on the wire


@contextmanager
def watched(hub: Hub):
    """A page of a real server and the lines of its one open stream."""
    pages = []
    init = page_module.Page.__init__

    def spied(self, hub):
        init(self, hub)
        pages.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_module.Page, "__init__", spied)
        demo = page_module.build_demo(hub)
    with served(demo, **page_module.launch_options(hub)) as url:
        config = httpx.get(f"{url}/config", timeout=10).json()
        load = next(d["id"] for d in config["dependencies"] if d["api_name"] == "page_load")
        body = {"data": ["x" * 43], "fn_index": load, "session_hash": "watcher"}
        httpx.post(f"{url}/gradio_api/queue/join", json=body, timeout=10).raise_for_status()
        stream = f"{url}/gradio_api/queue/data?session_hash=watcher"
        with httpx.stream("GET", stream, timeout=20) as answer:
            yield pages[0], (line for line in answer.iter_lines() if line)
        end = time.monotonic() + 15
        while pages[0]._streams:  # a closed stream is noticed, and its place is free again
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_3000_step_run_costs_a_viewer_little_and_every_step_is_kept():
    def fast(config, info, *, on_step, progress, **_):
        progress.phase = "training"
        for i in range(config.steps):
            time.sleep(0.001)
            on_step(
                StepMetrics(
                    step=i, loss=10.8 - i / 1000, step_ms=2.123456, tokens_per_sec=60_285.5,
                    is_warmup=i < 2,
                )
            )  # fmt: skip
        return RunSummary(
            state="finished", message="Finished: 3000 steps.", steps_done=config.steps,
            steps_measured=config.steps - 2, seconds=6.0,
        )  # fmt: skip

    hub = Hub(Settings(max_steps=3000), device="cpu", execute=fast)
    sizes, total = [], 0
    with watched(hub) as (_, lines):
        run = None
        for line in lines:
            total += len(line) + 2
            if "process_generating" in line:
                sizes.append(len(line) + 2)
                if run is None:
                    run = hub.submit(RunConfig(model="tiny", steps=3000), "x" * 43)
            if run and run.summary and '\\"end\\"' in line:
                break
    hub.close()
    assert len(sizes) > 8
    assert max(sizes) < 1024
    assert total < 2_000_000
    assert [step.step for step in run.record().steps] == list(range(3000))


def test_a_page_has_one_stream_and_a_closed_one_frees_its_place():
    hub = Hub(Settings(), device="cpu", execute=lambda *_, **__: None)
    with watched(hub) as (page, lines):
        next(line for line in lines if "process_generating" in line)
        assert list(page._streams) == ["watcher"]

        async def second() -> int:
            request = SimpleNamespace(session_hash="watcher")
            return len([part async for part in page.watch("x" * 43, request)])

        with ThreadPoolExecutor(1) as elsewhere:
            assert elsewhere.submit(asyncio.run, second()).result() == 0  # ends at once


# --- the rest of the page


def test_what_shows_a_state_never_misses_the_last_one() -> None:
    hub = Hub(device="cpu")
    try:
        listeners = built(lambda: page_module.build_demo(hub)).config["dependencies"]
    finally:
        hub.close()
    shows = {
        dependency["api_name"]: dependency["trigger_mode"]
        for dependency in listeners
        for _, event in dependency["targets"]
        if event in ("tick", "change")
    }
    assert {"page_around", "page_results", "page_race", "page_board", "page_note"} <= shows.keys()
    # "once" drops an event while the answer to the one before is on its way
    assert set(shows.values()) == {"always_last"}


@pytest.mark.parametrize("told", [None, {}, {"B": 4}, {"B": "x", "T": 8}, {"B": 4, "T": None}])
def test_a_cell_that_no_click_told_is_refused_in_words(caplog, told) -> None:
    hub = Hub(device="cpu")
    try:
        with pytest.raises(gr.Error, match=r"\b[BT]\b"):
            Page(hub).pick(gr.EventData(None, told))
        assert Page(hub).pick(gr.EventData(None, {"B": 4, "T": 8})) == (4, 8)
    finally:
        hub.close()
    assert not caplog.records
