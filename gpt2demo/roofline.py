"""How long a step should take, and where its time goes, from what a device was measured to do.

Three sums: the matmuls' FLOPs over their measured rates, the bytes that all else reads and writes
over the measured bandwidth, and the operations that the host starts times what one start costs.
Every count here is of the eager step as torch runs it; tests hold them against torch's dispatcher.
torch.compile fuses what lies between the matmuls: there the counts are scaled by one factor.
"""

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from gpt2demo.config import RunConfig
from gpt2demo.memory import num_params

FORMS: Final = ("forward", "input_gradient", "weight_gradient")
MLP: Final = "mlp"
CLASSIFIER: Final = "classifier"
SHAPES: Final = (MLP, CLASSIFIER)

# The parts of a step, in the order in which a page shows them.
PART_NAMES: Final = {
    "layers": "the layers' matmuls",
    "classifier": "the classifier's matmuls",
    "attention": "attention's products",
    "scores": "softmax, mask and layouts of attention",
    "activations": "LayerNorm, GELU, residuals, biases",
    "loss": "cross-entropy",
    "casts": "autocast's casts",
    "gradients": "the tied gradient, unscaling",
    "optimizer": "AdamW",
    "launches": "starting operations",
}
_MATMULS: Final = ("layers", "classifier", "attention")

# Passes over a weight in one AdamW step, a read or a write each. The default (a plain loop on a
# CPU, foreach on a GPU) runs eight operations one after another: p.mul_ 2, m.lerp_(g) 3, v.mul_ 2,
# v.addcmul_(g, g) 3, v.sqrt 2, div 2, add_ 2, p.addcdiv_(m, denom) 4. Fused reads p, g, m, v and
# writes p, m, v.
_PASSES: Final = {"default": 20, "fused": 7}

# Operations of a step as torch's dispatcher counts them, views included: a layer's, and the rest.
_LAYER_OPS: Final = {"manual": 142, "sdpa": 100}
_OTHER_OPS: Final = 37
_LAYER_CASTS: Final = 22
_OTHER_CASTS: Final = 6
_SOFTMAX_CASTS: Final = 4  # a layer's, where autocast lifts softmax to float32
_LAYER_TENSORS: Final = 12  # weights, biases and LayerNorms
_OTHER_TENSORS: Final = 4  # wte, wpe and ln_f's two
_LOOP_OPS: Final = 10  # AdamW's plain loop, a tensor; with its step count
_LISTED_OPS: Final = 2  # foreach and fused: their bookkeeping, a tensor

# What modules, autograd and Python do around an operation, in bare elementwise operations. Found
# with models 12 layers deep whose tensors hold next to nothing (64 wide, 64 tokens in the
# vocabulary, 8 in the step): forward, backward and optimizer took 2.4 to 3.7 times their operations
# times the launch overhead, over both attentions, fp32 and bf16, on a CPU with torch 2.13.
HOST_WORK: Final = 3.0

# What torch.compile leaves of the elementwise traffic and of the operations to start: the lesson's
# step on an A100 went from 300 to 130 ms by it alone.
_FUSED: Final = 1 / 3
_FUSABLE: Final = ("scores", "activations", "loss", "casts")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What one device was measured to do. A figure that is missing is unknown."""

    device_type: str  # "cpu", "cuda", ...
    tokens: int  # B*T that the matmuls were measured for
    # precision -> one of SHAPES -> one of FORMS -> FLOP/s
    flops_per_sec: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    # (bytes of the block, bytes/s read and written), small blocks first: caches are faster
    copies: tuple[tuple[int, float], ...] = ()
    launch_seconds: float | None = None  # host seconds to start one tiny operation

    def matmul(self, precision: str, shape: str, form: str) -> float | None:
        """FLOP/s of one form at one shape; None = unknown."""
        return _positive(self.flops_per_sec.get(precision, {}).get(shape, {}).get(form))

    def bandwidth(self, block_bytes: float) -> float | None:
        """Bytes/s, reads and writes counted, over a tensor of this size; None = unknown.

        Between two measured sizes the logarithms are interpolated; outside the nearest counts.
        """
        copies = [(size, rate) for size, rate in self.copies if size > 0 and _positive(rate)]
        if not copies:
            return None
        right = bisect.bisect_left(copies, (block_bytes, 0.0))
        if right in (0, len(copies)):
            return copies[min(right, len(copies) - 1)][1]
        (small, low), (large, high) = copies[right - 1 : right + 1]
        share = math.log(block_bytes / small) / math.log(large / small)
        return low * (high / low) ** share


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Passes over one tensor, each reading or writing all of it."""

    part: str  # a key of PART_NAMES
    passes: int
    tensor_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes read and written in one step."""
        return self.passes * self.tensor_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StepForecast:
    """One step as forecast. None = a rate that it needs is unknown."""

    ms_per_step: float | None
    tokens_per_sec: float | None
    parts_ms: dict[str, float | None]  # the keys of PART_NAMES; they add up to ms_per_step
    # the step if arithmetic took no time; attention's products still read and write
    ms_without_matmuls: float | None
    matmul_share: float | None  # layers, classifier and attention's products over all
    flops: dict[str, dict[str, int]]  # FLOPs a step: layers, classifier, attention -> form
    traffic_bytes: dict[str, int]  # part -> bytes read and written, products left out
    operations: int  # that the host starts
    missing: tuple[str, ...]  # what was not measured
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The forecast for JSON."""
        return asdict(self)


