import pytest
import torch
from memory_tracker import AMP
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from gpt2demo.config import RunConfig
from gpt2demo.flops import flops_per_token, mfu
from gpt2demo.model import GPT

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward
# torch's counter knows the GPU's attention kernels but not the CPU's: count that one as those are
CPU_KERNELS = {
    FORWARD: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    BACKWARD: lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v),
}


def counted(config: RunConfig) -> dict[object, int]:
    """FLOPs by operation of forward and backward, as torch's own counter sees them."""
    dtype = AMP.get(config.precision)
    with FakeTensorMode():
        model = GPT(config.gpt, attention=config.attention)
        x = torch.zeros(config.B, config.T, dtype=torch.long)
        with FlopCounterMode(display=False, custom_mapping=CPU_KERNELS) as counter:
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                _, loss = model(x, x)
            loss.backward()
    return dict(counter.get_flop_counts()["Global"])


@pytest.mark.parametrize(
    "setting",
    [
        {"model": "tiny", "B": 1, "T": 1},
        {"model": "tiny", "B": 4, "T": 32},
        {"model": "tiny", "B": 3, "T": 1024, "vocab_size": 50304},
        {"model": "tiny", "B": 2, "T": 1024, "attention": "sdpa"},
        {"B": 4, "T": 32},
        {"B": 2, "T": 1024},
        {"B": 2, "T": 1024, "precision": "bf16", "attention": "sdpa"},
        {"B": 1, "T": 256, "attention": "sdpa", "vocab_size": 50304},
        {"model": "gpt2-medium", "B": 1, "T": 512},
        {"model": "gpt2-large", "B": 1, "T": 1024, "attention": "sdpa"},
    ],
    ids=lambda setting: " ".join(f"{key}={value}" for key, value in setting.items()),
)
def test_flops_are_those_that_torch_counts(setting: dict[str, object]) -> None:
    config = RunConfig(**setting)
    by_op = counted(config)
    total = sum(by_op.values())
    if config.attention == "sdpa":
        # The fused backward computes the scores once more: one matmul of its five. MFU is about
        # the model's work, so work done twice counts once.
        assert by_op[BACKWARD] == 2.5 * by_op[FORWARD]
        total -= by_op[BACKWARD] / 5
    else:
        assert not {FORWARD, BACKWARD} & by_op.keys()
    assert flops_per_token(config.gpt, config.T) == pytest.approx(
        total / config.tokens_per_step,
        rel=1e-6,  # matmuls only, on both sides
    )


def test_gpt2_at_1024_tokens_is_the_known_figure() -> None:
    # 6 FLOPs a weight that is multiplied (all but the position table, LayerNorm and the biases),
    # and 12 * n_layer * n_embd * T for attention (PaLM, appendix B)
    weights = 124_439_808 - 1024 * 768 - 12 * (4 + 9) * 768 - 2 * 768
    known = 6 * weights + 12 * 12 * 768 * 1024
    assert flops_per_token(RunConfig().gpt, 1024) == known == 854_438_400


# --- MFU ---


@pytest.mark.parametrize(
    ("speed", "peak"), [(None, 312e12), (170_000.0, None), (None, None), (0.0, None)]
)
def test_mfu_is_unknown_where_speed_or_peak_is(speed: float | None, peak: float | None) -> None:
    assert mfu(854e6, speed, peak) is None


def test_mfu_of_the_lessons_a100() -> None:
    # B=16 T=1024 in 300 ms with bfloat16, peak 312 TFLOP/s
    speed = 16 * 1024 / 0.300
    assert mfu(854_438_400, speed, 312e12) == pytest.approx(0.1496, abs=0.0001)
    # at the peak's own speed it is 1
    assert mfu(1e9, 1000.0, 1e12) == 1.0
    assert mfu(1e9, 0.0, 1e12) == 0.0
