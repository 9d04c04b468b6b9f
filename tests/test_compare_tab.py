"""The Compare tab's choice of precisions: what is offered, what is greyed, what a race is told."""

import gradio as gr
import pytest
from browser import built
from machines import MACHINES, fake

from gpt2demo.config import PRECISIONS, RunConfig
from gpt2demo.device import DeviceInfo, probe_device
from gpt2demo.hub import Hub
from gpt2demo.ui.compare_tab import CompareTab, compare_tab, race_inputs
from gpt2demo.ui.controls import FIELDS


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
