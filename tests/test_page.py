"""The real page in a real browser, used as a visitor uses it."""

import csv
import io
import json
import re
import time

import pytest
from browser import Person, open_tab
from server import Server, page

PLOT = "document.querySelector('#live .live-plot')"
STATE = "document.querySelector('#live .live-status')?.dataset.state"
# the curves of the loss panel, oldest first; the live one is the strong one
CURVES = f"({PLOT}?._fullData || []).filter((d) => d.yaxis === 'y' && d.line && d.x[0] !== null)"
LIVE = f"{CURVES}.find((d) => d.line.width > 2)"
PLACE = "document.querySelector('#live .live-place')?.textContent"
CONTROLS = ("device", "model", "precision", "B", "T", "steps", "memory", "run", "stop", "live")
LOG_LINE = re.compile(r"step \d+, loss: \d+\.\d{6}, dt: \d+\.\d+ms, tok/sec: \d+\.\d\d$")

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with page(
        tmp_path_factory.mktemp("page"), GPT2DEMO_MAX_STEPS="3000", GPT2DEMO_ORPHAN_SECONDS="5"
    ) as server:
        yield server
        assert "Traceback" not in server.log


class Visitor:
    """One person's browser on the page."""

    def __init__(self, browser, server: Server, **context) -> None:
        self.server = server
        self.person = Person(browser, **({"viewport": {"width": 1280, "height": 800}} | context))
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.open()

    def open(self, query: str = "") -> None:
        self.page = self.person.new_page()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "request",
            lambda r: None if r.url.startswith((self.server.url, "data:", "blob:"))
            else self.elsewhere.append(r.url),
        )  # fmt: skip
        self.page.goto(self.server.url + query)
        self.page.wait_for_selector("#live .live-tile")
        self.wait(f"{PLOT}?._fullLayout")
        self.wait(f"{STATE} !== undefined")  # the stream has spoken

    def wait(self, condition: str, seconds: float = 40) -> None:
        # polled slowly: the browser's drawing must not take the training's cores
        self.page.wait_for_function(condition, timeout=seconds * 1000, polling=100)

    def eval(self, expression: str):
        return self.page.evaluate(expression)

    def choose(self, element: str, option: str) -> None:
        self.page.click(f"#{element} input")
        self.page.get_by_role("option", name=option).click()

    def set(self, slider: str, value: float) -> None:
        number = self.page.locator(f"#{slider} input[type=number]")
        number.fill(str(value))
        number.press("Tab")

    def settings(self, steps: int, model: str = "tiny", **sliders: float) -> None:
        self.choose("model", model)
        for name, value in ({"B": 2, "T": 16} | sliders | {"steps": steps}).items():
            self.set(name, value)

    def press(self, button: str) -> None:
        self.page.click(f"button#{button}")

    def rows(self) -> list[int]:
        """The steps of the newest curve."""
        return self.eval(f"[...{CURVES}.at(-1).x]")

    def wait_rows(self, count: int) -> None:
        """Until the live curve has this many points."""
        self.wait(f"({LIVE} || {{}})._length >= {count}")

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def toast(self) -> str:
        self.page.wait_for_selector(".toast-body", timeout=10_000)
        text = self.page.inner_text(".toast-body")
        self.page.locator(".toast-close").first.click()
        self.page.wait_for_selector(".toast-body", state="detached")
        return text

    def close(self) -> None:
        self.person.close()
        assert self.errors == []
        assert self.elsewhere == []


@pytest.fixture
def visit(browser, server):
    visitors = []

    def new(**context) -> Visitor:
        visitors.append(Visitor(browser, server, **context))
        return visitors[-1]

    yield new
    for visitor in visitors:
        # by script: nobody waits for a button that is off by now
        visitor.eval("document.querySelector('button#stop')?.click()")
    for visitor in visitors:
        visitor.close()
    server.wait_idle()


def test_each_person_has_a_storage_of_their_own(browser, server):
    def owner(person: Person) -> str:
        page = person.new_page()
        page.goto(server.url)
        kept = page.wait_for_function("localStorage.getItem('gpt2demo-owner')", polling=100)
        return kept.json_value()

    first, second = Person(browser), Person(browser)  # at once
    owners = {owner(first), owner(second)}
    first.close()
    second.close()
    third = Person(browser)  # in the first one's place
    assert third.context is first.context
    owners.add(owner(third))
    third.close()
    assert len(owners) == 3


