"""The fit map: where things lie on it, and what a real browser draws and gives back."""

import asyncio
import io
import json
import queue
import re
import time
from pathlib import Path

import gradio as gr
import numpy as np
import pytest
from browser import Person, served
from PIL import Image

from gpt2demo import charts, map_figure
from gpt2demo.ui import fit_map as ui
from gpt2demo.ui import live
from gpt2demo.ui.listening import EACH

# gradio's own statistics of its queue use what pandas 3 deprecates
pytestmark = pytest.mark.filterwarnings("ignore::pandas.errors.Pandas4Warning")

ASSETS = Path(__file__).parents[1] / "assets"
CSS = "\n".join((ASSETS / name).read_text("utf-8") for name in ("style.css", "fit_map.css"))
PLOT = "document.querySelector('#fit-map .fit-map-plot')"
HOSTILE = '<img src=x onerror="window.hacked=1"><b>bold</b>'
GIB = 2**30

B = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
T = [8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024]
CAPACITY = 16 * GIB
VERDICTS = ("fits", "may fail", "will not fit")
HINT = "Click a cell to set B and T, or reach it with the arrow keys and press Enter."


def need(b, t):
    """Peak bytes that the tests invent: a floor of 2 GiB, and 1.1 MiB a token."""
    return round(2 * GIB + 1.1 * b * t * 2**20)


def verdict(peak, capacity=CAPACITY):
    if capacity is None:
        return "unknown"
    return "will not fit" if peak > capacity else "may fail" if 1.12 * peak > capacity else "fits"


def grid(capacity=CAPACITY, lengths=T):
    peaks = [[need(b, t) for t in lengths] for b in B]
    verdicts = [[verdict(peak, capacity) for peak in row] for row in peaks]
    return {"B": B, "T": lengths, "peak_bytes": peaks, "verdict": verdicts}


