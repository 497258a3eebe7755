"""Full-text search over documents on this machine: an SQLite FTS5 index, ranked by BM25.

    python -m minirler.search index notes/        # .txt and .md files, or a JSONL: notes.sqlite
    python -m minirler.search query notes.sqlite 'salt "river guild" site:letters'

Not here: who calls it (`tools`), network back ends, embeddings. The index is one file with two
tables: `documents` holds the text once, `words` is the FTS5 index that points into it.
"""
import argparse
import json
import os
import re
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote, urlsplit

from tqdm import tqdm

from .config import ConfigError
from .data import replace_surrogates

MEMORY = ":memory:"
FIELDS = ("title", "text", "contents", "site", "url")  # of a JSONL row that are read, beside "id"
TITLE_WEIGHT = 10.0  # a word in a title counts as ten in the text
MAX_TERMS = 32  # distinct terms of a query; later ones are ignored (a parser's stack is finite)
CACHED = 4096  # queries whose hits are kept: the rollouts of one prompt ask the same things
SCHEMA = f"""
CREATE TABLE documents (n INTEGER PRIMARY KEY, id TEXT UNIQUE CHECK (id != ''),
                        title TEXT, text TEXT, site TEXT);
CREATE VIRTUAL TABLE words USING fts5 (title, text, content='documents', content_rowid='n',
                                       tokenize='unicode61 remove_diacritics 2');
INSERT INTO words (words, rank) VALUES ('rank', 'bm25({TITLE_WEIGHT}, 1.0)');
"""
# Only for a file that is thrown away if the build dies: no journal, no waiting for the disk.
UNSAFE = "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;"
# Sorted by FTS5 itself, so only the rows that are fetched are joined. Snippets are dear: see HIT.
RANKED = """
SELECT words.rank, d.id, d.n FROM words CROSS JOIN documents AS d ON d.n = words.rowid
WHERE words MATCH :match AND (:site = '' OR d.site = :site OR substr(d.site, :tail) = :dot_site)
ORDER BY words.rank
"""
HIT = """SELECT title, snippet(words, 1, '', '', '...', :snippet_words) FROM words
WHERE words MATCH :match AND rowid = :n"""


@dataclass(frozen=True)
class Document:
    """What is indexed. `id` is unique in an index; `site` is its origin (a folder, a host)."""

    id: str
    title: str
    text: str
    site: str = ""


@dataclass(frozen=True)
class Hit:
    """A search result; `text` is a passage of the document around the matched words."""

    doc_id: str
    title: str
    text: str


class LocalSearch:
    """Searches an index made by `build_index`, opened read-only; safe to use from several threads.

    `snippet_words` (1..64, a limit of FTS5) bounds a hit's text. A missing or foreign file is a
    ConfigError that names the path and the command which makes an index.
    """

    def __init__(self, path: str | Path, snippet_words: int = 64):
        if not 1 <= snippet_words <= 64:
            raise ConfigError(f"tools.snippet_words must be in 1..64, got {snippet_words}")
        self.snippet_words = snippet_words
        self._lock = threading.Lock()  # one connection: a query is short, and it is not re-entrant
        self._connection = _open_index(path)
        self._cached = lru_cache(CACHED)(self.search_uncached)

    @classmethod
    def from_documents(cls, documents: Iterable[Document], words: int = 64) -> "LocalSearch":
        """An index in memory, for small worlds; ValueError on a repeated id."""
        search = cls(MEMORY, words)
        _fill(search._connection, documents, progress=False)
        return search

    def search(self, query: str, limit: int = 10) -> list[Hit]:
        """The best `limit` hits, best first; equal scores are in the order of their ids.

        Any text is a query. Its words are alternatives, "words in quotes" are a phrase, and
        `site:x` keeps documents of site x or its subdomains. A query without a word has no hits.
        """
        return list(self._cached(query, limit))

    def search_uncached(self, query: str, limit: int = 10) -> tuple[Hit, ...]:
        """What `search` returns, asked anew."""
        match, site = parse_query(query)
        if not match or limit <= 0:
            return ()
        fields = {"match": match, "site": site, "dot_site": "." + site, "tail": -len(site) - 1}
        with self._lock:
            best = sorted(_take(self._connection.execute(RANKED, fields), limit))[:limit]
            return tuple(Hit(doc_id, *self._passage(match, n)) for _, doc_id, n in best)

    def _passage(self, match: str, n: int) -> tuple[str, str]:
        fields = {"match": match, "n": n, "snippet_words": self.snippet_words}
        return self._connection.execute(HIT, fields).fetchone()


