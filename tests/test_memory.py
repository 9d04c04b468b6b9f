import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from memory_tracker import MemoryTracker, measured

from gpt2demo import config as config_module
from gpt2demo.config import ATTENTIONS, MODELS, OPTIMIZERS, PRECISIONS, GPTConfig, RunConfig
from gpt2demo.memory import (
    MemoryForecast,
    forecast,
    fused_sdpa,
    num_params,
    workspace_bytes,
)
from gpt2demo.model import GPT
from gpt2demo.train import train

# a busy machine is no fault of the code
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

CPU = torch.device("cpu")
MIB = 2**20
# what a CPU process holds beside the live tensors, at most (190-300 MiB were measured)
CPU_SCRATCH = 512 * MIB

# which operation makes the peak of each phase
PHASE_OPS = {
    "cross-entropy backward": {"_log_softmax_backward_data", "nll_loss_backward"},
    "gradient of the token embedding": {"add"},
}
PARTS = [
    *("weights", "gradients", "moments", "activations", "logits"),
    *("temporary", "workspaces", "context"),
]


def check(
    config: RunConfig, device_type: str = "cpu", capability: str | None = None, **measuring: bool
) -> None:
    """The forecasts of one and of two steps equal the measured peaks, but for AdamW's step counters
    and a few scalars.
    """
    found = measured(config, device_type, **measuring)
    for steps, peak in enumerate(found.after, 1):
        told = forecast(
            replace(config, steps=steps), device_type, compute_capability=capability, followed=True
        )
        assert told.live_bytes == pytest.approx(peak.peak_bytes, rel=0.005)  # what is promised
        assert abs(told.live_bytes - peak.peak_bytes) <= 4 * found.weight_tensors + 1024
        if told.phase == "optimizer step":
            assert peak.part == "optimizer"
        else:
            assert peak.part == "backward"
            assert peak.op in PHASE_OPS[told.phase]
        assert found.largest_bytes <= told.largest_tensor_bytes <= 2 * found.largest_bytes


# --- the measuring instrument itself ---


def test_tracker_counts_storages_from_birth_to_death() -> None:
    before = torch.zeros(1000)
    tracker = MemoryTracker()
    tracker.register(before)
    with tracker:
        a = before + 1  # 4000 bytes
        assert tracker.live_bytes == 8000
        b = a.view(10, 100)[2:].t()  # views are free
        assert tracker.live_bytes == 8000
        del a
        assert tracker.live_bytes == 8000  # the view holds the storage
        del b
        assert tracker.live_bytes == 4000
        before.add_(1)  # in place
        c = before.double()
        del before
    assert tracker.live_bytes == 8000
    assert tracker.peak_bytes == 12000
    assert (tracker.peak_op, c.dtype) == ("_to_copy", torch.float64)


def test_tracker_sees_what_autograd_saves() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    tracker = MemoryTracker()
    tracker.register(x)
    one = 64 * 64 * 4
    with tracker:
        y = x.exp().exp()  # the inner result is saved for backward, as is the outer
        assert tracker.live_bytes == 3 * one
        loss = y.sum()
        del y
        assert tracker.live_bytes == 3 * one + 4
        loss.backward()
    assert tracker.live_bytes == 2 * one + 4  # x, its gradient and the loss


# --- forecast against the measured step ---

