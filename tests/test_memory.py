import re
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from memory_tracker import Measured, MemoryTracker, measure
from torch.nn import functional as F  # noqa: N812

from gpt2demo import config as config_module
from gpt2demo.config import ATTENTIONS, MODELS, OPTIMIZERS, PRECISIONS, GPTConfig, RunConfig
from gpt2demo.memory import forecast, num_params
from gpt2demo.model import GPT
from gpt2demo.oom import WillNotFit, advice, check_cpu_memory, cpu_need_bytes, is_out_of_memory
from gpt2demo.train import train

# a busy machine is no fault of the code
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

MIB = 2**20
GIB = 2**30
# what a CPU process holds beside the live tensors, at most (190-300 MiB were measured)
CPU_SCRATCH = 512 * MIB

# which operation makes the peak of each phase
PHASE_OPS = {
    "cross-entropy backward": ("backward", "_log_softmax_backward_data"),
    "gradient of the token embedding": ("backward", "add"),
}


def measured(config: RunConfig, device_type: str = "cpu") -> Measured:
    return measure(
        config.gpt,
        precision=config.precision,
        attention=config.attention,
        B=config.B,
        T=config.T,
        optimizer=config.optimizer,
        device_type=device_type,
    )


def check(config: RunConfig, device_type: str = "cpu") -> None:
    """The forecast equals the measured peak, but for AdamW's step counters and a few scalars."""
    found = measured(config, device_type)
    told = forecast(config, device_type)
    assert told.peak_bytes == pytest.approx(found.peak_bytes, rel=0.005)  # what is promised
    assert abs(told.peak_bytes - found.peak_bytes) <= 4 * found.weight_tensors + 1024
    if told.phase == "optimizer step":
        assert found.part == "optimizer"
    else:
        assert (found.part, found.op) == PHASE_OPS[told.phase]


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


def test_tracker_agrees_with_torchs_profiler_on_a_real_run() -> None:
    config = RunConfig(model="tiny", B=2, T=32, steps=2, device="cpu")
    tracker = MemoryTracker()
    tokens = torch.arange(1000)
    tracker.register(tokens, counted=False)
    with tracker:
        assert len(list(train(config, tokens, torch.device("cpu")))) == 2
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        assert len(list(train(config, tokens, torch.device("cpu")))) == 2
    live = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert len(events) > 500
    # operations' own scratch, which no other operation sees, is the difference
    assert tracker.peak_bytes == pytest.approx(peak, rel=0.002)
    assert forecast(config, "cpu").peak_bytes == pytest.approx(peak, rel=0.005)


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
        ]
    ),
    {"model": "tiny", "B": 4, "T": 32, "optimizer": "fused"},
    {"model": "tiny", "B": 256, "T": 64, "attention": "sdpa", "optimizer": "fused"},
    {"model": "tiny", "B": 4, "T": 256, "precision": "fp64", "optimizer": "fused"},
    {"model": "tiny", "B": 4, "T": 256, "precision": "bf16", "vocab_size": 50304},
    {"model": "tiny", "B": 1, "T": 32, "vocab_size": 50304},
    # GPT-2: the lesson's model
    {"B": 1, "T": 32},
    {"B": 4, "T": 1024},
    {"B": 8, "T": 128, "attention": "sdpa"},
    {"B": 4, "T": 1024, "attention": "sdpa"},
    {"B": 8, "T": 1024, "precision": "bf16"},
    {"B": 4, "T": 1024, "precision": "bf16", "attention": "sdpa"},
    {"B": 2, "T": 33, "precision": "fp16", "attention": "sdpa", "optimizer": "fused"},
    {"B": 4, "T": 512, "precision": "fp64", "attention": "sdpa", "optimizer": "fused"},
    # larger ones
    {"model": "gpt2-medium", "B": 8, "T": 1024, "attention": "sdpa", "optimizer": "fused"},
    {"model": "gpt2-large", "B": 1, "T": 1024, "precision": "bf16", "optimizer": "fused"},
]
CUDA_SETTINGS = [
    {"model": "tiny", "B": 1, "T": 32},
    {"model": "tiny", "B": 4, "T": 512, "precision": "bf16"},
    {"model": "tiny", "B": 2, "T": 77, "precision": "fp16", "attention": "sdpa"},
    {"model": "tiny", "B": 4, "T": 512, "precision": "fp64"},
    {"model": "tiny", "B": 4, "T": 512, "precision": "fp64", "attention": "sdpa"},
    {"B": 1, "T": 32, "attention": "sdpa"},
    {"B": 4, "T": 1024, "precision": "bf16"},
    {"B": 4, "T": 1024, "precision": "fp64", "attention": "sdpa", "optimizer": "fused"},
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


# no shrinking: a failing example is as clear as a smaller one, and shrinking takes minutes
@settings(derandomize=True, deadline=None, max_examples=12, phases=(Phase.generate,))
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
        told = forecast(config, device_type).peak_bytes
    assert abs(told - found.peak_bytes) <= 4 * found.weight_tensors + 1024


def test_the_first_step_alone_needs_less() -> None:
    config = RunConfig(model="tiny", B=4, T=256)
    one = measure(
        config.gpt, precision="fp32", attention="manual", B=4, T=256, optimizer="default", steps=1
    )
    moments = 2 * 4 * num_params(config.gpt)
    assert forecast(config, "cpu").peak_bytes - one.peak_bytes == pytest.approx(moments, rel=0.001)


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
        for _ in train(config, tokens, torch.device("cpu")):
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
from gpt2demo.oom import cpu_need_bytes
from gpt2demo.train import train
def status(name):
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"^{name}:\\s+(\\d+)", text, re.MULTILINE)[1])
config = RunConfig(model="tiny", precision="bf16", B=4, T=128, steps=2, device="cpu")
tokens = torch.arange(2000)
before = status("VmRSS")
list(train(config, tokens, torch.device("cpu")))
print(status("VmHWM") - before, cpu_need_bytes(config))
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
)
any_device = st.sampled_from(("cpu", "cuda", "xpu", "mps"))


