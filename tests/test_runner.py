"""Every ending of a run, put into words; and memory that comes back."""

import gc
import logging
import os
import subprocess
import sys
import tempfile
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._inductor.exc import InductorError

from gpt2demo import runner
from gpt2demo import train as train_module
from gpt2demo.compiling import compile_model, ensure_cache_folder
from gpt2demo.config import GPTConfig, InputError, RunConfig
from gpt2demo.data import load_tokens
from gpt2demo.device import DeviceInfo, probe_device
from gpt2demo.model import GPT
from gpt2demo.train import Progress

INFO = probe_device("cpu")


def tiny(**settings) -> RunConfig:
    return RunConfig(model="tiny", device="cpu", **({"B": 2, "T": 8, "steps": 5} | settings))


def execute(config: RunConfig, info: DeviceInfo = INFO, **given):
    steps = []
    summary = runner.execute(config, info, on_step=steps.append, **given)
    return summary, steps


def test_a_run_to_its_end():
    summary, steps = execute(tiny())
    assert summary.state == "finished"
    assert summary.steps_done == len(steps) == 5
    assert summary.steps_measured == 3
    assert summary.step_ms_median == sorted(s.step_ms for s in steps[2:])[1]
    assert summary.final_loss == steps[-1].loss
    assert summary.parameters == 3_382_080  # 50257*64 + 1024*64 + 2*(12*64*64 + 13*64) + 2*64
    assert summary.mfu is None  # no peak is known for a CPU
    # four times the weights live at least: weights, gradients, AdamW's two moments
    assert summary.peak_memory_bytes == summary.memory.measured_bytes > 4 * 4 * 3_382_080
    assert summary.memory.error == pytest.approx(0, abs=0.005)
    assert summary.out_of_memory is None


def test_the_next_run_after_every_failure_is_fine(monkeypatch):
    fail_in(monkeypatch, "forward", torch.OutOfMemoryError("CUDA out of memory."))
    assert execute(tiny())[0].state == "out of memory"
    monkeypatch.undo()
    assert execute(tiny())[0].state == "finished"


def fail_in(patch, where: str, error: BaseException | None, step: int = 0) -> list[weakref.ref]:
    """Make the step raise `error` in forward, backward or the optimizer; returns its tensors."""
    calls = iter(range(1000))
    alive = []

    def maybe(*_):
        nonlocal error
        if next(calls) == step:
            raised, error = error, None  # the exception pins its frames: keep none
            raise raised

    if where == "optimizer":
        # inside step, where the first moments are born
        patch.setattr(torch.optim.AdamW, "_init_group", lambda *_, **__: maybe())
    forward = GPT.forward

    def spied(model, *args):
        if where == "forward":
            maybe()
        if where == "backward":
            model.transformer.ln_f.bias.register_hook(maybe)
        logits, loss = forward(model, *args)
        alive.extend([weakref.ref(model), weakref.ref(model.lm_head.weight), weakref.ref(logits)])
        return logits, loss

    patch.setattr(GPT, "forward", spied)
    return alive


OUT_OF_MEMORY = [
    (
        torch.OutOfMemoryError,
        "CUDA out of memory. Tried to allocate 3.07 GiB. GPU 0 has a total capacity of 15.77 GiB "
        "of which 1.20 GiB is free.",
    ),
    (
        RuntimeError,
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ),
    (
        RuntimeError,
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    ),
    (
        RuntimeError,
        "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 3296067584 bytes. Error code 12 (Cannot allocate memory)",
    ),
    (MemoryError, ""),
]


COLLECTS = """
import gc, weakref
import gpt2demo.ui.page
from gpt2demo.config import RunConfig
from gpt2demo.device import probe_device
from gpt2demo.runner import execute

def run():
    config = RunConfig(model="tiny", B=1, T=8, steps=2, device="cpu")
    assert execute(config, probe_device("cpu"), on_step=lambda _: None).state == "finished"
    return len(gc.get_objects()), gc.get_freeze_count()

class Cycle:
    pass

print(*run())
print(*run())
one = Cycle()
one.self, gone = one, weakref.ref(one)
del one
run()
print(gone() is None)
"""


