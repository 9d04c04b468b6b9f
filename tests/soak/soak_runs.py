"""Run after run after run through the hub: `python -m tests.soak.soak_runs`.

Tiny models in every precision, one after the other, some stopped at a random moment, some that find
no memory or whose loss is not a number. Afterwards the process must be what it was after the first
ten: its memory, its threads, its open files, its temporary files. Every run keeps all its rows, and
the board holds the right runs when it is opened again.

Exit status 1 where a bound was broken.
"""

import argparse
import gc
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from gpt2demo import runner
from gpt2demo.board import Board
from gpt2demo.config import PRECISIONS, RunConfig, Settings
from gpt2demo.hub import Hub
from gpt2demo.records import RunSummary, StepMetrics

SHORT, LONG = 24, 1000  # runs
BOUND_MIB = 100  # of memory, more than after the tenth run
SETTLED = 10  # runs
KINDS = ("plain", "stopped", "no memory", "diverged")


@dataclass(kw_only=True)
class Figures:
    """What a soak of runs has come to."""

    runs: Counter = field(default_factory=Counter)  # (kind, state) -> how many
    seconds: float = 0.0
    rss_mib: list[float] = field(default_factory=list)  # after every run past the tenth
    before: tuple[int, int, int] = (0, 0, 0)  # threads, open files, temporary files
    after: tuple[int, int, int] = (0, 0, 0)
    faults: list[str] = field(default_factory=list)

    def words(self) -> str:
        """The figures in three lines."""
        told = ", ".join(f"{n} {kind} ({state})" for (kind, state), n in sorted(self.runs.items()))
        first, last, most = self.rss_mib[0], self.rss_mib[-1], max(self.rss_mib)
        return (
            f"{self.runs.total()} runs in {self.seconds:.0f} s: {told}\n"
            f"memory: {first:.0f} MiB after run {SETTLED}, {last:.0f} after the last, most "
            f"{most:.0f}\nthreads, open files, temporary files: {self.before} before, "
            f"{self.after} after"
        )


