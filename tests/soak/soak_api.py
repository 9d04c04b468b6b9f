"""Calls that nobody should make, at every endpoint: `python -m tests.soak.soak_api`.

Hypothesis makes the values: wrong types, huge numbers, texts that look like markup or paths, too
few and too many of them. They go to every event of the page and every endpoint for scripts, through
every door that gradio has for them (`/run`, `/call`, `/call/v2`, `/queue/join`), in any order, some
cancelled or hung up midway; and to gradio's own routes beside them. Meanwhile one client's run goes
on that nobody else may change.

Exit status 1 where an answer was a 5xx, held a traceback or a path of the server, or where the
other client's run was changed.
"""

import argparse
import json
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisWarning

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own helpers

from server import ROOT, Server, page

from gpt2demo.ui.live import STREAM_PATH

SHORT, LONG = 100, 6000  # calls
VICTIM_SHARE = 0.8  # of the calls, made while the other client's run goes on
# what a run of these calls may ask for; anything else is refused
SMALL = {"model": "tiny", "precision": "fp32", "B": 1, "T": 8, "steps": 3, "text": "builtin"}
SMALL |= {"precisions": "fp32,bf16", "rounds": 1}
_SILENCE_SEC = 2.0  # how long a caller hears of nothing while a run waits
SLOW = ("probe", "page_probe")  # eight seconds each, where nothing else runs
# the names of modules may stand in the scripts that every page has
LEAKS = re.compile(
    r"Traceback|File \\?\"|\.py\\?\", line|site-packages|/usr/|/tmp/|/home/|/root/|"
    + re.escape(str(ROOT))
)

