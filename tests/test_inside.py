"""One step from inside: parts, matmuls, casts and values, each seen in another way as well."""

import json
import re
import time
import weakref
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from gpu import check_inside
from kineto import Trace
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optimizers
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.flop_counter import FlopCounterMode

from gpt2demo import cli, inside, step_profile
from gpt2demo.casts import ForwardWatch
from gpt2demo.config import PRECISIONS, InputError, RunConfig
from gpt2demo.data import load_tokens
from gpt2demo.device import probe_device
from gpt2demo.hub import Hub
from gpt2demo.inside import inspect_step
from gpt2demo.inside_words import cast_words, clock_words, headline, time_words, value_words
from gpt2demo.inspection import PARTS
from gpt2demo.kernel_names import on_tensor_cores
from gpt2demo.model import GPT
from gpt2demo.step_profile import ProfilerMissing, read
from gpt2demo.support import Support
from gpt2demo.train import train

SETTINGS = [
    ("fp32", "manual"),
    ("bf16", "manual"),
    ("bf16", "sdpa"),
    ("fp16", "manual"),
    ("fp16", "sdpa"),
]
CPU = torch.device("cpu")
WATCHED_STEP = 4  # of a CPU's inspection: after two of warm-up, the clock's and the profiled one
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def tiny(**changes) -> RunConfig:
    return RunConfig(**{"model": "tiny", "B": 1, "T": 16, "device": "cpu"} | changes)


@pytest.fixture(scope="module")
def info():
    native = Support(status="native", reason="Here for the tests.")
    return replace(probe_device("cpu"), support=dict.fromkeys(PRECISIONS, native))


@pytest.fixture(scope="module")
def seen(info):
    return {
        setting: inspect_step(tiny(precision=setting[0], attention=setting[1]), info)
        for setting in SETTINGS
    }


@pytest.fixture
def quick(monkeypatch):
    """No values are counted."""
    monkeypatch.setattr(inside.Values, "add", lambda *_: None)


def modes() -> tuple[int, int, int, int]:
    """How many modes and global hooks are on."""
    return (
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        len(hooks._global_forward_pre_hooks) + len(hooks._global_forward_hooks),
        len(optimizers._global_optimizer_post_hooks),
    )


# --- where the time goes


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_parts_add_up_to_the_step_by_the_clock(seen, setting):
    found = seen[setting]
    assert (found.state, found.missing) == ("finished", {})
    told = found.profile
    assert tuple(told.parts) == PARTS
    assert all(seconds > 0 for seconds in told.parts.values())
    assert sum(told.parts.values()) == pytest.approx(told.step_seconds, rel=0.1)
    assert 0 < told.matmul_share < 1
    assert (told.fused_attention_share > 0) == (setting[1] == "sdpa")
    assert told.tensor_core_share is None


def test_each_part_holds_what_happens_in_it(info, quick, monkeypatch):
    """Every part sleeps for a time of its own; what is put down to a wrong part lacks its sleep."""
    sleeps = {part: 0.04 + 0.02 * i for i, part in enumerate(PARTS)}
    calls = {"softmax": 2, "gelu": 2, "layer_norm": 5}  # in one forward pass of the tiny model

    def slow(name: str, part: str) -> None:
        real = getattr(F, name)

        def call(*args, **kwargs):
            time.sleep(sleeps[part] / calls.get(name, 1))
            return real(*args, **kwargs)

        monkeypatch.setattr(F, name, call)

    slow("softmax", "attention")
    slow("gelu", "MLP")
    slow("layer_norm", "LayerNorm and rest")
    linear, entropy = F.linear, F.cross_entropy

    def classify(x, weight, bias=None):
        if len(weight) == 50257:
            time.sleep(sleeps["classifier"])
        return linear(x, weight, bias)

    def lose(logits, targets):
        time.sleep(sleeps["cross-entropy"])
        loss = entropy(logits, targets)
        loss.register_hook(lambda _: time.sleep(sleeps["backward"]))
        return loss

    monkeypatch.setattr(F, "linear", classify)
    monkeypatch.setattr(F, "cross_entropy", lose)
    handle = register_optimizer_step_post_hook(lambda *_: time.sleep(sleeps["optimizer"]))
    try:
        told = inspect_step(tiny(), info).profile
    finally:
        handle.remove()
    for part, seconds in sleeps.items():
        assert told.parts[part] > seconds
    assert told.accounted < 1.01


