"""The table of GPUs: its form, its figures, and what must stay unknown."""

import csv
import re
from pathlib import Path
from urllib.parse import urlsplit

import hypothesis
import pytest
from hypothesis import strategies as st

from gpt2demo.config import PRECISIONS
from gpt2demo.peaks import find_gpu, peak_flops

GIB = 2**30
TABLE = Path(__file__).parent.parent / "assets" / "gpus.csv"
with TABLE.open(encoding="utf-8", newline="") as _file:
    ROWS = list(csv.DictReader(_file))

# Device names and memory as drivers report them; figures from the makers' data sheets, TFLOP/s.
KNOWN = [
    # name, bytes, GB/s, fp32, tf32, bf16, fp16, fp64
    ("NVIDIA GeForce GTX 1060 6GB", 6370361344, 192, 4.4, None, None, None, 0.137),
    ("Tesla V100-SXM2-16GB", 16945512448, 900, 15.7, None, None, 125, 7.8),
    ("Tesla T4", 15642329088, 320, 8.1, None, None, 65, 0.25),
    ("NVIDIA GeForce RTX 3060", 12622168064, 360, 12.7, 12.7, 25.5, 25.5, 0.199),
    ("NVIDIA GeForce RTX 3090", 25438126080, 936, 35.6, 35.6, 71, 71, 0.556),
    ("NVIDIA A10G", 23609475072, 600, 35, None, 70, 70, None),
    ("NVIDIA A100-SXM4-40GB", 42505273344, 1555, 19.5, 156, 312, 312, 19.5),
    ("NVIDIA A100-SXM4-80GB", 85031714816, 2039, 19.5, 156, 312, 312, 19.5),
    ("NVIDIA A100 80GB PCIe", 84974239744, 1935, 19.5, 156, 312, 312, 19.5),
    ("NVIDIA L4", 23669440512, 300, 30.3, 60.5, 121, 121, 0.47),
    ("NVIDIA L40S", 47697362944, 864, 91.6, 183, 362, 362, 1.4),
    ("NVIDIA GeForce RTX 4090", 25393692672, 1008, 82.6, 82.6, 165.2, 165.2, 1.29),
    ("NVIDIA H100 80GB HBM3", 85045870592, 3350, 67, 494.5, 989, 989, 67),
    ("NVIDIA H100 PCIe", 85021163520, 2000, 51.2, 378, 756, 756, 51),
    ("NVIDIA H200", 150109880320, 4800, 67, 494.5, 989, 989, 67),
    ("NVIDIA B200", 191510609920, 7700, 75, 1125, 2250, 2250, 37),
    # 97,887 MiB; its tensor rates are printed without a word on sparsity
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887 * 2**20, 1597, 120, *4 * [None]),
    ("NVIDIA GeForce RTX 5090", 33661911040, 1792, 104.8, 104.8, 209.5, 209.5, 1.64),
    ("AMD Instinct MI300X", 206141652992, 5300, 163.4, 653.7, 1307.4, 1307.4, 163.4),
    # one of two dies: half of the module's 383 and 95.7
    ("AMD Instinct MI250X", 68702699520, 1600, 47.9, None, 191.5, 191.5, 47.9),
]


@pytest.mark.parametrize("known", KNOWN, ids=lambda k: k[0])
def test_known_cards(known):
    name, total_bytes, gb_per_sec, *tflops = known
    spec = find_gpu(name, total_bytes)
    assert spec is not None
    assert spec.bandwidth_bytes_per_sec == pytest.approx(gb_per_sec * 1e9, rel=0.01)
    for precision, expected in zip(("fp32", "tf32", "bf16", "fp16", "fp64"), tflops, strict=True):
        peak = peak_flops(name, total_bytes, precision)
        if expected is None:
            assert peak is None, precision
        else:
            assert peak == pytest.approx(expected * 1e12, rel=0.02), precision


