"""Where rubrics come from: a search at a prompt's first visit, a contrast of its rollouts at each.

Persistent rubrics rest on documents that are really searched for; evolving ones on what separates
the rollouts of one group (DR Tulu, arXiv 2511.19399, rubrics that evolve with the policy). Both are
written by a language model whose reply is data to be checked, item by item: a generation that fails
adds nothing and changes nothing, and says why.

Not here: the prompts' wording (prompts/rubrics_*.txt), the life of a rubric (`rubrics`); the buffer
is read and never changed.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence

from .config import ConfigError, RubricsConfig
from .judge import has_answer
from .lm import make_request, read_json
from .records import LM, LMReply, Prompt, Rollout
from .rubrics import MAX_DESCRIPTION, Rubric, RubricBuffer, fold, make_rubric
from .search import Hit

MAX_TITLE = 80  # characters
MAX_TOKENS = 16384  # of a generator's reply, its thinking included
POSITIVE, NEGATIVE = "positive_rubrics", "negative_rubrics"

Search = Callable[[str], Awaitable[Sequence[Hit]]]
Generated = tuple[list[Rubric], str]  # the rubrics, and why there are none or items were left out


async def persistent_rubrics(
    lm: LM, search: Search, prompt: Prompt, cfg: RubricsConfig
) -> Generated:
    """Rubrics that hold for a prompt whatever the policy does: the data set's, else searched ones.

    `cfg.persistent` rubrics at most, of weight 1, whose `sources` are document ids, from at most
    `cfg.persistent_searches` searches. Errors: ValueError for a data-set rubric that is malformed.
    """
    if prompt.rubrics:
        return dataset_rubrics(prompt), ""
    if cfg.persistent < 1:
        return [], ""
    hits, why = await _research(lm, search, prompt.question, cfg.persistent_searches)
    if not hits:
        return [], why or "the searches found nothing"
    documents = _fit(((h.doc_id, h.title, h.text) for h in hits), cfg.max_rollout_chars)
    fields = {"question": prompt.question, "documents": documents, "limit": cfg.persistent}
    reply = await lm.complete(make_request("rubrics_persistent", fields, MAX_TOKENS))
    items, fault = _read_items(reply, {POSITIVE: 1.0})
    why = "; ".join(filter(None, (why, fault)))
    known = {document["id"] for document in documents}
    return _accept(prompt.id, items, why, cfg.persistent, kind="persistent", known=known)


async def evolving_rubrics(
    lm: LM,
    prompt: Prompt,
    rollouts: Sequence[Rollout],
    buffer: RubricBuffer,
    cfg: RubricsConfig,
    step: int,
) -> Generated:
    """Rubrics of weight +1 or -1 that tell these rollouts apart, `cfg.max_new` at most.

    The generator is shown the rubrics in use and the latest retired ones, so as not to repeat them;
    what it repeats all the same is left out. It takes two answers to have a contrast.
    """
    answered = sum(has_answer(rollout.answer) for rollout in rollouts)
    if answered < 2:
        return [], f"{answered} of {len(rollouts)} rollouts has an answer: nothing to compare"
    if cfg.max_new < 1:
        return [], ""
    used = buffer.criteria(prompt.id)
    latest = buffer.retired(prompt.id)[-cfg.max_active :] if cfg.max_active else []
    fields = {
        "question": prompt.question,
        "existing": [rubric.description for rubric in [*used, *latest]],
        "rollouts": [show_rollout(rollout, cfg.max_rollout_chars) for rollout in rollouts],
        "limit": cfg.max_new,
    }
    reply = await lm.complete(make_request("rubrics_evolving", fields, MAX_TOKENS))
    items, why = _read_items(reply, {POSITIVE: 1.0, NEGATIVE: -1.0})
    taken = {rubric.id for rubric in used}
    return _accept(prompt.id, items, why, cfg.max_new, kind="evolving", taken=taken, born=step)


def dataset_rubrics(prompt: Prompt) -> list[Rubric]:
    """The data set's rubrics with their own weights (1 where none is given).

    Errors: ValueError that names the prompt and the rubric.
    """
    rubrics = []
    for number, item in enumerate(prompt.rubrics):
        why = _malformed(item)
        weight = 1.0 if why or item.get("weight") is None else item["weight"]
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            why = why or f"weight {weight!r} is not a number"
        elif not math.isfinite(weight):
            why = why or f"weight {weight!r} is not finite"
        if why:
            raise ValueError(f"prompt {prompt.id!r}, rubric {number}: {why}; mend the data set")
        rubrics.append(make_rubric(prompt.id, *_texts(item), weight, "persistent"))
    return rubrics


def show_rollout(rollout: Rollout, max_chars: int) -> dict:
    """A rollout as the generator sees it: its answer, then its sources, within `max_chars` in all.

    Sources that the answer cites come first; equal ones are shown once. "..." ends what is cut.
    """
    answer = _cut(rollout.answer, max_chars) if has_answer(rollout.answer) else None
    cited = {name for citation in rollout.citations for name in citation.ids}
    snippets = sorted(rollout.snippets().values(), key=lambda s: s.id not in cited)
    left = max_chars - len(answer or "")
    return {"answer": answer, "sources": _fit(((s.id, s.title, s.text) for s in snippets), left)}


def _fit(sources: Iterable[tuple[str, str, str]], max_chars: int) -> list[dict]:
    """Distinct (id, title, text) as prompts show them, as many as fit; the last one may be cut."""
    shown: dict[tuple[str, str], dict] = {}
    for name, title, text in sources:
        if not text or (title, text) in shown:
            continue
        fitting = _cut(text, max_chars - len(title))
        if not fitting:
            break
        shown[title, text] = {"id": name, "title": title, "text": fitting}
        max_chars -= len(title) + len(fitting)
    return list(shown.values())


async def _research(lm: LM, search: Search, question: str, limit: int) -> tuple[list[Hit], str]:
    """Hits for a question, in the order of the queries; and which searches failed.

    Without readable queries the question itself is searched for.
    """
    fields = {"question": question, "limit": limit}
    reply = await lm.complete(make_request("rubrics_queries", fields, MAX_TOKENS))
    listed = (read_json(reply.text, "queries", reply.finish_reason) or {}).get("queries")
    listed = listed if isinstance(listed, list) else []
    queries = dict.fromkeys(q.strip() for q in listed if isinstance(q, str) and q.strip())
    results = await asyncio.gather(*(_hits(search, q) for q in [*queries][:limit] or [question]))
    errors = [error for _, error in results if error]
    return [hit for hits, _ in results for hit in hits], "; ".join(errors)


async def _hits(search: Search, query: str) -> tuple[list[Hit], str]:
    """What a search found, or why it failed: an error costs the hits of this one search only."""
    try:
        return list(await search(query)), ""
    except ConfigError:
        raise
    except Exception as error:
        return [], f"search {query!r} failed: {type(error).__name__}: {error}"


def _read_items(reply: LMReply, weights: dict[str, float]) -> tuple[list, str]:
    """(item, weight) of every item in the reply's lists, unchecked; and what is wrong with it."""
    if reply.text is None:
        return [], f"no reply: {reply.error or reply.finish_reason}"
    objects = (read_json(reply.text, key, reply.finish_reason) for key in weights)
    value = next((found for found in objects if found), None)
    if value is None:
        return [], f"no JSON with {POSITIVE} in {reply.text[:100]!r} ({reply.finish_reason})"
    items, wrong = [], []
    for key, weight in weights.items():
        listed = value.get(key) or []
        if isinstance(listed, list):
            items += [(item, weight) for item in listed]
        else:
            wrong.append(f"{key} is no list")
    return items, "; ".join(wrong)


