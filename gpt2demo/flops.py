"""How many floating-point operations a step takes, and what share of the peak that is."""

from gpt2demo.config import GPTConfig


def flops_per_token(gpt: GPTConfig, T: int) -> float:
    """FLOPs of forward and backward for one token in a sequence of length T.

    Counts the matmuls, two FLOPs a multiply-add: the four projections and the MLP of each layer
    (12*C*C weights), the classifier (V*C) and attention's two T x T products, all T positions
    computed, as torch does. Backward takes twice the forward. Left out, well under 1 %: LayerNorm,
    softmax, GELU, embeddings, the optimizer. Work done twice (the scores in a fused kernel's
    backward) counts once.
    """
    C = gpt.n_embd
    weights = gpt.n_layer * 12 * C * C + gpt.vocab_size * C
    attention = gpt.n_layer * 2 * T * C
    forward = 2 * (weights + attention)
    return 3.0 * forward


def mfu(
    flops_per_token: float, tokens_per_sec: float | None, peak_flops: float | None
) -> float | None:
    """Model FLOPs utilization: achieved over the device's dense peak (1.0 = the peak).

    None where the speed or the peak is unknown.
    """
    if tokens_per_sec is None or peak_flops is None:
        return None
    return flops_per_token * tokens_per_sec / peak_flops
