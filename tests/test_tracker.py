"""The memory of real runs: the tracker, the wall it makes, and what is left behind a wall."""

import gc
import json
import subprocess
import sys
import weakref
from dataclasses import asdict, replace

import pytest
import torch
from memory_tracker import MemoryTracker as IndependentTracker
from memory_tracker import measure, profiled_peak

from gpt2demo import accelerator, runner, tracker
from gpt2demo import train as train_module
from gpt2demo.config import MODELS, GPTConfig, RunConfig
from gpt2demo.device import probe_device
from gpt2demo.memory import forecast
from gpt2demo.model import GPT
from gpt2demo.records import RunSummary, StepMetrics
from gpt2demo.tracker import MemoryMeter, MemoryTracker
from gpt2demo.train import Progress, train

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
INFO = probe_device("cpu")
MIB = 2**20
GIB = 2**30
TOKENS = torch.arange(300_000) % 50257

# wide enough that the optimizer step is the peak, and quickly built
WIDE = GPTConfig(n_layer=1, n_head=4, n_embd=512, block_size=64)


@pytest.fixture
def wide(monkeypatch) -> None:
    monkeypatch.setitem(MODELS, "wide", WIDE)


def tiny(**settings) -> RunConfig:
    return RunConfig(model="tiny", device="cpu", **({"B": 2, "T": 8, "steps": 5} | settings))


def execute(config: RunConfig, **given) -> tuple[RunSummary, list[StepMetrics]]:
    steps = []
    summary = runner.execute(config, INFO, on_step=steps.append, tokens=TOKENS, **given)
    return summary, steps


def weight_bytes(config: RunConfig) -> int:
    """Of the real model: its parameters and causal masks."""
    with torch.device("meta"):
        model = GPT(config.gpt, attention=config.attention)
    width = 8 if config.precision == "fp64" else 4
    return width * sum(t.numel() for t in (*model.parameters(), *model.buffers()))


def parameter_bytes(config: RunConfig) -> int:
    return weight_bytes(replace(config, attention="sdpa"))  # without masks


# ------------------------------------------------------------------ the tracker


def test_tracker_counts_storages_from_birth_to_death():
    before = torch.zeros(1000)
    one = MemoryTracker()
    one.register(before, before.view(10, 100))  # views of one storage count once
    with one:
        a = before + 1  # 4000 bytes
        assert one.live_bytes == 8000
        b = a.view(10, 100)[2:].t()  # views are free
        del a
        assert one.live_bytes == 8000  # the view holds the storage
        del b
        assert one.live_bytes == 4000
        before.add_(1)  # in place
        c = before.double()
        del before
    assert one.live_bytes == c.nbytes == 8000
    assert one.peak_bytes == 12000


def test_a_tensor_dies_without_any_code_of_ours():
    """Python swallows a KeyboardInterrupt that comes inside a weak reference's callback."""
    with MemoryTracker() as tracked:
        tensors = [torch.zeros(1000)]
        calls = []
        sys.setprofile(lambda frame, event, _: calls.append(event))
        tensors.clear()
        sys.setprofile(None)
        assert "call" not in calls
        assert "c_call" in calls  # it did look
        assert tracked.live_bytes == 0
        assert tracked.peak_bytes == 4000


def test_tracker_tells_tensors_by_their_last_dimension():
    one = MemoryTracker()
    with one:
        logits = torch.zeros(2, 3, 50)
        flat = logits.view(-1, 50)
        other = torch.zeros(50, 4)
        assert one.live_with_last_dim(50) == 2 * 3 * 50 * 4
        assert one.live_with_last_dim(4) == other.nbytes
        del logits, flat
        assert one.live_with_last_dim(50) == 0
    assert torch.zeros(3, 50).shape[-1] == 50  # outside: not seen
    assert one.live_with_last_dim(50) == 0


