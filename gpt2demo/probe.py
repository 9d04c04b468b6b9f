"""Probe this device: how fast its matmuls, its memory and its starts really are, in seconds.

Datasheets give peaks; a training step sees what is measured here, at GPT-2's own shapes and in the
very modes that a run sets.
"""

import collections
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import torch
from torch.nn import functional as F  # noqa: N812

from gpt2demo import accelerator
from gpt2demo.config import PRECISIONS, GPTConfig, InputError, RunConfig
from gpt2demo.device import DeviceInfo, memory_free_bytes
from gpt2demo.malloc import keep_large_blocks
from gpt2demo.oom import is_out_of_memory
from gpt2demo.peaks import peak_flops
from gpt2demo.precision import PRECISION, Precision, autocast, precision_scope
from gpt2demo.records import jsonable
from gpt2demo.roofline import Rates, step_forecasts, training_rate
from gpt2demo.step_counts import CLASSIFIER, FORMS, MLP, SHAPES

PROBE_SECONDS: Final = 8.0  # the time a probe gives itself

# Blocks to copy: in the first caches, where a step's activations are, and well above every cache.
_COPY_BYTES: Final = (2**18, 2**21, 2**23, 2**25, 2**28)
_BRIEFLY: Final = 0.02  # the share of the time that each of them, and the launches, may take
_LAUNCHES: Final = 500  # in a row, without a synchronize between
_SAMPLE_SECONDS: Final = 0.002  # a clock and a synchronize must not show
_REPEATS: Final = 11
_MANY: Final = 100  # of what is so short that a program beside it could spoil eleven in a row
_CALLS: Final = 3  # of a measurement, at least: one to warm up, two measured
_COLD: Final = 12  # weights in turn, one a layer: none is in a cache when its turn comes
_COLD_BYTES: Final = 2**28
_MOST_PIECES: Final = 16  # of the classifier's weight
_MOST_TOKENS: Final = 8192  # above, rates do not change any more, and logits take gigabytes
_CAUTION: Final = 2.0  # a first guess may be so many times too quick
_SHARE_OF_FREE: Final = 0.8  # of a CPU's free memory: Linux ends who takes all

_OUT_OF_MEMORY: Final = "out of memory"
_STOPPED: Final = "stopped before its turn"

Call = Callable[[int], object]  # the number picks the weight


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """What a probe found. What is not in it was not measured; `skipped` says why."""

    device_type: str
    device_name: str | None
    tokens: int  # B*T that was asked for
    rates: Rates  # for `roofline.step_forecast`
    # precision -> shape -> form -> the tokens it was measured at, where the time allowed fewer
    fewer_tokens: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    # FLOP/s over a GPT-2 step's layers and classifier, all three forms: work over time
    training_flops_per_sec: dict[str, float | None] = field(default_factory=dict)
    # of the datasheet's dense peak, 1.0 = the peak; None = no peak is known
    peak_share: dict[str, float | None] = field(default_factory=dict)
    bandwidth_bytes_per_sec: float | None  # copying a block above the caches, read and written
    launch_seconds: float | None  # of one tiny operation
    seconds: float  # that the probe took
    stopped: bool  # before its end
    skipped: dict[str, str] = field(default_factory=dict)  # what -> why, in words
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        return asdict(self)


def probe_report(config: RunConfig, found: ProbeResult) -> dict[str, Any]:
    """`config`, `probe` and, by precision, `forecasts` of its step, as strict JSON takes them."""
    told = step_forecasts(config, found.rates, found.training_flops_per_sec)
    return jsonable(
        {
            "config": config.to_dict(),
            "probe": found.to_dict(),
            "forecasts": {precision: step.to_dict() for precision, step in told.items()},
        }
    )


def probe_rates(
    info: DeviceInfo,
    tokens: int,
    *,
    gpt: GPTConfig | None = None,
    precisions: Sequence[str] = PRECISIONS,
    seconds: float = PROBE_SECONDS,
    should_stop: Callable[[], bool] = lambda: False,
) -> ProbeResult:
    """Measure the device in about `seconds`, whatever is slow on it.

    Each precision multiplies in its own mode (`precision_scope`, `autocast`) with inputs in its
    compute dtype: the forward x @ W.T, the gradient of the input g @ W and of the weight g.T @ x,
    for the MLP (tokens x C -> 4C) and the classifier (tokens x C -> vocabulary). A shape starts
    with a few tokens and grows as far as its share of the time allows. Nothing else may run on the
    device meanwhile.

    Args:
        info: the device.
        tokens: B*T of the step that is asked about, at least 1.
        gpt: the model's shape; None = GPT-2 124M.
        precisions: which; those not available here are skipped.
        seconds: the time to keep to.
        should_stop: asked between two measurements; the result then holds what there is.

    Raises:
        InputError: none of the precisions is available on the device.
    """
    skipped = {
        name: info.support[name].reason
        for name in precisions
        if info.support[name].status == "not available"
    }
    names = [name for name in precisions if name not in skipped]
    if not names:
        reasons = " ".join(dict.fromkeys(skipped.values()))
        raise InputError("device", f"Nothing can be measured on device {info.type}. {reasons}")
    device = torch.device(info.type) if info.index is None else torch.device(info.type, info.index)
    work = _Probe(
        device=device,
        gpt=gpt or GPTConfig(),
        tokens=min(tokens, _MOST_TOKENS),
        seconds=seconds,
        should_stop=should_stop,
        skipped=skipped,
    )
    try:
        with keep_large_blocks(), torch.no_grad():
            work.run(names)
    finally:
        work.drop()
        accelerator.free_memory(device)
    return _result(info, tokens, work, names)


