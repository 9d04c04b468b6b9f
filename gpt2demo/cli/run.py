"""`run`: train GPT-2 and print the log line of every step, then a summary."""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from gpt2demo.cli.options import (
    add_device_option,
    add_seed_option,
    add_step_options,
    add_verb,
    given_settings,
    number,
)
from gpt2demo.cli.output import (
    Interruption,
    NotWrittenError,
    OutputLostError,
    aligned,
    gib,
    put_json,
    say,
)
from gpt2demo.cli.processes import Processes
from gpt2demo.config import (
    CORPORA,
    WARMUP_STEPS,
    InputError,
    RunConfig,
    Settings,
    default_sizes,
    shown,
)
from gpt2demo.corpora import read_upload
from gpt2demo.json_file import check_json_path
from gpt2demo.ranks import ranks_from_env
from gpt2demo.records import RunRecord, RunSummary, StepMetrics, log_line
from gpt2demo.tracking import check_project, tracked

if TYPE_CHECKING:
    from gpt2demo.device import DeviceInfo

EXIT_OTHER: Final = 1
EXIT_INTERRUPTED: Final = 130
EXIT_STATUS: Final = {  # every other state is EXIT_OTHER
    "finished": 0,
    "out of memory": 3,
    "diverged": 4,
    "interrupted": EXIT_INTERRUPTED,
}
_EXITS: Final = (
    "0 finished, 2 refused input, 3 out of memory, 4 diverged (the loss is no number any more),\n"
    "  130 interrupted (Ctrl-C or SIGTERM; what was measured is still written), 1 anything else"
)


def add(verbs: Any) -> None:
    """The verb's parser."""
    plain = RunConfig()
    run = add_verb(
        verbs,
        "run",
        _run,
        help="train GPT-2 and print one line a step, then a summary",
        description="Train GPT-2: prints the log line of every step, then a summary.",
        epilog=_EXITS,
    )
    run.set_defaults(json=None, track=None)
    add_step_options(run, plain)
    add_seed_option(run, plain)
    run.add_argument(
        "--lr",
        metavar="X",
        type=number,
        help=f"learning rate, above 0 and up to 1 (default {plain.lr:g})",
    )
    run.add_argument(
        "--budget-gib",
        metavar="X",
        type=number,
        help="emulate a card of so much memory, 0.25 to 1,024 (default: the device's own)",
    )
    add_device_option(run)
    run.add_argument(
        "--text",
        metavar="TEXT",
        help=f"{' or '.join(CORPORA)}, or a file of text (default {plain.text})",
    )
    run.add_argument(
        "--track",
        metavar="NAME",
        help="log settings and every step to trackio's project NAME, on this machine (needs the "
        "package trackio)",
    )
    run.add_argument(
        "--json", metavar="FILE", help="write the run here; - is stdout, with the log on stderr"
    )