def frontier(share=1.0, most=256):
    """The largest B of the invented formula that fits with `share` of its memory a token."""
    room = (CAPACITY / 1.12 - 2 * GIB) / (1.1 * 2**20 * share)
    return [min(most, int(room // t)) for t in T]


FRONTIERS = {"fp32": frontier(), "tf32": frontier(), "bf16": frontier(0.8), "fp16": frontier(0.8)}
MARKS = [
    {"B": 4, "T": 1024, "passed": True, "label": "bf16 B=4 T=1024: peak 6.4 GiB"},
    {"B": 5, "T": 200, "passed": True, "label": "fp32 B=5 T=200: peak 3.1 GiB"},
    {"B": 16, "T": 1024, "passed": False, "label": "fp32 B=16 T=1024: out of memory in step 1"},
]


def message(
    capacity=CAPACITY, current=(8, 512), precision="bf16", frontiers=FRONTIERS, marks=MARKS, t=T
):
    return ui.fit_map_message(grid(capacity, t), capacity, current, precision, frontiers, marks)


def interp(size, sizes):
    return float(np.interp(np.log2(size), np.log2(sizes), np.arange(len(sizes))))


# ---------------------------------------------------------------- where things lie


def test_a_size_lies_between_its_neighbours_as_its_logarithm_does():
    for sizes in (B, T):
        for size in range(sizes[0], sizes[-1] + 1):
            assert map_figure.place(size, sizes) == pytest.approx(interp(size, sizes), abs=1e-4)
    assert [map_figure.place(size, B) for size in B] == list(range(16))


def test_a_size_beyond_the_grid_lies_on_the_edge_of_the_map():
    assert map_figure.place(0, B) == -0.5
    assert map_figure.place(1, [2, 4]) == -0.5
    assert 15 < map_figure.place(257, B) < 15.1
    assert map_figure.place(4096, B) == 15.5


def test_equal_frontiers_are_one_line_and_the_chosen_one_is_strong_and_last():
    lines = map_figure.frontier_lines(FRONTIERS | {"fp64": [0] * 16}, B, "tf32")
    assert [line["name"] for line in lines] == ["bf16 = fp16", "fp64", "fp32 = TF32"]
    assert [line["chosen"] for line in lines] == [False, False, True]
    assert [line["precision"] for line in lines] == ["bf16", "fp64", "tf32"]
    assert [line["dash"] for line in lines] == [charts.DASHES[2], charts.DASHES[4], "solid"]
    assert lines[1]["y"] == [-0.5] * 16
    assert lines[2]["largest"] == FRONTIERS["tf32"]
    wanted = [interp(b, B) for b in FRONTIERS["tf32"]]
    assert lines[2]["y"] == pytest.approx(wanted, abs=1e-4)
    # B=256 is the sliders' end, and nothing lies above it
    assert lines[2]["y"][0] == 15


def test_the_message_is_whole_small_and_strict_json():
    many = [
        {"B": b, "T": t, "passed": b < 9, "label": f"bf16 B={b} T={t} fused AdamW compiled: ran"}
        for b, t in zip(B * 3, [8 * k for k in range(1, 49)], strict=True)
    ]
    frontiers = {p: [k + 1 for k in frontier(0.7 + n / 10)] for n, p in enumerate(charts.PALETTE)}
    text = message(frontiers=frontiers, marks=many)
    assert len(text.encode()) < 7000
    assert len(message().encode()) < 4000
    told = json.loads(text)
    assert (told["B"], told["T"], told["capacity"]) == (B, T, 16)
    peaks = np.array(grid()["peak_bytes"]) / GIB
    np.testing.assert_allclose(told["gib"], peaks, rtol=1e-4)
    assert [list(row) for row in told["verdict"]] == [[v[0] for v in r] for r in grid()["verdict"]]
    assert told["current"] == {"B": 8, "T": 512, "x": 11, "y": 5}
    assert [mark["B"] for mark in told["marks"]] == [mark["B"] for mark in many[-30:]]
    unknown = json.loads(message(None))
    assert (unknown["capacity"], unknown["lines"]) == (None, [])
    assert {*"".join(unknown["verdict"])} == {"u"}


def test_marks_of_one_setting_are_one_mark_with_all_their_labels():
    runs = [MARKS[0], MARKS[0] | {"label": "again"}, MARKS[0] | {"passed": False, "label": "OOM"}]
    marks = json.loads(message(marks=runs))["marks"]
    assert [(mark["x"], mark["y"], mark["passed"]) for mark in marks] == [
        (15, 3, True),
        (15, 3, False),
    ]
    assert all(mark["labels"] == [run["label"] for run in runs] for mark in marks)


def luminance(colour):
    parts = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_verdicts_differ_in_lightness_or_in_blue_against_orange(theme):
    cells = {name: colours[theme] for name, colours in map_figure.CELLS.items()}

    def contrast(one, other):
        high, low = sorted((luminance(one) + 0.05, luminance(other) + 0.05), reverse=True)
        return high / low

    assert contrast(cells["may fail"][0], cells["will not fit"][0]) > 2
    assert contrast(*cells["fits"]) > 2
    assert contrast(*cells["unknown"]) > 2
    # what fits is bluer than red, what may not is redder than blue
    assert all(int(c[5:7], 16) > int(c[1:3], 16) for c in cells["fits"])
    others = cells["may fail"] + cells["will not fit"]
    assert all(int(c[1:3], 16) > int(c[5:7], 16) for c in others)


# ---------------------------------------------------------------- the page


class Feed:
    """What the open page is told, and what it tells back."""

    def __init__(self):
        self.chosen = queue.Queue()  # (B, T) of every select
        self.first = None
        self.messages = None

    async def watch(self):
        self.loop = asyncio.get_running_loop()
        mine = self.messages = asyncio.Queue()
        yield self.first
        while (text := await mine.get()) is not None:
            yield text

    def tell(self, text):
        self.loop.call_soon_threadsafe(self.messages.put_nowait, text)

    def end(self):
        if self.messages is not None:
            self.tell(None)
            self.messages = None

    def choose(self, event: gr.EventData):
        self.chosen.put((event.B, event.T))
        time.sleep(0.2)  # the next click comes while the answer is on its way
        return event.B, event.T


def build(feed):
    with gr.Blocks(analytics_enabled=False) as demo:
        view = ui.fit_map_view()
        sliders = [
            gr.Slider(1, 256, 1, step=1, elem_id="B"),
            gr.Slider(8, 1024, 8, step=8, elem_id="T"),
        ]
        demo.load(feed.watch, None, view, show_progress="hidden", concurrency_limit=None)
        view.select(feed.choose, None, sliders, **EACH)
    return demo


@pytest.fixture(scope="module")
def feed():
    return Feed()


@pytest.fixture(scope="module")
def url(feed):
    with served(build(feed), css=CSS, app_kwargs={"routes": live.plotly_route()}) as address:
        yield address
        feed.end()


@pytest.fixture
def visit(browser, url, feed):
    """Opens the page; afterwards nothing went wrong in it and it asked no other host."""
    feed.chosen = queue.Queue()
    people, hosts, errors = [], set(), []

    def go(first, theme="light", width=880, height=900, **context):
        feed.first = first
        people.append(Person(browser, viewport={"width": width, "height": height}, **context))
        page = people[-1].new_page()
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        page.on("pageerror", lambda error: errors.append(error.stack or str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.goto(f"{url}/?__theme={theme}")
        if first:
            page.wait_for_function(f"{PLOT} && {PLOT}._fullData", polling=100)
        return page

    yield go
    feed.end()
    for person in people:
        person.close()
    assert errors == []
    assert hosts <= {url.split("/")[2]}


def full(page):
    """What plotly drew: name, places, numbers and texts of every trace."""
    traces = page.evaluate(
        f"{PLOT}._fullData.map(({{name, type, mode, x, y, z, text, line, marker, uid}}) =>"
        "({name, type, mode, x, y, z, text, line, marker, uid}))"
    )
    return {trace["uid"]: trace for trace in traces}


def box_of(page):
    return page.locator("#fit-map .nsewdrag").bounding_box()


def pixel(page, column, row, box=None):
    """Where a place of the whole map lies on the page, in px."""
    box = box or box_of(page)
    x = box["x"] + (column + 0.5) / 16 * box["width"]
    return x, box["y"] + box["height"] * (1 - (row + 0.5) / 16)


def point_at(page, b, t):
    """Moves the mouse onto the cell, and says what the hover label says."""
    x, y = pixel(page, T.index(t), B.index(b))
    page.mouse.move(x - 3, y - 2)
    page.mouse.move(x, y)
    page.wait_for_function(
        "start => document.querySelector('#fit-map .hovertext')?.textContent.startsWith(start)",
        arg=f"B={b}, T={t}:",
        polling=100,
    )
    return hover_lines(page)


def hover_lines(page):
    return page.locator("#fit-map .hovertext").evaluate(
        """label => {
            const lines = [...label.querySelectorAll('tspan.line')].map(line => line.textContent);
            return lines.length ? lines : [label.textContent];
        }"""
    )


def wait_current(page, b, t):
    page.wait_for_function(
        "([b, t]) => [...document.querySelectorAll('.fit-map-key')]"
        f".some(key => key.textContent === `now: B=${{b}}, T=${{t}}`) && {PLOT}._fullData"
        ".at(-1).customdata[0].join() === [b, t].join()",
        arg=[b, t],
        polling=100,
    )


def legend(page):
    return page.locator("#fit-map .fit-map-key").all_inner_texts()


def axis_range(page, name):
    return page.evaluate(f"n => {PLOT}._fullLayout[n].range", name)


def mixed(colours, share):
    ends = [[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in colours]
    return [low + (high - low) * share for low, high in zip(*ends, strict=True)]


@pytest.mark.browser
def test_an_empty_map_says_what_will_appear_and_then_fills(visit, feed):
    page = visit(None)
    page.wait_for_selector("#fit-map .fit-map-empty")
    assert page.locator("#fit-map .fit-map").get_attribute("aria-label").startswith("Fit map: peak")
    assert "what fits appears here" in page.inner_text("#fit-map .fit-map-empty")
    assert page.locator("#fit-map .fit-map-chart").is_hidden()
    feed.tell(message())
    page.wait_for_function(f"{PLOT}._fullData", polling=100)
    assert page.locator("#fit-map .fit-map-empty").is_hidden()
    feed.tell("")
    page.wait_for_selector("#fit-map .fit-map-empty:visible")


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_cell_has_its_number_and_its_colour(visit, theme):
    page = visit(message(frontiers={}, marks=[], current=(3, 16)), theme=theme)
    wait_current(page, 3, 16)
    traces = [full(page)[f"cells-{verdict[0]}"] for verdict in VERDICTS]
    assert [trace["name"] for trace in traces] == list(VERDICTS)
    box = page.locator("#fit-map .fit-map-plot").bounding_box()
    inner = box_of(page)
    shot = Image.open(io.BytesIO(page.locator("#fit-map .fit-map-plot").screenshot()))
    counts = dict.fromkeys(VERDICTS, 0)
    for row, b in enumerate(B):
        for column, t in enumerate(T):
            gib, verdict_ = need(b, t) / GIB, verdict(need(b, t))
            counts[verdict_] += 1
            shown = {trace["name"]: trace["z"][row][column] for trace in traces}
            assert shown == dict.fromkeys(VERDICTS) | {verdict_: pytest.approx(gib, rel=1e-4)}
            # beside the ring of the current setting
            x, y = pixel(page, column - 0.35, row + 0.3, inner)
            seen = shot.getpixel((int(x - box["x"]), int(y - box["y"])))[:3]
            colours = map_figure.CELLS[verdict_][theme]
            assert seen == pytest.approx(mixed(colours, min(gib / 16, 1)), abs=3), (b, t)
    assert min(counts.values()) > 5


@pytest.mark.browser
def test_hover_and_legend_say_it_in_words_with_units(visit, feed):
    page = visit(message())
    wait_current(page, 8, 512)
    peak = need(8, 384) / GIB
    most = FRONTIERS["bf16"][T.index(384)]
    assert point_at(page, 8, 384) == [
        f"B=8, T=384: {peak:.1f} of 16.0 GiB, fits",
        f"at T=384, B={most} still fits",
    ]
    assert point_at(page, 64, 384)[0].endswith(" of 16.0 GiB, will not fit")
    assert legend(page) == [
        "fits (0 to 16.0 GiB)",
        "may fail",
        "will not fit",
        "largest B that fits: bf16 = fp16",
        "fp32 = TF32",
        "now: B=8, T=512",
        "ran",
        "out of memory",
    ]
    assert page.inner_text("#fit-map .fit-map-note") == HINT
    x, y = pixel(page, interp(200, T), interp(5, B))
    page.mouse.move(x + 2, y - 2)
    wanted = MARKS[1]["label"]
    page.wait_for_function(
        "text => document.querySelector('#fit-map .hovertext')?.textContent === text",
        arg=wanted,
        polling=100,
    )
    feed.tell(message(frontiers={"bf16": [0] * 16, "fp32": FRONTIERS["fp32"]}, marks=[]))
    page.wait_for_function("document.querySelectorAll('.fit-map-key').length === 6", polling=100)
    assert legend(page)[3:5] == ["largest B that fits: bf16 (none)", "fp32"]
    assert point_at(page, 2, 384)[1] == "at T=384 no B fits"
    # need and limit never read the same
    limit = need(8, 384) - 10 * 2**20
    feed.tell(ui.fit_map_message(grid(limit), limit, (1, 8), "bf16", {}))
    wait_current(page, 1, 8)
    figures = f"{need(8, 384) / GIB:.2f} of {limit / GIB:.2f} GiB"
    assert point_at(page, 8, 384) == [f"B=8, T=384: {figures}, will not fit"]


@pytest.mark.browser
def test_a_click_gives_exactly_the_cell_below_it(visit, feed):
    page = visit(message())
    wait_current(page, 8, 512)
    cells = [(1, 8), (256, 1024), (1, 1024), (256, 8), (24, 320)]
    for b, t in cells:
        page.mouse.click(*pixel(page, T.index(t), B.index(b)))
        assert feed.chosen.get(timeout=20) == (b, t)
        page.wait_for_function(
            "([b, t]) => document.querySelector('#B input').value == b"
            " && document.querySelector('#T input').value == t",
            arg=[b, t],
            polling=100,
        )
    # close to a cell's edge it is still that cell
    page.mouse.click(*pixel(page, 3.44, 9.42))
    assert feed.chosen.get(timeout=20) == (B[9], T[3])
    # a mark between grid lines gives its own setting
    page.mouse.click(*pixel(page, interp(200, T), interp(5, B)))
    assert feed.chosen.get(timeout=20) == (5, 200)
    assert feed.chosen.empty()


@pytest.mark.browser
def test_a_tap_on_a_phone_chooses_too(visit, feed):
    page = visit(message(), width=390, has_touch=True, is_mobile=True)
    wait_current(page, 8, 512)
    page.touchscreen.tap(*pixel(page, 2, 6))
    assert feed.chosen.get(timeout=20) == (B[6], T[2])


@pytest.mark.browser
def test_frontiers_marks_and_the_current_setting_lie_where_they_belong(visit, feed):
    page = visit(message(current=(7, 500)))
    wait_current(page, 7, 500)
    traces = full(page)
    for uid, precision in (("frontier-bf16", "bf16"), ("frontier-fp32", "fp32")):
        line = traces[uid]
        assert line["x"] == list(range(16))
        wanted = [interp(b, B) for b in FRONTIERS[precision]]
        assert line["y"] == pytest.approx(wanted, abs=1e-4)
        assert line["line"]["color"] == charts.PALETTE[precision]["light"]
        below = traces[uid.replace("frontier", "below")]
        assert (below["x"], below["y"]) == (line["x"], line["y"])
    assert traces["frontier-bf16"]["name"] == "bf16 = fp16"
    assert traces["frontier-bf16"]["line"]["width"] > traces["frontier-fp32"]["line"]["width"]
    assert list(traces).index("frontier-bf16") > list(traces).index("frontier-fp32")
    ran, failed, now = traces["ran"], traces["out-of-memory"], traces["now"]
    assert ran["x"] == pytest.approx([interp(t, T) for t in (1024, 200)], abs=1e-4)
    assert ran["y"] == pytest.approx([interp(b, B) for b in (4, 5)], abs=1e-4)
    assert (failed["x"], failed["y"]) == ([15], [7])
    assert [t["marker"]["symbol"] for t in (ran, failed, now)] == ["circle", "x", "circle-open"]
    assert now["x"] == [pytest.approx(interp(500, T), abs=1e-4)]
    assert now["y"] == [pytest.approx(interp(7, B), abs=1e-4)]
    # and in the drawing itself: the ring and the strong line's points, in px
    nth = page.evaluate(f"{PLOT}._fullData.map(t => t.uid)").index("now")
    ring = page.locator(f"#fit-map .scatter.trace{traces['now']['uid']} .point").bounding_box()
    assert nth == len(traces) - 1
    centre = (ring["x"] + ring["width"] / 2, ring["y"] + ring["height"] / 2)
    assert centre == pytest.approx(pixel(page, interp(500, T), interp(7, B)), abs=1)
    path = page.locator("#fit-map .tracefrontier-bf16 .js-line").get_attribute("d")
    drawn = np.array(re.findall(r"-?[\d.]+", path), float).reshape(-1, 2)
    box = box_of(page)
    rows = (1 - drawn[:, 1] / box["height"]) * 16 - 0.5
    columns = drawn[:, 0] / box["width"] * 16 - 0.5
    wanted = np.interp(columns, np.arange(16), [interp(b, B) for b in FRONTIERS["bf16"]])
    np.testing.assert_allclose(rows, wanted, atol=0.05)


@pytest.mark.browser
def test_an_update_moves_the_setting_and_keeps_node_hover_and_size(visit, feed):
    page = visit(message(current=(8, 512)))
    wait_current(page, 8, 512)
    page.evaluate(f"{PLOT}.mark = 1")
    said = point_at(page, 8, 384)
    for step in range(1, 6):
        feed.tell(message(current=(8 + step, 512 + 8 * step)))
        wait_current(page, 8 + step, 512 + 8 * step)
    now = full(page)["now"]
    assert now["x"] == [pytest.approx(interp(552, T), abs=1e-4)]
    assert now["y"] == [pytest.approx(interp(13, B), abs=1e-4)]
    assert page.evaluate(f"{PLOT}.mark") == 1
    assert page.locator("#fit-map .fit-map-plot").count() == 1
    assert page.locator("#fit-map .fit-map-plot > .plot-container").count() == 1
    assert hover_lines(page) == said
    # another model's shorter axis, and back
    feed.tell(message(current=(2, 8), t=T[:8], frontiers={}))
    wait_current(page, 2, 8)
    assert axis_range(page, "xaxis") == [-0.5, 7.5]
    feed.tell(message(current=(2, 16)))
    wait_current(page, 2, 16)
    assert axis_range(page, "xaxis") == [-0.5, 15.5]
    assert axis_range(page, "yaxis") == [-0.5, 15.5]


@pytest.mark.browser
def test_a_zoom_survives_and_a_double_click_ends_it_and_chooses_nothing(visit, feed):
    page = visit(message(current=(8, 512)))
    wait_current(page, 8, 512)
    page.mouse.move(*pixel(page, 4, 12))
    page.mouse.down()
    page.mouse.move(*pixel(page, 11, 3), steps=4)
    page.mouse.up()
    page.wait_for_function(f"{PLOT}._fullLayout.xaxis.autorange === false", polling=100)
    zoomed = [axis_range(page, name) for name in ("xaxis", "yaxis")]
    assert zoomed == [pytest.approx([4, 11], abs=0.1), pytest.approx([3, 12], abs=0.1)]
    feed.tell(message(current=(6, 256)))
    wait_current(page, 6, 256)
    page.evaluate("document.body.classList.toggle('dark')")
    page.wait_for_function(f"{PLOT}.data.at(-1).marker.color !== 'rgba(0,0,0,1)'", polling=100)
    assert [axis_range(page, name) for name in ("xaxis", "yaxis")] == zoomed
    # sooner, plotly takes the next click and the drag's own for a double one
    page.wait_for_function(f"Date.now() - {PLOT}._mouseDownTime > 350", polling=100)
    box = box_of(page)
    spot = (box["x"] + box["width"] * 3 / 7, box["y"] + box["height"] * 5.05 / 9)
    page.mouse.click(*spot)
    assert feed.chosen.get(timeout=20) == (B[7], T[7])
    page.mouse.dblclick(*spot)
    page.wait_for_function(f"{PLOT}._fullLayout.xaxis.range[1] === 15.5", polling=100)
    page.mouse.click(*pixel(page, 1, 1))
    assert feed.chosen.get(timeout=20) == (2, 16)
    assert feed.chosen.empty()


@pytest.mark.browser
def test_without_a_limit_the_map_is_grey_and_says_so(visit):
    page = visit(message(None))
    wait_current(page, 8, 512)
    traces = full(page)
    assert not any(uid.startswith("frontier") for uid in traces)
    peaks = np.array(grid()["peak_bytes"]) / GIB
    np.testing.assert_allclose(np.array(traces["cells-u"]["z"], float), peaks, rtol=1e-4)
    shot = Image.open(io.BytesIO(page.screenshot()))
    seen = [shot.getpixel(tuple(map(int, pixel(page, k - 0.35, k + 0.3))))[:3] for k in range(16)]
    assert all(max(colour) - min(colour) < 8 for colour in seen)
    assert [colour[0] for colour in seen] == sorted((c[0] for c in seen), reverse=True)
    assert seen[0][0] - seen[15][0] > 100
    assert point_at(page, 8, 384) == [f"B=8, T=384: {need(8, 384) / GIB:.1f} GiB"]
    assert legend(page)[0] == f"peak of {peaks.min():.1f} to {peaks.max():.1f} GiB"
    assert "memory of this device is unknown" in page.inner_text("#fit-map .fit-map-note")


@pytest.mark.browser
def test_dark_and_light_follow_the_page(visit):
    page = visit(message(precision="fp32"), theme="dark")
    wait_current(page, 8, 512)
    for theme in ("dark", "light"):
        wanted = charts.PALETTE["fp32"][theme]
        page.wait_for_function(
            f"colour => {PLOT}._fullData.find(t => t.uid === 'frontier-fp32').line.color"
            " === colour",
            arg=wanted,
            polling=100,
        )
        text = page.evaluate(
            "getComputedStyle(document.querySelector('.fit-map-chart')).color.match(/\\d+/g)"
        )
        look = page.evaluate(f"{PLOT}._fullLayout.font.color.match(/\\d+/g)")
        assert look[:3] == text[:3]
        swatch = page.locator(".fit-map-swatch >> nth=1").evaluate(
            "swatch => getComputedStyle(swatch).backgroundImage"
        )
        colour = mixed(map_figure.CELLS["may fail"][theme], 0)
        assert f"rgb({', '.join(str(round(part)) for part in colour)})" in swatch
        page.evaluate("document.body.classList.toggle('dark')")


@pytest.mark.browser
def test_no_text_of_the_server_becomes_markup(visit):
    page = visit(message(marks=[MARKS[1] | {"label": HOSTILE}]))
    wait_current(page, 8, 512)
    x, y = pixel(page, interp(200, T), interp(5, B))
    page.mouse.move(x - 30, y)
    page.mouse.move(x, y)
    page.wait_for_function(
        "text => document.querySelector('#fit-map .hovertext')?.textContent === text",
        arg=HOSTILE,
        polling=100,
    )
    assert page.locator("#fit-map img, #fit-map b").count() == 0
    assert page.evaluate("window.hacked") is None


# elements of the view that reach out of the window, or hold more than they show
CLIPPED = """() => [...document.querySelectorAll('#fit-map *')].filter((e) => {
    if (e.closest('defs, .modebar')) return false;
    const box = e.getBoundingClientRect();
    const outside = box.right > innerWidth + 0.5 || box.left < -0.5;
    const inline = getComputedStyle(e).display === 'inline';
    const cut = e instanceof HTMLElement && !inline && e.scrollWidth > e.clientWidth + 1;
    return box.width && (outside || cut);
}).map((e) => e.outerHTML.slice(0, 90))"""
# texts of the drawing that leave it, and neighbours on the x axis that touch
CROWDED = f"""() => {{
    const inside = {PLOT}.getBoundingClientRect();
    const boxes = (s) => [...{PLOT}.querySelectorAll(s)].map((e) => e.getBoundingClientRect());
    const out = boxes('text').filter((b) => b.width &&
        (b.left < inside.left || b.right > inside.right + 0.5 || b.bottom > inside.bottom));
    const ticks = boxes('.xtick text').filter((b) => b.width);
    const touching = ticks.slice(1).filter((b, i) => b.left < ticks[i].right + 3);
    return [out.length, touching.length, ticks.length];
}}"""


@pytest.mark.browser
def test_nothing_is_clipped_on_a_desktop_or_a_phone(visit):
    frontiers = {p: frontier(0.6 + n / 10) for n, p in enumerate(charts.PALETTE)}
    page = visit(message(frontiers=frontiers))
    wait_current(page, 8, 512)
    for width, ticks in ((880, 16), (390, 8)):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(
            f"n => [...{PLOT}.querySelectorAll('.xtick text')]"
            ".filter(e => e.textContent).length === n",
            arg=ticks,
            polling=100,
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CLIPPED) == []
        assert page.evaluate(CROWDED) == [0, 0, ticks]
        assert page.locator(".ytick text").count() == 16
        for column in (0, 5, 8, 10, 15):
            point_at(page, 32, T[column])
            label = page.locator("#fit-map .hovertext path").bounding_box()
            assert label["x"] >= 0
            assert label["x"] + label["width"] <= width
    assert page.locator(".xtick text").last.text_content() == "1024"
