"""The lesson's training loop: one body for every precision, and a clock that tells the truth."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from gpt2demo import accelerator
from gpt2demo.compiling import compile_model
from gpt2demo.config import WARMUP_STEPS, RunConfig
from gpt2demo.data import DataLoaderLite
from gpt2demo.distributed import data_parallel, mean_over_ranks
from gpt2demo.malloc import keep_large_blocks
from gpt2demo.model import GPT
from gpt2demo.oom import is_out_of_memory
from gpt2demo.precision import PRECISION, autocast, grad_scaler, precision_scope
from gpt2demo.ranks import ALONE, Ranks
from gpt2demo.records import StepMetrics
from gpt2demo.tracker import MemoryMeter


@dataclass(kw_only=True, slots=True)
class Progress:
    """What a run is doing between its steps; written by `train`, read by whoever watches."""

    phase: str = (
        "starting"  # then "loading the text", "building the model", "compiling", "training"
    )
    moment: str = ""  # of a step: "fetching the batch", "forward", "backward", "optimizer"
    poisoned: bool = False  # the GPU works no more in this process
    held_bytes: dict[str, int] = field(
        default_factory=dict
    )  # part -> what lived when memory ran out
    notes: list[str] = field(default_factory=list)  # sentences for the visitor
    parameters: int | None = None
    compiled: bool = False  # torch.compile was asked for, and it worked
    compile_seconds: float | None = None


def train(
    config: RunConfig,
    tokens: torch.Tensor,
    device: torch.device,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
    budget_bytes: int | None = None,
    ranks: Ranks = ALONE,
) -> Iterator[StepMetrics]:
    """Train GPT-2 from scratch and yield one record a step.

    Ends after `config.steps` steps, when `should_stop` answers True between two steps, or after a
    step whose loss is not finite. The process-wide matmul mode is put back and model and optimizer
    are dropped however it ends.

    Under torchrun every process runs this, each on batches of its own: gradients and the loss are
    means over the processes, tokens/sec is all of theirs, and memory is this process's.

    Args:
        config: the checked settings.
        tokens: (n,) int64 token ids, the same in all processes, n > world_size*B*T.
        device: where to train.
        should_stop: asked before every step.
        progress: filled in as the run goes on.
        budget_bytes: on a CPU, the most that tensors may take; None = as much as there is.
        ranks: this process among those that train together (see `distributed.start`).

    Raises:
        torch.OutOfMemoryError: (or a RuntimeError that says so) memory ran out.
    """
    progress = progress or Progress()
    precision = PRECISION[config.precision]
    loader = DataLoaderLite(tokens, config.B, config.T, ranks.rank, ranks.world_size)
    meter = MemoryMeter(config, device, budget_bytes)
    model = optimizer = scaler = x = y = loss = None
    with keep_large_blocks(), precision_scope(precision):
        try:
            progress.phase = "building the model"
            accelerator.reset_peak_memory(device)
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(config.seed)
                model = GPT(config.gpt, attention=config.attention)
            progress.parameters = model.num_params()
            model.to(device=device, dtype=precision.weight_dtype)
            # fused=None is torch's own choice: foreach on a GPU, a plain loop on a CPU
            fused = True if config.optimizer == "fused" else None
            optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, fused=fused)
            scaler = grad_scaler(precision, device.type)
            if config.compile:
                progress.phase = "compiling"
                model, progress.compile_seconds, note = compile_model(model, config, device)
                progress.notes += [note] if note else []
                progress.compiled = note is None
            meter.start(model, tokens, compiled=progress.compiled)
            if ranks.ddp:
                with meter.during(0):  # the buckets of the gradients are memory too
                    model = data_parallel(model, device)
            progress.phase = "training"

            for step in range(config.steps):
                if should_stop():
                    break
                progress.moment = "fetching the batch"
                x, y = loader.next_batch()
                x, y = x.to(device), y.to(device)
                loss_scale = scaler.get_scale()
                with meter.during(step):  # follows the tensors of the first steps on a CPU
                    accelerator.synchronize(device)  # the device works on its own: wait for it
                    t0 = time.perf_counter()
                    optimizer.zero_grad()
                    progress.moment = "forward"
                    with autocast(precision, device.type):  # forward and loss only
                        logits, loss = model(x, y)
                    del logits  # B*T*vocab_size numbers that backward does not need
                    progress.moment = "backward"
                    scaler.scale(loss).backward()
                    progress.moment = "optimizer"
                    scaler.step(optimizer)
                    scaler.update()
                    if ranks.ddp:
                        loss = mean_over_ranks(loss, ranks)
                    loss = loss.item()
                    accelerator.synchronize(device)
                    t1 = time.perf_counter()
                step_time = t1 - t0  # seconds
                yield StepMetrics(
                    step=step,
                    loss=loss,
                    step_ms=step_time * 1000,
                    tokens_per_sec=config.B * config.T * ranks.world_size / step_time,
                    is_warmup=step < WARMUP_STEPS,
                    skipped=scaler.get_scale() < loss_scale,
                    loss_scale=loss_scale if scaler.is_enabled() else None,
                    peak_memory_bytes=meter.peak_bytes(),
                )
                if not math.isfinite(loss):
                    break
        except BaseException as exc:
            if is_out_of_memory(exc):
                progress.held_bytes = meter.at_failure(model, optimizer)
            raise
        finally:
            model = optimizer = scaler = x = y = loss = None
            if config.compile:
                torch._dynamo.reset()
            accelerator.free_memory(device)
