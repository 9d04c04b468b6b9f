import json
import math
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt2demo import cli, device, json_file, runner
from gpt2demo.config import MAX_B, MAX_SEED, MAX_STEPS, MODELS, PRECISIONS, RunConfig
from gpt2demo.model import GPT
from gpt2demo.records import RunRecord, RunSummary, StepMetrics, timing
from gpt2demo.support import Support

ROOT = Path(__file__).resolve().parent.parent
TINY = ["run", "--model", "tiny", "--device", "cpu", "-B", "2", "-T", "8"]
LOG_LINE = re.compile(r"step (\d+), loss: (\S+), dt: (\S+)ms, tok/sec: (\S+)")


def strict(text):
    """Parse JSON as the standard has it: no NaN, no Infinity."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def read(path):
    return strict(path.read_text(encoding="ascii"))


def summary_of(**values):
    plain = {"state": "finished", "message": "Finished: 1 steps.", "steps_done": 1}
    return RunSummary(**{**plain, "steps_measured": 0, "seconds": 1.0, **values})


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """So small a model gains nothing from more threads, which wait for each other on a busy CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def executed(monkeypatch):
    """What `execute` would have run; nothing trains."""
    calls = []

    def execute(config, info, **kwargs):
        calls.append(config)
        return summary_of()

    monkeypatch.setattr(runner, "execute", execute)
    return calls


@pytest.fixture
def fail_at(monkeypatch):
    """fail_at(owner, name, n, fault): the n-th call (from 0) of owner.name does `fault` instead."""

    def patch(owner, name, n, fault):
        real = getattr(owner, name)
        calls = []

        def wrapped(*args, **kwargs):
            calls.append(1)
            if len(calls) - 1 == n:
                return fault(lambda: real(*args, **kwargs))
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)

    return patch


def raising(exc):
    def fault(go_on):
        raise exc

    return fault


# --- a run to its end


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_figures_agree_with_each_other_and_with_numpy(precision, tmp_path, capsys):
    out = tmp_path / "out.json"
    argv = [*TINY, "--precision", precision, "--steps", "7", "--json", str(out)]
    assert cli.main(argv) == 0
    record = read(out)
    steps, summary = record["steps"], record["summary"]

    assert [step["step"] for step in steps] == list(range(7))
    assert [step["is_warmup"] for step in steps] == [True, True] + [False] * 5
    for step in steps:
        assert step["tokens_per_sec"] * step["step_ms"] / 1000 == pytest.approx(2 * 8)
    assert 10.6 < steps[0]["loss"] < 11.3
    assert sum(step["step_ms"] for step in steps) / 1000 <= summary["seconds"]

    measured = np.array([step["step_ms"] for step in steps[2:]])
    assert summary["step_ms_median"] == pytest.approx(np.median(measured))
    assert summary["step_ms_p25"] == pytest.approx(np.percentile(measured, 25))
    assert summary["step_ms_p75"] == pytest.approx(np.percentile(measured, 75))
    assert summary["tokens_per_sec_median"] == pytest.approx(np.median(16 / measured * 1000))
    assert summary["state"] == "finished"
    assert (summary["steps_done"], summary["steps_measured"]) == (7, 5)
    assert summary["final_loss"] == steps[6]["loss"]
    assert record["config"]["precision"] == precision
    assert record["device"]["type"] == "cpu"

    lines = capsys.readouterr().out.splitlines()
    for step, line in zip(steps, lines, strict=False):
        number, loss, step_ms, speed = LOG_LINE.fullmatch(line).groups()
        assert int(number) == step["step"]
        assert float(loss) == pytest.approx(step["loss"], abs=1e-6)
        assert float(step_ms) == pytest.approx(step["step_ms"], abs=0.01)
        assert float(speed) == pytest.approx(step["tokens_per_sec"], abs=0.01)
    shown = dict(re.split(r"  +", line, maxsplit=1) for line in lines[8:])
    assert shown["state"] == "Finished: 7 steps."
    assert shown["step"].startswith(f"{np.median(measured):,.2f} ms median")
    assert shown["speed"] == f"{np.median(16 / measured * 1000):,.2f} tokens/sec median"
    assert shown["MFU"] == "unknown"
    memory = record["summary"]["memory"]
    held = memory["measured_bytes"]
    assert held == max(step["peak_memory_bytes"] for step in steps)
    assert shown["peak memory"] == f"{held / 2**30:.2f} GiB"
    error = (memory["forecast_bytes"] - held) / held
    assert abs(error) < 0.005
    assert f"{error:+.2%} against tensors followed" in shown["forecast"]
    assert shown["loss"] == f"{steps[0]['loss']:.4f} -> {steps[6]['loss']:.4f}"
    assert "compile" not in shown
    assert "skipped" not in shown