_texts = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        [
            "", "tiny", "fp32", "fp99", "8", "-1", "1e999", "nan", "own", "__class__", "\0", "true",
            "../../etc/passwd", "/etc/passwd", "<img src=x onerror=alert(1)>", "\ud800", "{}",
            "=1+1", "x" * 100_000, "\u202e\u0000\uffff", "http://127.0.0.1:9/x", "' OR 1=1; --",
        ]
    ),
)  # fmt: skip
_numbers = st.one_of(
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.sampled_from([10**30, -(10**30), 10**400, 2**63, 2**31, 1e308, -0.0, 2.5, 1025, 257]),
)
_files = st.fixed_dictionaries(
    {"path": _texts, "meta": st.just({"_type": "gradio.FileData"})},
    optional={"url": _texts, "size": _numbers, "orig_name": _texts},
)
_plain = st.one_of(st.none(), st.booleans(), _numbers, _texts, _files)
JUNK = st.recursive(
    _plain,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=4,
)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One event of the page or endpoint for scripts."""

    index: int
    name: str
    names: tuple[str, ...]  # of its inputs
    plain: tuple[Any, ...]  # values that it takes


@dataclass(kw_only=True)
class Report:
    """What was called, what came back, and what must not."""

    calls: int = 0
    answers: Counter = field(default_factory=Counter)  # HTTP status -> how many
    faults: dict[str, str] = field(default_factory=dict)  # kind -> the first of it

    def look(self, what: str, asked: str, status: int, text: str) -> None:
        """Note an answer, and a fault where it is one."""
        self.answers[status] += 1
        if status >= 500:
            self.note(f"{status} from {what}", f"{asked[:300]} -> {text[:300]}")
        # what the caller sent may come back, quoted
        sent = {*LEAKS.findall(asked), *LEAKS.findall(asked.replace("\\\\", "\\"))}
        if found := {*LEAKS.findall(text)} - sent:
            self.note(f"{sorted(found)} in an answer of {what}", f"{asked[:300]} -> {text[:600]}")

    def note(self, kind: str, first: str) -> None:
        """A fault, told once a kind."""
        self.faults.setdefault(kind, first)


def endpoints(url: str) -> list[Endpoint]:
    """Every event of the page as its own configuration tells them."""
    config = httpx.get(f"{url}/config", timeout=20).json()
    parts = {part["id"]: part["props"] for part in config["components"]}
    info = httpx.get(f"{url}/gradio_api/info", timeout=20).json()["named_endpoints"]
    found = []
    for dependency in config["dependencies"]:
        name = dependency["api_name"]
        if told := info.get(f"/{name}"):
            names = [p["parameter_name"] for p in told["parameters"]]
            known = [p["parameter_default"] for p in told["parameters"]]
        else:
            given_ = [parts.get(i, {}) for i in dependency["inputs"]]
            names = [props.get("elem_id") or "" for props in given_]
            known = [props.get("value") for props in given_]
        plain = [SMALL.get(n, v) for n, v in zip(names, known, strict=True)]
        found.append(
            Endpoint(index=dependency["id"], name=name, names=tuple(names), plain=tuple(plain))
        )
    return found


class Caller:
    """Somebody who calls whatever there is, in any order."""

    def __init__(self, server: Server, report: Report) -> None:
        self.server, self.report = server, report
        # a connection a call: a refused body is not read to its end, and ends its connection
        limits = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(base_url=server.url, timeout=30, limits=limits)
        self.events: list[tuple[str, str, int]] = []  # (event id, session, index)

    def post(self, path: str, body: object, what: str) -> httpx.Response | None:
        content = json.dumps(body)
        headers = {"Content-Type": "application/json"}
        return self.seen(what, content, "POST", path, content=content, headers=headers)

    def seen(self, what: str, asked: str, method: str, path: str, **more: Any) -> httpx.Response:
        answer = self.http.request(method, path, **more)
        self.report.look(what, f"{path} {asked}", answer.status_code, answer.text)
        return answer

    def call(self, endpoint: Endpoint, values: list, door: str, session: str, lines: int) -> None:
        """Call `endpoint`; of a stream, read at most so many lines."""
        self.report.calls += 1
        name, what = endpoint.name, f"{door} {endpoint.name}"
        body: dict[str, Any] = {"data": values}
        if door == "run":
            self.post(f"/gradio_api/run/{name}", body | {"session_hash": session}, what)
            return
        if door == "call":
            answer = self.post(f"/gradio_api/call/{name}", body, what)
            stream = f"/gradio_api/call/{name}/"
        elif door == "call/v2":
            named = dict(zip(endpoint.names, values, strict=False))
            answer = self.post(f"/gradio_api/call/v2/{name}", named, what)
            stream = f"/gradio_api/call/v2/{name}/"
        else:
            body |= {"fn_index": endpoint.index, "session_hash": session}
            answer = self.post("/gradio_api/queue/join", body, what)
            stream = ""
        try:
            event = answer.json()["event_id"]
        except (ValueError, KeyError, TypeError):
            return
        self.events.append((event, session, endpoint.index))
        path = f"{stream}{event}" if stream else f"/gradio_api/queue/data?session_hash={session}"
        self.read(path, what, json.dumps(body), lines)

    def read(self, path: str, what: str, asked: str, lines: int, headers: Any = None) -> None:
        """So many lines of a stream; then hang up, and soon where a run only waits in the line."""
        waits = self.server.post("status")["waiting"] > 0
        patience = httpx.Timeout(30, read=_SILENCE_SEC if waits else 30)
        with self.http.stream("GET", path, headers=headers, timeout=patience) as answer:
            if answer.status_code != 200:
                answer.read()
                self.report.look(what, asked, answer.status_code, answer.text)
                return
            text = []
            try:
                for line in answer.iter_lines():
                    text.append(line)
                    if len(text) > lines or "process_completed" in line or "event: er" in line:
                        break
            except httpx.ReadTimeout:
                if not waits:
                    self.report.note(f"no answer from {what}", asked[:300])
            except httpx.RemoteProtocolError:
                pass  # how gradio ends a stream that is nobody's
            self.report.look(what, asked, 200, "\n".join(text))

    def beside(self, way: str, value: Any, words: str) -> None:
        """Gradio's own routes."""
        self.report.calls += 1
        words = words.encode(errors="replace").decode()  # a URL holds no half characters
        event, session, index = self.events[-1] if self.events else ("none", "nobody", 0)
        if way == "cancel":
            body = {"session_hash": session, "fn_index": index, "event_id": event}
            self.post("/gradio_api/cancel", body, way)
        elif way == "cancel anything":
            self.post("/gradio_api/cancel", value, way)
        elif way == "reset":
            self.post("/gradio_api/reset", {"event_id": event}, way)
        elif way == "no such event":
            self.read(f"/gradio_api/call/train/{event[::-1]}", way, event, 3)
        elif way == "no such session":
            self.read("/gradio_api/queue/data?session_hash=nobody", way, "", 3)
        elif way == "no such endpoint":
            name = quote(words[:40], safe="")
            for door in ("run", "call", "call/v2"):
                self.post(f"/gradio_api/{door}/{name}", {"data": [value]}, f"{way}, {door}")
        elif way == "no such index":
            body = {"data": [value], "fn_index": 10**6, "session_hash": "s"}
            self.post("/gradio_api/queue/join", body, way)
            self.post("/gradio_api/queue/join", body | {"fn_index": value}, way)
        elif way == "any body":
            self.post("/gradio_api/queue/join", value, way)
            self.post("/gradio_api/run/status", value, way)
            self.post("/gradio_api/call/train", value, way)
            self.post("/gradio_api/call/v2/train", value, way)
        elif way == "no JSON":
            raw, headers = words.encode(), {"Content-Type": "application/json"}
            for path in ("run/status", "call/train", "call/v2/train", "queue/join", "cancel"):
                self.seen(
                    f"{way}, {path}", words, "POST", f"/gradio_api/{path}",
                    content=raw, headers=headers,
                )  # fmt: skip
        elif way == "component":
            for body in (
                value,
                {"data": value, "component_id": value, "session_hash": "s", "fn_name": "snapshot"},
                {"data": value, "component_id": 10**6, "session_hash": "s", "fn_name": words},
            ):
                self.post("/gradio_api/component_server", body, way)
        elif way == "file":
            self.seen(way, words, "GET", f"/gradio_api/file={quote(words[:200])}")
            self.seen(way, "", "GET", "/gradio_api/file=/etc/passwd")
        elif way == "upload":
            # the uploader alone is told where the file lies: the page sends that back
            files = {"files": (words[:40], words.encode())}
            told = self.http.post("/gradio_api/upload", files=files)
            self.report.look(way, words, told.status_code, "")
            self.seen(way, words, "POST", "/gradio_api/upload", data={"files": words[:40]})
            self.seen(way, words, "POST", "/gradio_api/upload", content=b"x")
        elif way == "stream":
            raw = re.sub(rb"[^ -~\x80-\xff]", b"", words.encode("latin-1", errors="replace"))
            self.read(STREAM_PATH, way, words, 1, headers=[(b"X-Owner", raw.strip())])
            self.post(STREAM_PATH, value, way)
        elif way == "page":
            words = words[:5000]  # httpx takes no longer address
            query = {"B": words, "model": words, "on": words, "ms": "1"}
            self.seen(way, json.dumps(query), "GET", "/", params=query)
            self.seen(way, "", "GET", "/gradio_api/info")


