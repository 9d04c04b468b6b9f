"""The command line: the same runs and figures without a browser. Each verb is one function.

Torch takes seconds to import, so only a verb that needs it does: help and refusals come at once.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, TextIO

from gpt2demo.config import (
    ATTENTIONS,
    CORPORA,
    MAX_B,
    MAX_SEED,
    MAX_STEPS,
    MODELS,
    OPTIMIZERS,
    PRECISIONS,
    VOCAB_SIZES,
    WARMUP_STEPS,
    InputError,
    RunConfig,
    Settings,
    default_sizes,
    shown,
)
from gpt2demo.corpora import read_upload
from gpt2demo.json_file import check_json_path, reason, strict_json, write_json
from gpt2demo.records import RunRecord, RunSummary, StepMetrics, jsonable, log_line

if TYPE_CHECKING:
    from gpt2demo.device import DeviceInfo

EXIT_REFUSED: Final = 2
EXIT_OTHER: Final = 1
EXIT_INTERRUPTED: Final = 130
EXIT_STATUS: Final = {  # every other state is EXIT_OTHER
    "finished": 0,
    "out of memory": 3,
    "diverged": 4,
    "interrupted": EXIT_INTERRUPTED,
}
_EXITS: Final = """exit status:
  0 finished, 2 refused input, 3 out of memory, 4 diverged (the loss is no number any more),
  130 interrupted (Ctrl-C or SIGTERM; what was measured is still written), 1 anything else"""
_GIB: Final = 2**30


@dataclass(kw_only=True, slots=True)
class Interruption:
    """What the process's signals and a verb tell each other; `__main__` ties it to the signals."""

    received: bool = False  # a signal came: the verb is to end
    held: bool = False  # no KeyboardInterrupt now: the result is being written
    last_words: Callable[[], None] = lambda: None  # writes what there is, from another thread

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold a KeyboardInterrupt back until the block's end: in an import, torch aborts on it."""
        self.held = True
        try:
            yield
        finally:
            self.held = False
        if self.received:
            raise KeyboardInterrupt


class _OutputLostError(Exception):
    """A line could not be written: the reader of the pipe has left, or the disk is full."""


def main(argv: Sequence[str] | None = None, interruption: Interruption | None = None) -> int:
    """Run one command line, `argv` without the program's name; its exit status comes back.

    Raises:
        SystemExit: argparse's own, after --help (0) and an unknown or incomplete option (2).
    """
    args = build_parser().parse_args(argv)
    try:
        return args.verb(args, interruption or Interruption())
    except InputError as exc:
        refusal, status = str(exc), EXIT_REFUSED
    except KeyboardInterrupt:
        refusal, status = "Interrupted; nothing was measured.", EXIT_INTERRUPTED
    except _OutputLostError as exc:
        refusal, status = str(exc), EXIT_OTHER
    if refusal:
        with contextlib.suppress(_OutputLostError):
            _say(f"gpt2demo: {refusal}", sys.stderr)
    return status


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs; `args.verb` is the verb's function."""
    parser = argparse.ArgumentParser(
        prog="python -m gpt2demo",
        description="Train GPT-2 and see what a precision buys on this machine, without a browser.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB", dest="name")
    for add in (_add_run, _add_device):
        add(verbs)
    return parser


# --- run


def _add_run(verbs: Any) -> None:
    plain, cpu, gpu = RunConfig(), default_sizes("cpu"), default_sizes("cuda")
    longest = max(gpt.block_size for gpt in MODELS.values())

    def choice(values: Sequence[object], default: object) -> str:
        return f"{', '.join(map(str, values))} (default {default})"

    def size(name: str, most: int) -> str:
        elsewhere = "" if cpu[name] == gpu[name] else f" on a CPU, {gpu[name]:,} elsewhere"
        return f"1 to {most:,} (default {cpu[name]:,}{elsewhere})"

    run = verbs.add_parser(
        "run",
        help="train GPT-2 and print one line a step, then a summary",
        description="Train GPT-2: prints the log line of every step, then a summary.",
        epilog=_EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # what is not given is not there
        allow_abbrev=False,
    )
    run.set_defaults(verb=_run, json=None)
    run.add_argument("--model", metavar="NAME", help=choice(tuple(MODELS), plain.model))
    run.add_argument("--precision", metavar="ID", help=choice(PRECISIONS, plain.precision))
    sizes = {
        "B": ("-B", "--batch-size", "sequences a step, " + size("B", MAX_B)),
        "T": ("-T", "--seq-len", "tokens a sequence, " + size("T", longest)),
    }
    for name, (short, long, text) in sizes.items():
        run.add_argument(short, long, dest=name, metavar="N", type=_number, help=text)
    run.add_argument("--steps", metavar="N", type=_number, help=size("steps", MAX_STEPS))
    run.add_argument(
        "--seed", metavar="N", type=_number, help=f"0 to {MAX_SEED:,} (default {plain.seed})"
    )
    run.add_argument("--attention", metavar="KIND", help=choice(ATTENTIONS, plain.attention))
    run.add_argument("--optimizer", metavar="KIND", help=choice(OPTIMIZERS, plain.optimizer))
    run.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="use torch.compile (default no)"
    )
    run.add_argument(
        "--vocab-size", metavar="N", type=_number, help=choice(VOCAB_SIZES, plain.vocab_size)
    )
    run.add_argument(
        "--lr",
        metavar="X",
        type=_number,
        help=f"learning rate, above 0 and up to 1 (default {plain.lr:g})",
    )
    _add_device_option(run)
    run.add_argument(
        "--text",
        metavar="TEXT",
        help=f"{' or '.join(CORPORA)}, or a file of text (default {plain.text})",
    )
    run.add_argument(
        "--json", metavar="FILE", help="write the run here; - is stdout, with the log on stderr"
    )


