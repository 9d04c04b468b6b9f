"""`pip install .` into a fresh environment: the command, what it needs, the page."""

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib

import httpx
import pytest
from browser import free_port
from packaging.requirements import Requirement
from server import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SHIPPED = ("gpt2demo", "assets", "app.py", "README.md", "LICENSE", "pyproject.toml")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of an environment that holds the project, and sees the libraries of this one."""
    folder = tmp_path_factory.mktemp("install")
    source = folder / "source"  # a copy: a build leaves files behind
    source.mkdir()
    for name in (*SHIPPED, "requirements.txt"):
        path = ROOT / name
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, source / name)
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
    libraries = next(venv.glob("lib/python*/site-packages"))
    (libraries / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index"]
    done = subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--disable-pip-version-check", source],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return venv


def command(installed, *args, timeout=90):
    """The installed command, far from the checkout."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [installed / "bin" / "gpt2demo", *args],
        cwd=installed,
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_the_command_has_every_verb(installed):
    done = command(installed, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: gpt2demo ")
    for verb in ("run", "compare", "probe", "memory", "device", "serve"):
        assert re.search(rf"^    {verb} +\w", done.stdout, re.MULTILINE)


def test_what_it_needs_is_what_requirements_txt_says(installed):
    (libraries,) = installed.glob("lib/python*/site-packages")
    (found,) = importlib.metadata.distributions(name="gpt2demo", path=[str(libraries)])
    needed = [r for r in map(Requirement, found.requires) if r.marker is None]
    lines = (ROOT / "requirements.txt").read_text().split()
    assert sorted(map(str, needed)) == sorted(str(Requirement(line)) for line in lines)


def test_every_module_and_asset_is_there_once(installed):
    (package,) = installed.glob("lib/python*/site-packages/gpt2demo")
    want = {path.relative_to(ROOT / "gpt2demo") for path in ROOT.glob("gpt2demo/**/*.py")}
    want |= {path.relative_to(ROOT) for path in ROOT.glob("assets/*") if path.suffix != ".png"}
    there = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    there = {path for path in there if path.suffix != ".pyc"}
    assert there - want == {(package / "start/app.py").relative_to(package)}
    assert want - there == set()


def test_only_one_module_knows_where_the_assets_lie():
    for path in ROOT.glob("gpt2demo/**/*.py"):
        if path.name != "shipped.py":
            assert not re.search(r"""["']assets["']""", path.read_text(encoding="utf-8")), path


def test_it_trains(installed, tmp_path):
    done = command(
        *(installed, "run", "--model", "tiny", "--device", "cpu", "-B", "1", "-T", "8"),
        *("--steps", "3", "--json", str(tmp_path / "out.json")),
    )
    assert done.returncode == 0, done.stderr
    run = json.loads((tmp_path / "out.json").read_text())
    assert run["summary"]["state"] == "finished"
    assert 10 < run["steps"][0]["loss"] < 12  # its own token ranks: ln(50257) = 10.8


def test_it_serves_the_page_and_ends_on_a_signal(installed, tmp_path):
    port = free_port()
    environ = os.environ | {"GPT2DEMO_BOARD_DIR": str(tmp_path / "board")}
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [installed / "bin" / "gpt2demo", "serve", "--host", "127.0.0.1", "--port", str(port)],
            cwd=tmp_path,
            env=environ,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        end = time.monotonic() + 120
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            try:
                page = httpx.get(f"http://127.0.0.1:{port}", timeout=10)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        assert page.status_code == 200
        assert (ROOT / "assets" / "style.css").read_text().split("{")[0].split()[-1] in page.text
        config = httpx.get(f"http://127.0.0.1:{port}/config", timeout=10).text
        assert "const setup" in config  # the chart's script, from assets
        taken = command(installed, "serve", "--host", "127.0.0.1", "--port", str(port))
        assert taken.returncode == 1
        assert "The page could not be served" in taken.stderr
        assert "Traceback" not in taken.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


@pytest.mark.parametrize("port", ["0", "65536", "80.5", "http"])
def test_a_port_that_is_none_is_refused(installed, port):
    done = command(installed, "serve", "--port", port)
    assert done.returncode == 2
    assert "port must be a whole number from 1 to 65,535" in done.stderr