def test_a_budget_is_met_to_the_byte():
    one = MemoryTracker(budget_bytes=10_000)
    with one:
        a = torch.zeros(1000)  # 4000
        b = torch.zeros(1500)  # 6000: exactly full
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            torch.zeros(1)
        assert one.live_bytes == a.nbytes + b.nbytes == one.peak_bytes
        del b
        torch.zeros(1500)  # there is room again
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1501)
    torch.zeros(10_000)  # outside, nobody's business
    with pytest.raises(torch.OutOfMemoryError):
        one.register(torch.zeros(2000))
    one.register(torch.zeros(2000), counted=False)
    assert one.live_bytes == 4000


def test_a_tracker_that_forgets_holds_nothing_and_keeps_its_peak():
    one = MemoryTracker()
    a = torch.zeros(1000)
    one.register(a)
    gone = weakref.ref(a)
    one.forget()
    del a
    assert gone() is None
    assert one.peak_bytes == 4000


@pytest.fixture
def one_thread():
    """Other processes that want the same cores then cost a large run less."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "settings",
    [
        {"B": 4, "T": 64, "steps": 4},
        {"B": 4, "T": 64, "precision": "bf16", "attention": "sdpa"},
        {"B": 2, "T": 64, "precision": "fp64", "attention": "sdpa", "steps": 1},
        {"model": "gpt2", "B": 1, "T": 32, "steps": 1},
        {"model": "gpt2", "B": 1, "T": 32, "precision": "bf16", "attention": "sdpa"}
        | {"optimizer": "fused"},
    ],
    ids=str,
)
def test_a_run_measures_itself_as_torchs_profiler_does(settings):
    config = RunConfig(**({"model": "tiny", "device": "cpu", "steps": 2} | settings))
    independent = IndependentTracker()
    independent.register(TOKENS, counted=False)
    ran = []

    def run() -> None:
        with independent:
            ran.append(execute(config))

    peak = profiled_peak(run)
    summary, steps = ran[0]
    assert summary.state == "finished"
    # operations' own scratch, which no other operation sees, is the difference
    assert independent.peak_bytes == pytest.approx(peak, rel=0.002)
    assert summary.memory.measured_bytes == pytest.approx(peak, rel=0.002)
    assert summary.memory.forecast_bytes == pytest.approx(peak, rel=0.005)
    assert summary.memory.forecast_bytes == forecast(config, "cpu").live_bytes
    assert abs(summary.memory.error) < 0.005
    assert summary.peak_memory_bytes == summary.memory.measured_bytes
    assert "first two steps" in summary.memory.measured_by
    # the peak so far, and from the second step on the peak of all
    peaks = [step.peak_memory_bytes for step in steps]
    assert peaks == sorted(peaks)
    assert len(set(peaks[1:])) <= 1
    assert peaks[-1] == summary.peak_memory_bytes


# ------------------------------------------------------------------ which steps are followed


def test_only_the_first_two_steps_are_followed(monkeypatch):
    seen, made = [], []
    dispatch = MemoryTracker.__torch_dispatch__
    now = 0

    class Spied(MemoryTracker):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

        def __torch_dispatch__(self, *args, **kwargs):
            seen.append(now)
            return dispatch(self, *args, **kwargs)

    def on_step(step: StepMetrics) -> None:
        nonlocal now
        now = step.step + 1

    monkeypatch.setattr(tracker, "MemoryTracker", Spied)
    summary = runner.execute(tiny(), INFO, on_step=on_step, tokens=TOKENS)
    assert summary.steps_done == 5
    assert set(seen) == {0, 1}
    assert seen.count(0) > 100
    (one,) = made
    assert not any((one._sizes, one._references, one._last_dim))
    assert summary.memory.measured_bytes == one.peak_bytes


def test_nothing_is_followed_between_steps():
    one = MemoryTracker()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracker, "MemoryTracker", lambda budget: one)
        for step in train(tiny(steps=3), TOKENS, CPU):
            held = torch.zeros(10**8)  # what a page may hold while a step waits
            assert one.peak_bytes == step.peak_memory_bytes < held.nbytes
            del held


@pytest.mark.parametrize("settings", [{}, {"budget_gib": 8}], ids=str)
def test_compiled_runs_are_not_followed(monkeypatch, settings):
    def never(*_):
        raise AssertionError("entered")

    monkeypatch.setattr(MemoryTracker, "__enter__", never)
    monkeypatch.setattr(torch, "compile", lambda model: model)  # as if it had compiled
    summary, _ = execute(tiny(compile=True, **settings))
    assert summary.state == "finished"
    assert summary.peak_memory_bytes is None
    assert summary.memory.measured_bytes is summary.memory.measured_by is None


def test_a_compiled_run_that_the_forecast_does_not_let_into_its_budget_never_starts(monkeypatch):
    monkeypatch.setattr(train_module, "GPT", None)
    summary, _ = execute(tiny(B=16, T=256, compile=True, budget_gib=1))
    assert summary.state == "out of memory"
    assert summary.out_of_memory.moment == "before the start"
    assert "the forecast alone decides" in summary.message
    assert "that should fit" in summary.message


# ------------------------------------------------------------------ the wall


def wall(gpt: GPTConfig, step: int, moment: str, **settings) -> float:
    """A budget (bytes) at which memory runs out in that step and moment and not before, from the
    measured peaks.
    """
    defaults = {"precision": "fp32", "attention": "manual", "optimizer": "default"}
    found = measure(gpt, **(defaults | settings))
    order = [(s, m) for s in (0, 1) for m in ("forward", "backward", "optimizer")]
    peaks = {(s, m): found.after[s].part_peaks[m] for s, m in order}
    before = max((peaks[when] for when in order[: order.index((step, moment))]), default=0)
    assert before < peaks[step, moment]
    return (before + peaks[step, moment]) / 2


WALLS = [
    (0, "forward", "tiny", {"B": 10, "T": 128}),
    (0, "backward", "tiny", {"B": 4, "T": 128}),
    (0, "backward", "tiny", {"B": 4, "T": 128, "precision": "bf16"}),
    (0, "optimizer", "wide", {"B": 2, "T": 16, "attention": "sdpa"}),
    (0, "optimizer", "wide", {"B": 2, "T": 16, "optimizer": "fused"}),
    (1, "backward", "tiny", {"B": 4, "T": 128, "attention": "sdpa"}),  # with AdamW's moments
    (1, "backward", "tiny", {"B": 2, "T": 128, "precision": "fp64"}),
]


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(("step", "moment", "model", "settings"), WALLS, ids=str)
def test_a_real_run_meets_its_budget_and_tells_what_filled_it(
    monkeypatch, step, moment, model, settings
):
    budget_gib = wall(MODELS[model], step, moment, **settings) / GIB
    config = RunConfig(model=model, device="cpu", steps=4, budget_gib=budget_gib, **settings)
    alive = spied_model(monkeypatch)
    summary, steps = execute(config)

    assert summary.state == "out of memory"
    assert len(steps) == summary.steps_done == step
    failure = summary.out_of_memory
    assert (failure.step, failure.moment) == (step, moment)
    assert f"in step {step} ({moment})" in summary.message
    budget = int(budget_gib * GIB)
    assert failure.capacity_bytes == summary.memory.capacity_bytes == budget
    assert summary.memory.measured_bytes is None
    assert summary.memory.verdict == "will not fit"

    # what lived then
    parts, weights = failure.parts, parameter_bytes(config)
    assert list(parts) == ["weights", "gradients", "moments", "logits", "activations"]
    assert parts["weights"] == weight_bytes(config)
    lived = sum(parts.values())
    assert lived <= budget < lived + failure.asked_bytes + 0.01 * MIB  # words round to 0.01 MiB
    assert failure.asked_bytes > 0
    if (step, moment) == (0, "forward"):
        assert parts["gradients"] == parts["moments"] == 0
    if moment == "optimizer":
        assert parts["gradients"] == weights
        assert parts["logits"] == 0
        assert 0 <= parts["moments"] <= 2 * weights + 1024
    elif step == 0:
        assert parts["moments"] == 0
    else:
        assert parts["moments"] == pytest.approx(2 * weights, abs=1024)
    if moment == "backward":  # at the least the log-softmax
        assert parts["logits"] >= 4 * config.tokens_per_step * config.vocab_size

    # nothing is left of it
    assert alive
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]

    # the smaller sizes that it proposes really run, in the same budget
    for axis, size in (("B", failure.smaller_B), ("T", failure.smaller_T)):
        assert size < getattr(config, axis)
        if size:
            assert f"{axis} to {size}" in summary.message
            again, _ = execute(replace(config, **{axis: size}, steps=2))
            assert again.state == "finished", again.message
            assert again.memory.verdict == "fits"
            assert again.memory.measured_bytes <= budget
            assert again.memory.error == pytest.approx(0, abs=0.005)
    assert failure.smaller_B or model == "wide"


def spied_model(patch) -> list[weakref.ref]:
    """References to all models, weights, moments and logits that are made from now on."""
    made = []
    forward, init_group = GPT.forward, torch.optim.AdamW._init_group

    def spied_forward(model, *args):
        made.extend(map(weakref.ref, (model, *model.parameters())))
        out = forward(model, *args)
        made.extend(map(weakref.ref, out))
        return out

    def spied_init(optimizer, *args, **kwargs):
        made.append(weakref.ref(optimizer))
        out = init_group(optimizer, *args, **kwargs)
        made.extend(weakref.ref(t) for state in optimizer.state.values() for t in state.values())
        return out

    patch.setattr(GPT, "forward", spied_forward)
    patch.setattr(torch.optim.AdamW, "_init_group", spied_init)
    return made


def test_the_largest_batch_that_is_proposed_is_the_largest_that_runs():
    config = tiny(B=32, T=64, steps=2, budget_gib=0.5)
    B = execute(config)[0].out_of_memory.smaller_B
    assert 1 < B < 31
    assert execute(replace(config, B=B))[0].state == "finished"
    assert execute(replace(config, B=B + 1))[0].state == "out of memory"


def test_a_run_after_a_wall_is_as_good_as_new():
    config = tiny(B=4, T=16, steps=3)
    expected = [step.loss for step in execute(config)[1]]
    mode = torch.get_float32_matmul_precision()
    assert execute(tiny(B=64, T=64, precision="tf32", budget_gib=0.25))[0].state == "out of memory"
    assert torch.get_float32_matmul_precision() == mode
    assert [step.loss for step in execute(config)[1]] == expected


def test_no_budget_has_the_machines_memory_for_a_wall(monkeypatch):
    config = tiny(B=16, T=128)
    free = GIB
    monkeypatch.setattr(runner, "memory_free_bytes", lambda _: free)
    summary, _ = execute(config)
    assert summary.out_of_memory.moment == "before the start"
    # a forecast that is far too low lets it start: the tracker is the net below
    honest = runner.Capacity.forecast
    monkeypatch.setattr(
        runner.Capacity, "forecast", lambda self, config, sizes=None: honest(self, config, (1, 8))
    )
    summary, _ = execute(config)
    assert summary.state == "out of memory"
    assert summary.out_of_memory.step == 0
    assert sum(summary.out_of_memory.parts.values()) <= free
    monkeypatch.undo()
    assert execute(tiny(steps=2))[0].state == "finished"


def test_weights_that_are_more_than_the_wall_are_told_as_such(monkeypatch):
    monkeypatch.setattr(runner.Capacity, "refusal", lambda *_: None)  # as if it had not known
    monkeypatch.setattr(runner.Capacity, "tracker_budget", lambda _: MIB)
    summary, _ = execute(tiny())
    assert summary.state == "out of memory"
    assert (summary.out_of_memory.step, summary.out_of_memory.moment) == (
        None,
        "building the model",
    )
    assert "while building the model (B=2, T=8, fp32, tiny), asking for" in summary.message


def test_a_failure_in_a_step_that_nobody_followed_tells_no_parts(monkeypatch):
    forward, calls = GPT.forward, iter(range(100))

    def failing(model, *args):
        if next(calls) == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")
        return forward(model, *args)

    monkeypatch.setattr(GPT, "forward", failing)
    summary, steps = execute(tiny())
    assert (summary.state, len(steps)) == ("out of memory", 3)
    assert summary.out_of_memory.parts == {}
    assert summary.memory.measured_bytes is None


def test_a_run_whose_compiler_failed_is_followed_like_any_other(monkeypatch):
    def broken(model):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", broken)
    summary, _ = execute(tiny(compile=True))
    assert summary.state == "finished"
    assert len(summary.notes) == 1
    assert summary.peak_memory_bytes is not None
    assert summary.peak_memory_bytes == execute(tiny())[0].peak_memory_bytes
    assert summary.memory.error == pytest.approx(0, abs=0.005)
    # compiled it would fit, as it is it does not: the wall stands
    config = tiny(B=16, T=128, precision="bf16", compile=True, budget_gib=1)
    summary, _ = execute(config)
    assert (summary.state, summary.out_of_memory.step) == ("out of memory", 0)


MANY = """
import gc, json, sys
import psutil, torch
from gpt2demo import config, runner
from gpt2demo.config import GPTConfig, RunConfig
from gpt2demo.device import probe_device

