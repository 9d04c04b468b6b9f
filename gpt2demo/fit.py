"""Will it fit? A forecast against a device's memory: verdict, limits and map."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from gpt2demo.config import MAX_B, MODELS, InputError, RunConfig, check_gib
from gpt2demo.memory import CONTEXT_BYTES, MemoryForecast, forecast, fused_sdpa

_GIB: Final = 2**30
_MIB: Final = 2**20

# A CUDA allocator needs 1.02 to 1.13 times the live tensors (simulated over 56
# settings): below the one it may fail, above the other it fits.
_FRAGMENTATION: Final = 1.13
# Beside the live tensors a CPU process holds oneDNN's and the allocator's scratch: 190-300 MiB
# were measured.
CPU_SCRATCH_BYTES: Final = 512 * _MIB
# A budget that the tracker enforces counts tensors and nothing else: the forecast's own error.
_TRACKER_BAND: Final = 0.005

FITS: Final = "fits"
MAY_FAIL: Final = "may fail"
WILL_NOT_FIT: Final = "will not fit"
UNKNOWN: Final = "unknown"

# Cards by their memory, GiB; the names are what a visitor may own or rent.
CARDS: Final[dict[float, str]] = {
    4: "GTX 1650",
    6: "GTX 1060, RTX 2060",
    8: "GTX 1080, RTX 3070",
    11: "GTX 1080 Ti, RTX 2080 Ti",
    12: "RTX 3060",
    16: "T4, V100, RTX 4080",
    24: "RTX 3090, RTX 4090, A10G, L4",
    40: "A100 40GB",
    48: "RTX A6000, L40S",
    80: "A100 80GB, H100",
    141: "H200",
}

# The map's axes: what the sliders' ends and the usual sizes are.
MAP_B: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MAP_T: Final = (8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
T_STEP: Final = 8  # lengths are proposed in these steps

# a map and its frontiers are 600 forecasts, and every page of a room asks for the same ones
_forecast = functools.lru_cache(maxsize=2**13)(forecast)


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """The memory that a run may use, and how it is counted there."""

    total_bytes: int | None  # None = unknown
    device_type: str = "cpu"
    compute_capability: str | None = None
    with_context: bool = False  # the CUDA context must still find room in it
    any_card: bool = False  # of any NVIDIA GPU: its compute capability is not said
    tracked: bool = False  # a budget that the tracker of tensors enforces (CPU)
    machine_bytes: int | None = None  # CPU: free in all, the process's scratch included
    ddp: bool = False  # the run is one process of several

    def forecast(self, config: RunConfig, sizes: tuple[int, int] | None = None) -> MemoryForecast:
        """The run's forecast on this device, at (B, T) `sizes` in place of its own."""
        if config.text_name == "own":  # forecasts are kept, a text is not
            config = replace(config, text="own")
        return _forecast(
            config,
            self.device_type,
            compute_capability=self.compute_capability,
            with_context=self.with_context,
            sizes=sizes,
            ddp=self.ddp,
        )

    def lacks_kernel(self, config: RunConfig) -> bool:
        """Whether the run's SDPA has no fused kernel here."""
        return config.attention == "sdpa" and not fused_sdpa(
            config.precision, self.device_type, self.compute_capability
        )

    def verdict(self, told: MemoryForecast) -> str:
        """One of FITS, MAY_FAIL, WILL_NOT_FIT, UNKNOWN."""
        if self.total_bytes is None:
            return UNKNOWN
        low, high = self._band(told)
        if low > self.total_bytes or not self._in_machine(told.live_bytes):
            return WILL_NOT_FIT
        return FITS if high <= self.total_bytes else MAY_FAIL

    def refusal(self, told: MemoryForecast) -> str | None:
        """Why a CPU run must not even start, in one sentence; None = let it try.

        Linux promises memory that it does not have and ends the whole process when it is used, so
        on a CPU the wall must stand before the first allocation. A budget's wall is a tracker's: it
        stops the run after the tensor that goes too far.
        """
        if self.device_type != "cpu":
            return None
        need, budget = told.live_bytes, self.total_bytes
        if self.tracked and budget is not None:
            if told.parts.weights > budget:
                weights = told.parts.weights / _GIB
                return f"The weights alone take {weights:.2f} of {budget / _GIB:.2f} GiB."
            need = min(need, budget + told.largest_tensor_bytes)
        if self._in_machine(need):
            return None
        return (
            f"The run needs about {(need + CPU_SCRATCH_BYTES) / _GIB:.1f} GiB and "
            f"{(self.machine_bytes or 0) / _GIB:.1f} GiB are free."
        )

    def tracker_budget(self) -> int | None:
        """The most bytes that a CPU run's tensors may take."""
        if self.device_type != "cpu" or self.total_bytes is None:
            return None
        # nobody's budget: the tracker is the net below a forecast that was wrong
        return self.total_bytes if self.tracked else self.total_bytes + CPU_SCRATCH_BYTES // 2

    def _in_machine(self, live_bytes: int) -> bool:
        return self.machine_bytes is None or live_bytes + CPU_SCRATCH_BYTES <= self.machine_bytes

    def _band(self, told: MemoryForecast) -> tuple[float, float]:
        """The least memory it may run in, and the memory it certainly runs in."""
        if self.tracked:
            return told.live_bytes * (1 - _TRACKER_BAND), told.live_bytes * (1 + _TRACKER_BAND)
        if self.device_type == "cpu":
            return told.live_bytes, told.live_bytes
        beside = told.peak_bytes - told.live_bytes
        return told.peak_bytes, told.live_bytes * _FRAGMENTATION + beside


