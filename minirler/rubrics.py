"""Rubrics and the buffer that evolves them: a pure state machine (no I/O, no clock, no tensors).

As in DR Tulu (arXiv 2511.19399): persistent criteria are always used; evolving ones as long as they
tell the rollouts of a prompt apart, and then they are retired.

    buffer.add(prompt_id, rubrics)             # new ones join at once, even beyond the cap
    criteria = buffer.criteria(prompt_id)      # what every rollout of the group is judged by
    buffer.observe(prompt_id, ids, verdicts)   # one visit ends: flat ones go, the cap is applied

Not here: where criteria come from (`evolve`), verdicts (`judge`), rewards (`reward`).
"""

import math
import statistics
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from .config import ConfigError

VERSION = 1  # of the state; a change of its form gets a new number
MAX_DESCRIPTION = 2000  # characters: every one is paid for in every judge call
FLAT = 1e-6  # a criterion whose verdicts span no more than this tells nothing apart


@dataclass(frozen=True)
class Rubric:
    """One criterion. The judge sees `description` only; `born`: a step, `sources`: document ids."""

    id: str
    description: str
    title: str
    weight: float
    kind: str
    born: int = 0
    sources: tuple[str, ...] = ()


def make_rubric(
    prompt_id: str,
    description: str,
    title: str = "",
    weight: float = 1.0,
    kind: str = "evolving",
    born: int = 0,
    sources: Iterable[str] = (),
) -> Rubric:
    """A rubric whose id is a hash of the prompt id and the folded description."""
    text = f"{prompt_id}\0{fold(description)}"
    name = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return Rubric(name, description, title, float(weight), kind, born, tuple(sources))


def fold(description: str) -> str:
    """What two wordings of one criterion share: case, punctuation and white space do not count.

    >>> fold("  Names the river's SOURCE -- twice. ")
    'names the river s source twice'
    """
    text = unicodedata.normalize("NFKC", description).casefold()
    kept = (" " if unicodedata.category(c).startswith("P") else c for c in text)
    return " ".join("".join(kept).split())


@dataclass
class _Entry:
    """One prompt's rubrics by id. Always: accepted = persistent + active + retired + forgotten."""

    persistent: dict[str, Rubric] = field(default_factory=dict)
    active: dict[str, Rubric] = field(default_factory=dict)
    retired: dict[str, Rubric] = field(default_factory=dict)  # oldest first
    spreads: dict[str, float] = field(default_factory=dict)  # the latest, of active ones
    retired_at: dict[str, int] = field(default_factory=dict)  # the visit, of retired ones
    visits: int = 0
    accepted: int = 0
    forgotten: int = 0


_LISTS = ("persistent", "active", "retired")
# The key of each setting and its least value.
_LEAST = {"max_active": ("rubrics.max_active", 0), "min_scored": ("judge.min_scored", 1),
          "history": ("rubrics.history", 0), "cooldown": ("rubrics.cooldown", 0)}  # fmt: skip


