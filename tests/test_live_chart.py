"""The live view in a real browser, fed by a real gradio server and a run that the test invents."""

import asyncio
import gzip
import json
import math
import re
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import gradio as gr
import numpy as np
import plotly
import pytest
import uvicorn
from browser import Person, free_port, served
from fastapi import FastAPI
from playwright.sync_api import Page
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from gpt2demo import charts
from gpt2demo.config import RunConfig
from gpt2demo.records import StepMetrics
from gpt2demo.ui import live

# gradio's own statistics of its queue use what pandas 3 deprecates
pytestmark = pytest.mark.filterwarnings("ignore::pandas.errors.Pandas4Warning")

CSS = (Path(__file__).parents[1] / "assets" / "style.css").read_text(encoding="utf-8")
PLOT = "document.querySelector('#live .live-plot')"
HOSTILE = '<img src=x onerror="window.hacked=1"><b>bold</b>'
OWNER = "a-browsers-own-token-" + "1" * 22
TILES = {
    "ms": 254.512,
    "p25": 250.018,
    "p75": 261.25,
    "tps": 502.941,
    "loss": 9.8712,
    "mem_gib": 2.34118,
    "mem_note": "",
    "mfu": 0.3751,
    "mfu_note": "",
    "warmup": False,
}
LABEL = """() => [...document.querySelectorAll('#live .hoverlayer .legend text')]
    .map((line) => line.textContent)"""
IDLE = {"state": "idle", "text": "Nothing runs.", "done": 0, "steps": 0}


def steps_of(count, start=0, seed=0):
    rng = np.random.default_rng([seed, start])
    return [
        StepMetrics(
            step=i,
            loss=float(9 + rng.normal(0, 0.2)),
            step_ms=float(rng.uniform(250, 260) if i >= 2 else 900 - 100 * i),
            tokens_per_sec=500.0,
            is_warmup=i < 2,
        )
        for i in range(start, start + count)
    ]


# elements of the view that reach out of the window, or hold more than they show
CLIPPED = """() => [...document.querySelectorAll('#live *')].filter((e) => {
    if (e.closest('defs, .modebar')) return false;
    const box = e.getBoundingClientRect();
    const outside = box.right > innerWidth + 0.5 || box.left < -0.5;
    const inline = getComputedStyle(e).display === 'inline';
    const cut = e instanceof HTMLElement && !inline && e.scrollWidth > e.clientWidth + 1;
    return box.width && (outside || cut);
}).map((e) => e.outerHTML.slice(0, 90))"""


class Feed:
    """The runs that the test invents, told to the open page as the server would."""

    def __init__(self):
        self.queue = None
        self.clear()

    def clear(self):
        self.runs = {}
        self.asked = []  # what the page's requests named as its owner
        self.status = IDLE
        self.tiles = None
        self.label = None
        self.refuse = None  # a status with which the stream is refused
        self.refused = False
        self.ticks = 0  # how often the rest of the page was asked for

    def tick(self):
        self.ticks += 1

    def curve(self, run_id):
        config, steps, is_live = self.runs[run_id]
        curve = charts.run_curve(run_id, config, steps, live=is_live)
        return curve | ({"label": self.label} if self.label else {})

    def state(self):
        runs = [self.curve(run_id) for run_id in self.runs]
        return {"runs": runs, "status": self.status, "tiles": self.tiles}

    async def watch(self):
        self.loop = asyncio.get_running_loop()
        mine = self.queue = asyncio.Queue()
        self.told = self.status, self.tiles
        yield f"data: {live.message(reset=True, **self.state())}\n\n"
        while (text := await mine.get()) is not None:
            yield text

    async def answer(self, request):
        self.asked.append(request.headers["x-owner"])
        if self.refuse:
            self.refused = True
            return Response(status_code=self.refuse)
        return StreamingResponse(self.watch(), media_type="text/event-stream")

    def send(self, text):
        """As it comes through the network: in any pieces."""
        if self.queue is not None:
            for piece in re.findall(r"(?s).{1,150}", text):
                self.loop.call_soon_threadsafe(self.queue.put_nowait, piece)

    def tell(self, *, partial=False, status=None, tiles=None, **parts):
        told, self.told = self.told, (status or self.told[0], tiles or self.told[1])
        if partial:
            status, tiles = (live.changes(*pair) for pair in zip(told, self.told, strict=True))
        text = live.message(partial=partial, status=status, tiles=tiles, **parts)
        self.send(f"data: {text}\n\n")

    def end(self):
        if self.queue is not None:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, None)
            self.queue = None

    def have(self, run_id, steps, /, *, is_live=True, **config):
        """A run that is there before the page comes, or that a snapshot brings."""
        self.runs[run_id] = (RunConfig(**config), list(steps), is_live)

    def begin(self, run_id, **config):
        self.have(run_id, [], **config)
        self.tell(start=self.curve(run_id))

    def step(self, run_id, steps, **parts):
        known = self.runs[run_id][1]
        start = len(known)
        known.extend(steps)
        rows = charts.delta_rows(known, start)
        self.tell(rows=(run_id, rows), **parts)


