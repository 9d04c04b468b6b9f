"""Several processes train one model: torch's DistributedDataParallel, and what a run asks of it."""

import os
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 as everybody writes it

from gpt2demo.config import InputError, RunConfig
from gpt2demo.ranks import Ranks

# How gloo and NCCL say that another process is gone (lower case for the comparison).
_GONE: Final = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "remote process exited",
)


def device_for(requested: str, ranks: Ranks) -> str:
    """The device of this process: its own GPU, or the CPU that all of them share.

    Args:
        requested: what the run's settings name; "auto" takes NVIDIA's and AMD's GPUs where torch
            sees one, else the CPU.
        ranks: this process among the others.

    Raises:
        InputError: a device that several processes cannot share out, or fewer GPUs than processes.
    """
    RunConfig(device=requested)  # refuses what is no device's name
    if requested not in ("auto", "cpu", "cuda"):
        raise InputError(
            "device",
            f"device must be auto, cpu or cuda under torchrun, not {requested}: each process takes "
            "a GPU of its own.",
        )
    count = torch.cuda.device_count() if requested != "cpu" and torch.cuda.is_available() else 0
    if requested == "cpu" or (requested == "auto" and not count):
        return "cpu"
    if count < ranks.local_world_size:
        raise InputError(
            "device",
            f"{ranks.local_world_size} processes need as many GPUs on this machine, which has "
            f"{count}: lower --nproc-per-node.",
        )
    return f"cuda:{ranks.local_rank}"


def start(device_name: str) -> list[tuple[str, int]]:
    """Meet the other processes; machine and process id of each, by rank, when all are there.

    `device_name` is what `device_for` says.
    """
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    peers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peers, (platform.node(), os.getpid()))
    return peers


def ended(peers: Sequence[tuple[str, int]], seconds: float = 1.0) -> list[int]:
    """The ranks of this machine whose process is gone; waits up to `seconds` for the first.

    A process that has died is there until torchrun has noticed.
    """
    here = {rank: pid for rank, (node, pid) in enumerate(peers) if node == platform.node()}
    end = time.monotonic() + seconds
    while True:
        gone = [rank for rank, pid in here.items() if not _is_there(pid)]
        if gone or time.monotonic() > end:
            return gone
        time.sleep(0.05)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return False
    return True


def finish() -> None:
    """Leave the others; only after a run that all of them ended."""
    dist.destroy_process_group()


def from_rank_0(make: Callable[[], Any], ranks: Ranks) -> Any:
    """What `make` returns in process 0, in all of them; its refusal is everybody's too.

    Raises:
        InputError: `make` raised it.
    """
    made: list[Any] = [None]
    if ranks.master_process:
        try:
            made = [make()]
        except InputError as exc:
            made = [exc]
    dist.broadcast_object_list(made)
    if isinstance(made[0], InputError):
        raise made[0]
    return made[0]


def data_parallel(model: nn.Module, device: torch.device) -> DDP:
    """`model` with its gradients averaged over the processes during backward.

    `gradient_as_bucket_view` lets the gradients live in the buckets that are sent: else they would
    be there twice. The model's only buffers are attention's masks, which never change.
    """
    with warnings.catch_warnings():
        # torch 2.13 calls it forward_sync_buffers, which 2.11 does not know
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return DDP(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )


def mean_over_ranks(loss: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The mean of the processes' losses, a scalar. gloo has a sum only."""
    loss = loss.detach()
    dist.all_reduce(loss, op=dist.ReduceOp.SUM)
    return loss / ranks.world_size


def is_peer_gone(exc: BaseException) -> bool:
    """Whether `exc` says that another process of this run has ended."""
    if not isinstance(exc, RuntimeError):  # DistBackendError and DistNetworkError are such
        return False
    text = str(exc).lower()
    return any(words in text for words in _GONE)
