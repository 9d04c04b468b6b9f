"""Which module may import which, and that importing does nothing else."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "gpt2demo"

# A module may import what stands before it: on a lower floor, or earlier on its own. A new module
# fails the tests until it has its place here.
FLOORS: dict[int, tuple[str, ...]] = {
    # settings, records, plain texts: nothing of torch
    0: (
        *("config", "shipped", "ranks", "lesson", "records", "inspection", "malloc", "corpora"),
        *("garbage", "json_file", "literals", "formats", "tracking"),
    ),
    # the model, its data, and the machine
    1: (
        *("accelerator", "model", "data", "precision", "distributed"),
        *("peaks", "host", "nvidia", "support", "device"),
    ),
    # what a run will take, and what can go wrong
    2: (
        *("flops", "memory", "fit", "fit_words", "oom", "tracker", "compiling", "energy"),
        *("step_counts", "roofline", "probe"),
        *("histogram", "casts", "kernel_names", "step_profile"),
    ),
    # the loop
    3: ("train",),
    # runs
    4: (
        *("ending", "runner", "series", "limit", "race", "expectation", "compare", "race_report"),
        *("staircase", "staircase_report", "board_import", "board_file", "board"),
        *("inside_words", "inside", "run", "pace", "lender", "hub", "zero"),
    ),
    # figures and tables
    5: (
        *("charts", "map_figure", "table", "compare_figure"),
        *("inside_figure", "staircase_figure"),
    ),
    # what people see
    6: (
        *("ui", "ui.live", "ui.stream", "ui.device_card", "ui.link", "ui.downloads", "ui.api"),
        *("ui.guard", "ui.uploads", "ui.listening", "ui.watching"),
        *(
            "ui.controls",
            "ui.words",
            "ui.memory_bar",
            "ui.fit_map",
            "ui.memory_tab",
            "ui.probe_words",
        ),
        *("ui.bits", "ui.specs_tab", "ui.present", "ui.compare_tab", "ui.board_tab"),
        *("ui.inside_precision", "ui.inside_tab", "ui.precision_tab"),
        *("ui.staircase_tab", "ui.handlers", "ui.page"),
        *(
            "cli.output",
            "cli.options",
            "cli.processes",
            "cli.run",
            "cli.series",
            "cli.compare",
            "cli.staircase",
            "cli.memory",
            "cli.probe",
            "cli.inside",
            "cli.device",
            "cli.bits",
            "cli.specs",
            "cli.serve",
            "cli",
        ),
        "__main__",
    ),
    7: ("app",),
}
FLOOR = {module: floor for floor, modules in FLOORS.items() for module in modules}
ORDER = list(FLOOR)
PAGE = {module for module in ORDER if module.split(".")[0] == "ui"}
COMMAND = {module for module in ORDER if module.split(".")[0] == "cli"}

# Tighter than the floors: the floors and modules that are all these may import.
ONLY_FROM: dict[str, set[int | str]] = {
    "charts": {0},
    "map_figure": {0, "charts"},
    "table": {0},
    "compare_figure": {0, "charts", "race", "expectation"},
    "inside_figure": {0, "charts"},
    "staircase_figure": {0, "charts", "staircase"},
    "memory": {0, 1},
    "fit": {0, 1, "memory"},
    "fit_words": {0, 1, "memory", "fit"},
    "flops": {0, 1},
    **dict.fromkeys(COMMAND, {0, 1, 2, 3, 4} | (COMMAND - {"cli"})),
    "__main__": {"cli"},
    "app": {0, 4, 6},
    **dict.fromkeys(
        PAGE,
        {0, 4, 5, "device", "support", "precision"}
        | {"memory", "fit", "fit_words", "flops", "peaks", "probe", "roofline"}
        | (PAGE - {"ui.page"}),
    ),
}

# Every package from outside the standard library, and where it may be imported.
PACKAGES: dict[str, set[str]] = {
    "torch": {
        *(
            "accelerator",
            "model",
            "data",
            "precision",
            "nvidia",
            "device",
            "oom",
            "tracker",
            "compiling",
            "probe",
            "distributed",
        ),
        *("train", "runner", "run", "lender", "hub", "zero"),
        *("histogram", "casts", "step_profile", "inside"),
    },
    "tiktoken": {"data"},
    "huggingface_hub": {"corpora", "tracking"},
    "trackio": {"tracking"},  # optional
    "psutil": {"host"},
    "pynvml": {"nvidia"},  # optional
    "pandas": {"table", "compare_figure", "staircase_figure"} | PAGE,
    "plotly": {
        *("charts", "map_figure", "compare_figure", "inside_figure", "staircase_figure"),
        "ui.live",  # serves its script
    },
    "gradio": {"app"} | PAGE,
    "starlette": PAGE,
    "spaces": {"app"},  # on ZeroGPU only
}
# __main__ ends the process when a signal finds the main thread inside one long call
THREADS = {"hub", "__main__"}
THREAD_PACKAGES = {"threading", "_thread", "concurrent", "multiprocessing"}
FORKS = {"zero"}  # its stop must reach a forked process
# ending tells torch's errors apart, and pace knows a run, through modules that import it
TORCHLESS = [
    module
    for module in ORDER
    if module not in PACKAGES["torch"] and module not in {*PAGE, "app", "ending", "pace"}
]


def files() -> dict[str, Path]:
    """Every module there is: its name without the package's, and its file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:  # the package itself is looked at in a test of its own
            found[name] = path
    if (ROOT / "app.py").exists():
        found["app"] = ROOT / "app.py"
    return found


