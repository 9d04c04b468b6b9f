"""A headless Chromium and a served page, for the tests that look at the real thing."""

import asyncio
import gc
import os
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import gradio as gr
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from playwright.sync_api import TimeoutError as NotInTimeError

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def chromium_path() -> str:
    """The installed browser; without one the test skips, or fails where browsers are required."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    reason = f"no browser: none of {', '.join(NAMES)} is on the PATH"
    if os.environ.get("GPT2DEMO_REQUIRE_BROWSER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def chromium() -> Iterator[Browser]:
    """The installed Chromium, driven by playwright, with a profile as at home: from the third look
    at a page on its scripts come compiled, which is half of a page's cost.
    """
    path = chromium_path()
    with tempfile.TemporaryDirectory() as profile, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=path, args=FLAGS
        )
        try:
            yield context.browser
        finally:
            context.close()


class Person:
    """One person's browser, with a storage of its own.

    The profile is one person's at a time, and emptied after it. Whoever comes meanwhile, or with
    options that only a new context takes (a phone's touch), has a context without a profile.
    """

    _taken: ClassVar[set[BrowserContext]] = set()

    def __init__(self, browser: Browser, *, new: bool = False, **options: Any) -> None:
        profile = browser.contexts[0]
        plain = not new and options.keys() <= {"viewport", "color_scheme"}
        self._at_home = plain and profile not in Person._taken
        self._options = options
        self.context = profile if self._at_home else browser.new_context(**options)
        Person._taken.add(self.context)

    def new_page(self) -> Page:
        """A page of this person's."""
        page = self.context.new_page()
        if self._at_home:
            if size := self._options.get("viewport"):
                page.set_viewport_size(size)
            page.emulate_media(color_scheme=self._options.get("color_scheme", "light"))
        return page

    def close(self) -> None:
        """Close this person's pages; nothing of them is left."""
        Person._taken.discard(self.context)
        if not self._at_home:
            self.context.close()
            return
        first, *pages = self.context.pages  # the first is empty, and keeps the browser open
        hosts = {"/".join(page.url.split("/")[:3]) for page in pages}
        for page in pages:
            page.close()
        session = self.context.new_cdp_session(first)
        for host in hosts:
            kinds = "cookies,local_storage,indexeddb"
            session.send("Storage.clearDataForOrigin", {"origin": host, "storageTypes": kinds})
        session.detach()


def open_tab(page: Page, name: str) -> None:
    """Click the tab's button, or its entry in the menu that a phone folds it into.

    gradio moves the buttons some moments after the window's size has changed: a click that finds
    its button gone tries again.
    """
    end = time.monotonic() + 30
    tab = page.get_by_role("tab", name=name, exact=True).first
    while True:
        try:
            if tab.is_visible():
                tab.click(timeout=2000)
            else:
                page.locator(".overflow-menu > button:visible").first.click(timeout=2000)
                entry = page.locator(".overflow-dropdown button", has_text=name)
                entry.first.click(timeout=2000)
            return
        except NotInTimeError:
            if time.monotonic() > end:
                raise


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


_Built = TypeVar("_Built")


def built(build: Callable[[], _Built]) -> _Built:
    """What `build` makes of gradio's blocks, in a running event loop: without one gradio opens two
    and leaves them open.
    """

    async def inside() -> _Built:
        return build()

    return asyncio.run(inside())


@contextmanager
def served(demo: gr.Blocks, **launch: Any) -> Iterator[str]:
    """The page's address while `demo` is served on 127.0.0.1; closed afterwards."""
    port = free_port()
    settings = {"quiet": True, "run_history": False, "ssr_mode": False, "show_error": True}
    demo.launch(
        server_name="127.0.0.1",
        server_port=port,
        prevent_thread_lock=True,
        **(settings | launch),
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        demo.close()
        # gradio leaves a loop of this thread open; here it goes without a warning, later it would
        # be a warning in some other test
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            asyncio.set_event_loop(None)
            gc.collect()
