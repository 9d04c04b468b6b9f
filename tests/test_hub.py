"""The line, the owner, the watchers, and what happens when a run's thread fails."""

import gc
import threading
import time
from dataclasses import replace

import pytest

from gpt2demo.config import InputError, RunConfig, Settings
from gpt2demo.hub import Hub, Run
from gpt2demo.records import RunSummary, StepMetrics

WAIT = 20.0  # seconds after which a test gives up


def until(condition, what: str = "condition"):
    end = time.monotonic() + WAIT
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not come within {WAIT} s"
        time.sleep(0.005)
    return value


def tiny(**settings) -> RunConfig:
    return RunConfig(model="tiny", **({"B": 1, "T": 8, "steps": 3} | settings))


def step(number: int, step_ms: float = 100.0) -> StepMetrics:
    return StepMetrics(
        step=number, loss=1.0, step_ms=step_ms, tokens_per_sec=8000 / step_ms, is_warmup=number < 2
    )


class Stage:
    """Stands in for runner.execute: the test decides when a step or the end comes."""

    def __init__(self) -> None:
        self.started: list[RunConfig] = []
        self.go = threading.Semaphore(0)  # one release: one step, or one look at stop_reason
        self.error: BaseException | None = None

    def __call__(self, config, info, *, on_step, stop_reason, progress, **_) -> RunSummary:
        self.started.append(config)
        progress.phase = "training"
        done, reason = 0, None
        while done < config.steps:
            assert self.go.acquire(timeout=WAIT)
            if self.error:
                raise self.error
            if reason := stop_reason():
                break
            on_step(step(done))
            done += 1
        state = "stopped" if reason else "finished"
        return RunSummary(
            state=state,
            message=reason or "Finished.",
            steps_done=done,
            steps_measured=max(0, done - 2),
            seconds=1.0,
            step_ms_median=100.0 if done > 2 else None,
        )


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def clock():
    class Clock:
        now = 1000.0

        def __call__(self) -> float:
            return self.now

    return Clock()


@pytest.fixture
def hub(stage, clock):
    hub = Hub(
        Settings(max_steps=500, max_line=3, max_line_per_visitor=2),
        device="cpu",
        execute=stage,
        clock=clock,
    )
    yield hub
    hub.close(timeout=0)
    stage.go.release(10_000)
    if hub._thread:
        hub._thread.join(WAIT)
        assert not hub._thread.is_alive()


def finish(hub: Hub, stage: Stage, run: Run) -> None:
    stage.go.release(run.config.steps)
    until(lambda: run.summary and hub.current is not run, "the run's end")


# ------------------------------------------------------------------ one at a time, in order


def test_a_run_starts_at_once_and_the_next_waits_its_turn(hub, stage):
    first, second, third = (hub.submit(tiny(seed=i), f"visitor {i}") for i in range(3))
    until(lambda: stage.started)
    assert [run.state for run in (first, second, third)] == ["running", "waiting", "waiting"]
    assert [hub.place(run) for run in (first, second, third)] == [None, 2, 3]
    finish(hub, stage, first)
    until(lambda: second.state == "running")
    assert hub.place(third) == 2
    finish(hub, stage, second)
    finish(hub, stage, third)
    assert [config.seed for config in stage.started] == [0, 1, 2]
    assert [run.state for run in hub.finished] == ["finished"] * 3
    assert hub.current is None