def test_json_reads_back_as_the_same_run(tmp_path):
    out = tmp_path / "out.json"
    assert cli.main([*TINY, "--steps", "3", "--json", str(out)]) == 0
    again = RunRecord.from_dict(read(out))
    assert again.summary.steps_done == len(again.steps) == 3
    assert strict(json.dumps(again.to_dict())) == read(out)


def test_json_to_stdout_is_alone_there(capsys):
    assert cli.main([*TINY, "--steps", "3", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert len(strict(captured.out)["steps"]) == 3
    assert [bool(LOG_LINE.fullmatch(line)) for line in captured.err.splitlines()[:4]] == [
        True,
        True,
        True,
        False,
    ]


def test_two_steps_are_warm_up_and_give_no_median(capsys):
    assert cli.main([*TINY, "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "not measured: the first 2 steps are warm-up" in out
    assert "speed" not in out


def test_summary_of_a_gpu_run_has_units(monkeypatch, capsys):
    figures = summary_of(
        notes=("A note.",),
        mfu=0.4123,
        peak_flops=989.4e12,
        peak_memory_bytes=3 * 2**30 + 2**29,
        compile_seconds=12.34,
        skipped_steps=2,
    )
    monkeypatch.setattr(runner, "execute", lambda *args, **kwargs: figures)
    assert cli.main([*TINY, "--compile"]) == 0
    out, err = capsys.readouterr()
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines()[1:])
    assert rows["note"] == "A note."
    assert rows["MFU"] == "41.2% of 989.4 TFLOP/s (dense peak in this precision)"
    assert rows["peak memory"] == "3.50 GiB"
    assert rows["compile"] == "12.3 s, not part of any step"
    assert rows["skipped"] == "2 steps, by the gradient scaler"
    assert "Compiling before the first step" in err


# --- a race


def test_compare_prints_every_run_and_the_reasons(tmp_path, capsys):
    out = tmp_path / "race.json"
    argv = ["compare", "--precisions", "fp32, tf32", "--rounds", "2", "--model", "tiny"]
    argv += ["-B", "1", "-T", "8", "--steps", "4", "--device", "cpu"]
    assert cli.main([*argv, "--json", str(out)]) == 0
    race = read(out)
    assert race["results"]["tf32"]["max_loss_difference"] == 0.0
    assert "precision" not in race["config"]
    lines = capsys.readouterr().out.splitlines()
    # the second round goes backwards
    assert [line.split(":")[0] for line in lines[:4]] == ["fp32", "tf32", "tf32", "fp32"]
    shown = dict(re.split(r"  +", line, maxsplit=1) for line in lines[5:])
    assert shown["race"] == race["message"]
    for precision, verdict in race["verdicts"].items():
        assert shown[precision] == f"{verdict['cause']}: {verdict['words']}"
    assert cli.main([*argv, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 2


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--precisions fp32,fp33", "not 'fp33'"),
        ("--precisions fp32,", "not ''"),
        ("--rounds 21", "rounds must be a whole number from 1 to 20, not 21"),
        ("--rounds many", "rounds must be"),
        ("--steps 2", "steps must be at least 3"),
        ("-B 0", "B must be a whole number"),
    ],
)
def test_compare_refuses_before_anything_starts(option, said, capsys):
    assert cli.main(["compare", *option.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def interrupted_in_the_second(monkeypatch):
    """Ctrl-C comes when the second run has begun."""
    execute, runs = runner.execute, []

    def until_the_second(config, info, **watching):
        runs.append(config)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return execute(config, info, **watching)

    monkeypatch.setattr(runner, "execute", until_the_second)


def test_a_race_that_is_interrupted_still_writes_what_was_measured(
    tmp_path, capsys, interrupted_in_the_second
):
    out = tmp_path / "race.json"
    argv = ["compare", "--precisions", "fp32,bf16", "--model", "tiny", "-B", "1", "-T", "8"]
    assert cli.main([*argv, "--steps", "4", "--device", "cpu", "--json", str(out)]) == 130
    race = read(out)
    assert race["results"]["fp32"]["state"] == "finished"
    assert race["results"]["bf16"]["state"] == "waiting"
    assert "The race was interrupted." in capsys.readouterr().out


# --- the staircase


STAIRS = ["staircase", "--model", "tiny", "-B", "1", "-T", "8", "--device", "cpu"]


def test_staircase_prints_every_rung_and_what_it_bought(tmp_path, capsys, monkeypatch):
    ran = []

    def made_up(config, info, *, on_step, **_):
        ran.append(config)
        took = 100.0 / len(ran)
        steps = [
            StepMetrics(step=i, loss=9.0, step_ms=took, tokens_per_sec=8000 / took, is_warmup=i < 2)
            for i in range(config.steps)
        ]
        for step in steps:
            on_step(step)
        fails = config.vocab_size == 50304
        return RunSummary(
            state="out of memory" if fails else "finished",
            message="Made up.",
            steps_done=config.steps,
            seconds=1.0,
            compiled=True if config.compile else None,
            **asdict(timing(steps)),
        )

    monkeypatch.setattr(runner, "execute", made_up)
    out = tmp_path / "stairs.json"
    assert cli.main([*STAIRS, "--steps", "6", "--seed", "5", "--json", str(out)]) == 0
    told = read(out)
    assert {config.seed for config in ran} == {5}
    assert [rung["rung"] for rung in told["rungs"]] == [
        *("fp32", "tf32", "bf16", "compile", "sdpa", "vocab", "fused")
    ]
    assert [rung["lesson_ms"] for rung in told["rungs"]] == [1000, 333, 300, 130, 96, 93, 90]
    assert told["rungs"][2]["speedup_first"] == pytest.approx(3.0)
    assert told["rungs"][2]["speedup_before"] == pytest.approx(1.5)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines[:7]] == ["fp32", "tf32"] + ["bf16"] * 5
    shown = dict(re.split(r"  +", line, maxsplit=1) for line in lines[8:])
    assert shown["staircase"] == told["message"]
    assert shown["bf16"].startswith("33.33 ms a step, 3.00x against fp32 (lesson 3.33x). Saves ")
    assert shown["TF32"].startswith("50.00 ms a step, 2.00x against fp32 (lesson 3.00x). no effect")
    assert cli.main([*STAIRS, "--steps", "3", "--json", "-"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rungs"]) == 7


def test_a_staircase_that_is_interrupted_still_writes_what_was_measured(
    tmp_path, capsys, interrupted_in_the_second
):
    out = tmp_path / "stairs.json"
    assert cli.main([*STAIRS, "--steps", "4", "--json", str(out)]) == 130
    states = [rung["state"] for rung in read(out)["rungs"]]
    assert states == ["finished"] + ["waiting"] * 6
    assert "The staircase was interrupted." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "said"),
    [("--steps 2", "steps must be at least 3 on the staircase, not 2"), ("-T 0", "T must be")],
)
def test_staircase_refuses_before_anything_starts(option, said, capsys):
    assert cli.main(["staircase", *option.split()]) == 2
    assert said in capsys.readouterr().err


# --- options


def test_defaults_follow_the_device(executed, monkeypatch):
    assert cli.main(["run", "--device", "cpu"]) == 0
    cpu = device.probe_device("cpu")
    monkeypatch.setattr(device, "resolve_device", lambda requested: torch.device("cuda", 1))
    monkeypatch.setattr(device, "probe_device", lambda requested: replace(cpu, type="cuda"))
    assert cli.main(["run"]) == 0
    assert cli.main(["run", "-T", "64", "--steps", "3"]) == 0
    assert [(c.device, c.B, c.T, c.steps) for c in executed] == [
        ("cpu", 4, 32, 20),
        ("cuda:1", 4, 1024, 50),
        ("cuda:1", 4, 64, 3),
    ]
    plain = RunConfig(device="cpu")
    assert executed[0] == plain


def test_every_option_reaches_the_run(executed):
    argv = "run --model gpt2-medium --precision bf16 --batch-size 3 --seq-len 1e1 --steps 8.0 "
    argv += "--seed 7 --attention sdpa --optimizer fused --compile --vocab-size 50304 --lr 1e-3 "
    argv += "--budget-gib 8 --device cpu --text builtin"
    assert cli.main(argv.split()) == 0
    assert asdict(executed[0]) == {
        "model": "gpt2-medium",
        "precision": "bf16",
        "B": 3,
        "T": 10,
        "steps": 8,
        "seed": 7,
        "attention": "sdpa",
        "optimizer": "fused",
        "compile": True,
        "vocab_size": 50304,
        "lr": 0.001,
        "device": "cpu",
        "budget_gib": 8.0,
        "text": "builtin",
    }
    assert cli.main([*argv.split(), "--no-compile"]) == 0
    assert executed[1].compile is False


def test_help_names_every_setting_limit_and_exit_status(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["run", "--help"])
    assert done.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    long = {"B": "--batch-size", "T": "--seq-len"}
    for f in fields(RunConfig):
        assert long.get(f.name, f"--{f.name.replace('_', '-')}") in text
    for limit in (MAX_B, MAX_STEPS, MAX_SEED, 1024):
        assert f"{limit:,} (default" in text
    for word in (*MODELS, *PRECISIONS, "manual, sdpa", "default, fused", "50257, 50304"):
        assert word in text
    for default in ("32 on a CPU, 1,024 elsewhere", "20 on a CPU, 50 elsewhere", "default 1337"):
        assert default in text
    for status in ("0 finished", "2 refused", "3 out of memory", "4 diverged", "130 interrupted"):
        assert status in text


def test_warnings_come_before_the_start(executed, capsys):
    assert cli.main([*TINY, "--precision", "tf32"]) == 0
    reason = device.probe_device("cpu").support["tf32"].reason
    assert capsys.readouterr().err == f"Warning: {reason}\n"


# --- refused input

WHOLE = {"B": (1, 256), "T": (1, 1024), "steps": (1, 100_000), "seed": (0, 2**31 - 1)}
BAD_NUMBERS = [
    "-1",
    "2.5",
    "true",
    "null",
    "",
    " ",
    "1e9",
    "9" * 5000,
    "NaN",
    "inf",
    "eight",
    "1_0",
]


@pytest.fixture
def untouched(monkeypatch):
    """Nothing is probed and nothing runs."""

    def never(*args, **kwargs):
        raise AssertionError("the run went on")

    monkeypatch.setattr(device, "probe_device", never)
    monkeypatch.setattr(runner, "execute", never)


def refusal(argv, capsys):
    """The one sentence of a refused command line."""
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gpt2demo: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("value", ["0", *BAD_NUMBERS])
@pytest.mark.parametrize("name", WHOLE)
def test_bad_whole_numbers_are_refused_in_words(name, value, untouched, capsys, tmp_path):
    if name == "seed":  # 0 and 1e9 are seeds
        value = {"0": "-2", "1e9": "1e10"}.get(value, value)
    out = tmp_path / "out.json"
    option = f"-{name}" if len(name) == 1 else f"--{name}"
    err = refusal(["run", option, value, "--json", str(out)], capsys)
    low, high = WHOLE[name]
    assert f"{name} must be a whole number from {low:,} to {high:,}, not " in err
    quoted = err.partition(", not ")[2].strip("'.\n")
    if value in ("NaN", "inf", "1e9", "1e10", "9" * 5000):
        assert float(quoted) == float(value) or (value, quoted) == ("NaN", "nan")
    else:
        assert quoted == value
    assert not out.exists()


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "NaN", "inf", "", "true", "fast"])
def test_bad_learning_rates_are_refused_in_words(value, untouched, capsys):
    err = refusal(["run", "--lr", value], capsys)
    assert "lr must be a number above 0 and up to 1, not " in err


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--model", "gpt3", "gpt2, gpt2-medium, gpt2-large, gpt2-xl, tiny"),
        ("--precision", "FP16", "fp32, tf32, bf16, fp16, fp64"),
        ("--precision", "null", "fp32, tf32, bf16, fp16, fp64"),
        ("--attention", "", "manual, sdpa"),
        ("--optimizer", "sgd", "default, fused"),
        ("--vocab-size", "50300", "50257, 50304"),
        ("--vocab-size", "50257.5", "50257, 50304"),
        ("--vocab-size", "large", "50257, 50304"),
        ("--device", "tpu", "auto, cpu, cuda, cuda:N, mps, xpu or xpu:N"),
        ("--device", "cuda:-1", "auto, cpu, cuda, cuda:N, mps, xpu or xpu:N"),
    ],
)
def test_bad_choices_are_refused_in_words(option, value, allowed, untouched, capsys):
    err = refusal(["run", option, value], capsys)
    assert option[2:].replace("-", "_") in err
    assert allowed in err
    assert value in err


