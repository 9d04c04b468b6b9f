"""One probe of the machine: which device, how much memory, what each precision means on it.

A query that fails gives None: no exception, no zero.
"""

import platform
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

import torch

from gpt2demo import host, nvidia
from gpt2demo.config import PRECISIONS, InputError, RunConfig
from gpt2demo.peaks import find_gpu
from gpt2demo.support import (
    Support,
    amd_support,
    cpu_support,
    mps_support,
    nvidia_support,
    unusable,
    xpu_support,
)

_ACCELERATORS: Final = ("cuda", "xpu", "mps")  # the order in which "auto" looks

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInfo:
    """The device a run would use, and the machine around it. None = unknown or not applicable."""

    type: str  # "cuda" (NVIDIA and AMD), "xpu", "mps" or "cpu"
    index: int | None
    name: str | None
    memory_total_bytes: int | None  # CPU: the container's limit where that is lower
    memory_free_bytes: int | None
    compute_capability: str | None  # NVIDIA only: "7.5"
    architecture: str | None  # AMD: its gfx name; CPU: x86_64, ...; NVIDIA: where the table has it
    driver_version: str | None
    torch_version: str
    cuda_version: str | None  # that torch was built for
    hip_version: str | None  # ROCm's, that torch was built for
    python_version: str
    platform: str
    cores: int | None  # CPU cores this process may use
    torch_threads: int | None
    gpu: str | None  # its name in the table of peaks; None = no peak, no MFU
    problem: str | None  # why a GPU of this machine is not or cannot be used, in words
    support: dict[str, Support]  # precision id -> what it means here

    def to_dict(self) -> dict[str, Any]:
        """The record for JSON."""
        return asdict(self)


def resolve_device(requested: str) -> torch.device:
    """The device that `requested` names: "auto" (cuda > xpu > mps > cpu), "cuda", "cuda:1", ...

    Raises:
        InputError: the name is none of these, or this machine has no such device.
    """
    RunConfig(device=requested)  # refuses every other name
    if requested == "cpu":
        return torch.device("cpu")
    counts = _accelerators()
    kind, _, number = requested.partition(":")
    if kind == "auto":
        kind = next(iter(counts), "cpu")
    elif int(number or 0) >= counts.get(kind, 0):
        here = [k if k == "mps" else f"{k}:{i}" for k, n in counts.items() for i in range(n)]
        message = f"device {requested} is not here: this machine has {', '.join([*here, 'cpu'])}."
        problem = nvidia.why_unused() if kind == "cuda" and kind not in counts else None
        raise InputError("device", f"{message} {problem}" if problem else message)
    return torch.device(kind) if kind in ("cpu", "mps") else torch.device(kind, int(number or 0))


def probe_device(requested: str = "auto") -> DeviceInfo:
    """All that is known about the device that `requested` names (see `resolve_device`).

    Raises:
        InputError: as `resolve_device`.
    """
    device = resolve_device(requested)
    facts: dict[str, Any] = {
        "compute_capability": None,
        "architecture": None,
        "driver_version": None,
        "gpu": None,
        "problem": None,
    }
    facts |= {"cpu": _cpu, "mps": _mps}.get(device.type, _gpu)(device)
    facts["support"] = {precision: facts["support"][precision] for precision in PRECISIONS}
    return DeviceInfo(
        type=device.type,
        index=device.index,
        memory_free_bytes=memory_free_bytes(device),
        torch_version=str(torch.__version__),
        cuda_version=torch.version.cuda,
        hip_version=torch.version.hip,
        python_version=platform.python_version(),
        platform=platform.platform(),
        cores=host.usable_cores(),
        torch_threads=_ask(torch.get_num_threads),
        **facts,
    )


