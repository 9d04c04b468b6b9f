"""A full room: `python -m tests.soak.soak_room`.

A hundred people watch one run on a real server, as raw streams that ask for the rest of the page
where a page would: they join, reload, and drop their connections at random moments, while visitors
press Run and Stop. Then the same run is timed with and without them, turn by turn. The watchers
share the machine with the server, at a lower priority.

Exit status 1 where a bound was broken: an error in the log, clicks answered within a second (99 of
100), under 1 KB an update, memory whose peak grows by less than 50 MB after the first minute, steps
that are slowed by less than 5 %.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import secrets
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own helpers

from server import Server, page

from gpt2demo.shipped import asset
from gpt2demo.ui.live import STREAM_PATH

MIB = 2**20
UPDATE_BYTES = 1024
GROWTH_MIB = 50
SLOWED = 1.05
CLICK_SECONDS = 1.0
_SCRIPT = asset("live_chart.js").read_text(encoding="utf-8")
# times pages: how long one of them may wait
TURN_SECONDS = int(re.search(r"TURN_MS = (\d+)", _SCRIPT)[1]) / 1000


@dataclass(frozen=True, kw_only=True)
class Form:
    """How large a room, and for how long."""

    watchers: int = 100
    seconds: float = 600.0
    settled: float = 60.0  # seconds after which memory must not grow
    arrive: float = 15.0  # seconds within which all of them come
    stay: float = 30.0  # seconds until a watcher reloads or drops, on average
    click_every: float = 2.0
    click_seconds: float = CLICK_SECONDS  # the bound; a busy machine needs patience
    growth_mib: float = GROWTH_MIB  # the bound; the first minute is not over in a short form
    turns: int = 5  # pairs of timed runs, with and without watchers; 0 = none
    nice: int = 10  # people's own computers do not take the server's time


LONG = Form()
SHORT = Form(
    watchers=25,
    seconds=12.0,
    arrive=1.0,
    settled=4.0,
    stay=4.0,
    click_every=0.4,
    click_seconds=5.0,
    growth_mib=100,
    turns=0,
    nice=0,
)


@dataclass(kw_only=True)
class Figures:
    """What the room has come to."""

    updates: int = 0
    update_bytes: int = 0
    largest: int = 0
    snapshots: int = 0
    ticks: int = 0  # answers to what pages asked for around their charts
    ends: Counter = field(default_factory=Counter)  # how connections ended
    clicks: dict[str, list[float]] = field(default_factory=dict)  # seconds until the answer
    rss_mib: list[tuple[float, float]] = field(default_factory=list)  # (seconds, MiB)
    ratios: list[float] = field(default_factory=list)  # step time with watchers over without
    faults: list[str] = field(default_factory=list)

    def all_clicks(self) -> list[float]:
        """All answers' seconds, sorted."""
        return sorted(second for seconds in self.clicks.values() for second in seconds)

    def p99(self) -> float:
        """Seconds within which 99 of 100 clicks were answered."""
        clicks = self.all_clicks()
        return clicks[min(len(clicks) - 1, int(len(clicks) * 0.99))]

    def words(self) -> str:
        """The figures in a few lines."""
        each = self.update_bytes / max(self.updates, 1)
        clicks = self.all_clicks()
        lines = [
            f"{self.updates:,} updates of {each:.0f} bytes (largest {self.largest}), "
            f"{self.snapshots} snapshots, connections ended: {dict(self.ends)}",
            f"{self.ticks:,} answers about the rest of the page",
            f"{len(clicks)} clicks: median {statistics.median(clicks) * 1000:.0f} ms, p99 "
            f"{self.p99() * 1000:.0f} ms",
            f"server's memory: {self.rss_mib[0][1]:.0f} MiB at first, "
            f"{self.rss_mib[-1][1]:.0f} MiB at the end",
        ]
        if self.ratios:
            told = ", ".join(f"{ratio:.3f}" for ratio in self.ratios)
            lines.append(
                f"a step with watchers over one without: {statistics.median(self.ratios):.3f} "
                f"(turns: {told})"
            )
        return "\n".join(lines)


