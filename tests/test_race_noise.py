"""A race beside a real busy neighbour: the ranking stays, and the spread tells of it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from gpt2demo.config import RunConfig
from gpt2demo.device import probe_device
from gpt2demo.race import PrecisionResult, Race
from gpt2demo.records import RunRecord
from gpt2demo.runner import execute

CONFIG = RunConfig(model="tiny", B=2, T=32, steps=6, device="cpu")
PRECISIONS = ("fp32", "fp64")  # on every CPU the second takes about twice as long
ROUNDS = 4


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """Processes that keep every core busy twice over."""
    with ExitStack() as stack:
        for _ in range(2 * (os.cpu_count() or 1)):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def race(*, noisy: bool) -> dict[str, PrecisionResult]:
    running = Race(CONFIG, PRECISIONS, rounds=ROUNDS)
    info = probe_device("cpu")
    with ExitStack() as neighbour:
        if noisy:
            neighbour.enter_context(busy_neighbour())
        while config := running.next_run():
            if running.runs_done == len(PRECISIONS) * ROUNDS // 2:
                neighbour.close()  # half of the race is over
            steps = []
            summary = execute(config, info, on_step=steps.append)
            record = RunRecord(
                config=config.to_dict(), device=info.to_dict(), steps=tuple(steps), summary=summary
            )
            running.ended(record)
    return {result.precision: result for result in running.results()}


def test_a_busy_neighbour_changes_no_ranking_and_shows_in_the_spread():
    quiet, noisy = race(noisy=False), race(noisy=True)
    for results in (quiet, noisy):
        fp64 = results["fp64"]
        assert fp64.spread == "rounds"
        assert fp64.speedup < 1  # the ranking
        assert fp64.speedup_low <= fp64.speedup <= fp64.speedup_high
    # the neighbour's rounds are slower for both; the rounds' own ratios hardly move
    for result in noisy.values():
        slow, fast = result.round_ms_medians[:2], result.round_ms_medians[2:]
        assert min(slow) > max(fast)
        assert result.step_ms_p75 > 1.3 * result.step_ms_p25
    assert 0.5 < noisy["fp64"].speedup / quiet["fp64"].speedup < 2
