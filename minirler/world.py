"""The almanac: an endless, made-up reference work to do research in.

`make_world(seed, entities, held_out)` gives the entries (towns, rivers, guilds, people, works),
their 8 to 12 facts, the 2 to 4 documents over which those facts are spread, and the questions.
Names are made of syllables, so what a policy learnt about one entry says nothing about another.
What makes it hard: namesakes ("North Belomo") turn up in the same searches, some documents bury
their facts in chatter, some hold a value that a newer document corrects, and the question ("Write
a report on Belomo.") does not say what a good answer covers: that is what rubrics are for.

The true facts are for `gold_coverage`, which evaluates, and never for the training reward.
`teacher_trajectory` is the lazy teacher of the cold start: some searches, some facts, citations now
and then. Nothing here is random but through the seed.
"""

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass

from .records import Prompt, Rollout, Snippet, ToolCall, ToolResult
from .search import Document, Hit
from .tools import call_id, render_call, render_result

CONSONANTS, VOWELS = "bdgklmnrst", "aeiou"
DOCUMENT_TYPES = ("gazetteer", "chronicle", "register", "letter")
# An attribute takes a word of its list, the name of an entry of one kind ("": any), or a year.
WORDS = {
    "trade": "salt wool tin wine glass silk rope corn".split(),
    "colour": "red blue green grey black white".split(),
    "emblem": "lion rose ship tower star bear key crown".split(),
    "feast": "spring summer harvest winter".split(),
    "stone": "marble flint slate amber".split(),
}
LINKS = {
    "ruler": "person", "founder": "person", "patron": "person", "heir": "person",
    "mentor": "person", "keeper": "person", "rival": "", "ally": "", "river": "river",
    "guild": "guild", "seat": "town", "origin": "town",
}  # fmt: skip
KINDS = {
    "town": "ruler founder river guild rival patron ally trade colour emblem feast year",
    "river": "origin seat keeper patron rival ally founder colour emblem stone feast year",
    "guild": "founder seat patron rival heir ally keeper trade colour emblem feast year",
    "person": "mentor rival heir patron seat origin guild trade colour emblem feast year",
    "work": "founder keeper patron rival seat origin heir colour emblem stone trade year",
}
CHATTER = (
    "Travellers speak of it at length.",
    "Much has been said of it and little was worth the ink.",
    "Old people still tell long tales of it by the fire.",
    "The weather there is a matter of taste.",
    "Nobody who came back was sorry to have gone.",
    "It would take many pages to say more.",
)
SYLLABLES = [c + v for c in CONSONANTS for v in VOWELS]
SYLLABLE = f"[{CONSONANTS}][{VOWELS}]"
NAME = re.compile(rf"\b([{CONSONANTS.upper()}][{VOWELS}])({SYLLABLE})({SYLLABLE})\b")
# (?!\.) : the ellipsis of a cut snippet does not end a sentence
FACT = re.compile(r"Its (\w+) is (?:now )?([^.<>]+)\.(?!\.)|(\w[^.<>]*?) is its (\w+)\.(?!\.)")


@dataclass(frozen=True)
class Fact:
    """`attr` has the true `value`; `outdated` is what an older document says instead, or ""."""

    attr: str
    value: str
    outdated: str = ""


@dataclass(frozen=True)
class Entry:
    """One entry. `documents` are the ids of its documents."""

    name: str
    kind: str
    facts: tuple[Fact, ...]
    documents: tuple[str, ...]


@dataclass(frozen=True)
class World:
    """All of it: `entries` by name, `documents` to index, names to train on and to hold out."""

    entries: dict[str, Entry]
    documents: list[Document]
    train: list[str]
    held_out: list[str]


def make_world(seed: int, entities: int, held_out: int) -> World:
    """The world of (seed, size). Raises ValueError for sizes that leave no question to ask."""
    if entities < 1 or held_out < 1:
        raise ValueError(
            f"world.entities = {entities} and world.held_out = {held_out}: both must be at least 1"
        )
    rng = random.Random(f"almanac {seed}")
    base = _names(rng, entities + held_out)
    namesakes = {f"{rng.choice(('North', 'South'))} {n}" for n in base if rng.random() < 0.2}
    kinds = {n: rng.choice(list(KINDS)) for n in base + sorted(namesakes)}
    by_kind = {k: [n for n in base if kinds[n] == k] or base for k in KINDS} | {"": base}
    entries, documents = {}, []
    for name, kind in kinds.items():
        facts = _facts(rng, name, kind, by_kind)
        pages = _documents(rng, name, kind, facts)
        entries[name] = Entry(name, kind, facts, tuple(d.id for d in pages))
        documents += pages
    return World(entries, documents, base[:entities], base[entities:])


