"""The registry of compiled segments, with each segment's id, owner and content.

The registry belongs to the scheduler's process, in an SQLite file of this engine alone, or in
memory.  Every lookup is by (owner, id) in one index: another owner's id and an id that never existed
take the same path to the same answer.

A killed process loses no change that was answered: each change is one transaction in a write-ahead log.  The
log is not forced to disk at each commit, because the scheduler would wait: a power cut may cost the last
changes, never the file.  SQLite also holds its own lock on the file and never waits for a lock.  SQLite keeps
the log's index in its own memory, because network folders have no memory to share.  Times of last use are
written with the next change.

No two engines use the same file.  Every namespace has files of its own, and an engine takes the first file
that no living engine holds.  A lock on a second file marks the holder, and ends with the process.  Pins,
times to live and ids thus belong to one engine; the engine waits for no other engine, and can find only its
own file damaged.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import sqlite3
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ..config.store import DiskConfig, StoreConfig
from ..primitives.keys import SegmentKey
from .answers import Place

ID_BYTES = 24
"""Random bytes of an id, written in hex so that no command line takes an id for an option."""

_VERSION = 1
_SCHEMA = """
CREATE TABLE segments (
    owner TEXT NOT NULL, id TEXT NOT NULL, place TEXT NOT NULL, digest BLOB NOT NULL,
    n_tokens INTEGER NOT NULL, tokens BLOB NOT NULL, text TEXT, bare_from INTEGER NOT NULL, record_key TEXT,
    created REAL NOT NULL, last_used REAL NOT NULL, expires REAL, pinned INTEGER NOT NULL,
    PRIMARY KEY (owner, id)
) WITHOUT ROWID;
CREATE UNIQUE INDEX same_segment ON segments (owner, place, digest);
CREATE INDEX by_expiry ON segments (expires) WHERE expires IS NOT NULL;
CREATE INDEX by_record ON segments (record_key);
"""
_PRAGMAS = ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON")
_ENTRY = "owner, id, place, n_tokens, record_key, created, last_used, expires, pinned"
_ALIVE = "(expires IS NULL OR expires > ?)"
_MOST_ENGINES = 256
"""Limit on the engines of one namespace that share a folder."""


class RegistryError(Exception):
    """The registry cannot be read or written (disk full, file damaged, ...)."""


class TooManySegments(ValueError):
    """The owner has as many entries as an owner may have."""


@dataclass(frozen=True)
class Entry:
    """A compiled segment.  Times are seconds since the epoch; ``expires`` is ``None`` for no expiry."""

    owner: str
    id: str
    place: Place
    n_tokens: int
    key: SegmentKey | None
    """The record's key; ``None`` for a segment too short or too long for the pool, computed in the stream."""
    created: float
    last_used: float
    expires: float | None
    pinned: bool


@dataclass(frozen=True)
class Content:
    """Content of an id: ``text``, or without a text ``tokens[bare_from:]``.  The tokenizer itself adds the
    tokens before ``bare_from``."""

    place: Place
    tokens: tuple[int, ...]
    text: str | None
    bare_from: int


@dataclass(frozen=True)
class Claim:
    """Pin and expiry that an entry asks of a record."""

    pinned: bool
    expires: float | None


