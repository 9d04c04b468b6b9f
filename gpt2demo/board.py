"""The finished runs of a server, in memory and in a file, so that they survive a restart."""

import contextlib
import hashlib
import json
import secrets
import sqlite3
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpt2demo.board_file import BoardFile
from gpt2demo.board_import import DEVICE_FIELDS, FORMAT, read_runs, strict
from gpt2demo.config import RunConfig
from gpt2demo.records import RunRecord

_LAST_SECOND: Final = 2.0**33  # 2242: dates that every calendar can write
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


@dataclass(frozen=True, kw_only=True, slots=True)
class BoardRun:
    """One run of the board, as a list shows it."""

    id: int  # below 2**52, so that a browser's numbers hold it
    # without its steps: `Board.record` reads them; the run of an id never changes
    record: RunRecord = field(compare=False)
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
        self._file = None if folder is None else BoardFile(folder)
        # Single operations on a dict are atomic, and several threads may try to write the same
        # run: the file takes each id once.
        self._unwritten: dict[int, _Row] = {}
        self._heads: dict[int, RunRecord] = {}  # read once; a run on the board never changes
        self.imports = 0  # taken since the start
        self._write_problem: str | None = None
        self._read_problem: str | None = None
        if self._file is None:
            self._write_problem = "this server has no folder for them"
            return
        self._write_problem = self._file.prove_writable()
        if not self._write_problem:
            self.runs()  # the first visitor need not wait for it

    @property
    def note(self) -> str | None:
        """What whoever runs the server should know, in one sentence; None = all is well."""
        if problem := self._write_problem or self._read_problem:
            return f"Finished runs are kept in memory only, until the server stops: {problem}."
        return self._file.set_aside if self._file else None

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
        self.imports += 1
        return len(rows)

    def close(self) -> None:
        """Write what could not be written yet. No file is open between two calls."""
        self._add([])

    # --- inside

    def _add(self, rows: Sequence[_Row]) -> None:
        """Remember the rows and write all that are not written."""
        self._unwritten.update({row.id: row for row in rows})
        pending = list(self._unwritten.values())
        if pending and self._file:

            def write(db: sqlite3.Connection) -> bool:
                db.execute("BEGIN IMMEDIATE")
                db.executemany(_INSERT, [row._asdict() for row in pending])
                for sql in _TRIM:
                    db.execute(sql, self._limits())
                db.execute("COMMIT")
                return True

            written, self._write_problem = self._file.use(write)
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
        if self._file:

            def read(db: sqlite3.Connection) -> list[_Row]:
                if run_ids is None:
                    found = db.execute(f"SELECT {columns} FROM runs ORDER BY seq").fetchall()
                else:
                    db.execute("BEGIN")
                    keys = db.execute("SELECT seq, id FROM runs ORDER BY seq").fetchall()
                    one = f"SELECT {columns} FROM runs WHERE seq = ?"
                    found = [db.execute(one, (k,)).fetchone() for k, i in keys if i in run_ids]
                return [_Row(*row) for row in found if row]  # None: a damaged file

            read_rows, self._read_problem = self._file.use(read)
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