def test_seq_len_above_the_position_table(untouched, capsys):
    err = refusal(["run", "-T", "1025"], capsys)
    assert "T must be a whole number from 1 to 1,024, not 1025." in err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["fly"],
        ["run", "-B"],
        ["run", "--bogus", "1"],
        ["run", "extra"],
        ["run", "--mod", "tiny"],
    ],
)
def test_incomplete_or_unknown_words_exit_2(argv, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(argv)
    assert done.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_device_that_is_not_here(capsys):
    if torch.cuda.device_count() > 7:
        pytest.skip("this machine has eight GPUs")
    for argv in (["run", "--device", "cuda:7"], ["device", "--device", "cuda:7", "--json"]):
        assert "device cuda:7 is not here" in refusal(argv, capsys)


def test_precision_that_the_device_lacks(executed, monkeypatch, capsys):
    info = device.probe_device("cpu")
    lacking = info.support | {"fp64": Support(status="not available", reason="Metal has none.")}
    monkeypatch.setattr(device, "probe_device", lambda name: replace(info, support=lacking))
    err = refusal(["run", "--device", "cpu", "--precision", "fp64"], capsys)
    assert "fp64 is not available here: Metal has none." in err
    assert executed == []


# --- the text


def test_own_text_from_a_file(tmp_path, capsys):
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        path = tmp_path / f"{encoding}.txt"
        path.write_text("Größe und Maß. " * 30, encoding=encoding)
        out = tmp_path / f"{encoding}.json"
        assert cli.main([*TINY, "--steps", "3", "--text", str(path), "--json", str(out)]) == 0
    records = [read(tmp_path / f"{encoding}.json") for encoding in ("utf-8", "utf-8-sig", "utf-16")]
    losses = [[step["loss"] for step in record["steps"]] for record in records]
    assert losses[0] == losses[1] == losses[2]
    assert records[0]["config"]["text"] == "own"
    assert "Größe" not in out.read_text(encoding="utf-8")
    capsys.readouterr()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file or directory"),
        (b"", "text is empty"),
        (b"Too short.", "one step of B=2 T=8 needs at least 17"),
        (b"builtin", "one step of B=2 T=8 needs at least 17"),  # its words, not a corpus's name
        ("naïve".encode("cp1252"), "byte 0xEF at position 2"),
        (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    ],
)
def test_unfit_texts_are_refused_in_words(content, words, tmp_path, capsys):
    path, out = tmp_path / "own.txt", tmp_path / "out.json"
    if content is not None:
        path.write_bytes(content)
    assert words in refusal([*TINY, "--text", str(path), "--json", str(out)], capsys)
    assert not out.exists()