def training_rate(config: RunConfig, rates: Rates) -> float | None:
    """FLOP/s over a whole step's layers and classifier: all FLOPs over all time; None = unknown."""
    flops = matmul_flops(config)
    seconds = 0.0
    total = 0
    for part, shape in (("layers", MLP), ("classifier", CLASSIFIER)):
        for form in FORMS:
            rate = rates.matmul(config.precision, shape, form)
            if rate is None:
                return None
            seconds += flops[part][form] / rate
            total += flops[part][form]
    return total / seconds


def matmul_flops(config: RunConfig) -> dict[str, dict[str, int]]:
    """FLOPs of a step's matmuls by part and form, two a multiply-add.

    Attention's backward stands under `input_gradient` and `weight_gradient` in halves: it has no
    weights, but two products for each of its forward's. The fused kernel computes the scores once
    more there. All T x T scores count, though a kernel may skip the masked half.
    """
    gpt, N = config.gpt, config.tokens_per_step
    C, L = gpt.n_embd, gpt.n_layer
    product = 2 * N * config.T * C * L
    backward = product * (4 if config.attention == "manual" else 5)
    return {
        "layers": dict.fromkeys(FORMS, 2 * N * L * 12 * C * C),
        "classifier": dict.fromkeys(FORMS, 2 * N * gpt.vocab_size * C),
        "attention": {
            "forward": 2 * product,
            "input_gradient": backward // 2,
            "weight_gradient": backward - backward // 2,
        },
    }


def operations(config: RunConfig, device_type: str) -> int:
    """Operations that the host starts in one step, as torch's dispatcher counts them.

    Of foreach and fused AdamW the few kernels are left out, and their work for each tensor counted.
    """
    L = config.gpt.n_layer
    amp = config.precision in ("bf16", "fp16")
    ops = L * _LAYER_OPS[config.attention] + _OTHER_OPS
    if amp:
        ops += L * _LAYER_CASTS + _OTHER_CASTS
        if config.attention == "manual" and device_type != "cpu":
            ops += L * _SOFTMAX_CASTS
    loop = config.optimizer == "default" and not _foreach(device_type)
    return ops + (L * _LAYER_TENSORS + _OTHER_TENSORS) * (_LOOP_OPS if loop else _LISTED_OPS)


