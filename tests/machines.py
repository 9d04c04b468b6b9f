"""Faked machines for the device tests.

A fake answers through attributes that the real torch has (test_device.py holds that), with values
as such machines report them.
"""

import sys
import types
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gpt2demo import nvidia

GIB = 2**30

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver by downloading and installing a new version from the URL: "
    "http://www.nvidia.com/Download/index.aspx Alternatively, go to: https://pytorch.org to "
    "install a PyTorch version that has been compiled with your version of the CUDA driver."
)
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and "
    "installed a driver from http://www.nvidia.com/Download/index.aspx"
)
CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_110", "sm_120", "compute_120")

ZEN4 = {"architecture": "x86_64", "cpu_name": "AMD EPYC 9654", "avx2": True, "avx512_bf16": True}
SKYLAKE_X = {"architecture": "x86_64", "cpu_name": "Intel Xeon 6130", "avx2": True}
SAPPHIRE_RAPIDS = {
    "architecture": "x86_64",
    "cpu_name": "Intel Xeon 8480+",
    **dict.fromkeys(("avx2", "avx512_bf16", "avx512_fp16", "amx_bf16"), True),
}
GRANITE_RAPIDS = {
    "architecture": "x86_64",
    "cpu_name": "Intel Xeon 6980P",
    **dict.fromkeys(("avx2", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16"), True),
}
GRAVITON3 = {"architecture": "aarch64", **dict.fromkeys(("neon", "fp16_arith", "bf16"), True)}


@dataclass(frozen=True, kw_only=True)
class Machine:
    cuda: str | None = None  # torch.version.cuda
    hip: str | None = None
    xpu: str | None = None
    properties: tuple[dict[str, object], ...] = ()  # one dict a GPU, of cuda or xpu
    free_bytes: int = 0
    arch_list: tuple[str, ...] = CU130
    init_error: str | None = None  # what torch.cuda.init() raises
    mps_name: str | None = None
    capabilities: dict[str, object] = field(default_factory=lambda: ZEN4)
    onednn_bf16: bool = True
    onednn_fp16: bool = False
    nvidia_version: str | None = None  # of the driver; None = no driver
    torch_version: str = "2.13.0"


def geforce(name: str, capability: str, total_bytes: int, **other) -> Machine:
    """A machine with one NVIDIA GPU that works."""
    major, minor = capability.split(".")
    properties = {
        "name": name,
        "major": int(major),
        "minor": int(minor),
        "total_memory": total_bytes,
    }
    return Machine(
        **{
            "cuda": "13.0",
            "torch_version": "2.13.0+cu130",
            "properties": (properties,),
            "free_bytes": total_bytes - GIB,
            "nvidia_version": "580.65.06",
        }
        | other
    )


def cpu(capabilities: dict[str, object], *, bf16: bool, fp16: bool) -> Machine:
    return Machine(
        capabilities=capabilities,
        onednn_bf16=bf16,
        onednn_fp16=fp16,
        torch_version="2.13.0+cpu",
    )


OLD = {"cuda": "12.6", "arch_list": CU126, "torch_version": "2.13.0+cu126"}
MI300X = {
    "name": "AMD Instinct MI300X",
    "gcnArchName": "gfx942:sramecc+:xnack-",
    "total_memory": 206141652992,
    "major": 9,
    "minor": 4,
}
RX6800 = {
    "name": "AMD Radeon RX 6800",
    "gcnArchName": "gfx1030",
    "total_memory": 17163091968,
    "major": 10,
    "minor": 3,
}
ARC_A770 = {
    "name": "Intel(R) Arc(TM) A770 Graphics",
    "total_memory": 16225243136,
    "driver_version": "1.6.32224",
    "has_fp16": True,
    "has_fp64": False,
    "has_bfloat16_conversions": True,
}

MACHINES: dict[str, Machine] = {
    "GTX 1060": geforce("NVIDIA GeForce GTX 1060 6GB", "6.1", 6370361344, **OLD),
    "GTX 1650": geforce("NVIDIA GeForce GTX 1650", "7.5", 4102029312),
    "T4": geforce("Tesla T4", "7.5", 15642329088),
    "RTX 2080": geforce("NVIDIA GeForce RTX 2080", "7.5", 8361279488),
    "V100": geforce("Tesla V100-SXM2-16GB", "7.0", 16945512448, **OLD),
    "RTX 3060": geforce("NVIDIA GeForce RTX 3060", "8.6", 12622168064),
    "A10G": geforce("NVIDIA A10G", "8.6", 23609475072),
    "A100": geforce("NVIDIA A100-SXM4-40GB", "8.0", 42505273344),
    "L4": geforce("NVIDIA L4", "8.9", 23669440512),
    "RTX 4090": geforce("NVIDIA GeForce RTX 4090", "8.9", 25393692672),
    "H100": geforce("NVIDIA H100 80GB HBM3", "9.0", 85045870592),
    "H200": geforce("NVIDIA H200", "9.0", 150109880320),
    "B200": geforce("NVIDIA B200", "10.0", 191510609920),
    "RTX 4090 Laptop": geforce("NVIDIA GeForce RTX 4090 Laptop GPU", "8.9", 17171480576),
    "GTX 1060, CUDA 13 torch": geforce("NVIDIA GeForce GTX 1060 6GB", "6.1", 6370361344),
    "MI300X": Machine(hip="7.2.0", properties=(MI300X,), free_bytes=205 * 10**9),
    "RX 6800": Machine(hip="7.2.0", properties=(RX6800,), free_bytes=16 * 10**9),
    "Arc A770": Machine(xpu="20250302", properties=(ARC_A770,), free_bytes=15 * 10**9),
    "Apple M2": Machine(mps_name="Apple M2"),
    "CPU with avx512_bf16": cpu(ZEN4, bf16=True, fp16=False),
    "CPU with AVX-512 alone": cpu(SKYLAKE_X, bf16=True, fp16=False),
    "CPU with AVX2 alone": cpu(SKYLAKE_X, bf16=False, fp16=False),
    "CPU with amx_bf16": cpu(SAPPHIRE_RAPIDS, bf16=True, fp16=True),
    "CPU with amx_fp16": cpu(GRANITE_RAPIDS, bf16=True, fp16=True),
    "Arm CPU with bf16": cpu(GRAVITON3, bf16=True, fp16=True),
    "driver too old": Machine(
        cuda="13.0",
        torch_version="2.13.0+cu130",
        init_error=TOO_OLD,
        nvidia_version="470.256.02",
    ),
    "GPUs hidden": Machine(
        cuda="13.0",
        torch_version="2.13.0+cu130",
        init_error="No CUDA GPUs are available",
        nvidia_version="580.65.06",
    ),
    "CUDA torch, no GPU": Machine(cuda="13.0", init_error=NO_DRIVER),
    "ROCm torch, NVIDIA GPU": Machine(hip="7.2.0", nvidia_version="580.65.06"),
    "CPU-only torch on a GPU machine": Machine(
        torch_version="2.13.0+cpu", nvidia_version="580.65.06"
    ),
}


def fake(monkeypatch, tmp_path: Path, machine: Machine) -> None:
    """Make torch and /proc answer as `machine` would."""

    def gpus(*, of_this_kind: bool) -> int:
        return len(machine.properties) if of_this_kind else 0

    counts = {
        "cuda": gpus(of_this_kind=bool(machine.cuda or machine.hip)),
        "xpu": gpus(of_this_kind=bool(machine.xpu)),
        "mps": 1 if machine.mps_name else 0,
    }
    for kind, count in counts.items():
        module = getattr(torch, kind)
        monkeypatch.setattr(module, "device_count", lambda count=count: count)
        monkeypatch.setattr(module, "is_available", lambda count=count: count > 0)
        if kind != "mps":
            monkeypatch.setattr(
                module,
                "get_device_properties",
                lambda index=0: types.SimpleNamespace(**machine.properties[index]),
            )
            monkeypatch.setattr(
                module,
                "mem_get_info",
                lambda index=0: (machine.free_bytes, machine.properties[index]["total_memory"]),
            )

    def unavailable() -> bool:
        warnings.warn(f"CUDA initialization: {machine.init_error}", stacklevel=2)
        return False

    def init() -> None:
        if machine.init_error:
            raise RuntimeError(machine.init_error)

    if machine.init_error:
        monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(machine.arch_list))
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: machine.mps_name)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 22906503168)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 22 * 10**9)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: machine.capabilities)
    for name in ("bf16", "fp16"):
        answer = getattr(machine, f"onednn_{name}")
        monkeypatch.setattr(
            torch.ops.mkldnn,
            f"_is_mkldnn_{name}_supported",
            lambda answer=answer: answer,
            raising=torch.backends.mkldnn.is_available(),  # a build without oneDNN has neither
        )
    monkeypatch.setattr(torch, "__version__", machine.torch_version)
    for name in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, name, getattr(machine, name))

    version_file = tmp_path / "nvidia" / "version"
    if machine.nvidia_version:
        version_file.parent.mkdir()
        version_file.write_text(
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  "
            f"{machine.nvidia_version}  Tue Jul  1 12:00:00 UTC 2025\nGCC version:  gcc 12.2.0\n"
        )
    monkeypatch.setattr(nvidia, "_VERSION_FILE", version_file)
    monkeypatch.setattr(nvidia.shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
