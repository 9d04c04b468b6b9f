"""The line, the owner, the watchers, and what happens when a run's thread fails."""

import gc
import threading
import time
from dataclasses import replace

import pytest

from gpt2demo.config import InputError, RunConfig, Settings
from gpt2demo.hub import Hub
from gpt2demo.records import OutOfMemory, RunSummary, StepMetrics
from gpt2demo.run import Run

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
            seconds=done * 0.1,
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


def waits(hub: Hub, stage: Stage, run: Run) -> list[float | None]:
    """How long `run` is told to wait at the start of each run before it."""
    told = []
    while run.state == "waiting":
        before = hub.current
        told.append(hub.wait_seconds(run))
        finish(hub, stage, before)
        until(lambda before=before: hub.current not in (None, before))
    return told


def test_behind_a_race_the_wait_is_for_all_its_runs(hub, stage):
    hub.compare(tiny(steps=5), ["fp32", "bf16"], 3, "presenter")
    run = hub.submit(tiny(), "guest")
    until(lambda: stage.started)
    # nothing is known in the first round; then every run is 5 steps of 100 ms
    assert waits(hub, stage, run) == [None, None, *map(pytest.approx, (2.0, 1.5, 1.0, 0.5))]


def test_behind_a_staircase_the_wait_is_for_all_its_rungs(hub, stage):
    hub.climb(tiny(steps=4), "presenter")
    run = hub.submit(tiny(), "guest")
    until(lambda: stage.started)
    assert waits(hub, stage, run) == [None] * 7
    hub.climb(tiny(steps=5, seed=7), "presenter")  # all its rungs have run before
    last = hub.submit(tiny(), "guest")
    until(lambda: hub.current is run)
    finish(hub, stage, run)
    until(lambda: hub.current and hub.current.series)
    assert waits(hub, stage, last) == [pytest.approx(0.5 * left) for left in range(7, 0, -1)]


def test_no_run_is_waited_for_longer_than_it_may_take(hub, stage):
    first = hub.submit(tiny(steps=500), "a")
    second = hub.submit(tiny(), "b")
    stage.go.release(3)
    until(lambda: len(first.steps) == 3)
    assert hub.wait_seconds(second) == pytest.approx(49.7)
    hub.settings = replace(hub.settings, max_seconds=20)
    assert hub.wait_seconds(second) == 20


def test_behind_a_search_nobody_knows_the_wait(hub, stage):
    hub.find_limit(tiny(), "B", "presenter")
    run = hub.submit(tiny(), "guest")
    until(lambda: stage.started)
    assert hub.wait_seconds(run) is None


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


# --- series of runs, and ways on after an out-of-memory


