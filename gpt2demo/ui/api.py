"""The same without a browser: endpoints for scripts.

The runs go through the same line as the page's, under the same limits.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, Final, TypeVar

import gradio as gr

from gpt2demo.config import InputError, RunConfig, default_sizes
from gpt2demo.device import DeviceInfo, warnings_for
from gpt2demo.fit import card, fit_map
from gpt2demo.fit_words import report
from gpt2demo.hub import Hub
from gpt2demo.probe import probe_report
from gpt2demo.race_report import race_report
from gpt2demo.records import jsonable, timing
from gpt2demo.run import Run
from gpt2demo.series import Measured
from gpt2demo.staircase_report import staircase_report
from gpt2demo.ui.stream import waiting_line

_POLL_SEC: Final = 0.1


def add_api(hub: Hub) -> None:
    """Add the endpoints to the Blocks that is open."""
    sizes = default_sizes(hub.device.type)

    async def train(
        request: gr.Request,
        model: str = "gpt2",
        precision: str = "fp32",
        B: int = sizes["B"],
        T: int = sizes["T"],
        steps: int = sizes["steps"],
        seed: int = 1337,
        attention: str = "manual",
        optimizer: str = "default",
        compile: bool = False,
        vocab_size: int = 50257,
        lr: float = 3e-4,
        text: str = "builtin",
        budget_gib: float = 0.0,
    ) -> AsyncIterator[dict]:
        """Train GPT-2 and stream one dict a step; the last dict holds the summary.

        The first dict names the run: {"run_id", "stop_token", "config", "warnings"}. While the run
        waits, {"line": "2nd in line, about 40 s"} is sent whenever that changes. A step is {"step",
        "loss", "step_ms", "tokens_per_sec", "is_warmup", "skipped", "loss_scale",
        "peak_memory_bytes"}; a loss that is NaN or infinite is null, with "loss_flag" beside it.
        The last dict is {"summary": {...}}.

        Args:
            model: gpt2, gpt2-medium, gpt2-large, gpt2-xl or tiny.
            precision: fp32, tf32, bf16, fp16 or fp64.
            B: sequences a step, 1 to 256.
            T: tokens a sequence, 1 to 1024.
            steps: training steps, 1 to this server's limit.
            seed: seed of the weights, 0 to 2147483647.
            attention: manual or sdpa.
            optimizer: AdamW as default or fused.
            compile: whether torch.compile is used.
            vocab_size: 50257 or 50304.
            lr: AdamW's learning rate, above 0 and up to 1.
            text: builtin, shakespeare, or a text of your own of at least B*T+1 tokens.
            budget_gib: emulate a card of so much memory, 0.25 to 1024; 0 = the device's own.
        """
        owner = _owner(request)
        with _refusals():
            config = RunConfig(
                model=model,
                precision=precision,
                B=B,
                T=T,
                steps=steps,
                seed=seed,
                attention=attention,
                optimizer=optimizer,
                compile=compile,
                vocab_size=vocab_size,
                lr=lr,
                text=text,
                budget_gib=None if budget_gib == 0 else budget_gib,
            )
            run = await asyncio.to_thread(hub.submit, config, owner)
        yield {
            "run_id": run.id,
            "stop_token": owner,
            "config": run.config.to_dict(),
            "warnings": list(warnings_for(hub.device_info, precision)),
        }
        async for row in _rows(hub, run):
            yield row

    def stop(request: gr.Request, stop_token: str = "") -> dict:
        """Stop a run after its running step, or take it out of the line.

        Args:
            stop_token: the token from the first dict of /train; without it, the runs that this
                client started are meant.
        """
        given = isinstance(stop_token, str) and stop_token
        return {"message": hub.stop(stop_token if given else _owner(request))}

    def status() -> dict:
        """What the server does now: the running run, its figures, and how many wait."""
        run = hub.current
        if run is None:
            doing = {"state": "idle"}
            if measuring := hub.measuring:
                doing = {"state": "measuring", "message": measuring}
            return doing | {"waiting": len(hub.waiting), "finished": len(hub.finished)}
        return jsonable(
            {
                "state": run.state,
                "run_id": run.id,
                "label": run.config.label,
                "steps_done": len(run.steps),
                "steps": run.config.steps,
                "seconds_left": run.seconds_left,
                **asdict(timing(list(run.steps))),
                "waiting": len(hub.waiting),
                "finished": len(hub.finished),
            }
        )

    def device() -> dict:
        """The device in use, its memory, and what each precision means on it."""
        return replace(hub.device_info, memory_free_bytes=hub.memory_free_bytes()).to_dict()

    def memory(
        model: str = "gpt2",
        precision: str = "fp32",
        B: int = sizes["B"],
        T: int = sizes["T"],
        steps: int = sizes["steps"],
        attention: str = "manual",
        optimizer: str = "default",
        compile: bool = False,
        vocab_size: int = 50257,
        capacity_gib: float = 0.0,
        map: bool = False,
    ) -> dict:
        """The forecast of a run's peak memory, in bytes, part by part, with its verdict.

        Nothing runs. {"peak_bytes", "live_bytes", "phase", "parts", "verdict", "capacity_bytes",
        "sentence", "largest_B", "largest_T", "basis"}; with map also {"map": {"B", "T",
        "peak_bytes", "verdict"}}, rows of B with columns of T.

        Args:
            model: gpt2, gpt2-medium, gpt2-large, gpt2-xl or tiny.
            precision: fp32, tf32, bf16, fp16 or fp64.
            B: sequences a step, 1 to 256.
            T: tokens a sequence, 1 to 1024.
            steps: training steps; a single one needs less.
            attention: manual or sdpa.
            optimizer: AdamW as default or fused.
            compile: whether torch.compile is used.
            vocab_size: 50257 or 50304.
            capacity_gib: the memory of a card, 0.25 to 1024; 0 = what this device has free.
            map: forecast the whole grid of B and T too.
        """
        with _refusals():
            config = RunConfig(
                model=model,
                precision=precision,
                B=B,
                T=T,
                steps=steps,
                attention=attention,
                optimizer=optimizer,
                compile=compile,
                vocab_size=vocab_size,
            )
            capacity = hub.capacity(config) if capacity_gib == 0 else card(capacity_gib)
        told = report(config, capacity)
        return told | {"map": fit_map(config, capacity)} if map is True else told

    async def compare(
        request: gr.Request,
        precisions: str = "fp32,tf32,bf16",
        rounds: int = 1,
        model: str = "gpt2",
        B: int = sizes["B"],
        T: int = sizes["T"],
        steps: int = sizes["steps"],
        seed: int = 1337,
        attention: str = "manual",
        optimizer: str = "default",
        compile: bool = False,
        vocab_size: int = 50257,
        lr: float = 3e-4,
    ) -> AsyncIterator[dict]:
        """Race several precisions and stream what is known after every run; the last dict is whole.

        The first dict is {"stop_token"}; while the race waits, {"line"} as of /train. Then
        {"config", "device", "rounds", "message", "results", "expected", "verdicts"}: the last three
        by precision; "message" is empty until the race is over.

        Args:
            precisions: ids of fp32, tf32, bf16, fp16, fp64 with commas between.
            rounds: 1 to 20; every round runs every precision once, in turning order.
            model: gpt2, gpt2-medium, gpt2-large, gpt2-xl or tiny.
            B: sequences a step, 1 to 256.
            T: tokens a sequence, 1 to 1024.
            steps: training steps of every run, at least 3.
            seed: seed of the weights, 0 to 2147483647.
            attention: manual or sdpa.
            optimizer: AdamW as default or fused.
            compile: whether torch.compile is used.
            vocab_size: 50257 or 50304.
            lr: AdamW's learning rate, above 0 and up to 1.
        """
        owner = _owner(request)
        names = precisions.split(",") if isinstance(precisions, str) else precisions
        with _refusals():
            config = RunConfig(
                model=model,
                B=B,
                T=T,
                steps=steps,
                seed=seed,
                attention=attention,
                optimizer=optimizer,
                compile=compile,
                vocab_size=vocab_size,
                lr=lr,
            )
            race = await asyncio.to_thread(hub.compare, config, names, rounds, owner)
        async for told in _reports(hub, race, owner, race_report):
            yield told

    async def staircase(
        request: gr.Request,
        model: str = "gpt2",
        B: int = sizes["B"],
        T: int = sizes["T"],
        steps: int = sizes["steps"],
        seed: int = 1337,
    ) -> AsyncIterator[dict]:
        """Run the lesson's ladder and stream what is known after every rung; the last dict is
        whole.

        The first dict is {"stop_token"}; while the staircase waits, {"line"} as of /train. Then
        {"config", "device", "message", "lesson", "rungs"}: a dict a rung, from fp32 to fused AdamW;
        "message" is empty until the staircase is over.

        Args:
            model: gpt2, gpt2-medium, gpt2-large, gpt2-xl or tiny.
            B: sequences a step, 1 to 256.
            T: tokens a sequence, 1 to 1024.
            steps: training steps of every run, at least 3.
            seed: seed of the weights, 0 to 2147483647.
        """
        owner = _owner(request)
        with _refusals():
            config = RunConfig(model=model, B=B, T=T, steps=steps, seed=seed)
            climbed = await asyncio.to_thread(hub.climb, config, owner)
        async for told in _reports(hub, climbed, owner, staircase_report):
            yield told

    async def probe(B: int = sizes["B"], T: int = sizes["T"]) -> dict:
        """Measure this device for a step of B*T tokens; takes about 8 seconds.

        {"config", "probe", "forecasts"}: matmul FLOP/s by precision, shape and form, the
        bandwidth, the launch overhead, and by precision the step of GPT-2 124M that follows.
        Refused while a run goes on.

        Args:
            B: sequences a step, 1 to 256.
            T: tokens a sequence, 1 to 1024.
        """
        with _refusals():
            config = RunConfig(B=B, T=T, device=str(hub.device))
            found = await asyncio.to_thread(hub.probe, config.tokens_per_step)
        return probe_report(config, found)

    async def inside(
        model: str = "gpt2",
        precision: str = "fp32",
        B: int = sizes["B"],
        T: int = sizes["T"],
        seed: int = 1337,
        attention: str = "manual",
        optimizer: str = "default",
        vocab_size: int = 50257,
    ) -> dict:
        """Look into one training step on the built-in text; takes a few steps.

        {"state", "message", "clock", "profile", "casts", "values", ...}: seconds by part, matmuls,
        the types of every operation, and the sizes of weights, activations and gradients; what is
        null was not seen, and "missing" says why. Refused while a run goes on.

        Args:
            model: gpt2, gpt2-medium, gpt2-large, gpt2-xl or tiny.
            precision: fp32, tf32, bf16, fp16 or fp64.
            B: sequences a step, 1 to 256.
            T: tokens a sequence, 1 to 1024.
            seed: seed of the weights, 0 to 2147483647.
            attention: manual or sdpa.
            optimizer: AdamW as default or fused.
            vocab_size: 50257 or 50304.
        """
        with _refusals():
            config = RunConfig(
                model=model,
                precision=precision,
                B=B,
                T=T,
                seed=seed,
                attention=attention,
                optimizer=optimizer,
                vocab_size=vocab_size,
            )
            found = await asyncio.to_thread(hub.inspect, config)
        return found.to_dict()

    common: dict[str, Any] = {"concurrency_limit": None}
    gr.api(train, api_name="train", **common)
    gr.api(compare, api_name="compare", **common)
    gr.api(staircase, api_name="staircase", **common)
    gr.api(probe, api_name="probe", **common)
    gr.api(inside, api_name="inside", **common)
    gr.api(stop, api_name="stop", queue=False)
    gr.api(status, api_name="status", queue=False)
    gr.api(device, api_name="device", **common)
    gr.api(memory, api_name="memory", queue=False)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """A refusal inside is answered in its words."""
    try:
        yield
    except InputError as exc:
        raise gr.Error(str(exc), print_exception=False) from None


_Measured = TypeVar("_Measured", bound=Measured)


class _Place:
    """The place of a client's run in the line, as the dicts that tell it."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._told: str | None = None

    def news(self, run: Run) -> Iterator[dict[str, Any]]:
        """The place, where it has changed and the run still waits."""
        line = waiting_line(self._hub, run)
        if line != self._told:
            self._told = line
            if line:
                yield {"line": line}