def test_folder_or_nothing_as_text(tmp_path, untouched, capsys):
    assert "Is a directory" in refusal(["run", "--text", str(tmp_path)], capsys)
    assert "--text '': " in refusal(["run", "--text", ""], capsys)


def test_too_large_a_text_and_its_setting(tmp_path, monkeypatch, untouched, capsys):
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        file.truncate(300 * 2**20)  # sparse: takes no space
    assert "300.0 MiB" in refusal(["run", "--text", str(path)], capsys)
    monkeypatch.setenv("GPT2DEMO_MAX_TEXT_MIB", "17")
    assert "at most 17.0 MiB" in refusal(["run", "--text", str(path)], capsys)
    monkeypatch.setenv("GPT2DEMO_MAX_TEXT_MIB", "much")
    assert "gpt2demo: GPT2DEMO_MAX_TEXT_MIB must be" in refusal(
        ["run", "--text", str(path)], capsys
    )


# --- the JSON file


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "No such file or directory"),
        ("no/such/folder/out.json", "No such file or directory"),
        (".", "Is a directory"),
        ("a" * 300, "File name too long"),
        ("file/out.json", "Not a directory"),
        ("zero\0byte", "not a file's name"),
    ],
)
def test_unwritable_json_is_refused_before_the_start(
    name, reason, tmp_path, monkeypatch, untouched, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    err = refusal(["run", "--json", name], capsys)
    assert "--json " in err
    assert f"cannot be written ({reason})" in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="a folder no user can write to")
