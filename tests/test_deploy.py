"""The page as a server has it: another user, read-only code and home, behind nginx at a prefix.

Needs root, to become another user and to read what only root may read, and nginx.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from browser import free_port
from server import ROOT, Server, page

UID = 54321  # nobody's
PREFIX = "/x/"
PLOT = "document.querySelector('#live .live-plot')"
STATE = "document.querySelector('#live .live-status')?.dataset.state"
POINTS = f"Math.max(0, ...({PLOT}?._fullData || []).map((d) => d._length))"
# what stands in the README, with a port and folders of its own
NGINX = """
daemon off; master_process off; pid nginx.pid; error_log error.log;
events {{}}
http {{
  log_format plain '$status $uri';
  access_log access.log plain;
  {temp}
  server {{
    listen 127.0.0.1:{port};
    {location}
  }}
}}
"""

pytestmark = pytest.mark.browser


def readme_location(url: str) -> str:
    """The README's block for nginx, passing on to `url`."""
    block = re.search(r"^```nginx\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert block, "the README shows no block for nginx"
    assert "http://127.0.0.1:7860/" in block[1]
    assert f"location {PREFIX} " in block[1]
    return block[1].replace("http://127.0.0.1:7860/", f"{url}/")


@contextlib.contextmanager
def proxy(folder: Path, url: str) -> Iterator[str]:
    """nginx before `url`; its address with the prefix."""
    nginx = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if nginx is None:
        missing = "no nginx (Debian's package nginx-light)"
        if os.environ.get("GPT2DEMO_REQUIRE_BROWSER") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    port = free_port()
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temp = " ".join(f"{kind}_temp_path temp_{kind};" for kind in kinds)
    conf = folder / "nginx.conf"
    conf.write_text(NGINX.format(temp=temp, port=port, location=readme_location(url)))
    process = subprocess.Popen(
        [nginx, "-p", str(folder), "-c", str(conf), "-e", "error.log"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        address = f"http://127.0.0.1:{port}{PREFIX}"
        end = time.monotonic() + 20
        while True:
            assert process.poll() is None, (folder / "error.log").read_text()
            with contextlib.suppress(httpx.TransportError):
                assert httpx.get(address, timeout=5).status_code == 200
                break
            assert time.monotonic() < end, "nginx does not answer"
            time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A read-only copy of the code, a read-only home, and two folders that the user may write."""
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("only root can become another user")
    folder = Path(tempfile.mkdtemp(prefix="gpt2demo-deploy-"))  # pytest's own are closed to others
    folder.chmod(0o755)
    code = folder / "code"
    for name in ("gpt2demo", "assets"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, code / name, ignore=ignore)
    shutil.copy(ROOT / "app.py", code)
    for path in (code, *code.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    (folder / "home").mkdir(mode=0o555)
    for name in ("tmp", "data"):
        (folder / name).mkdir()
        os.chown(folder / name, UID, UID)
    yield folder
    shutil.rmtree(folder)


def as_another_user() -> list[str]:
    """The start of a command that runs as `UID` and can write nothing of root's.

    Where the interpreter lies in root's home it may read what root may, and no more.
    """
    become = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--no-new-privs"]
    read = "+dac_read_search"
    reading = [f"--inh-caps={read}", f"--ambient-caps={read}", f"--bounding-set=-all,{read}"]
    for found in (become, [*become, *reading]):
        with contextlib.suppress(OSError):
            tried = subprocess.run(
                [*found, sys.executable, "-c", "import psutil"], capture_output=True, cwd="/"
            )
            if tried.returncode == 0:
                return found
    pytest.skip("no other user can run this Python")


def start(place: Path) -> contextlib.AbstractContextManager[Server]:
    """`python app.py` of the copy, with nothing of this environment."""
    return page(
        place,
        cwd=place / "code",
        command=[*as_another_user(), sys.executable, "app.py"],
        base={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "2"},
        HOME=str(place / "home"),
        TMPDIR=str(place / "tmp"),
        GRADIO_ROOT_PATH=PREFIX.rstrip("/"),
        GPT2DEMO_BOARD_DIR=str(place / "data"),
    )


class Visitor:
    """One browser on the page, with a note of every request."""

    def __init__(self, browser, address: str) -> None:
        self.page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        self.requests: list[str] = []
        self.failed: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda r: self.requests.append(r.url))
        self.page.on("requestfailed", self.note_failure)
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.page.goto(address)
        self.wait(f"{PLOT}?._fullLayout && {STATE} !== undefined")

    def note_failure(self, request) -> None:
        if request.failure != "net::ERR_ABORTED":  # the page's own doing, as for a download
            self.failed.append(f"{request.failure} {request.url}")

    def wait(self, condition: str, seconds: float = 40) -> None:
        self.page.wait_for_function(condition, timeout=seconds * 1000, polling=100)

    def run(self, model: str, **sizes: int) -> None:
        self.page.click("#model input")
        self.page.get_by_role("option", name=model).click()
        for name, value in sizes.items():
            number = self.page.locator(f"#{name} input[type=number]")
            number.fill(str(value))
            number.press("Tab")
        self.page.click("button#run")


@pytest.fixture(scope="module")
def server(place):
    with start(place) as server:
        yield server
        assert "Traceback" not in server.log
        assert "https://" not in server.log.replace("https://www.gradio.app", "")  # no share link


@pytest.fixture(scope="module")
def address(place, server):
    with proxy(place, server.url) as address:
        yield address


@pytest.fixture(scope="module")
def visitor(browser, address):
    return Visitor(browser, address)


def test_it_runs_as_another_user_who_can_write_nothing_of_it(place, server):
    facts = Path(f"/proc/{server.process.pid}/status").read_text()
    assert re.search(rf"^Uid:\s+{UID}\s+{UID}\s+{UID}\s+{UID}$", facts, re.M)
    assert int(re.search(r"^CapEff:\s+(\w+)$", facts, re.M)[1], 16) in (0, 1 << 2)  # it may read
    for there in (place / "code", place / "home"):
        assert not there.stat().st_mode & 0o222


def test_a_run_under_the_prefix_shows_its_curve_and_downloads(visitor):
    visitor.run("tiny", B=2, T=16, steps=6)
    visitor.wait(f"{STATE} === 'finished' && {POINTS} >= 6")
    visitor.wait("document.querySelectorAll('#runs tbody tr').length > 0")
    for name, sign in (("CSV", "tiny"), ("JSON", '"loss"')):
        with visitor.page.expect_download() as download:
            visitor.page.locator("#downloads a").filter(has_text=name).click()
        assert sign in Path(download.value.path()).read_text()
    visitor.page.get_by_role("tab", name="Memory").click()
    visitor.wait("document.querySelector('#fit-map .js-plotly-plot')?._fullData?.length > 0")
    assert visitor.errors == []
    assert visitor.failed == []


def test_a_reload_in_the_middle_of_a_run_shows_it_again(visitor):
    visitor.page.get_by_role("tab", name="Run").click()
    visitor.run("tiny", B=2, T=64, steps=1000)
    # rows come through the proxy as they are made; the finished curve has six points
    visitor.wait(f"{STATE} === 'running' && {POINTS} >= 8")
    visitor.page.reload()
    visitor.wait(f"{STATE} === 'running' && {POINTS} >= 8")


def test_every_request_stayed_under_the_prefix_and_none_failed(place, address, visitor):
    seen = visitor.requests
    assert any("plotly-" in url for url in seen)
    assert [u for u in seen if not u.startswith((address, "data:", "blob:"))] == []
    answers = [line.split(" ", 1) for line in (place / "access.log").read_text().splitlines()]
    assert len(answers) > 50
    # 499: the browser left while it was being answered, as at a reload
    bad = {path for status, path in answers if status >= "400" and status != "499"}
    outside = {path for _, path in answers if not path.startswith(PREFIX)}
    assert bad | outside <= {"/favicon.ico"}  # a browser looks for an icon at the host's root
    assert list((place / "home").iterdir()) == []


def test_sigterm_ends_it_within_ten_seconds_and_the_run_is_kept(place, server, visitor):
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 0
    assert time.monotonic() - begun < 10
    with start(place) as again:
        board = httpx.get(f"{again.url}/gradio_api/gpt2demo-board.json", timeout=10).json()
        assert "Traceback" not in again.log
    finished, stopped = board["runs"]
    assert finished["summary"]["state"] == "finished"
    # "interrupted" where a step takes longer than the server waits
    assert stopped["summary"]["state"] in ("stopped", "interrupted")
    assert len(stopped["steps"]) == stopped["summary"]["steps_done"] >= 8
    assert all(step["loss"] > 0 for step in stopped["steps"])