def test_the_matmuls_are_those_that_torch_counts(seen):
    config = tiny()
    with FlopCounterMode(display=False) as counter:
        model = GPT(config.gpt)
        idx = torch.zeros(1, 16, dtype=torch.int64)
        model(idx, idx)[1].backward()
    told = seen["fp32", "manual"].profile
    assert sum(m.flops * m.times for m in told.matmuls) == counter.get_total_flops()


def test_the_classifier_is_the_largest_single_matmul(seen):
    largest = seen["bf16", "manual"].profile.largest_forward
    assert (largest.part, largest.M, largest.K, largest.N) == ("classifier", 16, 64, 50257)
    words = time_words(seen["bf16", "manual"])
    assert any("(16 x 64) @ (64 x 50,257)" in text and "classifier" in text for text in words)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("ampere_sgemm_128x64_tn", False),
        ("volta_sgemm_32x128_nn", False),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>", False),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_ffma_aligna4", False),
        ("void gemv2T_kernel_val<int, int, float>", False),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", False),
        ("Memset (Device)", False),
        ("volta_fp16_s884gemm_fp16_64x64_ldg8_f2f_nn", True),
        ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn", True),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn", True),
        ("cutlass_80_tensorop_s1688tf32gemm_256x128_16x3_tn_align4", True),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize64x64x16_tensor16x8x8", True),
        ("maxwell_fp16_sgemm_fp16_128x64_tn", False),
        ("volta_hgemm_64x32_sliced1x4_tn", False),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", True),
        ("nvjet_sss_tf32_128x256_TNT", True),
        ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", True),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128>>", True),
        ("void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<64>>", False),
        ("cudnn_generated_fort_native_sdpa_sm80_flash_fprop_wmma_f16_knob_3_64x64x128", True),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16>", False),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm50", False),
        ("fmha_cutlassF_f16_notaligned_64x64_rf_sm70", True),
        ("fmha_cutlassB_f16_aligned_64x64_k64_dropout_sm75(Att)", True),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm75", False),
        ("fmha_cutlassB_f32_aligned_64x64_k32_sm80(AttentionBackwardKernel)", True),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", True),
        ("void at::native::some_new_kernel", None),
        ("Cijk_Ailk_Bljk_HHS_BH_MT128x128x32", None),
    ],
)
def test_kernels_say_by_their_name_where_they_run(name, known):
    assert on_tensor_cores(name) is known


def step_on_a_gpu(kernel: str) -> Trace:
    """A step on a GPU: a copy before it, a matmul in the classifier and one in backward."""
    trace = Trace()
    trace.op("aten::copy_", 0, 5, kernels=[("Memcpy HtoD (Pageable -> Device)", 70)])
    trace.range("Optimizer.zero_grad#AdamW.zero_grad", 10, 15)
    for part, start, end in (
        ("LayerNorm and rest", 20, 30),
        ("classifier", 31, 40),
        ("backward", 41, 90),
        ("optimizer", 91, 99),
    ):
        trace.range(f"gpt2demo: {part}", start, end)
    trace.range("Optimizer.step#AdamW.step", 91.5, 98)
    trace.op("aten::native_layer_norm", 22, 25, kernels=[("vectorized_layer_norm", 500)])
    shapes = [[16, 64], [64, 50257]]
    trace.op("aten::matmul", 32, 36, shapes=shapes)
    kernels = [("Memset (Device)", 10), (kernel, 3000)]
    trace.op("aten::mm", 33, 35, shapes=shapes, kernels=kernels)
    trace.op("autograd::engine::evaluate_function: MmBackward0", 48, 55, thread=2)
    trace.op("aten::mm", 50, 52, shapes=shapes[::-1], kernels=[(kernel, 4000)], thread=2)
    trace.op("aten::_foreach_add_", 92, 93, kernels=[("multi_tensor_apply_kernel", 490)])
    return trace


