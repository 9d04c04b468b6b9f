"""The loop: its losses, its clock, its matmul mode, and what it leaves behind."""

import contextlib
import gc
import time
import weakref

import numpy as np
import pytest
import torch
from gpt2_reference import copy_weights, reference_model

from gpt2demo import train as train_module
from gpt2demo.config import PRECISIONS, GPTConfig, RunConfig
from gpt2demo.data import load_tokens
from gpt2demo.model import GPT
from gpt2demo.precision import PRECISION, precision_scope
from gpt2demo.train import Progress, train

CPU = torch.device("cpu")
MODES = {"fp32": "highest", "tf32": "high", "bf16": "highest", "fp16": "highest", "fp64": "highest"}


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return load_tokens(RunConfig(), 2**20)[0]


def tiny(**settings) -> RunConfig:
    return RunConfig(model="tiny", **({"B": 2, "T": 16, "steps": 4} | settings))


def losses(config: RunConfig, tokens: torch.Tensor) -> list[float]:
    return [step.loss for step in train(config, tokens, CPU)]


# ------------------------------------------------------------------ right numbers


@pytest.mark.parametrize(("attention", "optimizer"), [("manual", "default"), ("sdpa", "fused")])
def test_ten_steps_equal_a_bare_loop_over_transformers(tokens, attention, optimizer):
    config = tiny(B=4, T=32, steps=10, attention=attention, optimizer=optimizer)
    ours = losses(config, tokens)

    torch.manual_seed(config.seed)
    theirs = reference_model(config.gpt, "eager")
    copy_weights(seeded_model(config), theirs)
    adamw = torch.optim.AdamW(theirs.parameters(), lr=3e-4)
    text = tokens.numpy()
    expected = []
    for step in range(10):
        window = text[step * 128 : step * 128 + 129].astype(np.int64)
        x = torch.from_numpy(window[:-1].reshape(4, 32))
        y = torch.from_numpy(window[1:].reshape(4, 32))
        adamw.zero_grad()
        logits = theirs(x).logits
        loss = torch.nn.functional.cross_entropy(logits.view(-1, 50257), y.view(-1))
        loss.backward()
        adamw.step()
        expected.append(loss.item())
    assert ours == pytest.approx(expected, rel=1e-4)
    assert ours[-1] < ours[0]  # it learns


def seeded_model(config: RunConfig) -> GPT:
    torch.manual_seed(config.seed)
    return GPT(config.gpt)


def test_fp32_twice_gives_identical_losses(tokens):
    config = tiny(steps=6)
    assert losses(config, tokens) == losses(config, tokens)


def test_another_seed_gives_other_weights(tokens):
    assert losses(tiny(steps=1), tokens) != losses(tiny(steps=1, seed=1), tokens)


def test_bf16_differs_in_the_fourth_or_fifth_digit_and_agrees_within_one_percent(tokens):
    fp32 = np.array(losses(tiny(B=4, T=32, steps=8), tokens))
    bf16 = np.array(losses(tiny(B=4, T=32, steps=8, precision="bf16"), tokens))
    difference = np.abs(bf16 - fp32) / fp32
    assert (difference > 0).all()
    assert 1e-6 < difference.max() < 1e-2


def test_tf32_on_a_cpu_is_fp32(tokens):
    if torch.cpu.get_capabilities().get("amx_fp16"):
        pytest.skip("this CPU rounds float32 matmuls when it may")
    assert losses(tiny(precision="tf32"), tokens) == losses(tiny(), tokens)


def test_fp64_agrees_with_fp32_to_its_rounding(tokens):
    fp32, fp64 = losses(tiny(), tokens), losses(tiny(precision="fp64"), tokens)
    assert fp64 == pytest.approx(fp32, rel=1e-5)
    assert fp64 != fp32


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_first_loss_is_that_of_a_uniform_guess(tokens, precision):
    config = tiny(steps=1, precision=precision, B=1, T=8)
    assert 10.6 < losses(config, tokens)[0] < 11.3


