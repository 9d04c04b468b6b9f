"""An inspected step in words: for each figure at most three sentences."""

from typing import Final

from gpt2demo.inspection import (
    BF16,
    FP16,
    FP16_SCALED,
    LOSS_SCALE,
    WAITING,
    Inspection,
    Matmul,
    StepProfile,
    ValueHistogram,
)

NOT_INSPECTED: Final = "Nothing was inspected yet."
GRADIENTS: Final = ("gradients of activations", "gradients of weights")

_NO_DIFFERENCE: Final = (
    "On a CPU there is no difference: each operation has ended when its call returns."
)


def headline(found: Inspection) -> str:
    """What was inspected, and how it ended where it did not end well."""
    c = found.config
    what = (
        f"{c['model']}, {c['precision']}, B={c['B']} T={c['T']}, {c['attention']} attention, "
        f"{c['optimizer']} AdamW on {found.device_name or found.device_type}"
    )
    if found.state != "finished":
        return f"{found.message} ({what})"
    return f"{what}: inspected in {found.seconds:.1f} s."


def _why_not(found: Inspection, what: str) -> tuple[str, ...]:
    """Why a part was not seen; nothing where the headline says it already."""
    why = found.missing.get(what, "")
    return () if why in ("", found.message) else (why,)


def time_words(found: Inspection) -> tuple[str, ...]:
    """Where the time goes: the step, its matmuls, the largest of them, the tensor cores."""
    told = found.profile
    if told is None:
        return _why_not(found, "profile")
    profiled = told.step_seconds * 1000
    step = f"The profiled step took {profiled:,.1f} ms"
    if found.step_ms is not None:
        step += f", an ordinary one {found.step_ms:,.1f} ms"
    step += f". The parts add up to {told.accounted:.1%} of it."
    if told.parts.get(WAITING):
        step += (
            f" The device waited {told.parts[WAITING] / told.step_seconds:.0%} of the time for the "
            "CPU to launch something."
        )
    return (step, _matmul_words(told), _largest_words(told), _tensor_core_words(told))


def _matmul_words(told: StepProfile) -> str:
    words = (
        f"Matmuls take {told.matmul_share:.0%} of the step: a faster precision speeds them up most."
    )
    if told.fused_attention_share:
        words += (
            f" SDPA's kernels take another {told.fused_attention_share:.0%}; the two matmuls "
            "inside each cannot be timed apart."
        )
    return words


def _largest_words(told: StepProfile) -> str:
    largest = told.largest_forward
    if largest is None:
        return "The largest matmul is unknown: the profiler saw no shapes."
    others = [m for m in told.matmuls if m.part not in (largest.part, "backward", "optimizer")]
    words = (
        f"The largest single matmul of the forward pass is the {largest.part}'s: "
        f"{shape(largest)}, {_flops(largest.flops)} in {largest.seconds * 1000:,.2f} ms."
    )
    if others:
        second = others[0]
        words += (
            f" The next, of the {second.part}, has {_flops(second.flops)}: the "
            f"{largest.part}'s has {largest.flops / second.flops:,.1f} times as many."
        )
    return words


def shape(matmul: Matmul) -> str:
    """The matmul as a product of shapes."""
    product = f"({matmul.M:,} x {matmul.K:,}) @ ({matmul.K:,} x {matmul.N:,})"
    return product if matmul.batch == 1 else f"{matmul.batch:,} times {product}"


def _flops(flops: float) -> str:
    for size, unit in ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if flops >= size:
            return f"{flops / size:,.1f} {unit}"
    return f"{flops:,.0f} FLOP"


def _tensor_core_words(told: StepProfile) -> str:
    share = told.tensor_core_share
    known = "unknown" if share is None else f"{share:.0%} of the step"
    return f"Time on tensor cores: {known} ({told.tensor_core_note})."


