"""`probe`: what this device really does, measured in seconds, and the step that follows from it."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpt2demo.cli.options import add_device_option, add_verb, number
from gpt2demo.cli.output import Interruption, aligned, put_json, say
from gpt2demo.config import MAX_B, MODELS, RunConfig, default_sizes
from gpt2demo.json_file import check_json_path
from gpt2demo.roofline import PART_NAMES, StepForecast, step_forecasts
from gpt2demo.step_counts import FORMS, SHAPES

if TYPE_CHECKING:
    from gpt2demo.probe import ProbeResult

_SHAPE_NAMES = {"mlp": "MLP", "classifier": "classifier"}
_FORM_NAMES = {"forward": "forward", "input_gradient": "dx", "weight_gradient": "dW"}
_UNKNOWN = "unknown"


def add(verbs: Any) -> None:
    """The verb's parser."""
    cpu, gpu = default_sizes("cpu"), default_sizes("cuda")
    longest = max(gpt.block_size for gpt in MODELS.values())
    parser = add_verb(
        verbs,
        "probe",
        _probe,
        help="measure this device's matmuls, memory and launches, and forecast a step from them",
        description=(
            "Measure this device for about 8 seconds: the matmul rate of every precision at "
            "GPT-2's shapes, copy bandwidth, launch overhead; and forecast a step of GPT-2 124M."
        ),
        epilog="0 printed, 2 refused input, 130 interrupted, 1 anything else",
    )
    parser.set_defaults(json=None)
    parser.add_argument(
        *("-B", "--batch-size"),
        dest="B",
        metavar="N",
        type=number,
        help=f"sequences a step, 1 to {MAX_B} (default {cpu['B']})",
    )
    parser.add_argument(
        *("-T", "--seq-len"),
        dest="T",
        metavar="N",
        type=number,
        help=f"tokens a sequence, 1 to {longest:,} (default {cpu['T']} on a CPU, {gpu['T']:,} "
        "elsewhere)",
    )
    add_device_option(parser)
    parser.add_argument("--json", metavar="FILE", help="write JSON here; - is stdout")


def _probe(args: argparse.Namespace, interruption: Interruption) -> int:
    given = {name: vars(args)[name] for name in ("B", "T", "device") if name in vars(args)}
    RunConfig(**given)  # refused before anything is imported
    if args.json not in (None, "-"):
        check_json_path(args.json)
    with interruption.deferred():
        from gpt2demo.device import probe_device, resolve_device
        from gpt2demo.probe import probe_rates, probe_report

    device = resolve_device(given.get("device", "auto"))
    config = RunConfig(**default_sizes(device.type) | given | {"device": str(device)})
    info = probe_device(str(device))
    found = probe_rates(info, config.tokens_per_step, should_stop=lambda: interruption.received)
    if found.stopped:  # torch may swallow an exception inside a call
        raise KeyboardInterrupt
    if args.json is not None:
        put_json(args.json, probe_report(config, found))
    if args.json == "-":
        return 0
    forecasts = step_forecasts(config, found.rates, found.training_flops_per_sec)
    say("\n".join(_lines(config, found, forecasts)), sys.stdout)
    return 0


def _lines(
    config: RunConfig, found: "ProbeResult", forecasts: dict[str, StepForecast]
) -> list[str]:
    copying, launch = _UNKNOWN, _UNKNOWN
    if found.rates.copies and found.bandwidth_bytes_per_sec:
        block, rate = max(found.rates.copies, key=lambda copy: copy[1])
        copying = (
            f"{_gb(found.bandwidth_bytes_per_sec)} in blocks of "
            f"{found.rates.copies[-1][0] / 2**20:g} MiB, at best {_gb(rate)} in "
            f"{block / 2**20:g} MiB (read and written)"
        )
    if found.launch_seconds is not None:
        launch = f"{found.launch_seconds * 1e6:.1f} microseconds to start one tiny operation"
    tokens = f"{config.tokens_per_step:,} tokens (B={config.B} T={config.T})"
    lines = aligned(
        [
            ("device", f"{config.device}, {found.device_name or 'name unknown'}"),
            ("measured", f"in {found.seconds:.1f} s, for a step of {tokens}"),
            ("copying", copying),
            ("launching", launch),
        ]
    )
    lines += ["", "Matmuls, TFLOP/s: forward, gradients of the input (dx) and of the weight (dW)"]
    columns = [(shape, form) for shape in SHAPES for form in FORMS]
    heads = [f"{_SHAPE_NAMES[shape]} {_FORM_NAMES[form]}" for shape, form in columns]
    lines += _table(
        [
            ["", *heads, "training mix", "of the peak"],
            *(
                [
                    name,
                    *(_tflops(found.rates.matmul(name, *column)) for column in columns),
                    _tflops(found.training_flops_per_sec[name]),
                    _share(found.peak_share[name]),
                ]
                for name in forecasts
            ),
        ]
    )
    lines += ["", "Forecast of a step of GPT-2 124M, manual attention, default AdamW"]
    lines += _table(
        [
            ["", "ms/step", "tokens/sec", "matmuls", "where most of the time goes"],
            *([name, *_forecast_cells(told)] for name, told in forecasts.items()),
        ]
    )
    apart = [("not measured", f"{what}: {why}") for what, why in found.skipped.items()]
    apart += [("note", note) for note in found.notes]
    return [*lines, "", *aligned(apart)] if apart else lines


def _forecast_cells(told: StepForecast) -> list[str]:
    if told.ms_per_step is None or told.tokens_per_sec is None:
        return [_UNKNOWN, _UNKNOWN, _UNKNOWN, f"not measured: {', '.join(told.missing)}"]
    parts = {name: ms for name, ms in told.parts_ms.items() if ms}
    most = sorted(parts, key=parts.__getitem__, reverse=True)[:3]
    where = ", ".join(f"{PART_NAMES[name]} {parts[name]:,.1f} ms" for name in most)
    return [
        f"{told.ms_per_step:,.1f}",
        f"{told.tokens_per_sec:,.0f}",
        _share(told.matmul_share),
        where,
    ]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the columns one below another, numbers to the right, words to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _tflops(rate: float | None) -> str:
    return _UNKNOWN if rate is None else f"{rate / 1e12:#.3g}"


def _gb(rate: float) -> str:
    return f"{rate / 1e9:,.1f} GB/s"


def _share(share: float | None) -> str:
    return _UNKNOWN if share is None else f"{share:.0%}"
