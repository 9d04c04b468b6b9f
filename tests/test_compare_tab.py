"""The Compare tab's choice of precisions: what is offered, what is greyed, what a race is told."""

import re
import threading

import gradio as gr
import pytest
from browser import built
from machines import MACHINES, fake

from gpt2demo.config import PRECISIONS, RunConfig
from gpt2demo.device import DeviceInfo, probe_device
from gpt2demo.hub import Hub
from gpt2demo.probe import probe_rates
from gpt2demo.records import RunSummary
from gpt2demo.run import Run
from gpt2demo.ui.compare_tab import CompareTab, compare_tab, race_inputs
from gpt2demo.ui.controls import FIELDS, MEMORY_FIELDS


@pytest.fixture
def tab(monkeypatch, tmp_path):
    """The tab as it is on a faked machine."""
    hub = Hub(device="cpu")

    def on_a_page() -> CompareTab:
        with gr.Blocks(analytics_enabled=False):
            return compare_tab(hub)

    def of(machine: str) -> tuple[CompareTab, DeviceInfo]:
        with monkeypatch.context() as patch:
            fake(patch, tmp_path, MACHINES[machine])
            hub.device_info = probe_device()
        return built(on_a_page), hub.device_info

    yield of
    hub.close()


@pytest.mark.parametrize("machine", ["Apple M2", "GTX 1060", "A100", "CPU with AVX2 alone"])
def test_what_the_device_lacks_is_greyed_with_its_reason(tab, machine):
    compare, info = tab(machine)
    assert list(compare.precisions) == list(PRECISIONS)
    for precision, box in compare.precisions.items():
        support = info.support[precision]
        there = support.status != "not available"
        assert box.interactive is there
        assert there or (support.reason in box.info and box.value is False)
        assert support.status in box.info.lower()
    assert compare.precisions["fp32"].value is True


def test_the_machines_above_show_both_kinds(tab):
    assert not tab("Apple M2")[0].precisions["fp64"].interactive
    assert tab("A100")[0].precisions["fp64"].interactive


def test_what_takes_minutes_a_step_is_chosen_on_purpose_only(tab):
    compare, _ = tab("CPU with AVX2 alone")
    chosen = [precision for precision, box in compare.precisions.items() if box.value]
    assert chosen == ["fp32", "tf32"]


def test_a_race_is_told_the_chosen_precisions_rounds_and_settings():
    settings = [getattr(RunConfig(), name) for name in FIELDS if hasattr(RunConfig(), name)]
    settings += [None] * (len(FIELDS) - len(settings))
    given = [True, False, True, False, False, 3, *settings]
    assert race_inputs(given) == (["fp32", "bf16"], 3, settings)
    assert race_inputs([False] * 5 + [1, *settings])[0] == []


def test_the_forecast_stands_beside_the_newest_run_of_the_same_settings(tab):
    compare, info = tab("CPU with AVX2 alone")
    settings = {"model": "tiny", "B": 2, "T": 16, "steps": 5}
    tiny = RunConfig(**settings)
    values = [getattr(tiny, name) for name in MEMORY_FIELDS]
    compare.hub.probed = probe_rates(info, 32, gpt=tiny.gpt, precisions=("fp32", "fp64"), seconds=1)

    def shown() -> dict[str, list[str]]:
        rows = re.findall(r"<tr><td>.*?</tr>", compare.found(*values))
        cells = [re.findall(r"<td>(.*?)</td>", row) for row in rows]
        return {precision: figures for precision, *figures in cells}

    def ran(step_ms: float, **other) -> None:
        run = Run(
            id="", owner="", device=info, stop=threading.Event(),
            config=RunConfig(device="cpu", **settings | other),
            summary=RunSummary(
                state="finished", message="", steps_done=9, steps_measured=7, seconds=1.0,
                step_ms_median=step_ms,
            ),
        )  # fmt: skip
        compare.hub.finished.append(run)

    assert {figures[3] for figures in shown().values()} == {"not run yet"}
    ran(50.0)
    ran(1000.0, steps=9, seed=5, lr=0.1, text="shakespeare")  # its steps are alike, and it is newer
    for other in ({"B": 4}, {"attention": "sdpa"}, {"budget_gib": 4.0}, {"vocab_size": 50304}):
        ran(77.0, **other)
    ran(2000.0, precision="fp64")
    found = shown()
    assert [found[p][3] for p in PRECISIONS] == [
        "1,000.0", "not run yet", "not run yet", "not run yet", "2,000.0"
    ]  # fmt: skip
    for precision, measured in (("fp32", 1000.0), ("fp64", 2000.0)):
        forecast = float(found[precision][2].replace(",", ""))
        assert float(found[precision][4].removesuffix(" %")) == pytest.approx(
            100 * (forecast - measured) / measured, abs=0.51
        )
    assert found["bf16"][2:] == ["unknown", "not run yet", ""]