@pytest.mark.parametrize(
    ("name", "total_bytes"),
    [
        ("NVIDIA GeForce RTX 9990", 24 * GIB),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16 * GIB),
        ("NVIDIA GeForce RTX 4090 D", 24 * GIB),
        ("NVIDIA GeForce RTX 2080 with Max-Q Design", 8 * GIB),
        ("NVIDIA GeForce RTX 2080", 8 * GIB),  # the notebook card has the same name
        ("NVIDIA GeForce RTX 3080", 12 * GIB),  # another card than the 10 GB one
        ("NVIDIA GeForce RTX 3080", 16 * GIB),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5 * GIB),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40 * GIB),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 2g.48gb", 47 * GIB),
        ("NVIDIA A100-SXM4-40GB", 5 * GIB),
        ("NVIDIA A100-SXM4-40GB", 0),
        ("AMD Instinct MI250X / MI250", 64 * GIB),
        ("xNVIDIA L4", 24 * GIB),
        ("NVIDIA L4\n", 24 * GIB),
        ("", 24 * GIB),
        (None, 24 * GIB),
        ("NVIDIA L4", None),
    ],
)
def test_everything_else_is_unknown(name, total_bytes):
    assert find_gpu(name, total_bytes) is None
    assert all(peak_flops(name, total_bytes, precision) is None for precision in PRECISIONS)


def test_memory_decides_between_cards_of_one_name():
    assert find_gpu("NVIDIA GeForce RTX 4060 Ti", 8 * GIB).tdp_watts == 160
    assert find_gpu("NVIDIA GeForce RTX 4060 Ti", 16 * GIB).tdp_watts == 165
    assert find_gpu("NVIDIA GeForce RTX 3080", 10 * GIB) is not None


def test_a_wrong_precision_is_an_error():
    with pytest.raises(KeyError):
        peak_flops("NVIDIA L4", 24 * GIB, "int8")


def test_every_row_has_an_address_and_figures():
    assert len(ROWS) >= 80
    for row in ROWS:
        for address in row["source"].split():
            parts = urlsplit(address)
            assert parts.scheme in ("https", "http"), row["display_name"]
            assert "." in parts.netloc, row["display_name"]
        assert row["source"], row["display_name"]
        assert row["display_name"], row
        assert float(row["fp32_tflops"]) > 0, row["display_name"]
        assert row["bandwidth_gb_s"] == "" or 100 <= float(row["bandwidth_gb_s"]) <= 10_000


def test_patterns_are_anchored():
    for row in ROWS:
        assert row["name_pattern"].startswith("^"), row["name_pattern"]
        assert row["name_pattern"].endswith("$"), row["name_pattern"]
        assert re.compile(row["name_pattern"]).fullmatch("") is None


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(
    st.sampled_from(ROWS).flatmap(
        lambda row: st.tuples(st.just(row), st.from_regex(row["name_pattern"], fullmatch=True))
    )
)
def test_a_name_and_a_memory_mean_one_row(row_and_name):
    row, name = row_and_name
    total_bytes = float(row["memory_gib"]) * GIB
    matching = [
        other["display_name"]
        for other in ROWS
        if re.fullmatch(other["name_pattern"], name)
        and 0.8 < total_bytes / (float(other["memory_gib"]) * GIB) < 1.25
    ]
    assert matching == [row["display_name"]]


def _figures(row, *columns):
    return [float(row[column]) if row[column] else None for column in columns]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["display_name"])
def test_peaks_are_dense_and_fit_each_other(row):
    """Ratios that the chips are built with; a sparse figure would be twice too high."""
    fp32, tf32, bf16, fp16, fp64 = _figures(
        row, "fp32_tflops", "tf32_tflops", "bf16_tflops", "fp16_tflops", "fp64_tflops"
    )
    capability = row["compute_capability"]
    if not capability.startswith("gfx") and float(capability) < 8:
        assert tf32 is None
        assert bf16 is None
    if bf16 and not capability.startswith("gfx"):
        assert bf16 == fp16
        assert tf32 is None or bf16 / tf32 == pytest.approx(2, rel=0.03)
    if bf16 and capability in ("8.6", "8.9", "12.0"):
        built = (2,) if "GeForce" in row["display_name"] else (2, 4)
        assert any(bf16 / fp32 == pytest.approx(ratio, rel=0.05) for ratio in built)
    if bf16 and capability in ("8.0", "9.0", "10.0") and "H20 " not in row["display_name"]:
        assert 13 < bf16 / fp32 < 32
    if fp64 and capability in ("6.1", "7.5", "8.6", "8.9", "12.0"):
        slower = 32 if float(capability) < 8 else 64
        assert fp32 / fp64 == pytest.approx(slower, rel=0.04)