SETTINGS = [
    # tiny: the logits are nearly everything
    *(
        {"model": "tiny", "precision": precision, "attention": attention, "B": B, "T": T}
        for precision, attention, B, T in [
            ("fp32", "manual", 1, 1),
            ("fp32", "manual", 8, 1024),
            ("fp32", "sdpa", 3, 37),
            ("bf16", "manual", 8, 1024),
            ("bf16", "sdpa", 4, 128),
            ("fp16", "manual", 2, 512),
            ("fp16", "sdpa", 5, 333),
            ("fp64", "manual", 4, 256),
            ("fp64", "sdpa", 1, 32),
            ("tf32", "manual", 6, 100),
            ("tf32", "sdpa", 2, 1024),
            ("bf16", "manual", 3, 5),
        ]
    ),
    {"model": "tiny", "B": 4, "T": 32, "optimizer": "fused"},
    {"model": "tiny", "B": 256, "T": 64, "attention": "sdpa", "optimizer": "fused"},
    {"model": "tiny", "B": 4, "T": 256, "precision": "fp64", "optimizer": "fused"},
    {"model": "tiny", "B": 4, "T": 256, "precision": "bf16", "vocab_size": 50304},
    {"model": "tiny", "B": 1, "T": 32, "vocab_size": 50304},
    {"model": "tiny", "B": 7, "T": 91, "precision": "fp16", "vocab_size": 50304}
    | {"attention": "sdpa", "optimizer": "fused"},
    {"model": "tiny", "B": 2, "T": 640, "precision": "fp64", "vocab_size": 50304},
    # GPT-2: the lesson's model
    {"B": 4, "T": 1024, "optimizer": "fused", "vocab_size": 50304},
    {"B": 8, "T": 128, "attention": "sdpa"},
    {"B": 4, "T": 1024, "attention": "sdpa", "precision": "tf32", "optimizer": "fused"},
    {"B": 8, "T": 1024, "precision": "bf16", "optimizer": "fused"},
    {"B": 4, "T": 1024, "precision": "bf16", "attention": "sdpa", "optimizer": "fused"},
    {"B": 2, "T": 33, "precision": "fp16", "attention": "sdpa", "optimizer": "fused"},
    {"B": 4, "T": 512, "precision": "fp64", "attention": "sdpa", "optimizer": "fused"},
    # larger ones
    {"model": "gpt2-medium", "B": 8, "T": 1024, "precision": "bf16", "attention": "sdpa"}
    | {"optimizer": "fused"},
    {"model": "gpt2-large", "B": 1, "T": 1024, "attention": "sdpa", "optimizer": "fused"},
]
CUDA_SETTINGS = [
    {"model": "tiny", "B": 1, "T": 32},
    {"model": "tiny", "B": 4, "T": 512, "precision": "bf16"},
    {"model": "tiny", "B": 2, "T": 77, "precision": "fp16", "attention": "sdpa"},
    {"model": "tiny", "B": 4, "T": 512, "precision": "fp64"},
    {"model": "tiny", "B": 4, "T": 512, "precision": "fp64", "attention": "sdpa"},
    {"B": 1, "T": 32, "attention": "sdpa"},
    {"B": 4, "T": 1024, "precision": "bf16", "optimizer": "fused"},
    {"B": 4, "T": 1024, "precision": "fp64", "attention": "sdpa", "optimizer": "fused"},
    {"model": "tiny", "B": 12, "T": 64, "precision": "tf32", "vocab_size": 50304},
    {"model": "tiny", "B": 3, "T": 200, "precision": "fp16", "optimizer": "fused"},
    {"model": "tiny", "B": 32, "T": 1024, "precision": "fp16", "optimizer": "fused"},
]