def clock_words(found: Inspection | None, device_type: str) -> str:
    """Why the clock needs a synchronize, with both readings of the same steps."""
    if found is None:
        return _NO_DIFFERENCE if device_type == "cpu" else NOT_INSPECTED
    if found.step_ms is None or found.unsynchronized_ms is None:
        return "".join(_why_not(found, "clock"))
    both = f"{found.step_ms:,.1f} ms with a synchronize, {found.unsynchronized_ms:,.1f} ms without."
    if found.device_type == "cpu":
        return f"{both} {_NO_DIFFERENCE}"
    why = (
        "The device works on its own: without a synchronize the clock reads how long the CPU took "
        "to hand the work over."
    )
    if found.config["precision"] == "fp16" and found.config["optimizer"] == "default":
        why += " The gradient scaler reads a number back in every step, and that waits as well."
    return f"{both} {why}"


def cast_words(found: Inspection) -> tuple[str, ...]:
    """What the table of casts says, and what the types cannot show."""
    casts = found.casts
    if casts is None:
        return _why_not(found, "casts")
    kinds = {
        "logits": [c.output for c in casts.operations if c.where == "lm_head"],
        "LayerNorm": [c.compute for c in casts.operations if c.operation == "layer_norm"],
        "softmax": [c.compute for c in casts.operations if c.operation == "softmax"],
        "loss": [c.compute for c in casts.operations if c.operation == "cross_entropy"],
    }
    seen = [f"{name} {' + '.join(dict.fromkeys(types))}" for name, types in kinds.items() if types]
    state = (
        f"Weights {casts.weights}, their gradients {casts.gradients}, AdamW's moments "
        f"{casts.moments}."
    )
    words = [f"In this step: {', '.join(seen)}.", state]
    softmax = kinds["softmax"]
    if found.device_type == "cpu" and any(t in ("bfloat16", "float16") for t in softmax):
        words.append(
            "On a GPU autocast casts softmax to float32; on a CPU it leaves softmax the type that "
            "it is given."
        )
    if any("16 + float32" in t for t in kinds["loss"]):
        words.append(
            "On a GPU autocast casts within the loss: its log-softmax keeps the logits' type, and "
            "what it returned is cast to float32. On a CPU the whole loss is cast."
        )
    if found.config["precision"] == "tf32":
        words.append(
            "TF32 is no type that a tensor has: where the device has it, a matmul rounds its "
            "float32 inputs inside, and nothing else changes."
        )
    return tuple(words)


def value_words(found: Inspection) -> tuple[str, ...]:
    """Why bf16 needs no scaler, fp16 does, and int8 is for inference, with this step's figures."""
    if not found.values:
        return _why_not(found, "casts")
    words = []
    activation, weight = (found.values.get(name) for name in GRADIENTS)
    if weight and weight.nonzero:
        bf16 = weight.outside[BF16]
        words.append(
            f"bf16 has float32's exponent: {bf16.underflow:,} of {weight.nonzero:,} gradients of "
            f"weights become zero and {bf16.overflow:,} infinite. So it needs no scaler."
        )
    if activation and activation.nonzero:
        fp16, scaled = activation.outside[FP16], activation.outside[FP16_SCALED]
        words.append(
            f"fp16 makes {percent(activation, fp16.underflow)} of the activations' gradients zero "
            f"and holds {percent(activation, fp16.subnormal)} with fewer bits. With the loss times "
            f"{LOSS_SCALE:,} it is {percent(activation, scaled.underflow)} and "
            f"{percent(activation, scaled.subnormal)}: that is the gradient scaler's work."
        )
    weights = found.values.get("weights")
    if weight and weight.nonzero and weights and weights.nonzero:
        words.append(
            f"int8 has 127 steps to a tensor's largest value: it makes "
            f"{percent(weight, weight.int8_zeros)} of the weights' gradients zero, but only "
            f"{percent(weights, weights.int8_zeros)} of the weights. So it can run a trained model "
            f"and not train one."
        )
    if found.config["precision"] in ("bf16", "fp16"):
        words.append(
            f"What {found.config['precision']} computed is rounded already; fp32 shows the numbers "
            "before that."
        )
    return tuple(words)


def percent(values: ValueHistogram, count: int) -> str:
    """A share of the values that are no zero; small ones keep two digits."""
    share = values.share(count)
    if share is None:
        return "unknown"
    if share == 0:
        return "0 %"
    if share < 1e-5:
        return "under 0.001 %"
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"