async def _reports(
    hub: Hub,
    series: _Measured,
    owner: str,
    report: Callable[[DeviceInfo, _Measured], dict[str, Any]],
) -> AsyncIterator[dict[str, Any]]:
    """How to stop the series, its place in the line, then what is known of it after every run, and
    the whole.
    """
    yield {"stop_token": owner}
    told, place = 0, _Place(hub)
    while not series.message and (run := hub.run_of(series)):
        hub.seen()
        if series.runs_done > told:
            told = series.runs_done
            yield report(hub.device_info, series)
        for news in place.news(run):
            yield news
        await asyncio.sleep(_POLL_SEC)
    yield report(hub.device_info, series)


def _owner(request: gr.Request) -> str:
    """The token of a client's runs: its session, which only it knows; without one a new token."""
    return request.session_hash or secrets.token_urlsafe(32)


async def _rows(hub: Hub, run: Run) -> AsyncIterator[dict[str, Any]]:
    """The dicts of one run, as they come to be."""
    sent, place = 0, _Place(hub)
    while True:
        hub.seen()
        ended = run.summary  # read before the steps: after it there are no more of them
        while sent < len(run.steps):
            yield jsonable(asdict(run.steps[sent]))
            sent += 1
        if ended:
            yield {"summary": jsonable(asdict(ended))}
            return
        for news in place.news(run):
            yield news
        await asyncio.sleep(_POLL_SEC)
