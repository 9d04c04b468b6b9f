"""An inspected step on a real GPU against what is known of one: `python -m tests.gpu.check_inside`.

Every precision that is native there is inspected with manual attention and with SDPA. A row shows
the step, its parts' sum, the share of matmul and of tensor cores, both clocks, and what is not so.

Exit status: 0 all is so; 1 something is not; 2 there is no CUDA GPU.
"""

import argparse
import sys

import torch

from gpt2demo.config import InputError, RunConfig
from gpt2demo.device import DeviceInfo, probe_device
from gpt2demo.inside import inspect_step
from gpt2demo.inspection import WAITING, Inspection

SHORT = {"bf16": "bfloat16", "fp16": "float16"}


def faults(found: Inspection) -> list[str]:
    """What an inspection on an NVIDIA GPU says that cannot be."""
    if found.state != "finished" or found.profile is None or found.casts is None:
        return [found.message, *found.missing.values()]
    told, c = found.profile, found.config
    types = {(o.where, o.operation): o for o in found.casts.operations}
    logits = types["lm_head", "linear"].output
    softmax = types.get(("h.*.attn", "softmax"))
    largest = told.largest_forward
    busy = sum(told.parts.values()) - told.parts[WAITING]
    sdpa = c["attention"] == "sdpa"
    multiplies = c["precision"] in ("bf16", "fp16", "tf32")
    splits = sdpa and c["precision"] == "fp32"  # on tensor cores from capability 8.0 on
    waits = c["precision"] == "fp16" and c["optimizer"] == "default"
    claims = {
        "the kernels take no longer than the step": busy <= 1.02 * told.step_seconds,
        "the parts add up": abs(told.accounted - 1) < 0.1,
        "the classifier is the largest matmul": largest is not None
        and largest.part == "classifier",
        "tensor cores are known": told.tensor_core_share is not None,
        "tensor cores work where they should": bool(told.tensor_core_share) == multiplies
        or c["precision"] == "fp64"  # which has them on some GPUs
        or splits,
        "SDPA's kernels are seen": bool(told.fused_attention_share) == sdpa
        or c["precision"] == "fp64",  # which no fused kernel takes
        "logits are of the short type": logits == SHORT.get(c["precision"], logits),
        "softmax computes in float32 under autocast": softmax is None
        or c["precision"] not in SHORT
        or softmax.compute == "float32",
        "autocast casts within the loss": c["precision"] == "fp64"
        or types["GPT", "cross_entropy"].compute
        == (f"{logits} + float32" if c["precision"] in SHORT else "float32"),
        "the loss is float32": c["precision"] == "fp64"
        or types["GPT", "cross_entropy"].output == "float32",
        "weights are float32": c["precision"] == "fp64" or found.casts.weights == "float32",
        "without a synchronize the clock reads less": waits
        or (found.unsynchronized_ms or 0) < (found.step_ms or 0),
    }
    return [claim for claim, holds in claims.items() if not holds]


def row(found: Inspection) -> str:
    """One line."""
    c, told = found.config, found.profile
    name = f"{c['precision']:<5} {c['attention']:<7}"
    if told is None or found.step_ms is None or found.unsynchronized_ms is None:
        return f"{name} {found.message}"
    cores = "unknown" if told.tensor_core_share is None else f"{told.tensor_core_share:.1%}"
    return (
        f"{name} {found.step_ms:9.2f} ms  without synchronize {found.unsynchronized_ms:9.2f} ms  "
        f"matmul {told.matmul_share:.1%}  SDPA {told.fused_attention_share:.1%}  "
        f"tensor cores {cores} ({told.tensor_core_note})  "
        f"waiting {told.parts.get(WAITING, 0) / told.step_seconds:.1%}"
    )


def settings(info: DeviceInfo, B: int, T: int, device: str) -> list[RunConfig]:
    """What is inspected."""
    return [
        RunConfig(precision=precision, attention=attention, B=B, T=T, device=device)
        for precision, support in info.support.items()
        if support.status == "native"
        for attention in ("manual", "sdpa")
    ]


def main() -> int:
    """Inspect all; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-B", type=int, default=4)
    parser.add_argument("-T", type=int, default=1024)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    try:
        info = probe_device(args.device)
    except InputError as exc:
        print(exc, file=sys.stderr)
        return 2
    print(f"{info.name}, torch {torch.__version__}")
    wrong = 0
    for config in settings(info, args.B, args.T, args.device):
        found = inspect_step(config, info)
        print(row(found), flush=True)
        for fault in faults(found):
            wrong += 1
            print(f"  NOT SO: {fault}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