def test_json_in_a_read_only_folder_is_refused(monkeypatch, untouched, capsys):
    monkeypatch.chdir("/proc")
    assert "cannot be written" in refusal(["run", "--json", "out.json"], capsys)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_write_protected_json_is_refused(tmp_path, untouched, capsys):
    out = tmp_path / "out.json"
    out.write_text("kept")
    out.chmod(0o444)
    assert "Permission denied" in refusal(["run", "--json", str(out)], capsys)


def test_failed_write_keeps_the_old_file(tmp_path, executed, monkeypatch, capsys):
    out = tmp_path / "out.json"
    out.write_text("old")

    def full(source, target):
        assert read(Path(source))["summary"]["state"] == "finished"  # whole before it replaces
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert cli.main([*TINY, "--json", str(out)]) == 1
    captured = capsys.readouterr()
    assert "was not written (No space left on device)" in captured.err
    assert "Finished" in captured.out
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    "argv",
    [
        ["memory", "--capacity-gib", "8"],
        ["compare", "--precisions", "fp32", "--device", "cpu", *TINY[1:], "--steps", "3"],
    ],
)
def test_a_result_that_cannot_be_written_is_said_by_every_verb(tmp_path, monkeypatch, capsys, argv):
    out = tmp_path / "out.json"
    out.write_text("old")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert cli.main([*argv, "--json", str(out)]) == 1
    assert "was not written (No space left on device)" in capsys.readouterr().err
    assert out.read_text() == "old"


def test_json_through_a_link_and_into_pipes(tmp_path, executed):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    assert cli.main([*TINY, "--json", str(link)]) == 0
    assert link.is_symlink()
    assert read(target)["summary"]["state"] == "finished"
    # A named pipe stands for devices too. Never /dev/null itself: broken code, run by root, would
    # replace it for the whole machine.
    named = tmp_path / "pipe"
    os.mkfifo(named)
    reader = os.open(named, os.O_RDONLY | os.O_NONBLOCK)
    assert cli.main([*TINY, "--json", str(named)]) == 0
    assert stat.S_ISFIFO(named.stat().st_mode)
    with open(reader, encoding="ascii") as pipe:
        assert strict(pipe.read())["summary"]["state"] == "finished"
    near, far = os.pipe()
    assert cli.main([*TINY, "--json", f"/dev/fd/{far}"]) == 0
    os.close(far)
    with open(near, encoding="ascii") as pipe:
        assert strict(pipe.read())["summary"]["state"] == "finished"


