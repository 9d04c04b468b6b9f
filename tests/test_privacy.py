"""What is one visitor's stays theirs: own texts, uploads, tokens."""

import csv
import io
import json
import os
import re
import socket
import time
from pathlib import Path

import httpx
import pytest
from gradio_client import Client
from server import Server, page

from gpt2demo.table import table_csv
from gpt2demo.ui.live import STREAM_PATH
from gpt2demo.ui.uploads import forget_upload, sweep, upload_folder
from gpt2demo.ui.watching import known_owner

SECRET = "correct-horse-battery-staple-9731"
TEXT = f"{SECRET} said the visitor to nobody but the training loop. " * 8
TOKEN = "a-visitors-own-token-" + "7" * 30
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("privacy")


@pytest.fixture(scope="module")
def server(folder):
    (folder / "uploads").mkdir()
    with page(folder, GRADIO_TEMP_DIR=str(folder / "uploads")) as server:
        yield server
        assert "Traceback" not in server.log


def config(server: Server) -> dict:
    return httpx.get(f"{server.url}/config", timeout=20).json()


def event(server: Server, name: str, session: str, token: str | None = None, **settings) -> str:
    """One event of the page, as its script sends it; all that comes back until its end."""
    known = config(server)
    parts = {part["id"]: part["props"] for part in known["components"]}
    dependency = next(d for d in known["dependencies"] if d["api_name"] == name)
    values = [settings.get(parts[i].get("elem_id"), parts[i].get("value")) for i in
              dependency["inputs"]]  # fmt: skip
    if token is not None:
        values[0] = token
    body = {"data": values, "fn_index": dependency["id"], "session_hash": session}
    httpx.post(f"{server.url}/gradio_api/queue/join", json=body, timeout=20).raise_for_status()
    url = f"{server.url}/gradio_api/queue/data?session_hash={session}"
    found = []
    with httpx.stream("GET", url, timeout=30) as stream:
        for line in stream.iter_lines():
            found.append(line)
            if "process_completed" in line:
                break
    return "\n".join(found)


def run_with(server: Server, session: str, **own) -> str:
    tiny = {"model": "tiny", "B": 1, "T": 8, "steps": 3}
    told = event(server, "page_run", session, TOKEN, **tiny, text="own", **own)
    server.wait_idle()
    return told


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def everything_others_see(server: Server) -> str:
    """All that somebody else can ask a server for."""
    get = [
        "/", "/config", "/gradio_api/info", "/gradio_api/gpt2demo-runs.csv",
        "/gradio_api/gpt2demo-runs.json", "/gradio_api/gpt2demo-board.json",
        "/gradio_api/startup-events", "/gradio_api/queue/status",
    ]  # fmt: skip
    seen = [httpx.get(server.url + path, timeout=20).text for path in get]
    seen.append(json.dumps(server.post("status")))
    with httpx.stream("GET", server.url + STREAM_PATH, timeout=20) as stream:
        seen.append(next(stream.iter_lines()))
    for name in ("page_owner", "page_around", "page_settings", "page_board"):
        seen.append(event(server, name, f"other-{name}", "an-others-token-" + "1" * 30))
    return "\n".join(seen)


def test_an_own_text_is_nowhere_but_in_its_run(server, folder):
    told = run_with(server, "mine", pasted=TEXT)
    assert '"success":true' in told
    client = Client(server.url, verbose=False, analytics_enabled=False)
    *_, last = client.submit(api_name="/train", model="tiny", B=1, T=8, steps=2, text=TEXT)
    assert last["summary"]["state"] == "finished"
    client.close()
    # what gradio keeps of a session, and would write into a file for whoever knows the session
    httpx.get(f"{server.url}/gradio_api/deep_link?session_hash=mine", timeout=20)
    written = files(folder)
    assert any(path.suffix == ".sqlite3" for path in written)
    assert any(path.name == "state.json" for path in written)  # the link was made
    for path in written:
        raw = path.read_bytes()
        assert SECRET.encode() not in raw, path
        assert TOKEN.encode() not in raw, path
    seen = everything_others_see(server)
    assert '"text": "own"' in seen or '"text":"own"' in seen  # the run itself is there
    assert SECRET not in seen
    assert TOKEN not in seen
    assert TOKEN not in server.log


def test_a_call_of_an_older_page_is_refused_and_its_text_not_logged(server):
    url = f"{server.url}/gradio_api/run/page_run"
    answer = httpx.post(url, json={"data": [TOKEN, TEXT]}, timeout=20)
    assert answer.status_code == 422
    assert "older than the server" in answer.json()["error"]
    assert SECRET not in server.log


def uploaded(server: Server, text: str = TEXT, name: str = "mine.txt") -> dict:
    url = f"{server.url}/gradio_api/upload"
    answer = httpx.post(url, files={"files": (name, text.encode())}, timeout=20)
    path = answer.json()[0]
    assert Path(path).read_text() == text
    return {"path": path, "orig_name": name, "meta": {"_type": "gradio.FileData"}}


def uploads(folder: Path) -> list[Path]:
    return [path for path in files(folder / "uploads") if path.suffix != ".json"]


