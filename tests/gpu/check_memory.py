"""The forecast of peak memory beside what a real GPU takes: `python -m tests.gpu.check_memory`.

Each setting runs three steps through the same code as the page. A row shows the forecast, the
allocator's peak (`max_memory_allocated`), what it had reserved, the forecast's error, the verdict
before the start, and how the run ended.

Exit status: 0 the forecast holds; 1 an error of more than 5 %, or a run that failed after it was
told to fit; 2 there is no CUDA GPU.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from gpt2demo import runner
from gpt2demo.config import InputError, RunConfig
from gpt2demo.data import load_tokens
from gpt2demo.device import DeviceInfo, probe_device
from gpt2demo.fit import FITS
from gpt2demo.records import RunSummary

GIB = 2**30
WORST = 0.05
STEPS = 3


def grid(device: str) -> list[RunConfig]:
    """The settings, in the order in which they run."""
    settings = [
        {
            "B": B,
            "T": T,
            "precision": precision,
            "attention": attention,
            "optimizer": optimizer,
        }
        for T, B, precision, attention, optimizer in itertools.product(
            (256, 1024), (1, 4, 8, 16), ("fp32", "bf16"), ("manual", "sdpa"), ("default", "fused")
        )
    ]
    settings += [
        {"model": "tiny", "B": B, "T": T, "precision": precision}
        for (B, T), precision in itertools.product(
            ((1, 32), (16, 256), (8, 1024)), ("fp32", "tf32", "bf16", "fp16")
        )
    ]
    settings += [
        {"model": model, "B": 2, "T": 256, "precision": "fp64", "attention": attention}
        for model, attention in itertools.product(("tiny", "gpt2"), ("manual", "sdpa"))
    ]
    # a learner's card of 8 GiB, emulated: B=4 is told not to fit, B=2 is
    settings += [{"B": B, "T": 1024, "budget_gib": 8} for B in (4, 2)]
    return [RunConfig(device=device, steps=STEPS, **setting) for setting in settings]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting: what was told, and what came."""

    config: RunConfig
    outcome: str
    verdict: str
    forecast_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    error: float | None = None

    def cells(self) -> list[str]:
        """The row as it is printed."""
        figures = (self.forecast_bytes, self.allocated_bytes, self.reserved_bytes)
        return [
            f"{self.config.label} {self.config.optimizer}",
            *("-" if size is None else f"{size / GIB:.2f}" for size in figures),
            "-" if self.error is None else f"{self.error:+.1%}",
            self.verdict,
            self.outcome,
        ]

    def problem(self) -> str | None:
        """What the forecast got wrong here, or None."""
        if self.error is not None and abs(self.error) > WORST:
            return f"{self.config.label}: the forecast is {self.error:+.1%} off."
        if self.verdict == FITS and self.outcome != "finished":
            return f"{self.config.label}: it was told to fit and ended: {self.outcome}."
        return None


def check(
    config: RunConfig,
    info: DeviceInfo,
    tokens: torch.Tensor,
    execute: Callable[..., RunSummary] = runner.execute,
) -> Row:
    """Run one setting."""
    try:
        runner.check_device(config, info)
    except InputError:
        return Row(config=config, outcome="not available here", verdict="-")
    summary = execute(config, info, on_step=lambda _: None, tokens=tokens)
    memory = summary.memory
    if memory is None:
        return Row(config=config, outcome=summary.state, verdict="-")
    return Row(
        config=config,
        outcome=summary.state,
        verdict=memory.verdict,
        forecast_bytes=memory.forecast_bytes,
        allocated_bytes=memory.measured_bytes,
        reserved_bytes=memory.reserved_bytes,
        error=memory.error,
    )


HEADS = ["setting", "forecast", "allocated", "reserved", "error", "verdict", "outcome"]


def line(cells: Sequence[str]) -> str:
    """A row in columns; sizes are GiB."""
    name, *figures, verdict, outcome = cells
    return f"{name:<48}" + "".join(f"{cell:>11}" for cell in figures) + f"  {verdict:<13}{outcome}"


def report(rows: Iterable[Row]) -> int:
    """Print the rows as they come, then what is wrong; the exit status."""
    print(line(HEADS), flush=True)
    problems = []
    errors = []
    for row in rows:
        print(line(row.cells()), flush=True)
        problems += [problem] if (problem := row.problem()) else []
        errors += [abs(row.error)] if row.error is not None else []
    if not errors:
        problems.append("Nothing was measured.")
    else:
        print(f"\n{len(errors)} peaks measured, the largest error {max(errors):.1%}.")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the grid; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument("--only", default="", help="only settings whose label holds this text")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("There is no CUDA GPU here, so there is nothing to check.", file=sys.stderr)
        return 2
    info = probe_device(options.device)
    tokens, _ = load_tokens(RunConfig(), 2**20)
    print(f"{info.name}, {(info.memory_total_bytes or 0) / GIB:.1f} GiB, torch {torch.__version__}")
    configs = [config for config in grid(options.device) if options.only in config.label]
    return report(check(config, info, tokens) for config in configs)


if __name__ == "__main__":
    sys.exit(main())