class Card:
    """Stands in for runner.execute on a machine where B up to `most` runs."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tried: list[int] = []
        self.poison = False

    def __call__(self, config, info, *, progress, stop_reason, **_) -> RunSummary:
        self.tried.append(config.B)
        progress.poisoned = self.poison
        reason = stop_reason()
        state = "finished" if config.B <= self.most else "out of memory"
        failed = OutOfMemory(
            step=0,
            moment="forward",
            asked_bytes=1,
            parts={},
            capacity_bytes=1,
            smaller_B=self.most,
            smaller_T=0,
        )
        return RunSummary(
            state="error" if self.poison else "stopped" if reason else state,
            message="",
            steps_done=2,
            steps_measured=0,
            seconds=0.1,
            out_of_memory=failed if state == "out of memory" else None,
        )


@pytest.fixture
def card():
    card = Card(3)
    hub = Hub(Settings(), device="cpu", execute=card)
    yield card, hub
    hub.close()


def test_a_search_runs_try_after_try_and_tells_what_it_found(card):
    machine, hub = card
    hub.find_limit(tiny(B=9, T=512, budget_gib=2), "B", "me")
    until(lambda: hub.search.message)
    until(lambda: hub.current is None)
    assert 2 <= len(machine.tried) <= 6
    assert hub.search.message == "The largest B that ran at T=512 is 3; B=4 ran out of memory."
    assert [run.config.B for run in hub.finished] == machine.tried
    assert {run.owner for run in hub.finished} == {"me"}
    assert {run.config.steps for run in hub.finished} == {2}


def test_the_tries_follow_each_other_before_the_line_moves(hub, stage):
    hub.find_limit(tiny(B=9, T=512, budget_gib=2), "B", "me")
    hub.submit(tiny(steps=5), "other")
    for _ in range(2):
        stage.go.release()
    until(lambda: len(stage.started) == 2)
    assert stage.started[1].steps == 2  # the second try, not the run that waits
    hub.stop("me")
    stage.go.release()
    until(lambda: len(stage.started) == 3)
    assert stage.started[2].steps == 5
    assert hub.search.message.startswith("The search ended: a try was stopped.")
    for _ in range(5):
        stage.go.release()
    until(lambda: not hub.current)
    assert len(stage.started) == 3


def test_a_race_runs_every_precision_and_keeps_an_own_text_for_it(hub, stage):
    race = hub.compare(tiny(text="secret words " * 20), ["fp32", "bf16"], 1, "me")
    with pytest.raises(InputError, match="go on already"):
        hub.compare(tiny(), ["fp32"], 1, "me")
    for _ in range(6):
        stage.go.release()
    until(lambda: race.message)
    until(lambda: not hub.current)
    assert [config.precision for config in stage.started] == ["fp32", "bf16"]
    assert {config.text for config in stage.started} == {"own"}
    assert race.config.text == "own"
    assert all(run.tokens is None for run in hub.finished)
    assert race is hub.race


def test_a_race_that_is_stopped_or_refused(hub, stage):
    race = hub.compare(tiny(), ["fp32", "bf16", "tf32"], 3, "me")
    hub.stop("me")
    stage.go.release()
    until(lambda: race.message)
    assert len(stage.started) == 1
    assert race.message.startswith("The race ended: the fp32 run was stopped.")
    for precisions, rounds in (([], 1), (["fp33"], 1), ("fp32", 1), (["fp32"], 0), (None, 1)):
        with pytest.raises(InputError):
            hub.compare(tiny(), precisions, rounds, "me")
    with pytest.raises(InputError, match="steps must be a whole number from 1 to 500 on this page"):
        hub.compare(tiny(steps=1001), ["fp32"], 1, "me")
    assert hub.current is None


def test_a_probe_waits_for_nobody_and_runs_wait_for_it(hub, stage, monkeypatch):
    probing, go_on = threading.Event(), threading.Event()

    def slow(info, tokens, should_stop):
        probing.set()
        assert go_on.wait(WAIT)
        return tokens

    monkeypatch.setattr("gpt2demo.hub.probe_rates", slow)
    assert hub.rates() is None
    thread = threading.Thread(target=hub.probe, args=(128,))
    thread.start()
    assert probing.wait(WAIT)
    run = hub.submit(tiny(), "me")
    assert (run.state, hub.place(run)) == ("waiting", 1)
    assert hub.wait_seconds(run) is None
    assert hub.measuring == "Probing this device."
    with pytest.raises(InputError, match="Something runs here now"):
        hub.probe(64)
    go_on.set()
    thread.join(WAIT)
    assert hub.probed == 128
    until(lambda: stage.started)
    with pytest.raises(InputError, match="Something runs here now"):
        hub.probe(64)


def test_a_probe_that_fails_lets_the_runs_go_on(hub, stage, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no")

    monkeypatch.setattr("gpt2demo.hub.probe_rates", broken)
    with pytest.raises(RuntimeError):
        hub.probe(64)
    hub.submit(tiny(), "me")
    until(lambda: stage.started)


def test_one_search_a_visitor(hub, stage):
    hub.find_limit(tiny(), "B", "me")
    with pytest.raises(InputError, match="go on already"):
        hub.find_limit(tiny(), "T", "me")
    with pytest.raises(InputError, match="axis must be B or T"):
        hub.find_limit(tiny(), "C", "other")


def test_an_own_text_is_not_kept_for_a_search(hub, stage):
    run = hub.find_limit(tiny(text="secret words " * 20), "B", "me")
    assert run.config.text == hub.search.config.text == "builtin"


def test_a_smaller_run_after_an_out_of_memory(card):
    machine, hub = card
    failed = hub.submit(tiny(B=8), "me")
    until(lambda: failed.summary)
    again = hub.run_smaller(failed.id, "B", "somebody")
    until(lambda: again.summary)
    assert again.config == replace(failed.config, B=3)
    assert machine.tried == [8, 3]
    for run_id, axis in (("none", "B"), (failed.id, "T"), (failed.id, "seed"), (again.id, "B")):
        with pytest.raises(InputError, match="not kept any more"):
            hub.run_smaller(run_id, axis, "me")


def test_an_own_text_is_not_there_for_a_smaller_run(card):
    _, hub = card
    failed = hub.submit(tiny(B=8, text="secret words " * 40), "me")
    until(lambda: failed.summary)
    with pytest.raises(InputError, match="set B to 3, press Run"):
        hub.run_smaller(failed.id, "B", "me")


def test_a_gpu_that_works_no_more_refuses_runs_until_the_restart(card):
    machine, hub = card
    machine.poison = True
    run = hub.submit(tiny(), "me")
    until(lambda: run.summary and not hub.current)
    for start in (
        lambda: hub.submit(tiny(), "me"),
        lambda: hub.find_limit(tiny(), "B", "me"),
    ):
        with pytest.raises(InputError, match="must restart"):
            start()
    assert len(machine.tried) == 1


def test_memory_is_what_is_free_once_the_running_run_has_ended(hub, stage, monkeypatch):
    frees = iter((20 * 2**30, 5 * 2**30))
    monkeypatch.setattr("gpt2demo.hub.free_bytes_now", lambda *_: next(frees))
    monkeypatch.setattr("gpt2demo.runner.memory_free_bytes", lambda *_: 7 * 2**30)
    assert hub.capacity(tiny()).machine_bytes == 7 * 2**30
    hub.submit(tiny(), "me")
    assert hub.capacity(tiny()).machine_bytes == 20 * 2**30


def test_closing_ends_the_run_and_takes_no_more(hub, stage):
    run = hub.submit(tiny(steps=100), "me")
    hub.submit(tiny(), "me")
    threading.Timer(0.1, stage.go.release).start()
    hub.close(timeout=WAIT)
    assert run.state == "stopped"
    assert not hub.waiting
    with pytest.raises(InputError, match="closing"):
        hub.submit(tiny(), "me")


def test_closing_writes_a_run_whose_step_takes_too_long(hub, stage):
    run = hub.submit(tiny(steps=100), "me")
    stage.go.release(3)
    until(lambda: len(run.steps) == 3)
    hub.close(timeout=0.05)
    stage.go.release()  # the step ends after all: the run is not written twice
    until(lambda: run.summary and hub.current is None)
    (kept,) = hub.board.runs("me")
    assert kept.mine
    assert kept.record.summary.state == "interrupted"
    assert "3 of 100 steps" in kept.record.summary.message
    assert len(hub.board.record(kept.id).steps) == 3


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