def traffic(config: RunConfig, device_type: str) -> Iterator[Traffic]:
    """All that a step reads and writes outside its matmuls and attention's products.

    Left out: biases and LayerNorm weights themselves (0.1 % of all weights), token ids, the batch's
    way to the device. `zero_grad` moves nothing: it drops the gradients.
    """
    gpt, B, T, N = config.gpt, config.B, config.T, config.tokens_per_step
    C, V, L = gpt.n_embd, gpt.vocab_size, gpt.n_layer
    amp = config.precision in ("bf16", "fp16")
    manual = config.attention == "manual"
    w = 8 if config.precision == "fp64" else 4  # bytes of a weight, a residual, a logit in the loss
    e = 2 if amp else w  # bytes of what a matmul returns
    n = N * C

    def passes(part: str, count: int, tensor_bytes: int) -> Traffic:
        return Traffic(part=part, passes=count, tensor_bytes=tensor_bytes)

    # two LayerNorms: 2 forward, 3 backward each; two residual sums: 2 in float32 forward, 3
    # backward each
    yield passes("activations", L * (2 * (2 + 3) + 2 * (2 + 3)), n * w)
    # the sums' other input; bias gradients of c_proj, c_proj and c_attn (3C wide); q, k and v's
    # gradients read to be one
    yield passes("activations", L * (2 + 5 + 3), n * e)
    yield passes("activations", L, 3 * n * e)  # and written
    yield passes("activations", L * (2 + 3 + 1), 4 * n * e)  # GELU, its backward, c_fc's bias
    # wte's rows read and written, wpe's added; ln_f; backward sums over B for wpe
    yield passes("activations", 2 + 2 + 5 + 1, n * w)
    yield passes("activations", 2 + 1 + 1, T * C * w)  # wpe's share of that

    if manual:
        # q, k, v and y laid out for the products, and so backward
        yield passes("scores", L * (8 + 6), n * e)
        scores = B * gpt.n_head * T * T
        # a GPU's autocast lifts softmax to float32, a CPU's does not
        lifted = amp and device_type != "cpu"
        yield passes("scores", L * (4 + 4), scores * e)  # scaling, mask; backward the same
        yield passes("scores", L * (2 + 3), scores * (w if lifted else e))  # softmax
        yield passes("scores", L, T * T * w)  # bias == 0 ...
        yield passes("scores", 3 * L, T * T)  # ... a bool of a byte, read twice
        if lifted:
            yield passes("casts", 4 * L, scores * w)
            yield passes("casts", 4 * L, scores * e)

    # log_softmax 2; backward: nll_loss fills 1, log_softmax 3
    yield passes("loss", 6, N * V * w)

    layer = (3 * C * C, C * C, 4 * C * C, 4 * C * C)  # c_attn, c_proj, c_fc, c_proj
    if amp:
        # into the compute dtype and back: LayerNorm's output, the gradients beside both c_proj,
        # every weight and its gradient, the logits
        for size in (w, e):
            yield passes("casts", 6 * L + 2, n * size)
            for weight in layer:
                yield passes("casts", 2 * L, weight * size)
            yield passes("casts", 2, V * C * size)
            yield passes("casts", 2, N * V * size)

    # the token embedding's own gradient, filled with zeros first, is added to the classifier's
    yield passes("gradients", 1 + 3, V * C * w)
    yield passes("gradients", 1, n * w)
    yield passes("gradients", 1, gpt.block_size * C * w)

    # foreach runs each operation over all weights, so nothing is left of one in a cache; other
    # kinds go weight by weight
    if _foreach(device_type):
        tensors = [(num_params(gpt), 1)]
    else:
        tensors = [(size, L) for size in layer] + [(V * C, 1), (gpt.block_size * C, 1)]
    for size, many in tensors:
        yield passes("optimizer", many * _PASSES[config.optimizer], size * w)
        if config.precision == "fp16":
            yield passes("gradients", 2 * many, size * w)  # the scaler divides every gradient


def step_forecast(config: RunConfig, rates: Rates) -> StepForecast:
    """The time of one step of `config`, and its parts, on the device that `rates` describes.

    On a CPU everything happens in turn and adds up. An accelerator works while the host runs ahead:
    the longer of the two counts, and `launches` is what the device waits for the host.

    Not counted: exp and tanh, which on CPUs take longer than their bytes; page faults; a clock that
    falls under load.
    """
    flops = matmul_flops(config)
    parts: dict[str, float | None] = dict.fromkeys(PART_NAMES, 0.0)  # seconds, then ms
    missing: list[str] = []

    def add(part: str, seconds: float | None) -> None:
        known = parts[part]
        parts[part] = None if seconds is None or known is None else known + seconds

    for part, shape in (("layers", MLP), ("classifier", CLASSIFIER)):
        for form in FORMS:
            rate = rates.matmul(config.precision, shape, form)
            if rate is None:
                missing.append(f"{config.precision} {shape} {form}")
            add(part, rate and flops[part][form] / rate)
    copied: list[float | None] = []
    for count, (product, product_bytes) in _products(config):
        bandwidth = rates.bandwidth(product_bytes)
        copied.append(bandwidth and count * product_bytes / bandwidth)
        add("attention", _longer(_arithmetic(config, rates, count * product), copied[-1]))
    moved: dict[str, int] = {}
    for item in traffic(config, rates.device_type):
        moved[item.part] = moved.get(item.part, 0) + item.total_bytes
        bandwidth = rates.bandwidth(item.tensor_bytes)
        left = _FUSED if config.compile and item.part in _FUSABLE else 1
        add(item.part, bandwidth and left * item.total_bytes / bandwidth)
    if not rates.bandwidth(1):
        missing.append("bandwidth")

    ops = operations(config, rates.device_type)
    launch = _positive(rates.launch_seconds)
    if launch is None:
        missing.append("launch overhead")
    host = launch and ops * HOST_WORK * launch * (_FUSED if config.compile else 1)
    work, matmuls = _sum(parts), _sum({part: parts[part] for part in _MATMULS})
    parts["launches"] = _waiting(host, work, rates.device_type)
    total = _sum(parts)
    others = None if work is None else work - (matmuls or 0.0) + sum(map(float, copied))
    rest = _sum({"work": others, "launches": _waiting(host, others, rates.device_type)})
    return StepForecast(
        ms_per_step=total and total * 1000,
        ms_without_matmuls=rest and rest * 1000,
        tokens_per_sec=total and config.tokens_per_step / total,
        parts_ms={part: None if s is None else s * 1000 for part, s in parts.items()},
        matmul_share=total and matmuls and matmuls / total,
        flops=flops,
        traffic_bytes=moved,
        operations=ops,
        missing=tuple(missing),
        notes=_notes(config, rates),
    )


