"""What the page costs and how soon it answers: `python -m tests.bench.bench_page`.

Three figures, each of the real server on this machine: seconds from `python app.py` to the first
answer; seconds from the click on Run to the first point in Chromium; and what a watching page costs
a step, from runs with and without a watcher, turn by turn. The watcher of the last figure reads the
stream in a process of its own, as a browser elsewhere would. Run it on a machine that does nothing
else.
"""

import argparse
import multiprocessing
import platform
import statistics
import sys
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import gradio
import httpx
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own helpers

from browser import chromium, free_port
from server import page

from gpt2demo.config import RunConfig, Settings
from gpt2demo.hub import Hub
from gpt2demo.ui.live import STREAM_PATH
from gpt2demo.ui.page import build_demo, launch_options

FIRST_POINT = """() => {
  const plot = document.querySelector('#live .live-plot');
  return (plot._fullData || []).some((d) => d.line && d.x[0] !== null);
}"""


def startup(folder: Path) -> float:
    """Seconds until a fresh server answers."""
    start = time.perf_counter()
    with page(folder):
        return time.perf_counter() - start


def first_point(folder: Path) -> tuple[float, float]:
    """Seconds from the click to the first point, and the run's first three steps together."""
    with page(folder) as server, chromium() as browser:
        visitor = browser.new_page()
        visitor.goto(server.url)
        visitor.wait_for_function(
            "document.querySelector('#live .live-plot')?._fullLayout", polling=100
        )
        start = time.perf_counter()
        visitor.click("button#run")
        visitor.wait_for_function(FIRST_POINT, polling=50, timeout=120_000)
        seen = time.perf_counter() - start
        time.sleep(1)
        while server.post("status")["steps_measured"] < 3:
            time.sleep(0.2)
        return seen, server.post("status")["step_ms_median"] / 1000


def watch(url: str, quit_: Event) -> None:
    """Read one page's stream until told to stop."""
    with httpx.stream("GET", url + STREAM_PATH, timeout=60) as answer:
        for _ in answer.iter_lines():
            if quit_.is_set():
                return


def run(hub: Hub, steps: int) -> float:
    """Median ms/step of one run of GPT-2 124M, B=4, T=32."""
    started = hub.submit(RunConfig(steps=steps), "bench")
    while not started.summary or hub.current:
        time.sleep(0.2)
    return started.summary.step_ms_median


def watcher_cost(turns: int, steps: int) -> tuple[float, float, float]:
    """(ms without, ms with a watcher, median of the turns' ratios)."""
    hub = Hub(Settings(orphan_seconds=100_000))
    demo = build_demo(hub)
    port = free_port()
    demo.launch(
        server_name="127.0.0.1",
        server_port=port,
        prevent_thread_lock=True,
        quiet=True,
        **launch_options(hub),
    )
    context = multiprocessing.get_context("spawn")
    pairs = []
    run(hub, 4)
    for turn in range(turns):
        figures = {}
        for watched in (True, False) if turn % 2 else (False, True):
            quit_ = context.Event()
            process = context.Process(target=watch, args=(f"http://127.0.0.1:{port}", quit_))
            if watched:
                process.start()
                time.sleep(3)
            figures[watched] = run(hub, steps)
            if watched:
                quit_.set()
                process.join(20)
                time.sleep(4)
        pairs.append((figures[False], figures[True]))
    demo.close()
    hub.close()
    without, with_ = (statistics.median(column) for column in zip(*pairs, strict=True))
    return without, with_, statistics.median(b / a for a, b in pairs)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    print(
        f"torch {torch.__version__}, gradio {gradio.__version__}, Python "
        f"{platform.python_version()}, {torch.get_num_threads()} threads, "
        f"{torch.cpu.get_capabilities().get('cpu_name', platform.processor())}"
    )
    with tempfile.TemporaryDirectory() as folder:
        seconds = [startup(Path(folder)) for _ in range(3)]
        print(f"start to first answer: {statistics.median(seconds):.1f} s (of {len(seconds)})")
        seen, step = first_point(Path(folder))
        print(
            f"click to first point: {seen:.1f} s; a step takes {step:.2f} s, "
            f"three steps + 2 s: {3 * step + 2:.1f} s"
        )
    without, with_, ratio = watcher_cost(options.turns, options.steps)
    print(f"a watcher: {without:.0f} ms a step without, {with_:.0f} with one, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