def memory_free_bytes(device: torch.device | str) -> int | None:
    """Free memory of the device, bytes; cheap enough for every refresh of a page.

    On a GPU what the driver says (all processes), on a CPU what can be had without swapping.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return host.memory_free_bytes()
    if device.type == "mps":  # a share of the CPU's memory, up to a limit of Metal's
        limit = _ask(torch.mps.recommended_max_memory)
        used = _ask(torch.mps.driver_allocated_memory)
        free = host.memory_free_bytes()
        if not limit or used is None or free is None:
            return None
        return min(free, max(limit - used, 0))
    info = _ask(lambda: torch.get_device_module(device).mem_get_info(device.index or 0))
    return info[0] if info else None


def warnings_for(info: DeviceInfo, precision: str) -> tuple[str, ...]:
    """What to say before a run in this precision starts; empty where nothing is to be said.

    Raises:
        KeyError: no such precision.
    """
    support = info.support[precision]
    if support.slow:
        return (support.slow,)
    return () if support.status in ("native", "unknown") else (support.reason,)


def _cpu(device: torch.device) -> dict[str, Any]:
    capabilities = _ask(torch.cpu.get_capabilities) or {}
    problem = None if "cuda" in _accelerators() else nvidia.why_unused()
    return {
        "name": capabilities.get("cpu_name") or host.cpu_name(),
        "memory_total_bytes": host.memory_total_bytes(),
        "architecture": capabilities.get("architecture") or platform.machine() or None,
        "driver_version": nvidia.driver_version() if problem else None,
        "problem": problem,
        "support": cpu_support(
            capabilities,
            threads=_ask(torch.get_num_threads),
            onednn_bf16=_ask(lambda: torch.ops.mkldnn._is_mkldnn_bf16_supported()),
            onednn_fp16=_ask(lambda: torch.ops.mkldnn._is_mkldnn_fp16_supported()),
        ),
    }


def _mps(device: torch.device) -> dict[str, Any]:
    return {
        "name": _ask(torch.backends.mps.get_name),
        "memory_total_bytes": _ask(torch.mps.recommended_max_memory) or None,
        "architecture": platform.machine() or None,
        "support": mps_support(),
    }


def _gpu(device: torch.device) -> dict[str, Any]:
    """The facts of a cuda or xpu device."""
    module = torch.get_device_module(device)
    properties = _ask(lambda: module.get_device_properties(device.index))
    facts = {
        "name": getattr(properties, "name", None),
        "memory_total_bytes": getattr(properties, "total_memory", None),
    }
    if properties is None:
        return facts | {"support": unusable("The GPU did not answer when torch asked what it is.")}
    if device.type == "xpu":
        return facts | {
            "driver_version": properties.driver_version,
            "support": xpu_support(
                has_bf16=properties.has_bfloat16_conversions,
                has_fp16=properties.has_fp16,
                has_fp64=properties.has_fp64,
            ),
        }
    spec = find_gpu(facts["name"], facts["memory_total_bytes"])
    facts["gpu"] = spec.display_name if spec else None
    if torch.version.hip:
        return facts | {
            "architecture": properties.gcnArchName,
            "support": amd_support(properties.gcnArchName, spec),
        }
    capability = properties.major, properties.minor
    problem = nvidia.missing_code(capability)
    compute_capability = f"{properties.major}.{properties.minor}"
    support = nvidia_support(capability, facts["name"], spec)
    if problem:
        support = unusable(
            f"This torch build has no code for compute capability {compute_capability}."
        )
    return facts | {
        "compute_capability": compute_capability,
        "architecture": spec.architecture if spec else None,
        "driver_version": nvidia.driver_version(),
        "problem": problem,
        "support": support,
    }


def _accelerators() -> dict[str, int]:
    """How many devices of each kind torch can use, in the order of preference."""
    counts = {}
    with warnings.catch_warnings():  # an old driver makes is_available() warn
        warnings.simplefilter("ignore")
        for kind in _ACCELERATORS:
            module = torch.get_device_module(kind)
            if _ask(module.is_available) and (count := _ask(module.device_count)):
                counts[kind] = count
    return counts


def _ask(query: Callable[[], T]) -> T | None:
    """The answer, or None: on a build without the device queries raise errors of many kinds."""
    try:
        return query()
    except Exception:
        return None