class RubricBuffer:
    """The rubrics of every prompt, by prompt id; each call costs O(that prompt's rubrics).

    `max_active` caps the evolving criteria of a prompt, `min_scored` is the number of verdicts that
    a criterion needs for statistics, `history` bounds the retired ones that are remembered, and
    `cooldown` is the number of visits for which a retired one is refused.
    """

    def __init__(self, max_active=5, min_scored=2, history=64, cooldown=4):
        self.max_active, self.min_scored = max_active, min_scored
        self.history, self.cooldown = history, cooldown
        for name, (key, least) in _LEAST.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{key} is {value!r}: it must be an integer >= {least}")
        self._entries: dict[str, _Entry] = {}
        self._events: list[dict] = []

    def add(self, prompt_id: str, rubrics: Iterable[Rubric]) -> list[Rubric]:
        """Take in new rubrics; returns the accepted ones. The others become "rejected" events.

        Refused: an id in use, or retired less than `cooldown` visits ago (unless persistent); an
        empty or too long description; a weight that is not finite, or not +-1 in an evolving one.
        """
        entry = self._entry(prompt_id)
        accepted = []
        # Of several with one id the same one is taken, in whatever order they come.
        for rubric in sorted(rubrics, key=lambda r: (r.kind != "persistent", str(r.id), repr(r))):
            why = _invalid(rubric) or self._taken(entry, rubric)
            if why:
                self._log("rejected", prompt_id, id=rubric.id, why=why)
                continue
            if rubric.id in entry.retired:  # its former life is over; the new one counts anew
                self._forget(entry, rubric.id)
            (entry.persistent if rubric.kind == "persistent" else entry.active)[rubric.id] = rubric
            entry.accepted += 1
            accepted.append(rubric)
            self._log("born", prompt_id, **_as_json(rubric))
        entry.persistent = dict(sorted(entry.persistent.items()))
        entry.active = dict(sorted(entry.active.items(), key=lambda item: (item[1].born, item[0])))
        return accepted

    def criteria(self, prompt_id: str) -> list[Rubric]:
        """What to judge by: persistent rubrics by id, then active ones by (born, id)."""
        entry = self._entries.get(prompt_id, _Entry())
        return [*entry.persistent.values(), *entry.active.values()]

    def active(self, prompt_id: str) -> list[Rubric]:
        """The evolving rubrics in use, by (born, id)."""
        return list(self._entries.get(prompt_id, _Entry()).active.values())

    def retired(self, prompt_id: str) -> list[Rubric]:
        """The retired rubrics that are remembered, the latest last."""
        return list(self._entries.get(prompt_id, _Entry()).retired.values())

    def counts(self, prompt_id: str) -> dict[str, int]:
        """Sizes and totals: accepted = persistent + active + retired + forgotten; also visits."""
        fields = vars(self._entries.get(prompt_id, _Entry()))
        return {name: x if isinstance(x, int) else len(x) for name, x in fields.items()}

    def observe(
        self,
        prompt_id: str,
        ids: Sequence[str],
        verdicts: Sequence[Sequence[float | None]],
        counted: Sequence[bool] | None = None,
    ) -> None:
        """End a visit of a prompt: retire what its verdicts [G][C] show to be of no use.

        `ids` [C] names the columns. A None is missing. `counted` [G] is False for rollouts that are
        unscored or have no answer: their rows are left out of the statistics (as a row of None is).
        Call it on every visit, even if nothing was scored: the cap and the cooldown depend on it.

        Flat (max - min <= 1e-6 over at least `min_scored` rollouts): retired. Beyond `max_active`
        the largest spread stays (population std, float64; ties by id); a criterion that has no
        statistics keeps its last ones, and one that never had any stays while there is room.
        Persistent rubrics and unknown ids are not touched.
        """
        entry = self._entry(prompt_id)
        columns = _columns(ids, verdicts, counted)
        entry.visits += 1
        flat = []
        for name in sorted(entry.active.keys() & columns.keys()):
            num_rows, values = columns[name]
            if num_rows >= self.min_scored:
                entry.spreads[name] = statistics.pstdev(values)
                if max(values) - min(values) <= FLAT:
                    flat.append(name)
        spreads = {name: entry.spreads.get(name) for name in sorted(entry.active)}
        self._log("visit", prompt_id, visit=entry.visits, spreads=spreads)
        self._retire(prompt_id, entry, flat, "flat")
        ranked = sorted(entry.active, key=lambda n: (-entry.spreads.get(n, -math.inf), n))
        self._retire(prompt_id, entry, sorted(ranked[self.max_active :]), "cap")
        while len(entry.retired) > self.history:
            self._forget(entry, next(iter(entry.retired)))

    def drain_events(self) -> list[dict]:
        """What happened since the last call, in order, for the log; no part of the state.

        "born" (the rubric's fields), "rejected" (id, why), "visit" (visit, spreads by active id),
        "retired" (id, why, spread, visit); each has event and prompt_id.
        """
        events, self._events = self._events, []
        return events

    def state(self) -> dict:
        """Everything but the events, as plain JSON data; `from_state` reads it back."""
        prompts = {}
        for prompt_id, entry in sorted(self._entries.items()):
            saved = {n: [_as_json(r) for r in getattr(entry, n).values()] for n in _LISTS}
            saved |= {"spreads": dict(entry.spreads), "retired_at": dict(entry.retired_at)}
            prompts[prompt_id] = vars(entry) | saved
        settings = {name: getattr(self, name) for name in _LEAST}
        return {"version": VERSION, "settings": settings, "prompts": prompts}

    @classmethod
    def from_state(cls, state: dict) -> "RubricBuffer":
        """The buffer that `state()` described. Errors: ValueError that says what is wrong."""
        version = state.get("version") if isinstance(state, dict) else None
        if version != VERSION:
            raise ValueError(f"rubric buffer: state version {version}, but {VERSION} is needed")
        try:
            buffer = cls(**state["settings"])
            for prompt_id, saved in state["prompts"].items():
                buffer._entries[prompt_id] = _read_entry(saved)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"rubric buffer: malformed state ({error!r})") from error
        return buffer

    def _entry(self, prompt_id: str) -> _Entry:
        if not isinstance(prompt_id, str):  # as a key of JSON it would come back as a string
            raise ValueError(f"prompt id {prompt_id!r} must be a string")
        return self._entries.setdefault(prompt_id, _Entry())

    def _taken(self, entry: _Entry, rubric: Rubric) -> str:
        if rubric.id in entry.persistent or rubric.id in entry.active:
            return "duplicate"
        if rubric.kind == "persistent" or rubric.id not in entry.retired:
            return ""
        return "cooldown" if entry.visits - entry.retired_at[rubric.id] < self.cooldown else ""

    def _forget(self, entry: _Entry, name: str) -> None:
        del entry.retired[name], entry.retired_at[name]
        entry.forgotten += 1

    def _retire(self, prompt_id: str, entry: _Entry, names: list[str], why: str) -> None:
        for name in names:
            spread = entry.spreads.pop(name, None)
            entry.retired[name] = entry.active.pop(name)
            entry.retired_at[name] = entry.visits
            self._log("retired", prompt_id, id=name, why=why, spread=spread, visit=entry.visits)

    def _log(self, event: str, prompt_id: str, **details) -> None:
        self._events.append({"event": event, "prompt_id": prompt_id, **details})