def build(feed):
    with gr.Blocks(analytics_enabled=False) as demo:
        view = live.live_view()
        demo.load(lambda: OWNER, None, view, show_progress="hidden", concurrency_limit=None)
        view.tick(feed.tick, None, None, queue=False, trigger_mode="always_last")
    return demo


def routes(feed):
    return [*live.plotly_route(), Route(live.STREAM_PATH, feed.answer)]


@pytest.fixture(scope="module")
def feed():
    return Feed()


@pytest.fixture(scope="module")
def url(feed):
    with served(build(feed), css=CSS, app_kwargs={"routes": routes(feed)}) as address:
        yield address
        feed.end()


@pytest.fixture
def visit(browser, url, feed):
    """Opens the page; afterwards nothing went wrong in it and it asked no other host."""
    feed.clear()
    people, hosts, errors = [], set(), []

    def note(error):
        if not (feed.refused and "Failed to load resource" in error):  # Chromium's own line
            errors.append(error)

    def go(address=url, theme="light", width=880, height=760, own_clock=False):
        size = {"width": width, "height": height}
        people.append(Person(browser, new=own_clock, viewport=size))  # a clock is a context's
        page = people[-1].new_page()
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        page.on("pageerror", lambda error: note(error.stack or str(error)))
        page.on("console", lambda said: note(said.text) if said.type == "error" else None)
        if own_clock:
            page.clock.install()
        page.goto(f"{address}/?__theme={theme}")
        page.wait_for_function(f"{PLOT} && {PLOT}._fullData")
        page.wait_for_selector("#live .live-status[data-state]")
        return page

    yield go
    feed.end()
    for person in people:
        person.close()
    assert errors == []
    assert hosts <= {url.split("/")[2]}


def wait_rows(page, count, trace=0):
    page.wait_for_function(
        f"([t, n]) => {PLOT}._fullData?.[t]?._length >= n && {PLOT}.data[t].x.at(-1) >= 0",
        arg=[trace, count],
    )


def points(page, trace=0):
    return page.evaluate(f"t => ({{x: {PLOT}.data[t].x, y: {PLOT}.data[t].y}})", trace)


def text_of(page, selector):
    return page.locator(f"#live {selector}").inner_text()


def axis_range(page, name):
    return page.evaluate(f"n => {PLOT}._fullLayout[n].range", name)


# ---------------------------------------------------------------- the stream


@pytest.mark.browser
def test_an_empty_page_says_what_will_appear(visit):
    page = visit()
    assert text_of(page, ".live-empty").startswith("Press Run: loss, ms per step")
    assert text_of(page, ".live-sentence") == "Nothing runs."
    titles = page.locator("#live .annotation-text").all_text_contents()
    assert {"ms per step", "tokens per second"} <= set(titles)


