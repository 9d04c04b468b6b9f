"""Which kernels of NVIDIA's libraries multiply on tensor cores, by their names.

Sources: PyProf's list as torch's own viewer keeps it (https://github.com/pytorch/kineto,
tb_plugin/torch_tb_profiler/profiler/tensor_core.py); nvjet is what cuBLAS calls its kernels since
Hopper; flash attention and the 16-bit kernels of memory-efficient attention know no other way.
"""

from typing import Final

# They are looked for first: xmma kernels run on either kind of core.
_PLAIN_CORES: Final = (
    *("ffma", "simt", "sgemm", "dgemm", "gemv", "gemmsn", "splitkreduce", "dot_"),
    *("convert_dq", "elementwise", "memset", "memcpy"),
)
_TENSOR_CORES: Final = (
    *("884", "1688", "16816", "16832", "hmma", "imma", "dmma", "gmma", "tensorop", "xmma"),
    *("nvjet", "tf32", "wmma", "flash_fwd", "flash_bwd"),
    *("fmha_cutlassf_bf16", "fmha_cutlassb_bf16", "fmha_cutlassf_f16", "fmha_cutlassb_f16"),
)


def on_tensor_cores(kernel: str) -> bool | None:
    """Whether a kernel of this name, launched by a matmul or by SDPA, runs on tensor cores.

    None = the name does not say.
    """
    name = kernel.lower()
    if "tensorop" not in name and any(word in name for word in _PLAIN_CORES):
        return False
    return True if any(word in name for word in _TENSOR_CORES) else None