def build_index(path: str | Path, documents: Iterable[Document], progress: bool = True) -> int:
    """Write a new index of a stream of documents in constant memory; returns how many.

    Atomic: the file appears (or replaces an older one) when it is complete. A repeated or empty id,
    or no document at all, is a ValueError, and then nothing is written.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
            connection.executescript(UNSAFE + SCHEMA)
            count = _fill(connection, documents, progress)
        if not count:
            raise ValueError(f"there are no documents to put into {path}")
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def parse_query(query: str) -> tuple[str, str]:
    """(an FTS5 expression that never has a syntax error, site or ""), from any text."""
    phrases = re.findall(r'"([^"]*)"', query)
    rest = re.sub(r'"[^"]*"', " ", query)
    sites = re.findall(r"(?i)(?<!\S)site:(\S+)", rest)
    rest = re.sub(r"(?i)(?<!\S)site:\S*", " ", rest)
    terms = [" ".join(re.findall(r"\w+", phrase)) for phrase in phrases] + re.findall(r"\w+", rest)
    distinct = list(dict.fromkeys(term.lower() for term in terms if term))[:MAX_TERMS]
    return " OR ".join(f'"{term}"' for term in distinct), utf8(sites[-1]).lower() if sites else ""


def _open_index(path: str | Path) -> sqlite3.Connection:
    hint = f"make it with: python -m minirler.search index PATH {path}"
    memory = str(path) == MEMORY
    if not memory and not Path(path).is_file():
        raise ConfigError(f"no search index at {path}; {hint}")
    uri = MEMORY if memory else f"file:{quote(str(Path(path).absolute()))}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)
    try:
        connection.executescript(SCHEMA if memory else "SELECT id FROM documents, words LIMIT 0")
    except sqlite3.DatabaseError as error:
        connection.close()
        raise ConfigError(f"{path} is not a search index ({error}); {hint}") from None
    return connection


def _fill(connection: sqlite3.Connection, documents: Iterable[Document], progress: bool) -> int:
    """Insert in one transaction; SQLite and FTS5 write out their few MB of cache as they fill."""
    connection.execute("BEGIN")
    count = 0
    for count, d in enumerate(tqdm(documents, unit=" docs", disable=not progress), 1):
        row = (count, utf8(d.id), utf8(d.title), utf8(d.text), utf8(d.site).lower())
        try:
            connection.execute("INSERT INTO documents VALUES (?, ?, ?, ?, ?)", row)
        except sqlite3.IntegrityError:
            raise ValueError(f"document {count} has a repeated or empty id: {d.id!r}") from None
        connection.execute("INSERT INTO words (rowid, title, text) VALUES (?1, ?3, ?4)", row[:4])
    connection.execute("INSERT INTO words (words) VALUES ('optimize')")
    connection.execute("COMMIT")
    return count


def _take(rows: Iterable[tuple], limit: int) -> list[tuple]:
    """The first `limit` rows and all that tie with the last of them."""
    best: list[tuple] = []
    for row in rows:
        if len(best) >= limit and row[0] != best[-1][0]:
            break
        best.append(row)
    return best


def utf8(text: str) -> str:
    """Text that UTF-8 and SQLite can hold: U+FFFD for a lone surrogate or a NUL."""
    return replace_surrogates(text.replace("\0", "\ufffd"))


def read_documents(path: Path, bad: Callable[[str, str], None]) -> Iterator[Document]:
    """Documents of a folder (.txt and .md, all levels) or of a JSONL file, one at a time.

    `bad(place, reason)` is told of every file or row that is left out.
    """
    if path.is_dir():
        return _read_folder(path, bad)
    if path.is_file():
        return _read_jsonl(path, bad)
    raise ValueError(f"no folder or file at {path}")


def _read_folder(folder: Path, bad: Callable[[str, str], None]) -> Iterator[Document]:
    for root, folders, names in os.walk(folder):
        folders.sort()
        for path in (Path(root, n) for n in sorted(names) if n.lower().endswith((".txt", ".md"))):
            try:
                yield _from_file(path, folder)
            except (OSError, ValueError) as error:
                bad(str(path), str(error))


def _from_file(path: Path, folder: Path) -> Document:
    """id: the relative path; title: the first heading or the file's name; site: the top folder."""
    text = path.read_text("utf-8-sig")
    if not text.strip():
        raise ValueError("is empty")
    heading = re.search(r"(?m)^#{1,6}[ \t]+(\S.*?)[ \t#]*$", text)
    relative = path.relative_to(folder)
    site = relative.parts[0] if len(relative.parts) > 1 else ""
    return Document(relative.as_posix(), heading[1] if heading else path.stem, text, site)