def _invalid(rubric: Rubric) -> str:
    """Why a rubric cannot be used; empty if it can."""
    text, weight = rubric.description, rubric.weight
    if rubric.kind not in ("persistent", "evolving"):
        return f"kind {rubric.kind!r}"
    if not isinstance(text, str) or not fold(text):
        return "empty description"
    if len(text) > MAX_DESCRIPTION or any("\ud800" <= c <= "\udfff" for c in text):
        return f"description longer than {MAX_DESCRIPTION} characters, or with a lone surrogate"
    if not isinstance(weight, int | float) or not math.isfinite(weight):
        return f"weight {weight!r} is not finite"
    if rubric.kind == "evolving" and weight not in (1, -1):
        return f"weight {weight!r} of an evolving rubric is not +-1"
    return ""


def _columns(ids, verdicts, counted) -> dict[str, tuple[int, list[float]]]:
    """By criterion: how many counted rows have a verdict, and the verdicts.

    Of columns with one id a row's equal verdicts count once, so that duplicates change nothing.
    """
    if counted is not None and len(counted) != len(verdicts):
        raise ValueError(f"counted has {len(counted)} entries for {len(verdicts)} rows of verdicts")
    for row, cells in enumerate(verdicts):
        if len(cells) != len(ids):
            raise ValueError(f"verdict row {row} has {len(cells)} entries for {len(ids)} criteria")
        if not all(v is None or math.isfinite(v) for v in cells):
            raise ValueError(f"verdict row {row} holds a value that is not finite; use None")
    rows = [cells for row, cells in enumerate(verdicts) if counted is None or counted[row]]
    places: dict[str, list[int]] = {}
    for place, name in enumerate(ids):
        places.setdefault(name, []).append(place)
    columns = {}
    for name, at in places.items():
        cells = [{row[place] for place in at} - {None} for row in rows]
        columns[name] = (sum(map(bool, cells)), [float(v) for cell in cells for v in cell])
    return columns


def _as_json(rubric: Rubric) -> dict:
    return vars(rubric) | {"sources": list(rubric.sources)}


def _from_json(saved: dict) -> Rubric:
    rubric = Rubric(**saved | {"sources": tuple(saved["sources"])})
    if why := _invalid(rubric):
        raise ValueError(f"rubric {rubric.id!r}: {why}")
    return rubric


def _read_entry(saved: dict) -> _Entry:
    entry = _Entry(**saved | {n: {r.id: r for r in map(_from_json, saved[n])} for n in _LISTS})
    entry.spreads, entry.retired_at = dict(entry.spreads), dict(entry.retired_at)
    ids = entry.persistent.keys() | entry.active.keys() | entry.retired.keys()
    if [*entry.retired_at] != [*entry.retired] or not entry.spreads.keys() <= entry.active.keys():
        raise ValueError("retired_at or spreads do not fit the rubrics")
    if entry.visits < 0 or entry.accepted != len(ids) + entry.forgotten:
        raise ValueError("accepted is not persistent + active + retired + forgotten")
    return entry
