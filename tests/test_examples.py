"""The README's examples for scripts, as they stand there, against a real page."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from server import ROOT, page

SECTION = (ROOT / "README.md").read_text(encoding="utf-8").split("## From a script\n")[1]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", SECTION.split("\n## ")[0], re.MULTILINE | re.DOTALL)
CLIENT, CURL, COMMAND, NOTEBOOK = (code for _, code in BLOCKS)  # there are four
ADDRESS = "http://127.0.0.1:7860"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with page(tmp_path_factory.mktemp("page")) as server:
        yield server.url


def run(kind: str, code: str, folder: Path) -> str:
    """What the example prints; its `python` is this one, in a folder that is not the checkout."""
    starts = {"python": [sys.executable, "-c"], "sh": ["sh", "-euc"]}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [*starts[kind], code],
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_rows(first: dict, *rows: dict) -> None:
    """The rows of a run of five steps."""
    *steps, last = [row for row in rows if "line" not in row]
    assert first["config"]["model"] == "tiny"
    assert first["config"]["precision"] == "bf16"
    assert [step["step"] for step in steps] == [0, 1, 2, 3, 4]
    assert last["summary"]["state"] == "finished"
    assert last["summary"]["final_loss"] == steps[-1]["loss"]


def test_there_are_four():
    assert [kind for kind, _ in BLOCKS] == ["python", "sh", "sh", "python"]
    assert CLIENT.count(ADDRESS) == 1
    assert CURL.count(ADDRESS) == 2


def test_gradio_client(url, tmp_path):
    printed = run("python", CLIENT.replace(ADDRESS, url), tmp_path)
    rows = [line for line in printed.splitlines() if line.startswith("{")]
    check_rows(*map(ast.literal_eval, rows))


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl(url, tmp_path):
    printed = run("sh", CURL.replace(ADDRESS, url), tmp_path)
    events = re.findall(r"^event: (\w+)\ndata: (.*)$", printed, re.MULTILINE)
    check_rows(*(json.loads(data)[0] for event, data in events if event == "generating"))
    assert events[-1][0] == "complete"


def test_the_command_line(tmp_path):
    printed = run("sh", COMMAND, tmp_path)
    found = json.loads((tmp_path / "run.json").read_text())
    assert len(found["steps"]) == 5
    assert printed.splitlines()[-1] == f"{found['summary']['step_ms_median']} ms"


def test_a_notebook_cell(tmp_path):
    *before, last = ast.parse(NOTEBOOK).body
    assert isinstance(last, ast.Expr)  # what a notebook shows
    shown = ast.unparse(last)
    cell = "\n".join([*map(ast.unparse, before), f"print(({shown}).to_json())"])
    said, table = run("python", cell, tmp_path).splitlines()
    assert said == "Finished: 5 steps."
    columns = json.loads(table)
    assert list(columns) == ["loss", "step_ms", "tokens_per_sec"]
    assert list(columns["loss"]) == ["0", "1", "2", "3", "4"]
    assert 10 < columns["loss"]["0"] < 12
