"""What a page is sent: complete, small, and true for whoever joins when."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import gradio as gr
import httpx
import pytest
from browser import built, served
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2demo.config import RunConfig, Settings
from gpt2demo.hub import Hub
from gpt2demo.records import OutOfMemory, RunSummary, StepMetrics
from gpt2demo.run import Run
from gpt2demo.staircase import Staircase
from gpt2demo.ui import page as page_module
from gpt2demo.ui import watching as watching_module
from gpt2demo.ui.handlers import Page
from gpt2demo.ui.live import STREAM_PATH
from gpt2demo.ui.stream import Feed, ordinal, sight, waiting_line
from gpt2demo.ui.watching import Watching

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
        self.runs: dict[str, list[list]] = {}
        self.live: str | None = None
        self.status: dict = {}
        self.tiles: dict | None = None

    def show(self, text: str) -> None:
        message = json.loads(text, parse_constant=pytest.fail)
        if message.get("reset"):
            self.runs, self.live, self.tiles = {}, None, None
        for run in [*message.get("runs", []), *([message["start"]] if "start" in message else [])]:
            assert run["id"] not in self.runs
            self.runs[run["id"]] = list(run["rows"])
            if run["live"]:
                self.live = run["id"]
        if "rows" in message:
            assert message["run"] == self.live
            self.runs[self.live] += message["rows"]
            known = [row[0] for row in self.runs[self.live]]
            assert known == sorted(set(known))  # none twice
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
    assert json.loads(Feed(script.hub, "").snapshot())["status"]["mine"] is False
    assert screen.status["left_s"] == pytest.approx(
        16 * 0.1025, abs=0.05
    )  # median of 102 and 103 ms
    run.stop.set()
    follow(feed, screen)
    assert (screen.status["state"], screen.status["text"]) == (
        "stopping",
        "Stopping after this step.",
    )


def test_everybody_sees_that_the_device_is_being_measured(script):
    feed, screen = opened(script)
    run = script.start()
    script.step(run, 2)
    script.end(run)
    follow(feed, screen)
    after_the_run = dict(screen.status)
    script.hub.measuring = "Inspecting one step."
    follow(feed, screen)
    assert (screen.status["state"], screen.status["text"]) == ("measuring", "Inspecting one step.")
    assert (screen.status["done"], screen.status["steps"]) == (0, 0)  # the bar is the run's
    assert opened(script)[1].status == screen.status
    script.hub.measuring = ""
    follow(feed, screen)
    assert screen.status == after_the_run


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
def served_page(hub: Hub):
    """(address, open pages) of a real server over `hub`."""
    made = []

    def spied(hub: Hub) -> Watching:
        made.append(Watching(hub))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_module, "Watching", spied)
        demo = built(lambda: page_module.build_demo(hub))
        options = page_module.launch_options(hub)
    with served(demo, **options) as url:
        yield url, made[0]
        wait_closed(made[0])
    hub.close()


def wait_closed(watching: Watching) -> None:
    """A closed page is noticed, and its place is free again."""
    end = time.monotonic() + 5
    while watching.count:
        assert time.monotonic() < end
        time.sleep(0.05)


@contextmanager
def stream(url: str, owner: str | None = "x" * 43):
    """The lines of an open page's stream."""
    headers = {} if owner is None else {"X-Owner": owner}
    with httpx.stream("GET", url + STREAM_PATH, headers=headers, timeout=20) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        yield (line for line in answer.iter_lines() if line)


def told(line: str) -> dict:
    return json.loads(line.removeprefix("data: "))


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
    sizes = []
    with served_page(hub) as (url, _), stream(url) as lines:
        run = None
        for line in lines:
            sizes.append(len(line) + 2)
            if run is None:
                run = hub.submit(RunConfig(model="tiny", steps=3000), "x" * 43)
            if '"end"' in line:
                break
    assert len(sizes) > 8
    assert max(sizes) < 1024
    assert sum(sizes) < 2_000_000
    assert [step.step for step in run.record().steps] == list(range(3000))


def quiet_hub(**settings) -> Hub:
    return Hub(Settings(**settings), device="cpu", execute=lambda *_, **__: None)


def test_a_stream_begins_with_everything_and_knows_its_own_page(script):
    run = script.start(owner="m" * 43)
    script.step(run, 3)
    with served_page(script.hub) as (url, _):
        for owner, mine in (("m" * 43, True), ("o" * 43, False), ("m", False), (None, False)):
            with stream(url, owner) as lines:
                first = told(next(lines))
            assert first["reset"] is True
            assert [row[0] for row in first["runs"][0]["rows"]] == [0, 1, 2]
            assert first["status"]["mine"] is mine
        script.end(run)