def test_never_two_runs_at_once():
    running, most = [0], [0]
    lock = threading.Lock()

    def execute(config, info, *, on_step, **_):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.002)
        with lock:
            running[0] -= 1
        return RunSummary(state="finished", message="", steps_done=0, steps_measured=0, seconds=0.0)

    hub = Hub(Settings(max_line=1000, max_line_per_visitor=1000), device="cpu", execute=execute)
    threads = [
        threading.Thread(target=lambda i=i: [hub.submit(tiny(), str(i)) for _ in range(25)])
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    until(lambda: hub.current is None and not hub.waiting)
    assert most == [1]
    assert len(hub.finished) == hub.settings.max_finished
    hub.close()


def test_the_wait_is_told_from_the_running_runs_own_steps(hub, stage):
    first = hub.submit(tiny(steps=12), "a")
    second = hub.submit(tiny(steps=7), "b")
    third = hub.submit(tiny(steps=7), "c")
    stage.go.release(2)
    until(lambda: len(first.steps) == 2)
    assert hub.wait_seconds(second) is None  # only warm-up so far
    stage.go.release(2)
    until(lambda: len(first.steps) == 4)
    assert hub.wait_seconds(second) == pytest.approx(0.8)  # 8 steps of 100 ms
    assert hub.wait_seconds(third) is None  # nothing is known of the second's speed
    stage.go.release(8)
    until(lambda: second.state == "running")
    assert hub.wait_seconds(third) == pytest.approx(0.7)  # as fast as its equal before it


# ------------------------------------------------------------------ the owner


def test_only_the_owner_stops_a_run(hub, stage):
    run = hub.submit(tiny(steps=100), "owner")
    until(lambda: stage.started)
    assert "somebody else" in hub.stop("another")
    assert run.state == "running"
    assert hub.stop("owner") == "Stopping after this step."
    assert run.state == "stopping"  # while the step goes on
    stage.go.release()
    until(lambda: run.summary)
    assert run.state == "stopped"
    assert "Stop" in run.summary.message


def test_the_owner_leaves_the_line(hub, stage):
    hub.submit(tiny(), "first")
    waiting = [hub.submit(tiny(), "second") for _ in range(2)]
    assert hub.stop("second") == "Taken out of the line."
    assert not hub.waiting
    assert [hub.place(run) for run in waiting] == [None, None]


def test_stop_with_nothing_to_stop(hub):
    assert hub.stop("anybody") == "Nothing is running."


def test_stopping_twice_keeps_the_first_reason(hub, stage, clock):
    run = hub.submit(tiny(steps=100), "owner")
    until(lambda: stage.started)
    hub.stop("owner")
    clock.now += 10_000  # the time limit is passed too
    stage.go.release()
    until(lambda: run.summary)
    assert "Stop" in run.summary.message


# ------------------------------------------------------------------ limits


def refused(hub: Hub, config: RunConfig, owner: str = "me") -> str:
    before = threading.active_count()
    with pytest.raises(InputError) as refusal:
        hub.submit(config, owner)
    assert threading.active_count() == before
    assert hub.current is None or hub.current.owner != owner or hub.waiting
    return str(refusal.value)


def test_more_steps_than_the_page_allows(hub):
    assert refused(hub, tiny(steps=501)) == (
        "steps must be a whole number from 1 to 500 on this page, not 501."
    )


def test_a_full_line(hub, stage):
    for i in range(4):  # one runs, three wait
        hub.submit(tiny(), f"visitor {i}")
    assert "The line is full: 3 runs wait" in refused(hub, tiny())


def test_one_visitor_cannot_fill_the_line(hub, stage):
    for _ in range(3):
        hub.submit(tiny(), "greedy")
    assert "You have 2 runs in the line" in refused(hub, tiny(), "greedy")
    assert hub.submit(tiny(), "modest").state == "waiting"


def test_a_precision_that_is_not_there(hub):
    support = dict(hub.device_info.support)
    support["fp64"] = replace(support["fp64"], status="not available", reason="None here.")
    hub.device_info = replace(hub.device_info, support=support)
    assert "None here." in refused(hub, tiny(precision="fp64"))


def test_an_own_text_is_checked_before_it_waits_and_not_kept(hub, stage):
    assert "needs at least 9" in refused(hub, tiny(text="too short"))
    words = "the quick brown fox jumps over the lazy dog " * 3
    run = hub.submit(tiny(text=words), "me")
    until(lambda: stage.started)
    gc.collect()
    configs = [thing for thing in gc.get_objects() if type(thing) is RunConfig]
    assert run.config in configs
    assert not [config for config in configs if config.text == words]
    assert run.config.text_name == "own"
    assert run.tokens.tolist()[:3] == [1169, 2068, 7586]  # "the", " quick", " brown"


def test_a_run_that_takes_too_long_is_stopped(hub, stage, clock):
    run = hub.submit(tiny(steps=100), "me")
    stage.go.release(3)
    until(lambda: len(run.steps) == 3)
    clock.now += hub.settings.max_seconds + 1
    hub.seen()
    stage.go.release()
    until(lambda: run.summary)
    assert run.summary.message == "a run may take 1,800 seconds on this page"
    assert len(run.steps) == 3


# ------------------------------------------------------------------ watchers


def test_a_run_nobody_watches_is_stopped_after_a_minute(hub, stage, clock):
    run = hub.submit(tiny(steps=100), "gone")
    clock.now += 59
    stage.go.release()
    until(lambda: len(run.steps) == 1)
    clock.now += 2
    stage.go.release()
    until(lambda: run.summary)
    assert run.summary.message == "nobody watched for 60 seconds"


def test_one_watcher_keeps_it_going(hub, stage, clock):
    run = hub.submit(tiny(steps=20), "gone")
    for done in range(1, 21):
        clock.now += 50
        hub.seen()
        stage.go.release()
        until(lambda done=done: len(run.steps) == done)
    until(lambda: run.summary)
    assert run.state == "finished"


# ------------------------------------------------------------------ bad luck


class Panic(BaseException):
    """As the tokenizer's Rust code raises it."""


@pytest.mark.parametrize("error", [ValueError("boom"), Panic("panic"), SystemExit(3)])
def test_whatever_ends_a_run_the_next_one_starts(hub, stage, caplog, error):
    broken = hub.submit(tiny(), "me")
    fine = hub.submit(tiny(), "me")
    stage.error = error
    stage.go.release()
    until(lambda: broken.summary, "the broken run's end")
    stage.error = None
    finish(hub, stage, fine)
    assert broken.state == "error"
    assert "boom" not in broken.summary.message
    assert type(error).__name__ in caplog.text  # in the log, in full
    assert fine.state == "finished"


def test_a_text_found_unfit_in_the_thread_is_told_in_its_own_words(hub, stage):
    run = hub.submit(tiny(), "me")
    stage.error = InputError("text", "The text is unfit.")
    stage.go.release()
    until(lambda: run.summary)
    assert (run.state, run.summary.message) == ("error", "The text is unfit.")


def test_closing_ends_the_run_and_takes_no_more(hub, stage):
    run = hub.submit(tiny(steps=100), "me")
    hub.submit(tiny(), "me")
    threading.Timer(0.1, stage.go.release).start()
    hub.close(timeout=WAIT)
    assert run.state == "stopped"
    assert not hub.waiting
    with pytest.raises(InputError, match="closing"):
        hub.submit(tiny(), "me")


def test_a_real_run_through_the_hub():
    hub = Hub(Settings(), device="cpu")
    run = hub.submit(tiny(steps=4), "me")
    states = set()
    until(lambda: states.add(run.state) or run.summary)
    assert run.state == "finished"
    assert states <= {"waiting", "loading", "running", "finished"}
    record = run.record()
    assert [s.step for s in record.steps] == [0, 1, 2, 3]
    assert record.config["device"] == "cpu"
    assert record.device["type"] == "cpu"
    until(lambda: hub.current is None)
    hub.close()