def test_on_a_gpu_the_kernels_count_where_they_were_launched():
    told = read(step_on_a_gpu("nvjet_tst_128x256_64x4").events(), "cuda", 0.010)
    assert told.parts == pytest.approx(
        {
            "classifier": 0.00301, "MLP": 0, "attention": 0, "LayerNorm and rest": 0.0005,
            "cross-entropy": 0, "backward": 0.004, "optimizer": 0.00049, "waiting": 0.002,
        }
    )  # fmt: skip
    assert told.matmul_share == pytest.approx(0.701)
    assert told.fused_attention_share == 0
    assert told.tensor_core_share == pytest.approx(0.7)
    assert told.largest_forward.seconds == pytest.approx(0.00301)


# SDPA on a GPU: what calls what, and the kernels, as profiles of such machines list them
FLASH = "void pytorch_flash::flash_{}_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128>>"
CUDNN = "cudnn_generated_fort_native_sdpa_sm100_flash_{}_f16_knob_3_128x128x64_4x1x1_kernel0_0"
FMHA = "fmha_cutlass{}_{}_aligned_64x64_{}_sm{}(PyTorchMemEffAttention::AttentionKernel<>)"


@pytest.mark.parametrize(
    ("backend", "forward", "backward", "on_tensor_cores"),
    [
        ("flash", FLASH.format("fwd"), FLASH.format("bwd_dq_dk_dv_loop_seqk_parallel"), True),
        ("cudnn", CUDNN.format("fprop"), CUDNN.format("bprop"), True),
        ("efficient", *(FMHA.format(*k, 75) for k in (("F", "f16", "rf"), ("B", "f16", "k64"))), 1),
        ("efficient", *(FMHA.format(*k, 80) for k in (("F", "f32", "rf"), ("B", "f32", "k64"))), 1),
        ("efficient", *(FMHA.format(*k, 75) for k in (("F", "f32", "rf"), ("B", "f32", "k64"))), 0),
    ],
)
def test_sdpa_on_a_gpu_counts_though_an_inner_operation_launches_it(
    backend, forward, backward, on_tensor_cores
):
    trace = Trace()
    trace.range("gpt2demo: attention", 0, 10)
    trace.range("gpt2demo: backward", 11, 30)
    trace.op("aten::scaled_dot_product_attention", 1, 9)
    trace.op(f"aten::_scaled_dot_product_{backend}_attention", 2, 8)
    trace.op(f"aten::_{backend}_attention_forward", 3, 7, kernels=[(forward, 1000)])
    name = f"aten::_scaled_dot_product_{backend}_attention_backward"
    trace.op(name, 13, 20, thread=2)
    helper = ("void pytorch_flash::flash_bwd_dot_do_o_kernel", 500)
    kernels = [helper, (backward, 2000)]
    trace.op(f"aten::_{backend}_attention_backward", 14, 19, kernels=kernels, thread=2)
    told = read(trace.events(), "cuda", 0.010)
    assert told.parts["attention"] == pytest.approx(0.001)
    assert told.parts["backward"] == pytest.approx(0.0025)
    assert told.fused_attention_share == pytest.approx(0.35)
    assert told.tensor_core_share == pytest.approx(0.3 if on_tensor_cores else 0)
    assert ("three TF32" in told.tensor_core_note) == (on_tensor_cores and "f32" in forward)


def test_every_operation_of_torchs_sdpa_is_known():
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    launching = {n for n in names if re.search(r"(flash|efficient|cudnn)_attention", n)}
    assert {f"aten::_{b}_attention_forward" for b in ("flash", "efficient", "cudnn")} <= launching
    for name in launching:
        trace = Trace()
        trace.range("gpt2demo: backward", 0, 10)
        trace.op(name, 1, 9, kernels=[("flash_bwd", 1000)])
        assert read(trace.events(), "cuda", 0.010).fused_attention_share == pytest.approx(0.1), name