def test_a_closed_page_frees_its_place_and_a_full_server_says_so():
    with served_page(quiet_hub(max_pages=2)) as (url, watching):
        with stream(url) as one, stream(url) as two:
            next(one), next(two)
            refused = httpx.get(url + STREAM_PATH, timeout=5)
            assert refused.status_code == 503
            assert "As many pages are open" in refused.json()["detail"]
        wait_closed(watching)
        with stream(url) as again:
            assert told(next(again))["reset"]


def test_an_idle_stream_beats_and_counts_as_somebody_who_looks(monkeypatch):
    monkeypatch.setattr(watching_module, "_BEAT_SEC", 0.3)
    hub = quiet_hub()
    with served_page(hub) as (url, _):
        seen = hub._seen
        with stream(url) as lines:
            assert told(next(lines))["reset"]
            assert [next(lines) for _ in range(3)] == [":"] * 3
        assert hub._seen > seen


def test_a_stream_ends_when_the_server_stops():
    with served_page(quiet_hub()) as (url, _), stream(url) as lines:
        next(lines)
        with ThreadPoolExecutor(1) as elsewhere:
            rest = elsewhere.submit(list, lines)
            gr.close_all(verbose=False)
            rest.result(timeout=5)


def test_an_error_in_a_stream_is_logged_and_the_page_may_come_again(script, monkeypatch, caplog):
    with served_page(script.hub) as (url, watching):
        with monkeypatch.context() as patch, stream(url) as lines:
            next(lines)
            patch.setattr(Feed, "news", lambda self: 1 / 0)
            script.end(script.start())
            assert list(lines) == []
        assert "a page's stream ended" in caplog.text
        wait_closed(watching)
        with stream(url) as lines:
            assert told(next(lines))["reset"]
        monkeypatch.setattr(watching_module, "sight", lambda hub: 1 / 0)
        with stream(url) as lines:  # the look for all pages fails: each looks for itself
            next(lines)
            script.end(script.start())
            assert "data" in next(lines)
        assert "could not be looked at" in caplog.text


def test_forty_pages_are_told_the_same(script):
    """Every page has the whole run, though they share what is computed for them."""
    run = script.start()
    with served_page(script.hub) as (url, watching), ThreadPoolExecutor(40) as people:

        def watch() -> list[int]:
            screen = Screen()
            with stream(url) as lines:
                for line in lines:
                    if line.startswith("data"):
                        screen.show(line.removeprefix("data: "))
                    if screen.runs and screen.live is None:
                        return [row[0] for row in screen.runs[run.id]]

        found = [people.submit(watch) for _ in range(40)]
        end = time.monotonic() + 15
        while watching.count < 40:
            assert time.monotonic() < end
            time.sleep(0.02)
        for _ in range(20):
            script.step(run, 2)
            time.sleep(0.05)
        script.end(run)
        assert [one.result(timeout=20) for one in found] == [list(range(40))] * 40


@settings(max_examples=150)
@given(st.lists(st.sampled_from(["start", "step", "stop", "end", "wait", "turn", "leave", "phase",
                                 "probe", "import", "measure"]), min_size=1, max_size=12)
)  # fmt: skip
def test_no_page_has_news_while_the_shared_look_sees_none(moves):
    """Pages sleep until `sight` changes: what it does not see would be shown late, or never."""
    script = Script()
    hub, feeds = script.hub, [Feed(script.hub, owner) for owner in ("me", "you", "")]
    for feed in feeds:
        feed.snapshot()
    before, number = sight(hub), 0
    for move in moves:
        run, number = hub.current, number + 1
        if move == "start" and not run:
            script.start()
        elif move == "step" and run:
            script.step(run)
        elif move == "stop" and run:
            run.stop.set()
        elif move == "end" and run:
            script.end(run)
        elif move == "phase" and run:
            run.progress.phase = "compiling"
        elif move == "leave" and hub.waiting:
            hub.waiting.popleft()
        elif move == "probe":
            hub.probes += 1
        elif move == "import":
            hub.board.imports += 1
        elif move == "measure":
            hub.measuring = "" if hub.measuring else "Probing this device."
        elif move in ("wait", "turn"):
            if move == "turn" and hub.waiting:  # the line moves on and is as long as before
                hub.waiting.popleft()
            owner, stop = ("you", "me")[number % 2], threading.Event()
            hub.waiting.append(
                Run(
                    id=f"w{number}",
                    owner=owner,
                    config=RunConfig(),
                    device=hub.device_info,
                    stop=stop,
                )
            )
        now = sight(hub)
        news = [feed.news() for feed in feeds]
        assert now != before or not any(news)
        for feed in feeds:  # up to date
            while feed.news():
                pass
        before = now
    hub.close()