def test_a_run_s_end_looks_through_nothing_but_what_runs_have_made():
    """Among all that a page's process has loaded each run would stop everything for a while."""
    child = [sys.executable, "-c", COLLECTS]
    told = subprocess.run(child, capture_output=True, text=True, timeout=120, check=True).stdout
    first, second, collected = told.splitlines()
    (_, frozen), (live, still_frozen) = (map(int, line.split()) for line in (first, second))
    assert frozen > 100_000
    assert frozen * 0.9 < still_frozen <= frozen  # once: later garbage is still found
    assert live < 20_000
    assert collected == "True"


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize(("kind", "text"), OUT_OF_MEMORY)
def test_out_of_memory_names_the_settings_and_gives_the_memory_back(monkeypatch, where, kind, text):
    alive = fail_in(monkeypatch, where, kind(text))
    summary, steps = execute(tiny())
    assert summary.state == "out of memory"
    for part in ("B=2", "T=8", "fp32", "Lower", f"in step 0 ({where})"):
        assert part in summary.message
    assert steps == []
    assert (summary.out_of_memory.step, summary.out_of_memory.moment) == (0, where)
    assert summary.memory.measured_bytes is summary.memory.measured_by is None  # no peak was seen
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]


@pytest.mark.parametrize(
    ("text", "said", "asked"),
    [
        (OUT_OF_MEMORY[0][1], "asking for 3.07 GiB more", round(3.07 * 2**30)),
        (OUT_OF_MEMORY[3][1], "asking for 3.07 GiB more", 3296067584),
        ("HIP out of memory. Tried to allocate 20.00 MiB", "asking for 20.00 MiB more", 20971520),
        ("XPU out of memory. Tried to allocate 512.00 KiB.", "asking for 0.50 MiB more", 524288),
        ("Tried to allocate 7 parsecs: out of memory", "(B=2, T=8, fp32, tiny).", None),
        ("CUDA error: out of memory", "(B=2, T=8, fp32, tiny).", None),
    ],
)
def test_what_was_asked_for_is_named(monkeypatch, text, said, asked):
    fail_in(monkeypatch, "backward", RuntimeError(text))
    summary, _ = execute(tiny())
    assert summary.state == "out of memory"
    assert said in summary.message
    assert summary.out_of_memory.asked_bytes == asked


def test_out_of_memory_in_a_later_step_keeps_the_curve(monkeypatch):
    fail_in(monkeypatch, "forward", torch.OutOfMemoryError("out of memory"), step=3)
    summary, steps = execute(tiny())
    assert summary.state == "out of memory"
    assert "in step 3" in summary.message
    assert len(steps) == summary.steps_done == summary.out_of_memory.step == 3


def test_a_shape_error_is_an_error_and_not_memory(monkeypatch, caplog):
    fail_in(
        monkeypatch,
        "forward",
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x8 and 16x4)"),
    )
    with caplog.at_level(logging.ERROR):
        summary, _ = execute(tiny())
    assert summary.state == "error"
    assert summary.out_of_memory is None
    assert "RuntimeError" in summary.message
    assert "memory" not in summary.message
    assert "mat1 and mat2" in caplog.text  # the log has the details, the page has not
    assert "mat1" not in summary.message


def test_a_setting_that_the_machine_cannot_hold_never_starts(monkeypatch):
    built = []
    monkeypatch.setattr(train_module, "GPT", lambda *a, **k: built.append(1))
    monkeypatch.setattr(runner, "memory_free_bytes", lambda _: 8 * 2**30)
    summary, _ = execute(RunConfig(B=64, T=1024, device="cpu"))
    assert summary.state == "out of memory"
    assert not built
    assert "8.0 GiB are free" in summary.message
    assert "Lower B" in summary.message
    assert "error" not in summary.message.lower()
    failure = summary.out_of_memory
    assert (failure.step, failure.moment) == (None, "before the start")
    assert (failure.asked_bytes, failure.parts) == (None, {})
    assert f"Lower B to {failure.smaller_B}, or T to {failure.smaller_T}:" in summary.message
    assert summary.memory.verdict == "will not fit"
    assert summary.memory.reserved_bytes is None


def test_a_model_too_large_at_any_size_says_so(monkeypatch):
    monkeypatch.setattr(runner, "memory_free_bytes", lambda _: 2 * 2**30)
    summary, _ = execute(RunConfig(model="gpt2-xl", B=1, T=1, device="cpu"))
    assert summary.state == "out of memory"
    assert summary.message.endswith("Take a smaller model.")
    assert (summary.out_of_memory.smaller_B, summary.out_of_memory.smaller_T) == (0, 0)


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_divergence_names_the_step_and_keeps_the_curve(monkeypatch, factor):
    forward = GPT.forward
    calls = iter(range(100))

    def diverging(model, *args):
        logits, loss = forward(model, *args)
        return logits, loss * factor if next(calls) == 5 else loss

    monkeypatch.setattr(GPT, "forward", diverging)
    summary, steps = execute(tiny(steps=20))
    assert summary.state == "diverged"
    assert summary.message.startswith("Diverged at step 5")
    assert len(steps) == 6


class Panic(BaseException):
    """As the tokenizer's Rust code raises it."""


