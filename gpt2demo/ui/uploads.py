"""Uploaded files: a folder of this process alone, emptied as soon as nobody needs them."""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

log = logging.getLogger(__name__)

_VARIABLE: Final = "GRADIO_TEMP_DIR"  # where gradio puts uploads, read when the page is built
_PREFIX: Final = "gpt2demo-uploads-"
_KEPT_SECONDS: Final = 1800.0  # an upload that nobody runs with, or one that broke off
_LOOK_SECONDS: Final = 60.0


@contextlib.contextmanager
def upload_folder() -> Iterator[None]:
    """Have gradio keep uploads in a folder that no other program uses; it is gone afterwards.

    Where none can be made, as on a full disk, gradio's own default stays.
    """
    before = os.environ.get(_VARIABLE)
    try:
        if before:
            Path(before).mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=before)
    except OSError as exc:
        log.warning("no folder for uploads of our own: %s", exc.strerror)
        yield
        return
    os.environ[_VARIABLE] = folder
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = before
        shutil.rmtree(folder, ignore_errors=True)


def forget_upload(path: object) -> None:
    """Delete an upload that has been read."""
    if not isinstance(path, str):
        return
    with contextlib.suppress(OSError, ValueError):
        Path(path).unlink(missing_ok=True)
        Path(path).parent.rmdir()  # gradio gives every content a folder


def sweep(folder: Path, older_than_seconds: float) -> int:
    """Delete the files of `folder` that are older, and its empty folders; how many files went."""
    gone = 0
    oldest = time.time() - older_than_seconds
    for parent, _, names in os.walk(folder, topdown=False):
        for path in (Path(parent) / name for name in names):
            with contextlib.suppress(OSError):
                if path.lstat().st_mtime < oldest:
                    path.unlink()
                    gone += 1
        with contextlib.suppress(OSError):  # not empty
            if Path(parent) != folder and Path(parent).stat().st_mtime < oldest:
                Path(parent).rmdir()
    return gone


@contextlib.asynccontextmanager
async def sweeping(_: Any) -> AsyncIterator[None]:
    """For as long as the server runs, delete what was uploaded and never used."""
    folder = Path(os.environ.get(_VARIABLE, ""))
    if not folder.name.startswith(_PREFIX):  # not ours alone
        yield
        return

    async def look() -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await asyncio.to_thread(sweep, folder, _KEPT_SECONDS)

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