def _accept(
    prompt_id: str,
    items: Iterable[tuple[object, float]],
    why: str,
    limit: int,
    *,
    kind: str,
    known: Iterable[str] = (),
    taken: Iterable[str] = (),
    born: int = 0,
) -> Generated:
    """Rubrics of the usable items, `limit` at most, none with an id in `taken`.

    `known` are the ids that an item may name as its sources.
    """
    rubrics: dict[str, Rubric] = {}
    left_out = [why] if why else []
    known, taken = set(known), set(taken)
    for item, weight in items:
        if fault := _malformed(item):
            left_out.append(fault)
            continue
        named = item.get("sources") if isinstance(item.get("sources"), list) else []
        sources = [s for s in named if isinstance(s, str) and s in known]
        rubric = make_rubric(prompt_id, *_texts(item), weight, kind, born, dict.fromkeys(sources))
        if rubric.id in taken or rubric.id in rubrics:
            left_out.append("repeats another rubric")
        elif len(rubrics) == limit:
            left_out.append(f"is beyond the limit of {limit}")
        else:
            rubrics[rubric.id] = rubric
    return list(rubrics.values()), "; ".join(dict.fromkeys(left_out))


def _malformed(item: object) -> str:
    """Why an item is no rubric; "" if it is one. Keys that we do not know do no harm."""
    if not isinstance(item, dict):
        return f"an item is a {type(item).__name__}, not an object"
    description = item.get("description")
    if not isinstance(description, str) or not fold(description):
        return "an item has no description"
    if len(description) > MAX_DESCRIPTION:
        return f"a description has {len(description)} characters, more than {MAX_DESCRIPTION}"
    return ""


def _texts(item: dict) -> tuple[str, str]:
    """(description, title), white space folded; without a title the description begins it."""
    title = item.get("title")
    title = title if isinstance(title, str) and title.strip() else item["description"]
    return " ".join(item["description"].split()), _cut(" ".join(title.split()), MAX_TITLE)


def _cut(text: str, max_chars: int) -> str:
    """The text, or as much of it as fits with "..." behind it; "" where not even that fits."""
    if len(text) <= max_chars:
        return text
    return text[: max_chars - 3] + "..." if max_chars > 3 else ""
