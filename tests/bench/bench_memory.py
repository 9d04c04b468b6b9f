"""What following the memory of a run costs: `python -m tests.bench.bench_memory`.

On a CPU the tensors of a run's first two steps are followed. Runs with and without it alternate in
one process; a figure is the median over the turns, the ratio the median of the pairs' ratios, for
the steps that nobody follows, which must not differ, and for each of the two that are followed.
Last, how long a forecast with its limits and the whole map take. Run it on a machine that does
nothing else.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch

from gpt2demo import train as train_module
from gpt2demo.config import WARMUP_STEPS, RunConfig
from gpt2demo.data import load_tokens
from gpt2demo.fit import card, fit_map, report
from gpt2demo.tracker import MemoryMeter

# the setting, and how many times as many turns: a short step varies more
SETTINGS = [({"model": "tiny", "B": 4, "T": 32}, 5), ({"model": "gpt2", "B": 1, "T": 64}, 1)]
CPU = torch.device("cpu")


class Nothing(MemoryMeter):
    """Follows nothing, as on a device with counters of its own."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self._tracker = None


def one_run(config: RunConfig, tokens: torch.Tensor, meter: type[MemoryMeter]) -> list[float]:
    """ms of the first step, of the second, and the median of the others."""
    with mock.patch.object(train_module, "MemoryMeter", meter):
        step_ms = [step.step_ms for step in train_module.train(config, tokens, CPU)]
    return [*step_ms[:WARMUP_STEPS], statistics.median(step_ms[WARMUP_STEPS:])]


def alternate(config: RunConfig, tokens: torch.Tensor, turns: int) -> list[list[list[float]]]:
    """Turns of [with, without]; which comes first alternates too."""
    for meter in (MemoryMeter, Nothing):  # what only a process's first run pays
        one_run(config, tokens, meter)
    found = []
    for turn in range(turns):
        order = (MemoryMeter, Nothing) if turn % 2 else (Nothing, MemoryMeter)
        ran = {meter: one_run(config, tokens, meter) for meter in order}
        found.append([ran[MemoryMeter], ran[Nothing]])
    return found


def median_ms(action: Callable[[], object], times: int = 51) -> float:
    """The median ms of `action`."""
    taken = []
    for _ in range(times):
        t0 = time.perf_counter()
        action()
        taken.append((time.perf_counter() - t0) * 1000)
    return statistics.median(taken)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=8, help="steps that nobody follows")
    options = parser.parse_args()
    tokens, _ = load_tokens(RunConfig(), 2**20)
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{torch.get_num_threads()} threads, "
        f"{torch.cpu.get_capabilities().get('cpu_name', platform.processor())}"
    )
    print("| model | B, T | step | followed, ms | not followed, ms | ratio |")
    print("|---|---|---|---|---|---|")
    for setting, more in SETTINGS:
        config = RunConfig(device="cpu", steps=WARMUP_STEPS + options.steps, **setting)
        turns = alternate(config, tokens, more * options.turns)
        for i, name in enumerate(("first", "second", "later ones")):
            with_it, without = ([turn[k][i] for turn in turns] for k in (0, 1))
            ratio = statistics.median(a / b for a, b in zip(with_it, without, strict=True))
            print(
                f"| {config.model} | {config.B}, {config.T} | {name} "
                f"| {statistics.median(with_it):.1f} | {statistics.median(without):.1f} "
                f"| {ratio:.3f} |",
                flush=True,
            )
    gpt2 = RunConfig(B=4, T=1024)
    print(f"forecast, verdict and limits: {median_ms(lambda: report(gpt2, card(8))):.2f} ms")
    print(f"the map: {median_ms(lambda: fit_map(gpt2, card(8))):.2f} ms")


if __name__ == "__main__":
    main()