class Room:
    """The people in front of one server."""

    def __init__(self, server: Server, form: Form, figures: Figures, seed: int = 5) -> None:
        self.server, self.form, self.figures = server, form, figures
        self.chance = random.Random(seed)
        config = httpx.get(f"{server.url}/config", timeout=20).json()
        self.known = {d["api_name"]: d for d in config["dependencies"]}
        self.parts = {part["id"]: part["props"] for part in config["components"]}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(30, pool=None)
        self.http = httpx.AsyncClient(base_url=server.url, limits=limits, timeout=timeout)
        self.owners = [secrets.token_urlsafe(32) for _ in range(8)]
        # what a page asks for when its live view ticks
        self.ticked = {
            name: self.defaults(name)
            for name, d in self.known.items()
            if "tick" in [event for _, event in d["targets"]]
        }

    def defaults(self, name: str, **settings: Any) -> list[Any]:
        """What a page that was just opened sends with this event, but for these settings."""
        inputs = [self.parts.get(part, {}) for part in self.known[name]["inputs"]]
        return [settings.get(props.get("elem_id"), props.get("value")) for props in inputs]

    def values(self, name: str, token: str, **settings: Any) -> list[Any]:
        """What the page sends with this event."""
        return [token, *self.defaults(name, **settings)[1:]]

    async def events(self, name: str, values: list[Any], session: str) -> AsyncIterator[str]:
        """The lines of an event's own stream."""
        body = {"data": values, "fn_index": self.known[name]["id"], "session_hash": session}
        answer = await self.http.post("/gradio_api/queue/join", json=body)
        answer.raise_for_status()
        path = f"/gradio_api/queue/data?session_hash={session}"
        async with self.http.stream("GET", path) as stream:
            async for line in stream.aiter_lines():
                if line:
                    yield line

    async def finished(self, name: str, values: list[Any], session: str = "") -> None:
        """Send an event through the queue, and read its stream to the end."""
        session = session or secrets.token_hex(6)
        async with contextlib.aclosing(self.events(name, values, session)) as lines:
            async for line in lines:
                if "process_completed" in line:
                    return

    async def stream(self, session: str) -> AsyncIterator[bytes]:
        """The lines of a page's stream, read from the bare socket: a hundred cost little."""
        owner, url = secrets.token_urlsafe(32), httpx.URL(self.server.url)
        # what gradio does for a page that is opened
        await self.finished("page_owner", [owner], session)
        reader, writer = await asyncio.open_connection(url.host, url.port, limit=4 * MIB)
        try:
            asked = f"GET {STREAM_PATH} HTTP/1.1\r\nHost: {url.host}\r\nX-Owner: {owner}\r\n\r\n"
            writer.write(asked.encode())
            while line := await reader.readline():
                yield line
        finally:
            writer.close()

    async def watcher(self, stay: bool = False) -> None:
        """One person: watches, reloads, loses the connection, comes again."""
        await asyncio.sleep(self.chance.random() * self.form.arrive)
        while True:
            until = time.monotonic() + (
                1e9 if stay else self.chance.expovariate(1 / self.form.stay)
            )
            try:
                async with asyncio.timeout(max(0.05, until - time.monotonic())):
                    session = secrets.token_hex(6)
                    async with contextlib.aclosing(self.stream(session)) as lines:
                        await self.look(lines, session)
                self.figures.ends["by the server"] += 1
            except TimeoutError:
                self.figures.ends["dropped"] += 1
            if self.chance.random() < 0.5:
                await asyncio.sleep(self.chance.random())

    async def look(self, lines: AsyncIterator[bytes], session: str) -> None:
        """Count what a stream sends, and tick as a page does."""
        first, ticked = True, asyncio.Event()
        asking = asyncio.create_task(self.ask(ticked, session))
        try:
            async for line in lines:
                if not line.startswith(b"data: "):
                    continue
                if b'"page":' in line or b'"stop":' in line:
                    ticked.set()
                first = self.count(line, first)
                if asking.done():
                    asking.result()
        finally:
            asking.cancel()

    async def ask(self, ticked: asyncio.Event, session: str) -> None:
        """What a page asks for when it is opened, and when something around its chart changes; once
        more where that changes again meanwhile.
        """
        wait = 0.0
        while True:
            await ticked.wait()
            await asyncio.sleep(wait)
            ticked.clear()
            wait = self.chance.random() * TURN_SECONDS * self.form.watchers
            for name, values in self.ticked.items():
                await self.at_once(name, values, session)
                self.figures.ticks += 1

    def count(self, line: bytes, first: bool) -> bool:
        """Count a message; whether the next one is a stream's first."""
        if first:
            self.figures.snapshots += 1
        else:
            size = len(line) + 1  # and the empty line
            self.figures.updates += 1
            self.figures.update_bytes += size
            self.figures.largest = max(self.figures.largest, size)
        return False

    async def visitor(self) -> None:
        """Presses Run and Stop, and looks at what the page fetches then."""
        while True:
            await asyncio.sleep(self.chance.expovariate(1 / self.form.click_every))
            owner = self.chance.choice(self.owners)
            name = self.chance.choice(("page_run", "page_stop", "page_around", "page_board"))
            start = time.monotonic()
            if name == "page_run":
                await self.press_run(owner)
            elif name == "page_board":
                await self.at_once(name, self.values(name, owner))
            else:
                await self.at_once(name, [owner])
            self.figures.clicks.setdefault(name, []).append(time.monotonic() - start)

    async def press_run(self, owner: str, **settings: Any) -> None:
        """The click on Run, until it is taken or refused."""
        chosen = {"model": "tiny", "B": 2, "T": 32, "steps": 300} | settings
        await self.finished("page_run", self.values("page_run", owner, **chosen))

    async def at_once(self, name: str, values: list[Any], session: str = "") -> None:
        body = {"data": values} | ({"session_hash": session} if session else {})
        answer = await self.http.post(f"/gradio_api/run/{name}", json=body)
        if answer.status_code != 200:
            self.figures.faults.append(f"{name}: {answer.status_code} {answer.text[:200]}")

    async def memory(self) -> None:
        """The server's memory, once a second."""
        process, start = psutil.Process(self.server.process.pid), time.monotonic()
        while True:
            rss = process.memory_info().rss / MIB
            self.figures.rss_mib.append((time.monotonic() - start, rss))
            await asyncio.sleep(1)

    async def soak(self) -> None:
        """The room for as long as the form says."""
        await self.press_run(self.owners[0], steps=5)
        await asyncio.to_thread(self.server.wait_idle)  # what the first run loads is loaded
        crowd = [self.watcher() for _ in range(self.form.watchers)]
        tasks = [asyncio.create_task(t) for t in (*crowd, self.visitor(), self.memory())]
        await self.press_run(self.owners[0])
        await asyncio.wait(tasks, timeout=self.form.seconds, return_when="FIRST_EXCEPTION")
        await self.send_home(tasks)

    async def send_home(self, tasks: list["asyncio.Task[None]"]) -> None:
        """End the tasks; one that had failed is a fault."""
        for task in tasks:
            if task.done():
                self.figures.faults.append(f"a visitor's connection: {task.exception()!r}")
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def compare(self) -> None:
        """The same run with and without the room, turn by turn."""
        await asyncio.to_thread(self.stop_all)
        await self.timed()
        for turn in range(self.form.turns):
            found = {}
            for watched in (True, False) if turn % 2 else (False, True):
                tasks = []
                if watched:
                    tasks = [
                        asyncio.create_task(self.watcher(stay=True))
                        for _ in range(self.form.watchers)
                    ]
                    await asyncio.sleep(self.form.arrive + 3)
                found[watched] = await self.timed()
                await self.send_home(tasks)
                await asyncio.sleep(3)
            self.figures.ratios.append(found[True] / found[False])

    async def timed(self) -> float:
        """Median ms/step of a run of GPT-2 124M, B=4, T=32."""
        names = httpx.get(f"{self.server.url}/gradio_api/info", timeout=20).json()
        parameters = names["named_endpoints"]["/train"]["parameters"]
        given = {"B": 4, "T": 32, "steps": 14}
        values = [given.get(p["parameter_name"], p["parameter_default"]) for p in parameters]
        summary = None
        async with contextlib.aclosing(self.events("train", values, secrets.token_hex(6))) as lines:
            async for line in lines:
                message = json.loads(line.removeprefix("data: "))
                for part in (message.get("output") or {}).get("data") or []:
                    if isinstance(part, dict) and "summary" in part:
                        summary = part["summary"]
                if message.get("msg") == "process_completed":
                    break
        assert summary, "the timed run has no summary"
        return summary["step_ms_median"]

    def stop_all(self) -> None:
        """Take every run out of the line, and end the one that goes on."""
        for _ in range(2):
            for owner in self.owners:
                self.server.post("stop", owner)
                self.server.post("stop", owner)
        self.server.wait_idle()


