"""Step time of our loop beside a bare loop over transformers' GPT-2.

`python -m tests.bench.bench_train` from the project's folder.

Manual attention with the default AdamW: both train in this process, turn by turn. SDPA with the
fused AdamW: transformers trains in a process of its own, started the ordinary way, so that nothing
we set can help it, again turn by turn. A turn is a run of its own, without its first two steps; its
figure is the median, and the table shows the median of the turns. Run it on a machine that does
nothing else.
"""

import argparse
import multiprocessing
import platform
import statistics
import time
from multiprocessing.connection import Connection

import torch
import transformers

from gpt2demo.config import WARMUP_STEPS, RunConfig
from gpt2demo.data import DataLoaderLite, load_tokens
from gpt2demo.train import train
from tests.gpt2_reference import reference_model

SETTINGS = [
    (attention, optimizer, B, T, precision)
    for attention, optimizer in (("manual", "default"), ("sdpa", "fused"))
    for B, T in ((4, 32), (2, 128))
    for precision in ("fp32", "bf16")
]
CPU = torch.device("cpu")


def ours(config: RunConfig, tokens: torch.Tensor) -> float:
    """Median ms/step of one run of `train`."""
    steps = train(config, tokens, CPU)
    return statistics.median([step.step_ms for step in steps if not step.is_warmup])


def theirs(config: RunConfig, tokens: torch.Tensor) -> float:
    """Median ms/step of one run of a bare loop over transformers' model."""
    torch.manual_seed(config.seed)
    model = reference_model(config.gpt, "eager" if config.attention == "manual" else "sdpa")
    fused = {"fused": True} if config.optimizer == "fused" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, **fused)
    loader = DataLoaderLite(tokens, config.B, config.T)
    amp = config.precision == "bf16"
    taken = []
    for _ in range(config.steps):
        x, y = loader.next_batch()
        t0 = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            logits = model(x, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.view(-1, 50257), y.view(-1))
        del logits
        loss.backward()
        optimizer.step()
        loss.item()
        taken.append((time.perf_counter() - t0) * 1000)
    return statistics.median(taken[WARMUP_STEPS:])


def serve(pipe: Connection) -> None:
    """The process of its own: takes configs, answers step times."""
    tokens, _ = load_tokens(RunConfig(), 2**20)
    while (config := pipe.recv()) is not None:
        pipe.send(theirs(config, tokens))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--attention", choices=["manual", "sdpa"], help="only these rows")
    options = parser.parse_args()
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,))
    process.start()

    def elsewhere(config: RunConfig, _: torch.Tensor) -> float:
        here.send(config)
        return here.recv()

    tokens, _ = load_tokens(RunConfig(), 2**20)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}, {torch.get_num_threads()} threads, "
        f"{torch.cpu.get_capabilities().get('cpu_name', platform.processor())}"
    )
    print("| attention, AdamW | B, T | precision | ours, ms | transformers, ms | ratio |")
    print("|---|---|---|---|---|---|")
    for attention, optimizer, B, T, precision in SETTINGS:
        if options.attention not in (None, attention):
            continue
        config = RunConfig(
            attention=attention,
            optimizer=optimizer,
            B=B,
            T=T,
            precision=precision,
            steps=options.steps + WARMUP_STEPS,
        )
        rival = theirs if attention == "manual" else elsewhere
        turns = [(ours(config, tokens), rival(config, tokens)) for _ in range(options.turns)]
        a, b = (statistics.median(column) for column in zip(*turns, strict=True))
        ratio = statistics.median(one / other for one, other in turns)
        print(
            f"| {attention}, {optimizer} | {B}, {T} | {precision} | {a:.0f} | {b:.0f} "
            f"| {ratio:.2f} |",
            flush=True,
        )
    here.send(None)
    process.join()


if __name__ == "__main__":
    main()