def _waiting(host: float | None, work: float | None, device_type: str) -> float | None:
    """Seconds that the device waits for the host, which takes `host` to start `work` seconds."""
    if host is None or device_type == "cpu":
        return host
    return None if work is None else max(host - work, 0.0)


def _products(config: RunConfig) -> Iterator[tuple[int, tuple[int, int]]]:
    """Attention's products of a step: how many, and FLOPs and bytes of each.

    Written out, each of six reads and writes the scores, (T, T) a head; a fused kernel writes none.
    """
    gpt, N, L = config.gpt, config.tokens_per_step, config.gpt.n_layer
    e = {"bf16": 2, "fp16": 2, "fp64": 8}.get(config.precision, 4)
    n = N * gpt.n_embd
    product = 2 * config.T * n
    if config.attention == "manual":
        yield 6 * L, (product, (config.B * gpt.n_head * config.T**2 + 2 * n) * e)
    else:
        yield L, (2 * product, 4 * n * e)  # q, k, v in, y out
        yield L, (5 * product, 8 * n * e)  # q, k, v, y and its gradient in, three gradients out


def _arithmetic(config: RunConfig, rates: Rates, flops: float) -> float | None:
    """Seconds at the MLP's rate over its three forms; None = unknown."""
    per_form = [rates.matmul(config.precision, MLP, form) for form in FORMS]
    if None in per_form:
        return None
    return flops * sum(1 / rate for rate in per_form if rate) / len(FORMS)


def _longer(arithmetic: float | None, copying: float | None) -> float | None:
    """The roofline proper: what takes longer."""
    return None if arithmetic is None or copying is None else max(arithmetic, copying)


def step_forecasts(
    config: RunConfig, rates: Rates, precisions: Iterable[str]
) -> dict[str, StepForecast]:
    """`step_forecast` by precision, all else as in `config`."""
    return {p: step_forecast(replace(config, precision=p), rates) for p in precisions}


def _notes(config: RunConfig, rates: Rates) -> tuple[str, ...]:
    notes = []
    N = config.tokens_per_step
    if rates.tokens and not 0.5 <= N / rates.tokens <= 2:
        notes.append(f"Rates measured for {rates.tokens:,} tokens a step, not for {N:,}.")
    if config.compile:
        notes.append(
            "torch.compile is counted as leaving a third of the elementwise traffic and launches."
        )
    if config.attention == "sdpa":
        notes.append("SDPA is counted at the MLP's rate; its kernel was not measured.")
    return tuple(notes)


def _foreach(device_type: str) -> bool:
    """Whether torch's optimizers run over all weights at once there, of their own accord."""
    return device_type in ("cuda", "xpu")


def _sum(parts: Mapping[str, float | None]) -> float | None:
    known = [seconds for seconds in parts.values() if seconds is not None]
    return sum(known) if len(known) == len(parts) else None


def _positive(rate: float | None) -> float | None:
    """The rate, or None where it is none to divide by."""
    return rate if rate is not None and math.isfinite(rate) and rate > 0 else None
