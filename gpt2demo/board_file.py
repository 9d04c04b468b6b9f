"""The SQLite file of a board: where it lies, how it is opened, what is done where it is damaged.

Every use opens the file anew. A connection that is kept would go on writing into a file that has
been deleted, without a word; and uses from many threads need no lock but SQLite's own. The file
has a rollback journal, not a write-ahead log: that one is slower when each use opens the file, and
loses runs where two machines share a network folder.
"""

import contextlib
import os
import sqlite3
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

FILE_NAME: Final = "runs.sqlite3"
_VERSION: Final = 1  # of the file's tables
_BUSY_SECONDS: Final = 10.0  # a write takes milliseconds
_MOST_DAMAGED: Final = 3  # damaged files kept
# The file keeps these words, and is damaged where it has others: change _VERSION with them.
# seq: the order in which the runs came. content: the SHA-256 of a run, the same on every board.
# owner: the SHA-256 of a token. added: seconds since 1970. head: JSON of config, device, summary.
# steps: JSON through zlib, apart, because a list of runs needs none.
_CREATE: Final = (
    "CREATE TABLE runs (seq INTEGER PRIMARY KEY, id INTEGER NOT NULL, content TEXT NOT NULL, "
    "owner TEXT NOT NULL, imported INTEGER NOT NULL, added REAL NOT NULL, head TEXT NOT NULL, "
    "steps BLOB NOT NULL)"
)
_REASONS: Final = {
    "SQLITE_FULL": "the disk is full",
    "SQLITE_BUSY": "another process holds their file",
    "SQLITE_READONLY": "their folder is read-only",
    "SQLITE_CANTOPEN": "their folder is gone or closed to this server",
    "SQLITE_PERM": "their folder is closed to this server",
    "SQLITE_IOERR": "the disk fails",
}
T = TypeVar("T")


class _DamagedError(Exception):
    """The file cannot be used; the message says what it is, in words."""


class _ForeignError(Exception):
    """The file cannot be trusted; the message says why, in words."""


def default_folder(
    environ: Mapping[str, str] = os.environ, platform: str = sys.platform
) -> Path | None:
    """Where runs are kept: a folder in this user's cache. Nothing is made.

    Returns:
        None where this user has no home.
    """
    try:
        if platform == "win32":
            local = environ.get("LOCALAPPDATA")
            cache = Path(local) if local else Path.home() / "AppData" / "Local"
        elif platform == "darwin":
            cache = Path.home() / "Library" / "Caches"
        else:
            cache = Path(environ.get("XDG_CACHE_HOME", ""))
            if not cache.is_absolute():  # the XDG standard: then it is to be ignored
                cache = Path.home() / ".cache"
    except RuntimeError:
        return None
    return cache / "gpt2demo"