def name(setting: dict[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in setting.items())


@pytest.mark.parametrize("setting", SETTINGS, ids=name)
def test_forecast_is_the_measured_peak(setting: dict[str, object]) -> None:
    config = RunConfig(**setting)
    check(config)
    fused = "_scaled_dot_product_flash_attention_for_cpu" in measured(config).ops
    assert fused == (config.attention == "sdpa")  # the kernel whose logsumexp is counted


@pytest.mark.parametrize("setting", CUDA_SETTINGS, ids=name)
def test_forecast_is_the_peak_under_cudas_rules(setting: dict[str, object]) -> None:
    config = RunConfig(**setting)
    check(config, "cuda")
    found = measured(config, "cuda")
    assert ("_foreach_sqrt" in found.ops) == (config.optimizer == "default")
    assert "_scaled_dot_product_flash_attention_for_cpu" not in found.ops or (
        config.precision != "fp64"
    )


@pytest.mark.parametrize(
    ("operation", "cast_on"),
    [
        ("softmax.int", {"CUDA", "XPU", "MPS"}),
        ("cross_entropy_loss", {"CPU"}),  # elsewhere its log-softmax keeps the logits' type
        ("nll_loss", {"CPU", "CUDA", "XPU", "MPS"}),
        ("scaled_dot_product_attention", {"CPU", "CUDA", "XPU", "MPS"}),
        ("gelu", set()),
    ],
)
def test_autocast_of_a_gpu_is_what_torchs_dispatcher_says(operation, cast_on) -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    kinds = ("CPU", "CUDA", "XPU", "MPS")
    assert {k for k in kinds if has(f"aten::{operation}", f"Autocast{k}")} == cast_on


@pytest.mark.parametrize(
    ("setting", "device_type", "capability"),
    [
        # no kernel of SDPA takes bfloat16 below capability 8.0, and MPS has none that trains
        ({"model": "tiny", "B": 4, "T": 512, "precision": "bf16"}, "cuda", "7.5"),
        ({"B": 2, "T": 1024, "precision": "bf16", "optimizer": "fused"}, "cuda", "7.0"),
        ({"model": "tiny", "B": 3, "T": 200, "precision": "fp16"}, "mps", None),
        ({"B": 4, "T": 512}, "mps", None),
    ],
    ids=str,
)
def test_where_sdpa_has_no_kernel_the_scores_are_forecast(setting, device_type, capability) -> None:
    config = RunConfig(attention="sdpa", **setting)
    check(config, device_type, capability, fused_sdpa=False)
    assert "bmm" in measured(config, device_type, fused_sdpa=False).ops

    def peak(T, **other):
        return forecast(replace(config, T=T, **other), device_type, compute_capability=capability)

    assert peak(1024).parts.activations > 2.2 * peak(512).parts.activations
    if device_type == "cuda":  # float16 has a kernel there, and every card from 8.0 on takes both
        fp16 = peak(1024, precision="fp16").parts.activations
        new = forecast(replace(config, T=1024), "cuda", compute_capability="8.0")
        assert fp16 == new.parts.activations < peak(1024).parts.activations / 1.5


# no shrinking: a failing example is as clear as a smaller one, and shrinking takes minutes
@settings(derandomize=True, deadline=None, max_examples=8, phases=(Phase.generate,))
@given(
    n_layer=st.integers(1, 3),
    n_head=st.integers(1, 5),
    head_size=st.sampled_from((8, 24, 64, 192)),
    block_size=st.integers(1, 2048),
    share=st.floats(0, 1),
    B=st.integers(1, 16),
    precision=st.sampled_from(PRECISIONS),
    attention=st.sampled_from(ATTENTIONS),
    optimizer=st.sampled_from(OPTIMIZERS),
    vocab_size=st.sampled_from((50257, 50304)),
    device_type=st.sampled_from(("cpu", "cuda")),
)
def test_forecast_is_the_measured_peak_of_any_shape(
    n_layer, n_head, head_size, block_size, share, device_type, **setting
) -> None:
    shape = GPTConfig(
        block_size=block_size, n_layer=n_layer, n_head=n_head, n_embd=n_head * head_size
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(config_module.MODELS, "shape", shape)
        config = RunConfig(model="shape", T=1 + int(share * (block_size - 1)), **setting)
        found = measured(config, device_type)
        told = forecast(config, device_type, followed=True).live_bytes
    assert abs(told - found.peak_bytes) <= 4 * found.weight_tensors + 1024


def test_the_settings_above_leave_nothing_out() -> None:
    on_cpu, on_cuda = (
        [RunConfig(**setting) for setting in some] for some in (SETTINGS, CUDA_SETTINGS)
    )
    assert 2 * (len(set(on_cpu)) + len(set(on_cuda))) >= 40  # each of one and of two steps
    configs = on_cpu + on_cuda
    assert {c.model for c in configs} >= {"tiny", "gpt2", "gpt2-medium", "gpt2-large"}
    for some in (on_cpu, on_cuda):
        assert {c.precision for c in some} == set(PRECISIONS)
        assert {c.attention for c in some} == set(ATTENTIONS)
        assert {c.optimizer for c in some} == set(OPTIMIZERS)
        assert {c.vocab_size for c in some} == {50257, 50304}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("B", "T"), [(4, 256), (1, 32)])
def test_a_run_of_one_step_never_holds_the_moments_and_the_logits(B, T, optimizer) -> None:
    config = RunConfig(model="tiny", B=B, T=T, optimizer=optimizer)
    one, two = (forecast(replace(config, steps=steps), "cpu") for steps in (1, 2))
    assert forecast(replace(config, steps=1000), "cpu") == two
    first, both = measured(config).after
    saved = both.peak_bytes - first.peak_bytes
    assert two.live_bytes - one.live_bytes == pytest.approx(saved, abs=1024)
    moments = 2 * 4 * num_params(config.gpt)
    if B * T == 1024:  # the logits decide: two moments less
        assert saved == pytest.approx(moments, rel=0.001)
        assert (one.parts.moments, two.parts.moments) == (0, moments)
    else:  # the first optimizer step is where they are born
        assert saved < moments


# --- the loop itself, on real tensors ---


@pytest.mark.parametrize(
    "setting",
    [
        {"B": 2, "T": 64},
        {"B": 2, "T": 64, "precision": "tf32", "attention": "sdpa"},
        {"B": 4, "T": 32, "precision": "bf16", "optimizer": "fused"},
        {"B": 1, "T": 8, "precision": "fp16"},
        {"B": 2, "T": 32, "precision": "fp64", "attention": "sdpa", "vocab_size": 50304},
    ],
    ids=name,
)
def test_the_loop_holds_nothing_but_what_the_forecast_counts(setting: dict[str, object]) -> None:
    config = RunConfig(model="tiny", steps=3, device="cpu", **setting)
    tokens = torch.arange(4 * config.tokens_per_step)
    width = 8 if config.precision == "fp64" else 4
    gpt = config.gpt
    weights = width * num_params(gpt)
    masks = width * gpt.n_layer * gpt.block_size**2 if config.attention == "manual" else 0
    tracker = MemoryTracker()
    tracker.register(tokens, counted=False)  # batches are views of it
    between = []
    with tracker:
        for _ in train(config, tokens, CPU):
            between.append(tracker.live_bytes)
    # between two steps: weights, gradients, two moments
    assert between == pytest.approx([4 * weights + masks] * 3, abs=2048)
    told = forecast(config, "cpu").peak_bytes - 16 * config.tokens_per_step  # no batch of its own
    assert tracker.peak_bytes == pytest.approx(told, abs=2048)
    assert tracker.live_bytes < 2048  # everything is given back


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_a_real_process_stays_below_what_is_asked_for() -> None:
    program = """
import re, torch
from pathlib import Path
from gpt2demo.config import RunConfig
from gpt2demo.fit import CPU_SCRATCH_BYTES
from gpt2demo.memory import forecast
from gpt2demo.train import train
def status(name):
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"^{name}:\\s+(\\d+)", text, re.MULTILINE)[1])
config = RunConfig(model="tiny", precision="bf16", B=4, T=128, steps=2, device="cpu")
tokens = torch.arange(2000)
before = status("VmRSS")
list(train(config, tokens, torch.device("cpu")))
need = forecast(config, "cpu").live_bytes + CPU_SCRATCH_BYTES
print(status("VmHWM") - before, need)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    took, asked = map(int, run.stdout.split())
    assert asked - CPU_SCRATCH < took < asked


# --- invariants ---

any_config = st.builds(
    RunConfig,
    model=st.sampled_from(tuple(MODELS)),
    precision=st.sampled_from(PRECISIONS),
    B=st.integers(1, 255),
    T=st.integers(1, 1023),
    attention=st.sampled_from(ATTENTIONS),
    optimizer=st.sampled_from(OPTIMIZERS),
    vocab_size=st.sampled_from((50257, 50304)),
    compile=st.booleans(),
    steps=st.integers(1, 3),
)
any_device = st.sampled_from(("cpu", "cuda", "xpu", "mps"))


def changed(config: RunConfig, **changes: object) -> RunConfig:
    return RunConfig(**(config.to_dict() | changes))


@unhurried
@given(any_config, any_device)
def test_forecast_invariants(config: RunConfig, device_type: str) -> None:
    def peak(**changes: object) -> int:
        return forecast(changed(config, **changes), device_type).peak_bytes

    assert peak(precision="tf32") == peak(precision="fp32")
    assert peak(precision="fp64") > peak(precision="fp32")
    assert peak() <= peak(B=config.B + 1)
    assert peak() <= peak(T=config.T + 1)
    assert peak(optimizer="fused") <= peak(optimizer="default")
    if fused_sdpa(config.precision, device_type, None):
        assert peak(attention="sdpa") <= peak(attention="manual")
    assert peak(steps=1) <= peak(steps=2) == peak(steps=1000)
    # weights, gradients and two moments at the least
    assert peak() >= 4 * 4 * num_params(config.gpt)
    assert type(peak()) is int


@unhurried
@given(any_config, any_device, st.sampled_from((None, "7.5", "8.9", "9.0", "10.0")), st.booleans())
def test_forecast_parts(
    config: RunConfig, device_type: str, capability: str | None, with_context: bool
) -> None:
    def told(config: RunConfig, sizes: tuple[int, int] | None = None) -> MemoryForecast:
        return forecast(
            config,
            device_type,
            compute_capability=capability,
            with_context=with_context,
            sizes=sizes,
        )

    one = told(config)
    parts = asdict(one.parts)
    assert list(parts) == PARTS
    assert all(type(part) is int and part >= 0 for part in parts.values())
    assert sum(parts.values()) == one.peak_bytes
    assert one.live_bytes == one.peak_bytes - parts["workspaces"] - parts["context"]
    assert one.parts.allocated == one.peak_bytes - parts["context"]
    assert parts["weights"] >= 4 * num_params(config.gpt)
    assert 0 < one.largest_tensor_bytes < one.live_bytes
    assert one.to_dict() == {
        "peak_bytes": one.peak_bytes,
        "live_bytes": one.live_bytes,
        "phase": one.phase,
        "parts": parts,
    }
    # fp16 keeps what bf16 keeps, TF32 what fp32 does, part by part
    if config.attention == "manual" or fused_sdpa("bf16", device_type, capability):
        assert told(changed(config, precision="fp16")) == told(changed(config, precision="bf16"))
    assert told(changed(config, precision="tf32")) == told(changed(config, precision="fp32"))
    # sizes in place of the config's
    for B, T in ((1, 1), (config.B + 1, 1024), (config.T % 256 + 1, config.B)):
        assert told(config, (B, T)) == told(changed(config, B=B, T=T))
    # what lies beside the tensors is what the device is asked for
    plain = forecast(config, device_type)
    assert plain.live_bytes == one.live_bytes
    assert plain.parts.context == 0
    if device_type != "cuda":
        assert one == plain
        assert one.peak_bytes == one.live_bytes


@pytest.mark.parametrize(
    ("device_type", "capability", "size_mib"),
    [
        ("cuda", "6.1", 2 * 8.125),  # 8.1 MiB a handle below compute capability 9.0
        ("cuda", "8.9", 2 * 8.125),
        ("cuda", "9.0", 2 * 32),
        ("cuda", "10.0", 2 * 32),  # 10 is more than 9, though "10" sorts before "9"
        ("cuda", "12.0", 2 * 32),
        ("cuda", None, 2 * 32),  # unknown: the larger
        ("cpu", "8.9", 0),
        ("xpu", None, 0),
        ("mps", None, 0),
    ],
)
def test_cublas_workspaces(device_type: str, capability: str | None, size_mib: float) -> None:
    assert workspace_bytes(device_type, capability) == size_mib * MIB
    told = forecast(RunConfig(), device_type, compute_capability=capability)
    assert told.parts.workspaces == size_mib * MIB
    assert told.peak_bytes - told.live_bytes == size_mib * MIB


def test_a_context_is_counted_on_cuda_where_it_is_asked_for() -> None:
    def context(device_type: str, with_context: bool) -> int:
        return forecast(RunConfig(), device_type, with_context=with_context).parts.context

    assert 274 * MIB <= context("cuda", with_context=True) <= 512 * MIB  # measured: 274 to 430
    assert context("cuda", with_context=False) == context("cpu", with_context=True) == 0


def test_the_figures_of_the_memory_study() -> None:
    """The peaks of GPT-2 that were measured before there was this code (MiB, foreach, step 2), and
    for bf16 on CUDA those of tests/gpu/check_dispatch.py.
    """
    for setting, device_type, mib in [
        ({"B": 1, "T": 32, "attention": "sdpa"}, "cuda", 2374),
        ({"B": 4, "T": 128, "attention": "sdpa", "precision": "bf16"}, "cuda", 2374),
        ({"B": 1, "T": 32, "attention": "sdpa", "optimizer": "fused"}, "cuda", 2193),
        ({"B": 8, "T": 128, "attention": "sdpa"}, "cuda", 2596),
        ({"B": 4, "T": 1024, "attention": "sdpa"}, "cuda", 6111),
        ({"B": 4, "T": 1024, "attention": "sdpa", "precision": "bf16"}, "cuda", 4940),
        ({"B": 4, "T": 1024}, "cuda", 8473),
        ({"B": 4, "T": 1024, "precision": "bf16"}, "cuda", 8454),
        ({"B": 4, "T": 1024, "precision": "bf16"}, "cpu", 6542),
        ({"B": 8, "T": 1024, "attention": "sdpa"}, "cuda", 10798),
        ({"B": 8, "T": 1024}, "cuda", 15461),
        ({"B": 8, "T": 1024, "precision": "bf16"}, "cuda", 15188),
    ]:
        told = forecast(RunConfig(**setting), device_type)
        assert told.live_bytes / MIB == pytest.approx(mib, rel=0.002), setting


@pytest.mark.parametrize("vocab_size", [50257, 50304])
@pytest.mark.parametrize("model", MODELS)
def test_num_params_counts_the_real_models_weights(model: str, vocab_size: int) -> None:
    gpt = RunConfig(model=model, vocab_size=vocab_size).gpt
    with torch.device("meta"):
        real = GPT(gpt)
    assert num_params(gpt) == real.num_params() == sum(p.numel() for p in real.parameters())


def test_num_params_of_the_published_models() -> None:
    assert num_params(RunConfig().gpt) == 124_439_808
    assert num_params(RunConfig(vocab_size=50304).gpt) == 124_475_904
    assert num_params(MODELS["gpt2-medium"]) == 354_823_168
    assert num_params(MODELS["gpt2-large"]) == 774_030_080
    assert num_params(MODELS["gpt2-xl"]) == 1_557_611_200
