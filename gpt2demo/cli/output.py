"""What all verbs write with, and what they tell the process about its end."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TextIO

from gpt2demo.config import shown
from gpt2demo.json_file import reason, strict_json, write_json

_GIB: Final = 2**30


@dataclass(kw_only=True, slots=True)
class Interruption:
    """What the process's signals and a verb tell each other; `__main__` ties it to the signals."""

    received: bool = False  # a signal came: the verb is to end
    held: bool = False  # no KeyboardInterrupt now: the result is being written
    leave_at_once: bool = False  # end without the interpreter's clean-up: it may never return
    last_words: Callable[[], None] = lambda: None  # writes what there is, from another thread

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold a KeyboardInterrupt back until the block's end: in an import, torch aborts on it."""
        self.held = True
        try:
            yield
        finally:
            self.held = False
        if self.received:
            raise KeyboardInterrupt


class OutputLostError(Exception):
    """A line could not be written: the reader of the pipe has left, or the disk is full."""


def say(text: str, stream: TextIO | None) -> None:
    """Print one line now.

    Raises:
        OutputLostError: it could not be written; its message is empty where a reader just left.
    """
    if stream is None:  # closed before the start
        return
    try:
        print(text, file=stream, flush=True)
    except OSError as exc:
        reader_left = isinstance(exc, BrokenPipeError)
        message = "" if reader_left else f"The output cannot be written ({reason(exc)})."
        raise OutputLostError(message) from exc


class NotWrittenError(OutputLostError):
    """A result's file could not be written."""


def put_json(path: str, data: dict[str, Any]) -> None:
    """Write a result where --json says; "-" is stdout.

    Raises:
        NotWrittenError: the file could not be written; OutputLostError: stdout could not.
    """
    if path == "-":
        say(strict_json(data), sys.stdout)
        return
    try:
        write_json(path, data)
    except OSError as exc:
        raise NotWrittenError(f"{shown(path)} was not written ({reason(exc)}).") from exc


def aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Lines of name and text, the texts in one column."""
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows]


def table(rows: Sequence[Sequence[str]], left: int | None = None) -> list[str]:
    """Lines with the columns one below another; those past the first `left` end at one edge."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    at_left = len(widths) if left is None else left
    return [
        "  ".join(
            cell.ljust(width) if i < at_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def gib(count: int | None, unknown: str = "unknown") -> str:
    """Bytes as GiB, or the word for what is unknown."""
    return unknown if count is None else f"{count / _GIB:.2f} GiB"