def _read_jsonl(path: Path, bad: Callable[[str, str], None]) -> Iterator[Document]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                if line.strip():
                    yield _from_row(json.loads(line.decode("utf-8-sig")), f"{path.stem}:{number}")
            except (ValueError, RecursionError) as error:
                bad(f"{path}:{number}", str(error))


def _from_row(row: object, place: str) -> Document:
    """{"id"?, "title"?, "text" | "contents", "site" | "url"?}; id defaults to the place."""
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    fields = {key: row[key] for key in FIELDS if row.get(key) is not None}
    if wrong := [key for key, value in fields.items() if not isinstance(value, str)]:
        raise ValueError(f"{', '.join(wrong)} must be a string")
    text = fields.get("text") or fields.get("contents") or ""
    if not text.strip():
        raise ValueError('no text: "text" or "contents" is needed')
    doc_id = place if row.get("id") is None else str(row["id"])
    site = fields.get("site") or urlsplit(fields.get("url", "")).hostname or ""
    return Document(doc_id, fields.get("title") or doc_id, text, site)


def main(argv: list[str] | None = None) -> None:
    """The command line; errors are one line on stderr and exit status 1."""
    parser = argparse.ArgumentParser(prog="minirler.search")
    commands = parser.add_subparsers(required=True)
    index = commands.add_parser("index", help="index a folder of .txt/.md files, or a JSONL file")
    index.add_argument("path", type=Path)
    index.add_argument("out", type=Path, nargs="?", help="default: PATH.sqlite")
    index.add_argument("--strict", action="store_true", help="a bad row is an error")
    index.set_defaults(run=_index)
    query = commands.add_parser("query", help="print the best hits")
    query.add_argument("index", type=Path)
    query.add_argument("words", nargs="+")
    query.add_argument("--limit", type=int, default=10)
    query.set_defaults(run=_query)
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
    except (ValueError, OSError, sqlite3.Error) as error:
        sys.exit(f"error: {error}")


def _index(arguments: argparse.Namespace) -> None:
    """Bad rows are named on stderr and left out, or fatal with --strict."""
    skipped = 0

    def bad(place: str, reason: str) -> None:
        nonlocal skipped
        if arguments.strict:
            raise ValueError(f"{place}: {reason}")
        skipped += 1
        tqdm.write(f"skipped {place}: {reason}", file=sys.stderr)

    path = arguments.path.resolve()
    out = arguments.out or path.with_name(path.name + ".sqlite")
    count = build_index(out, read_documents(path, bad))
    print(f"{count} documents in {out}, {skipped} bad rows skipped")


def _query(arguments: argparse.Namespace) -> None:
    hits = LocalSearch(arguments.index).search(" ".join(arguments.words), arguments.limit)
    for hit in hits:
        print(hit.doc_id, hit.title, " ".join(hit.text.split()), sep="\n  ")
    print(f"{len(hits)} hits")


if __name__ == "__main__":
    main()