config.MIN_BUDGET_GIB = 0.001
shape, phases = json.loads(sys.argv[1])
SHAPE = GPTConfig(**shape)
RunConfig.gpt = property(lambda _: SHAPE)
INFO, TOKENS = probe_device("cpu"), torch.arange(5000) % SHAPE.vocab_size
process = psutil.Process()
torch.set_num_threads(1)

def run(moment, **settings):
    made = RunConfig(model="tiny", device="cpu", **settings)
    summary = runner.execute(made, INFO, on_step=lambda _: None, tokens=TOKENS)
    if moment is None:
        assert summary.state == "finished", summary.message
    else:
        assert summary.state == "out of memory", summary.state
        assert summary.out_of_memory.moment == moment, summary.message

run(None, B=1, T=8, steps=3)
gc.collect()
gc.freeze()  # what imports made need not be looked through a thousand times
for moment, settings in phases.items():
    for turn in range(50):
        run(moment, **settings)
        run(None, B=1, T=8, steps=2)
        if turn == 0:
            first = process.memory_info().rss
    print(moment, process.memory_info().rss - first)
"""
# a step in milliseconds; the weights are 3 MB, and what one run holds is 6 to 12
SMALL = GPTConfig(block_size=64, vocab_size=4096, n_layer=1, n_head=2, n_embd=128)


def test_memory_after_fifty_walls_is_that_after_one():
    sizes = {"forward": (4, 64), "backward": (4, 64), "optimizer": (1, 8)}
    phases = {
        moment: {"B": B, "T": T, "budget_gib": wall(SMALL, 0, moment, B=B, T=T) / GIB}
        for moment, (B, T) in sizes.items()
    }
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", MANY, json.dumps([asdict(SMALL), phases])],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    grown = dict(line.split() for line in run.stdout.splitlines())
    assert list(grown) == ["forward", "backward", "optimizer"]
    assert all(int(size) < 50 * 10**6 for size in grown.values()), grown


# ------------------------------------------------------------------ a GPU, faked


@pytest.fixture
def counters(monkeypatch) -> dict[str, object]:
    """What torch's allocator of a GPU answers; an exception is raised."""
    answers = {
        "max_memory_allocated": 5 * GIB,
        "max_memory_reserved": 6 * GIB,
        "memory_allocated": 3 * GIB,
        "memory_reserved": 4 * GIB,
    }

    def answer(name):
        def call(device):
            assert device.type == "cuda"
            if isinstance(answers[name], Exception):
                raise answers[name]
            return answers[name]

        return call

    for name in answers:
        monkeypatch.setattr(torch.accelerator, name, answer(name))
    return answers