def test_long_runs_are_strict_json_too():
    steps = [{"step": i, "loss": None, "loss_flag": "nan"} for i in range(6_000)]
    assert strict(json_file.strict_json({"steps": steps})) == {"steps": steps}


# --- runs that end badly


OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
OOM_IN_WORDS = (
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
)


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (GPT, "forward", OOM),
        (torch.Tensor, "backward", RuntimeError(OOM_IN_WORDS[0])),
        (torch.Tensor, "backward", RuntimeError(OOM_IN_WORDS[1])),
        (torch.optim.AdamW, "step", OOM),
    ],
)
def test_out_of_memory_exits_3_and_keeps_the_curve(owner, name, fault, fail_at, tmp_path, capsys):
    out = tmp_path / "out.json"
    argv = [*TINY, "--steps", "3", "--json", str(out)]
    fail_at(owner, name, 2, raising(fault))
    assert cli.main(argv) == 3
    record = read(out)
    assert record["summary"]["state"] == "out of memory"
    assert "B=2, T=8, fp32" in record["summary"]["message"]
    assert [step["step"] for step in record["steps"]] == [0, 1]
    assert "Out of memory in step 2" in capsys.readouterr().out
    assert cli.main(argv) == 0  # the fault is spent: the next run is fine
    assert len(read(out)["steps"]) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_divergence_exits_4_with_a_flag_beside_null(bad, fail_at, tmp_path, capsys):
    out = tmp_path / "out.json"

    def not_finite(go_on):
        logits, loss = go_on()
        return logits, loss * bad

    fail_at(GPT, "forward", 5, not_finite)
    assert cli.main([*TINY, "--steps", "9", "--json", str(out)]) == 4
    record = read(out)
    assert record["summary"]["state"] == "diverged"
    assert len(record["steps"]) == 6
    assert record["steps"][5]["loss"] is None
    assert record["steps"][5]["loss_flag"] == repr(bad)
    assert record["summary"]["final_loss_flag"] == repr(bad)
    assert "loss_flag" not in record["steps"][4]
    assert "Diverged at step 5" in capsys.readouterr().out


def test_another_error_exits_1_and_is_not_called_memory(fail_at, tmp_path, capsys):
    out = tmp_path / "out.json"
    shape = RuntimeError("The size of tensor a (8) must match the size of tensor b (9)")
    fail_at(GPT, "forward", 3, raising(shape))
    assert cli.main([*TINY, "--steps", "4", "--json", str(out)]) == 1
    record = read(out)
    assert record["summary"]["state"] == "error"
    assert len(record["steps"]) == 3
    assert "memory" not in record["summary"]["message"]
    capsys.readouterr()


# --- interrupted: where the signal falls


def test_interrupt_inside_a_step_keeps_what_was_measured(fail_at, tmp_path, capsys):
    out = tmp_path / "out.json"
    fail_at(torch.Tensor, "backward", 3, raising(KeyboardInterrupt()))
    assert cli.main([*TINY, "--steps", "9", "--json", str(out)]) == 130
    record = read(out)
    assert record["summary"]["state"] == "interrupted"
    assert len(record["steps"]) == record["summary"]["steps_done"] == 3
    assert record["summary"]["step_ms_median"] == record["steps"][2]["step_ms"]
    assert "Interrupted after 3 of 9 steps." in capsys.readouterr().out


def test_interrupt_after_the_last_step_keeps_the_steps(fail_at, tmp_path, capsys):
    out = tmp_path / "out.json"

    def late(go_on):
        go_on()
        raise KeyboardInterrupt

    fail_at(runner, "execute", 0, late)
    assert cli.main([*TINY, "--steps", "4", "--json", str(out)]) == 130
    record = read(out)
    assert record["summary"]["state"] == "interrupted"
    assert len(record["steps"]) == 4
    measured = [step["step_ms"] for step in record["steps"][2:]]
    assert record["summary"]["step_ms_median"] == pytest.approx(np.median(measured))
    assert record["summary"]["final_loss"] == record["steps"][3]["loss"]
    assert record["summary"]["parameters"] == 3_382_080
    capsys.readouterr()


def test_interrupt_before_the_run_says_so(fail_at, tmp_path, capsys):
    out = tmp_path / "out.json"
    fail_at(device, "probe_device", 0, raising(KeyboardInterrupt()))
    assert cli.main([*TINY, "--json", str(out)]) == 130
    assert capsys.readouterr().err == "gpt2demo: Interrupted; nothing was measured.\n"
    assert not out.exists()


