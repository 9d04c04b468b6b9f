"""One result as a strict JSON file, written whole or not at all."""

import contextlib
import errno
import json
import os
import secrets
import stat
from typing import Any

from gpt2demo.config import InputError, shown


def reason(exc: OSError | ValueError) -> str:
    """Why a file could not be opened or written, in the system's words."""
    return getattr(exc, "strerror", None) or "not a file's name"


def strict_json(data: dict[str, Any]) -> str:
    """Strict JSON in ASCII, which every locale can write."""
    many = len(data.get("steps", ())) > 5_000  # indenting them takes seconds
    return json.dumps(data, allow_nan=False, indent=None if many else 1)


def check_json_path(path: str) -> None:
    """Refuse a file that could not be written at the run's end; nothing stays behind.

    Raises:
        InputError: naming the file and the reason.
    """
    try:
        if not path:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with contextlib.suppress(FileNotFoundError):
            os.stat(path)  # says when the name is too long
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not _is_special(path):
            draft = _draft_beside(path)
            open(draft, "x").close()
            os.unlink(draft)
    except (OSError, ValueError) as exc:
        raise InputError("json", f"--json {shown(path)} cannot be written ({reason(exc)}).") from (
            exc
        )


def write_json(path: str, data: dict[str, Any]) -> None:
    """Write `data` so that the file holds all of it or what it held before.

    Raises:
        OSError: it cannot be written.
    """
    text = strict_json(data) + "\n"
    if _is_special(path):
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
        return
    draft = _draft_beside(path)
    try:
        with open(draft, "x", encoding="ascii") as file:
            file.write(text)
        os.replace(draft, os.path.realpath(path))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def _is_special(path: str) -> bool:
    """Whether `path` is a pipe or a device: replacing /dev/null by a file would be a surprise."""
    return os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode)


def _draft_beside(path: str) -> str:
    """A new name in the folder of the file that `path` leads to, links followed."""
    folder = os.path.dirname(os.path.realpath(path))
    return os.path.join(folder, f".gpt2demo-{secrets.token_hex(4)}.tmp")
