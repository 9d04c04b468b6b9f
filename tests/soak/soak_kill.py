"""`kill -9` at random moments while runs are written: `python -m tests.soak.soak_kill`.

Three processes at a time add runs to one board and say each time that a run is on the disk; each is
killed at some moment. Then the board is opened, and must hold every run
that was said to be there, whole.

Exit status 1 where one is not. The short form is a test of tests/test_board.py.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from gpt2demo.board import Board
from gpt2demo.board_file import FILE_NAME
from gpt2demo.config import RunConfig
from gpt2demo.records import RunRecord, RunSummary, StepMetrics, timing

ROOT = Path(__file__).resolve().parents[2]
SHORT, LONG = 7, 170  # rounds of three processes
SEED = 20
# Adds runs one after the other, and says each time that it is on the disk.
WRITER = """
import dataclasses, json, sys
from pathlib import Path
from gpt2demo.board import Board
from gpt2demo.records import RunRecord
folder, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
template = RunRecord.from_dict(json.loads(sys.argv[4]))
board = Board(folder, limit=100_000)
for number in range(first, first + count):
    summary = dataclasses.replace(template.summary, message=f"Finished: run {number}.")
    run_id = board.add(dataclasses.replace(template, summary=summary), "ada")
    assert board.note is None or "moved aside" in board.note, board.note
    print(run_id, number, flush=True)
"""


def template() -> RunRecord:
    """A run of 30 steps."""
    config = RunConfig(precision="bf16", B=2, T=64, steps=30)
    steps = tuple(
        StepMetrics(
            step=i, loss=10.8 - i / 7, step_ms=100.1 + i / 3, tokens_per_sec=1280 / 1.3,
            is_warmup=i < 2,
        )
        for i in range(30)
    )  # fmt: skip
    measured = timing(steps)
    summary = RunSummary(
        state="finished",
        message="",
        steps_done=30,
        steps_measured=measured.steps_measured,
        seconds=1.5,
        step_ms_median=measured.step_ms_median,
        final_loss=steps[-1].loss,
    )
    device = {"type": "cpu", "name": "a CPU", "support": {}}
    return RunRecord(config=config.to_dict(), device=device, steps=steps, summary=summary)


def writer(folder: Path, first: int, count: int = 10_000) -> "subprocess.Popen[str]":
    """A process that adds runs of the numbers from `first` on to the board in `folder`."""
    return subprocess.Popen(
        [
            *(sys.executable, "-c", WRITER),
            *(str(folder), str(first), str(count), json.dumps(template().to_dict())),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


@dataclass(kw_only=True)
class Figures:
    """What the kills have come to."""

    kills: int = 0
    promised: dict[int, int] = field(default_factory=dict)  # run id -> its number
    faults: list[str] = field(default_factory=list)


def run(folder: Path, rounds: int, seed: int = SEED) -> Figures:
    """The whole soak; what it found."""
    figures, chance = Figures(), random.Random(seed)
    for round_number in range(rounds):
        for process in [writer(folder, 10_000 * (3 * round_number + i)) for i in range(3)]:
            lines = [process.stdout.readline() for _ in range(chance.randrange(4))]
            time.sleep(chance.random() * 0.03)
            process.kill()
            out, err = process.communicate()
            if process.returncode != -signal.SIGKILL:
                figures.faults.append(f"a process ended by itself: {err[-500:]}")
            figures.kills += 1
            for line in "".join([*lines, out]).splitlines(keepends=True):
                if line.endswith("\n"):
                    run_id, number = map(int, line.split())
                    figures.promised[run_id] = number
        board = Board(folder, limit=100_000)
        if board.note:
            figures.faults.append(f"after round {round_number}: {board.note}")
        lost = figures.promised.keys() - {kept.id for kept in board.runs()}
        if lost:
            figures.faults.append(f"after round {round_number}: {len(lost)} runs lost")
    steps = template().steps
    for run_id, number in figures.promised.items():
        record = board.record(run_id)
        if record is None or record.steps != steps:
            figures.faults.append(f"run {number} is not whole")
        elif record.summary.message != f"Finished: run {number}.":
            figures.faults.append(f"run {number} is another: {record.summary.message}")
    if strange := [path.name for path in folder.iterdir() if path.name != FILE_NAME]:
        figures.faults.append(f"left beside the board: {strange}")
    return figures


def main() -> int:
    """Print the figures; 1 where a run was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=LONG)
    rounds = parser.parse_args().rounds
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        figures = run(Path(folder), rounds)
    print(
        f"{figures.kills} processes killed in {time.monotonic() - start:.0f} s, "
        f"{len(figures.promised)} runs had been said to be written"
    )
    for fault in figures.faults:
        print("FAULT", fault)
    return 1 if figures.faults else 0


if __name__ == "__main__":
    sys.exit(main())
