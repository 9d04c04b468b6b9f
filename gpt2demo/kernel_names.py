"""Which kernels of NVIDIA's libraries multiply on tensor cores, by their names.

Sources: PyProf's list as torch's own viewer keeps it (https://github.com/pytorch/kineto,
tb_plugin/torch_tb_profiler/profiler/tensor_core.py); nvjet is what cuBLAS calls its kernels since
Hopper; flash attention and cuDNN's attention know no other way. Memory-efficient attention says
its type and the capability that it was built for
(https://github.com/pytorch/pytorch, aten/src/ATen/native/transformers/cuda/mem_eff_attention/
gemm_kernel_utils.h: `DefaultGemmType`).
"""

import re
from typing import Final

# They are looked for first: xmma kernels run on either kind of core.
_PLAIN_CORES: Final = (
    *("ffma", "simt", "sgemm", "dgemm", "hgemm", "gemv", "gemmsn", "splitkreduce", "dot_"),
    *("convert_dq", "elementwise", "memset", "memcpy"),
)
_TENSOR_CORES: Final = (
    *("884", "1688", "16816", "16832", "hmma", "imma", "dmma", "gmma", "tensorop", "xmma"),
    *("nvjet", "tf32", "wmma", "flash_fwd", "flash_bwd", "native_sdpa", "oss_sdpa"),
)
_MEMORY_EFFICIENT: Final = re.compile(r"fmha_cutlass[fb]_(?P<type>f32|f16|bf16)_\w*?sm(?P<sm>\d+)")
_FROM_CAPABILITY: Final = {"f32": 80, "f16": 70, "bf16": 80}


def on_tensor_cores(kernel: str) -> bool | None:
    """Whether a kernel of this name, launched by a matmul or by SDPA, runs on tensor cores.

    None = the name does not say.
    """
    name = kernel.lower()
    if told := _MEMORY_EFFICIENT.search(name):
        return int(told["sm"]) >= _FROM_CAPABILITY[told["type"]]
    if "tensorop" not in name and any(word in name for word in _PLAIN_CORES):
        return False
    return True if any(word in name for word in _TENSOR_CORES) else None


def splits_float32(kernel: str) -> bool:
    """Whether it is SDPA's kernel that multiplies float32 on tensor cores, in three TF32 products.

    It does so whatever `torch.set_float32_matmul_precision` says.
    """
    told = _MEMORY_EFFICIENT.search(kernel.lower())
    return told is not None and told["type"] == "f32" and on_tensor_cores(kernel) is True
