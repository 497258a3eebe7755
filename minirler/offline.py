"""A deterministic language model that judges and proposes rubrics with no key and no network.

`OfflineLM` gets the requests that a hosted model would get and answers in the same JSON; it reads
their task and fields, never their messages, so prompts can be reworded freely. It understands the
prose of a reference work: "Its ruler is Dasimo." ("is now", "Dasimo is its ruler."), in documents
titled "NAME, TYPE, YEAR"; and it knows the texts that it is shown, nothing else.

Not here: how a reply is read and checked (`lm`, `judge`, `evolve`): those treat it like any other.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest

from .records import LMReply, LMRequest
from .tools import parse_citations, strip_tags

# A value is a number, a lower-case word, or a name of one or more capitalised words.
VALUE = r"\d[\d.,]*|[^\W\d_][\w'-]*(?: [^\W\d_a-z][\w'-]*)*"
ATTR = r"([a-z][\w-]*)"
ITS = re.compile(rf"Its {ATTR} is (?:now )?({VALUE})")
IS_ITS = re.compile(rf"({VALUE}) is its {ATTR}")
SENTENCE = re.compile(r"([^.!?…\n]+(?:\.(?=\d)[^.!?…\n]+)*)(\.\.\.|[.!?…])?")
CRITERION = re.compile(rf"(States|Claims)(, with a citation,)? that its {ATTR} is ({VALUE})\.")
COPIES = re.compile(r'Copies the empty sentence "(.+)"')
REPEATS = "Says the same sentence more than once."
REPORT = re.compile(r"\b(?:report|article|essay|overview|entry) (?:on|about) (.+?)[\s.?!]*$", re.I)
NAME = re.compile(r"[^\W\d_a-z][\w'-]*(?: [^\W\d_a-z][\w'-]*)*")
SOURCE_KINDS = ("chronicle", "register", "gazetteer", "letter", "record")  # words for more searches
WORD = re.compile(r"\w+")
MIN_WORDS = 3  # of a sentence that counts as repeated or copied
QUOTED_WORDS = 12  # of a copied sentence: enough to recognise it


class OfflineLM:
    """Implements `records.LM` for judging and for the three rubric generators."""

    async def complete(self, request: LMRequest) -> LMReply:
        """JSON text, the same for the same task and fields; an unknown task is an error reply."""
        program = PROGRAMS.get(request.task)
        if program is None:
            return LMReply(None, "error", f"the offline LM has no task {request.task!r}")
        return LMReply(json.dumps(program(request.fields)))


@lru_cache(maxsize=4096)
def parse_facts(text: str) -> tuple[tuple[str, str], ...]:
    """(attribute, value) of every complete fact sentence, in order, values as written.

    "..." marks where an excerpt was cut; what it cuts is no fact, because half of a name is a name.
    """
    facts = []
    for sentence, is_whole in _sentences(text):
        if found := ITS.fullmatch(sentence):
            facts.append((found[1], found[2]))
        elif is_whole and (found := IS_ITS.fullmatch(sentence)):
            facts.append((found[2], found[1]))
    return tuple(facts)


@dataclass(frozen=True)
class Reading:
    """An answer, read once for all its criteria.

    `stated`: attribute -> {folded value: as written}. `cited`: (attribute, folded value) in cites.
    """

    stated: dict[str, dict[str, str]]
    cited: frozenset[tuple[str, str]]
    repeats: bool
    text: str

    def score(self, attr: str, value: str, needs_citation: bool = True) -> int:
        """2: stated, and cited if need be; 1: stated only; 0: not, or beside another value.

        An answer that gives an attribute two values leaves the choice to its reader.
        """
        values = self.stated.get(attr, {})
        if len(values) != 1 or value not in values:
            return 0
        return 2 if not needs_citation or (attr, value) in self.cited else 1


@lru_cache(maxsize=1024)
def read_answer(answer: str) -> Reading:
    """Facts, citations and repetition of an answer with its cite tags."""
    plain = strip_tags(answer)
    # A full stop just outside the tag still ends the cited sentence.
    spans = [citation.text + "." for citation in parse_citations(answer)]
    cited = [fact for span in spans for fact in parse_facts(span)]
    stated: dict[str, dict[str, str]] = {}
    for attr, value in [*parse_facts(plain), *cited]:
        stated.setdefault(attr, {}).setdefault(_fold(value), value)
    told = [_fold(s) for s, _ in _sentences(plain) if len(s.split()) >= MIN_WORDS]
    repeats = len(set(told)) < len(told)
    return Reading(stated, frozenset((a, _fold(v)) for a, v in cited), repeats, _fold(plain))


@lru_cache(maxsize=4096)
def read_criterion(criterion: str) -> tuple:
    """What one of our own criteria asks, values folded; () for any other wording."""
    criterion = criterion.strip()
    if found := CRITERION.fullmatch(criterion):
        return found[1], found[3], _fold(found[4]), bool(found[2])
    if found := COPIES.search(criterion):
        return "Copies", _fold(found[1])
    return ("Repeats",) if criterion == REPEATS else ()


def _judge(fields: dict) -> dict:
    score, reason = _verdict(read_answer(_text(fields, "answer")), _text(fields, "criterion"))
    is_binary = fields.get("scale") == "binary"
    return {"reason": reason} | ({"met": score == 2} if is_binary else {"score": score})


def _judge_batch(fields: dict) -> dict:
    return {"verdicts": [{"id": c["id"]} | _judge(fields | c) for c in fields["criteria"]]}


def _verdict(reading: Reading, criterion: str) -> tuple[int, str]:
    """(how far the criterion is present, 0..2, and why); whether that is good plays no part."""
    match read_criterion(criterion):
        case ("States", attr, value, needs_citation):
            score = reading.score(attr, value, needs_citation)
            return score, ("not stated alone", "stated but not cited", "stated as asked")[score]
        case ("Claims", attr, value, _):
            return (2, "claimed") if value in reading.stated.get(attr, {}) else (0, "not claimed")
        case ("Copies", quoted):
            return (2, "copied") if quoted in reading.text else (0, "not copied")
        case ("Repeats",):
            return (2, "a sentence recurs") if reading.repeats else (0, "no sentence recurs")
    return _word_overlap(reading.text, criterion)


def _word_overlap(text: str, criterion: str) -> tuple[int, str]:
    """A rough fallback for the wording of others: what share of its longer words the answer has."""
    words = {w for w in WORD.findall(_fold(criterion)) if len(w) > 3}
    share = len(words & set(WORD.findall(text))) / max(len(words), 1)
    return (share >= 0.4) + (share >= 0.75), f"{share:.0%} of the criterion's words occur"


# ---- the generators


@dataclass(frozen=True)
class Source:
    """A document; `name` and `year` (-1: none) are from its title."""

    id: str
    name: str
    year: int
    text: str


def _queries(fields: dict) -> dict:
    question = _text(fields, "question")
    if report := REPORT.search(question):
        queries = [report[1], *(f"{report[1]} {kind}" for kind in SOURCE_KINDS)]
    else:
        queries = [question, *NAME.findall(question)]
    return {"queries": [q for q in dict.fromkeys(queries) if q.strip()][: _limit(fields)]}


def _persistent(fields: dict) -> dict:
    """The newest facts of the subject's documents, from each document in turn."""
    sources = _about(_text(fields, "question"), _sources(fields.get("documents")))
    newest = _newest(sources)
    pages = [[a for a, _ in parse_facts(s.text) if s in newest[a][1]] for s in sources]
    attrs = dict.fromkeys(a for row in zip_longest(*pages) for a in row if a is not None)
    chosen = [(attr, *newest[attr]) for attr in list(attrs)[: _limit(fields)]]
    rubrics = [_states(a, v) | {"sources": list({s.id: 0 for s in held})} for a, v, held in chosen]
    return {"positive_rubrics": rubrics, "negative_rubrics": []}