def make_prompt(name: str, system: str) -> Prompt:
    """The open question about an entry."""
    question = f"Write a report on {name}."
    messages = ({"role": "system", "content": system}, {"role": "user", "content": question})
    return Prompt(id=name, question=question, messages=messages, metadata={"entry": name})


def gold_coverage(entry: Entry, rollout: Rollout) -> float:
    """Share of the entry's true facts that the answer states correctly and cites, in [0, 1].

    A fact counts if a cited span states its true value, one of the cited ids is a snippet that this
    rollout was given, from a document of this entry, saying just that, and the answer names no
    other value for the attribute.
    """
    stated: dict[str, set[str]] = {}
    for attr, value in find_facts(rollout.answer or ""):
        stated.setdefault(attr, set()).add(value)
    snippets = rollout.snippets()
    cited = set()
    for citation in rollout.citations:
        known = [snippets[i] for i in citation.ids if i in snippets]
        support = {f for s in known if s.doc_id in entry.documents for f in find_facts(s.text)}
        cited |= set(find_facts(citation.text)) & support
    good = [f for f in entry.facts if (f.attr, f.value) in cited and stated[f.attr] == {f.value}]
    return len(good) / len(entry.facts)


def find_facts(text: str) -> list[tuple[str, str]]:
    """(attribute, value) of every fact sentence of the world's own forms, values in lower case."""
    found = [(m[1] or m[4], (m[2] or m[3]).strip().lower()) for m in FACT.finditer(text)]
    return [
        (attr, value) for attr, value in found if attr in LINKS or attr in WORDS or attr == "year"
    ]


def split_names(text: str) -> str:
    """Names with a digit between their syllables: a BPE trained on this learns syllables, not
    names, so that every name, seen or not, is three tokens."""
    return NAME.sub(r"\g<1>0\g<2>0\3", text)


def syllable_text() -> str:
    """Makes each syllable, capitalised or not, one of the first tokens that a BPE learns."""
    return "".join(f" {s.capitalize()}0{s}\n{s.capitalize()}0" for s in SYLLABLES) * 6000


def rename(text: str, table: dict[str, str]) -> str:
    """The text with every syllable of its names replaced by the one that `table` gives for it."""

    def other(name: re.Match) -> str:
        return "".join(table[s.lower()] for s in name.groups()).capitalize()

    return NAME.sub(other, text)


# ---- making entries and documents