def board_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder that `GPT2DEMO_BOARD_DIR` names; empty = keep runs in memory only; not set =
    `default_folder`.
    """
    if "GPT2DEMO_BOARD_DIR" not in environ:
        return default_folder(environ)
    named = environ["GPT2DEMO_BOARD_DIR"].strip()
    return Path(named).expanduser() if named else None


class BoardFile:
    """The file in `folder`, which is made when it is not there. Safe to use from any thread.

    A file that is damaged, or none of ours, is moved aside, and `set_aside` says so in a sentence.
    """

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder).absolute() / FILE_NAME
        self.set_aside: str | None = None
        with contextlib.suppress(OSError, ValueError):  # `use` says what is wrong
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)

    def prove_writable(self) -> str | None:
        """Why the file cannot be written, in words; None = it can. Looks at all of it for damage.

        Written even where nothing is to be: only that shows whether it can be.
        """
        return self.use(_prove_writable, thorough=True)[1]

    def use(
        self, work: Callable[[sqlite3.Connection], T], *, thorough: bool = False
    ) -> tuple[T | None, str | None]:
        """What `work` gives, and None; or None, and in words why the file cannot be used."""
        try:
            try:
                return _with_file(self.path, work, thorough), None
            except Exception as exc:
                if not _is_damage(exc):
                    raise
            self._mend()
            return _with_file(self.path, work), None
        except (sqlite3.Error, OSError, ValueError, MemoryError, _ForeignError) as exc:
            return None, _reason(exc)
        except _DamagedError:
            return None, "their file is damaged"

    def _mend(self) -> None:
        """Move a damaged file aside; the next use starts a new one."""
        path = self.path
        lock_path = path.with_name(f"{path.name}.lock")
        with contextlib.closing(_connect(lock_path)) as lock:
            # one process mends; the others wait here, and then find a file that is none the worse
            lock.execute("BEGIN EXCLUSIVE")
            try:
                _with_file(path, lambda _: None, thorough=True)
                return
            except Exception as exc:
                if not _is_damage(exc):
                    raise
                what = str(exc) if isinstance(exc, _DamagedError) else "damaged"
            aside = [path.with_name(f"{path.name}.damaged-{n + 1}") for n in range(_MOST_DAMAGED)]
            free = [target for target in aside if not target.exists()]
            target = free[0] if free else min(aside, key=lambda kept: kept.stat().st_mtime)
            # the file last: what SQLite kept beside it must not be taken for the new file's
            for suffix in ("-journal", "-wal", "-shm", ""):
                beside = Path(f"{path}{suffix}")
                Path(f"{target}{suffix}").unlink(missing_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    beside.replace(f"{target}{suffix}")
            self.set_aside = (
                f"The file of finished runs was {what}: it was moved aside and a new one started."
            )


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)


def _with_file(path: Path, work: Callable[[sqlite3.Connection], T], thorough: bool = False) -> T:
    """Do `work` on the file, whose tables are made where it has none.

    Raises:
        sqlite3.Error, OSError: it cannot be opened, read or written.
        _DamagedError: it is none of these runs.
        _ForeignError: somebody else may have put it there.
    """
    _check_owner(path)
    # leaving closes, and closing takes back what was not committed
    with contextlib.closing(_connect(path)) as db:
        # a damaged text must not keep the others from being read
        db.text_factory = lambda raw: raw.decode("utf-8", "replace")
        db.execute("PRAGMA synchronous = FULL")  # what is committed outlives the power
        if not _is_ready(db, thorough):
            db.execute("BEGIN IMMEDIATE")
            if not _is_ready(db):  # still
                db.execute(_CREATE)
                db.execute(f"PRAGMA user_version = {_VERSION}")
            db.execute("COMMIT")
        return work(db)


def _is_ready(db: sqlite3.Connection, thorough: bool = False) -> bool:
    """Whether the file has our tables; False = it has none at all.

    Raises:
        _DamagedError: it has others.
    """
    alone = not db.in_transaction
    if alone:
        db.execute("BEGIN")  # all of these look at the same state of the file
    version = db.execute("PRAGMA user_version").fetchone()[0]
    tables = [sql for (sql,) in db.execute("SELECT sql FROM sqlite_master")]
    if thorough and db.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",):
        raise _DamagedError("damaged")
    if alone:
        db.execute("COMMIT")
    if version == 0 and not tables:
        return False
    if version > _VERSION:
        raise _DamagedError("written by a newer version")
    if version != _VERSION or tables != [_CREATE]:
        raise _DamagedError("made for something else")
    return True


def _prove_writable(db: sqlite3.Connection) -> None:
    """Write what is there already."""
    db.execute("BEGIN IMMEDIATE")
    db.execute(f"PRAGMA user_version = {_VERSION}")
    db.execute("COMMIT")


def _check_owner(path: Path) -> None:
    """Refuse what another user may have laid there; root can do anything anyway."""
    own_ids = {os.geteuid(), 0} if hasattr(os, "geteuid") else None
    if own_ids and path.parent.stat().st_uid not in own_ids:
        raise _ForeignError("their folder belongs to another user")
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise _ForeignError("their file is no plain file")
        if own_ids and found.st_uid not in own_ids:
            raise _ForeignError("their file belongs to another user")


def _error_name(exc: BaseException) -> str:
    """SQLite's name of an error, without what follows the second underscore."""
    return "_".join((getattr(exc, "sqlite_errorname", None) or "").split("_")[:2])


def _is_damage(exc: Exception) -> bool:
    # ERROR: our SQL never changes, so where it fails as such, the file is not what it was
    damaged = ("SQLITE_NOTADB", "SQLITE_CORRUPT", "SQLITE_ERROR")
    return isinstance(exc, _DamagedError) or _error_name(exc) in damaged


def _reason(exc: BaseException) -> str:
    """Why the file cannot be used, in words and without its path."""
    if isinstance(exc, _ForeignError):
        return str(exc)
    if isinstance(exc, OSError):
        return _REASONS["SQLITE_CANTOPEN"]
    return _REASONS.get(_error_name(exc), "their file cannot be used")