BESIDE = (
    "cancel", "cancel anything", "reset", "no such event", "no such session", "no such endpoint",
    "no such index", "any body", "no JSON", "component", "file", "upload", "stream", "page",
)  # fmt: skip


def soak(server: Server, report: Report, calls: int, *, idle: bool) -> None:
    """Make `calls` calls; `idle`: nobody's run goes on, so that theirs may start."""
    known = [e for e in endpoints(server.url) if not (idle and e.name in SLOW)]
    caller = Caller(server, report)
    sessions = [f"fuzz{number}" for number in range(6)]

    @settings(
        max_examples=calls,
        deadline=None,
        database=None,
        derandomize=calls <= SHORT,  # CI makes the same calls every time
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def one(data: st.DataObject) -> None:
        draw = data.draw
        if draw(st.integers(0, 4)) == 0:
            caller.beside(draw(st.sampled_from(BESIDE)), draw(JUNK), draw(_texts))
            return
        endpoint = draw(st.sampled_from(known))
        values = list(endpoint.plain)
        for _ in range(draw(st.integers(0, 3))):
            if values:
                values[draw(st.integers(0, len(values) - 1))] = draw(JUNK)
        how = draw(st.integers(0, 9))
        if how == 0:
            values = values[: draw(st.integers(0, len(values)))]
        elif how == 1:
            values += draw(st.lists(JUNK, max_size=3))
        door = draw(st.sampled_from(["run", "call", "call/v2", "join"]))
        caller.call(
            endpoint, values, door, draw(st.sampled_from(sessions)), draw(st.integers(0, 12))
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HypothesisWarning)  # long texts are what is wanted
        one()
    caller.http.close()


class Victim:
    """Another client's run, started before the calls and looked at after them."""

    def __init__(self, server: Server, steps: int) -> None:
        self.server, self.steps = server, steps
        names = next(e for e in endpoints(server.url) if e.name == "train")
        values = dict(zip(names.names, names.plain, strict=True)) | {"steps": steps, "seed": 77}
        url = f"{server.url}/gradio_api/call/train"
        body = {"data": [values[name] for name in names.names]}
        event = httpx.post(url, json=body, timeout=20).json()["event_id"]
        self.stream = httpx.stream("GET", f"{url}/{event}", timeout=60)
        self.answer = self.stream.__enter__()
        self.lines = self.answer.iter_lines()
        self.told = [self._next()]

    def _next(self) -> dict:
        for line in self.lines:
            if line.startswith("data: ") and line != "data: null":
                return json.loads(line.removeprefix("data: "))[0]
        return {}

    def end(self) -> tuple[list[int], dict]:
        """Stop it by its own token; its steps as its client got them, and its summary."""
        self.server.post("stop", self.told[0]["stop_token"])
        while "summary" not in self.told[-1]:
            self.told.append(self._next())
            assert self.told[-1], "the stream ended without a summary"
        self.stream.__exit__(None, None, None)
        steps = [told["step"] for told in self.told if "step" in told]
        return steps, self.told[-1]["summary"]


def run(calls: int) -> Report:
    """The whole soak; what it found."""
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        # the other client's run outlasts the calls
        limits = {"MAX_STEPS": "100000", "MAX_SECONDS": "36000", "ORPHAN_SECONDS": "36000"}
        with served(folder, report, limits) as server:
            victim = Victim(server, 100_000)
            soak(server, report, round(calls * VICTIM_SHARE), idle=False)
            seen, summary = victim.end()
            if summary["state"] != "stopped" or "its owner pressed Stop" not in summary["message"]:
                report.note("the other client's run was changed", summary["message"])
            if seen != list(range(summary["steps_done"])):
                report.note("the other client's run lost rows", f"{len(seen)} of {summary}")
        # and here runs end at once, so that many come to be
        with served(folder, report, {"MAX_STEPS": "4", "MAX_SECONDS": "2"}) as server:
            soak(server, report, round(calls * (1 - VICTIM_SHARE)), idle=True)
            server.wait_idle()
    return report


@contextmanager
def served(folder: str, report: Report, limits: dict[str, str]) -> Iterator[Server]:
    """A server with these limits; what its log holds of tracebacks is a fault."""
    environ = {f"GPT2DEMO_{name}": value for name, value in limits.items()}
    with page(Path(folder), **environ) as server:
        yield server
        for trace in server.log.split("Traceback (most recent call last):")[1:]:
            lines = trace.splitlines()
            raised = next((line for line in lines if line and line[0] != " "), "")
            report.note(f"in the log: {raised[:90]}", "\n".join(lines[-12:]))


def main() -> int:
    """Print the figures; 1 where a bound was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=LONG)
    options = parser.parse_args()
    start = time.monotonic()
    report = run(options.calls)
    answers = ", ".join(f"{n} x {status}" for status, n in sorted(report.answers.items()))
    print(f"{report.calls} calls in {time.monotonic() - start:.0f} s: {answers}")
    for kind, first in report.faults.items():
        print(f"FAULT {kind}\n      {first}")
    print("no fault" if not report.faults else f"{len(report.faults)} faults")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