class SegmentRegistry:
    """Entries of all owners, for use by a single thread.  Every method may raise :class:`RegistryError`."""

    def __init__(
        self,
        folder: Path | None,
        namespace: str,
        clock: Callable[[], float] = time.time,
        *,
        most: int = sys.maxsize,
        replica: int = 0,
    ) -> None:
        """Open or make this engine's own file in ``folder``; with ``None`` keep all entries in memory.

        ``namespace``: hex digits of the engine's namespace.  ``most``: limit on the entries of an owner.
        ``replica``: the engine's number among engines with the same entries.  A damaged file is set aside
        (``.damaged``), its ids are lost, and a new file begins.  A file of a newer version is refused.
        """
        self._clock, self._most = clock, most
        self._used: dict[tuple[str, str], float] = {}
        self._set_aside: Path | None = None
        self._file: RegistryFile | None = None
        with _reported(folder):
            if folder is not None:
                self._file = claim_file(folder, namespace, replica)
            try:
                self._db = self._open()
            except BaseException:
                self._release()
                raise

    @property
    def path(self) -> Path | None:
        """Return the file's path, or ``None`` if the registry is in memory."""
        return None if self._file is None else self._file.path

    @property
    def set_aside(self) -> Path | None:
        """Return the path to which opening the registry moved a damaged file, or ``None``."""
        return self._set_aside

    def _open(self) -> sqlite3.Connection:
        if self.path is None:
            return _connect(":memory:")
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))  # tenants' texts are private
        try:
            return _connect(self.path)
        except sqlite3.OperationalError:
            raise  # another program's lock, or a full disk: the file itself may be undamaged
        except sqlite3.DatabaseError:
            self._set_aside = self.path.with_name(f"{self.path.name}.damaged")
            for suffix in ("-wal", "-shm"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            self.path.replace(self._set_aside)
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            return _connect(self.path)

    def add(
        self,
        owner: str,
        place: Place,
        tokens: Sequence[int],
        *,
        text: str | None = None,
        bare_from: int = 0,
        key: SegmentKey | None = None,
        segment_id: str | None = None,
    ) -> Entry:
        """Return the entry of these tokens at this place, which is made if it does not exist.

        An existing entry gets the new record key, and gets the text if it has none.  ``segment_id`` becomes
        the entry's id, also of an existing entry; with ``None`` a new entry gets an unguessable id.  Raises
        :class:`TooManySegments` for a new entry of an owner with ``most`` entries.
        """
        now = self._clock()
        packed = array("i", tokens).tobytes()
        digest = hashlib.sha256(packed).digest()
        fresh = segment_id or secrets.token_hex(ID_BYTES)
        renamed = "" if segment_id is None else " id = excluded.id,"
        with self._change():
            self._check_room(owner, place, digest)
            self._db.execute(
                "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, 0)"
                f" ON CONFLICT (owner, place, digest) DO UPDATE SET{renamed}"
                " text = coalesce(text, excluded.text), record_key = excluded.record_key, last_used = ?",
                (
                    *(owner, fresh, place.value, digest, len(tokens), packed, text, bare_from, key),
                    *(now, now, now),
                ),
            )
            row = self._db.execute(
                f"SELECT {_ENTRY} FROM segments WHERE owner = ? AND place = ? AND digest = ?",
                (owner, place.value, digest),
            ).fetchone()
        return _entry(row)

    def _check_room(self, owner: str, place: Place, digest: bytes) -> None:
        """Raise :class:`TooManySegments` if the owner has ``most`` entries without this entry."""
        known = "SELECT 1 FROM segments WHERE owner = ? AND place = ? AND digest = ?"
        if self._db.execute(known, (owner, place.value, digest)).fetchone() is not None:
            return
        (entries,) = self._db.execute("SELECT count(*) FROM segments WHERE owner = ?", (owner,)).fetchone()
        if entries >= self._most:
            raise TooManySegments(
                f"this tenant has {entries} segments: expected at most {self._most} (max_tenant_segments); "
                "delete segments, or give segments a time to live"
            )

    def get(self, owner: str, segment_id: str) -> Entry | None:
        """Return an entry, or ``None`` if the owner has no such id."""
        with _reported(self.path):
            row = self._db.execute(
                f"SELECT {_ENTRY} FROM segments WHERE owner = ? AND id = ? AND {_ALIVE}",
                (owner, segment_id, self._clock()),
            ).fetchone()
        return None if row is None else self._with_use(owner, _entry(row))

    def content(self, owner: str, segment_id: str) -> Content | None:
        """Return an id's content (``None``: unknown id), and note the time of last use."""
        now = self._clock()
        with _reported(self.path):
            row = self._db.execute(
                "SELECT place, tokens, text, bare_from FROM segments"
                f" WHERE owner = ? AND id = ? AND {_ALIVE}",
                (owner, segment_id, now),
            ).fetchone()
        if row is None:
            return None
        self._used[owner, segment_id] = now
        tokens = array("i")
        tokens.frombytes(row[1])
        return Content(Place(row[0]), tuple(tokens), row[2], row[3])

    def page(self, owner: str, after: str, limit: int) -> list[Entry]:
        """Return at most ``limit`` entries whose ids come after ``after`` (any text), in the order of ids."""
        with _reported(self.path):
            rows = self._db.execute(
                f"SELECT {_ENTRY} FROM segments WHERE owner = ? AND id > ? AND {_ALIVE} ORDER BY id LIMIT ?",
                (owner, after, self._clock(), limit),
            ).fetchall()
        return [self._with_use(owner, _entry(row)) for row in rows]

    def set_pinned(self, owner: str, segment_id: str, pinned: bool) -> None:
        """Set an entry's pin; ignore unknown ids."""
        self._set("pinned", int(pinned), owner, segment_id)

    def set_expires(self, owner: str, segment_id: str, expires: float | None) -> None:
        """Set an entry's expiry; ignore unknown ids."""
        self._set("expires", expires, owner, segment_id)

    def _set(self, column: str, value: float | None, owner: str, segment_id: str) -> None:
        with self._change():
            self._db.execute(
                f"UPDATE segments SET {column} = ? WHERE owner = ? AND id = ? AND {_ALIVE}",
                (value, owner, segment_id, self._clock()),
            )

    def remove(self, owner: str, segment_id: str) -> Entry | None:
        """Delete and return the entry; return ``None`` if there is no such entry."""
        with self._change():
            row = self._db.execute(
                f"DELETE FROM segments WHERE owner = ? AND id = ? AND {_ALIVE} RETURNING {_ENTRY}",
                (owner, segment_id, self._clock()),
            ).fetchone()
        return None if row is None else _entry(row)

    def take_expired(self) -> list[Entry]:
        """Delete and return the expired entries of all owners."""
        now = self._clock()
        with _reported(self.path):
            due = self._db.execute(
                "SELECT 1 FROM segments WHERE expires IS NOT NULL AND expires <= ? LIMIT 1", (now,)
            ).fetchone()
        if due is None:
            return []
        with self._change():
            rows = self._db.execute(
                f"DELETE FROM segments WHERE expires IS NOT NULL AND expires <= ? RETURNING {_ENTRY}", (now,)
            ).fetchall()
        return [_entry(row) for row in rows]

    def claims(self, key: SegmentKey) -> list[Claim]:
        """Return the claims of the living entries on a record."""
        with _reported(self.path):
            rows = self._db.execute(
                f"SELECT pinned, expires FROM segments WHERE record_key = ? AND {_ALIVE}",
                (key, self._clock()),
            ).fetchall()
        return [Claim(bool(pinned), expires) for pinned, expires in rows]

    def claimed(self) -> dict[SegmentKey, Entry]:
        """Return the records that an entry pins or lets expire, each with the oldest such entry."""
        with _reported(self.path):
            rows = self._db.execute(
                f"SELECT {_ENTRY} FROM segments WHERE record_key IS NOT NULL"
                f" AND (pinned OR expires IS NOT NULL) AND {_ALIVE} ORDER BY created, record_key",
                (self._clock(),),
            ).fetchall()
        found: dict[SegmentKey, Entry] = {}
        for entry in map(_entry, rows):
            assert entry.key is not None
            found.setdefault(entry.key, entry)
        return found

    def unpin_all(self, key: SegmentKey) -> None:
        """Remove the pins of all entries on this record."""
        with self._change():
            self._db.execute("UPDATE segments SET pinned = 0 WHERE record_key = ?", (key,))

    def __len__(self) -> int:
        with _reported(self.path):
            return int(self._db.execute("SELECT count(*) FROM segments").fetchone()[0])

    def close(self) -> None:
        try:
            with self._change():
                pass
        finally:
            self._db.close()
            self._release()

    def _release(self) -> None:
        if self._file is not None:
            self._file.release()
            self._file = None

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Run a transaction, which also writes the times of last use noted since the previous transaction."""
        with _reported(self.path), self._db:
            used = [(at, owner, segment_id) for (owner, segment_id), at in self._used.items()]
            self._db.executemany("UPDATE segments SET last_used = ? WHERE owner = ? AND id = ?", used)
            yield
        self._used.clear()

    def _with_use(self, owner: str, entry: Entry) -> Entry:
        used = self._used.get((owner, entry.id))
        return entry if used is None else replace(entry, last_used=used)


def _connect(where: Path | str) -> sqlite3.Connection:
    db = sqlite3.connect(where, timeout=0)
    try:
        for pragma in _PRAGMAS:
            db.execute(f"PRAGMA {pragma}")
        (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > _VERSION:
            raise RegistryError(f"{where} has version {version}; this program reads up to {_VERSION}")
        if version == 0:
            db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
    except BaseException:
        db.close()
        raise
    return db


@contextmanager
def _reported(path: Path | None) -> Iterator[None]:
    """Raise errors of SQLite and of the file system as :class:`RegistryError`."""
    try:
        yield
    except (sqlite3.Error, OSError) as e:
        raise RegistryError(f"segment registry {path or 'in memory'}: {e}") from e


def _entry(row: Iterable) -> Entry:
    owner, segment_id, place, n_tokens, key, created, last_used, expires, pinned = row
    return Entry(owner, segment_id, Place(place), n_tokens, key, created, last_used, expires, bool(pinned))


def registry_folder(config: StoreConfig) -> Path | None:
    """Return the folder of the engine's first disk tier; without a disk tier (``None``) the registry is in
    memory."""
    folders = (Path(tier.path) for tier in config.tiers if isinstance(tier, DiskConfig))
    return next(folders, None)


@dataclass(frozen=True)
class RegistryFile:
    """A file that this engine alone uses, until the engine releases the file or the process ends."""

    path: Path
    _lock: int
    """Descriptor of the locked file beside the registry."""

    def release(self) -> None:
        os.close(self._lock)


def claim_file(folder: Path, namespace: str, replica: int = 0) -> RegistryFile:
    """Take a file of ``namespace`` (hex digits) in ``folder``, which is made if it is missing.

    The first replica of a server, number 0, decides which ids exist.  Replica 0 gets its own file again,
    whatever the number of replicas at the next start.

    The function never waits.  Raises ``OSError`` if the folder is not writable or has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    of_replica = f"replica{replica}-" if replica else ""
    for i in range(_MOST_ENGINES):
        path = folder / f"registry-{namespace[:16]}-{of_replica}{i}.sqlite"
        lock = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a living engine holds the lock
            os.close(lock)
            continue
        except BaseException:
            os.close(lock)
            raise
        return RegistryFile(path, lock)
    raise OSError(f"{folder}: {_MOST_ENGINES} engines use this folder already; choose another folder")
