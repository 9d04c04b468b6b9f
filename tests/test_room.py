"""The Precision and Specs tabs in a real browser, and large type for a room."""

import math
import random
import re
import time
from dataclasses import replace

import pytest
from browser import open_tab, served
from playwright.sync_api import TimeoutError

from gpt2demo import formats, literals
from gpt2demo.config import InputError, RunConfig
from gpt2demo.hub import Hub
from gpt2demo.peaks import all_gpus
from gpt2demo.ui.page import build_demo, launch_options
from gpt2demo.ui.present import SCALE
from gpt2demo.ui.specs_tab import specs_table

pytestmark = [
    pytest.mark.browser,
    # gradio's own statistics of its queue use what pandas 3 deprecates
    pytest.mark.filterwarnings("ignore::pandas.errors.Pandas4Warning"),
]
T4 = ("Tesla T4", 15642329088)  # as its driver reports it
ROOM = {"width": 1920, "height": 1080}
ADDRESS = "/?__theme=light&present=1"
LEGIBLE = 19  # px at 1920x1080: above a sixtieth of the height, for the back row

# what the widget shows of every text: the refusal, or by format bits, value, error, gap and state
SHOWN = """(texts) => texts.map((text) => {
    const box = document.querySelector('#bits .bits-number');
    box.value = text;
    const started = performance.now();
    box.dispatchEvent(new Event('input', { bubbles: true }));
    const seconds = (performance.now() - started) / 1000;
    const said = document.querySelector('#bits .bits-refused');
    if (!said.hidden) return { refused: said.textContent, seconds };
    const formats = {};
    for (const row of document.querySelectorAll('#bits .bits-format')) {
        const figures = [...row.querySelectorAll('dd')].map((dd) => dd.textContent);
        formats[row.dataset.format] = {
            bits: [...row.querySelectorAll('.bits-cells i')].map((i) => i.textContent).join(''),
            value: figures[0], error: figures[1], gap: figures[2],
            state: row.querySelector('.bits-state').textContent,
        };
    }
    return { formats, seconds };
})"""


@pytest.fixture(scope="module")
def hub():
    hub = Hub(device="cpu")
    # a CPU that is called like a card of the table
    hub.device_info = replace(hub.device_info, name=T4[0], memory_total_bytes=T4[1])
    yield hub
    hub.close()


@pytest.fixture(scope="module")
def url(hub):
    with served(build_demo(hub), **launch_options(hub)) as url:
        yield url


@pytest.fixture(scope="module")
def raced(hub):
    config = RunConfig(model="tiny", B=1, T=8, steps=4)
    hub.compare(config, ["fp32", "bf16"], 1, "a visitor")
    end = time.monotonic() + 60
    while hub.current or not hub.race or len(hub.race.results()) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def page(browser, url, raced):
    """One page for all tests, in large type: each opens its tab and sets its size."""
    context = browser.new_context(viewport=ROOM, has_touch=True)
    page = context.new_page()
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.goto(url + ADDRESS)
    page.wait_for_selector("#live .live-tile")
    yield page
    context.close()


def some_texts(count):
    rng = random.Random(17)
    for _ in range(count):
        sign = rng.choice(["", "-", "+"])
        yield sign + rng.choice(
            [
                f"{rng.uniform(0.1, 10):.{rng.randint(1, 18)}f}e{rng.randint(-330, 320)}",
                f"{rng.uniform(0.1, 10):.6f}e{rng.randint(-46, 39)}",
                f"{rng.uniform(0.1, 10):.4f}e{rng.randint(-9, 5)}",
                f"{rng.randint(0, 10**6)}/{rng.randint(1, 10**6)}",
                f"0x{rng.randint(0, 2**60):x}p{rng.randint(-1100, 1000)}",
                f"{rng.randint(0, 2**26)}.5",
            ]
        )


SPECIAL = [
    *("0", "-0", "inf", "-inf", "nan", "1e400", "1e-400", "0x1p-3", "65504", "65519.999", "65520"),
    *("1e1100", "-1e-1100", "0x1p-1074", "0x1p-1075", "0x1.8p-1075", "0x1p1023", "1.5", "2.5"),
    *(
        "5.9604644775390625e-8",
        "2.98023223876953125e-8",
        "3.4028235677973366e38",
        " 1 ",
        "1.",
        ".5",
    ),
]
REFUSED = [
    *("", "  ", "words", "1" * 10_000, "1e99999", "0x1p9999", "1/0", "0x", "e5", ".", "1_000"),
    *("1,5", "½", "<img src=x onerror=window.hacked=1>", "w" * 90),
]