def plan(count: int, chance: random.Random) -> Iterator[tuple[str, RunConfig]]:
    """The kinds and settings of `count` runs: every precision meets every kind."""
    for number in range(count):
        precision = PRECISIONS[number % len(PRECISIONS)]
        kind = KINDS[(number // len(PRECISIONS)) % len(KINDS)]
        # a step of fp16 takes many times as long on most CPUs
        sizes = {"B": 1, "T": 8} if precision == "fp16" else {"B": chance.choice((1, 2)), "T": 16}
        steps = 1 if precision == "fp16" else chance.randint(3, 6)
        if kind == "no memory" and precision == "fp32":  # really: the tracker finds it too large
            sizes, budget = {"B": 1, "T": 1024}, 0.25
        else:
            budget = None
        yield (
            kind,
            RunConfig(
                budget_gib=budget,
                model="tiny",
                precision=precision,
                **sizes,
                steps=50 if kind == "stopped" else steps,
                attention=chance.choice(("manual", "sdpa")),
                seed=number,
            ),
        )


class Room:
    """A hub whose runs can be made to fail: `inject` is what the loss of a run becomes."""

    def __init__(self, board: Board) -> None:
        self.inject: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.hub = Hub(
            Settings(max_finished=20, max_board=2000, orphan_seconds=3600),
            device="cpu",
            board=board,
            execute=self._execute,
        )

    def _execute(self, *args: object, **more: object) -> RunSummary:
        inject, kept = self.inject, torch.nn.functional.cross_entropy
        if inject is None:
            return runner.execute(*args, **more)
        torch.nn.functional.cross_entropy = lambda *values, **options: inject(
            kept(*values, **options)
        )
        try:
            return runner.execute(*args, **more)
        finally:
            torch.nn.functional.cross_entropy = kept


def no_memory(loss: torch.Tensor) -> torch.Tensor:
    """As torch says it."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def not_a_number(loss: torch.Tensor) -> torch.Tensor:
    """A loss that diverged."""
    return loss * float("nan")


def expected(kind: str) -> set[str]:
    """The states in which a run of this kind may end."""
    return {
        "plain": {"finished"},
        "stopped": {"stopped", "finished"},
        "no memory": {"out of memory"},
        "diverged": {"diverged"},
    }[kind]


def complete(steps: list[StepMetrics], summary: RunSummary) -> bool:
    """Whether a run has all its rows, in order."""
    return [step.step for step in steps] == list(range(summary.steps_done))


def counts(folder: str) -> tuple[int, int, int]:
    """Threads, open files and temporary files of this process."""
    process = psutil.Process()
    temporary = sum(len(names) for _, _, names in os.walk(folder))
    return process.num_threads(), process.num_fds(), temporary


def at_rest(folder: str, before: tuple[int, ...], seconds: float = 5) -> tuple[int, int, int]:
    """`counts` once they are no more than `before`: the system's threads, OpenMP's among them, end
    a moment after Python's. Or what they still are after these seconds.
    """
    end = time.monotonic() + seconds
    while True:
        now = counts(folder)
        if all(a <= b for a, b in zip(now, before, strict=True)) or time.monotonic() > end:
            return now
        time.sleep(0.05)


def run(count: int, seed: int = 6, say: Callable[[str], None] = lambda _: None) -> Figures:
    """The whole soak; what it found."""
    figures, chance = Figures(), random.Random(seed)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        board_folder, temporary = Path(folder) / "board", Path(folder) / "tmp"
        temporary.mkdir()
        tempfile.tempdir = str(temporary)
        try:
            board = Board(board_folder, limit=2000)
            room = Room(board)
            for number, (kind, config) in enumerate(plan(count, chance), 1):
                one_run(room, kind, config, chance, figures)
                if number >= SETTLED:
                    gc.collect()
                    figures.rss_mib.append(psutil.Process().memory_info().rss / 2**20)
                if number == SETTLED:
                    figures.before = counts(str(temporary))
                if number % 100 == 0:
                    say(f"{number} runs, {figures.rss_mib[-1]:.0f} MiB")
            room.hub.close()
            gc.collect()
            figures.after = at_rest(str(temporary), figures.before)
            board.close()
            check(figures, board_folder, count)
        finally:
            tempfile.tempdir = None
    figures.seconds = time.monotonic() - start
    return figures


def one_run(
    room: Room, kind: str, config: RunConfig, chance: random.Random, figures: Figures
) -> None:
    """One run from Run to its end, and a look at its rows."""
    injected = {"diverged": not_a_number}
    if config.budget_gib is None:
        injected["no memory"] = no_memory
    room.inject = injected.get(kind)
    started = room.hub.submit(config, "soak")
    if kind == "stopped":
        wanted = 0 if config.precision == "fp16" else chance.randint(0, 2)
        while len(started.steps) < wanted and not started.summary:
            time.sleep(0.002)
        room.hub.stop("soak")
    end = time.monotonic() + 300
    while not started.summary or room.hub.current:
        room.hub.seen()
        if time.monotonic() > end:
            figures.faults.append(f"a run did not end: {config.label}, {kind}")
            return
        time.sleep(0.002)
    state = started.summary.state
    figures.runs[kind, state] += 1
    if state not in expected(kind):
        figures.faults.append(f"{kind}, {config.label}: {state}: {started.summary.message}")
    if not complete(started.steps, started.summary):
        figures.faults.append(f"{kind}, {config.label}: {len(started.steps)} rows")


def check(figures: Figures, board_folder: Path, count: int) -> None:
    """Hold the figures against the bounds."""
    grown = figures.rss_mib[-1] - figures.rss_mib[0]
    if grown > BOUND_MIB:
        figures.faults.append(f"memory grew by {grown:.0f} MiB after run {SETTLED}")
    names = ("threads", "open files", "temporary files")
    for name, before, after in zip(names, figures.before, figures.after, strict=True):
        if after > before:
            figures.faults.append(f"{name}: {before} after run {SETTLED}, {after} at the end")
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("run-")]
    if left:
        figures.faults.append(f"threads of runs left over: {left}")
    again = Board(board_folder, limit=2000)
    runs = again.runs()
    if len(runs) != count:
        figures.faults.append(f"the board has {len(runs)} of {count} runs after a restart")
    for kept in runs:
        whole = again.record(kept.id)
        if whole is None or not complete(list(whole.steps), whole.summary):
            figures.faults.append(f"the board's run {kept.id} is not whole")
    again.close()


def main() -> int:
    """Print the figures; 1 where a bound was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=LONG)
    figures = run(parser.parse_args().runs, say=print)
    print(figures.words())
    for fault in figures.faults:
        print("FAULT", fault)
    return 1 if figures.faults else 0


if __name__ == "__main__":
    sys.exit(main())
