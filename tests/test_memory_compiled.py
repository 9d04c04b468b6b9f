"""The forecast of compiled runs against torch's profiler; each compiles a model of its own."""

import shutil

import pytest
import torch
from memory_tracker import profiled_peak

from gpt2demo.config import RunConfig
from gpt2demo.device import probe_device
from gpt2demo.memory import forecast
from gpt2demo.runner import execute

INFO = probe_device("cpu")

pytestmark = [
    pytest.mark.skipif(
        not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler"
    ),
    # torch's compiler itself uses what it deprecates
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


# the loss's tensors are of the compute dtype, so fp32 and bf16 differ; at B=1, T=8 they are small
# and the token embedding's gradient decides
@pytest.mark.parametrize(
    "setting",
    [
        {"B": 4, "T": 64, "precision": "bf16"},
        {"B": 4, "T": 128, "attention": "sdpa", "optimizer": "fused"},
        {"B": 1, "T": 8, "precision": "bf16", "attention": "sdpa", "optimizer": "fused"},
    ],
    ids=lambda setting: " ".join(f"{key}={value}" for key, value in setting.items()),
)
def test_forecast_is_the_profiled_peak_of_a_compiled_run(setting: dict[str, object]) -> None:
    config = RunConfig(model="tiny", steps=3, device="cpu", compile=True, **setting)
    tokens = torch.arange(4 * config.tokens_per_step + 1)
    summaries = []
    peak = profiled_peak(  # over the whole run, compiling too
        lambda: summaries.append(execute(config, INFO, on_step=lambda _: None, tokens=tokens))
    )
    (summary,) = summaries
    assert (summary.state, summary.notes) == ("finished", ())  # it did compile
    assert forecast(config, "cpu").live_bytes == pytest.approx(peak, rel=0.005)
    # compiled code shows its tensors to no tracker: forecast only
    assert summary.memory.measured_bytes is summary.memory.measured_by is None
    assert summary.memory.error is None
    assert summary.memory.forecast_bytes == forecast(config, "cpu").live_bytes