def test_the_widget_shows_what_formats_compute(page):
    open_tab(page, "Precision")
    texts = [*SPECIAL, *some_texts(600)]
    shown = page.evaluate(SHOWN, texts)
    for text, told in zip(texts, shown, strict=True):
        number = literals.parse_number(text)
        largest = literals.parse_largest("1")
        held = {name: formats.hold(number, form) for name, form in formats.FORMATS.items()}
        held["int8"] = formats.hold_int8(number, largest)
        assert told.keys() == {"formats", "seconds"}, text
        for name, mine in held.items():
            its = told["formats"][name]
            assert its["bits"] == mine.sign + mine.exponent + mine.mantissa, (text, name)
            assert its["state"] == mine.state, (text, name)
            if mine.value is None:
                assert its["value"] == "none"
                continue
            value = float(its["value"].lower())
            assert value == pytest.approx(
                mine.value, rel=1e-8 if name == "int8" else 0, nan_ok=True
            )
            assert math.isnan(value) or math.copysign(1, value) == math.copysign(1, mine.value)
            close(its["error"].partition(" ")[0], mine.error)
            close(its["gap"], mine.gap)
    # under a tenth of a second, drawing apart
    assert sorted(told["seconds"] for told in shown)[len(shown) // 2] < 0.1
    assert page.errors == []


def close(text, exact):
    """The text has three digits of the exact figure."""
    if exact is None:
        assert text == "none"
        return
    said = literals.parse_number(text)
    size = abs(exact)
    assert abs(said.size - size) <= size / 199, (text, float(exact))
    assert not size or said.negative == (exact < 0)


def test_what_is_refused_is_refused_in_the_same_words(page):
    open_tab(page, "Precision")
    before = page.evaluate(SHOWN, ["0.1"])[0]["formats"]
    for text, told in zip(REFUSED, page.evaluate(SHOWN, REFUSED), strict=True):
        with pytest.raises(InputError) as refused:
            literals.parse_number(text)
        assert told.get("refused") == str(refused.value)
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('#bits img').length") == 0
    page.fill("#bits .bits-largest", "-1")
    assert page.inner_text("#bits .bits-refused").startswith("The largest value of the int8 tensor")
    page.fill("#bits .bits-largest", "1")
    assert page.evaluate(SHOWN, ["0.1"])[0]["formats"] == before  # all goes on


def test_the_size_is_dragged(page):
    open_tab(page, "Precision")
    page.fill("#bits .bits-number", "-1")
    drag = page.locator("#bits .bits-drag")
    assert drag.input_value() == "0"
    box = drag.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    seen = []
    for share in (0.6, 0.7, 0.95, 0.05):
        page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
        number = page.input_value("#bits .bits-number")
        state = page.inner_text("#bits [data-format=fp16] .bits-state")
        seen.append((float(number), state))
    page.mouse.up()
    assert all(number < 0 for number, _ in seen)  # the sign stays
    sizes = [-number for number, _ in seen]
    assert sizes[0] < sizes[1] < sizes[2]
    assert seen[2][1] == "overflow: infinite"
    assert seen[3][1] == "underflow: zero"


def test_explanations_are_short_and_carry_a_figure(page):
    open_tab(page, "Precision")
    cards = page.locator("#why .why-card")
    assert cards.count() == 3
    for card in cards.all():
        words = card.locator("p:not(.why-figure)").inner_text()
        assert re.search(r"\d", card.locator(".why-figure").inner_text())
        assert 1 <= len(re.findall(r"[.?](?= |$)", words)) <= 3


def cells(page):
    return page.evaluate(
        "[...document.querySelectorAll('#specs .virtual-row')].map((row) =>"
        " [...row.querySelectorAll('[role=gridcell]')].map((cell) => cell.innerText.trim()))"
    )


def test_specs_mark_this_machine_and_link_their_sources(page):
    open_tab(page, "Specs")
    page.wait_for_function("document.querySelectorAll('#specs .virtual-row').length > 5")
    table = specs_table(next(spec for spec in all_gpus() if spec.display_name == "NVIDIA T4 16GB"))
    first = cells(page)[0]
    assert first[0] == "T4 16GB (this machine)"
    assert first[1:8] == ["8.1", "", "", "65", "0.254", "16", "320"]
    assert list(table)[1:8] == [
        *(f"{name} TFLOP/s" for name in ("fp32", "TF32", "bf16", "fp16", "fp64")),
        "memory GiB",
        "GB/s",
    ]
    assert marked(page) == ["T4 16GB (this machine)"]
    link = page.locator("#specs .virtual-row a").first
    assert link.get_attribute("href").startswith("http")
    assert page.inner_text("#specs-here").startswith("This machine: Tesla T4, the first row")


def marked(page):
    return page.evaluate(
        "[...document.querySelectorAll('#specs .virtual-row [role=gridcell]:first-child')]"
        ".filter((cell) => cell.style.backgroundColor).map((cell) => cell.innerText.trim())"
    )


def test_specs_are_sorted_and_filtered(page):
    open_tab(page, "Specs")
    column = page.locator("#specs [role=columnheader]", has_text="fp32 TFLOP/s")
    column.hover()
    column.locator(".cell-menu-button").click()
    page.get_by_role("menuitem", name="Sort ascending").click()
    page.wait_for_function(
        "document.querySelector('#specs .virtual-row').innerText.includes('1060')"
    )
    order = [float(row[1]) for row in cells(page)]
    assert order == sorted(order)  # as numbers: 9.1 before 10.6
    assert order[0] < 10 < order[-1]
    assert marked(page) == ["T4 16GB (this machine)"]  # the mark went with its row
    page.fill("#specs .search-input", "H200 ")
    page.wait_for_function("document.querySelectorAll('#specs .virtual-row').length < 6")
    assert {row[0] for row in cells(page)} >= {"H200 SXM 141GB", "H200 NVL 141GB"}
    page.fill("#specs .search-input", "")


# smallest font of these texts in px of the screen, and their least contrast with what lies behind
LEAST = """(selector) => {
    const luminance = (rgb) => {
        const [r, g, b] = rgb.map((c) => c / 255)
            .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
    const numbers = (colour) => {  // any colour that CSS knows, color-mix() too
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
        return [r, g, b, a / 255];
    };
    const behind = (e) => {
        for (; e; e = e.parentElement) {
            const [r, g, b, a = 1] = numbers(getComputedStyle(e).backgroundColor);
            if (a > 0.99) return [r, g, b];
        }
        return [255, 255, 255];
    };
    const texts = [...document.querySelectorAll(selector)]
        .filter((e) => e.textContent.trim() && e.getBoundingClientRect().height);
    if (!texts.length) return { px: 0, contrast: 0 };
    return {
        px: Math.min(...texts.map((e) =>
            parseFloat(getComputedStyle(e).fontSize) * (e.currentCSSZoom ?? 1))),
        contrast: Math.min(...texts.map((e) => {
            const style = getComputedStyle(e);
            const ink = numbers(e instanceof SVGElement ? style.fill : style.color).slice(0, 3);
            const both = [luminance(ink), luminance(behind(e))].sort((a, b) => b - a);
            return (both[0] + 0.05) / (both[1] + 0.05);
        })),
    };
}"""
CHARTS = {
    "Run": ["#live .live-plot .xtick text", "#live .live-plot .ytick text",
            "#live .live-plot .annotation-text"],
    "Memory": ["#fit-map .xtick text", "#fit-map .ytick text"],
    "Compare": ["#speedups .xtick text", "#speedups .ytick text", "#speedups .legendtext"],
}  # fmt: skip
TEXTS = {
    "Run": ["#live .live-note", "#live .live-key"],
    "Memory": ["#fit-map .fit-map-key"],
    "Compare": ["#verdicts dd"],
    "Precision": ["#bits .bits-part i", "#bits dd", "#why .why-card p"],
    "Specs": ["#specs-here p"],
}


def wait_legible(page, selector, theme):
    # text as large as this is legible from a contrast of 3 on (WCAG)
    wanted = f"([s, px]) => {{ const l = ({LEAST})(s); return l.px >= px && l.contrast >= 3; }}"
    try:
        page.wait_for_function(wanted, arg=[selector, LEGIBLE], timeout=10_000)
    except TimeoutError as late:
        raise AssertionError(f"{selector} ({theme}): {page.evaluate(LEAST, selector)}") from late


def test_every_chart_is_legible_from_the_back_row(page):
    page.set_viewport_size(ROOM)
    scale = "getComputedStyle(document.documentElement).getPropertyValue('--chart-scale')"
    assert float(page.evaluate(scale)) == SCALE
    for tab in TEXTS:
        open_tab(page, tab)
        for theme in ("light", "dark"):
            page.evaluate("(dark) => document.body.classList.toggle('dark', dark)", theme == "dark")
            for selector in (*CHARTS.get(tab, ()), *TEXTS[tab]):
                wait_legible(page, selector, theme)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab
    page.evaluate("document.body.classList.remove('dark')")
    assert page.errors == []


def test_both_tabs_fit_a_phone(page):
    page.set_viewport_size({"width": 390, "height": 844})
    for tab, root in (("Precision", "#bits, #why"), ("Specs", "#specs-here")):
        open_tab(page, tab)
        page.wait_for_selector(root.split(",")[0])
        outside = page.evaluate(
            """(root) => [...document.querySelectorAll(root)]
                .flatMap((e) => [...e.querySelectorAll('*')])
                .filter((e) => {
                    const box = e.getBoundingClientRect();
                    return box.width && (box.right > innerWidth + 0.5 || box.left < 0);
                })
                .map((e) => e.outerHTML.slice(0, 80))""",
            root,
        )
        assert outside == []
        assert page.evaluate("document.documentElement.scrollWidth") == 390
    # large type is for large screens
    assert page.evaluate(LEAST, "#specs-here p")["px"] < LEGIBLE
    assert page.errors == []
    page.set_viewport_size(ROOM)


def test_a_link_switches_back_and_keeps_the_rest_of_the_address(page, url):
    page.click("a.type")
    page.wait_for_url(url + ADDRESS.replace("&present=1", ""), wait_until="commit")
    page.wait_for_selector("#live .live-tile")
    page.wait_for_function(f"({LEAST})('{CHARTS['Run'][1]}').px > 0")
    assert page.evaluate(LEAST, CHARTS["Run"][1])["px"] < LEGIBLE
    assert page.inner_text("a.type") == "Large type, for a room"
