"""Counts of magnitudes against numpy, which casts for real."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gpt2demo import histogram
from gpt2demo.histogram import Values
from gpt2demo.inside_figure import FP16_END, FP16_NORMAL, FP16_SMALLEST
from gpt2demo.inspection import LOSS_SCALE, Outside

EDGES = [
    *(2.0**e for e in (-150, -149, -134, -133, -126, -41, -25, -24, -14, -1, 0, 15, 16, 127)),
    *(65504, 65519.99, 65520, 65536, 3.3895314e38, 3.4e38, 0.0, -0.0, np.inf, -np.inf, np.nan),
    *(np.nextafter(np.float32(2.0**e), np.float32(0)) for e in (-134, -126, -25, -24, -14, 0)),
    *(np.nextafter(np.float32(2.0**e), np.float32(1)) for e in (-134, -25)),
]


def numpys(values: np.ndarray, dtype: type, scale: float = 1.0) -> Outside:
    """What a cast to `dtype` really does to each value."""
    finite = values[np.isfinite(values)].astype(np.float64) * scale
    with np.errstate(over="ignore"):
        cast = finite.astype(dtype).astype(np.float64)
    normal = float(ml_dtypes.finfo(dtype).smallest_normal)
    there = finite != 0
    return Outside(
        underflow=int(np.sum(there & (cast == 0))),
        subnormal=int(np.sum((cast != 0) & (np.abs(finite) < normal))),
        overflow=int(np.sum(np.isinf(cast))),
    )


def check(values: np.ndarray) -> None:
    counted = Values()
    counted.add(torch.from_numpy(values))
    found = counted.histogram()
    finite = np.abs(values[np.isfinite(values)].astype(np.float64))
    assert found.count == values.size
    assert found.not_finite == values.size - finite.size
    assert found.zeros == np.sum(finite == 0)
    _, exponent = np.frexp(finite[finite > 0])
    numbers, many = np.unique(np.clip(exponent - 1, -150, 128), return_counts=True)
    assert found.counts == dict(zip(numbers.tolist(), many.tolist(), strict=True))
    assert found.nonzero == sum(found.counts.values())
    assert found.outside["fp16"] == numpys(values, np.float16)
    assert found.outside["fp16, scaled"] == numpys(values, np.float16, LOSS_SCALE)
    assert found.outside["bf16"] == numpys(values, ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_edges_and_random_values_are_counted_as_numpy_casts_them(dtype):
    random = np.random.default_rng(0)
    spread = random.choice([-1, 1], 20_000) * 2.0 ** random.uniform(-149, 127.9, 20_000)
    check(np.concatenate([spread, EDGES, -np.array(EDGES)]).astype(dtype))


@given(arrays(np.float32, 40, elements=st.floats(width=32)))
def test_any_float32_is_counted_as_numpy_casts_it(values):
    check(values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_tensor_loses_nothing_in_its_own_format(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)  # each number there is
    counted = Values()
    counted.add(every)
    found = counted.histogram()
    own = found.outside[{torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]]
    limits = torch.finfo(dtype)
    steps = round(1 / limits.eps)  # numbers to an octave, and below the smallest normal
    assert (own.underflow, own.overflow, own.subnormal) == (0, 0, 2 * (steps - 1))
    assert found.zeros == 2
    assert found.not_finite == 2 * steps
    full = [n for e, n in found.counts.items() if 2.0**e >= limits.smallest_normal]
    assert set(full) == {2 * steps}


def test_int8_has_one_scale_a_tensor():
    random = np.random.default_rng(1)
    tensors = [random.normal(0, s, 5000).astype(np.float32) for s in (1e-6, 1.0, 300.0)]
    counted = Values()
    zeros = 0
    for tensor in tensors:
        counted.add(torch.from_numpy(tensor))
        scale = np.abs(tensor).max() / 127
        zeros += np.sum(np.rint(tensor / scale) == 0)
    assert counted.histogram().int8_zeros == zeros


def test_pieces_and_a_factor_change_nothing(monkeypatch):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole, pieces, scaled = Values(), Values(), Values()
    whole.add(values)
    monkeypatch.setattr(histogram, "_PIECE", 7)
    pieces.add(values.view(10, 100).t())  # not contiguous
    scaled.add(values * 1024, 1 / 1024)
    assert whole.histogram() == pieces.histogram() == scaled.histogram()


def test_nothing_is_no_division_by_zero():
    counted = Values()
    counted.add(torch.zeros(3))
    counted.add(torch.empty(0))
    found = counted.histogram()
    assert (found.count, found.nonzero, found.lowest, found.share(0)) == (3, 0, None, None)


def test_the_figures_ends_of_float16_are_numpys():
    limits = np.finfo(np.float16)
    assert 2.0**FP16_SMALLEST == limits.smallest_subnormal
    assert 2.0**FP16_NORMAL == limits.smallest_normal
    assert 2.0 ** (FP16_END - 1) < float(limits.max) < 2.0**FP16_END