@dataclass(kw_only=True)
class _Probe:
    """One probe under way."""

    device: torch.device
    gpt: GPTConfig
    tokens: int
    seconds: float
    should_stop: Callable[[], bool]
    skipped: dict[str, str]
    started: float = field(default_factory=time.perf_counter)
    stopped: bool = False
    calls: int = 0  # so far
    launch_seconds: float | None = None
    copies: list[tuple[int, float]] = field(default_factory=list)
    # (precision, shape, form) -> FLOP/s, and the tokens it was measured at
    flops_per_sec: dict[tuple[str, str, str], float] = field(default_factory=dict)
    measured_at: dict[tuple[str, str, str], int] = field(default_factory=dict)
    pieces: dict[str, int] = field(default_factory=dict)  # precision -> of the classifier's weight
    held: collections.deque = field(default_factory=lambda: collections.deque(maxlen=1))
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def run(self, names: Sequence[str]) -> None:
        """Measure all, the cheap first: what they leave of the time is the classifier's."""
        if self._may_go_on():
            self._attempt("launch overhead", self._launches)
        for size in _COPY_BYTES:
            if self._may_go_on():
                self._attempt(
                    f"copies of {size / 2**20:g} MiB", functools.partial(self._copy, size)
                )
        left = [(shape, name) for shape in SHAPES for name in names]
        while left and not self.stopped:  # a shape asks before each of its forms
            # an equal share of what is left for everything that is left
            share = self._seconds_left() / len(left)
            shape, name = left.pop(0)
            with precision_scope(PRECISION[name]):
                self._shape(PRECISION[name], shape, share)
        for shape, name in left:
            for form in FORMS:
                self.skipped[f"{name} {shape} {form}"] = _STOPPED

    def drop(self) -> None:
        """Hold no tensor any more."""
        self.held.clear()

    def _seconds_left(self) -> float:
        return max(self.seconds - (time.perf_counter() - self.started), 0.0)

    def _may_go_on(self) -> bool:
        self.stopped = self.stopped or self.should_stop()
        return not self.stopped

    def _attempt(self, what: str, measure: Callable[[], None]) -> str | None:
        """Measure; memory that runs out and an operation that torch lacks are noted.

        Returns:
            why it was not measured, or None.
        """
        reason = None
        try:
            measure()
        except _DoesNotFit as exc:
            reason = str(exc)
        except (RuntimeError, MemoryError) as exc:
            if is_out_of_memory(exc):
                reason = _OUT_OF_MEMORY
            elif isinstance(exc, NotImplementedError) or "not implemented for" in str(exc):
                reason = "torch has no such operation here"
            else:
                raise
        if reason:
            self.skipped[what] = reason
        if reason == _OUT_OF_MEMORY:  # outside the except block: its traceback holds the tensors
            self.drop()
            accelerator.free_memory(self.device)
        return reason

    def _launches(self) -> None:
        x = torch.ones(1, device=self.device)

        def many(_: int) -> None:
            for _ in range(_LAUNCHES):
                x.mul_(1.0)

        many(0)
        self.launch_seconds = self._median(many, _BRIEFLY * self.seconds, _MANY) / _LAUNCHES

    def _copy(self, size: int) -> None:
        self._must_fit(2 * size)
        source = torch.ones(size // 4, device=self.device)
        target = source.clone()
        seconds = self._median(lambda _: target.copy_(source), _BRIEFLY * self.seconds, _MANY)
        self.copies.append((size, 2 * size / seconds))

    def _shape(self, precision: Precision, shape: str, share: float) -> None:
        """All three forms at one shape, each in a third of `share` seconds."""
        C = self.gpt.n_embd
        out, pieces, copies = 4 * C, 1, _COLD
        if shape == CLASSIFIER:
            # the weight alone is above the caches; in pieces where all of it would take too long
            out, copies = self.gpt.vocab_size, 1
            whole = 2.0 * self.tokens * out * C / self._slowest(precision)
            needed = _CAUTION * _CALLS * len(FORMS) * whole
            pieces = math.ceil(min(max(needed / max(share, 1e-9), 1), _MOST_PIECES))
            self.pieces[precision.id] = pieces
        dtype = precision.autocast_dtype or precision.weight_dtype
        weights: list[torch.Tensor] = []

        def make() -> None:
            self._must_fit(2 * copies * out * C * dtype.itemsize)
            weight = self._random(out, C, dtype)
            for _ in range(copies - 1):
                weights.append(weight.clone())
            rows = out // pieces
            weights.extend(weight[i * rows : (i + 1) * rows] for i in range(pieces))

        before = time.perf_counter()
        reason = self._attempt(f"{precision.id} {shape}", make)
        share = max(share - (time.perf_counter() - before), 0.0)
        for form in FORMS:
            what = f"{precision.id} {shape} {form}"
            if reason or not self._may_go_on():
                self.skipped[what] = reason or _STOPPED
            else:
                measure = functools.partial(self._form, precision, shape, form, weights)
                self._attempt(what, functools.partial(measure, share / len(FORMS)))
            self.drop()

    def _slowest(self, precision: Precision) -> float:
        """FLOP/s of the slowest form at the MLP's shape; infinite where none was measured."""
        known = [self.flops_per_sec.get((precision.id, MLP, form)) for form in FORMS]
        return min([rate for rate in known if rate], default=math.inf)

    def _form(
        self,
        precision: Precision,
        shape: str,
        form: str,
        weights: list[torch.Tensor],
        share: float,
    ) -> None:
        """One form at the most tokens that fit into `share` seconds."""
        deadline = time.perf_counter() + share
        flops_per_token = 2 * weights[0].numel()
        tokens = 1
        if shape == CLASSIFIER:
            known = self.flops_per_sec.get((precision.id, MLP, form))
            if known is None:
                raise _DoesNotFit("the same form was not measured at the MLP's shape")
            # the same arithmetic at another shape tells what to begin with
            token_seconds = _CAUTION * flops_per_token / known
            if token_seconds > share:
                raise _DoesNotFit(
                    f"too slow: one token may take {token_seconds:.2g} s, and {share:.2g} s were "
                    f"left for it"
                )
            tokens = max(min(int(share / (_CALLS * token_seconds)), self.tokens), 1)
        with autocast(precision, self.device.type) if form == "forward" else nullcontext():
            while True:
                call = self._call(form, weights, tokens, bias=shape == MLP)  # lm_head has none
                taken = self._timed(call, 1)
                left = deadline - time.perf_counter()
                # if time grows with the tokens, at worst
                most = min(int(tokens * left / (_CALLS * taken)), 64 * tokens, self.tokens)
                if most < min(1.5 * tokens, self.tokens) or most == tokens:
                    break
                tokens = most
            seconds = self._median(call, left) if left > 0 else taken
        self.flops_per_sec[precision.id, shape, form] = tokens * flops_per_token / seconds
        self.measured_at[precision.id, shape, form] = tokens

    def _call(self, form: str, weights: list[torch.Tensor], tokens: int, *, bias: bool) -> Call:
        """One product of `tokens` rows with the weight that the call's number picks."""
        out, C = weights[0].shape
        dtype = weights[0].dtype
        result = {"forward": tokens * out, "input_gradient": tokens * C}.get(form, out * C)
        # what a training step writes is new memory too, not what the call before wrote
        ring = max(min(_COLD, _COLD_BYTES // (result * dtype.itemsize)), 1)
        self._must_fit((2 * tokens * (C + out) + ring * result) * dtype.itemsize)
        self.held = collections.deque(maxlen=ring)
        hold = self.held.append
        many = len(weights)
        x = g = b = None
        if form != "input_gradient":
            x = self._random(tokens, C, dtype)
        if form != "forward":
            g = self._random(tokens, out, dtype)
        if form == "forward" and bias:
            b = self._random(1, out, dtype)[0]

        def call(i: int) -> None:
            if form == "forward":
                hold(_forward(x, weights[i % many], b))
            elif form == "input_gradient":
                hold(_input_gradient(g, weights[i % many]))
            else:
                hold(_weight_gradient(g, x))

        return call

    def _random(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Numbers as weights have them, a few rows drawn and repeated: on a CPU drawing is slow."""
        # a generator of its own: whoever drew from torch's goes on as if nothing had been
        tile = torch.randn(min(rows, 64), columns, generator=self.generator).mul_(0.02)
        tile = tile.to(dtype=dtype, device=self.device)
        return tile.repeat(math.ceil(rows / len(tile)), 1)[:rows]

    def _median(self, call: Call, share: float, most: int = _REPEATS) -> float:
        """Median seconds a call, over as many samples as `share` seconds hold, `most` at most.

        The caller has made a first call, which is warm-up.
        """
        deadline = time.perf_counter() + share
        taken = self._timed(call, 1)
        calls = max(min(math.ceil(_SAMPLE_SECONDS / max(taken, 1e-9)), 100), 1)
        samples = [self._timed(call, calls) if calls > 1 else taken]
        while len(samples) < most and time.perf_counter() + samples[-1] * calls < deadline:
            samples.append(self._timed(call, calls))
        return statistics.median(samples)

    def _timed(self, call: Call, calls: int) -> float:
        """Seconds a call of `calls` in a row."""
        accelerator.synchronize(self.device)
        t0 = time.perf_counter()
        for _ in range(calls):
            self.calls += 1
            call(self.calls)
        accelerator.synchronize(self.device)
        return (time.perf_counter() - t0) / calls

    def _must_fit(self, size: int) -> None:
        """Refuse what a CPU's free memory cannot hold, before Linux ends the process for it."""
        if self.device.type == "cpu":
            free = memory_free_bytes(self.device)
            if free is not None and size > _SHARE_OF_FREE * free:
                raise _DoesNotFit(
                    f"{_OUT_OF_MEMORY}: it takes {size / 2**30:.2f} GiB and "
                    f"{free / 2**30:.2f} GiB are free"
                )


class _DoesNotFit(Exception):  # noqa: N818
    """A measurement does not fit into the time or the memory; the message says why."""


# The three products as autograd calls them for F.linear.


def _forward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, w, b)  # (N, C) @ (C, out) -> (N, out)


def _input_gradient(g: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return g.mm(w)  # (N, out) @ (out, C) -> (N, C)


def _weight_gradient(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return g.t().mm(x)  # (out, N) @ (N, C) -> (out, C)


def _result(info: DeviceInfo, tokens: int, work: _Probe, names: Sequence[str]) -> ProbeResult:
    rates: dict[str, dict[str, dict[str, float]]] = {}
    fewer: dict[str, dict[str, dict[str, int]]] = {}
    for (name, shape, form), rate in work.flops_per_sec.items():
        rates.setdefault(name, {}).setdefault(shape, {})[form] = rate
        at = work.measured_at[name, shape, form]
        if at < tokens:
            fewer.setdefault(name, {}).setdefault(shape, {})[form] = at
    measured = Rates(
        device_type=info.type,
        tokens=tokens,
        flops_per_sec=rates,
        copies=tuple(work.copies),
        launch_seconds=work.launch_seconds,
    )
    plain = RunConfig(B=1, T=1)
    training = {name: training_rate(replace(plain, precision=name), measured) for name in names}
    peaks = {name: peak_flops(info.name, info.memory_total_bytes, name) for name in names}
    shares = {
        name: rate / peak if (rate := training[name]) and (peak := peaks[name]) else None
        for name in names
    }
    largest = work.copies[-1] if work.copies else None
    return ProbeResult(
        device_type=info.type,
        device_name=info.name,
        tokens=tokens,
        rates=measured,
        fewer_tokens=fewer,
        training_flops_per_sec=training,
        peak_share=shares,
        bandwidth_bytes_per_sec=largest[1] if largest else None,
        launch_seconds=work.launch_seconds,
        seconds=time.perf_counter() - work.started,
        stopped=work.stopped,
        skipped=work.skipped,
        notes=_notes(work, fewer, largest),
    )


def _notes(
    work: _Probe, fewer: dict[str, dict[str, dict[str, int]]], largest: tuple[int, float] | None
) -> tuple[str, ...]:
    notes = []
    if largest and largest[0] < _COPY_BYTES[-1]:
        notes.append(
            f"Bandwidth is of blocks of {largest[0] / 2**20:g} MiB, which a cache may hold."
        )
    for name, shapes in fewer.items():
        for shape, forms in shapes.items():
            least = min(forms.values())
            notes.append(f"{name}, {shape}: measured at {least:,} tokens to save time.")
    for name, pieces in work.pieces.items():
        if pieces > 1 and any(key[:2] == (name, CLASSIFIER) for key in work.flops_per_sec):
            notes.append(f"{name}, {CLASSIFIER}: measured in {pieces} pieces of the vocabulary.")
    if work.tokens == _MOST_TOKENS and any(fewer.values()):
        notes.append(f"No shape is measured at more than {_MOST_TOKENS:,} tokens.")
    return tuple(notes)