def test_the_allocators_counters(counters):
    readers = {
        "max_memory_allocated": accelerator.peak_memory_bytes,
        "max_memory_reserved": accelerator.reserved_peak_bytes,
        "memory_allocated": accelerator.allocated_bytes,
    }
    for name, read in readers.items():
        assert read(CUDA) == counters[name]
        assert read(CPU) is None
    assert accelerator.cached_bytes(CUDA) == GIB
    assert accelerator.cached_bytes(CPU) == 0
    for nothing in (0, RuntimeError("x"), AttributeError("x"), NotImplementedError("x")):
        for name, read in readers.items():
            counters[name] = nothing
            assert read(CUDA) is None
        assert accelerator.cached_bytes(CUDA) == 4 * GIB
    counters["memory_reserved"] = RuntimeError("x")
    assert accelerator.cached_bytes(CUDA) == 0
    counters["memory_reserved"], counters["memory_allocated"] = GIB, 2 * GIB
    assert accelerator.cached_bytes(CUDA) == 0  # never below


@pytest.fixture
def fraction(monkeypatch) -> list[float]:
    """The share of a GPU that this process may take, as torch holds it; the last is the present."""
    history = [0.875]
    monkeypatch.setattr(
        torch.cuda, "get_per_process_memory_fraction", lambda device=None: history[-1]
    )
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, device=None: history.append(share),
    )
    return history


