"""What stands between gradio and whoever calls it: refusals in words, and nothing private kept.

Gradio answers a call that does not fit with status 500, prints a traceback with the values into the
log, keeps every component's last value for each session, and reads a body of any length.
"""

import contextlib
import json
import logging
from typing import Any, Final

import gradio as gr
from gradio.components.api_component import Api
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

_PRIVATE_IDS: Final = ("pasted", "upload", "import", "live")  # live: the browser's token
_CLOSE: Final = (b"connection", b"close")
_OLD_PAGE: Final = "This page is older than the server, or the call lacks values: reload the page."
_UNFIT: Final = "These values do not fit the page's fields."
_NOT_UPLOADED: Final = "Only an uploaded file is read, not an address."


def guard(demo: gr.Blocks) -> None:
    """Have the built page refuse unfit values in words, and forget private ones.

    The methods are replaced, not overridden: where gradio meets a class of Blocks it writes a file.
    """
    _mute_closed_pages(demo)
    preprocess, process = demo.preprocess_data, demo.process_api
    # own texts, tokens, and all that the endpoints for scripts take and give
    private = [
        key
        for key, block in demo.blocks.items()
        if isinstance(block, gr.BrowserState | Api) or block.elem_id in _PRIVATE_IDS
    ]

    async def preprocess_data(block_fn: Any, inputs: list[Any], *args: Any, **more: Any) -> Any:
        if len(inputs) < len(block_fn.inputs):
            raise gr.Error(_OLD_PAGE, print_exception=False)
        if any(_is_address(value) for value in inputs):
            raise gr.Error(_NOT_UPLOADED, print_exception=False)
        try:
            return await preprocess(block_fn, inputs, *args, **more)
        except gr.Error as exc:  # a choice or a range, in gradio's words
            raise gr.Error(exc.message, print_exception=False) from None
        except Exception as exc:
            log.info("values did not fit: %s", type(exc).__name__)
            raise gr.Error(_UNFIT, print_exception=False) from None

    async def process_api(*args: Any, **more: Any) -> Any:
        try:
            return await process(*args, **more)
        finally:
            if state := more.get("state"):
                for key in private:
                    state.config_values.pop(key, None)

    demo.preprocess_data, demo.process_api = preprocess_data, process_api


def _mute_closed_pages(demo: gr.Blocks) -> None:
    """A message for a page that has just been closed goes nowhere."""
    queue, send = demo._queue, demo._queue.send_message

    def told(event: Any, message: Any) -> None:
        if event.session_hash in queue.pending_messages_per_session:
            send(event, message)  # else a KeyError, and a traceback in the log

    queue.send_message = told


def _is_address(value: Any) -> bool:
    """Whether the value asks gradio to fetch a file from somewhere."""
    if isinstance(value, list):
        return any(map(_is_address, value))
    if not isinstance(value, dict):
        return False
    path = value.get("path")
    return (isinstance(path, str) and "://" in path) or any(map(_is_address, value.values()))


class PlainAnswers:
    """ASGI middleware: a call that does not fit is answered 4xx in words, an endless body 413.

    Args:
        app: what is guarded.
        max_body_bytes: the most that a request may send.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._most = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, unless it is too long, and its answer back."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        got = 0

        async def counted() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > self._most:
                answer.muted = True  # FastAPI would say that it is no JSON
                raise _TooLongError
            return message

        try:
            if _declared_length(scope) > self._most:
                raise _TooLongError
            await self._app(scope, counted, answer.send)
            if answer.muted:
                raise _TooLongError
        except _TooLongError:
            await answer.refuse(413, f"A request may have at most {self._most:,} bytes.")
        except Exception as exc:
            # gradio looks names, indices and sessions up as they come; routes of our own are ours
            if scope["method"] == "GET" and not answer.streams:
                raise
            log.info("a call was not understood: %s", type(exc).__name__)
            await answer.refuse(400, "This call does not fit: see the page's API description.")


class _TooLongError(Exception):
    """A request has more bytes than are read."""


class _Answer:
    """One answer on its way: gradio's 500 for a refusal becomes 422."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: Message | None = None  # the start of a 500
        self._body = b""
        self._started = False
        self.streams = False  # the answer is an event stream
        self.muted = False  # what comes is not sent: the request is refused

    async def send(self, message: Message) -> None:
        """Pass a part of the answer on, as it is or mended."""
        if self.muted and not self._started:
            return
        if message["type"] == "http.response.start":
            if message["status"] == 500:
                self._held = message
                return
            self._started = True
            if message["status"] == 413:  # else the rest would be read, and thrown away
                message = {**message, "headers": [*message["headers"], _CLOSE]}
            kinds = [value for name, value in message["headers"] if name == b"content-type"]
            self.streams = any(kind.startswith(b"text/event-stream") for kind in kinds)
        elif self._held:
            self._body += message.get("body", b"")
            if message.get("more_body"):
                return
            start, self._held, self._started = self._held, None, True
            status = 422 if _says_why(self._body) else 500
            await self._send({**start, "status": status})
            message = {**message, "body": self._body}
        await self._send(message)

    async def refuse(self, status: int, detail: str) -> None:
        """Answer this, or end the stream that has begun."""
        with contextlib.suppress(OSError):  # the caller has left
            if self._started:
                await self._send({"type": "http.response.body", "body": b""})
                return
            body = json.dumps({"detail": detail}).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                _CLOSE,
            ]
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})


def _says_why(body: bytes) -> bool:
    """Whether gradio's error holds a sentence: it was raised for the caller, not by a fault."""
    try:
        return bool(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return False


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0
