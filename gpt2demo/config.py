"""What a run is: its settings, their limits, and the one place that checks them all."""

import os
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final


class InputError(ValueError):
    """An input was refused. The message names the field, the value and what is allowed.

    The message is made for the person who typed the value: it holds no path and no traceback.
    """

    def __init__(self, field_name: str, message: str) -> None:
        super().__init__(message)
        self.field = field_name


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """The shape of one GPT-2 model (sizes as published with GPT-2)."""

    block_size: int = 1024  # longest sequence the position table knows
    vocab_size: int = 50257  # 50,000 merges + 256 bytes + <|endoftext|>
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768


MODELS: Final[dict[str, GPTConfig]] = {
    "gpt2": GPTConfig(),
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),
    "tiny": GPTConfig(n_layer=2, n_head=2, n_embd=64),
}
PRECISIONS: Final = ("fp32", "tf32", "bf16", "fp16", "fp64")
ATTENTIONS: Final = ("manual", "sdpa")
OPTIMIZERS: Final = ("default", "fused")
VOCAB_SIZES: Final = (50257, 50304)  # 50304 = 393 * 128, the lesson's "nice number"
CORPORA: Final = ("builtin", "shakespeare")  # any other text is the visitor's own

WARMUP_STEPS: Final = 2  # left out of every average
MAX_B: Final = 256
MAX_STEPS: Final = 100_000  # of any run; the page's own limit is Settings.max_steps
MAX_SEED: Final = 2**31 - 1
MIN_BUDGET_GIB: Final = 0.25
MAX_BUDGET_GIB: Final = 1024

# torch knows no cuda:01; \d would take the digits of every script
_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:(0|[1-9][0-9]?))?")
_WHOLE = re.compile(r"[0-9]{1,9}")


def shown(value: object) -> str:
    """The value as a refusal quotes it: one line, at most 60 characters."""
    if isinstance(value, int) and abs(value) > 10**20:
        return "a number of more than 20 digits"
    if isinstance(value, str):
        text = repr(value[:60])
    else:
        try:
            text = " ".join(reprlib.repr(value).split())  # looks at the first few items only
        except ValueError:  # Python writes no number of more than 4,300 digits
            text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def _whole(name: str, value: object, low: int, high: int) -> int:
    """A whole number in low..high. 8.0 passes as 8: JSON has one kind of number."""
    allowed = f"a whole number from {low:,} to {high:,}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(name, f"{name} must be {allowed}, not {shown(value)}.")
    if not low <= value <= high or value != int(value):  # a NaN is in no range
        raise InputError(name, f"{name} must be {allowed}, not {shown(value)}.")
    return int(value)