def _number(text: str) -> int | float | str:
    """The number that was typed; what is none stays a text, for RunConfig to refuse by name."""
    if "_" not in text:  # Python takes 1_000 for a number
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(text)
    return text


def _run(args: argparse.Namespace, interruption: Interruption) -> int:
    names = {f.name for f in fields(RunConfig)}
    given = {name: value for name, value in vars(args).items() if name in names}
    RunConfig(**given | {"text": "builtin"})  # refused before anything is read or imported
    if args.json not in (None, "-"):
        check_json_path(args.json)
    given |= _read_text(given)

    with interruption.deferred():
        from gpt2demo.device import probe_device, resolve_device, warnings_for
        from gpt2demo.runner import check_device, execute, interrupted
        from gpt2demo.train import Progress

    device = resolve_device(given.get("device", "auto"))
    info = probe_device(str(device))
    config = RunConfig(**default_sizes(device.type) | given | {"device": str(device)})
    check_device(config, info)
    for warning in warnings_for(info, config.precision):
        _say(f"Warning: {warning}", sys.stderr)
    if config.compile:
        _say("Compiling before the first step; its seconds are counted apart.", sys.stderr)

    out = sys.stderr if args.json == "-" else sys.stdout
    steps: list[StepMetrics] = []
    progress = Progress()
    lost: list[str] = []  # why nobody reads the output any more
    summary: RunSummary | None = None
    started = time.perf_counter()

    def on_step(step: StepMetrics) -> None:
        steps.append(step)
        try:
            _say(log_line(step), out)
        except _OutputLostError:
            lost.append("its output could not be written any more")
        if interruption.received:  # torch may swallow an exception inside a callback
            raise KeyboardInterrupt

    def cut_short() -> RunSummary:
        return interrupted(config, info, progress, list(steps), time.perf_counter() - started)

    def write() -> None:
        record = RunRecord(
            config=config.to_dict(),
            device=info.to_dict(),
            steps=tuple(steps),
            summary=summary or cut_short(),
        )
        if args.json == "-":
            _say(strict_json(record.to_dict()), sys.stdout)
        elif args.json is not None:
            write_json(args.json, record.to_dict())

    interruption.last_words = write
    try:
        summary = execute(
            config,
            info,
            on_step=on_step,
            stop_reason=lambda: lost[0] if lost else None,
            progress=progress,
            max_text_bytes=_max_text_bytes(),
        )
        interruption.held = True
    except KeyboardInterrupt:  # in the moment before or after `execute` minds it itself
        interruption.held = True
        summary = None
    if summary is None or (summary.state == "error" and interruption.received):
        summary = cut_short()
    status = EXIT_STATUS.get(summary.state, EXIT_OTHER)
    try:
        write()
    except OSError as exc:
        status = status or EXIT_OTHER
        _say(f"gpt2demo: {shown(args.json)} was not written ({reason(exc)}).", sys.stderr)
    for line in _summary_lines(config, info, steps, summary):
        _say(line, out)
    return status


def _read_text(given: dict[str, Any]) -> dict[str, str]:
    """The text as RunConfig takes it: a corpus's name, or the words of the file."""
    path = given.get("text", "builtin")
    if path in CORPORA:
        return {"text": path}
    most = _max_text_bytes()
    try:
        text = read_upload(path, most)
    except InputError as exc:
        raise InputError("text", f"--text {shown(path)}: {exc}") from exc
    # a file that holds no more than the word "builtin" is a text all the same
    return {"text": f"{text}\n" if text in CORPORA else text}


