"""The page as a visitor gets it: `python app.py` in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from browser import free_port

ROOT = Path(__file__).parents[1]
APP = (sys.executable, str(ROOT / "app.py"))


class Server:
    """One running page."""

    def __init__(self, process: subprocess.Popen, url: str, log: Path) -> None:
        self.process, self.url, self._log = process, url, log

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def post(self, endpoint: str, *values: object) -> dict:
        """The answer of an endpoint that takes no place in the queue."""
        answer = httpx.post(
            f"{self.url}/gradio_api/run/{endpoint}", json={"data": list(values)}, timeout=10
        )
        answer.raise_for_status()
        return answer.json()["data"][0]

    def wait_idle(self) -> None:
        end = time.monotonic() + 60
        while self.post("status")["state"] != "idle":
            assert time.monotonic() < end, "the run did not end"
            time.sleep(0.1)


@contextmanager
def page(
    folder: Path,
    *,
    cwd: Path = ROOT,
    command: Sequence[str] = APP,
    base: Mapping[str, str] | None = None,
    **environ: str,
) -> Iterator[Server]:
    """`python app.py`, answering on a free port of 127.0.0.1; stopped by its process id.

    `command` may start it another way, as the same process; `base` stands in for this
    environment.
    """
    port = free_port()
    log = folder / f"server-{port}.log"
    settings = {
        "GRADIO_SERVER_PORT": str(port),
        "GRADIO_SERVER_NAME": "127.0.0.1",
        "GPT2DEMO_BOARD_DIR": str(folder / "board"),
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**(os.environ if base is None else base), **settings, **environ},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        wait_for_answer(server)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def wait_for_answer(server: Server, seconds: float = 60) -> float:
    """Seconds until the page answers."""
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        assert server.process.poll() is None, server.log
        try:
            if httpx.get(server.url, timeout=5).status_code == 200:
                return time.monotonic() - start
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError(f"no answer within {seconds} s:\n{server.log}")
