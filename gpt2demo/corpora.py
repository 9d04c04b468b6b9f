"""Where a text comes from: the built-in one, the Hub, a visitor's file. No tokens here."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from gpt2demo.config import InputError

# llm.c's copy of Tiny Shakespeare: GPT-2 tokens with <|endoftext|> before every speech.
# Made by llm.c's dev/data/tinyshakespeare.py; each file is a header of 256 int32 and then uint16.
HUB_REPO: Final = "karpathy/llmc-starter-pack"
HUB_FILES: Final = ("tiny_shakespeare_val.bin", "tiny_shakespeare_train.bin")
HUB_HEADER_BYTES: Final = 1024
HUB_MAX_BYTES: Final = 2**21  # the two files together have 678,104 bytes
FETCH_SECONDS: Final = 10  # the download as a whole
ANSWER_SECONDS: Final = 4  # the Hub's first answer

_ROOT: Final = Path(__file__).resolve().parent.parent

_SIGNATURES: Final = (  # what people upload by mistake, by its first bytes
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"%PDF", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive or an Office document"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\xff\xfe\x00\x00", "a UTF-32 text"),
    (b"\x00\x00\xfe\xff", "a UTF-32 text"),
)
_SAVE_AS: Final = "Save it as plain text in UTF-8 and upload it again."


class FetchError(Exception):
    """A corpus could not be fetched; the message is a short reason without a path."""


def builtin_text() -> str:
    """The Python language reference that ships inside CPython, its topics in sorted order.

    About 139,000 tokens on Python 3.11; other versions of Python have a slightly different text.

    Raises:
        InputError: this Python came without the package `pydoc_data`.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as exc:
        raise InputError(
            "text",
            "The built-in text is missing: this Python came without pydoc_data. "
            "Choose another text.",
        ) from exc
    return "\n\n".join(topics[name] for name in sorted(topics))


def fetch_shakespeare() -> bytes:
    """Tiny Shakespeare as llm.c's uint16 tokens (little-endian, headers cut off), unchecked.

    From the local Hub cache when it is there, else downloaded into it once. `HF_HUB_OFFLINE` and
    the cache variables of huggingface_hub apply.

    The download runs in a process of its own because only that can be ended in time: without
    internet, huggingface_hub repeats its request for 23 s whatever timeout it is given.

    Raises:
        FetchError: no file within `FETCH_SECONDS`.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            cwd=_ROOT,  # -m looks for the package there
            env={
                **os.environ,
                "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                "HF_HUB_DISABLE_TELEMETRY": "1",  # no request but for the files
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=FETCH_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise FetchError(f"not done within {FETCH_SECONDS} s") from exc
    except OSError as exc:
        raise FetchError(type(exc).__name__) from exc
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").split("\n")
        reason = next((line for line in reversed(lines) if line), "")
        raise FetchError(reason if reason.isidentifier() else "the download failed")
    return done.stdout


def _download() -> None:
    """Write the tokens to stdout, or leave with the reason; what the process above runs."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import LocalEntryNotFoundError

    def path_of(name: str, *, local: bool) -> str:
        return hf_hub_download(
            HUB_REPO, name, repo_type="dataset", token=False, local_files_only=local
        )

    parts = []
    try:
        for name in HUB_FILES:
            try:
                path = path_of(name, local=True)
            except LocalEntryNotFoundError:
                # asked once, without repeats: fails at once where there is no internet
                url = hf_hub_url(HUB_REPO, name, repo_type="dataset")
                size = get_hf_file_metadata(url, token=False, timeout=ANSWER_SECONDS).size
                if size is not None and size > HUB_MAX_BYTES:
                    sys.exit("FileTooLarge")
                path = path_of(name, local=False)
            with open(path, "rb") as file:
                parts.append(file.read(HUB_MAX_BYTES)[HUB_HEADER_BYTES:])
    except Exception as exc:
        sys.exit(type(exc).__name__)
    sys.stdout.buffer.write(b"".join(parts))


def decode_upload(raw: bytes) -> str:
    r"""The text of an uploaded file: UTF-8 with or without BOM, or UTF-16 with BOM.

    `\r\n` becomes `\n`, so that a text has the same tokens whether uploaded or pasted; nothing
    else is changed.

    Raises:
        InputError: anything else, saying what was found and what to do.
    """
    for start, kind in _SIGNATURES:
        if raw.startswith(start):
            raise InputError("text", f"The text file is {kind}, not a plain text. {_SAVE_AS}")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding, name = "utf-16", "UTF-16"
    else:
        encoding, name = "utf-8-sig", "UTF-8"
        zero = raw.find(0)
        if zero >= 0:
            raise InputError(
                "text",
                f"The text file has a zero byte at position {zero:,}: it is a binary file, or "
                f"UTF-16 without its byte order mark. {_SAVE_AS}",
            )
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as exc:
        bad = exc.object[exc.start]  # the codec sees the text without its BOM
        position = exc.start + len(raw) - len(exc.object)
        found = f"byte 0x{bad:02X} at position {position:,}"
        guess = "; perhaps Windows-1252 or Latin-1" if name == "UTF-8" else ""
        raise InputError(
            "text", f"The text file is not valid {name}: {found}{guess}. {_SAVE_AS}"
        ) from exc
    if "\0" in text:
        raise InputError("text", f"The text file holds zero characters: not a text. {_SAVE_AS}")
    return text.replace("\r\n", "\n")


def read_upload(path: str | os.PathLike[str], max_bytes: int) -> str:
    """The text of the file at `path`, of at most `max_bytes` bytes.

    The size is checked before anything is read, and at most `max_bytes` + 1 bytes are read.

    Raises:
        InputError: too large, unreadable, or not a text (see `decode_upload`). No path is named.
    """
    raw = b""
    try:
        found = os.stat(path).st_size  # 0 for a pipe
        if found <= max_bytes:
            with open(path, "rb") as file:
                raw = file.read(max_bytes + 1)
            found = len(raw)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else "not a file's name"
        raise InputError("text", f"The text file cannot be read ({reason}).") from exc
    if found > max_bytes:
        raise too_large("The text file", found, max_bytes, at_least=bool(raw))
    return decode_upload(raw)


def too_large(what: str, found: int, allowed: int, *, at_least: bool = False) -> InputError:
    """The refusal of `found` bytes where `allowed` are, in MiB and bytes."""
    more = "at least " if at_least else ""
    return InputError(
        "text",
        f"{what} has {more}{found / 2**20:,.1f} MiB ({found:,} bytes); at most "
        f"{allowed / 2**20:,.1f} MiB ({allowed:,} bytes) are allowed.",
    )


if __name__ == "__main__":
    _download()
