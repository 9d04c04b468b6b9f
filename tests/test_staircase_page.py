"""The staircase as a figure, as a table, and on the page in a real browser."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
from browser import Person, open_tab, served
from playwright.sync_api import Page
from test_staircase import CONFIG, IDS, NATIVE, NO_COMPILER, climb, record

from gpt2demo.charts import PALETTE
from gpt2demo.config import RunConfig, Settings
from gpt2demo.hub import Hub
from gpt2demo.records import RunSummary
from gpt2demo.staircase import Staircase
from gpt2demo.staircase_figure import staircase_figure, staircase_table
from gpt2demo.support import cpu_support

LESSON = [1, 0.333, 0.3, 0.13, 0.096, 0.093, 0.09]
NORMAL_TYPE = SimpleNamespace(query_params={})  # a page asked for as it is
MS = {
    "fp32": 800.0,
    "tf32": 800.0,
    "bf16": 500.0,
    "compile": 400.0,
    "sdpa": 410.0,
    "vocab": 300.0,
    "fused": 200.0,
}


def climbed(endings: dict | None = None, support: dict | None = None) -> Staircase:
    staircase = Staircase(CONFIG, support or NATIVE)
    climb(staircase, endings, MS)
    return staircase


# --- the figure


def test_bars_hang_between_each_rung_and_the_one_before():
    here, saved, lost, lesson = staircase_figure(climbed().results()).data
    assert dict(zip(here.x, here.y, strict=True)) == MS
    blue, orange = PALETTE["tf32"]["light"], PALETTE["bf16"]["light"]
    assert list(here.marker.color)[1:] == [blue, *[orange] * 5]
    assert list(saved.x) == ["bf16", "compile", "vocab", "fused"]
    assert list(saved.base) == [500, 400, 300, 200]
    assert list(saved.y) == [300, 100, 110, 100]  # up to the rung before
    assert list(saved.text) == ["\u2212300", "\u2212100", "\u2212110", "\u2212100"]
    assert (list(lost.x), list(lost.base), list(lost.y)) == (["sdpa"], [400], [10])
    assert list(lost.text) == ["+10.0"]
    assert list(lesson.x) == IDS
    assert list(lesson.y) == pytest.approx(LESSON)
    assert lesson.yaxis == "y2"


def test_both_axes_have_the_fp32_step_at_one_height():
    layout = staircase_figure(climbed().results()).layout
    assert layout.yaxis.range[1] / layout.yaxis2.range[1] == pytest.approx(800)
    assert layout.yaxis.range[1] > 800  # and nothing is cut off
    alone = staircase_figure(climbed({"fp32": {"state": "out of memory"}}).results()).layout
    assert alone.yaxis2.range[1] > 1
    slower = dict.fromkeys(IDS, 10.0) | {"fused": 5000.0}
    staircase = Staircase(CONFIG, NATIVE)
    climb(staircase, {}, slower)
    assert staircase_figure(staircase.results()).layout.yaxis.range[1] > 5000


def test_what_was_not_measured_has_no_bar_but_the_reason():
    endings = {"fp32": {"state": "out of memory"}, "compile": {"compiled": False}}
    support = cpu_support({}, onednn_bf16=True, onednn_fp16=False)
    staircase = climbed(endings, support)
    figure = staircase_figure(staircase.results())
    assert list(figure.data[0].x) == IDS[1:]
    ticks = [
        tick.replace('<span style="font-size:11px">', "") for tick in figure.layout.xaxis.ticktext
    ]
    assert [tick.replace("</span>", "").split("<br>") for tick in ticks] == [
        ["fp32", "out of", "memory"],
        ["TF32", "<b>800</b>", "no", "effect"],
        ["bf16", "<b>500</b>", "emulated"],
        ["compile", "<b>400</b>", "not", "compiled"],
        ["SDPA", "<b>410</b>"],
        ["vocab", "<b>300</b>"],
        ["fused", "<b>200</b>"],
    ]


def test_a_staircase_before_its_first_rung_draws_the_lesson_alone():
    here, _, _, lesson = staircase_figure(Staircase(CONFIG, NATIVE).results()).data
    assert (len(here.x), len(lesson.x)) == (0, 7)


def test_the_table_has_a_row_a_rung_and_blanks_for_the_unknown():
    staircase = climbed({"sdpa": {"state": "out of memory"}})
    results = staircase.results()
    labels = [result.config and RunConfig(**result.config).label for result in results]
    table = staircase_table(results, labels)
    assert list(table["rung"][:4]) == ["fp32", "TF32", "bf16", "+ torch.compile"]
    assert list(table["lesson ms"]) == [1000, 333, 300, 130, 96, 93, 90]
    assert list(table["lesson x fp32"])[1:3] == [3.0, 3.33]
    rows = table.set_index("rung").to_dict("index")
    assert rows["bf16"]["x rung before"] == 1.6
    assert pd.isna(rows["fp32"]["x rung before"])
    assert pd.isna(rows["+ SDPA"]["ms/step median"])
    assert rows["+ SDPA"]["state"] == "out of memory"
    assert rows["+ vocabulary 50,304"]["x rung before"] == 1.33  # against torch.compile
    assert rows["+ fused AdamW"]["ran as"] == (
        "bf16 B=2 T=16 tiny sdpa fused AdamW compiled V=50304"
    )


# --- the page


class Stage:
    """Stands in for runner.execute: no rung takes time, and one waits to be stopped when asked."""

    def __init__(self) -> None:
        self.hold = threading.Event()  # the SDPA rung waits for Stop

    def __call__(self, config, info, *, on_step, stop_reason, progress, **_) -> RunSummary:
        progress.phase = "training"
        rung = (
            "fused" if config.optimizer == "fused" else "vocab" if config.vocab_size > 50257 else ""
        )
        rung = rung or ("sdpa" if config.attention == "sdpa" else "")
        failed = config.compile and not rung
        made = record(config, [MS[rung or config.precision]] * config.steps)
        for step in made.steps:
            on_step(step)
        if rung == "sdpa" and self.hold.is_set():
            end = time.monotonic() + 60
            while not stop_reason() and time.monotonic() < end:
                time.sleep(0.02)
            return replace(made.summary, state="stopped", message="Stopped.")
        if failed:
            return replace(made.summary, compiled=False, notes=(NO_COMPILER,))
        return made.summary


def test_what_was_measured_stays_where_the_gpu_works_no_more():
    from gpt2demo.ui.staircase_tab import StaircaseTab  # with gradio

    def poisoned(config, info, *, on_step, progress, **_) -> RunSummary:
        made = record(config, [MS[config.precision]] * config.steps)
        for step in made.steps:
            on_step(step)
        if config.precision == "bf16":
            progress.poisoned = True
            return replace(made.summary, state="error")
        return made.summary

    hub = Hub(Settings(), device="cpu", execute=poisoned)
    parts = dict.fromkeys(("climb", "said", "figure", "table", "rungs"))
    tab = StaircaseTab(hub=hub, **parts)
    assert "appear here" in tab.results(NORMAL_TYPE)[0]
    hub.climb(CONFIG, "me")
    hub._thread.join(20)
    end = time.monotonic() + 20
    while hub.current and time.monotonic() < end:
        time.sleep(0.005)
    said, figure, table, _ = tab.results(NORMAL_TYPE)
    assert "The staircase ended before its last rung." in said
    assert list(figure["value"].data[0].x) == ["fp32", "tf32", "bf16"]
    assert list(table["value"]["state"])[3:] == ["waiting"] * 4
    hub.close()


@pytest.mark.browser
def test_the_staircase_is_climbed_explained_and_stopped(browser):
    from gpt2demo.ui.page import build_demo, launch_options  # with gradio

    stage = Stage()
    hub = Hub(Settings(), device="cpu", execute=stage)
    errors: list[str] = []
    with served(build_demo(hub), **launch_options(hub)) as address:
        person = Person(browser, viewport={"width": 390, "height": 844}, color_scheme="dark")
        page = person.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{address}/?__theme=dark")
        page.wait_for_selector("#live .live-tile", timeout=60_000)
        open_tab(page, "Staircase")
        page.click("button#climb")
        _wait(page, "#staircase-said", "The staircase is over.")
        page.wait_for_selector("#staircase .js-plotly-plot")
        said = page.inner_text("#rungs")
        assert "no effect here" in said
        assert "no C++ compiler" in said  # what ran instead
        assert (
            said.index("+ SDPA") < said.index("+ vocabulary 50,304") < said.index("+ fused AdamW")
        )
        assert "1,000, 333, 300, 130, 96, 93, 90 ms" in said
        names = page.evaluate(
            "document.querySelector('#staircase .js-plotly-plot')._fullData.map((d) => d.name)"
        )
        assert names[0] == "ms a step here (left)"
        _wait(page, "#staircase-table", "fused AdamW")
        # nothing is wider than a phone, and the axes are readable on dark ground
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        box = page.locator("#staircase").first.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
        ink = "getComputedStyle(document.querySelector('#staircase .xtick text')).fill"
        assert min(map(int, page.evaluate(ink).removeprefix("rgb(").rstrip(")").split(","))) > 180
        stage.hold.set()
        page.click("button#climb")
        _wait(page, "#staircase-said", "rung 5 of 7")
        page.wait_for_selector("button#stop:enabled")
        page.click("button#stop")
        _wait(page, "#staircase-said", "The staircase ended: the rung + SDPA was stopped.")
        assert hub.staircase.results()[3].step_ms_median == MS["bf16"]  # kept; it was not compiled
        person.close()
    hub.close()
    assert errors == []


def _wait(page: Page, element: str, text: str) -> None:
    page.wait_for_function(
        "([element, text]) => document.querySelector(element)?.textContent.includes(text)",
        arg=[element, text],
        timeout=60_000,
        polling=100,
    )