def test_a_limit_is_a_fraction_and_is_put_back(fraction):
    with accelerator.memory_limit(CUDA, 6 * GIB, 16 * GIB):
        assert fraction == [0.875, 0.375]
    assert fraction == [0.875, 0.375, 0.875]

    def fail() -> None:
        assert fraction[-1] == 1 / 16
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError), accelerator.memory_limit(CUDA, GIB, 16 * GIB):
        fail()
    assert fraction[-1] == 0.875
    with accelerator.memory_limit(CUDA, 100 * GIB, 16 * GIB):
        assert fraction[-1] == 1.0  # no more than all of it
    del fraction[1:]
    for device, limit in ((CPU, GIB), (torch.device("mps"), GIB), (CUDA, None)):
        with accelerator.memory_limit(device, limit, 16 * GIB):
            assert fraction == [0.875]


@pytest.mark.usefixtures("counters")
def test_what_torch_keeps_is_free_for_the_next_run(monkeypatch):
    info = replace(INFO, type="cuda", memory_total_bytes=16 * GIB, compute_capability="8.6")
    monkeypatch.setattr(runner, "memory_free_bytes", lambda device: 7 * GIB)
    capacity = runner.capacity_now(RunConfig(), info, CUDA)
    assert capacity.total_bytes == 8 * GIB
    assert (capacity.device_type, capacity.compute_capability) == ("cuda", "8.6")
    monkeypatch.setattr(runner, "memory_free_bytes", lambda device: None)
    assert runner.capacity_now(RunConfig(), info, CUDA).total_bytes == 16 * GIB