def capacity_for(
    config: RunConfig,
    device_type: str,
    free_bytes: int | None,
    compute_capability: str | None = None,
) -> Capacity:
    """The memory that `config` may use on a device with `free_bytes` free: all of it, or the
    budget that it asks for.
    """
    budget = None if config.budget_gib is None else int(config.budget_gib * _GIB)
    if device_type == "cpu":
        left = None if free_bytes is None else max(free_bytes - CPU_SCRATCH_BYTES, 0)
        return Capacity(
            total_bytes=left if budget is None else budget,
            tracked=budget is not None,
            machine_bytes=free_bytes,
        )
    if budget is None:
        return Capacity(
            total_bytes=free_bytes,
            device_type=device_type,
            compute_capability=compute_capability,
        )
    # this process's context lies outside what is free, a smaller card's would lie inside
    most = budget if free_bytes is None else min(budget, free_bytes + CONTEXT_BYTES)
    return Capacity(
        total_bytes=most,
        device_type=device_type,
        compute_capability=compute_capability,
        with_context=True,
    )


def card(capacity_gib: float) -> Capacity:
    """A CUDA card that need not be here.

    Raises:
        InputError: `capacity_gib` is no number from 0.25 to 1,024.
    """
    gib = check_gib("capacity_gib", capacity_gib)
    if gib is None:
        raise InputError("capacity_gib", "capacity_gib must be a number (GiB), not None.")
    return Capacity(
        total_bytes=int(gib * _GIB), device_type="cuda", with_context=True, any_card=True
    )


def largest(
    config: RunConfig,
    axis: str,
    capacity: Capacity,
    most: int | None = None,
    *,
    also_may_fail: bool = False,
) -> int:
    """The largest B (or T, in steps of 8) up to `most` that FITS, all else as in `config`; 0 =
    none. The forecast grows with both, so bisection finds it.

    Args:
        config: the run.
        axis: "B" or "T".
        capacity: the memory.
        most: the end of the axis; None = the slider's.
        also_may_fail: what MAY_FAIL counts too.
    """
    wanted = (FITS, MAY_FAIL) if also_may_fail else (FITS,)
    step, end = (1, MAX_B) if axis == "B" else (T_STEP, MODELS[config.model].block_size)

    def fits(k: int) -> bool:
        sizes = (k, config.T) if axis == "B" else (config.B, k * step)
        return capacity.verdict(capacity.forecast(config, sizes)) in wanted

    return step * _last(fits, (end if most is None else most) // step)


def smaller_that_fits(config: RunConfig, capacity: Capacity) -> tuple[int, int]:
    """The largest smaller B at this T, and the largest smaller T at this B, that fit; 0 = none."""
    return (
        largest(config, "B", capacity, config.B - 1),
        largest(config, "T", capacity, config.T - 1),
    )


def _last(holds: Callable[[int], bool], most: int) -> int:
    """The last of 1..most for which `holds`, which holds up to some number only; 0 = none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def fit_map(config: RunConfig, capacity: Capacity) -> dict[str, Any]:
    """The forecast over the whole grid: `B`, `T`, `peak_bytes[i][j]` and `verdict[i][j]`, where i
    counts the B and j the T.
    """
    lengths = [T for T in MAP_T if T <= MODELS[config.model].block_size]
    rows = [[capacity.forecast(config, (B, T)) for T in lengths] for B in MAP_B]
    return {
        "B": list(MAP_B),
        "T": lengths,
        "peak_bytes": [[told.peak_bytes for told in row] for row in rows],
        "verdict": [[capacity.verdict(told) for told in row] for row in rows],
    }