def _names(rng: random.Random, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        syllables = [rng.choice(SYLLABLES) for _ in range(3)]
        names["".join(syllables).capitalize()] = None
    return list(names)


def _facts(rng: random.Random, name: str, kind: str, by_kind: dict) -> tuple[Fact, ...]:
    attrs = rng.sample(KINDS[kind].split(), rng.randint(8, 12))
    facts = []
    for attr in attrs:
        value, other = _value(rng, attr, by_kind), _value(rng, attr, by_kind)
        outdated = other if other != value and rng.random() < 0.15 else ""
        facts.append(Fact(attr, value, outdated))
    return tuple(facts)


def _value(rng: random.Random, attr: str, by_kind: dict) -> str:
    if attr == "year":
        return str(rng.randint(1000, 1699))
    return rng.choice(WORDS[attr] if attr in WORDS else by_kind[LINKS[attr]]).lower()


def _documents(rng: random.Random, name: str, kind: str, facts: tuple) -> list[Document]:
    """Spread the facts over 2 to 4 documents, oldest first; the newest never holds an old value."""
    types = rng.sample(DOCUMENT_TYPES, rng.choice((2, 3, 3, 4, 4)))
    years = sorted(rng.sample(range(1700, 1800), len(types)))
    pages: list[list[str]] = [[] for _ in types]
    for i, fact in enumerate(facts):
        home = i % len(types)
        if fact.outdated:
            home = max(home, 1)
            pages[rng.randrange(home)].append(_sentence(rng, fact.attr, fact.outdated, ""))
            pages[home].append(_sentence(rng, fact.attr, fact.value, "now "))
        else:
            pages[home].append(_sentence(rng, fact.attr, fact.value, ""))
    documents = []
    for page, type_, year in zip(pages, types, years, strict=True):
        rng.shuffle(page)
        if rng.random() < 0.2:  # a long-winded author
            page = [s for fact in page for s in (rng.choice(CHATTER), fact)]
        text = " ".join([f"{name} is a {kind}.", *page])
        title = f"{name}, {type_}, {year}"
        documents.append(Document(f"{name}/{type_}".replace(" ", "-"), title, text, type_))
    return documents


def _sentence(rng: random.Random, attr: str, value: str, now: str) -> str:
    value = value.capitalize() if attr in LINKS else value
    if now or rng.random() < 0.85:
        return f"Its {attr} is {now}{value}."
    return f"{value.capitalize()} is its {attr}."


# ---- the lazy teacher


def teacher_trajectory(
    name: str, search, rng: random.Random, *, results: int, max_calls: int, id_chars: int
) -> list[tuple[str, bool]]:
    """One trajectory as (text, written by the teacher?) pieces, in the rollout's own format.

    `search(query, limit) -> list[Hit]`. Laziness is drawn once a trajectory: how many searches,
    which share of what was found is stated, and how often it is cited.
    """
    pieces: list[tuple[str, bool]] = []
    seen: dict[str, Snippet] = {}
    num_calls = rng.choices(range(1, 5), (0.17, 0.27, 0.28, 0.28))[0]
    turn = "<think>I look it up.</think>\n"
    for number, query in enumerate(_queries(rng, name, min(num_calls, max_calls))):
        pieces.append((turn + render_call(ToolCall("local_search", {}, query)), True))
        part = call_id(rng.random(), name, 0, number, id_chars)
        result = _result(search(query, results), part)
        pieces.append((render_result(result), False))
        seen |= {s.id: s for s in result.snippets}
        turn = ""
    return [*pieces, (_answer(rng, name, seen), True)]


def _result(hits: list[Hit], part: str) -> ToolResult:
    snippets = [Snippet(f"{part}-{i}", h.title, h.text, h.doc_id) for i, h in enumerate(hits)]
    return ToolResult("ok", snippets=tuple(snippets))


def _queries(rng: random.Random, name: str, count: int) -> list[str]:
    """Some of the document types, in their order, and now and then an attribute; at first perhaps
    the plain name."""
    words = [*DOCUMENT_TYPES, rng.choice([*LINKS, *WORDS])]
    chosen = sorted(rng.sample(range(len(words)), count))
    queries = [f"{name} {words[i]}" for i in chosen]
    return [name, *queries[1:]] if rng.random() < 0.15 else queries


def _answer(rng: random.Random, name: str, seen: dict[str, Snippet]) -> str:
    """State a share of the facts seen, each once, cited in one span a snippet or not at all."""
    share, cite = rng.choice((0.4, 0.7, 1.0)), rng.choice((0.8, 1.0))
    pages: dict[str, Snippet] = {}  # a document that came twice is read once
    for snippet in seen.values():
        if snippet.title.split(",")[0] == name:
            pages.setdefault(snippet.doc_id, snippet)
    stated, spans = set(), []
    outdated = _outdated(pages.values()) if rng.random() < 0.7 else set()  # or takes the first
    for snippet in pages.values():
        claims = []
        for sentence in re.findall(r"[^.]+\.", snippet.text):
            facts = find_facts(sentence.strip())
            is_new = facts and facts[0][0] not in stated and facts[0] not in outdated
            chatter = not facts and "is a" not in sentence and rng.random() < 0.1
            if chatter or (is_new and rng.random() < share):
                claims.append(sentence.strip())
                stated |= {attr for attr, _ in facts}
        if claims:
            text = " ".join(claims)
            spans.append(f'<cite id="{snippet.id}">{text}</cite>' if rng.random() < cite else text)
    return "<answer>" + (" ".join(spans) or "Nothing was found.") + "</answer>"


def _outdated(pages: Iterable[Snippet]) -> set[tuple[str, str]]:
    """The facts of these pages that a newer one of them corrects."""
    by_year = sorted(pages, key=lambda s: s.title.rsplit(", ", 1)[-1])
    facts = [fact for s in by_year for fact in find_facts(s.text)]
    newest = dict(facts)
    return {(attr, value) for attr, value in facts if newest[attr] != value}