def _run(args: argparse.Namespace, interruption: Interruption) -> int:
    processes = Processes(ranks_from_env(), interruption)
    given = given_settings(args)
    RunConfig(**given | {"text": "builtin"})  # refused before anything is read or imported
    if args.json not in (None, "-"):
        check_json_path(args.json)
    if args.track is not None:
        check_project(args.track)
    given |= _read_text(given)

    with interruption.deferred():
        from gpt2demo.device import probe_device, resolve_device, warnings_for
        from gpt2demo.ending import interrupted
        from gpt2demo.runner import check_device, execute
        from gpt2demo.train import Progress

    device = resolve_device(processes.device(given.get("device", "auto")))
    info = probe_device(str(device))
    config = RunConfig(**default_sizes(device.type) | given | {"device": str(device)})
    check_device(config, info)
    err = processes.log(sys.stderr)
    out = err if args.json == "-" else processes.log(sys.stdout)
    for warning in warnings_for(info, config.precision):
        say(f"Warning: {warning}", err)
    if config.compile:
        say("Compiling before the first step; its seconds are counted apart.", err)

    steps: list[StepMetrics] = []
    progress = Progress()
    lost: list[str] = []  # why nobody reads the output any more
    summary: RunSummary | None = None
    started = time.perf_counter()

    def on_step(step: StepMetrics) -> None:
        steps.append(step)
        try:
            say(log_line(step), out)
        except OutputLostError:
            lost.append("its output could not be written any more")
        if interruption.received:  # torch may swallow an exception inside a callback
            raise KeyboardInterrupt

    def cut_short() -> RunSummary:
        seconds = time.perf_counter() - started
        ranks = processes.ranks
        return processes.explained(
            interrupted(config, info, progress, list(steps), seconds, ranks=ranks)
        )

    def write(summary: RunSummary) -> None:
        record = RunRecord(
            config=config.to_dict(),
            device=info.to_dict(),
            steps=tuple(steps),
            summary=summary,
        )
        if args.json is not None and processes.ranks.master_process:
            put_json(args.json, record.to_dict())

    def last_words() -> None:
        ended = summary or cut_short()
        write(ended)
        processes.last_words(ended)

    interruption.last_words = last_words
    try:
        tokens = processes.meet(config, progress, _max_text_bytes())
        if args.track is not None and processes.ranks.master_process:
            execute = tracked(execute, args.track)
        summary = execute(
            config,
            info,
            on_step=on_step,
            # an interrupt that came inside a callback of torch's was swallowed there
            stop_reason=lambda: lost[0] if lost else "a signal" if interruption.received else None,
            progress=progress,
            tokens=tokens,
            max_text_bytes=_max_text_bytes(),
            ranks=processes.ranks,
        )
        interruption.held = True
        summary = processes.explained(summary)
    except KeyboardInterrupt:  # in the moment before or after `execute` minds it itself
        interruption.held = True
        summary = None
    if summary is None or (summary.state in ("error", "stopped") and interruption.received):
        summary = cut_short()
    status = EXIT_STATUS.get(summary.state, EXIT_OTHER)
    try:
        write(summary)
    except NotWrittenError as exc:
        status = status or EXIT_OTHER
        say(f"gpt2demo: {exc}", sys.stderr)
    for line in _summary_lines(config, info, steps, summary):
        say(line, out)
    processes.leave(summary)
    return status


def _memory_rows(summary: RunSummary) -> list[tuple[str, str]]:
    rows = [("peak memory", gib(summary.peak_memory_bytes, "not measured"))]
    if memory := summary.memory:
        told = f"{gib(memory.forecast_bytes)} forecast: {memory.verdict}"
        if memory.error is not None:
            told += f"; {memory.error:+.2%} against {memory.measured_by}"
        rows.append(("forecast", told))
        if memory.reserved_bytes is not None:
            rows.append(("reserved", f"{gib(memory.reserved_bytes)} (max_memory_reserved)"))
    if failed := summary.out_of_memory:
        parts = [f"{name} {gib(count)}" for name, count in failed.parts.items()]
        rows.append(("failed in", ", ".join([failed.moment, *parts])))
    return rows


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
    if s.world_size > 1:
        each = f"each with its own B={config.B}; tokens/sec is all of theirs, memory one's"
        rows.append(("processes", f"{s.world_size}, {each}"))
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
        times = f"{s.world_size} x " if s.world_size > 1 else ""
        peak = f"{times}{s.peak_flops / 1e12:,.1f} TFLOP/s"
        mfu = f"{s.mfu:.1%} of {peak} (dense peak in this precision)"
    rows.append(("MFU", mfu))
    if s.joules_per_1000_tokens is not None:
        rows.append(("energy", f"{s.joules_per_1000_tokens:,.2f} J per 1,000 tokens"))
    rows += _memory_rows(s)
    if steps:
        rows.append(("loss", f"{steps[0].loss:.4f} -> {steps[-1].loss:.4f}"))
    if s.skipped_steps:
        rows.append(("skipped", f"{s.skipped_steps} steps, by the gradient scaler"))
    if s.compile_seconds is not None:
        rows.append(("compile", f"{s.compile_seconds:.1f} s, not part of any step"))
    return ["", *aligned(rows)]