def test_swallowed_interrupt_ends_the_run_at_the_next_step(tmp_path, capsys):
    out = tmp_path / "out.json"
    interruption = cli.Interruption()
    lines = []

    class Stream:
        def write(self, text):
            lines.append(text)
            interruption.received = True  # a signal whose exception got lost

        def flush(self):
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", Stream())
        assert cli.main([*TINY, "--steps", "9", "--json", str(out)], interruption) == 130
    assert len(read(out)["steps"]) == 1


# --- device


def test_device_json_is_the_probe(capsys):
    assert cli.main(["device", "--device", "cpu", "--json"]) == 0
    found = strict(capsys.readouterr().out)
    expected = json.loads(json.dumps(asdict(device.probe_device("cpu"))))
    for info in (found, expected):
        info.pop("memory_free_bytes")
    assert found == expected
    assert set(found["support"]) == set(PRECISIONS)


def test_device_panel_reads_without_json(monkeypatch, capsys):
    cpu = device.probe_device("cpu")
    fake = replace(
        cpu,
        type="cuda",
        index=1,
        name="NVIDIA T4",
        compute_capability="7.5",
        driver_version="570.1",
        memory_total_bytes=15 * 2**30,
        memory_free_bytes=None,
        torch_version="2.13.0",
        problem="Something is off.",
    )
    monkeypatch.setattr(device, "probe_device", lambda requested: fake)
    assert cli.main(["device"]) == 0
    out = capsys.readouterr().out
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines() if line)
    assert rows["device"] == "cuda:1, NVIDIA T4"
    assert rows["memory"] == "15.00 GiB total, unknown free"
    assert rows["compute capability"] == "7.5"
    assert rows["driver"] == "570.1"
    assert rows["torch"] == "2.13.0"
    assert rows["problem"] == "Something is off."
    for precision in PRECISIONS:
        support = cpu.support[precision]
        assert re.split(r"  +", rows[precision]) == [support.status, support.reason]


# --- the process: signals, pipes, locale, imports


