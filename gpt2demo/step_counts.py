"""What one step does, counted: the matmuls' FLOPs, the bytes of all else, the operations to start.

Every count is of the eager step as torch runs it; tests hold them against torch's dispatcher.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gpt2demo.config import RunConfig
from gpt2demo.memory import num_params

FORMS: Final = ("forward", "input_gradient", "weight_gradient")
MLP: Final = "mlp"
CLASSIFIER: Final = "classifier"
SHAPES: Final = (MLP, CLASSIFIER)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Passes over one tensor, each reading or writing all of it."""

    part: str  # a key of `roofline.PART_NAMES`
    passes: int
    tensor_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes read and written in one step."""
        return self.passes * self.tensor_bytes


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
            ops += L * (_SOFTMAX_CASTS - (2 if _softmax_casts(config, device_type) else 0))
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
        # softmax, and backward
        if _softmax_casts(config, device_type):
            yield passes("scores", L * (1 + 2), scores * w)
            yield passes("scores", L * (1 + 1), scores * e)
        else:
            yield passes("scores", L * (2 + 3), scores * (w if lifted else e))
        yield passes("scores", L, T * T * w)  # bias == 0 ...
        yield passes("scores", 3 * L, T * T)  # ... a bool of a byte, read twice
        if lifted:
            casts = 2 if _softmax_casts(config, device_type) else 4
            yield passes("casts", casts * L, scores * w)
            yield passes("casts", casts * L, scores * e)

    # backward: nll_loss fills 1; log_softmax 2, backward 3: a CPU's autocast lifts it to float32
    yield passes("loss", 1, N * V * w)
    yield passes("loss", 2 + 3, N * V * (w if device_type == "cpu" else e))

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


def attention_products(config: RunConfig) -> Iterator[tuple[int, tuple[int, int]]]:
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


def _softmax_casts(config: RunConfig, device_type: str) -> bool:
    """Whether softmax itself casts what it is given: CUDA's does, from float16 to float32."""
    return device_type == "cuda" and config.precision == "fp16"


def _foreach(device_type: str) -> bool:
    """Whether torch's optimizers run over all weights at once there, of their own accord."""
    return device_type in ("cuda", "xpu")