FILES = files()


def imported(module: str, source: str) -> Iterator[str]:
    """Full names of the modules that `source` imports, wherever in the file it does."""
    # a module's own package, for relative imports
    package = (
        "gpt2demo." + module if module in ("ui", "cli") else f"gpt2demo.{module}".rpartition(".")[0]
    )
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                origin = ".".join([*above, *filter(None, [origin])])
            for alias in node.names:
                inner = f"{origin}.{alias.name}".removeprefix("gpt2demo.")
                is_module = origin.startswith("gpt2demo") and inner in {*FLOOR, *FILES}
                yield f"{origin}.{alias.name}" if is_module else origin


def faults(module: str, source: str) -> list[str]:
    """What `source` imports, as the module of that name, and may not."""
    if module not in FLOOR:
        return [f"{module} is on no floor: give it its place in FLOORS"]
    found = []
    for full_name in imported(module, source):
        top, _, inner = full_name.partition(".")
        if top == "gpt2demo":
            allowed = ONLY_FROM.get(module)
            if inner not in FLOOR:
                found.append(f"{module} imports {full_name}, which is on no floor")
            elif ORDER.index(inner) >= ORDER.index(module):
                found.append(f"{module} imports {inner}, which does not stand before it")
            elif allowed is not None and not {inner, FLOOR[inner]} & allowed:
                found.append(f"{module} imports {inner}, which is not among its own few")
        elif top in THREAD_PACKAGES:
            if module not in (FORKS if top == "multiprocessing" else THREADS):
                found.append(f"{module} imports {full_name}: threads belong to the hub")
        elif top not in sys.stdlib_module_names and module not in PACKAGES.get(top, set()):
            found.append(f"{module} imports {full_name}, which has no place there")
    for node in ast.walk(ast.parse(source)):
        name = getattr(node, "attr", getattr(node, "id", ""))
        if name in ("import_module", "__import__"):
            found.append(f"{module} imports by a name that no reader sees")
    return found