@pytest.fixture
def gpu(monkeypatch, counters, fraction):
    """A machine with a GPU of 16 GiB; `run(config, error)` runs on it, ending with `error`."""
    info = replace(
        INFO, type="cuda", name="a GPU", memory_total_bytes=16 * GIB, compute_capability="8.6"
    )
    monkeypatch.setattr(runner, "resolve_device", lambda name: CUDA)
    monkeypatch.setattr(runner, "memory_free_bytes", lambda device: 14 * GIB)
    monkeypatch.setattr(accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)

    def run(config: RunConfig, error: Exception | None = None) -> tuple[RunSummary, float]:
        inside = []

        def fake_train(config, tokens, device, should_stop, progress, budget_bytes, ranks):
            assert budget_bytes is None  # the allocator counts, no tracker
            inside.append(fraction[-1])
            progress.phase, progress.moment = "training", "backward"
            if error:
                progress.held_bytes = {"weights": GIB}
                raise error
            for step in range(config.steps):
                yield StepMetrics(
                    step=step,
                    loss=9.0,
                    step_ms=100.0,
                    tokens_per_sec=1.0,
                    is_warmup=step < 2,
                    peak_memory_bytes=counters["max_memory_allocated"],
                )

        monkeypatch.setattr(runner, "train", fake_train)
        summary = runner.execute(config, info, on_step=lambda _: None, tokens=TOKENS)
        return summary, inside[0]

    return run


