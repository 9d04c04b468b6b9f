"""This machine's processor and memory, as far as a process in a container may use them.

Missing value = None; nothing here raises.
"""

import math
import os
import platform
import re
from pathlib import Path
from typing import Final

import psutil

_CPUINFO: Final = Path("/proc/cpuinfo")
_CGROUPS: Final = Path("/proc/self/cgroup")  # which control groups this process is in
_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")


def cpu_name() -> str | None:
    """The processor's name, e.g. "AMD EPYC 9654"."""
    found = re.search(r"^model name\s*:\s*(.+)$", _text(_CPUINFO), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or None


def usable_cores() -> int | None:
    """CPU cores that this process may run on: its affinity, capped by the container's quota."""
    if hasattr(os, "process_cpu_count"):  # Python 3.13
        cores = os.process_cpu_count()
    elif hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count()
    quotas = [_cpu_quota(folder) for folder in _cgroup_folders("cpu")]
    return _least(cores, [math.ceil(quota) for quota in quotas if quota])


def memory_total_bytes() -> int | None:
    """The machine's memory, or the container's limit when that is lower."""
    limits = [limit for limit, _ in _memory_limits()]
    return _least(_virtual_memory("total"), limits)


def memory_free_bytes() -> int | None:
    """Memory that can be had without swapping, or what the container's limit leaves of it."""
    left = [free for _, free in _memory_limits()]
    return _least(_virtual_memory("available"), left)


def _virtual_memory(name: str) -> int | None:
    try:
        return int(getattr(psutil.virtual_memory(), name))
    except (OSError, RuntimeError, ValueError):
        return None


def _least(value: int | None, bounds: list[int]) -> int | None:
    return min([value, *bounds]) if value is not None else None


def _memory_limits() -> list[tuple[int, int]]:
    """(limit, what is left of it) of every control group that limits this process, in bytes."""
    limits = []
    for folder in _cgroup_folders("memory"):
        for limit_name, usage_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),  # v2
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # v1
        ):
            limit = _text(folder / limit_name).strip()
            usage = _text(folder / usage_name).strip()
            if limit.isdigit() and usage.isdigit():  # v2 without a limit says "max"
                # file pages that nobody uses are given back before anything is refused
                cache = re.search(
                    rf"^{cache_name} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE
                )
                left = int(limit) - int(usage) + (int(cache[1]) if cache else 0)
                limits.append((int(limit), max(left, 0)))
    return limits


def _cpu_quota(folder: Path) -> float | None:
    """Cores' worth of time that this control group grants; None = no quota."""
    v1 = f"{_text(folder / 'cpu.cfs_quota_us')} {_text(folder / 'cpu.cfs_period_us')}"
    for text in (_text(folder / "cpu.max"), v1):
        numbers = text.split()
        if len(numbers) == 2 and all(n.isdigit() and int(n) for n in numbers):
            return int(numbers[0]) / int(numbers[1])
    return None


def _cgroup_folders(controller: str) -> list[Path]:
    """Folders of the control groups this process is in, innermost first: each may limit it."""
    folders = []
    lines = re.findall(r"^(\d+):([^:\n]*):(.*)$", _text(_CGROUPS), re.MULTILINE)
    for number, controllers, path in lines:
        if number == "0" and not controllers:
            root = _CGROUP_ROOT  # v2
        elif controller in controllers.split(","):
            root = _CGROUP_ROOT / controller  # v1
        else:
            continue
        folder = root / path.lstrip("/")
        # a container may see its host's path, which does not exist inside
        folders += [f for f in (folder, *folder.parents) if f.is_relative_to(root)]
    return folders


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
