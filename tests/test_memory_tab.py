"""The Memory tab's words and map on machines that are not here."""

import json
import re
import threading
from dataclasses import replace

import gradio as gr
import pytest
from browser import built
from machines import MACHINES, fake

from gpt2demo.config import RunConfig
from gpt2demo.device import probe_device
from gpt2demo.fit import capacity_for
from gpt2demo.hub import Hub
from gpt2demo.records import RunSummary, StepMetrics
from gpt2demo.run import Run
from gpt2demo.ui.controls import MEMORY_FIELDS
from gpt2demo.ui.memory_tab import MemoryTab, memory_tab


@pytest.fixture
def shown(monkeypatch, tmp_path):
    """What the tab of a faked machine shows of a run: bar, words, map, search."""
    hub = Hub(device="cpu")

    def on_a_page() -> MemoryTab:
        with gr.Blocks(analytics_enabled=False):
            return memory_tab(hub)

    def of(machine: str, config: RunConfig, *finished: Run) -> tuple[str, str, dict]:
        with monkeypatch.context() as patch:
            fake(patch, tmp_path, MACHINES[machine])
            info = probe_device()
        hub.device_info = info
        hub.finished.clear()
        hub.finished.extend(finished)
        monkeypatch.setattr(
            Hub,
            "capacity",
            lambda _, config: capacity_for(
                config, info.type, info.memory_free_bytes, info.compute_capability
            ),
        )
        values = [getattr(config, name) for name in MEMORY_FIELDS]
        bar, words, grid, _ = built(on_a_page).show(*values)
        return bar, words, json.loads(grid)

    yield of
    hub.close()


def finished(config: RunConfig) -> Run:
    steps = [
        StepMetrics(step=n, loss=5.0, step_ms=9.0, tokens_per_sec=9.0, is_warmup=n < 2)
        for n in range(3)
    ]
    summary = RunSummary(
        state="finished", message="", steps_done=3, steps_measured=1, seconds=1.0
    )  # fmt: skip
    return Run(
        id="", owner="", device=probe_device("cpu"), stop=threading.Event(), config=config,
        steps=steps, summary=summary,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "lines", "marks"),
    [
        ("A100", {"fp32 = TF32", "bf16 = fp16", "fp64"}, 1),
        ("T4", {"fp32 = TF32", "bf16", "fp16", "fp64"}, 0),  # a run in fp16 tells nothing of bf16
    ],
)
def test_bf16_and_fp16_part_where_sdpa_has_a_kernel_for_one_of_them(shown, machine, lines, marks):
    config = RunConfig(B=9, T=1024, precision="bf16", attention="sdpa")
    bar, words, grid = shown(machine, config, finished(replace(config, precision="fp16", T=512)))
    assert {line["name"] for line in grid["lines"]} == lines
    assert len(grid["marks"]) == marks
    assert ("SDPA has no fused kernel for bf16 here" in bar) == (machine == "T4")
    assert ("SDPA has no fused kernel for it" in words) == (machine == "T4")
    assert re.search("may fail|will not fit", bar) if machine == "T4" else "fits" in bar