def _max_text_bytes() -> int:
    return Settings.from_env().max_text_mib * 2**20


def _summary_lines(
    config: RunConfig, info: "DeviceInfo", steps: Sequence[StepMetrics], summary: RunSummary
) -> list[str]:
    s = summary
    rows = [("state", s.message)]
    rows += [("note", note) for note in s.notes]
    size = f", {s.parameters:,} parameters" if s.parameters else ""
    rows.append(("model", f"{config.model}{size}, {config.precision}, B={config.B} T={config.T}"))
    rows.append(("device", f"{config.device}, {info.name or 'name unknown'}"))
    if s.step_ms_median is None:
        rows.append(("step", f"not measured: the first {WARMUP_STEPS} steps are warm-up"))
    else:
        rows += [
            (
                "step",
                f"{s.step_ms_median:,.2f} ms median, {s.step_ms_p25:,.2f} to {s.step_ms_p75:,.2f} "
                f"ms (p25 to p75) over {s.steps_measured} steps without warm-up",
            ),
            ("speed", f"{s.tokens_per_sec_median:,.2f} tokens/sec median"),
        ]
    mfu = "unknown"
    if s.mfu is not None and s.peak_flops is not None:
        mfu = f"{s.mfu:.1%} of {s.peak_flops / 1e12:,.1f} TFLOP/s (dense peak in this precision)"
    rows.append(("MFU", mfu))
    unmeasured = "not measured on a CPU" if info.type == "cpu" else "unknown"
    rows.append(("peak memory", _gib(s.peak_memory_bytes, unmeasured)))
    if steps:
        rows.append(("loss", f"{steps[0].loss:.4f} -> {steps[-1].loss:.4f}"))
    if s.skipped_steps:
        rows.append(("skipped", f"{s.skipped_steps} steps, by the gradient scaler"))
    if s.compile_seconds is not None:
        rows.append(("compile", f"{s.compile_seconds:.1f} s, not part of any step"))
    return ["", *_aligned(rows)]


# --- device


def _add_device(verbs: Any) -> None:
    device = verbs.add_parser(
        "device",
        help="print what this machine is and what each precision means on it",
        description="Print what this machine is and what each precision means on it.",
        epilog="exit status:\n  0 printed, 2 refused input (no such device), 1 anything else",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    device.set_defaults(verb=_device, device="auto")
    _add_device_option(device)
    device.add_argument("--json", action="store_true", help="print JSON")


def _add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", metavar="NAME", help="auto, cpu, cuda, cuda:N, mps, xpu, xpu:N (default auto)"
    )


def _device(args: argparse.Namespace, interruption: Interruption) -> int:
    RunConfig(device=args.device)
    with interruption.deferred():
        from gpt2demo.device import probe_device

    info = probe_device(args.device)
    if args.json:
        _say(strict_json(jsonable(info.to_dict())), sys.stdout)
        return 0
    where = info.type if info.index is None else f"{info.type}:{info.index}"
    nvidia = info.type == "cuda" and info.hip_version is None
    absent = "unknown" if nvidia else "none: not an NVIDIA GPU"
    rows = [
        ("device", f"{where}, {info.name or 'name unknown'}"),
        ("memory", f"{_gib(info.memory_total_bytes)} total, {_gib(info.memory_free_bytes)} free"),
        ("compute capability", info.compute_capability or absent),
        ("driver", info.driver_version or ("none: a CPU" if info.type == "cpu" else "unknown")),
        ("torch", info.torch_version),
    ]
    rows += [("problem", info.problem)] if info.problem else []
    lines = [*_aligned(rows), ""]
    lines += _aligned([(name, f"{s.status:<13}  {s.reason}") for name, s in info.support.items()])
    _say("\n".join(lines), sys.stdout)
    return 0


# --- what all verbs write with


def _say(text: str, stream: TextIO | None) -> None:
    """Print one line now.

    Raises:
        _OutputLostError: it could not be written; its message is empty where a reader just left.
    """
    if stream is None:  # closed before the start
        return
    try:
        print(text, file=stream, flush=True)
    except OSError as exc:
        reader_left = isinstance(exc, BrokenPipeError)
        message = "" if reader_left else f"The output cannot be written ({reason(exc)})."
        raise _OutputLostError(message) from exc


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows]


def _gib(count: int | None, unknown: str = "unknown") -> str:
    return unknown if count is None else f"{count / _GIB:.2f} GiB"