def test_tensor_cores_are_unknown_and_not_zero_where_a_name_says_nothing():
    told = read(step_on_a_gpu("some_new_kernel").events(), "cuda", 0.010)
    assert told.tensor_core_share is None
    assert "some_new_kernel" in told.tensor_core_note
    plain = step_on_a_gpu("ampere_sgemm_128x64_tn").events()
    assert read(plain, "cuda", 0.010).tensor_core_share == 0
    assert read(step_on_a_gpu("nvjet_tst").events(), "xpu", 0.010).tensor_core_share is None


@pytest.mark.parametrize(
    ("name", "capability", "share"),
    [
        ("NVIDIA GeForce GTX 1650", "7.5", 0),  # it runs kernels made for Turing's tensor cores
        ("Tesla P100-PCIE-16GB", "6.0", 0),
        ("Tesla T4", "7.5", 0.7),
        (None, None, 0.7),  # no capability was told: the names say it
    ],
)
def test_a_gpu_without_tensor_cores_spends_no_time_on_them(
    info, quick, monkeypatch, name, capability, share
):
    events = step_on_a_gpu("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn").events()
    monkeypatch.setattr(
        step_profile, "read", lambda _, __, s, **of: read(events, "cuda", 0.01, **of)
    )
    gpu = replace(info, name=name, compute_capability=capability)
    told = inspect_step(tiny(), gpu).profile
    assert told.tensor_core_share == pytest.approx(share)
    assert ("this GPU has none" in told.tensor_core_note) == (share == 0)


def test_a_gpu_without_kernels_in_its_profile_has_none():
    trace = Trace()
    trace.range("gpt2demo: classifier", 0, 10)
    trace.op("aten::mm", 1, 9)
    with pytest.raises(ProfilerMissing, match="no kernel"):
        read(trace.events(), "cuda", 0.010)


# --- what autocast casts


class Spy:
    """Types of a step by other means: hooks on modules, wrapped functions, the profiler's types."""

    def __init__(self, config: RunConfig, monkeypatch) -> None:
        self.modules: Counter = Counter()  # (kind, input, weight, output)
        self.functions: Counter = Counter()  # (name, input, output)
        self.kernels: Counter = Counter()  # (aten name, type of its first tensor)
        self.forward = False
        for name in ("softmax", "cross_entropy", "scaled_dot_product_attention"):
            monkeypatch.setattr(F, name, self._wrapped(name))
        step = -1
        run = train(config, load_tokens(config, 2**20)[0], CPU)
        handle = hooks.register_module_forward_hook(self._module)
        profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, acc_events=True
        )
        try:
            next(run), next(run)  # under the tracker of tensors, which shows each kernel twice
            self.modules.clear(), self.functions.clear()
            with profile:
                step = next(run).step
        finally:
            handle.remove()
            run.close()
        assert step == 2
        for event in profile.events():
            if event.input_dtypes and event.scope == 0:
                types = [t for t in event.input_dtypes if t in _NAMES]
                if types:
                    self.kernels[event.name, _NAMES[types[0]]] += 1

    def _wrapped(self, name):
        real = getattr(F, name)

        def call(*args, **kwargs):
            out = real(*args, **kwargs)
            self.functions[name, str(args[0].dtype), str(out.dtype)] += 1
            return out

        return call

    def _module(self, module, inputs, output):
        if isinstance(module, nn.Linear | nn.LayerNorm | nn.Embedding):
            kind = {"Linear": "linear", "LayerNorm": "layer_norm", "Embedding": "embedding"}
            key = kind[type(module).__name__], str(inputs[0].dtype), str(module.weight.dtype)
            self.modules[*key, str(output.dtype)] += 1


