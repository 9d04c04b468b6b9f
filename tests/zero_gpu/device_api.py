"""The part of Hugging Face's device API that the package `spaces` (0.51) asks: a GPU for a while.

A worker that has been let in is killed when its lease ends, as there.
"""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from urllib.parse import parse_qs, urlsplit


class _Api(BaseHTTPRequestHandler):
    """`server.leases`: token -> seconds, and the timer of whoever was let in with it."""

    def do_POST(self) -> None:
        asked = urlsplit(self.path)
        given = {name: values[0] for name, values in parse_qs(asked.query).items()}
        answer = {}
        if asked.path == "/schedule":
            token = f"token {next(self.server.numbers)}"
            self.server.leases[token] = [float(given["durationSeconds"]), None]
            answer = {"idle": False, "nvidiaIndex": 0, "nvidiaUUID": "", "allowToken": token}
        elif asked.path == "/allow":
            lease = self.server.leases[given["allowToken"]]
            lease[1] = threading.Timer(lease[0], _kill, [int(given["pid"])])
            lease[1].daemon = True
            lease[1].start()
        elif asked.path == "/release":
            _, timer = self.server.leases.pop(given["allowToken"])
            if timer:
                timer.cancel()
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def device_api() -> Iterator[str]:
    """Serve it on 127.0.0.1; its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Api)
    server.leases, server.numbers = {}, count(1)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