def test_a_base_exception_ends_as_an_error(monkeypatch, caplog):
    fail_in(monkeypatch, "forward", Panic("/secret/path.rs:1"))
    with caplog.at_level(logging.CRITICAL):
        summary, _ = execute(tiny())
    assert summary.state == "error"
    assert "/" not in summary.message


def test_an_interrupt_keeps_what_was_measured(monkeypatch):
    fail_in(monkeypatch, "forward", KeyboardInterrupt(), step=3)
    summary, steps = execute(tiny())
    assert summary.state == "interrupted"
    assert len(steps) == 3
    assert summary.steps_measured == 1


def test_stopping_gives_the_reason():
    reasons = iter([None, None, None, "its owner pressed Stop"])
    summary, steps = execute(tiny(steps=50), stop_reason=lambda: next(reasons))
    assert summary.state == "stopped"
    assert summary.message == "Stopped after 3 of 50 steps: its owner pressed Stop."
    assert len(steps) == 3


def test_a_text_too_short_is_refused_with_both_counts():
    with pytest.raises(InputError, match=r"\b2 tokens.*\b17\b"):
        execute(tiny(text="Hello world"))


def test_a_text_encoded_before_is_used_as_it_is():
    tokens = load_tokens(tiny(), 2**20)[0]
    given, _ = execute(tiny(), tokens=tokens)
    assert given.final_loss == execute(tiny())[0].final_loss


def test_check_device_refuses_what_is_not_available():
    support = dict(INFO.support)
    support["fp64"] = replace(support["fp64"], status="not available", reason="No float64 here.")
    info = replace(INFO, support=support)
    runner.check_device(tiny(), info)
    with pytest.raises(InputError, match=r"fp64.*No float64 here"):
        runner.check_device(tiny(precision="fp64"), info)


def test_a_budget_is_only_for_devices_that_can_be_made_smaller():
    config = tiny(budget_gib=8)
    for kind in ("cpu", "cuda"):
        runner.check_device(config, replace(INFO, type=kind))
    for kind in ("mps", "xpu"):
        runner.check_device(tiny(), replace(INFO, type=kind))
        with pytest.raises(InputError, match=f"budget_gib.*{kind}") as caught:
            runner.check_device(config, replace(INFO, type=kind))
        assert caught.value.field == "budget_gib"


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_a_gpu_that_works_no_more_is_told_with_what_helps(monkeypatch, caplog, where):
    text = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."
    alive = fail_in(monkeypatch, where, torch.AcceleratorError(text), step=1)
    progress = Progress()
    with caplog.at_level(logging.CRITICAL):
        summary, steps = execute(tiny(), progress=progress)
    assert summary.state == "error"
    assert summary.message == (
        f"The GPU failed in step 1 ({where}). "
        "The app must restart: until then no run can use the GPU."
    )
    assert progress.poisoned
    assert summary.out_of_memory is None
    assert len(steps) == 1
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]


def test_an_ordinary_error_leaves_the_gpu_in_use(monkeypatch, caplog):
    hint = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."  # of every error
    text = f"CUDA error: no kernel image is available for execution on the device\n{hint}"
    fail_in(monkeypatch, "forward", torch.AcceleratorError(text))
    progress = Progress()
    with caplog.at_level(logging.CRITICAL):
        summary, _ = execute(tiny(), progress=progress)
    assert summary.state == "error"
    assert "the next run starts afresh" in summary.message
    assert not progress.poisoned


def test_a_run_whose_sdpa_has_no_kernel_says_so(monkeypatch):
    monkeypatch.setattr("gpt2demo.fit.fused_sdpa", lambda *_: False)
    summary, _ = execute(tiny(attention="sdpa"))
    assert summary.notes == (
        "SDPA has no fused kernel for fp32 here: it keeps every score, as manual attention does.",
    )
    assert execute(tiny())[0].notes == ()


def test_host_memory_that_the_driver_lends_is_noted(monkeypatch):
    total = 8 * 2**30
    monkeypatch.setattr(
        runner.accelerator, "reserved_peak_bytes", lambda device: total + total // 4
    )
    summary, _ = execute(tiny(), replace(INFO, memory_total_bytes=total))
    assert summary.state == "finished"
    assert len(summary.notes) == 1
    assert "10.0 GiB on a device of 8.0 GiB" in summary.notes[0]
    assert summary.memory.reserved_bytes == total + total // 4


