import json
import math
import sqlite3
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minirler.config import ConfigError
from minirler.search import (
    Document,
    Hit,
    LocalSearch,
    build_index,
    main,
    parse_query,
    read_documents,
    utf8,
)

DOCUMENTS = [
    Document("a", "Belomo, chronicle, 1743", "Belomo is a town. Its ruler is Dasimo.", "letters"),
    Document("b", "Talesi, register, 1801", "Talesi is a river. Salt comes to Belomo.", "maps"),
    Document("c", "North Belomo, letter, 1699", "A guild town of the river.", "docs.maps"),
]
SEARCH = LocalSearch.from_documents(DOCUMENTS)


def ids(query, limit=10, search=SEARCH):
    return [hit.doc_id for hit in search.search(query, limit)]


def test_words_are_alternatives_and_a_title_counts_more():
    assert ids("belomo") == ["a", "c", "b"]
    assert ids("dasimo salt") in (["a", "b"], ["b", "a"])
    assert ids("nothing") == []
    assert ids("belomo", limit=1) == ["a"]


def test_quotes_make_a_phrase():
    assert ids('"river guild"') == []
    assert ids('"guild town"') == ["c"]
    assert ids('"guild town" talesi') in (["b", "c"], ["c", "b"])


def test_site_filters_on_the_site_and_its_subdomains():
    assert ids("belomo site:letters") == ["a"]
    assert sorted(ids("belomo SITE:Maps")) == ["b", "c"]
    assert ids("belomo site:aps") == []
    assert ids('belomo "site:letters"', limit=1) == ["a"]  # in quotes it is a phrase, not a filter


@pytest.mark.parametrize("query", ["", "  ", '""', "site:letters", '"', "*", "()", "\0", "\ud83e"])
def test_a_query_without_words_has_no_hits(query):
    assert ids(query) == []


@settings(max_examples=50, deadline=None)
@given(st.text() | st.text(alphabet='ab "*:()^-+{}\'\\\0', max_size=30))
def test_any_text_is_a_query(query):
    assert SEARCH.search(query, 3) == list(SEARCH.search_uncached(query, 3))
    match, _ = parse_query("belomo " + query)
    assert match.count('"') % 2 == 0
    if '"' not in query and "site:" not in query.lower():
        assert "a" in ids("belomo " + query)


@pytest.mark.parametrize("query", [
    "belomo AND", "NEAR(belomo", "title:belomo", "belomo*", "-belomo", "NOT belomo", '"belomo',
    "{belomo}", "belomo OR OR", "rank:belomo", "be'lomo; belomo --", "^belomo", "belomo + 1"])
def test_query_syntax_is_only_words(query):
    assert ids(query)[0] == "a"


def test_a_query_of_thousands_of_words_is_answered():
    assert ids("belomo " + " ".join(f"w{i}" for i in range(5000)))[0] == "a"


def test_equal_scores_come_in_the_order_of_ids_whatever_the_order_of_insertion():
    same = [Document(i, "title", "salt and fish") for i in "dbeca"]
    for documents in (same, same[::-1]):
        search = LocalSearch.from_documents(documents)
        assert ids("salt", search=search) == list("abcde")
        assert ids("salt", 2, search) == ["a", "b"]


def test_the_ranking_is_bm25_with_a_weighted_title():
    """Against the formula, with k1 1.2, b 0.75, and the idf of FTS5."""
    titles = ["salt", "fish", "ore salt", "x"]
    texts = ["a b c", "salt salt d", "e", "f g h i j k"]
    documents = [Document(str(i), *pair) for i, pair in enumerate(zip(titles, texts, strict=True))]
    search = LocalSearch.from_documents([*documents, *(Document(f"x{i}", "y", "z")
                                                       for i in range(5))])
    lengths = [len((a + " " + b).split()) for a, b in zip(titles, texts, strict=True)]
    mean = (sum(lengths) + 2 * 5) / 9
    idf = math.log((9 - 3 + 0.5) / (3 + 0.5))
    def score(i):
        f = 10 * titles[i].split().count("salt") + texts[i].split().count("salt")
        return idf * f * 2.2 / (f + 1.2 * (0.25 + 0.75 * lengths[i] / mean))
    rows = search._connection.execute("SELECT rowid, rank FROM words WHERE words MATCH 'salt'")
    assert {n - 1: -rank for n, rank in rows} == pytest.approx({i: score(i) for i in range(3)})
    assert ids("salt", search=search) == [str(i) for i in sorted(range(3), key=lambda i: -score(i))]


def test_a_snippet_is_a_passage_around_the_words_and_no_longer_than_asked():
    text = " ".join(f"w{i}" for i in range(500))
    search = LocalSearch.from_documents([Document("d", "t", text)], words=8)
    (hit,) = search.search("w300")
    words = hit.text.strip(".").split()
    assert "w300" in words and len(words) <= 8
    assert hit.text.startswith("...") and hit.text.endswith("...")
    assert search.search("t")[0].text.startswith("w0 ")