def test_the_first_screen_holds_everything_without_scrolling(visit):
    visitor = visit()
    for element in CONTROLS:
        box = visitor.page.locator(f"#{element}").first.bounding_box()
        assert box["y"] >= 0, element
        assert box["y"] + box["height"] <= 800, element
        assert box["x"] + box["width"] <= 1280, element
    panel = visitor.text("#device")
    for word in ("GiB", "free", "compute capability", "torch 2."):
        assert word in panel
    rows = visitor.page.locator("#device .precision-row").all_inner_texts()
    assert len(rows) == 5
    for row, name in zip(rows, ("fp32", "TF32", "bf16", "fp16", "fp64"), strict=True):
        assert row.startswith(name)
        status, reason = re.search(
            r"(native|emulated|no effect|not available) (.+)", row, re.DOTALL
        ).groups()
        assert len(reason.split()) > 4, status
    assert "Press Run" in visitor.text("#live .live-empty")


def test_a_run_to_its_end_is_drawn_listed_and_downloaded(visit, server):
    visitor = visit()
    visitor.settings(12)
    before = len(json.loads(fetch(visitor, "json")))
    visitor.press("run")
    visitor.wait(f"{STATE} === 'finished'")
    visitor.wait(f"{CURVES}.at(-1)._length === 12")
    assert visitor.rows() == list(range(12))
    assert visitor.text("#live .live-count") == "step 12 of 12"
    assert "ms/step" in visitor.text("#live .live-tiles")
    assert "warming up" not in visitor.text("#live .live-tiles")

    visitor.page.click("#live .live-log summary")
    lines = [line for line in visitor.text("#live .live-lines").splitlines() if "loss" in line]
    assert all(LOG_LINE.match(line) for line in lines)
    assert [line.split(",")[0] for line in lines[-12:]] == [f"step {i}" for i in range(12)]

    visitor.wait("document.querySelector('#runs').innerText.includes('fp32 B=2 T=16 tiny')")
    table = list(csv.DictReader(io.StringIO(fetch(visitor, "csv"))))
    assert table[-1]["run"] == "fp32 B=2 T=16 tiny"
    assert table[-1]["steps done"] == "12"
    runs = json.loads(fetch(visitor, "json"), parse_constant=pytest.fail)
    assert len(runs) == before + 1
    assert [step["step"] for step in runs[-1]["steps"]] == list(range(12))
    shown = float(lines[-1].split("loss: ")[1].split(",")[0])
    assert runs[-1]["steps"][-1]["loss"] == pytest.approx(shown, abs=1e-6)


def fetch(visitor: Visitor, kind: str) -> str:
    """A download as the link on the page gives it."""
    link = visitor.page.locator(f"#downloads a[href*='.{kind}']")
    with visitor.page.expect_download() as download:
        link.click()
    return download.value.path().read_text(encoding="utf-8")


def test_the_next_run_is_drawn_beside_the_one_before(visit):
    visitor = visit()
    for precision in ("float32", "bf16"):
        visitor.choose("precision", precision)
        visitor.settings(4, B=3)
        visitor.press("run")
        label = f"{precision.replace('float', 'fp')} B=3 T=16 tiny"
        visitor.wait(f"{STATE} === 'finished' && {CURVES}.at(-1).name === '{label}'")
    table = "document.querySelector('#runs').innerText"
    visitor.wait(f"{table}.includes('fp32 B=3') && {table}.includes('bf16 B=3')")
    drawn = f"{CURVES}.slice(-2).map((d) => [d.name, d._length].join()).join('; ')"
    visitor.wait(f"{drawn} === 'fp32 B=3 T=16 tiny,4; bf16 B=3 T=16 tiny,4'")  # after the status
    assert len(set(visitor.eval(f"{CURVES}.slice(-2).map((d) => d.line.color)"))) == 2
    assert "bf16 B=3 T=16 tiny" in visitor.text("#live .live-legend")


def test_stop_ends_the_run_after_its_step_and_the_next_one_works(visit):
    visitor = visit()
    visitor.settings(3000)
    visitor.press("run")
    visitor.wait_rows(3)
    start = time.monotonic()
    visitor.press("stop")
    visitor.wait(f"['stopping', 'stopped'].includes({STATE})")
    assert time.monotonic() - start < 2.0
    visitor.wait(f"{STATE} === 'stopped'")
    assert "its owner pressed Stop" in visitor.text("#live .live-sentence")
    visitor.wait("document.querySelector('button#stop').disabled")
    visitor.set("steps", 3)
    visitor.press("run")
    visitor.wait(f"{STATE} === 'finished'")


