"""Runs of a hub whose GPU is lent; prints what came of them as JSON.

A process of its own, as the page's is: autograd refuses to work in a fork of a process that has
used it. What is changed here reaches the workers, as they are forks of this process.
"""

import contextlib
import contextvars
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import gradio as gr
import spaces
import torch

from gpt2demo import runner, zero
from gpt2demo.config import MODELS, InputError, RunConfig, Settings
from gpt2demo.device import probe_device
from gpt2demo.hub import Hub
from gpt2demo.inside import inspect_step
from gpt2demo.inspection import Inspection
from gpt2demo.probe import ProbeResult, probe_rates
from gpt2demo.run import Run
from gpt2demo.ui.page import build_demo

SCENES: dict[str, Callable[[], dict]] = {}
ORDINARY = {"model": "tiny", "B": 2, "T": 16, "steps": 4}
visitor = contextvars.ContextVar("visitor", default="nobody")


def scene(function: Callable[[], dict]) -> Callable[[], dict]:
    SCENES[function.__name__] = function
    return function


def hub(lend=spaces.GPU) -> Hub:
    return Hub(Settings(), lender=zero.ZeroGPU(lend, max_seconds=1800))


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing came of it"
        time.sleep(0.01)


def ended(room: Hub, run: Run) -> dict:
    until(lambda: run.summary and room.current is None)
    record = run.record().to_dict()
    return {"summary": record["summary"], "steps": record["steps"], "device": record["device"]}


def start(room: Hub, **settings) -> Run:
    return room.submit(RunConfig(**ORDINARY | settings), "me")


def run(room: Hub, **settings) -> dict:
    return ended(room, start(room, **settings))


@contextlib.contextmanager
def put(module, name: str, value) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def training(before_step: Callable[[int], None]):
    """The real loop, with something before each of its steps."""

    def train(*args, **kwargs):
        steps = real_train(*args, **kwargs)
        with contextlib.closing(steps):
            for step in steps:
                before_step(step.step)
                yield step

    real_train = runner.train
    return put(runner, "train", train)


def then(room: Hub) -> str:
    """How an ordinary run ends afterwards."""
    return run(room)["summary"]["state"]


@scene
def ordinary() -> dict:
    room = hub()
    before = {"device": room.device_info.to_dict(), "free": room.memory_free_bytes()}
    before["notes"] = room.capacity(RunConfig()).total_bytes
    told = probe_device("cpu")

    def found(_: str):
        return replace(told, platform=f"process {os.getpid()}")

    with put(zero, "probe_device", found):
        first = start(room)
        states = set()
        until(lambda: states.add(first.state) or first.summary)
        result = ended(room, first)
    return result | {
        "before": before,
        "states": sorted(states),
        "pid": os.getpid(),
        "after": room.device_info.to_dict(),
        "free": room.memory_free_bytes(),
        "board": [kept.record.summary.state for kept in room.board.runs()],
    }


@scene
def own_text() -> dict:
    return run(hub(), text="the words of a visitor, over and over. " * 40)


@scene
def stopped() -> dict:
    room = hub()
    with training(lambda _: time.sleep(0.3)):
        going = start(room, steps=500)
        until(lambda: len(going.steps) == 3)
        said = room.stop("me")
        result = ended(room, going)
    return result | {"said": said, "then": then(room)}


@scene
def deaf() -> dict:
    """A worker that does not hear of Stop."""
    room = hub()

    class Deaf:
        def is_set(self) -> bool:
            return False

    def lend(**given):
        decorate = spaces.GPU(**given)

        def work(job):
            zero.STOP = Deaf()
            yield from zero._work(job)

        return lambda _: decorate(work)

    room = hub(lend)
    with training(lambda _: time.sleep(0.2)):
        going = start(room, steps=500)
        until(lambda: len(going.steps) == 2)
        room.stop("me")
        return ended(room, going)


@scene
def out_of_memory() -> dict:
    def fail(step: int) -> None:
        if step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    room = hub()
    with training(fail):
        result = run(room)
    return result | {"then": then(room)}


