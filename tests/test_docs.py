"""What the README and the changelog say is so."""

import importlib.metadata
import re
from dataclasses import fields

import pytest
from packaging.requirements import Requirement
from server import ROOT

from gpt2demo import cli
from gpt2demo.config import RunConfig, Settings

README = (ROOT / "README.md").read_text(encoding="utf-8")
FRONT = dict(re.findall(r'^(\w+): "?([^"\n]+)"?$', README.split("---")[1], re.MULTILINE))
REQUIREMENTS = [
    Requirement(line) for line in (ROOT / "requirements.txt").read_text().splitlines() if line
]


def test_the_space_runs_the_gradio_that_is_tested():
    gradio = next(r for r in REQUIREMENTS if r.name == "gradio")
    assert FRONT["sdk"] == "gradio"
    assert FRONT["sdk_version"] == importlib.metadata.version("gradio")
    assert FRONT["sdk_version"] in gradio.specifier
    assert (ROOT / FRONT["app_file"]).is_file()
    assert FRONT["python_version"] == "3.12"  # ZeroGPU offers it and 3.10
    assert FRONT["suggested_hardware"].startswith("t4")


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda r: r.name)
def test_every_requirement_is_the_installed_one_and_is_used(requirement):
    assert importlib.metadata.version(requirement.name) in requirement.specifier
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "gpt2demo").rglob("*.py"))
    assert re.search(rf"^\s*(import|from) {requirement.name}\b", code, re.MULTILINE)


def test_every_module_is_in_the_tree_and_nothing_else():
    tree = README.split("```\napp.py")[1].split("```")[0]
    listed = set(re.findall(r"(\w+)\.py", tree)) - {"app"}
    there = {path.stem for path in (ROOT / "gpt2demo").glob("*.py")} - {"__init__"}
    assert listed == there


def test_every_setting_stands_there_with_its_default():
    for field in fields(Settings):
        assert f"| `GPT2DEMO_{field.name.upper()}` | {field.default:,} |" in README
    assert len(re.findall(r"^\| `GPT2DEMO_", README, re.MULTILINE)) == len(fields(Settings))


def test_every_setting_of_a_run_is_an_option_of_the_command_line(capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    text = capsys.readouterr().out
    for field in fields(RunConfig):
        name = field.name
        assert (f"-{name}" if name in "BT" else f"--{name.replace('_', '-')}") in text


def test_the_two_commands_are_one_line_each():
    commands = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert len(commands) == 2
    assert commands[0].endswith("python app.py")
    assert commands[1].endswith("python -m pytest -n 2 --dist loadfile")


@pytest.mark.parametrize("name", re.findall(r"\]\(([^):#]+)\)", README))
def test_every_linked_file_is_there(name):
    assert (ROOT / name).is_file()