def test_a_reload_brings_the_whole_curve_and_the_ownership_back(visit):
    visitor = visit()
    visitor.settings(3000)
    visitor.press("run")
    visitor.wait_rows(5)
    visitor.page.reload()
    visitor.wait_rows(8)
    steps = visitor.rows()
    assert steps == list(range(len(steps)))
    visitor.wait("!document.querySelector('button#stop').disabled")
    assert visitor.text("button#stop") == "Stop"
    # the stream leaves the table of the runs before as it is
    assert "ms/step median" in visitor.text("#runs")
    assert "fp32" in visitor.text("#runs")
    visitor.press("stop")
    visitor.wait(f"{STATE} === 'stopped'")


def test_two_people_watch_one_run_and_wait_their_turn(visit):
    first, second = visit(), visit()
    first.settings(3000)
    first.press("run")
    first.wait_rows(4)
    second.wait_rows(4)  # the same run, drawn live, without a click
    assert second.eval("document.querySelector('button#stop').disabled")
    second.settings(3)
    second.press("run")
    second.wait(f"/^2nd in line, about \\d+ (s|min)$/.test({PLACE})")
    first.wait(f"{PLACE} === '1 in line'")
    first.press("stop")
    for visitor in (first, second):
        visitor.wait(f"{STATE} === 'finished' && {CURVES}.at(-1)._length === 3")
        assert visitor.rows() == [0, 1, 2]


def test_a_zoom_survives_the_stream(visit):
    visitor = visit()
    visitor.settings(3000)
    visitor.press("run")
    visitor.wait_rows(6)
    visitor.eval(f"Plotly.relayout({PLOT}, {{'xaxis.range': [1, 4]}})")
    visitor.wait_rows(20)
    assert visitor.eval(f"{PLOT}.layout.xaxis.range") == [1, 4]


def test_refusals_name_field_value_and_range_and_the_next_run_works(visit, server):
    visitor = visit()
    visitor.settings(3)
    finished = server.post("status")["finished"]
    visitor.page.click("#more button")
    visitor.page.get_by_label("Your own").click()
    visitor.page.wait_for_selector("#pasted textarea")
    visitor.press("run")
    assert "text" in visitor.toast()
    visitor.page.fill("#pasted textarea", "Hello world")
    visitor.press("run")
    refusal = visitor.toast()
    assert "2 tokens" in refusal
    assert "33" in refusal  # B*T + 1
    assert server.post("status") == {"state": "idle", "waiting": 0, "finished": finished}
    visitor.page.fill("#pasted textarea", "the quick brown fox " * 40)
    visitor.press("run")
    visitor.wait(f"{STATE} === 'finished'")


def test_an_upload_that_is_no_text_is_refused_in_words(visit, tmp_path):
    visitor = visit()
    visitor.settings(3)
    picture = tmp_path / "picture.png"
    visitor.page.screenshot(path=picture)
    visitor.page.click("#more button")
    visitor.page.get_by_label("Your own").click()
    visitor.page.set_input_files("#upload input[type=file]", picture)
    visitor.wait("document.querySelector('#upload').innerText.includes('picture')")
    visitor.press("run")
    refusal = visitor.toast()
    assert "UTF-8" in refusal
    assert "/" not in refusal.replace("UTF-8/UTF-16", "")  # no path of the server


def test_a_precision_that_is_slow_here_warns_before_the_start(visit):
    visitor = visit()
    visitor.choose("precision", "fp16")
    visitor.wait("document.querySelector('#note').innerText.includes('float16')")
    row = visitor.page.locator("#device .precision-row", has_text="fp16").inner_text()
    warned = visitor.page.locator("#note .warning").count()
    assert warned == (0 if "native" in row else 1)


def test_dark_is_dark_and_readable(visit):
    visitor = visit()
    visitor.page.close()
    visitor.open("/?__theme=dark")
    ground, ink = visitor.eval(
        "(() => { const s = getComputedStyle(document.querySelector('.device'));"
        "const d = getComputedStyle(document.querySelector('.device h2'));"
        "return [s.backgroundColor, d.color]; })()"
    )
    assert contrast(ground, ink) >= 4.5
    assert luminance(ground) < 0.1


def channels(colour: str) -> list[float]:
    return [float(part) for part in re.findall(r"[\d.]+", colour)[:3]]