@scene
def killed() -> dict:
    def die(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    room = hub()
    with training(die):
        result = run(room)
    return result | {"then": then(room)}


@scene
def poisoned() -> dict:
    def fail(step: int) -> None:
        if step == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    room = hub()
    with training(fail):
        result = run(room)
    return result | {"then": then(room)}


@scene
def failed_before_the_run() -> dict:
    def broken(_: str):
        raise RuntimeError("/a/secret/path")

    room = hub()
    with put(zero, "probe_device", broken):
        result = run(room)
    return result | {"then": then(room)}


@scene
def ended_without_a_word() -> dict:
    class Panic(BaseException):
        pass

    def panic(_: str):
        raise Panic

    room = hub()
    with put(zero, "probe_device", panic):
        return run(room)


@scene
def kept_to_its_lease() -> dict:
    room = hub()
    with (
        put(zero, "lease_seconds", lambda *_: 6),
        put(zero, "_MARGIN_SECONDS", 3.0),
        training(lambda _: time.sleep(0.2)),
    ):
        return run(room, steps=500) | {"then": then(room)}


@scene
def beyond_its_lease() -> dict:
    room = hub()
    with (
        put(zero, "lease_seconds", lambda *_: 5),
        put(zero, "_MARGIN_SECONDS", 1.0),
        training(lambda step: time.sleep(60 if step == 1 else 0)),
    ):
        result = run(room, steps=500)
    return result | {"then": then(room)}


@scene
def refused() -> dict:
    def lend(**_):
        def call(_):
            message = "You have exceeded your free ZeroGPU quota (60s requested vs. 5s left)."
            raise gr.Error(message, title="ZeroGPU quota exceeded", print_exception=False)
            yield

        return lambda _: call

    room = hub(lend)
    try:
        room.probe(64)
    except InputError as exc:
        said = str(exc)
    return run(room) | {"probe": said}


@scene
def for_whom() -> dict:
    """Whose request the lender sees, as ZeroGPU takes a visitor's quota from it."""
    seen = []

    def lend(**given):
        decorate = spaces.GPU(**given)

        def decorated(task):
            inner = decorate(task)

            def call(*args):
                seen.append(visitor.get())
                yield from inner(*args)

            return call

        return decorated

    room = hub(lend)
    for name in ("Ada", "Grace"):
        context = contextvars.copy_context()
        context.run(visitor.set, name)
        context.run(start, room)
    until(lambda: len(room.finished) == 2 and room.current is None)
    race = contextvars.copy_context()
    race.run(visitor.set, "Edsger")
    race.run(room.compare, RunConfig(**ORDINARY), ["fp32", "bf16"], 1, "me")
    until(lambda: room.race.message and room.current is None)
    return {"seen": seen, "race": room.race.message}


@scene
def probed() -> dict:
    def quickly(info, tokens: int) -> ProbeResult:
        found = probe_rates(info, tokens, gpt=MODELS["tiny"], precisions=["fp32"], seconds=2)
        return replace(found, notes=(f"process {os.getpid()}",))

    room = hub()
    with put(zero, "probe_rates", quickly):
        found = room.probe(64)
    return {
        "tokens": found.tokens,
        "worker": found.notes[0],
        "here": f"process {os.getpid()}",
        "device": room.device_info.type,
        "rate": room.rates().matmul("fp32", "mlp", "forward"),
    }


@scene
def inspected() -> dict:
    def here(config, info, **given) -> Inspection:
        frozen = gc.get_freeze_count()
        found = inspect_step(config, info, **given)
        return replace(found, notes=(f"process {os.getpid()}", str(frozen)))

    room = hub()
    with put(zero, "inspect_step", here):
        found = room.inspect(RunConfig(**ORDINARY))
    return {
        "state": found.state,
        "worker": found.notes[0],
        "here": f"process {os.getpid()}",
        "device": room.device_info.type,
        "parts": found.profile.parts,
        "casts": len(found.casts.operations),
        "frozen": int(found.notes[1]),
        "then": then(room),
    }


@scene
def queue() -> dict:
    lent, own = hub(), Hub(Settings(), device="cpu")
    return {"lent": build_demo(lent)._queue.max_size, "own": build_demo(own)._queue.max_size}


if __name__ == "__main__":
    seen = {}
    for name, play in SCENES.items():
        begun = time.monotonic()
        seen[name] = play()
        print(f"{name}: {time.monotonic() - begun:.1f} s", file=sys.stderr)
    print(json.dumps(seen))
