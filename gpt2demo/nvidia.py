"""NVIDIA's driver, and why torch does not use a GPU that is there."""

import contextlib
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch

_VERSION_FILE: Final = Path("/proc/driver/nvidia/version")


def driver_version() -> str | None:
    """The driver's version, e.g. "550.54.15": from NVML if its package is installed, or /proc."""
    try:
        import pynvml  # optional: from nvidia-ml-py

        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
            return version.decode() if isinstance(version, bytes) else str(version)
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # not installed, no library, no device: NVML has an error class for each
        pass
    try:
        text = _VERSION_FILE.read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return found[1] if found else None


@contextlib.contextmanager
def energy_counter(device: torch.device) -> Iterator[Callable[[], float | None]]:
    """A reader of the joules that the GPU has used since its driver was loaded, all programs' work
    included. It answers None where there is no such counter: on other devices, before Volta, on a
    MIG slice, without the nvidia-ml-py package.
    """
    with contextlib.ExitStack() as stack:
        handle = None
        if device.type == "cuda" and not torch.version.hip:
            try:
                import pynvml  # optional: from nvidia-ml-py

                uuid = str(torch.cuda.get_device_properties(device).uuid)
                pynvml.nvmlInit()
                stack.callback(_ignoring_errors, pynvml.nvmlShutdown)
                # by UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices and not NVML's
                handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
            except Exception:  # as above
                handle = None

        def joules() -> float | None:
            if handle is None:
                return None
            try:
                return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
            except Exception:
                return None

        yield joules


def _ignoring_errors(call: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):
        call()


def is_present() -> bool:
    """Whether this machine has NVIDIA's driver or its tool, whatever torch makes of it."""
    return _VERSION_FILE.parent.exists() or shutil.which("nvidia-smi") is not None


def why_unused() -> str | None:
    """Why torch does not use this machine's NVIDIA GPU; None when it has none.

    To be asked only when torch.cuda.is_available() is False.
    """
    if torch.version.hip or torch.version.xpu:  # built for another maker's GPUs
        return None
    if torch.version.cuda is None:
        if not is_present():
            return None
        return (
            f"This machine has an NVIDIA GPU, but this torch ({torch.__version__}) is the CPU "
            "build. Install a CUDA build of torch to use the GPU."
        )
    words = (_refusal() or "").strip()
    if found := re.search(r"driver on your system is too old \(found version (\d+)\)", words):
        return (
            f"The NVIDIA driver is too old for this torch (found version {found[1]}, torch was "
            f"built for CUDA {torch.version.cuda}). Update the driver; until then runs use the CPU."
        )
    if not is_present():
        return None
    first = words.splitlines()[0][:160].rstrip(".") if words else "it gives no reason"
    return f"This machine has an NVIDIA GPU, but torch cannot use it: {first}."


def _refusal() -> str | None:
    """Torch's own words when CUDA does not start."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            torch.cuda.init()
        except Exception as exc:  # RuntimeError, AssertionError, DeferredCudaCallError
            return str(exc)
    return str(caught[-1].message) if caught else None


def missing_code(capability: tuple[int, int]) -> str | None:
    """A sentence when this torch build holds no code that a GPU of this capability can run."""
    try:
        built_for = torch.cuda.get_arch_list()  # "sm_90", "sm_90a", "compute_90", ...
    except Exception:
        return None
    if not built_for or any(_fits(architecture, capability) for architecture in built_for):
        return None
    return (
        f"This torch build has no code for compute capability {capability[0]}.{capability[1]} "
        f"(it has {', '.join(built_for)}). Install a torch built for another CUDA version."
    )


def _fits(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether code built for `architecture` runs on a GPU of this capability."""
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if not found:
        return True  # a spelling unknown here: no verdict
    code = int(found[2]), int(found[3])
    if found[4] == "a":  # that one capability only
        return code == capability
    if found[1] == "compute" and not found[4]:  # compiled for the GPU when first used
        return code <= capability
    return code[0] == capability[0] and code[1] <= capability[1]