def test_a_run_that_was_stopped_early_is_held_against_the_forecast_of_its_steps():
    reasons = iter([None, "its owner pressed Stop"])
    one, _ = execute(tiny(B=4, T=64, steps=50), stop_reason=lambda: next(reasons))
    assert (one.state, one.steps_done) == ("stopped", 1)
    reasons = iter(["its owner pressed Stop"])
    none, _ = execute(tiny(B=4, T=64, steps=50), stop_reason=lambda: next(reasons))
    both, _ = execute(tiny(B=4, T=64, steps=2))
    assert one.memory.error == pytest.approx(0, abs=0.005)
    assert both.memory.error == pytest.approx(0, abs=0.005)
    assert one.memory.measured_bytes < both.memory.measured_bytes  # no moments beside the logits
    assert none.memory.forecast_bytes == both.memory.forecast_bytes
    assert none.memory.measured_bytes is none.memory.error is None
    assert none.out_of_memory is None


# ------------------------------------------------------------------ torch.compile


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "no C compiler (gcc"),
        (subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"]), "it needs Python's headers"),
        (ValueError("anything else"), "it ended with InductorError"),
    ],
)
def test_what_triton_lacks_is_named(inner, said, monkeypatch):
    def broken(model):
        def call(*_):
            raise InductorError(inner, None)

        return call

    monkeypatch.setattr(torch, "compile", broken)
    summary, _ = execute(tiny(compile=True, steps=3))
    assert summary.state == "finished"
    assert said in summary.notes[0]


@pytest.mark.parametrize(
    ("precision", "capability", "skips"),
    [("bf16", 7, True), ("bf16", 8, False), ("fp16", 7, False), ("fp32", 7, False)],
)
def test_a_gpu_on_which_torch_compiles_no_bf16_is_told(precision, capability, skips, monkeypatch):
    """Torch itself warns and runs on uncompiled. As on a T4, bf16 is emulated below 8.0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(major=capability, minor=5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    asked = []
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: asked.append("input"))
    monkeypatch.setattr(torch, "compile", lambda model: asked.append("compile") or model)
    model = nn.Linear(1, 1)
    config = tiny(precision=precision, compile=True)
    same, _, note = compile_model(model, config, torch.device("cuda"))
    assert same is model
    assert (asked == []) == skips
    assert ("leaves bf16 alone on this GPU" in (note or "")) == skips


def test_a_compiler_that_is_missing_is_named_and_the_run_goes_on(monkeypatch):
    class InvalidCxxCompiler(RuntimeError):  # noqa: N818 - torch's name
        pass

    def broken(model):
        def call(*_):
            raise InvalidCxxCompiler("No working C++ compiler found in torch._inductor.config")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    progress = Progress()
    summary, steps = execute(tiny(compile=True), progress=progress)
    assert summary.state == "finished"
    assert summary.notes == (
        "torch.compile did not work here: no C++ compiler (g++ or clang++) was found. "
        "The run goes on without it.",
    )
    assert [s.loss for s in steps] == [s.loss for s in execute(tiny())[1]]


def test_a_cache_folder_of_somebody_elses_is_replaced(monkeypatch, tmp_path):
    name = "TORCHINDUCTOR_CACHE_DIR"
    good = tmp_path / "good"
    monkeypatch.setenv(name, str(good))
    ensure_cache_folder()
    assert os.environ[name] == str(good)
    assert good.is_dir()
    bad = tmp_path / "bad"
    bad.write_text("a file")
    monkeypatch.setenv(name, str(bad))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ensure_cache_folder()
    assert os.environ[name].startswith(str(tmp_path / "gpt2demo-"))
    monkeypatch.setenv(name, str(good))
    monkeypatch.setattr(os, "access", lambda *_: False)
    ensure_cache_folder()
    assert os.environ[name] != str(good)


def test_out_of_memory_while_compiling_is_out_of_memory(monkeypatch):
    def broken(model):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "compile", broken)
    assert execute(tiny(compile=True))[0].state == "out of memory"


def one_layer(patch) -> None:
    """Compiling takes a third of the time that it takes with two layers."""
    patch.setattr(RunConfig, "gpt", property(lambda _: GPTConfig(n_layer=1, n_head=1, n_embd=32)))


# torch's compiler itself uses what it deprecates
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_losses_equal_eager_ones_and_the_seconds_are_no_step(monkeypatch, tmp_path):
    # a cache of its own, or an earlier run's code is there
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    one_layer(monkeypatch)
    phases = []

    class Spied(Progress):
        def __setattr__(self, name, value):
            if name == "phase":
                phases.append(value)
            super().__setattr__(name, value)

    summary, steps = execute(tiny(compile=True, steps=3), progress=Spied())
    assert summary.notes == ()  # this machine has a compiler
    assert phases[-2:] == ["compiling", "training"]
    assert summary.compile_seconds > 1
    assert max(step.step_ms for step in steps) < summary.compile_seconds * 1000
    eager = [step.loss for step in execute(tiny(steps=3))[1]]
    assert [step.loss for step in steps] == pytest.approx(eager, rel=1e-4)