_NAMES = {
    "float": "float32",
    "double": "float64",
    "c10::BFloat16": "bfloat16",
    "c10::Half": "float16",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_table_of_casts_agrees_with_hooks_on_a_real_step(seen, setting, monkeypatch):
    precision, attention = setting
    spy = Spy(tiny(precision=precision, attention=attention, steps=3), monkeypatch)
    casts = seen[setting].casts
    modules: Counter = Counter()
    functions: Counter = Counter()
    computed: Counter = Counter()
    for c in casts.operations:
        computed[c.operation, c.compute] += c.times
        if c.operation in ("linear", "layer_norm", "embedding"):
            key = c.operation, *(f"torch.{t}" for t in (c.inputs[0], c.weight, c.output))
            modules[key] += c.times
        if c.operation in ("softmax", "cross_entropy", "scaled_dot_product_attention"):
            key = c.operation, f"torch.{c.inputs[0]}", f"torch.{c.output}"
            functions[key] += c.times
    assert modules == spy.modules
    assert functions == spy.functions
    short = SHORT[precision]
    # what the kernels themselves were given, as the profiler wrote it down
    for operation, kernel in (
        ("layer_norm", "aten::native_layer_norm"),
        ("softmax", "aten::_softmax"),
        ("cross_entropy", "aten::_log_softmax"),
    ):
        for dtype in SHORT.values():
            assert computed[operation, dtype] == spy.kernels[kernel, dtype], (operation, dtype)
    assert computed["linear", short] == 9
    assert spy.kernels["aten::addmm", short] == 8  # all but the classifier, which has no bias
    assert computed["layer_norm", "float32"] == 5


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_the_lesson_says_of_autocast_is_so(seen, setting):
    casts = seen[setting].casts
    by_name = {c.operation: c for c in casts.operations}
    logits = next(c for c in casts.operations if c.where == "lm_head")
    short = SHORT[setting[0]]
    assert (logits.inputs, logits.weight) == (("float32",), "float32")
    assert (logits.compute, logits.output) == (short, short)
    assert by_name["layer_norm"].compute == "float32"
    assert (by_name["cross_entropy"].compute, by_name["cross_entropy"].output) == ("float32",) * 2
    assert (casts.weights, casts.gradients, casts.moments) == ("float32",) * 3
    told = " ".join(cast_words(seen[setting]))
    assert f"logits {short}" in told
    assert "loss float32" in told
    # on a CPU autocast leaves softmax alone, and the page says so
    if setting == ("bf16", "manual"):
        assert by_name["softmax"].compute == "bfloat16"
        assert "on a CPU it leaves softmax" in told


def test_kernels_of_two_types_are_both_told(seen):
    """As a GPU's autocast runs the loss: log-softmax in the logits' type, the rest in float32."""

    def cross_entropy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(F.log_softmax(x, dim=-1).float(), y)

    class Loss(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return watch.call(cross_entropy, (x, y), {})

    with ForwardWatch(lambda: True, lambda output: None) as watch:
        Loss()(torch.randn(4, 9, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.long))
    (loss,) = watch.operations()
    assert (loss.operation, loss.compute) == ("cross_entropy", "bfloat16 + float32")
    assert loss.output == "float32"
    found = seen["bf16", "manual"]
    on_cpu = " ".join(cast_words(found))
    on_gpu = cast_words(replace(found, casts=replace(found.casts, operations=(loss,))))
    assert "loss bfloat16 + float32" in on_gpu[0]
    assert "its log-softmax keeps the logits' type" in " ".join(on_gpu)
    assert "log-softmax" not in on_cpu


def test_fp64_and_tf32_have_one_type(info):
    found = inspect_step(tiny(precision="fp64"), info)
    casts = found.casts
    types = {(c.compute, c.output) for c in casts.operations}
    assert types == {("float64", "float64")}
    assert (casts.weights, casts.gradients, casts.moments) == ("float64",) * 3
    tf32 = replace(found, config=found.config | {"precision": "tf32"})
    assert "TF32 is no type that a tensor has" in " ".join(cast_words(tf32))


# --- how large the numbers are


def test_weights_and_gradients_are_those_of_the_same_step_of_a_run(seen):
    config = tiny(steps=WATCHED_STEP + 1)
    found: dict[str, np.ndarray] = {}

    def keep(optimizer, *_):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for name, tensors in (
            ("weights", parameters),
            ("gradients of weights", [p.grad for p in parameters]),
        ):
            found[name] = np.concatenate([t.detach().numpy().ravel() for t in tensors])

    handle = register_optimizer_step_post_hook(keep)
    try:
        list(train(config, load_tokens(config, 2**20)[0], CPU))
    finally:
        handle.remove()
    for name, values in found.items():
        values = np.abs(values)
        told = seen["fp32", "manual"].values[name]
        assert told.count == values.size
        assert told.zeros == np.sum(values == 0)
        numbers, many = np.unique(np.frexp(values[values > 0])[1] - 1, return_counts=True)
        assert told.counts == dict(zip(numbers.tolist(), many.tolist(), strict=True))


def test_activations_are_the_outputs_of_the_operations(seen):
    B, T, C, V, layers, heads = 1, 16, 64, 50257, 2, 2
    layer = (
        4 * C + 3 * C + 2 * (4 * C) + C + C
    )  # two norms, two sums; c_attn; c_fc, gelu; two c_proj
    scores = 4 * heads * T * T + T * C  # product, scaled, masked, softmax; then with the values
    manual = B * T * (3 * C + layers * layer + C + V) + layers * B * scores + 1
    found = seen["fp32", "manual"].values
    assert found["activations"].count == manual
    assert found["gradients of activations"].count == manual - 1  # all but the loss itself
    assert found["activations"].not_finite == layers * heads * T * (T - 1) // 2  # the mask


def test_float16s_loss_scale_is_taken_out_of_the_gradients(seen):
    plain, scaled = seen["fp32", "manual"].values, seen["fp16", "manual"].values
    for name in ("gradients of activations", "gradients of weights"):
        middle = [
            np.median(np.repeat([*v[name].counts], [*v[name].counts.values()]))
            for v in (plain, scaled)
        ]
        assert abs(middle[0] - middle[1]) <= 1  # the scale is 2**16


def test_the_words_carry_the_figures(seen):
    told = " ".join(value_words(seen["fp32", "manual"]))
    values = seen["fp32", "manual"].values["gradients of weights"]
    assert f"0 of {values.nonzero:,} gradients" in told
    values = seen["fp32", "manual"].values["gradients of activations"]
    assert f"holds {100 * values.outside['fp16'].subnormal / values.nonzero:.0f} % with" in told
    for setting in SETTINGS:
        for sentences in (
            time_words(seen[setting]), cast_words(seen[setting]), value_words(seen[setting])
        ):  # fmt: skip
            assert all(text.count(". ") <= 2 for text in sentences)  # three sentences at most


# --- the clock


def test_on_a_cpu_both_clocks_agree_and_it_is_said_why(seen):
    found = seen["fp32", "manual"]
    assert len(found.clock) == 1
    assert found.unsynchronized_ms == pytest.approx(found.step_ms, rel=0.1)
    assert found.unsynchronized_ms <= found.step_ms
    told = clock_words(found, "cpu")
    assert f"{found.step_ms:,.1f} ms with" in told
    assert "On a CPU there is no difference" in told
    assert "On a CPU there is no difference" in clock_words(None, "cpu")


def test_a_device_that_works_on_its_own_is_waited_for(info, quick, monkeypatch):
    """A device whose work ends 0.2 s after it was handed over."""
    monkeypatch.setattr("gpt2demo.accelerator.synchronize", lambda device: time.sleep(0.2))
    found = inspect_step(tiny(), info)
    assert found.step_ms - found.unsynchronized_ms > 199
    on_gpu = replace(found, device_type="cuda")
    assert "The device works on its own" in clock_words(on_gpu, "cuda")
    assert "scaler" not in clock_words(on_gpu, "cuda")
    fp16 = replace(on_gpu, config=found.config | {"precision": "fp16"})
    assert "The gradient scaler reads a number back" in clock_words(fp16, "cuda")


def test_what_the_loop_does_between_two_steps_is_not_taken_from_the_reading(info, monkeypatch):
    """The GPU's energy counter may be slow; a step here takes far less than 0.3 s."""
    monkeypatch.setattr("gpt2demo.runner.EnergyMeter.after", lambda *_: time.sleep(0.3))
    found = inspect_step(tiny(), info)
    assert 0.3 * found.step_ms < found.unsynchronized_ms < found.step_ms < 300


# --- care


def test_nothing_stays_on_and_nothing_stays_behind(info):
    before = modes()
    models = []
    handle = hooks.register_module_forward_pre_hook(
        lambda module, _: models.append(weakref.ref(module)) if isinstance(module, GPT) else None
    )
    found = inspect_step(tiny(), info)
    handle.remove()
    assert modes() == before
    assert models
    assert all(model() is None for model in models)
    json.dumps(found.to_dict(), allow_nan=False)


def test_memory_that_runs_out_in_the_watched_step_is_a_sentence(info, monkeypatch):
    before = modes()

    def full(self, tensor, factor=1.0):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(inside.Values, "add", full)
    models = []
    handle = hooks.register_module_forward_pre_hook(
        lambda module, _: models.append(weakref.ref(module)) if isinstance(module, GPT) else None
    )
    found = inspect_step(tiny(), info)
    handle.remove()
    assert found.state == "out of memory"
    assert "Out of memory in step 4 (forward)" in found.message
    assert found.profile is not None  # what was seen before is kept
    assert (found.casts, found.values) == (None, {})
    assert found.missing == {"casts": found.message}
    assert modes() == before
    assert all(model() is None for model in models)
    monkeypatch.undo()
    assert inspect_step(tiny(), info).state == "finished"


def test_what_cannot_fit_is_refused_before_it_starts(info):
    found = inspect_step(tiny(model="gpt2-xl", B=256, T=1024), info)
    assert found.state == "out of memory"
    assert "GiB" in headline(found)
    assert (time_words(found), cast_words(found), value_words(found)) == ((), (), ())


def test_a_budget_is_kept(info):
    found = inspect_step(tiny(model="gpt2", budget_gib=0.25), info)
    assert found.state == "out of memory"


@pytest.mark.parametrize("reason", ["no build", "no right"])
def test_without_a_profiler_the_rest_is_seen(info, quick, monkeypatch, reason):
    if reason == "no build":
        monkeypatch.setattr(torch.profiler, "kineto_available", lambda: False)
    else:

        def refuse(self):
            raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

        monkeypatch.setattr(torch.profiler.profile, "__enter__", refuse)
    found = inspect_step(tiny(), info)
    assert found.state == "finished"
    assert found.profile is None
    assert time_words(found) == (found.missing["profile"],)
    assert found.missing["profile"].startswith("Not profiled: ")
    assert found.casts is not None


def test_a_device_whose_kernels_no_profiler_sees_is_not_guessed():
    with pytest.raises(ProfilerMissing, match="no kernels on mps"):
        step_profile.StepProfiler(device=torch.device("mps")).start()


def test_a_step_that_the_scaler_skips_is_taken_again(info, monkeypatch):
    """Its gradients are infinite; the first profiled and the first watched step are skipped."""
    skipped = iter([False, False, False, True, False, True, False])
    real = torch.amp.GradScaler.step

    def step(self, optimizer):
        if next(skipped):
            for p in optimizer.param_groups[0]["params"]:
                p.grad.fill_(float("inf"))
        return real(self, optimizer)

    monkeypatch.setattr(torch.amp.GradScaler, "step", step)
    found = inspect_step(tiny(precision="fp16"), info)
    assert found.state == "finished"
    assert found.values["gradients of weights"].not_finite == 0
    assert next(skipped, None) is None
    # halved twice, and still taken out of the gradients
    assert found.values["gradients of activations"].highest < 0


def test_time_is_limited_and_a_reason_stops(info):
    found = inspect_step(tiny(), info, max_seconds=0)
    assert found.state == "stopped"
    assert found.missing.keys() == {"clock", "profile", "casts"}
    found = inspect_step(tiny(), info, stop_reason=lambda: "the server is closing")
    assert "the server is closing" in found.message


def test_compiled_code_is_inspected_without_the_compiler(info, quick):
    found = inspect_step(tiny(compile=True), info)
    assert found.config["compile"] is False
    assert any("without torch.compile" in note for note in found.notes)


def test_a_precision_that_is_not_here_is_refused(info):
    lacking = Support(status="not available", reason="Not here.")
    with pytest.raises(InputError, match="Not here"):
        inspect_step(tiny(), replace(info, support=info.support | {"fp32": lacking}))


def test_the_command_line_prints_and_writes_what_was_seen(seen, monkeypatch, capsys, tmp_path):
    asked = []
    found = seen["bf16", "manual"]
    monkeypatch.setattr(
        inside, "inspect_step", lambda config, *_, **__: asked.append(config) or found
    )
    line = ["inside", "--model", "tiny", "--precision", "bf16", "-B", "1", "-T", "16"]
    line += ["--device", "cpu"]
    assert cli.main(line) == 0
    told = capsys.readouterr().out
    assert re.search(r"^backward +\d+\.\d\d ms +\d+\.\d%$", told, re.MULTILINE)
    assert re.search(r"^lm_head +linear +float32 +float32 +bfloat16 +bfloat16 +1$", told, re.M)
    assert cli.main([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found.to_dict()))
    assert cli.main([*line, "--json", str(tmp_path / "seen.json")]) == 0
    written = json.loads((tmp_path / "seen.json").read_text())
    assert written["profile"]["accounted"] == found.profile.accounted
    assert {c.precision for c in asked} == {"bf16"}
    full = replace(found, state="out of memory", message="Out of memory.", profile=None)
    monkeypatch.setattr(inside, "inspect_step", lambda *_, **__: full)
    assert cli.main(line) == 3
    assert "Out of memory." in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--steps", "3"], ["--compile"], ["-B", "0"]])
def test_the_command_line_refuses_what_means_nothing_here(option, capsys):
    try:
        status = cli.main(["inside", *option])
    except SystemExit as exc:
        status = exc.code
    assert status == 2
    assert option[0].lstrip("-") in capsys.readouterr().err


def test_the_hub_inspects_alone(monkeypatch):
    hub = Hub(device="cpu")
    try:
        found = hub.inspect(tiny(text="secret words " * 20, device="auto"))
        assert found is hub.inspection
        assert found.config["text"] == "builtin"
        hub.measuring = "Probing this device."
        with pytest.raises(InputError, match="Something runs here now; inspect a step"):
            hub.inspect(tiny())
        hub.measuring = ""
        broken = replace(found, must_restart=True)
        monkeypatch.setattr("gpt2demo.hub.inspect_step", lambda *_, **__: broken)
        hub.inspect(tiny())
        with pytest.raises(InputError, match="must restart"):
            hub.inspect(tiny())
    finally:
        hub.close()


def test_the_script_for_a_gpu_finds_what_cannot_be(seen):
    """Without a GPU: a CPU's inspection, told as one's, has exactly the faults it should have."""
    found = seen["bf16", "manual"]
    parts = found.profile.parts | {"waiting": 0.0}
    as_gpu = replace(found, profile=replace(found.profile, parts=parts))
    assert check_inside.faults(as_gpu) == [
        "tensor cores are known",
        "tensor cores work where they should",
        "softmax computes in float32 under autocast",  # a CPU leaves it alone
        "autocast casts within the loss",  # a CPU casts all of it
    ]
    assert "bf16  manual" in check_inside.row(as_gpu)
    good = replace(as_gpu.profile, tensor_core_share=0.5)
    on_a_gpu = {"softmax": "float32", "cross_entropy": "bfloat16 + float32"}
    operations = tuple(
        replace(c, compute=on_a_gpu.get(c.operation, c.compute)) for c in found.casts.operations
    )
    good = replace(as_gpu, profile=good, casts=replace(found.casts, operations=operations))
    assert check_inside.faults(good) == []
    assert check_inside.faults(replace(good, state="error", message="No.")) == ["No."]