@pytest.mark.browser
def test_rows_arrive_and_end_complete(visit, feed):
    feed.have("old", steps_of(6, seed=3), is_live=False, precision="fp32")
    page = visit()
    wait_rows(page, 6)
    feed.begin("new", precision="bf16", steps=20)
    for start in range(0, 20, 4):
        status = {"state": "running", "text": "Training.", "done": start + 4, "steps": 20}
        status |= {"left_s": 75.0, "mine": True}
        feed.step("new", steps_of(4, start), status=status, tiles=TILES)
    wait_rows(page, 20, trace=3)
    steps = feed.runs["new"][1]
    loss, ms, tps = (points(page, trace) for trace in (3, 4, 5))
    assert loss["x"] == ms["x"] == tps["x"] == list(range(20))
    assert loss["y"] == pytest.approx([s.loss for s in steps], abs=1e-6)
    assert ms["y"] == pytest.approx([s.step_ms for s in steps], abs=0.006)
    assert tps["y"] == pytest.approx([128 / s.step_ms * 1000 for s in steps], rel=1e-4)
    assert text_of(page, ".live-tile >> nth=0") == "Step time\n255 ms/step\nmiddle half 250–261"
    assert text_of(page, ".live-tile >> nth=4") == "MFU\n37.5 %"
    assert text_of(page, ".live-sentence") == "Your run: Training."
    assert text_of(page, ".live-count") == "step 20 of 20, about 75 s left"
    page.click("#live summary")
    lines = text_of(page, ".live-lines").splitlines()
    step = steps[19]
    assert lines[-1] == (
        f"step 19, loss: {step.loss:.6f}, dt: {step.step_ms:.2f}ms, "
        f"tok/sec: {128 / float(f'{step.step_ms:.2f}') * 1000:.2f}"
    )
    widths = f"{PLOT}.data.map(t => t.line && t.line.width)"
    assert page.evaluate(widths)[:6] == [1.25] * 3 + [2.5] * 3
    feed.tell(end=("new", "finished"), drop=["old"])
    page.wait_for_function(f"{PLOT}.data.length === 6")
    assert page.evaluate(widths)[:3] == [1.25] * 3
    assert page.locator("#live .live-key").all_inner_texts() == ["bf16 B=4 T=32"]
    assert feed.asked == [OWNER]