def _integral(value: object) -> object:
    """8.0 as 8, anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> Any:
    # type and value: 1 == True and 50257.0 == 50257 in Python
    for choice in allowed:
        if type(value) is type(choice) and value == choice:
            return choice
    choices = ", ".join(map(str, allowed))
    raise InputError(name, f"{name} must be one of {choices}, not {shown(value)}.")


def check_gib(name: str, value: object) -> float | None:
    """A memory in GiB, from 0.25 to 1,024; None = none was given.

    Raises:
        InputError: naming the field `name`.
    """
    if value is None:
        return None
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not MIN_BUDGET_GIB <= value <= MAX_BUDGET_GIB:
        raise InputError(
            name,
            f"{name} must be a number from {MIN_BUDGET_GIB} to {MAX_BUDGET_GIB:,} (GiB) or "
            f"nothing, not {shown(value)}.",
        )
    return float(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The settings of one run, checked. Page, command line and API all go through it.

    `text` names a corpus ("builtin", "shakespeare") or is the visitor's own text itself; the own
    text is never shown by `repr`, `label` or `to_dict`.

    Raises:
        InputError: (a ValueError) naming the field, the value and the allowed range.
    """

    model: str = "gpt2"
    precision: str = "fp32"
    B: int = 4  # sequences a step
    T: int = 32  # tokens a sequence
    steps: int = 20
    attention: str = "manual"
    optimizer: str = "default"
    compile: bool = False
    vocab_size: int = 50257
    lr: float = 3e-4
    seed: int = 1337
    device: str = "auto"
    budget_gib: float | None = None  # act as a card of so much memory; None = the device's own
    text: str = field(default="builtin", repr=False)

    def __post_init__(self) -> None:
        model = _one_of("model", self.model, tuple(MODELS))
        checked = {
            "model": model,
            "precision": _one_of("precision", self.precision, PRECISIONS),
            "B": _whole("B", self.B, 1, MAX_B),
            "T": _whole("T", self.T, 1, MODELS[model].block_size),
            "steps": _whole("steps", self.steps, 1, MAX_STEPS),
            "attention": _one_of("attention", self.attention, ATTENTIONS),
            "optimizer": _one_of("optimizer", self.optimizer, OPTIMIZERS),
            "compile": _one_of("compile", self.compile, (False, True)),
            "vocab_size": _one_of("vocab_size", _integral(self.vocab_size), VOCAB_SIZES),
            "seed": _whole("seed", self.seed, 0, MAX_SEED),
            "lr": self.lr,
        }
        lr = self.lr
        if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 < lr <= 1:
            raise InputError("lr", f"lr must be a number above 0 and up to 1, not {shown(lr)}.")
        checked["lr"] = float(lr)
        checked["budget_gib"] = check_gib("budget_gib", self.budget_gib)
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise InputError(
                "device",
                f"device must be auto, cpu, cuda, cuda:N, mps, xpu or xpu:N, not "
                f"{shown(self.device)}.",
            )
        if not isinstance(self.text, str):
            raise InputError("text", f"text must be a text, not {shown(self.text)}.")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def gpt(self) -> GPTConfig:
        """The model's shape with this run's vocabulary."""
        return replace(MODELS[self.model], vocab_size=self.vocab_size)

    @property
    def tokens_per_step(self) -> int:
        """B*T, the tokens one step trains on."""
        return self.B * self.T

    @property
    def text_name(self) -> str:
        """Which text: the corpus's name, or "own"."""
        return self.text if self.text in CORPORA else "own"

    @property
    def label(self) -> str:
        """The curve's name: precision, B and T, and whatever differs from the lesson's start."""
        parts = [self.precision, f"B={self.B}", f"T={self.T}"]
        plain = RunConfig()
        parts += [
            str(getattr(self, name))
            for name in ("model", "attention")
            if getattr(self, name) != getattr(plain, name)
        ]
        if self.optimizer != plain.optimizer:
            parts.append(f"{self.optimizer} AdamW")
        if self.compile:
            parts.append("compiled")
        if self.vocab_size != plain.vocab_size:
            parts.append(f"V={self.vocab_size}")
        if self.budget_gib is not None:
            parts.append(f"in {self.budget_gib:g} GiB")
        return " ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The settings for JSON; an own text appears as "own" only."""
        settings = {f.name: getattr(self, f.name) for f in fields(self)}
        return settings | {"text": self.text_name}


def default_sizes(device_type: str) -> dict[str, int]:
    """The sizes a page or command line starts from on "cpu" or on any accelerator."""
    if device_type == "cpu":
        return {"B": 4, "T": 32, "steps": 20}
    return {"B": 4, "T": 1024, "steps": 50}


def on_zero_gpu(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this is a ZeroGPU Space, as the package `spaces` reads it."""
    return environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Limits that protect a public page. Each is read from the environment variable
    `GPT2DEMO_` + its name in capitals; the README lists them all.

    Raises:
        InputError: when a variable is set to anything but a whole number in its range.
    """

    max_steps: int = 1_000  # most steps of one run
    max_seconds: int = 1_800  # a run is stopped after this many seconds
    max_line: int = 10  # runs that may wait in line
    max_line_per_visitor: int = 4  # of those, from one visitor
    orphan_seconds: int = 60  # a run nobody watches, its owner gone, is stopped after this
    max_text_mib: int = 16  # largest own text
    max_finished: int = 50  # finished runs kept for the table
    max_board: int = 500  # finished runs kept on the board, over restarts
    max_pages: int = 200  # open at once; and threads, one of which a streaming script holds

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "Settings":
        """The settings that `environ` asks for, defaults elsewhere."""
        found = {}
        for f in fields(cls):
            name = f"GPT2DEMO_{f.name.upper()}"
            if name in environ:
                text = environ[name].strip()
                value = int(text) if _WHOLE.fullmatch(text) else text
                found[f.name] = _whole(name, value, 1, 10_000_000)
        return cls(**found)
