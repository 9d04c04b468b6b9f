"""Dense peak rates of GPUs, looked up by name and memory in assets/gpus.csv.

A GPU that the table does not hold, and a figure that its source does not give, is None: an unknown
peak means no MFU rather than a wrong one.
"""

import csv
import functools
import re
from dataclasses import dataclass, field
from typing import Any, Final

from gpt2demo.config import PRECISIONS
from gpt2demo.shipped import asset

_TABLE: Final = asset("gpus.csv")

# What a driver reports lies below the nominal size (a T4 has 14.6 of 16 GiB, ECC takes 1/16) and
# never noticeably above it. Cards of one name differ by a fifth or more (10 and 12 GB), so these
# bounds tell them apart.
_LEAST_OF_NOMINAL: Final = 0.88
_MOST_OF_NOMINAL: Final = 1.02

# GPUs whose float64 matmuls (cuBLAS, rocBLAS) run on tensor or matrix units.
_FP64_ON_TENSOR_CORES: Final = {"8.0", "9.0", "10.0", "10.3", "gfx90a", "gfx942", "gfx950"}


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    """The published figures of one GPU; None = its source does not give the figure.

    `peak_flops` maps every precision id to dense FLOP/s (never the sparse figure), as torch's
    matmuls reach for it:

    - fp32: the vector rate, tensor cores off. AMD's MI100 and MI200 multiply float32 on their
      matrix units, so theirs is the matrix rate.
    - tf32, bf16, fp16: the tensor-core rate with fp32 accumulation, None where the GPU has no such
      units. (GeForce cards accumulate in fp32 at half of their fp16-accumulate rate.)
    - fp64: the tensor-core rate on GPUs whose float64 matmuls use it (A100, H100, H200, B200,
      MI200, MI300 and their relatives), the vector rate elsewhere.

    Peaks assume the rated boost clock, so a card that boosts higher can pass 100 %. MI250 and
    MI250X are one of the module's two dies, as torch sees them.
    """

    display_name: str
    architecture: str
    compute_capability: str  # "8.0"; on AMD the gfx name
    memory_gib: float  # nominal
    bandwidth_bytes_per_sec: float | None
    peak_flops: dict[str, float | None]
    tdp_watts: float | None  # of the whole board or module
    notes: str
    source: str  # addresses, parted by a space
    name_pattern: str = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The figures for JSON: GB/s and dense TFLOP/s, None = unknown; `sources` as a list."""
        bandwidth = self.bandwidth_bytes_per_sec
        return {
            "name": self.display_name,
            "architecture": self.architecture,
            "compute_capability": self.compute_capability,
            "memory_gib": self.memory_gib,
            "bandwidth_gb_per_sec": None if bandwidth is None else bandwidth / 1e9,
            "dense_tflops": {
                precision: None if peak is None else float(f"{peak / 1e12:.6g}")
                for precision, peak in self.peak_flops.items()
            },
            "tdp_watts": self.tdp_watts,
            "notes": self.notes,
            "sources": self.source.split(),
        }


@functools.lru_cache(maxsize=64)  # a watching page asks four times a second
def find_gpu(name: str | None, memory_total_bytes: int | None) -> GpuSpec | None:
    """The GPU that reports this name and this much memory, or None.

    Several cards share a name ("GeForce RTX 3080" has 10 or 12 GB), so without the memory there is
    no answer. Laptop, Max-Q and MIG names match nothing; notebook cards before Ampere report their
    desktop sibling's very name, so those names are not in the table at all.

    Args:
        name: as the driver reports it, e.g. "NVIDIA A100-SXM4-40GB".
        memory_total_bytes: as the driver reports it.
    """
    if name is None or memory_total_bytes is None:
        return None
    for spec in all_gpus():
        share = memory_total_bytes / (spec.memory_gib * 2**30)
        if _LEAST_OF_NOMINAL <= share <= _MOST_OF_NOMINAL and re.fullmatch(spec.name_pattern, name):
            return spec
    return None


def peak_flops(name: str | None, memory_total_bytes: int | None, precision: str) -> float | None:
    """The GPU's dense peak in this precision, FLOP/s; None = unknown.

    Raises:
        KeyError: `precision` is not one of config.PRECISIONS.
    """
    if precision not in PRECISIONS:
        raise KeyError(precision)
    spec = find_gpu(name, memory_total_bytes)
    return spec.peak_flops[precision] if spec else None


@functools.cache
def all_gpus() -> tuple[GpuSpec, ...]:
    """Every GPU of the table, in its order: by maker and generation."""
    with _TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(_spec(row) for row in csv.DictReader(file))


def _spec(row: dict[str, str]) -> GpuSpec:
    def scaled(column: str, factor: float) -> float | None:
        return float(row[column]) * factor if row[column] else None

    fp64 = "fp64_tensor_tflops"
    if row["compute_capability"] not in _FP64_ON_TENSOR_CORES:
        fp64 = "fp64_tflops"
    fp32 = "fp32_matrix_tflops" if row["fp32_matrix_tflops"] else "fp32_tflops"
    columns = {
        "fp32": fp32,
        "tf32": "tf32_tflops",
        "bf16": "bf16_tflops",
        "fp16": "fp16_tflops",
        "fp64": fp64,
    }
    return GpuSpec(
        display_name=row["display_name"],
        architecture=row["architecture"],
        compute_capability=row["compute_capability"],
        memory_gib=float(row["memory_gib"]),
        bandwidth_bytes_per_sec=scaled("bandwidth_gb_s", 1e9),
        peak_flops={precision: scaled(columns[precision], 1e12) for precision in PRECISIONS},
        tdp_watts=scaled("tdp_w", 1),
        notes=row["notes"],
        source=row["source"],
        name_pattern=row["name_pattern"],
    )