def luminance(colour: str) -> float:
    """WCAG 2's relative luminance."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (channel / 255 for channel in channels(colour))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_phone_stacks_everything_and_clips_nothing(visit):
    visitor = visit(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    visitor.settings(3)
    visitor.press("run")
    visitor.wait(f"{STATE} === 'finished'")
    assert visitor.eval("document.documentElement.scrollWidth") == 390
    boxes = [visitor.page.locator(f"#{name}").first.bounding_box() for name in CONTROLS]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in boxes)
    assert boxes[-1]["y"] >= boxes[-2]["y"] + boxes[-2]["height"]  # the live view below Stop


def test_the_page_never_sends_an_own_text_to_others(visit, server):
    secret = "xyzzy plugh plover "
    visitor = visit()
    visitor.settings(3)
    visitor.page.click("#more button")
    visitor.page.get_by_label("Your own").click()
    visitor.page.fill("#pasted textarea", secret * 40)
    visitor.press("run")
    visitor.wait(f"{STATE} === 'finished'")
    other = visit()
    other.wait(f"{STATE} === 'finished'")
    assert "xyzzy" not in other.page.content()
    assert "xyzzy" not in fetch(other, "json")
    assert "xyzzy" not in server.log


# --- memory


def test_the_bar_follows_the_controls_and_says_what_to_lower(visit):
    v = visit()
    v.wait("document.querySelector('#memory .verdict')?.textContent === 'fits'")
    v.set("B", 256)
    v.set("T", 1024)
    v.wait("document.querySelector('#memory .verdict').textContent === 'will not fit'")
    told = v.text("#memory")
    assert re.search(r"Forecast peak \d{3}\.\d\d GiB of \d+\.\d\d GiB to be had", told)
    assert re.search(r"Lower B to \d+, or T to \d+: that should fit\.", told)
    assert re.search(r"Largest part, [a-z ]+: \d+\.\d of \d{3}\.\d GiB\.", told)
    v.press("run")
    v.page.wait_for_selector("#failure .memory")
    assert "GiB are free" in v.text("#failure")  # refused before the first allocation
    v.wait("document.querySelector('#live .live-status').innerText.includes('GiB are free')")
    v.settings(3)
    v.press("run")
    v.wait(f"{STATE} === 'finished'")
    v.page.wait_for_selector("#failure .memory", state="detached")


def test_a_smaller_card_is_run_into_understood_and_left_by_a_button(visit):
    v = visit()
    v.settings(4, T=512, B=4)
    v.page.get_by_role("tab", name="Memory").click()
    v.set("budget_gib", 0.5)
    v.wait("document.querySelector('#memory')?.textContent.includes('0.50 GiB emulated')")
    v.press("run")
    v.page.wait_for_selector("#failure .memory-bar", timeout=30_000)
    told = v.text("#failure")
    assert "step 0, forward" in told
    assert "asked for 0.38 GiB more" in told  # B*T*50257*4 bytes of logits
    assert "logits and loss 0.38 GiB" in told
    v.page.get_by_role("button", name="Run with B=1 instead").click()
    v.wait(f"{STATE} === 'finished'")
    v.page.wait_for_selector("#failure .memory-bar", state="detached")
    v.wait("document.querySelector('#memory-details').textContent.includes('median error')")
    assert "none under the measurement" in v.text("#memory-details")
    v.page.get_by_role("tab", name="Run", exact=True).click()
    assert re.search(r"forecast 0\.\d\d GiB \([+-]0\.0%\)", v.text("#live .live-tiles"))


def test_the_limit_is_found_and_a_cell_of_the_map_sets_the_sliders(visit):
    v = visit()
    v.settings(4, T=512, B=4)
    v.page.get_by_role("tab", name="Memory").click()
    v.set("budget_gib", 0.5)
    v.wait("document.querySelector('#memory')?.textContent.includes('0.50 GiB emulated')")
    v.press("find_B")
    v.wait("document.querySelector('#found').textContent.includes('that ran')", 60)
    assert v.text("#found .found") == "The largest B that ran at T=512 is 1; B=2 ran out of memory."
    v.wait("document.querySelector('#fit-map').textContent.includes('out of memory')")
    cell = v.page.locator("#fit-map .nsewdrag").bounding_box()
    # the map's columns are sixteen, T=64 the fourth; its rows are sixteen, B=8 the sixth
    v.page.mouse.click(
        cell["x"] + cell["width"] * 3.5 / 16, cell["y"] + cell["height"] * (1 - 5.5 / 16)
    )
    v.wait("document.querySelector('#T input[type=number]').value === '64'")
    v.wait("document.querySelector('#B input[type=number]').value === '8'")


def test_the_memory_tab_is_readable_on_a_phone_in_the_dark(visit):
    v = visit(viewport={"width": 390, "height": 800}, color_scheme="dark")
    v.page.get_by_role("tab", name="Memory").click()
    v.page.wait_for_selector("#fit-map .js-plotly-plot")
    v.wait("document.querySelector('#memory .verdict')?.textContent === 'fits'")
    assert v.eval("document.documentElement.scrollWidth") <= 390
    for element in ("memory-details", "fit-map", "found", "find_B", "card"):
        box = v.page.locator(f"#{element}").first.bounding_box()
        assert box["x"] >= 0, element
        assert box["x"] + box["width"] <= 390, element
    colour = v.eval("getComputedStyle(document.querySelector('#memory .verdict')).color")
    assert max(map(int, re.findall(r"\d+", colour)[:3])) > 150  # light on dark


# --- the race


def test_a_race_is_drawn_and_explained(visit):
    v = visit()
    v.settings(5, B=1, T=16)
    v.page.get_by_role("tab", name="Compare").click()
    v.wait("document.querySelector('#expected')?.textContent.includes('expect 1.0x')")  # TF32
    v.press("race")
    v.wait("document.querySelector('#verdicts').textContent.includes('The race is over')", 60)
    told = v.text("#verdicts")
    assert re.search(r"Fastest: (fp32|tf32|bf16), \d+\.\d ms a step", told)
    for precision in ("fp32", "tf32", "bf16"):
        assert re.search(rf"^{precision}$", told, re.MULTILINE)
    v.page.wait_for_selector("#speedups .js-plotly-plot")
    v.wait("document.querySelector('#race-table').textContent.includes('finished')")
    table = v.eval("document.querySelector('#race-table').textContent")
    assert all(precision in table for precision in ("fp32", "tf32", "bf16"))
    v.page.get_by_role("tab", name="Run", exact=True).click()
    for precision in ("fp32", "tf32", "bf16"):  # drawn once their tab is seen again
        v.wait(f"{CURVES}.some((d) => d.name === '{precision} B=1 T=16 tiny')")


def test_a_probe_fills_the_expectations(visit):
    v = visit()
    v.settings(4)
    v.page.get_by_role("tab", name="Compare").click()
    v.wait("document.querySelector('#expected')?.textContent.includes('no forecast')")
    v.press("probe")
    v.page.wait_for_selector("#probed table", timeout=60_000)
    v.wait("document.querySelector('#expected').textContent.includes('measured matmul ratio')")
    assert "GB/s" in v.text("#probed")
    assert v.page.locator("#probed tbody tr").count() == 5


# --- one step from inside


def test_a_step_is_inspected_and_both_tabs_show_it(visit, server):
    v = visit()
    v.settings(3000)
    v.choose("precision", "bf16 autocast")
    v.press("run")
    v.wait_rows(1)
    v.page.get_by_role("tab", name="Inside").click()
    v.press("inspect")
    v.wait("document.querySelector('#inspecting').textContent.includes('Something runs here')")
    v.press("stop")
    server.wait_idle()
    assert v.page.locator("#parts .js-plotly-plot").count() == 0  # nothing until it is asked for
    v.press("inspect")
    v.wait("document.querySelector('#inside-headline').textContent.includes('inspected in')", 60)
    plot = "document.querySelector('#parts .js-plotly-plot')"
    v.wait(f"{plot}?._fullData?.length === 7")
    names = v.eval(f"{plot}._fullData.map((d) => d.name)")
    assert names[0] == "classifier"
    assert names[-2:] == ["backward", "optimizer"]
    whole = v.eval(f"{plot}._fullData.reduce((sum, d) => sum + d.x[0], 0)")
    told = v.text("#inside-words")
    step = re.search(r"The profiled step took ([\d,]+\.\d) ms", told)[1]
    assert whole == pytest.approx(float(step.replace(",", "")), rel=0.1)
    assert "Time on tensor cores: unknown" in told
    assert re.search(r"largest single matmul of the forward pass is the classifier's", told)
    assert "without" not in v.text("#clock")
    v.page.locator("#both-clocks input").check()
    v.wait("document.querySelector('#clock').textContent.includes('On a CPU there is no')")
    v.page.get_by_role("tab", name="Precision").click()
    v.page.wait_for_selector("#cast-table")
    rows = v.eval("[...document.querySelectorAll('#cast-table tr')].map((r) => r.innerText)")
    assert "lm_head\tlinear\tfloat32\tfloat32\tbfloat16\tbfloat16\t1" in rows
    v.wait("document.querySelectorAll('#values .barlayer .bars').length === 4")
    assert "So it needs no scaler." in v.text("#values-words")
    # somebody else's phone, in the dark, shows the same step at once
    other = visit(viewport={"width": 390, "height": 800}, color_scheme="dark")
    for name, words in (("Inside", "#inside-words"), ("Precision", "#values-words")):
        open_tab(other.page, name)
        other.page.wait_for_selector(f"{words} .told")
        assert other.eval("document.documentElement.scrollWidth") <= 390
    assert "inspected in" in other.text("#casts-headline")


# --- the board and links


def test_a_run_is_on_the_board_and_its_link_fills_the_page(visit, server):
    v = visit()
    v.settings(4, B=3, T=24)
    v.press("run")
    v.wait(f"{STATE} === 'finished'")
    v.page.get_by_role("tab", name="Board").click()
    v.wait("document.querySelector('#board').textContent.includes('fp32 B=3 T=24 tiny')")
    v.wait("document.querySelector('#board a[href*=\"B=3&T=24\"]')")
    href = v.page.locator('#board a[href*="B=3&T=24"]').first.get_attribute("href")
    board = json.loads(v.page.request.get(f"{server.url}/gradio_api/gpt2demo-board.json").text())
    newest = board["runs"][-1]
    assert (newest["config"]["B"], len(newest["steps"])) == (3, 4)
    other = visit()
    other.page.goto(server.url + "/" + href[href.index("?") :])
    other.wait("document.querySelector('#B input[type=number]')?.value === '3'")
    other.wait("document.querySelector('#T input[type=number]').value === '24'")
    other.wait("document.querySelector('#shared')?.textContent.includes(' ms a step')")
    shown = float(re.search(r"([\d,.]+) ms a step", other.text("#shared"))[1].replace(",", ""))
    # the link holds six digits, of which two decimals are shown
    assert shown == pytest.approx(newest["summary"]["step_ms_median"], abs=0.011, rel=1e-5)
    other.page.get_by_role("tab", name="Board").click()
    other.page.get_by_label("Mine").check()
    other.wait("document.querySelector('#board-note').textContent.trim().startsWith('0 of')")


def test_an_export_of_another_machine_is_imported_and_nonsense_refused(visit, server, tmp_path):
    v = visit()
    v.settings(3)
    v.press("run")
    v.wait(f"{STATE} === 'finished'")
    board = json.loads(v.page.request.get(f"{server.url}/gradio_api/gpt2demo-board.json").text())
    run = board["runs"][-1]
    run["device"] = {"type": "cuda", "name": "Tesla <b>T4</b>"}
    export = tmp_path / "export.json"
    export.write_text(json.dumps({"gpt2demo": 1, "runs": [run]}))
    other = visit()
    open_tab(other.page, "Board")
    held = []  # the answer to the opened tab is on its way while the file is imported
    v.page.route(
        "**/run/predict",
        lambda route: held.append((route, route.fetch())) if not held else route.continue_(),
    )
    v.page.get_by_role("tab", name="Board").click()
    while not held:
        v.page.wait_for_timeout(20)
    chooser = v.page.locator("input[type=file][accept='.json']")
    chooser.set_input_files(export)
    v.wait("document.querySelector('#imported').textContent.includes('run is on the board')")
    other.wait("document.querySelector('#board').textContent.includes('Tesla <b>T4</b>')")
    for route, answer in held:
        route.fulfill(response=answer)
    for visitor in (v, other):  # as text
        visitor.wait("document.querySelector('#board').textContent.includes('Tesla <b>T4</b>')")
    assert v.eval("document.querySelectorAll('#board b').length") == 0
    export = tmp_path / "nonsense.json"
    export.write_text('{"runs": [1]}')
    chooser.set_input_files(export)
    v.wait("document.querySelector('#imported').textContent.includes('Nothing was imported')")
    v.page.get_by_role("tab", name="Run", exact=True).click()


def test_a_link_that_asks_for_the_impossible_changes_nothing(visit):
    v = visit()
    v.open("/?model=tiny&B=-3")
    v.wait("document.querySelector('#shared')?.textContent.includes('The link was not taken')")
    assert "B must be a whole number" in v.text("#shared")
    assert v.page.locator("#B input[type=number]").input_value() == "4"
