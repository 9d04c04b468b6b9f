"""The lesson's ladder: what each rung changes, and what it took there."""

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One rung: what it changes, and how long a step took in the lesson."""

    id: str
    name: str
    change: dict[str, Any]  # of RunConfig, kept by the rungs after it
    what: str  # one sentence
    lesson_ms: float  # a step of GPT-2 124M on an A100 at B=16, T=1024


# `lesson_ms`: Andrej Karpathy, "Let's reproduce GPT-2 (124M)", 2024, the titles of its chapters
# (https://www.classcentral.com/course/youtube-let-s-reproduce-gpt-2-124m-295231 lists them). The
# last one came with gradient clipping and weight decay groups too, which are not repeated here.
RUNGS: Final = (
    Rung(
        id="fp32",
        name="fp32",
        change={},
        what="Everything in float32, attention written out.",
        lesson_ms=1000,
    ),
    Rung(
        id="tf32",
        name="TF32",
        change={"precision": "tf32"},
        what="Matmuls round what they multiply to 10 bits after the point.",
        lesson_ms=333,
    ),
    Rung(
        id="bf16",
        name="bf16",
        change={"precision": "bf16"},
        what="Autocast: forward and loss in bfloat16, weights stay float32.",
        lesson_ms=300,
    ),
    Rung(
        id="compile",
        name="+ torch.compile",
        change={"compile": True},
        what="The compiler fuses elementwise operations, so that tensors pass memory less often.",
        lesson_ms=130,
    ),
    Rung(
        id="sdpa",
        name="+ SDPA",
        change={"attention": "sdpa"},
        what="Attention in one operation instead of five, without a T x T matrix where it can.",
        lesson_ms=96,
    ),
    Rung(
        id="vocab",
        name="+ vocabulary 50,304",
        change={"vocab_size": 50304},
        what="50,304 = 393 * 128 cuts into even tiles, at 47 more rows than are used.",
        lesson_ms=93,
    ),
    Rung(
        id="fused",
        name="+ fused AdamW",
        change={"optimizer": "fused"},
        what="The optimizer passes over the weights once instead of once an operation.",
        lesson_ms=90,
    ),
)
FIRST: Final = RUNGS[0]
LESSON_RUN: Final = {"device": "A100", "model": "gpt2", "B": 16, "T": 1024}
