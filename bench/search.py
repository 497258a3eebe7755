"""The local search index at 100,000 documents: how fast, how much memory, how far from the limits.

    python bench/search.py [DOCUMENTS]

The limit of building is a plain sequential write (and fsync) of as many bytes as the index has, in
the same run; the peer of a query is a scan of the same rows by `LIKE`. Documents are made as they
are read, so the growth of the peak memory is the indexer's own. Ends in one JSON line.
"""

import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from minirler.search import Document, LocalSearch, build_index

QUERIES, COMMON_QUERIES, SCANS = 1000, 100, 5
CONSONANTS, VOWELS = "bdfgklmnprst", "aeiou"
ATTRIBUTES = ("ruler", "trade", "river", "guild", "founder", "feast", "patron", "craft")
KINDS = ("chronicle", "gazetteer", "letter", "register")


def name(rng: random.Random) -> str:
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(3)).capitalize()


def documents(count: int, rng: random.Random) -> Iterator[Document]:
    """120 words each, with 216,000 possible names; a quarter of the titles share their kind."""
    for i in range(count):
        text = " ".join(f"Its {rng.choice(ATTRIBUTES)} is {name(rng)} of {name(rng)}."
                        for _ in range(20))
        title = f"{name(rng)}, {rng.choice(KINDS)}, {rng.randrange(1500, 1900)}"
        yield Document(f"d{i:07d}", title, text, rng.choice(KINDS))


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def write_seconds(path: Path, size: int) -> float:
    """A plain write of `size` bytes that are on the disk when it returns."""
    block = os.urandom(1 << 20)
    start = time.perf_counter()
    with open(path, "wb") as file:
        for _ in range(size >> 20):
            file.write(block)
        file.write(block[:size & ((1 << 20) - 1)])
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - start


def timed(function, *arguments) -> float:
    start = time.perf_counter()
    function(*arguments)
    return (time.perf_counter() - start) * 1e3


def query_ms(search: LocalSearch, count: int, make_query) -> tuple[float, float]:
    """Median and 99th percentile in milliseconds, without the cache of hits."""
    times = sorted(timed(search.search_uncached, make_query()) for _ in range(count))
    return times[count // 2], times[count * 99 // 100]


def scan(search: LocalSearch, word: str) -> list:
    """The naive peer: every document that holds the word, unranked."""
    return search._connection.execute(
        "SELECT id FROM documents WHERE text LIKE ? OR title LIKE ?", (f"%{word}%",) * 2).fetchall()


def measure(count: int, folder: Path) -> dict:
    rng, path = random.Random(0), folder / "index.sqlite"
    start = time.perf_counter()
    text_bytes = sum(len(d.title) + len(d.text) for d in documents(count, rng))
    making_s = time.perf_counter() - start  # the generator's own time is not the indexer's
    before = peak_mb()
    start = time.perf_counter()
    build_index(path, documents(count, rng))
    build_s = time.perf_counter() - start - making_s
    size, grown = path.stat().st_size, peak_mb() - before
    write_s = write_seconds(folder / "raw", size)
    search = LocalSearch(path)
    rare = query_ms(search, QUERIES, lambda: f"{name(rng)} {name(rng)}")
    common = query_ms(search, COMMON_QUERIES, lambda: f"{name(rng)} {rng.choice(KINDS)}")
    scans = sorted(timed(scan, search, name(rng)) for _ in range(SCANS))
    return {
        "bench": "search", "documents": count, "build_s": build_s, "docs_per_s": count / build_s,
        "text_mb": text_bytes / 1e6, "index_mb": size / 1e6, "peak_growth_mb": grown,
        "build_over_raw_write": build_s / write_s,
        "names_ms_median": rare[0], "names_ms_p99": rare[1],
        "common_word_ms_median": common[0], "common_word_ms_p99": common[1],
        "like_scan_ms": scans[SCANS // 2], "scan_over_query": scans[SCANS // 2] / rare[0],
    }


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as folder:
        result = measure(count, Path(folder))
    result = {k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}
    for key, value in result.items():
        print(f"{key:24}{value:>14}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
