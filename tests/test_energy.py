"""Joules by the GPU's counter: which GPU, which steps, and unknown wherever it is not there."""

import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pynvml
import pytest
import torch

from gpt2demo import energy, nvidia, runner
from gpt2demo.config import RunConfig
from gpt2demo.device import probe_device
from gpt2demo.energy import EnergyMeter
from gpt2demo.records import StepMetrics

UUID = "5f2ab1c2-7a3e-d0a5-8c55-0e3f4c1d2b6a"  # as torch writes it; NVML puts "GPU-" before it
GPU = torch.device("cuda", 1)


def step(number: int) -> StepMetrics:
    return StepMetrics(
        step=number, loss=10.0, step_ms=500.0, tokens_per_sec=256.0, is_warmup=number < 2
    )


class Card:
    """A card of 300 W with a clock of its own, half a second a step."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.there = True

    def joules(self) -> float | None:
        return 300.0 * self.seconds if self.there else None

    def run(self, meter: EnergyMeter, steps: int) -> None:
        for number in range(steps):
            self.seconds += 40.0 if number < 2 else 0.5  # warm-up is long and does not count
            meter.after(step(number))

    def meter(self) -> EnergyMeter:
        return EnergyMeter(read=self.joules, tokens_per_step=128, clock=lambda: self.seconds)


def test_energy_is_power_times_time_over_tokens_without_warm_up():
    card = Card()
    meter = card.meter()
    card.run(meter, 12)
    assert meter.joules_per_1000_tokens == pytest.approx(300 * 0.5 / 128 * 1000)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_what_lasts_under_a_second_is_unknown(steps):
    card = Card()
    meter = card.meter()
    card.run(meter, steps)
    assert meter.joules_per_1000_tokens is None
    card.run(meter, 4)
    assert meter.joules_per_1000_tokens


def test_no_counter_is_unknown_and_not_zero():
    card = Card()
    card.there = False
    meter = card.meter()
    card.run(meter, 12)
    assert meter.joules_per_1000_tokens is None


# --- the counter


class Nvml:
    """NVML with two cards; only names that the real package has."""

    NVMLError = pynvml.NVMLError

    def __init__(self) -> None:
        self.open = 0
        self.counter = True

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != f"GPU-{UUID}":
            raise self.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "the second card"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        assert handle == "the second card"
        if not self.counter:
            raise self.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 123_456_789  # mJ


def test_the_fake_has_real_names():
    for name in vars(Nvml):
        if name.startswith("nvml"):
            assert callable(getattr(pynvml, name))


@pytest.fixture
def nvml(monkeypatch) -> Nvml:
    found = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    of_card = {0: "another card", 1: UUID}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda d: SimpleNamespace(uuid=of_card[d.index])
    )
    return found


def test_the_counter_is_the_one_of_torchs_device(nvml):
    with nvidia.energy_counter(GPU) as joules:
        assert (joules(), nvml.open) == (123_456.789, 1)
    assert nvml.open == 0
    with nvidia.energy_counter(torch.device("cuda", 0)) as joules:  # NVML knows no such card
        assert joules() is None
    assert nvml.open == 0


def test_a_card_without_a_counter_says_nothing(nvml):
    nvml.counter = False
    with nvidia.energy_counter(GPU) as joules:
        assert joules() is None
    assert nvml.open == 0


def test_nothing_is_asked_of_other_devices_or_without_the_package(monkeypatch, nvml):
    with nvidia.energy_counter(torch.device("cpu")) as joules:
        assert (joules(), nvml.open) == (None, 0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with nvidia.energy_counter(GPU) as joules:
        assert (joules(), nvml.open) == (None, 0)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with nvidia.energy_counter(GPU) as joules:
        assert joules() is None


def test_the_real_package_without_a_driver_is_unknown(monkeypatch):
    if nvidia.is_present():
        pytest.skip("this machine has a driver")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=UUID))
    with nvidia.energy_counter(GPU) as joules:
        assert joules() is None


def test_a_run_counts_its_measured_steps(monkeypatch):
    """Of 50 W: joules a token are the power over the measured speed."""

    @contextmanager
    def fifty_watts(device):
        yield lambda: 50.0 * time.perf_counter()

    monkeypatch.setattr(nvidia, "energy_counter", fifty_watts)
    monkeypatch.setattr(energy, "_SHORTEST_SEC", 0.01)
    config = RunConfig(model="tiny", B=2, T=32, steps=12, device="cpu")
    summary = runner.execute(config, probe_device("cpu"), on_step=lambda _: None)
    expected = 50 / summary.tokens_per_sec_median * 1000
    assert summary.joules_per_1000_tokens == pytest.approx(expected, rel=0.5)
    monkeypatch.undo()
    config = RunConfig(model="tiny", B=1, T=8, steps=3, device="cpu")
    assert (
        runner.execute(config, probe_device("cpu"), on_step=lambda _: None).joules_per_1000_tokens
        is None
    )