def test_fp16_records_its_scale_and_the_steps_it_skipped(tokens):
    with small_model(2):
        steps = list(train(tiny(precision="fp16", steps=3, B=1, T=4), tokens, CPU))
    assert [step.loss_scale for step in steps] == [2.0**16] * 3
    assert not any(step.skipped for step in steps)
    with small_model(2), overflowing_gradients():
        steps = list(train(tiny(precision="fp16", steps=3, B=1, T=4), tokens, CPU))
    assert [step.skipped for step in steps] == [True] * 3
    assert [step.loss_scale for step in steps] == [2.0**16, 2.0**15, 2.0**14]  # torch halves it


@contextlib.contextmanager
def small_model(n_embd: int):
    """fp16 runs in a scalar loop on most CPUs: a model of this width ends in time."""
    with pytest.MonkeyPatch.context() as patch:
        shape = GPTConfig(n_layer=1, n_head=1, n_embd=n_embd)
        patch.setattr(RunConfig, "gpt", property(lambda _: shape))
        yield


@contextlib.contextmanager
def overflowing_gradients():
    with pytest.MonkeyPatch.context() as patch:
        build = train_module.GPT

        def model(*args, **kwargs):
            made = build(*args, **kwargs)
            made.transformer.ln_f.weight.register_hook(lambda grad: grad + float("inf"))
            return made

        patch.setattr(train_module, "GPT", model)
        yield


# ------------------------------------------------------------------ the clock


def test_tokens_per_sec_is_tokens_over_time(tokens):
    for step in train(tiny(B=3, T=24), tokens, CPU):
        assert step.tokens_per_sec * step.step_ms / 1000 == pytest.approx(72)


def test_step_times_add_up_to_the_wall_clock(tokens):
    # from the end of the first step to the end of the last: neither set-up nor clean-up
    ends, total = [], 0.0
    for step in train(tiny(B=4, T=64, steps=12), tokens, CPU):
        ends.append(time.perf_counter())
        total += step.step_ms / 1000 if step.step else 0
    wall = ends[-1] - ends[0]
    assert total <= wall
    assert total == pytest.approx(wall, rel=0.10)


def test_the_first_two_steps_are_warm_up(tokens):
    assert [s.is_warmup for s in train(tiny(steps=5), tokens, CPU)] == [True] * 2 + [False] * 3


def test_nothing_but_the_step_is_timed(tokens, monkeypatch):
    next_batch = train_module.DataLoaderLite.next_batch

    def slow(loader):
        time.sleep(0.3)
        return next_batch(loader)

    monkeypatch.setattr(train_module.DataLoaderLite, "next_batch", slow)
    run = train(tiny(steps=4), tokens, CPU)
    steps = []
    for step in run:
        steps.append(step)
        time.sleep(0.3)  # a slow consumer
    assert min(step.step_ms for step in steps) < 300


# ------------------------------------------------------------------ the matmul mode


@pytest.mark.parametrize("order", [PRECISIONS, PRECISIONS[::-1], ("tf32", "bf16", "tf32", "fp32")])
def test_every_forward_runs_in_the_chosen_mode_and_it_is_put_back(tokens, monkeypatch, order):
    seen = []
    forward = GPT.forward

    def spied(model, *args):
        autocast = torch.is_autocast_enabled("cpu")
        seen.append((torch.get_float32_matmul_precision(), autocast))
        return forward(model, *args)

    monkeypatch.setattr(GPT, "forward", spied)
    before = torch.get_float32_matmul_precision()
    for precision in order:
        seen.clear()
        losses(tiny(steps=2, precision=precision, B=1, T=4), tokens)
        assert seen == [(MODES[precision], precision in ("bf16", "fp16"))] * 2
        assert torch.get_float32_matmul_precision() == before