@pytest.mark.parametrize("module", FILES)
def test_imports_run_downwards(module: str) -> None:
    assert faults(module, FILES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("model", "from gpt2demo.train import train"),
        ("model", "import gpt2demo.train"),
        ("model", "import gpt2demo.train as loop"),
        ("model", "from gpt2demo import train"),
        ("model", "def f():\n    from gpt2demo import config, hub"),
        ("model", "try:\n    from gpt2demo.model import GPT\nexcept ImportError: pass"),
        ("model", "from . import train"),
        ("model", "from .train import train"),
        ("ui.api", "from .page import build_demo"),
        ("ui.api", "from ..cli import main"),
        ("config", "from gpt2demo.records import StepMetrics"),  # the same floor, the other way
        ("runner", "from gpt2demo.hub import Hub"),
        ("charts", "from gpt2demo.hub import Hub"),  # lower, but charts draw records only
        ("cli", "from gpt2demo.charts import records_json"),
        ("cli", "from gpt2demo.ui.api import train"),
        ("ui.page", "from gpt2demo.train import train"),
        ("config", "import torch"),
        ("records", "from torch.utils import data"),
        ("peaks", "def f():\n    import torch"),
        ("memory", "import torch.nn as nn"),
        ("flops", "import torch"),
        ("charts", "import torch"),
        ("ui.page", "import torch"),
        ("hub", "import gradio as gr"),
        ("cli", "import gradio"),
        ("ui.stream", "import plotly.graph_objects as go"),
        ("hub", "import plotly"),
        ("train", "import threading"),
        ("ui.page", "from threading import Event"),
        ("runner", "from concurrent.futures import ThreadPoolExecutor"),
        ("hub", "import multiprocessing"),
        ("zero", "import threading"),
        ("zero", "import spaces"),  # app hands it what it needs
        ("config", "import requests"),
        ("config", "import importlib\nimportlib.import_module('torch')"),
        ("config", "__import__('torch')"),
        ("speed", "import os"),  # a module that has no floor
        ("model", "import gpt2demo.speed"),
        ("model", "from gpt2demo import speed"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert len(faults(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("train", "import torch\nfrom torch import nn\nfrom gpt2demo import accelerator, model"),
        ("records", "import json, math\nfrom gpt2demo.config import RunConfig"),
        ("ui.page", "import gradio as gr\nfrom gpt2demo.ui import live\nfrom .api import add_api"),
        ("hub", "import threading"),
        ("zero", "import multiprocessing"),
        ("cli", "import argparse\nfrom gpt2demo.runner import execute"),
        ("app", "import gradio\nfrom gpt2demo.ui.page import build_demo"),
    ],
)
def test_a_right_import_is_none(module: str, source: str) -> None:
    assert faults(module, source) == []


def test_the_table_holds_each_module_once() -> None:
    assert len(ORDER) == sum(len(modules) for modules in FLOORS.values())
    assert set(FILES) <= set(FLOOR)
    missing = set(FLOOR) - set(FILES) - {"app"}
    assert not missing, f"on a floor, but not there: {missing}"
    for named in (*ONLY_FROM, *THREADS, *FORKS, *set().union(*PACKAGES.values())):
        assert named in FLOOR, named


def test_no_module_is_a_drawer_for_everything() -> None:
    for module in FILES:
        assert not {"util", "utils", "common", "helpers", "misc", "shared"} & {*module.split(".")}


def test_the_package_itself_is_a_docstring() -> None:
    body = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body
    assert [type(node) for node in body] == [ast.Expr]


# --- importing for real, each time in a fresh process ---

# Watches what importing does: threads, sockets, processes, files, devices, process-wide state.
WATCHER = """
import importlib, json, os, sys
outside, inside = json.loads(sys.stdin.read())
for name in outside:  # what the libraries do when they are imported is theirs
    try:
        importlib.import_module(name)
    except ImportError:
        assert name.partition(".")[0] in ("pynvml", "trackio", "spaces"), name
import logging, signal, threading, torch, warnings

def state():
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "threads of torch": torch.get_num_threads(),
        "matmul mode": torch.get_float32_matmul_precision(),
        "type": str(torch.get_default_dtype()),
        "random numbers": torch.random.get_rng_state().tolist(),
        "logging": [logging.root.level, len(logging.root.handlers)],
        "warnings": len(warnings.filters),
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }

done, current = [], ""

def asked(call):
    def spy(*args, **kwargs):
        done.append([current, call.__name__])
        return call(*args, **kwargs)
    return spy

for place in (torch.cuda, torch.xpu, torch.accelerator, torch.backends.mps):
    for name in ("is_available", "device_count", "current_accelerator", "get_device_properties"):
        if hasattr(place, name):
            setattr(place, name, asked(getattr(place, name)))

# Python 3.11 has no audit event for a thread
threading.Thread.start = asked(threading.Thread.start)

WATCHED = ("socket.", "subprocess.", "os.system", "os.fork", "os.posix_spawn",
           "os.exec", "os.mkdir", "os.remove", "os.rename", "os.putenv", "shutil.", "tempfile.",
           "urllib.", "ctypes.dlopen")

def hook(event, args):
    if event.startswith(WATCHED):
        done.append([current, event, repr(args)[:200]])
    elif event == "open" and not str(args[0]).endswith((".py", ".pyc", ".so")):
        done.append([current, event, repr(args)[:200]])

before = state()
sys.addaudithook(hook)
for current in inside:
    importlib.import_module(current)
current = "after all"
print(json.dumps({
    "done": done,
    "changed": {k: [repr(v)[:200], repr(before[k])[:200]]
                for k, v in state().items() if v != before[k]},
    "cuda": torch.cuda.is_initialized(),
    "imported": [name for name in inside if name in sys.modules],
}))
"""

# Imports in groups and says after each which large libraries are there by then.
GROUPS = """
import importlib, json, sys
found = []
for group in json.loads(sys.stdin.read()):
    for name in group:
        importlib.import_module(name)
    large = ("torch", "gradio", "plotly", "pandas", "starlette", "tiktoken")
    found.append([name for name in large if name in sys.modules])
print(json.dumps(found))
"""


def fresh(program: str, argument: object) -> object:
    """What `program` prints as JSON, in a new process that writes no bytecode."""
    run = subprocess.run(
        [sys.executable, "-B", "-c", program],
        input=json.dumps(argument),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stderr == ""
    return json.loads(run.stdout)


def full(module: str) -> str:
    return module if module == "app" else f"gpt2demo.{module}"


def present(modules: list[str]) -> list[str]:
    return [full(module) for module in modules if module in FILES]


def test_importing_any_module_does_nothing_else() -> None:
    outside = {
        name
        for module, path in FILES.items()
        for name in imported(module, path.read_text(encoding="utf-8"))
        if name.partition(".")[0] != "gpt2demo"
    }
    everything = present(ORDER)
    seen = fresh(WATCHER, [sorted(outside | {"torch"}), everything])
    assert seen["done"] == []
    assert seen["changed"] == {}
    assert seen["cuda"] is False
    assert seen["imported"] == everything


def test_the_watcher_sees_what_importing_must_not_do(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(
        "import os, socket, subprocess, sys, threading, torch\n"
        "threading.Thread(target=int).start()\n"
        "socket.socket().close()\n"
        "subprocess.run([sys.executable, '--version'], capture_output=True)\n"
        "open(__file__ + '.txt', 'w').close()\n"
        "torch.cuda.is_available()\n"
        "torch.manual_seed(1)\n"
        "os.environ['GPT2DEMO_BUSY'] = '1'\n"
    )
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{WATCHER}"
    seen = fresh(program, [["torch"], ["busy"]])
    events = {event[1] for event in seen["done"]}
    assert {"start", "is_available", "open", "os.putenv"} <= events
    assert {"socket.__new__", "subprocess.Popen"} <= events
    assert {"random numbers", "environment"} <= seen["changed"].keys()


def test_large_libraries_are_imported_only_where_they_are_used() -> None:
    plain = [module for module in TORCHLESS if FLOOR[module] < 5]
    without_page = [m for m in ORDER if FLOOR[m] <= 4] + ["cli", "__main__"]
    groups = [present(plain), present(["cli", "__main__"]), present(without_page)]
    seen = fresh(GROUPS, groups)
    assert seen == [[], [], ["torch", "tiktoken"]]
    # figures and tables need neither torch nor gradio
    assert not {"torch", "gradio"} & set(fresh(GROUPS, [present(["charts", "table"])])[0])
