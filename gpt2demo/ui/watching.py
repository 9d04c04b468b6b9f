"""The stream that keeps every open page up to date, on a route of its own.

gradio's queue takes about a millisecond of the server for every update and page, so that a room of
a hundred pages would slow the training that they watch. Here one task looks at the hub for all of
them and wakes them when there is something to tell; `assets/live_chart.js` is the other end.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gpt2demo.hub import Hub
from gpt2demo.ui.live import STREAM_PATH
from gpt2demo.ui.stream import Feed, sight

log = logging.getLogger(__name__)

_UPDATE_SEC: Final = 0.25
_BEAT_SEC: Final = 10.0  # an idle stream says that it is alive: proxies close a silent one
_OWNER_HEADER: Final = "x-owner"  # no part of the address, which proxies write into their logs
_HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def known_owner(token: object) -> str:
    """The browser's own token, or a new one that nobody holds yet."""
    return token if isinstance(token, str) and len(token) >= 32 else secrets.token_urlsafe(32)


class Watching:
    """The open pages of one server.

    Args:
        hub: what they watch.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._pages: set[asyncio.Event] = set()  # one a page; set = there may be news
        self._looking: asyncio.Task[None] | None = None

    def routes(self) -> list[Route]:
        """The stream's route, for `launch(app_kwargs={"routes": ...})`."""
        return [Route(STREAM_PATH, self.answer)]

    @property
    def count(self) -> int:
        """How many pages are open."""
        return len(self._pages)

    async def answer(self, request: Request) -> Response:
        """Server-sent events: the snapshot, then what is new, for as long as the page is open.

        The header X-Owner holds the browser's token; without one nothing is "mine".
        Status 503 when as many pages are open as this server takes.
        """
        if self.count >= self._hub.settings.max_pages:
            return JSONResponse({"detail": "As many pages are open as this server takes."}, 503)
        owner = known_owner(request.headers.get(_OWNER_HEADER))
        return StreamingResponse(
            self._events(owner, request.app), headers=_HEADERS, media_type="text/event-stream"
        )

    async def _events(self, owner: str, app: Any) -> AsyncIterator[str]:
        wake = asyncio.Event()
        self._pages.add(wake)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(app))
        try:
            feed = Feed(self._hub, owner, lambda: self.count)
            text: str | None = feed.snapshot()
            while not app.stop_event.is_set():
                if text:
                    yield f"data: {text}\n\n"
                    await asyncio.sleep(_UPDATE_SEC)
                else:
                    try:
                        async with asyncio.timeout(_BEAT_SEC):
                            await wake.wait()
                    except TimeoutError:
                        yield ":\n\n"
                wake.clear()  # before the look: what comes after it wakes again
                text = feed.news()
        except Exception:  # the page comes again
            log.exception("a page's stream ended with an error")
        finally:
            self._pages.discard(wake)

    async def _look(self, app: Any) -> None:
        """Wake all pages when the hub has changed, until none is open."""
        before: object = None
        while self._pages and not app.stop_event.is_set():
            self._hub.seen()
            try:
                now: object = sight(self._hub)
            except Exception:
                log.exception("the hub could not be looked at")
                now = object()  # the pages look for themselves
            if now != before:
                self._wake()
            before = now
            await asyncio.sleep(_UPDATE_SEC)
        self._wake()

    def _wake(self) -> None:
        for page in self._pages:
            page.set()