def test_a_run_on_a_gpu_stands_beside_its_forecast(gpu, counters, fraction):
    config = RunConfig(B=2, T=1024, steps=3, device="cuda")
    summary, inside = gpu(config)
    assert summary.state == "finished"
    assert fraction == [0.875] == [inside]  # no budget: no limit
    memory = summary.memory
    assert memory.measured_bytes == summary.peak_memory_bytes == 5 * GIB
    assert memory.reserved_bytes == 6 * GIB
    assert memory.measured_by == "max_memory_allocated"
    assert memory.capacity_bytes == 14 * GIB + GIB  # free, and what torch keeps
    assert memory.verdict == "fits"
    live = measure(
        config.gpt,
        precision="fp32",
        attention="manual",
        B=2,
        T=1024,
        optimizer="default",
        device_type="cuda",
    ).peak_bytes
    # what the counter counts: tensors and cuBLAS's workspaces, 8.125 MiB each
    assert memory.forecast_bytes == pytest.approx(live + 16.25 * MIB, abs=2048)
    counters["max_memory_allocated"] = None
    summary, _ = gpu(config)
    assert summary.memory.measured_bytes is summary.memory.measured_by is None


def test_a_budget_on_a_gpu_limits_the_allocator_and_is_lifted(gpu, fraction):
    config = RunConfig(B=2, T=1024, steps=2, device="cuda", budget_gib=8)
    summary, inside = gpu(config)
    assert summary.state == "finished"
    assert inside == (8 * GIB - 430 * MIB) / (16 * GIB)  # what a context would leave of the card
    assert fraction[-1] == 0.875
    assert summary.memory.capacity_bytes == 8 * GIB

    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.30 GiB. GPU 0 has a total capacity of 15.77 GiB "
        "of which 1.20 GiB is free."
    )
    summary, inside = gpu(replace(config, B=8), error)
    assert inside < 0.5
    assert fraction[-1] == 0.875
    failure = summary.out_of_memory
    assert (failure.step, failure.moment, failure.parts) == (0, "backward", {"weights": GIB})
    assert failure.asked_bytes == round(2.30 * GIB)
    assert failure.capacity_bytes == 8 * GIB
    assert 2 <= failure.smaller_B <= 3
    assert summary.memory.verdict == "will not fit"
    assert summary.memory.reserved_bytes is None  # no step was done
    # a budget larger than the card is the card
    _, inside = gpu(replace(config, budget_gib=1024))
    assert 0.85 < inside <= 1.0


@pytest.mark.usefixtures("counters")
def test_parts_on_a_gpu_come_from_the_allocator_and_the_model(counters):
    config = tiny()
    torch.manual_seed(0)
    model = GPT(config.gpt)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    meter = MemoryMeter(config, CUDA, None)
    meter.start(model, TOKENS, compiled=False)
    with meter.during(0):
        _, loss = model(TOKENS[:16].view(2, 8), TOKENS[1:17].view(2, 8))
        loss.backward()
        optimizer.step()
    assert meter.peak_bytes() == 5 * GIB
    parts = meter.at_failure(model, optimizer)
    weights = parameter_bytes(config)
    assert list(parts) == ["weights", "gradients", "moments", "activations"]  # logits not apart
    assert (parts["weights"], parts["gradients"]) == (weight_bytes(config), weights)
    assert parts["moments"] == pytest.approx(2 * weights, abs=1024)
    assert sum(parts.values()) == 3 * GIB  # what the allocator holds
    counters["memory_allocated"] = MIB  # less than the model: never below zero
    assert meter.at_failure(model, None)["activations"] == 0
    assert meter.at_failure(None, None) == {}
    counters["memory_allocated"] = 0  # no counter, as on other devices
    assert meter.at_failure(model, optimizer) == {}


def test_progress_starts_without_a_failure():
    progress = Progress()
    assert (progress.moment, progress.poisoned, progress.held_bytes) == ("", False, {})
