"""The page for everybody: by keyboard alone, readable, and for a screen reader."""

import json
import re

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import Person, open_tab
from server import Server, page

PLOT = "document.querySelector('#live .live-plot')"
STATE = "document.querySelector('#live .live-status')?.dataset.state"
TABS = ("Run", "Memory", "Compare", "Staircase", "Inside", "Precision", "Specs", "Board")
PLOTS = {
    "Compare": ["#speedups"],
    "Staircase": ["#staircase"],
    "Inside": ["#parts"],
    "Precision": ["#values"],
}
SMALL = "&model=tiny&B=2&T=16&steps=4"
WORST = ("serious", "critical")

pytestmark = pytest.mark.browser


def called(server: Server, endpoint: str, **settings) -> list:
    """All that an endpoint for scripts streams."""
    info = httpx.get(f"{server.url}/gradio_api/info", timeout=20).json()
    parameters = info["named_endpoints"][f"/{endpoint}"]["parameters"]
    data = [settings.get(p["parameter_name"], p["parameter_default"]) for p in parameters]
    url = f"{server.url}/gradio_api/call/{endpoint}"
    event = httpx.post(url, json={"data": data}, timeout=20).json()["event_id"]
    text = httpx.get(f"{url}/{event}", timeout=120).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A page on which everything has happened: runs, a race, a staircase without a compiler, an
    inspection, and one run out of memory.
    """
    without = {"PATH": "/nowhere", "CXX": "/nowhere/c++"}  # no compiler: each would take a minute
    with page(tmp_path_factory.mktemp("access"), **without) as server:
        tiny = {"model": "tiny", "B": 1, "T": 8, "steps": 4}
        called(server, "staircase", **tiny)
        called(server, "inside", model="tiny", B=1, T=8)
        called(server, "compare", **tiny, precisions="fp32,tf32,bf16,fp64")
        called(server, "train", **(tiny | {"T": 512, "budget_gib": 0.25}))
        yield server
        assert "Traceback" not in server.log


@pytest.fixture
def visit(browser, server):
    people = []

    def new(query: str = "", **context):
        people.append(Person(browser, **({"viewport": {"width": 1280, "height": 900}} | context)))
        opened = people[-1].new_page()
        opened.goto(f"{server.url}/?{query}")
        opened.wait_for_selector("#live .live-tile")
        opened.wait_for_function(f"{PLOT}?._fullLayout && {STATE}", polling=100)
        return opened

    yield new
    for person in people:
        person.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_serious_fault_on_any_tab(visit, theme):
    visitor = visit(f"__theme={theme}")
    visitor.wait_for_selector("#failure-panel .memory.failed")
    visitor.click("#more button")
    visitor.get_by_label("Your own").check()
    visitor.wait_for_selector("#pasted")
    visitor.add_style_tag(content="* { transition: none !important }")  # else it is half way
    axe = Axe()
    for tab in TABS:
        visitor.get_by_role("tab", name=tab, exact=True).click()
        if tab == "Compare":
            visitor.wait_for_selector("#verdicts dd")
        for plot in PLOTS.get(tab, ()):  # gradio's box without a figure is a fault
            visitor.wait_for_selector(f"{plot} .js-plotly-plot .main-svg")
        # what is switched off is left out of the contrast; Stop is on while a run goes on
        visitor.evaluate("document.querySelector('#stop').disabled = false")
        # all is looked at; only what is at fault is reported node by node, in a third of the time
        found = axe.run(visitor, options={"resultTypes": ["violations"]}).response
        assert len(found["passes"]) > 20  # it did look
        faults = [
            (fault["id"], node["target"], node["html"][:200])
            for fault in found["violations"]
            if fault["impact"] in WORST
            for node in fault["nodes"]
        ]
        assert faults == [], tab


# what is cut off by a box that hides the rest: every box of gradio's would scroll, but shows no bar
CUT = """() => [...document.querySelectorAll('#page :is(label, label span, button, p)')]
  .filter((e) => {
    const box = e.getBoundingClientRect();
    const apart = e.closest('[role=grid], table, .sr-only, .visually-hidden');
    if (!box.width || !box.height || apart) return false;
    for (let at = e.parentElement; at; at = at.parentElement) {
      const style = getComputedStyle(at);
      const hides = style.overflowX !== 'visible';
      if (hides && box.right > at.getBoundingClientRect().right + 1) return true;
    }
    return box.right > innerWidth + 1;
  }).map((e) => e.outerHTML.slice(0, 120))"""


def test_every_tab_is_whole_on_a_phone(visit):
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    visitor = visit(**phone)
    visitor.click("#more button")
    for tab in TABS:
        open_tab(visitor, tab)
        for plot in PLOTS.get(tab, ()):
            visitor.wait_for_selector(f"{plot} .js-plotly-plot .main-svg")
            bar = visitor.locator(f"{plot} .modebar-container").first
            assert bar.evaluate("e => getComputedStyle(e).visibility") == "hidden"
            buttons = bar.locator(".modebar, .modebar-btn").all()
            assert buttons
            assert not any(button.is_visible() for button in buttons)
        assert visitor.evaluate("document.documentElement.scrollWidth") == 390, tab
        assert visitor.evaluate(CUT) == [], tab


def focused(visitor) -> list[str]:
    """The ids of what holds the focus and of all that it lies in."""
    return visitor.evaluate(
        "(() => { const ids = []; for (let at = document.activeElement; at; at = at.parentElement)"
        " ids.push(at.id); return ids.filter(Boolean); })()"
    )


def tab_to(visitor, wanted: str, most: int = 60) -> None:
    """Press Tab until the focus is there; all that is passed must show it."""
    for _ in range(most):
        visitor.keyboard.press("Tab")
        if wanted in focused(visitor):
            style = visitor.evaluate(
                "(({outlineStyle, outlineWidth, boxShadow}) => [outlineStyle, outlineWidth, "
                "boxShadow])(getComputedStyle(document.activeElement))"
            )
            assert style[0] != "none" or style[2] != "none", f"no focus is seen on {wanted}"
            return
    raise AssertionError(f"Tab does not reach {wanted}; it is at {focused(visitor)}")


def test_the_keyboard_alone_runs_stops_and_reads_the_results(visit, server):
    visitor = visit(SMALL.replace("steps=4", "steps=900"))
    visitor.evaluate("document.body.focus()")
    tab_to(visitor, "run")
    visitor.keyboard.press("Enter")
    visitor.wait_for_function(f"{STATE} === 'running'", polling=100, timeout=60_000)
    visitor.wait_for_function("!document.querySelector('button#stop').disabled", polling=100)
    tab_to(visitor, "stop")
    visitor.keyboard.press("Space")
    visitor.wait_for_function(f"{STATE} === 'stopped'", polling=100, timeout=60_000)
    assert "Stopped after" in visitor.inner_text("#live .live-sentence")
    visitor.locator("#live details summary").focus()
    visitor.keyboard.press("Enter")
    assert re.search(r"step 0, loss: \d", visitor.inner_text("#live .live-lines"))
    # the finished runs' table holds it too, below; and the curve's own key switches it off
    key = visitor.locator("#live .live-key").last
    key.focus()
    visitor.keyboard.press("Enter")
    assert key.get_attribute("aria-pressed") == "false"
    server.wait_idle()


def test_the_arrow_keys_choose_a_cell_of_the_fit_map(visit):
    visitor = visit(SMALL)
    visitor.get_by_role("tab", name="Memory", exact=True).focus()
    visitor.keyboard.press("Enter")
    plot = "document.querySelector('#fit-map .fit-map-plot')"
    visitor.wait_for_function(f"{plot}?._fullLayout?.width", polling=100)
    tab_to(visitor, "fit-map", most=80)
    assert visitor.evaluate(f"document.activeElement === {plot}")
    spoken = visitor.locator("#fit-map .fit-map-cell")
    assert spoken.inner_text().startswith("B=2, T=16")
    for key in ("ArrowUp", "ArrowUp", "ArrowRight"):
        visitor.keyboard.press(key)
    told = re.match(r"B=(\d+), T=(\d+):", spoken.inner_text())
    B, T = map(int, told.groups())
    assert B > 2
    assert T > 16
    visitor.wait_for_function(f"{plot}._fullLayout.shapes.length === 1", polling=50)
    visitor.keyboard.press("Enter")
    value = "Number(document.querySelector('#{} input[type=number]').value)"
    for name, wanted in (("B", B), ("T", T)):
        visitor.wait_for_function(f"{value.format(name)} === {wanted}", polling=50)
    visitor.keyboard.press("Tab")  # and the keyboard gets out of it
    assert not visitor.evaluate(f"document.activeElement === {plot}")
    assert spoken.inner_text() == ""


def test_curves_differ_by_dash_and_marker_as_well_as_colour(visit):
    visitor = visit()
    curves = f"{PLOT}._fullData.filter((d) => d.yaxis === 'y' && d.line && d.x[0] !== null)"
    visitor.wait_for_function(f"{curves}.length >= 4", polling=50)
    looks = visitor.evaluate(
        f"{curves}.map((d) => [d.line.color, d.line.dash, [].concat(d.marker.symbol).at(-1)])"
    )
    assert len({json.dumps(look[1:]) for look in looks}) == len(looks)
    assert len({look[0] for look in looks}) >= 4


# --- nothing that comes from elsewhere is executed

MARKUP = "<img src=x onerror=window.hit=1>"


def test_no_markup_from_a_text_a_link_or_a_foreign_board_is_executed(visit, tmp_path, server):
    foreign = json.loads(httpx.get(f"{server.url}/gradio_api/gpt2demo-runs.json").text)[0]
    foreign["device"]["name"] = foreign["device"]["gpu"] = MARKUP
    foreign["device"]["problem"] = MARKUP
    foreign["summary"]["message"] = MARKUP
    foreign["summary"]["notes"] = [MARKUP, "[click](javascript:window.hit=1)"]
    export = tmp_path / "foreign.json"
    export.write_text(json.dumps([foreign]))
    quoted = "%3Cimg%20src%3Dx%20onerror%3Dwindow.hit%3D1%3E"
    visitor = visit(f"ms=12&on={quoted}&model=tiny&B=1&T=8&steps=3&tab={quoted}")
    visitor.wait_for_function(
        "document.querySelector('#shared')?.innerText.includes('onerror')", polling=100
    )
    visitor.get_by_role("tab", name="Board", exact=True).click()
    visitor.set_input_files("input[type=file][accept='.json']", export)
    visitor.wait_for_function(
        "document.querySelector('#board')?.innerText.includes('imported')", polling=100
    )
    assert "onerror" in visitor.inner_text("#board")
    visitor.click("#more button")
    visitor.get_by_label("Your own").check()
    visitor.fill("#pasted textarea", MARKUP * 20)
    visitor.click("button#run")
    visitor.wait_for_function(f"{STATE} === 'finished'", polling=100, timeout=60_000)
    for tab in TABS:
        visitor.get_by_role("tab", name=tab, exact=True).click()
        assert visitor.evaluate("document.querySelectorAll('img[src=x]').length") == 0, tab
    assert visitor.evaluate("window.hit") is None
    hrefs = visitor.evaluate("[...document.querySelectorAll('a')].map((a) => a.href)")
    assert not [href for href in hrefs if href.startswith("javascript:")]
    server.wait_idle()