def test_an_upload_is_gone_once_a_run_has_read_it(server, folder):
    upload = uploaded(server)
    assert uploads(folder)
    told = run_with(server, "upload", upload=upload)
    assert '"success":true' in told
    # empty files of gradio's own have no text in them
    assert [path for path in uploads(folder) if path.stat().st_size] == []
    assert "Upload it again" in run_with(server, "upload2", upload=upload)
    refused = uploaded(server)  # a run that is not taken leaves it for the next try
    event(server, "page_run", "upload3", TOKEN, model="tiny", T=1024, B=1, text="own",
          upload=refused)  # fmt: skip
    assert Path(refused["path"]).exists()


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/x", "https://example.org/a.txt"])
def test_an_address_is_no_upload(server, address):
    upload = {"path": address, "meta": {"_type": "gradio.FileData"}}
    assert "not an address" in run_with(server, "address", upload=upload)


def test_what_nobody_ran_with_is_swept(tmp_path):
    old, new = tmp_path / "a" / "old.txt", tmp_path / "b" / "new.txt"
    for path in (old, new):
        path.parent.mkdir()
        path.write_text(TEXT)
    before = time.time() - 3600
    os.utime(old, (before, before))
    assert sweep(tmp_path, 1800) == 1
    assert not old.exists()
    assert new.read_text() == TEXT
    forget_upload(str(new))
    assert list(tmp_path.glob("b*")) == []
    for nothing in (None, 3, "", "\0", str(new)):
        forget_upload(nothing)


def test_uploads_have_a_folder_of_their_own_that_goes_with_the_server(monkeypatch, tmp_path):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    with upload_folder():
        own = Path(os.environ["GRADIO_TEMP_DIR"])
        assert own.parent == tmp_path
        assert own.stat().st_mode & 0o077 == 0
        (own / "mine.txt").write_text(TEXT)
    assert list(tmp_path.iterdir()) == []
    assert os.environ["GRADIO_TEMP_DIR"] == str(tmp_path)


def sent_until_cut(server: Server, path: str, kind: str, start: bytes, total: int) -> int:
    """Send a chunked body of `total` bytes; how many went out before the server ended it."""
    host, port = re.match(r"http://(.+):(\d+)", server.url).groups()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    )
    block = b"x" * MIB
    sent = 0
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode() + b"%x\r\n%b\r\n" % (len(start), start))
        try:
            while sent < total:
                connection.sendall(b"%x\r\n%b\r\n" % (MIB, block))
                sent += MIB
        except OSError:
            pass
    return sent


def test_a_300_mb_upload_is_cut_off_while_it_streams(server, folder):
    before = uploads(folder)
    start = (
        b'--b\r\nContent-Disposition: form-data; name="files"; filename="big.txt"\r\n'
        b"Content-Type: text/plain\r\n\r\n"
    )
    kind = "multipart/form-data; boundary=b"
    sent = sent_until_cut(server, "/gradio_api/upload", kind, start, 300 * MIB)
    assert sent < 100 * MIB
    big = [path for path in uploads(folder) if path not in before and path.stat().st_size > MIB]
    assert big == []
    sent = sent_until_cut(
        server, "/gradio_api/call/train", "application/json", b'{"data": ["', 300 * MIB
    )
    assert sent < 100 * MIB
    # one that says its length is not read at all
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        head = f"POST /gradio_api/queue/join HTTP/1.1\r\nHost: x\r\nContent-Length: {300 * MIB}"
        connection.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


# --- tokens


def test_tokens_of_the_page_are_long_and_never_the_same():
    tokens = {known_owner(given) for given in [None, "", "short", 7] * 50}
    assert len(tokens) == 200
    for token in tokens:
        # 43 characters of 64: 256 bits from the system's own source
        assert re.fullmatch(r"[A-Za-z0-9_-]{43}", token)


def test_a_run_without_a_session_belongs_to_nobody_who_asks(server):
    values = ["tiny", "fp32", 1, 8, 900, 1, "manual", "default", False, 50257, 3e-4, "builtin", 0]
    url = f"{server.url}/gradio_api/run/train"
    token = httpx.post(url, json={"data": values}, timeout=30).json()["data"][0]["stop_token"]
    assert len(token) >= 43
    for guess in ("", "x", "undefined", "null", token[:-1]):
        assert "somebody else" in server.post("stop", guess)["message"]
    assert server.post("stop", token)["message"].startswith("Stopping")
    server.wait_idle()


# --- the CSV of a foreign board


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t=", "\r=", "\n@", " =", "|", "\ufeff="])
def test_a_name_is_no_formula_in_the_csv(start):
    from test_board import made

    record = made(1)
    name = f"{start}HYPERLINK(1)"
    table = table_csv([type(record)(**{
        "config": record.config, "device": record.device | {"name": name},
        "steps": record.steps, "summary": record.summary,
    })])  # fmt: skip
    (row,) = csv.DictReader(io.StringIO(table))
    assert "HYPERLINK(1)" in row["device"]
    assert row["device"].lstrip(" \t\r\n\ufeff")[0] not in "=+-@"
    assert len(table.splitlines()) == 2
