"""The Specs table: the one table of GPUs, every row with an address, unknown figures blank."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pandas as pd
import plotly.graph_objects as go
import pytest

from gpt2demo import cli, device
from gpt2demo.charts import enlarged
from gpt2demo.config import PRECISIONS
from gpt2demo.peaks import all_gpus, find_gpu, peak_flops
from gpt2demo.ui.specs_tab import specs_table

ROOT = Path(__file__).parents[1]
with (ROOT / "assets" / "gpus.csv").open(encoding="utf-8", newline="") as _file:
    ROWS = {row["display_name"]: row for row in csv.DictReader(_file)}
T4 = ("Tesla T4", 15642329088)  # as its driver reports it
COLUMNS = {"fp32": "fp32", "tf32": "TF32", "bf16": "bf16", "fp16": "fp16", "fp64": "fp64"}
# what a visitor of a workshop has, or has heard of
ASKED = (
    *("T4", "V100", "A10G", "A100 SXM4 40GB", "A100 SXM4 80GB", "L4 ", "L40S", "A10 ", "A40"),
    *("RTX 2080 Ti", "RTX 3060 ", "RTX 3080 ", "RTX 3090 ", "RTX 4060 ", "RTX 4080 ", "RTX 4090"),
    *("RTX 5070 ", "RTX 5080", "RTX 5090", "H100 SXM5", "H100 PCIe", "H200 SXM", "B200 SXM"),
    *("MI250X", "MI300X"),
)


def test_the_gpus_that_people_ask_for_are_there():
    assert len(set(ASKED)) == len(ASKED) >= 25
    names = [spec.display_name for spec in all_gpus()]
    for asked in ASKED:
        assert any(f" {asked}" in f"{name} " for name in names), asked


@pytest.mark.parametrize("spec", all_gpus(), ids=lambda spec: spec.display_name)
def test_every_row_has_addresses_and_well_formed_figures(spec):
    told = spec.to_dict()
    assert told["sources"]
    for address in told["sources"]:
        parts = urlsplit(address)
        assert parts.scheme in ("http", "https")
        assert re.fullmatch(r"[a-z0-9.-]+\.[a-z]{2,}", parts.netloc)
    row = ROWS[told["name"]]
    assert 2 <= told["memory_gib"] <= 1024
    bandwidth = told["bandwidth_gb_per_sec"]
    assert (bandwidth is None) == (row["bandwidth_gb_s"] == "")
    assert bandwidth is None or 100 <= bandwidth <= 10_000
    assert list(told["dense_tflops"]) == list(PRECISIONS)
    for precision, peak in told["dense_tflops"].items():
        assert peak is None or 0 < peak < 3_000, precision  # B200's sparse figure is 4,500
        given = [row[c] for c in row if re.match(f"{precision}(_tensor|_matrix)?_tflops", c)]
        assert peak is None or any(g and float(g) == pytest.approx(peak, rel=1e-4) for g in given)
    # a sparse figure would be four times the TF32 one, or twice the other 16-bit one
    dense = told["dense_tflops"]
    for wide, narrow, ratio in (("tf32", "bf16", 2), ("bf16", "fp16", 1)):
        if dense[wide] and dense[narrow]:
            assert dense[narrow] / dense[wide] == pytest.approx(ratio, rel=0.03)


def test_mfu_reads_the_same_table():
    here = find_gpu(*T4)
    assert any(spec is here for spec in all_gpus())
    row = specs_table(here).iloc[0]
    for precision, name in COLUMNS.items():
        peak = peak_flops(*T4, precision)
        shown = row[f"{name} TFLOP/s"]
        assert pd.isna(shown) if peak is None else shown == pytest.approx(peak / 1e12)
    opened = [p.name for p in (ROOT / "gpt2demo").rglob("*.py") if '"gpus.csv"' in p.read_text()]
    assert opened == ["peaks.py"]


def test_this_machine_is_marked_and_first_and_nothing_else_is():
    table, plain = specs_table(find_gpu(*T4)), specs_table(None)
    assert table["GPU"][0] == "T4 16GB (this machine)"
    assert table["GPU"].str.contains("this machine").sum() == 1
    assert plain["GPU"].str.contains("this machine").sum() == 0
    assert len(table) == len(plain) == len(all_gpus()) == len(ROWS)
    others = table["GPU"][1:].tolist()
    assert others == [name for name in plain["GPU"] if name != "T4 16GB"]


def test_the_shown_table_blanks_what_is_unknown_and_links_every_source():
    table = specs_table(None)
    figures = [name for name in table if name.endswith(("TFLOP/s", "GiB", "GB/s"))]
    assert len(figures) == 7
    for name in figures:
        assert table[name].dtype == "Float64"
        assert (table[name].dropna() > 0).all()
    assert table["TF32 TFLOP/s"].isna().any()
    for spec, links in zip(all_gpus(), table["sources"], strict=True):
        assert re.findall(r"\[[^\]]+\]\(([^)]+)\)", links) == spec.source.split()


def test_the_verb_prints_json_and_lines(capsys):
    assert cli.main(["specs", "--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in told["gpus"]] == [spec.display_name for spec in all_gpus()]
    assert not any(row["this_machine"] for row in told["gpus"])
    t4 = next(row for row in told["gpus"] if row["name"] == "NVIDIA T4 16GB")
    assert t4["dense_tflops"] == {
        "fp32": 8.1, "tf32": None, "bf16": None, "fp16": 65, "fp64": 0.254
    }  # fmt: skip
    assert cli.main(["specs", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(all_gpus()) + 4
    assert sum("NVIDIA T4 16GB" in line for line in lines) == 1
    assert "None" not in "\n".join(lines)


def test_the_verb_marks_this_machine(capsys, monkeypatch):
    here = replace(device.probe_device("cpu"), name=T4[0], memory_total_bytes=T4[1])
    monkeypatch.setattr(device, "probe_device", lambda _device: here)
    assert cli.main(["specs", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["gpus"]
    assert [row["name"] for row in rows if row["this_machine"]] == ["NVIDIA T4 16GB"]
    assert cli.main(["specs"]) == 0
    starred = [line for line in capsys.readouterr().out.splitlines() if line.startswith("*")]
    assert len(starred) == 1
    assert "NVIDIA T4 16GB" in starred[0]


def test_a_wrong_device_is_refused(capsys):
    assert cli.main(["specs", "--device", "toaster"]) == 2
    assert "device must be" in capsys.readouterr().err


def test_a_figure_for_a_room_is_larger_in_all_its_sizes():
    figure = go.Figure(
        [go.Bar(y=[1]), go.Scatter(y=[1], marker={"size": 12}), go.Waterfall(y=[1])],
        layout={
            "height": 300,
            "font": {"size": 12},
            "margin": {"l": 50, "r": 10, "t": 10, "b": 30},
        },
    )
    same = enlarged(go.Figure(figure), 1.0)
    assert same == figure
    large = enlarged(figure, 1.5)
    assert (large.layout.height, large.layout.font.size) == (450, 18)
    assert large.layout.margin.to_plotly_json() == {"l": 75, "r": 15, "t": 15, "b": 45}
    assert large.data[1].marker.size == 18