# the ordinary environment: PYTHONUNBUFFERED would hide what a buffer does to a broken pipe
PLAIN_ENV = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
PLAIN_ENV |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(*argv, module="gpt2demo", script=None, env=(), **kwargs):
    """`python -m module argv`, or `script` with argv, as a process of its own."""
    program = ["-c", textwrap.dedent(script)] if script else ["-m", module]
    kwargs = {"cwd": ROOT, "text": True, "env": PLAIN_ENV | dict(env)} | kwargs
    return subprocess.Popen(
        [sys.executable, *program, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **kwargs,
    )


def end(process, seconds=60):
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()  # only where it has not ended
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    return process.returncode, out, err


def test_run_in_the_c_locale_and_a_read_only_folder_without_gradio(tmp_path):
    out = tmp_path / "out.json"
    script = """
        import sys
        from gpt2demo.__main__ import main
        status = main()
        print(sorted({"gradio", "plotly", "pandas"} & set(sys.modules)), file=sys.stderr)
        sys.exit(status)
    """
    process = start(
        *TINY,
        *("--steps", "3", "--json", str(out)),
        script=script,
        cwd="/proc" if os.path.isdir("/proc/self") else "/",
        env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    )
    status, text, err = end(process)
    assert status == 0
    assert err == "[]\n"
    assert len(LOG_LINE.findall(text)) == len(read(out)["steps"]) == 3


def test_refusals_and_help_do_not_wait_for_torch():
    script = """
        import sys
        from gpt2demo import cli
        assert cli.main(["run", "-B", "2.5"]) == 2
        try:
            cli.main(["run", "--help"])
        except SystemExit:
            pass
        print("torch" in sys.modules)
    """
    status, out, _ = end(start(script=script))
    assert status == 0
    assert out.endswith("\nFalse\n")


def test_sigterm_in_the_middle_keeps_every_printed_step(tmp_path):
    out = tmp_path / "out.json"
    process = start(*TINY, "--steps", "100000", "--json", str(out))
    printed = [process.stdout.readline() for _ in range(5)]
    t0 = time.monotonic()
    process.send_signal(signal.SIGTERM)
    status, rest, err = end(process, 10)
    assert time.monotonic() - t0 < 10
    assert status == 130
    record = read(out)
    assert record["summary"]["state"] == "interrupted"
    assert len(record["steps"]) == len(LOG_LINE.findall("".join(printed) + rest)) >= 5
    assert "Interrupted after" in rest
    assert err == ""
    assert os.listdir(tmp_path) == ["out.json"]


# The write takes a second, and says when it begins.
SLOW_WRITE = """
    import sys, time
    from gpt2demo import json_file
    from gpt2demo.__main__ import main
    plain = json_file.strict_json
    def slow(data):
        print("writing", file=sys.stderr, flush=True)
        time.sleep(1)
        return plain(data)
    json_file.strict_json = slow
    sys.exit(main())
"""


def test_second_ctrl_c_during_the_write_loses_nothing(tmp_path):
    out = tmp_path / "out.json"
    process = start(*TINY, "--steps", "100000", "--json", str(out), script=SLOW_WRITE)
    assert LOG_LINE.match(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "writing\n"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    status, _, _ = end(process, 10)
    assert status == 130
    assert read(out)["summary"]["state"] == "interrupted"


def test_first_ctrl_c_after_the_run_is_too_late_to_change_it(tmp_path):
    out = tmp_path / "out.json"
    process = start(*TINY, "--steps", "3", "--json", str(out), script=SLOW_WRITE)
    assert process.stderr.readline() == "writing\n"
    process.send_signal(signal.SIGINT)
    status, text, _ = end(process, 10)
    assert status == 0
    assert read(out)["summary"]["state"] == "finished"
    assert "Finished: 3 steps." in text


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="locks glibc's mutex")
def test_step_that_never_returns_to_python_ends_all_the_same(tmp_path):
    out = tmp_path / "out.json"
    script = """
        import ctypes, sys
        from gpt2demo import __main__ as process, runner
        process.GRACE_SECONDS = 1
        plain = runner.train
        def train(*args):
            for step in plain(*args):
                yield step
                if step.step == 2:  # as in one long call into C: no Python handler ever runs
                    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
                    while True:
                        try:
                            print("stuck", file=sys.stderr, flush=True)
                            while True:
                                libc.pthread_mutex_lock(mutex)
                        except KeyboardInterrupt:  # it came before the second lock
                            pass
        runner.train = train
        sys.exit(process.main())
    """
    process = start(*TINY, "--steps", "9", "--json", str(out), script=script)
    assert process.stderr.readline() == "stuck\n"
    process.send_signal(signal.SIGINT)
    status, _, err = end(process, 10)
    assert status == 130
    assert "Interrupted" in err
    record = read(out)
    assert record["summary"]["state"] == "interrupted"
    assert len(record["steps"]) == 3


def test_grace_leaves_time_for_the_write():
    from gpt2demo import __main__ as process

    assert process.GRACE_SECONDS + process._WRITING_SECONDS < 10


# A verb in place of `device` that needs no torch.
INSTEAD = """
    import runpy, sys, time
    from gpt2demo import cli
    def verb(args, interruption):
        {body}
        return 0
    cli.device._device = verb
    runpy.run_module("gpt2demo", run_name="__main__")
"""


def test_signal_during_an_import_waits_for_its_end():
    body = """
        with interruption.deferred():
            print("importing", flush=True)
            time.sleep(1)
            print("imported", flush=True)
        print("went on", flush=True)
    """
    script = INSTEAD.format(body=textwrap.indent(textwrap.dedent(body), " " * 8).strip())
    process = start("device", script=script)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    status, out, err = end(process, 10)
    assert status == 130
    assert out == "imported\n"
    assert err == "gpt2demo: Interrupted; nothing was measured.\n"


def test_signal_on_an_ignored_sigint_still_counts():
    """A shell starts background jobs with SIGINT ignored."""
    script = INSTEAD.format(body='print("here", flush=True); time.sleep(30)')
    process = start(
        "device", script=script, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
    )
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    assert end(process, 10)[0] == 130


def test_interrupt_inside_an_exec_still_exits_130(tmp_path):
    """Under -m, Python would end itself by SIGINT then, although the exception was caught."""
    script = INSTEAD.format(body='exec("raise KeyboardInterrupt")')
    (tmp_path / "wrapped.py").write_text(textwrap.dedent(script))
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    process = start("device", module="wrapped", env={"PYTHONPATH": path})
    assert end(process, 10)[0] == 130


def test_names_that_the_locale_cannot_write():
    script = INSTEAD.format(body='cli.say("Gr\\u00f6\\u00dfe", sys.stdout)')
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    status, out, _ = end(start("device", script=script, env=env))
    assert status == 0
    assert out == "Gr\\xf6\\xdfe\n"


def test_reader_who_leaves_ends_the_run_quietly(tmp_path):
    out = tmp_path / "out.json"
    process = start(*TINY, "--steps", "100000", "--json", str(out))
    assert LOG_LINE.match(process.stdout.readline())
    process.stdout.close()
    assert process.wait(60) == 1
    assert process.stderr.read() == ""
    process.stderr.close()
    record = read(out)
    assert record["summary"]["state"] == "stopped"
    assert len(record["steps"]) >= 1


def test_reader_who_leaves_before_the_help():
    process = start("run", "--help")
    process.stdout.close()
    process.wait(60)
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_full_disk_under_stdout_is_said():
    script = INSTEAD.format(body='cli.say("text", sys.stdout)')
    program = [sys.executable, "-c", textwrap.dedent(script), "device"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            program, env=PLAIN_ENV, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr == "gpt2demo: The output cannot be written (No space left on device).\n"