def built_page() -> gr.Blocks:
    """The page over a hub of its own, in which nothing ever runs."""
    hub = quiet_hub()
    hub.close()
    return built(lambda: page_module.build_demo(hub))


def test_a_page_holds_no_connection_but_its_stream():
    """A browser opens six to a server; gradio takes a second one for a State or an unload."""
    demo = built_page()
    assert demo.get_config_file()["connect_heartbeat"] is False


# --- the rest of the page


def test_what_shows_a_state_never_misses_the_last_one() -> None:
    listeners = built_page().config["dependencies"]
    modes = {dependency["api_name"]: dependency["trigger_mode"] for dependency in listeners}
    shows = {
        dependency["api_name"]: dependency["trigger_mode"]
        for dependency in listeners
        for _, event in dependency["targets"]
        if event in ("tick", "change", "input")
    }
    shown = {"page_around", "page_settings", "page_board", "page_note", "page_card"}
    assert shown <= shows.keys()
    # "once" drops an event while the answer to the one before is on its way
    assert set(shows.values()) == {"always_last"}
    # these bring data of their own, of which "always_last" would bring the first
    assert modes["page_pick"] == modes["page_import"] == "multiple"


def test_each_thing_shown_has_one_event_that_shows_it() -> None:
    """Of two events the older answer may come last, and stay."""
    demo = built_page()
    shows: dict[str, list[str]] = {}
    for event in demo.fns.values():
        for part in event.outputs:
            # what visitors set themselves is set by what they press
            if not isinstance(part, (gr.Slider, gr.Number, gr.File)):
                shows.setdefault(f"{part.elem_id} {part._id}", []).append(event.api_name)
    assert len(shows) > 30
    assert {part: events for part, events in shows.items() if len(events) > 1} == {}


def test_what_a_room_asks_for_at_once_makes_gradio_rebuild_next_to_nothing() -> None:
    """An update costs gradio milliseconds each: the component is built and described anew."""
    [around] = [event for event in built_page().fns.values() if event.api_name == "page_around"]
    answers = around.fn("a-browsers-own-token-" + "1" * 22, None)
    updates = [answer for answer in answers if gr.utils.is_prop_update(answer)]
    assert len(answers) == len(around.outputs) > 10
    assert len(updates) == 2  # Stop, and the box of a run out of memory


def test_a_start_asks_a_room_for_the_page_only_where_it_shows_there(script) -> None:
    """A hundred pages ask for everything around the chart at each change of `page`."""
    hub = script.hub
    hub.memory_free_bytes = lambda: 2**30
    demo = built(lambda: page_module.build_demo(hub))
    [around] = [event for event in demo.fns.values() if event.api_name == "page_around"]
    feed = Feed(hub, "")

    def seen() -> tuple[str, str]:
        answers = around.fn("", gr.Request())
        return feed.status()["page"], repr(
            [getattr(a, "to_json", lambda a=a: a)() for a in answers]
        )

    def started(series=None) -> tuple[bool, bool]:
        """Whether a run's start changes the tag, and what is around."""
        before = seen()
        run = script.start("another")
        run.series = series
        now = seen()
        script.step(run, 3)
        script.end(run)
        assert seen()[0] != now[0]  # an end always shows
        return now[0] != before[0], now[1] != before[1]

    assert started() == (False, False)
    failed = OutOfMemory(
        step=0, moment="forward", asked_bytes=2**20, parts={}, capacity_bytes=2**30,
        smaller_B=1, smaller_T=8,
    )  # fmt: skip
    last = hub.finished[-1]
    last.summary = replace(last.summary, state="out of memory", out_of_memory=failed)
    assert started() == (True, True)
    config = RunConfig(model="tiny", device="cpu")
    hub.staircase = staircase = Staircase(config, hub.device_info.support)
    assert started(staircase) == (True, True)


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


@pytest.mark.parametrize("told", [None, [8.0], "8", {"gib": 8}])
def test_a_card_that_no_choice_told_is_refused_in_words(caplog, told) -> None:
    hub = Hub(device="cpu")
    try:
        with pytest.raises(gr.Error, match="GiB"):
            Page(hub).card(told)
        assert Page(hub).card(8.0) == 8.0
    finally:
        hub.close()
    assert not caplog.records