def test_the_mode_is_put_back_after_an_error_and_when_abandoned(tokens, monkeypatch):
    torch.set_float32_matmul_precision("medium")
    try:
        run = train(tiny(precision="tf32"), tokens, CPU)
        next(run)
        assert torch.get_float32_matmul_precision() == "high"
        run.close()
        assert torch.get_float32_matmul_precision() == "medium"

        def broken(*_):
            raise RuntimeError("broken")

        monkeypatch.setattr(GPT, "forward", broken)
        with pytest.raises(RuntimeError, match="broken"):
            losses(tiny(precision="tf32"), tokens)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_scope_puts_back_what_was_there():
    for mode in ("medium", "high", "highest"):
        torch.set_float32_matmul_precision(mode)
        with precision_scope(PRECISION["tf32"]):
            assert torch.get_float32_matmul_precision() == "high"
        assert torch.get_float32_matmul_precision() == mode


def test_only_matmuls_and_their_like_run_in_bfloat16(tokens, monkeypatch):
    seen = {}
    build = train_module.GPT

    def hooked(*args, **kwargs):
        model = build(*args, **kwargs)
        for name, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_hook(
                    lambda _, __, out, name=name: seen.update({name: out.dtype})
                )
        seen["weight"] = model.lm_head.weight.dtype
        return model

    monkeypatch.setattr(train_module, "GPT", hooked)
    losses(tiny(steps=1, precision="bf16"), tokens)
    assert seen["lm_head"] == seen["transformer.h.0.attn.c_attn"] == torch.bfloat16
    assert seen["transformer.ln_f"] == seen["transformer.wte"] == seen["weight"] == torch.float32


# ------------------------------------------------------------------ ends


def test_it_stops_between_two_steps(tokens):
    asked = iter([False, False, True])
    steps = list(train(tiny(steps=50), tokens, CPU, lambda: next(asked)))
    assert [step.step for step in steps] == [0, 1]


def test_a_loss_that_is_not_finite_is_the_last(tokens, monkeypatch):
    forward = GPT.forward
    calls = iter(range(100))

    def diverging(model, *args):
        logits, loss = forward(model, *args)
        return logits, loss * float("nan") if next(calls) == 3 else loss

    monkeypatch.setattr(GPT, "forward", diverging)
    steps = list(train(tiny(steps=10), tokens, CPU))
    assert [step.step for step in steps] == [0, 1, 2, 3]
    assert np.isnan(steps[-1].loss)


@pytest.mark.parametrize("ending", ["all steps", "closed", "error in backward"])
def test_model_and_optimizer_are_gone_afterwards(tokens, monkeypatch, ending):
    made = []
    build = train_module.GPT

    def spied(*args, **kwargs):
        model = build(*args, **kwargs)
        made.extend([weakref.ref(model), *map(weakref.ref, model.parameters())])
        if ending == "error in backward":
            model.transformer.wpe.weight.register_hook(fail)
        return model

    def fail(_):
        raise RuntimeError("backward failed")

    monkeypatch.setattr(train_module, "GPT", spied)
    run = train(tiny(steps=3), tokens, CPU)
    if ending == "closed":
        next(run)
        run.close()
    elif ending == "all steps":
        list(run)
    else:
        with contextlib.suppress(RuntimeError):
            list(run)
    gc.collect()
    assert made
    assert not [ref for ref in made if ref() is not None]


def test_the_global_random_state_is_left_alone(tokens):
    torch.manual_seed(99)
    expected = torch.rand(3)
    torch.manual_seed(99)
    losses(tiny(steps=2), tokens)
    assert torch.equal(torch.rand(3), expected)


def test_progress_tells_the_parameters(tokens):
    progress = Progress()
    list(train(tiny(steps=1), tokens, CPU, progress=progress))
    assert progress.parameters == sum(p.numel() for p in seeded_model(tiny()).parameters())
    assert progress.phase == "training"
    assert progress.compile_seconds is None