@pytest.mark.browser
def test_zoom_and_node_survive_updates_and_a_double_click_resets(visit, feed):
    feed.have("a", steps_of(40), steps=60)
    page = visit()
    wait_rows(page, 40)
    page.evaluate(f"{PLOT}.mark = 1")
    box = page.locator("#live .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] - 5, steps=4)
    page.mouse.up()
    page.wait_for_function(f"{PLOT}._fullLayout.xaxis.autorange === false")
    zoomed = [axis_range(page, name) for name in ("xaxis", "yaxis")]
    assert zoomed[0][1] < 40
    for start in range(40, 60, 4):
        feed.step("a", steps_of(4, start))
        wait_rows(page, start + 4)
    feed.tell(end=("a", "finished"))  # redraws all, where the others only extended
    feed.begin("b", precision="bf16")
    feed.step("b", steps_of(3))
    wait_rows(page, 3, trace=3)
    assert [axis_range(page, name) for name in ("xaxis", "yaxis")] == zoomed
    page.evaluate("document.body.classList.toggle('dark')")
    page.wait_for_function(f"{PLOT}.data[0].line.color === '#ffffff'")
    assert [axis_range(page, name) for name in ("xaxis", "yaxis")] == zoomed
    page.mouse.dblclick(box["x"] + box["width"] * 0.5, box["y"] + 20)
    page.wait_for_function(f"{PLOT}._fullLayout.xaxis.range[1] > 59")
    assert page.evaluate(f"{PLOT}.mark") == 1


@pytest.mark.browser
def test_a_lost_connection_is_said_and_taken_up_again_with_everything(visit, feed):
    page = visit()
    feed.begin("a", steps=60)
    feed.step("a", steps_of(10))
    wait_rows(page, 10)
    feed.refuse = 502  # a proxy whose server is gone
    feed.end()
    page.wait_for_selector("#live .live-status[data-state=lost]")
    assert text_of(page, ".live-sentence") == live._TEXTS["lost"]
    assert len(points(page)["x"]) == 10  # what is drawn stays
    feed.step("a", steps_of(30, 10))
    feed.refuse = 503
    page.wait_for_function(
        "t => document.querySelector('#live .live-sentence').innerText === t",
        arg=live._TEXTS["full"],
    )
    feed.refuse = None
    wait_rows(page, 40)
    assert text_of(page, ".live-sentence") == "Nothing runs."
    feed.step("a", steps_of(20, 40))
    wait_rows(page, 60)
    assert points(page)["x"] == list(range(60))
    assert len(feed.asked) >= 3
    assert set(feed.asked) == {OWNER}


@pytest.mark.browser
def test_a_stream_that_is_silent_for_too_long_is_opened_again(visit, feed):
    page = visit(own_clock=True)
    for _ in range(3):
        feed.send(":\n\n")  # the beat keeps it open
        page.wait_for_timeout(300)
        page.clock.fast_forward(20_000)
    assert len(feed.asked) == 1
    feed.have("a", steps_of(5), steps=10)
    page.clock.fast_forward(31_000)
    page.clock.fast_forward(2_000)  # the pause before it tries again
    wait_rows(page, 5)
    assert len(feed.asked) == 2


@pytest.mark.browser
def test_a_reload_brings_the_whole_run_back(visit, feed):
    feed.have("a", steps_of(30), precision="bf16")
    page = visit()
    wait_rows(page, 30)
    page.reload()
    page.wait_for_function(f"{PLOT} && {PLOT}._fullData")
    wait_rows(page, 30)
    feed.step("a", steps_of(3, 30))
    wait_rows(page, 33)
    assert points(page)["x"] == list(range(33))


# ---------------------------------------------------------------- what is drawn


@pytest.mark.browser
def test_a_diverged_loss_is_a_gap_and_the_axes_stay_sane(visit, feed):
    losses = [10.9, 10.5, 12.0, 1e9, math.inf, math.nan]
    steps = [
        StepMetrics(step=i, loss=x, step_ms=200.0, tokens_per_sec=640.0, is_warmup=i < 2)
        for i, x in enumerate(losses)
    ]
    page = visit()
    feed.begin("a", precision="fp16")
    feed.step("a", steps, tiles=TILES | {"loss": None})
    wait_rows(page, 6)
    assert points(page)["y"] == [10.9, 10.5, 12.0, 1e9, None, None]
    low, high = axis_range(page, "yaxis")
    assert low < 10.5
    assert 12 < high <= 30
    notes = page.locator("#live .annotation-text").all_text_contents()
    assert "NaN or infinite at 2 steps, highest: 1.00e+9" in notes
    assert text_of(page, ".live-tile >> nth=2") == "Loss\nNaN"
    page.click("#live summary")
    assert "step 4, loss: inf, dt: 200.00ms" in text_of(page, ".live-lines")


@pytest.mark.browser
def test_the_ms_axis_is_the_measured_steps_and_warm_up_is_hollow(visit, feed):
    feed.have("a", steps_of(12), precision="bf16")
    page = visit()
    wait_rows(page, 12)
    low, high = axis_range(page, "yaxis2")
    assert low == 0
    assert 260 <= high < 300
    notes = page.locator("#live .annotation-text").all_text_contents()
    assert "2 warm-ups above: 900 ms, 800 ms" in notes
    colours = page.evaluate(f"{PLOT}.data[1].marker.color")
    assert colours == ["rgba(255,255,255,1)"] * 2 + ["#e69f00"] * 10


@pytest.mark.browser
def test_a_long_run_is_drawn_with_few_points_and_true_extremes(visit, feed):
    steps = steps_of(3000)
    steps[1111] = StepMetrics(
        step=1111, loss=3.25, step_ms=777.0, tokens_per_sec=1.0, is_warmup=False
    )
    page = visit()
    feed.begin("a", steps=3000)
    for start in range(0, 3000, 20):
        feed.step("a", steps[start : start + 20])
    page.wait_for_function(f"{PLOT}.data[0].x.at(-1) === 2999")
    loss, ms = points(page), points(page, 1)
    assert 300 <= len(loss["x"]) <= 750
    assert loss["x"] == sorted(set(loss["x"]))
    assert loss["x"][0] == 0
    assert max(np.diff(loss["x"])) < 60  # as fine at its start as at its end
    assert min(loss["y"]) == 3.25
    assert max(loss["y"]) == pytest.approx(max(s.loss for s in steps), abs=1e-6)
    assert max(ms["y"][2:]) == 777.0
    assert min(ms["y"]) == pytest.approx(min(s.step_ms for s in steps), abs=0.006)


@pytest.mark.browser
def test_runs_of_one_precision_differ_and_the_legend_hides_them(visit, feed):
    feed.have("a", steps_of(5), is_live=False, precision="bf16", B=2)
    feed.have("b", steps_of(5), is_live=False, precision="bf16", B=4)
    feed.have("c", steps_of(5), precision="tf32")
    page = visit()
    wait_rows(page, 5, trace=6)
    looks = page.evaluate(
        f"[0, 3, 6].map(i => {PLOT}.data[i]).map(t => [t.line.color, t.line.dash, t.marker.symbol])"
    )
    assert looks[0][0] == looks[1][0] == "#e69f00"
    assert looks[2][0] == "#0072b2"
    assert looks[0][1] != looks[1][1]
    assert len({look[2] for look in looks}) == 3
    page.click("#live .live-key >> nth=1")
    page.wait_for_function(f"[3, 4, 5].every(i => {PLOT}.data[i].visible === false)")
    assert page.get_attribute("#live .live-key >> nth=1", "aria-pressed") == "false"
    page.click("#live .live-key >> nth=1")
    page.wait_for_function(f"{PLOT}.data[3].visible === true")


def hovered(page: Page, lines: int) -> list[str]:
    """What the label says with the mouse in the loss panel's middle, once it has so many lines.

    A chart that is drawn anew meanwhile drops its label, until the mouse moves again.
    """
    box = page.locator("#live .nsewdrag").first.bounding_box()
    end = time.monotonic() + 20
    while True:
        for x in (5, box["width"] * 0.5):
            page.mouse.move(box["x"] + x, box["y"] + 20)
        for _ in range(10):
            said = page.evaluate(LABEL)
            if len(said) == lines and all(said):
                return said
            assert time.monotonic() < end, f"the label says {said}"
            page.wait_for_timeout(50)


@pytest.mark.browser
def test_one_hover_shows_every_run_with_units(visit, feed):
    feed.have("a", steps_of(9), is_live=False, precision="fp32")
    feed.have("b", steps_of(9, seed=1), precision="bf16")
    page = visit()
    wait_rows(page, 9, trace=3)
    said = hovered(page, 1 + 2)
    at = int(said[0].removeprefix("step "))
    for run_id, text in zip("ab", said[1:], strict=True):
        config, steps, _ = feed.runs[run_id]
        step = steps[at]
        rate = round(128 / step.step_ms * 1000)
        assert text.startswith(f"{config.label}: loss {step.loss:.4f}, {step.step_ms:.0f} ms")
        assert f"{rate} tok/s" in text


@pytest.mark.browser
def test_no_text_of_the_server_becomes_markup(visit, feed):
    feed.label = HOSTILE
    feed.have("a", steps_of(5))
    feed.status = {"state": "error", "text": HOSTILE, "done": 1, "steps": 5, "line": HOSTILE}
    feed.tiles = TILES | {"mem_gib": None, "mem_note": HOSTILE, "mfu": None, "mfu_note": HOSTILE}
    page = visit()
    wait_rows(page, 5)
    _, hover = hovered(page, 1 + 1)
    assert hover.startswith(f"{HOSTILE}: loss")
    for selector in (".live-sentence", ".live-place", ".live-key", ".live-heading"):
        assert page.locator(f"#live {selector}").text_content().strip() == HOSTILE
    assert page.locator("#live img, #live b").count() == 0
    assert page.evaluate("window.hacked") is None


@pytest.mark.browser
def test_dark_and_light_take_the_colours_of_the_page(visit, feed):
    feed.have("a", steps_of(5), precision="fp32")
    page = visit(theme="dark")
    wait_rows(page, 5)
    look = f"(() => [{PLOT}.data[0].line.color, {PLOT}._fullLayout.font.color])()"
    page_colour = "getComputedStyle(document.querySelector('#live .live')).color"

    def shown():
        line, font = page.evaluate(look)
        rgb = [int(part) for part in font.split("(")[1].split(")")[0].split(",")[:3]]
        wanted = page.evaluate(page_colour).split("(")[1].rstrip(")").split(",")[:3]
        assert rgb == [int(part) for part in wanted]
        return line, rgb

    line, rgb = shown()
    assert line == "#ffffff"
    assert min(rgb) > 150
    page.evaluate("document.body.classList.remove('dark')")
    page.wait_for_function(f"{PLOT}.data[0].line.color === '#000000'")
    line, rgb = shown()
    assert max(rgb) < 100


@pytest.mark.browser
def test_nothing_is_clipped_on_a_desktop_or_a_phone(visit, feed):
    for nth, precision in enumerate(("fp32", "tf32", "bf16", "fp16", "fp64")):
        feed.have(str(nth), steps_of(9), precision=precision, attention="sdpa", vocab_size=50304)
    feed.status = {"state": "running", "text": "Training GPT-2 124M in bf16.", "left_s": 4000.0}
    feed.status |= {"done": 4999, "steps": 5000, "line": "2nd in line, about 40 s", "mine": True}
    feed.tiles = TILES | {"ms": 12345.6, "tps": 1234567.8, "mfu": None}
    feed.tiles["mfu_note"] = "no published peak for this CPU"
    page = visit(width=840, height=1200)
    wait_rows(page, 9, trace=12)
    page.click("#live summary")
    for width in (840, 390):
        page.set_viewport_size({"width": width, "height": 1200})
        page.wait_for_function(
            f"(() => {{const box = {PLOT}.getBoundingClientRect();"
            f"return box.right < {width} && {PLOT}._fullLayout.width === Math.round(box.width)}})()"
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CLIPPED) == []
        tops = [box.bounding_box()["y"] for box in page.locator("#live .nsewdrag").all()]
        assert len({round(top) for top in tops}) == 3  # stacked


# ---------------------------------------------------------------- cost


@pytest.mark.browser
def test_a_thousand_updates_leave_heap_and_nodes_flat_and_are_small(visit, feed):
    page = visit()
    cdp = page.context.new_cdp_session(page)
    for domain in ("HeapProfiler", "Network"):
        cdp.send(f"{domain}.enable")
    received = []
    cdp.on("Network.dataReceived", lambda event: received.append(event["dataLength"]))

    def update(count):
        for _ in range(count):
            done = len(feed.runs["a"][1])
            status = {"state": "running", "text": "Training GPT-2 124M in bf16.", "done": done}
            status |= {"steps": 5000, "left_s": 5000.0 - done, "line": None, "mine": False}
            tiles = TILES | {"loss": 9.0 + done / 1e4, "ms": 254.5 + done / 1e3}
            feed.step("a", steps_of(4, done), partial=True, status=status, tiles=tiles)
            time.sleep(0.006)
        page.wait_for_function(f"{PLOT}.data[0].x.at(-1) === {len(feed.runs['a'][1]) - 1}")

    def sizes():
        cdp.send("HeapProfiler.collectGarbage")
        heap = cdp.send("Runtime.getHeapUsage")["usedSize"]
        counts = cdp.send("Memory.getDOMCounters")
        return heap, counts["nodes"], counts["jsEventListeners"]

    feed.begin("a", precision="bf16", steps=5000)
    update(250)  # to the first re-binning: from here on nothing may grow
    before = sizes()
    received.clear()
    update(1000)
    after = sizes()
    per_update = sum(received) / 1000
    print(f"heap {before[0]:,} -> {after[0]:,}; nodes {before[1]:,} -> {after[1]:,}")
    print(f"{per_update:.0f} bytes an update; {len(feed.asked)} streams")
    # what a redraw holds differs by up to 750 - 500 points of three traces, in heap and nodes
    assert after[0] - before[0] < 3_000_000
    assert after[1] - before[1] < 600
    assert after[2] - before[2] < 50
    assert per_update < 700
    assert page.locator("#live .live-lines").evaluate("e => e.childNodes.length") <= 200


STATUS = {"state": "running", "text": "Training GPT-2 124M in bf16.", "done": 12, "steps": 50}
STATUS |= {"left_s": 12.3456789, "line": None, "mine": True}


def test_a_normal_message_is_small_and_strict_json():
    rows = ("a1b2c3", charts.delta_rows(steps_of(12), 8))
    whole = live.message(rows=rows, status=STATUS, tiles=TILES)
    assert len(whole.encode()) < 450
    assert json.loads(whole)["status"] == STATUS | {"left_s": 12.3457}
    now = {"ms": 255.5, "p25": 250.25, "p75": 262.0, "tps": 500.125, "loss": 9.75}
    status = live.changes(STATUS, STATUS | {"done": 16})
    tiles = live.changes(TILES, TILES | now)
    assert (status, tiles) == ({"done": 16}, now)
    part = live.message(rows=rows, status=status, tiles=tiles, partial=True)
    assert len(part.encode()) < 300
    assert live.changes({"steps": 5, "done": 1}, {"done": 1}) == {"steps": None}
    assert live.changes(None, {"done": 1}) == {"done": 1}
    with pytest.raises(ValueError, match="not JSON compliant"):
        live.message(tiles=TILES | {"ms": math.nan})


@pytest.mark.browser
def test_status_and_tiles_come_whole_or_as_what_changed(visit, feed):
    feed.status = STATUS
    page = visit()
    assert text_of(page, ".live-count") == "step 12 of 50, about 12 s left"
    feed.tell(partial=True, status=STATUS | {"done": 13}, tiles=TILES)
    page.wait_for_function("document.querySelector('#live progress').value === 13")
    assert text_of(page, ".live-count") == "step 13 of 50, about 12 s left"
    assert text_of(page, ".live-tile >> nth=3") == "Peak memory\n2.34 GiB"
    unknown = {"mem_gib": None, "mem_note": "not measured on a CPU"}
    feed.tell(partial=True, tiles=TILES | unknown)
    feed.tell(status=IDLE)  # whole: nothing of the run is left
    page.wait_for_function("document.querySelector('#live .live-count').textContent === ''")
    assert text_of(page, ".live-sentence") == "Nothing runs."
    assert text_of(page, ".live-tile >> nth=3") == "Peak memory\nunknown\nnot measured on a CPU"
    assert text_of(page, ".live-tile >> nth=0").startswith("Step time\n255 ms/step")


@pytest.mark.browser
def test_a_room_asks_for_the_rest_of_the_page_in_turn(visit, feed):
    def around(page_id, **status):
        feed.tell(partial=True, status=feed.status | {"page": page_id} | status)

    def ticked(times):
        page.wait_for_timeout(50)
        end = time.monotonic() + 10
        while feed.ticks < times and time.monotonic() < end:
            page.wait_for_timeout(50)
        return feed.ticks

    feed.status = STATUS | {"stop": False, "page": "a", "mine": False, "room": 16}
    page = visit()
    assert ticked(1) == 1  # an opened page at once
    page.evaluate("Math.random = () => 0.9")
    around("b", mine=False)
    around("c", mine=False)
    started = time.monotonic()
    assert ticked(2) == 2  # somebody else's run: once, and a little later
    assert time.monotonic() - started > 0.5
    around("d", mine=False)
    around("d", mine=False, stop=True)  # what the viewer can stop: at once, and then no more
    started = time.monotonic()
    assert ticked(3) == 3
    assert time.monotonic() - started < 0.8
    page.wait_for_timeout(1300)
    assert feed.ticks == 3
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    around("e", mine=True, stop=True)
    page.wait_for_timeout(500)
    assert feed.ticks == 3  # nobody sees it
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    assert ticked(4) == 4


# ---------------------------------------------------------------- plotly.js


def test_plotly_comes_from_the_installed_package_and_is_kept_by_browsers():
    installed = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    (route,) = live.plotly_route()
    with TestClient(Starlette(routes=[route])) as client:
        for accepted, encoding in (("gzip, br", "gzip"), ("identity", None)):
            with client.stream("GET", route.path, headers={"accept-encoding": accepted}) as got:
                raw = b"".join(got.iter_raw())
            assert got.headers.get("content-encoding") == encoding
            assert "immutable" in got.headers["cache-control"]
            assert got.headers["content-type"].startswith("text/javascript")
            assert (gzip.decompress(raw) if encoding else raw) == installed.read_bytes()
        assert client.get(route.path.replace("plotly-", "plotly-0")).status_code == 404


@contextmanager
def mounted(feed, prefix):
    """The page below a prefix, as behind a reverse proxy."""
    app = gr.mount_gradio_app(
        FastAPI(), build(feed), path=prefix, app_kwargs={"routes": routes(feed)}, css=CSS
    )
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}{prefix}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)


@pytest.mark.browser
def test_the_chart_loads_below_a_prefix(browser):
    feed = Feed()
    feed.have("a", steps_of(5))
    with mounted(feed, "/some/prefix") as address:
        page = browser.new_page()
        page.goto(address)
        page.wait_for_function(f"{PLOT} && {PLOT}._fullData")
        wait_rows(page, 5)
        feed.end()
        page.close()