def check(form: Form, figures: Figures, log: str) -> None:
    """Hold the figures against the bounds."""
    for word in ("Traceback", "ERROR", "Exception"):
        if word in log:
            figures.faults.append(f"{word} in the log: {log[log.index(word) :][-1500:]}")
    if figures.updates < form.watchers:
        figures.faults.append(f"only {figures.updates} updates came")
    elif figures.update_bytes / figures.updates >= UPDATE_BYTES:
        figures.faults.append(f"{figures.update_bytes / figures.updates:.0f} bytes an update")
    if figures.p99() > form.click_seconds:
        figures.faults.append(f"clicks were answered within {figures.p99():.2f} s (p99)")
    before = [rss for second, rss in figures.rss_mib if second < form.settled]
    after = [rss for second, rss in figures.rss_mib if second >= form.settled]
    if not before or not after:
        figures.faults.append("nobody looked at the memory")
    # peaks, as a single moment may lie within a run or between two
    elif max(after) - max(before) >= form.growth_mib:
        figures.faults.append(f"memory grew by {max(after) - max(before):.0f} MiB")
    if figures.ratios and statistics.median(figures.ratios) > SLOWED:
        figures.faults.append(f"steps took {statistics.median(figures.ratios):.3f} times as long")


def run(form: Form) -> Figures:
    """The whole soak; what it found."""
    figures = Figures()
    with tempfile.TemporaryDirectory() as folder, page(Path(folder)) as server:
        os.nice(form.nice)  # after the server's start, which would inherit it

        async def all_of_it() -> None:
            room = Room(server, form, figures)
            async with room.http:
                await room.soak()
                if form.turns:
                    await room.compare()
                await asyncio.to_thread(room.stop_all)

        asyncio.run(all_of_it())
        check(form, figures, server.log)
    return figures


def main() -> int:
    """Print the figures; 1 where a bound was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--watchers", type=int, default=LONG.watchers)
    parser.add_argument("--seconds", type=float, default=LONG.seconds)
    parser.add_argument("--turns", type=int, default=LONG.turns)
    options = parser.parse_args()
    figures = run(Form(watchers=options.watchers, seconds=options.seconds, turns=options.turns))
    print(figures.words())
    for fault in figures.faults:
        print("FAULT", fault)
    return 1 if figures.faults else 0


if __name__ == "__main__":
    sys.exit(main())