def changed(config: RunConfig, **changes: object) -> RunConfig:
    return RunConfig(**(config.to_dict() | changes))


@unhurried
@given(any_config, any_device)
def test_forecast_invariants(config: RunConfig, device_type: str) -> None:
    def peak(**changes: object) -> int:
        return forecast(changed(config, **changes), device_type).peak_bytes

    assert peak(precision="fp16") == peak(precision="bf16")
    assert peak(precision="tf32") == peak(precision="fp32")
    assert peak(precision="fp64") > peak(precision="fp32")
    assert peak() <= peak(B=config.B + 1)
    assert peak() <= peak(T=config.T + 1)
    assert peak(optimizer="fused") <= peak(optimizer="default")
    assert peak(attention="sdpa") <= peak(attention="manual")
    # weights, gradients and two moments at the least
    assert peak() >= 4 * 4 * num_params(config.gpt)
    assert type(peak()) is int


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


# --- what counts as out of memory ---

OOM_TEXTS = [
    "CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has a total capacity of 7.79 GiB of "
    "which 1.02 GiB is free.",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other "
    "API call, so the stacktrace below might be incorrect.",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "HIP out of memory. Tried to allocate 2.00 GiB",
    "XPU out of memory. Tried to allocate 16.00 GiB",
    "MPS backend out of memory (MPS allocated: 17.91 GB, other allocations: 412.00 MB, max "
    "allowed: 18.13 GB). Tried to allocate 256.00 MB on private pool.",
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 12884901888 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried "
    "to allocate 12884901888 bytes.",
]
OTHER_TEXTS = [
    "mat1 and mat2 shapes cannot be multiplied (4096x768 and 1024x50257)",
    "The size of tensor a (1024) must match the size of tensor b (512) at non-singleton dimension",
    "shape '[4, 1024]' is invalid for input of size 4095",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`",
    "CUDA error: no kernel image is available for execution on the device",
    "Invalid device string: 'cuda:00'",
    "unsupported memory format option Preserve",
    "",
]


@pytest.mark.parametrize("text", OOM_TEXTS)
def test_runtime_errors_that_are_out_of_memory(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(ValueError(text))  # torch never raises that for memory


@pytest.mark.parametrize("text", OTHER_TEXTS)
def test_runtime_errors_that_are_something_else(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))


def test_out_of_memory_by_class() -> None:
    for kind in (torch.OutOfMemoryError, torch.cuda.OutOfMemoryError, MemoryError, WillNotFit):
        assert is_out_of_memory(kind(""))
    for other in (KeyboardInterrupt(), SystemExit("out of memory"), OSError(28, "No space left")):
        assert not is_out_of_memory(other)


def raised(action) -> Exception:
    with pytest.raises(RuntimeError) as caught:
        action()
    return caught.value


def test_errors_that_torch_really_raises() -> None:
    assert is_out_of_memory(raised(lambda: torch.empty(2**50)))
    a, idx = torch.ones(2, 3), torch.zeros(1, 4, dtype=torch.long)
    assert not is_out_of_memory(raised(lambda: a @ a))
    assert not is_out_of_memory(raised(lambda: a.view(2**50)))
    assert not is_out_of_memory(raised(lambda: a + torch.ones(2**10)))
    assert not is_out_of_memory(raised(lambda: F.embedding(idx.double(), a)))


# --- the gate of a CPU run, and what to lower ---


def test_the_gate_stands_at_the_measured_need() -> None:
    config = RunConfig(B=4, T=1024)
    need = cpu_need_bytes(config)
    assert need - CPU_SCRATCH == pytest.approx(measured(config).peak_bytes, rel=0.005)
    check_cpu_memory(config, need)
    check_cpu_memory(config, None)  # unknown: nothing to refuse by
    with pytest.raises(WillNotFit) as caught:
        check_cpu_memory(config, need - 1)
    assert is_out_of_memory(caught.value)
    with pytest.raises(WillNotFit) as caught:
        check_cpu_memory(config, 3 * GIB)
    said = [float(number) for number in re.findall(r"([\d.]+) GiB", str(caught.value))]
    assert said == pytest.approx([(measured(config).peak_bytes + CPU_SCRATCH) / GIB, 3], abs=0.06)


def with_margin(live_bytes: float, device_type: str) -> float:
    """What a run takes from the device, by the margins that the memory study measured."""
    return live_bytes + CPU_SCRATCH if device_type == "cpu" else live_bytes * 1.13 + 64 * MIB


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("fits", [1, 3])
def test_the_proposed_batch_is_the_largest_that_fits(fits: int, device_type: str) -> None:
    def live(B: int) -> int:
        return measured(RunConfig(model="tiny", B=B, T=1024), device_type).peak_bytes

    free = with_margin((live(fits) + live(fits + 1)) / 2, device_type)
    said = advice(RunConfig(model="tiny", B=8, T=1024), device_type, int(free))
    B = int(re.fullmatch(r"Lower B: at T=1024, B=(\d+) should fit\.", said)[1])
    assert with_margin(live(B), device_type) <= free < with_margin(live(B + 1), device_type)


@pytest.mark.parametrize("B", [1, 8])
def test_a_shorter_sequence_is_proposed_where_no_batch_fits(B: int) -> None:
    def live(T: int) -> int:
        return measured(RunConfig(model="tiny", B=1, T=T)).peak_bytes

    free = with_margin((live(256) + live(512)) / 2, "cpu")
    said = advice(RunConfig(model="tiny", B=B, T=1024), "cpu", int(free))
    T = int(re.fullmatch(r"Lower T: at B=1, T=(\d+) should fit\.", said)[1])
    assert with_margin(live(T), "cpu") <= free < with_margin(live(2 * T), "cpu")
    assert T == 256


def test_advice_promises_nothing_it_cannot_know() -> None:
    # AdamW's state alone is more than this: no B and no T helps
    assert advice(RunConfig(B=8, T=1024), "cuda", GIB) == "Take a smaller model."
    assert advice(RunConfig(B=1, T=1), "cuda", 0) == "Take a smaller model."
    # free memory unknown
    said = advice(RunConfig(B=8, T=512), "mps", None)
    assert said == "Lower B below 8 or T below 512, or take a smaller model."
    said = advice(RunConfig(B=1, T=512), "mps", None)
    assert said == "Lower T below 512, or take a smaller model."
    assert advice(RunConfig(B=1, T=1), "mps", None) == "Take a smaller model."