def test_a_file_gives_the_hits_that_memory_gives(tmp_path):
    path = tmp_path / "i n?d#ex%.sqlite"
    assert build_index(path, iter(DOCUMENTS), progress=False) == 3
    search = LocalSearch(path)
    for query in ("belomo", "river site:maps", '"guild town"'):
        assert search.search(query) == SEARCH.search(query)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        search._connection.execute("DELETE FROM documents")
    assert list(tmp_path.iterdir()) == [path]


def test_cached_hits_are_those_of_a_fresh_query_and_not_shared():
    first = SEARCH.search("belomo")
    first.clear()
    assert SEARCH.search("belomo") == list(SEARCH.search_uncached("belomo"))


def test_lone_surrogates_and_nul_are_replaced():
    search = LocalSearch.from_documents([Document("s", "a\ud83eb", "x\0y \ud83e\udded \ufeffend")])
    (hit,) = search.search("end")
    assert hit == Hit("s", "a\ufffdb", "x\ufffdy \U0001f9ed \ufeffend")
    hit.text.encode()
    assert utf8("\ud83e") == "\ufffd" and utf8("\ud83e\udded") == "\U0001f9ed"


@pytest.mark.parametrize("broken", [[Document("a", "", "x"), Document("a", "", "y")],
                                    [Document("", "", "x")], []])
def test_a_refused_build_leaves_the_old_index_and_nothing_else(tmp_path, broken):
    path = tmp_path / "index.sqlite"
    build_index(path, DOCUMENTS, progress=False)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="id: '|no documents"):
        build_index(path, broken, progress=False)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_build_that_is_interrupted_leaves_nothing(tmp_path):
    def documents():
        yield DOCUMENTS[0]
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        build_index(tmp_path / "index.sqlite", documents(), progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_or_foreign_file_is_an_error_that_says_how_to_make_an_index(tmp_path):
    for content in (None, b"no database", b""):
        path = tmp_path / "corpus.sqlite"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError) as error:
            LocalSearch(path)
        assert str(path) in str(error.value) and "minirler.search index" in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="snippet_words"):
        LocalSearch(path, snippet_words=65)


def test_threads_share_one_search(tmp_path):
    build_index(tmp_path / "x.sqlite", DOCUMENTS, progress=False)
    search, results = LocalSearch(tmp_path / "x.sqlite"), []
    def work(i):
        for j in range(50):
            results.append(ids(f"belomo w{i}x{j}", search=search))
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [["a", "c", "b"]] * 200


def test_two_thousand_documents_are_searched_in_a_millisecond_or_so():
    documents = (Document(str(i), f"E{i // 3}, letter, {i}", f"E{i // 3} is near E{i % 97}.")
                 for i in range(2000))
    search, times = LocalSearch.from_documents(documents), []
    for i in range(100):
        start = time.perf_counter()
        search.search_uncached(f"E{i} river")
        times.append(time.perf_counter() - start)
    assert sorted(times)[50] < 0.01  # generous: the bench has the real number


def test_a_folder_is_read_recursively(tmp_path):
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "sub" / "deep" / "a.MD").write_text("intro\n## The title ##\nbody", "utf-8")
    (tmp_path / "b.txt").write_text("\ufeffplain", "utf-8")
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "d.md").write_text(" ")
    (tmp_path / "e.png").write_bytes(b"x")
    bad = []
    documents = list(read_documents(tmp_path, lambda place, reason: bad.append(place)))
    assert documents == [Document("b.txt", "b", "plain"), Document(
        "sub/deep/a.MD", "The title", "intro\n## The title ##\nbody", "sub")]
    assert bad == [str(tmp_path / "c.txt"), str(tmp_path / "d.md")]


ROWS = [{"id": 7, "title": "T", "text": "one"}, {"contents": "two", "url": "https://a.org:80/x"},
        {"text": "three", "site": "s", "id": None}]
BAD = ["[1]", '{"text": 3}', '{"text": " "}', "{", '{"title": "x"}', "[" * 100_000]


def test_bad_rows_are_named_and_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(r) for r in ROWS] + ["", *BAD]), "utf-8")
    bad = []
    documents = list(read_documents(path, lambda place, reason: bad.append((place, reason))))
    assert documents == [Document("7", "T", "one"), Document("rows:2", "rows:2", "two", "a.org"),
                         Document("rows:3", "rows:3", "three", "s")]
    assert [place for place, _ in bad] == [f"{path}:{n}" for n in range(5, 11)]
    assert all(reason for _, reason in bad)


def test_the_command_line_indexes_and_queries(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n[]\n", "utf-8")
    main(["index", str(path)])
    out, err = capsys.readouterr()
    assert out == f"1 documents in {path}.sqlite, 1 bad rows skipped\n"
    assert f"skipped {path}:2: expected a JSON object, got list" in err
    main(["query", f"{path}.sqlite", "one", "two"])
    assert capsys.readouterr().out == "7\n  T\n  one\n1 hits\n"
    for arguments, message in ((["index", str(path), "--strict"], "rows.jsonl:2"),
                               (["index", str(tmp_path / "no")], "no folder or file"),
                               (["query", str(tmp_path / "no"), "x"], "no search index")):
        with pytest.raises(SystemExit, match=message):
            main(arguments)


def test_the_module_imports_neither_torch_nor_numpy():
    code = "import sys, minirler.search, minirler.tools; print({'torch', 'numpy'} & {*sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "set()\n", result.stderr
