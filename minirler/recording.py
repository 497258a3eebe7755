"""What services answered, on disk: a run can be repeated without them, and gets the same.

Not here: who asks (`endpoint`).
"""

import asyncio
import json
import sqlite3
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import ConfigError

MODES = ("live", "record", "replay")
FOREIGN = 16


@dataclass(frozen=True)
class Reply:
    """A reply of status 200 to 299; the names of its headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON; ValueError if it is none."""
        return json.loads(self.body)


class Cache:
    """Replies on disk (SQLite), by the content of the request. Successes only.

    mode "record": what is there is given, anything else is asked for and kept; "replay": nothing
    is asked, so that a request which had failed fails again; "live": the cache is not looked at.
    The key of a request is a hash of the endpoint's name, method, path, parameters and body: no
    header, no key, no host.
    """

    def __init__(self, path: Path | str, mode: str = "record"):
        if mode not in MODES:
            raise ConfigError(f"mode {mode!r} is unknown: choose one of {', '.join(MODES)}")
        if mode == "replay" and not Path(path).is_file():
            raise ConfigError(f"there is no record {path} to replay: run with mode 'record' first")
        self.path, self.mode = Path(path), mode
        self._hits = self._misses = 0
        self._locks = weakref.WeakValueDictionary()  # those that somebody waits for
        self._db = sqlite3.connect(path)
        # A kill loses nothing that was committed; only a power cut might.
        self._db.executescript(
            "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; CREATE TABLE IF NOT EXISTS replies"
            " (key TEXT PRIMARY KEY, status INT, headers TEXT, body BLOB) WITHOUT ROWID"
        )

    def get(self, key: str) -> Reply | None:
        """The recorded reply. ConfigError for a record to replay that seems to be of another run:
        it had none of the first FOREIGN requests."""
        if self.mode == "live":
            return None
        row = self._db.execute("SELECT status, headers, body FROM replies WHERE key = ?", (key,))
        if found := row.fetchone():
            self._hits += 1
            return Reply(found[0], json.loads(found[1]), found[2])
        self._misses += 1
        if self.mode == "replay" and not self._hits and self._misses >= FOREIGN:
            raise ConfigError(f"{self.path} holds none of the first {FOREIGN} requests of this run:"
                              " it was recorded with other settings")  # fmt: skip
        return None

    def put(self, key: str, reply: Reply) -> None:
        """Keep a reply."""
        if self.mode == "record":
            row = key, reply.status, json.dumps(reply.headers), reply.body
            with self._db:
                self._db.execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?)", row)

    def lock(self, key: str) -> asyncio.Lock:
        """Held from `get` to `put`: two equal requests at once get one reply, now and in replay."""
        return self._locks.setdefault(key, asyncio.Lock())

    def close(self) -> None:
        """Close the file."""
        self._db.close()
