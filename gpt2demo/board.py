"""The finished runs of a server, kept in an SQLite file so that they survive a restart.

Every call opens the file anew. A connection that is kept would go on writing into a file that has
been deleted, without a word; and calls from many threads need no lock but SQLite's own. The file
has a rollback journal, not a write-ahead log: that one is slower when each call opens the file, and
loses runs where two machines share a network folder.
"""

import contextlib
import hashlib
import json
import os
import secrets
import sqlite3
import stat
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from gpt2demo.board_import import DEVICE_FIELDS, FORMAT, read_runs, strict
from gpt2demo.config import RunConfig
from gpt2demo.records import RunRecord

FILE_NAME: Final = "runs.sqlite3"
_VERSION: Final = 1  # of the file's tables
_BUSY_SECONDS: Final = 10.0  # a write takes milliseconds
_LAST_SECOND: Final = 2.0**33  # 2242: dates that every calendar can write
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
# without an index, which could be damaged while all runs are whole
_INSERT: Final = """
INSERT INTO runs (id, content, owner, imported, added, head, steps)
SELECT :id, :content, :owner, :imported, :added, :head, :steps
WHERE NOT EXISTS (SELECT 1 FROM runs WHERE id = :id)"""
# imported runs fill at most half of the board, or an import could push everybody's runs off it
_TRIM: Final = (
    "DELETE FROM runs WHERE imported AND seq NOT IN "
    "(SELECT seq FROM runs WHERE imported ORDER BY seq DESC LIMIT :half)",
    "DELETE FROM runs WHERE seq NOT IN (SELECT seq FROM runs ORDER BY seq DESC LIMIT :limit)",
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


@dataclass(frozen=True, kw_only=True, slots=True)
class BoardRun:
    """One run of the board, as a list shows it."""

    id: int  # below 2**52, so that a browser's numbers hold it
    record: RunRecord  # without its steps: `Board.record` reads them
    mine: bool  # the viewer ran or imported it
    imported: bool
    added: float  # seconds since 1970, when it came onto this board


class _Row(NamedTuple):
    """A run as the file holds it, without its `seq`."""

    id: int
    content: str
    owner: str
    imported: int
    added: float
    head: str
    steps: bytes


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


class Board:
    """The finished runs, the newest `limit` of them. Safe to use from any thread.

    Args:
        folder: where their file is or will be; made when it is not there. None = in memory only.
        limit: how many runs are kept, at least 1; imported ones fill at most half of that.

    Where the file cannot be written, now or later, runs are kept in memory, `note` says why, and
    the next `add` tries to write them all.

    Raises:
        ValueError: `limit` is below 1.
    """

    def __init__(self, folder: Path | None, *, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, not {limit}")
        self._limit = limit
        self._path = None if folder is None else Path(folder).absolute() / FILE_NAME
        # Single operations on a dict are atomic, and several threads may try to write the same
        # run: the file takes each id once.
        self._unwritten: dict[int, _Row] = {}
        self._heads: dict[int, RunRecord] = {}  # read once; a run on the board never changes
        self._write_problem: str | None = None
        self._read_problem: str | None = None
        self._set_aside: str | None = None
        if self._path is None:
            self._write_problem = "this server has no folder for them"
            return
        with contextlib.suppress(OSError, ValueError):  # `_on_disk` says what is wrong
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # written even where nothing is to be: only that shows whether it can be
        self._write_problem = self._on_disk(_prove_writable, thorough=True)[1]
        if not self._write_problem:
            self.runs()  # the first visitor need not wait for it

    @property
    def note(self) -> str | None:
        """What whoever runs the server should know, in one sentence; None = all is well."""
        if problem := self._write_problem or self._read_problem:
            return f"Finished runs are kept in memory only, until the server stops: {problem}."
        return self._set_aside

    def add(self, record: RunRecord, owner: str) -> int:
        """Keep a finished run; it is on the disk on return, unless `note` says otherwise.

        Args:
            record: the run.
            owner: the owner's token, of which only a hash is kept.

        Returns:
            the run's id.

        Raises:
            ValueError: the record is none that `RunRecord.from_dict` and `RunConfig` take.
        """
        row = _row(record, owner, imported=False)
        self._add([row])
        return row.id

    def runs(self, viewer: str | None = None) -> list[BoardRun]:
        """All runs, newest first, without their steps.

        Args:
            viewer: the token of whoever looks; theirs are marked as `mine`.
        """
        viewer_hash = _sha256(viewer) if viewer else None
        rows = self._rows("id, '', owner, imported, added, head, x''")
        for gone in {*self._heads} - {row.id for row in rows}:
            self._heads.pop(gone, None)
        found = []
        for row in reversed(rows):
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a damaged row
                if not 0 <= row.added < _LAST_SECOND:
                    raise ValueError("no date")
                found.append(
                    BoardRun(
                        id=row.id,
                        record=self._head(row),
                        mine=row.owner == viewer_hash,
                        imported=bool(row.imported),
                        added=row.added,
                    )
                )
        return found

    def record(self, run_id: int) -> RunRecord | None:
        """The run of this id with all its steps; None when it is not kept any more."""
        for data in self._whole([run_id]):
            with contextlib.suppress(ValueError):  # a damaged one
                return RunRecord.from_dict(data)
        return None

    def export_json(self, run_ids: Collection[int] | None = None) -> str:
        """The runs with every step as strict JSON, oldest first, for `import_json`.

        Args:
            run_ids: which; None = all.
        """
        return json.dumps({"gpt2demo": FORMAT, "runs": list(self._whole(run_ids))}, allow_nan=False)

    def import_json(self, text: str, owner: str) -> int:
        """Take the runs of an export, of a list of runs, or of `python -m gpt2demo run --json`.

        All or none. A run that is here already is counted, but not added again.

        Args:
            text: the JSON, of at most `MAX_IMPORT_CHARS` characters.
            owner: the token of whoever imports.

        Returns:
            how many runs the text holds.

        Raises:
            InputError: (field "import") saying what is wrong, without a path.
        """
        records = read_runs(text, max(1, self._limit // 2))
        rows = [_row(record, owner, imported=True) for record in records]
        known = {row.content for row in self._rows("id, content, '', 0, 0, '', x''")}
        self._add([row for row in rows if row.content not in known])
        return len(rows)

    def close(self) -> None:
        """Write what could not be written yet. No file is open between two calls."""
        self._add([])

    # --- inside

    def _add(self, rows: Sequence[_Row]) -> None:
        """Remember the rows and write all that are not written."""
        self._unwritten.update({row.id: row for row in rows})
        pending = list(self._unwritten.values())
        if pending and self._path is not None:

            def write(db: sqlite3.Connection) -> bool:
                db.execute("BEGIN IMMEDIATE")
                db.executemany(_INSERT, [row._asdict() for row in pending])
                for sql in _TRIM:
                    db.execute(sql, self._limits())
                db.execute("COMMIT")
                return True

            written, self._write_problem = self._on_disk(write)
            if written:
                self._read_problem = None
                for row in pending:
                    self._unwritten.pop(row.id, None)
        self._trim_unwritten()

    def _limits(self) -> dict[str, int]:
        return {"limit": self._limit, "half": max(1, self._limit // 2)}

    def _trim_unwritten(self) -> None:
        """What `_TRIM` does, in memory."""
        imported = [row.id for row in list(self._unwritten.values()) if row.imported]
        for run_id in imported[: -self._limits()["half"]]:
            self._unwritten.pop(run_id, None)
        for run_id in list(self._unwritten)[: -self._limit]:
            self._unwritten.pop(run_id, None)

    def _rows(self, columns: str, run_ids: Collection[int] | None = None) -> list[_Row]:
        """The rows, oldest first: of the file only these columns, named as in `_Row`."""
        unwritten = list(self._unwritten.values())  # first: a row goes from here into the file
        rows: list[_Row] = []
        if self._path is not None:

            def read(db: sqlite3.Connection) -> list[_Row]:
                if run_ids is None:
                    found = db.execute(f"SELECT {columns} FROM runs ORDER BY seq").fetchall()
                else:
                    db.execute("BEGIN")
                    keys = db.execute("SELECT seq, id FROM runs ORDER BY seq").fetchall()
                    one = f"SELECT {columns} FROM runs WHERE seq = ?"
                    found = [db.execute(one, (k,)).fetchone() for k, i in keys if i in run_ids]
                return [_Row(*row) for row in found if row]  # None: a damaged file

            read_rows, self._read_problem = self._on_disk(read)
            rows = read_rows or []
        written = {row.id for row in rows}
        rows += [
            row
            for row in unwritten
            if row.id not in written and (run_ids is None or row.id in run_ids)
        ]
        return rows[-self._limit :]

    def _whole(self, run_ids: Collection[int] | None) -> Iterator[dict[str, Any]]:
        """The runs as `RunRecord.to_dict` gives them, damaged ones left out."""
        for row in self._rows(", ".join(_Row._fields), run_ids):
            with contextlib.suppress(ValueError, TypeError, KeyError, zlib.error):
                head, steps = strict(row.head), strict(zlib.decompress(row.steps).decode())
                data = {
                    "config": self._head(row).config,
                    "device": head["device"],
                    "steps": steps,
                    "summary": head["summary"],
                }
                yield data

    def _head(self, row: _Row) -> RunRecord:
        """The run without its steps.

        Raises:
            ValueError, TypeError: the row is damaged.
        """
        record = self._heads.get(row.id)
        if record is None:
            record = RunRecord.from_dict({**json.loads(row.head), "steps": []})
            # checked, and complete where the run is older than one of the settings
            record = replace(record, config=RunConfig(**record.config).to_dict())
            self._heads[row.id] = record
        return record

    # --- the file

    def _on_disk(
        self, work: Callable[[sqlite3.Connection], T], *, thorough: bool = False
    ) -> tuple[T | None, str | None]:
        """What `work` gives, and None; or None, and in words why the file cannot be used."""
        assert self._path, "this board has no file"
        try:
            try:
                return _with_file(self._path, work, thorough), None
            except Exception as exc:
                if not _is_damage(exc):
                    raise
            self._mend(self._path)
            return _with_file(self._path, work), None
        except (sqlite3.Error, OSError, ValueError, MemoryError, _ForeignError) as exc:
            return None, _reason(exc)
        except _DamagedError:
            return None, "their file is damaged"

    def _mend(self, path: Path) -> None:
        """Move a damaged file aside; the next call starts a new one."""
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
            self._set_aside = (
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


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _row(record: RunRecord, owner: str, *, imported: bool) -> _Row:
    """The record as the file holds it.

    Raises:
        ValueError: the record is none that `RunRecord.from_dict` and `RunConfig` take.
    """
    data = record.to_dict()
    if not imported:  # an imported one has been read already
        try:
            data = json.loads(json.dumps(data, allow_nan=False))
            RunConfig(**record.config)
        except TypeError as exc:
            raise ValueError(f"not a run of gpt2demo: {exc}") from exc
        data = RunRecord.from_dict(data).to_dict()  # numbers as an import would have them
    steps = json.dumps(data.pop("steps"), separators=(",", ":"))
    head = json.dumps(data)
    data["device"] = {name: data["device"].get(name) for name in DEVICE_FIELDS}
    content = _sha256(json.dumps(data, sort_keys=True) + steps)
    return _Row(
        # the same run imported twice at once has one id, and two equal runs made here have two
        id=int(content[:13], 16) if imported else secrets.randbits(52),
        content=content,
        owner=_sha256(owner),
        imported=int(imported),
        added=time.time(),
        head=head,
        steps=zlib.compress(steps.encode()),
    )