def _evolving(fields: dict) -> dict:
    """What separates these rollouts: facts that some of them found, failures that some show."""
    rollouts = [r for r in _each(dict, fields.get("rollouts")) if isinstance(r.get("answer"), str)]
    readings = [read_answer(r["answer"]) for r in rollouts]
    sources = [s for r in rollouts for s in _sources(r.get("sources"))]
    newest = _newest(_about(_text(fields, "question"), sources))
    existing = _each(str, fields.get("existing"))
    taken, limit = {read_criterion(e)[:3] for e in existing}, _limit(fields)
    positive = _some_found(newest, readings, taken)[:limit]
    chatter = {c for s in sources for c in _chatter(s.name, s.text)}
    negative = _some_failed(newest, chatter, readings, taken)
    mirrors = {("Claims", read_criterion(p["description"])[1]) for p in positive}
    negative = [n for n in negative if read_criterion(n["description"])[:2] not in mirrors]
    positive = positive[: limit - min(len(negative), limit // 2)]
    return {"positive_rubrics": positive, "negative_rubrics": negative[: limit - len(positive)]}


def _some_found(newest: dict, readings: list[Reading], taken: set[tuple]) -> list[dict]:
    """Positives: facts that some rollouts, not all, state and cite; the widest split first."""
    refuted = {t[1] for t in taken if t[:1] == ("Claims",)}  # a positive would mirror these
    ranked = []
    for attr, (value, _) in newest.items():
        scores = [r.score(attr, _fold(value)) for r in readings]
        is_new = ("States", attr, _fold(value)) not in taken and attr not in refuted
        if is_new and 2 in scores and min(scores) < 2:
            variance = len(scores) * sum(s * s for s in scores) - sum(scores) ** 2
            ranked.append((-variance, attr, value))
    return [_states(attr, value) for _, attr, value in sorted(ranked)]


def _some_failed(newest: dict, chatter: set, readings: list[Reading], taken: set) -> list[dict]:
    """Negatives: repetition, copied chatter, claims that the newest source of the subject lacks."""
    positive = {t[1] for t in taken if t[:1] == ("States",)}  # a negative would mirror these
    candidates = {REPEATS: "Repetition"}
    for quoted in chatter:
        candidates[f'Copies the empty sentence "{quoted}" from a source.'] = "Copied chatter"
    true = {(attr, _fold(value)) for attr, (value, _) in newest.items()}
    for attr, values in (item for r in readings for item in r.stated.items()):
        for folded, value in values.items():
            if attr not in positive and (attr, folded) not in true:
                candidates[f"Claims that its {attr} is {value}."] = f"Wrong {attr}"
    ranked = []
    for description, title in candidates.items():
        shown = sum(_verdict(reading, description)[0] == 2 for reading in readings)
        split = min(shown, len(readings) - shown)
        if split and read_criterion(description)[:3] not in taken:
            ranked.append((-split, description, title))
    best: dict[str, str] = {}  # one of a title: two sentences copied are one failure
    for _, description, title in sorted(ranked):
        best.setdefault(title, description)
    return [{"description": d, "title": t} for t, d in best.items()]


PROGRAMS = {"judge": _judge, "judge_batch": _judge_batch, "rubrics_queries": _queries,
            "rubrics_persistent": _persistent, "rubrics_evolving": _evolving}  # fmt: skip


def _sentences(text: str) -> Iterator[tuple[str, bool]]:
    """Sentences that end, without their end mark, and whether they begin too (no "..." before)."""
    for match in SENTENCE.finditer(text):
        if match[2] in (".", "!", "?"):
            yield match[1].strip(), not text.endswith(("...", "…"), 0, match.start())


@lru_cache(maxsize=4096)
def _chatter(name: str, text: str) -> tuple[str, ...]:
    """The start of each whole sentence that has no fact and does not name its subject."""
    told = [s for s, is_whole in _sentences(text) if is_whole and not (name and name in s)]
    split = [s.split() for s in told if not parse_facts(s + ".")]
    return tuple(" ".join(words[:QUOTED_WORDS]) for words in split if len(words) >= MIN_WORDS)


def _about(question: str, sources: list[Source]) -> list[Source]:
    """The sources of the question's subject, not of a namesake ("North X" when X is asked for)."""
    if report := REPORT.search(question):
        subject = report[1]
    else:
        words = f" {' '.join(WORD.findall(question))} "
        subject = max((s.name for s in sources if f" {s.name} " in words), key=len, default="")
    return [s for s in sources if s.name and _fold(s.name) == _fold(subject)]


def _newest(sources: list[Source]) -> dict[str, tuple[str, list[Source]]]:
    """attribute -> (the newest source's value, the sources that hold it, in the given order)."""
    values: dict[str, str] = {}
    for source in sorted(sources, key=lambda s: (s.year, s.id)):
        values.update(parse_facts(source.text))
    told = [(s, {(attr, _fold(value)) for attr, value in parse_facts(s.text)}) for s in sources]
    return {attr: (value, [s for s, facts in told if (attr, _fold(value)) in facts])
            for attr, value in values.items()}  # fmt: skip


def _sources(documents: object) -> list[Source]:
    sources = []
    for document in _each(dict, documents):
        doc_id, title, text = (_text(document, key) for key in ("id", "title", "text"))
        year = re.search(r", *([0-9]{1,4}) *$", title)
        name = title.split(",")[0].strip()
        sources.append(Source(doc_id, name, int(year[1]) if year else -1, text))
    return sources


def _states(attr: str, value: str) -> dict:
    text = f"States, with a citation, that its {attr} is {value}."
    return {"description": text, "title": f"Cited {attr}"}


def _each(kind: type, value: object) -> list:
    return [v for v in value if isinstance(v, kind)] if isinstance(value, list | tuple) else []


def _text(fields: dict, key: str) -> str:
    value = fields.get(key)
    return value if isinstance(value, str) else ""


def _limit(fields: dict) -> int:
    limit = fields.get("limit")
    return max(limit, 0) if isinstance(limit, int) else 5


def _fold(text: str) -> str:
    return " ".join(text.casefold().split())
