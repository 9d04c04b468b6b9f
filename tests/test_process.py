"""The page as a process: how it starts, under what, and how it ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from gradio_client import Client
from server import ROOT, Server, page


def port_of(server: Server) -> int:
    return int(server.url.rsplit(":", 1)[1])


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_a_signal_ends_the_process_within_ten_seconds_in_the_middle_of_a_run(tmp_path, signum):
    with page(tmp_path) as server:
        client = Client(server.url, verbose=False, analytics_enabled=False)
        # one step of this takes a second or more
        job = client.submit(api_name="/train", model="gpt2", B=2, T=64, steps=50)
        assert "run_id" in next(iter(job))
        end = time.monotonic() + 30
        while server.post("status")["state"] != "running":
            assert time.monotonic() < end
            time.sleep(0.05)
        start = time.monotonic()
        server.process.send_signal(signum)
        assert server.process.wait(10) == 0
        assert time.monotonic() - start < 10
        assert is_free(port_of(server))
        assert "Traceback" not in server.log
        client.close()


def train_tiny(server: Server) -> dict:
    client = Client(server.url, verbose=False, analytics_enabled=False)
    *_, last = client.submit(api_name="/train", model="tiny", B=1, T=8, steps=3)
    client.close()
    return last["summary"]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="/proc is where nobody can write")
def test_a_plain_locale_a_read_only_folder_and_a_foreign_cache(tmp_path):
    # a file where a cache folder is expected: not even root can write into it
    foreign = tmp_path / "cache"
    foreign.write_text("somebody else's")
    caches = ("XDG_CACHE_HOME", "HF_HOME", "TIKTOKEN_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    environ = dict.fromkeys(caches, str(foreign)) | {"LC_ALL": "C", "LANG": "C"}
    with page(tmp_path, cwd=Path("/proc"), **environ) as server:  # read-only even for root
        assert train_tiny(server)["state"] == "finished"
        assert httpx.get(server.url, timeout=5).status_code == 200
    assert foreign.read_text() == "somebody else's"


def test_a_limit_that_is_no_number_is_named(tmp_path):
    result = subprocess.run(
        [sys.executable, str(ROOT / "app.py")],
        env=os.environ | {"GPT2DEMO_MAX_STEPS": "many"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert "GPT2DEMO_MAX_STEPS must be a whole number" in result.stderr
    assert "Traceback" not in result.stderr
