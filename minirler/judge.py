"""The judge: one call for one answer and one criterion; a verdict in [0, 1], or missing.

The judge reads the question, the answer and one criterion's description, never its title, weight or
sign: it says whether something is present, and only the reward knows whether that is good (DR Tulu,
arXiv 2511.19399, asks on the same scale of 0 to 2). A verdict that cannot be had is None, never 0.

Not here: what a missing verdict does to a rollout (`reward`) or a criterion (`rubrics`).
"""

import asyncio
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from .config import ConfigError, JudgeConfig
from .lm import read_json, render
from .records import LM, LMReply, LMRequest
from .rubrics import Rubric

# By scale: the prompt file, and the key of the verdict in the reply.
_SCALES = {"graded": ("judge", "score"), "binary": ("judge_binary", "met")}
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)


def read_verdict(
    text: str | None, scale: str = "graded", finish_reason: str = "stop"
) -> float | None:
    """The verdict in a judge's reply, in [0, 1]; None is missing. Never raises on any text.

    "graded": `score` from 0 to 2, halved, clamped if it is finite and out of range.
    "binary": `met` true, false, 1 or 0. Either may be a number in quotes.
    """
    value = _read_value(text, scale, finish_reason)
    return None if value is None else _clamp(value)


def _clamp(value: float) -> float:
    return min(max(0.0, value), 1.0)


def _read_value(text: str | None, scale: str, finish_reason: str) -> float | None:
    """As `read_verdict`, before clamping."""
    key = _SCALES[scale][1]
    value = (read_json(text, key, finish_reason) or {}).get(key)
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    if scale == "binary":
        return float(value) if isinstance(value, int | float) and value in (0, 1) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value / 2 if math.isfinite(value) else None
    except OverflowError:  # an integer beyond float64
        return None


def read_batch(text: str | None, count: int, finish_reason: str = "stop") -> list[float | None]:
    """The graded values of criteria 1 to `count` in one reply, not yet clamped; None is missing.

    {"verdicts": [{"id": 1, "reason": ..., "score": 2}, ...]}. An id that comes twice with two
    scores has contradicted itself, and is missing.
    """
    entries = (read_json(text, "verdicts", finish_reason) or {}).get("verdicts")
    values: dict[int, set] = {}
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and type(entry.get("id")) is int:
            score = _read_value(json.dumps({"score": entry.get("score")}), "graded", "stop")
            values.setdefault(entry["id"], set()).add(score)
    found = [values.get(i, {None}) for i in range(1, count + 1)]
    return [next(iter(x)) if len(x) == 1 else None for x in found]


def combine(votes: Sequence[float | None], rule: str) -> float | None:
    """One verdict of several judges'; None where no more than half of them have one.

    "mean", or "majority": the value with most votes, of equals the lowest.
    """
    known = sorted(vote for vote in votes if vote is not None)
    if 2 * len(known) <= len(votes):
        return None
    if len(known) == 1:
        return known[0]
    return math.fsum(known) / len(known) if rule == "mean" else max(known, key=known.count)


def has_answer(answer: str | None) -> bool:
    """False for a rollout that has nothing to judge: keep it out of the buffer's statistics."""
    return bool(answer and answer.strip())


@dataclass
class Counts:
    """What the judge did since the last `take_counts`."""

    calls: int = 0  # requests to the model, retries included
    cached: int = 0  # verdicts that needed none: seen before, or equal to another one of the group
    retried: int = 0  # requests that repeat one whose reply could not be read
    clamped: int = 0  # finite scores out of range
    missing: int = 0  # verdicts
    last_error: str = ""  # of the latest reply that did not arrive or could not be read


class Judge:
    """Asks LMs for verdicts and remembers them by content, `cache_size` at most.

    Several LMs vote on each verdict (`combine`). `criteria_per_call` criteria go into one call, 0:
    all of an answer; one at a time is the paper's way, and dearer. Only verdicts are remembered,
    never failures. A reply that cannot be read is asked for again up
    to `config.retries` times; one that did not arrive is not, as the LM has its own retries.
    """

    def __init__(
        self,
        lms: Sequence[LM],
        config: JudgeConfig,
        prompts_dir: Path | str | None = None,
        cache_size: int = 65536,
    ):
        if config.scale not in _SCALES:
            raise ConfigError(f"judge.scale is {config.scale!r}: choose one of {list(_SCALES)}")
        if config.retries < 0:
            raise ConfigError(f"judge.retries is {config.retries}: it must be at least 0")
        if config.criteria_per_call != 1 and config.scale != "graded":
            raise ConfigError("judge.criteria_per_call other than 1 needs judge.scale = 'graded'")
        self.counts = Counts()
        self.lms, self._config, self._prompts_dir = list(lms), config, prompts_dir
        self._cache: dict[bytes, float] = {}  # oldest first
        self._cache_size = cache_size

    async def score_group(
        self, question: str, answers: Sequence[str | None], criteria: Sequence[Rubric]
    ) -> list[list[float | None]]:
        """Verdicts [G][C] in [0, 1] of G answers by C criteria, all asked for at once.

        None is missing. Without an answer (see `has_answer`) nothing is asked: a criterion of
        negative weight counts as met, any other as unmet, which is the least possible reward.
        Errors: the ConfigError of an LM that cannot work as it is configured.
        """
        verdicts = [[float(c.weight < 0) for c in criteria] for _ in answers]
        cells = self._cells(question, answers, criteria)
        known = {key: self._cache[key] for key in cells if key in self._cache}
        unknown = [key for key in cells if key not in known]
        batches = self._batches(unknown, cells)
        found = await _gather([
            self._verdicts(question, answers[cells[batch[0]][0][0]],
                           [criteria[cells[key][0][1]].description for key in batch])
            for batch in batches
        ])  # fmt: skip
        for batch, values in zip(batches, found, strict=True):
            known |= zip(batch, values, strict=True)
        self._remember(known)
        for key, places in cells.items():
            self.counts.missing += len(places) if known[key] is None else 0
            for row, column in places:
                verdicts[row][column] = known[key]
        self.counts.cached += sum(map(len, cells.values())) - len(unknown)
        return verdicts

    def _cells(self, question, answers, criteria) -> dict[bytes, list[tuple[int, int]]]:
        """The places [row, column] that have the same content, by its key.

        They share one call: a verdict belongs to what was judged, not to where or when.
        """
        cells: dict[bytes, list[tuple[int, int]]] = {}
        for row, answer in enumerate(answers):
            if has_answer(answer):
                key = _digest(self._config.scale, question, answer)
                for column, criterion in enumerate(criteria):
                    cells.setdefault(key(criterion.description), []).append((row, column))
        return cells

    def take_counts(self) -> Counts:
        """The counts since the last call, which then start again from zero."""
        counts, self.counts = self.counts, Counts()
        return counts

    def _batches(self, keys: list[bytes], cells: dict) -> list[list[bytes]]:
        """The keys that one call asks for: of one answer, `criteria_per_call` at most."""
        answers: dict[int, list[bytes]] = {}
        for key in keys:
            answers.setdefault(cells[key][0][0], []).append(key)
        size = self._config.criteria_per_call or max(1, len(keys))
        return [own[i : i + size] for own in answers.values() for i in range(0, len(own), size)]

    async def _verdicts(
        self, question: str, answer: str, criteria: list[str]
    ) -> list[float | None]:
        """Of one answer by some criteria, all judges asked at once."""
        asks = [self._ask(lm, question, answer, criteria) for lm in self.lms]
        columns = zip(*await _gather(asks), strict=True)
        return [combine(votes, self._config.combine) for votes in columns]

    async def _ask(self, lm: LM, question: str, answer: str, criteria: list[str]
                   ) -> list[float | None]:  # fmt: skip
        """One judge's verdicts; what it left open is asked for again, with all of the batch."""
        cfg, values = self._config, [None] * len(criteria)
        request = self._request(question, answer, criteria)
        for attempt in range(cfg.retries + 1):
            self.counts.calls += 1
            self.counts.retried += attempt > 0
            reply = await self._complete(lm, replace(request, salt=str(attempt)))
            if reply.text is None:
                self.counts.last_error = reply.error
                break
            if request.task == "judge":
                found = [_read_value(reply.text, cfg.scale, reply.finish_reason)]
            else:
                found = read_batch(reply.text, len(criteria), reply.finish_reason)
            self.counts.clamped += sum(x is not None and x != _clamp(x) for x in found)
            values = [y if x is None else x for x, y in zip(values, found, strict=True)]
            if None not in values:
                break
            self.counts.last_error = f"no verdict in {reply.text[:100]!r} ({reply.finish_reason})"
        return [None if x is None else _clamp(x) for x in values]

    def _request(self, question: str, answer: str, criteria: list[str]) -> LMRequest:
        fields: dict = {"question": question, "answer": answer}
        if self._config.criteria_per_call == 1:
            task, name = "judge", _SCALES[self._config.scale][0]
            fields["criterion"] = criteria[0]
        else:
            task = name = "judge_batch"
            fields["criteria"] = [{"id": i, "criterion": c} for i, c in enumerate(criteria, 1)]
        messages = render(name, fields, self._prompts_dir)
        fields["scale"] = self._config.scale
        return LMRequest(task, fields, messages, max_tokens=self._config.max_tokens)

    async def _complete(self, lm: LM, request: LMRequest) -> LMReply:
        """A failure of the LM becomes a missing verdict here, and nowhere else."""
        try:
            return await lm.complete(request)
        except ConfigError:
            raise  # every other call would fail in the same way
        except Exception as error:
            return LMReply(None, "error", f"{type(error).__name__}: {error}")

    def _remember(self, verdicts: dict[bytes, float | None]) -> None:
        self._cache |= {key: value for key, value in verdicts.items() if value is not None}
        while len(self._cache) > self._cache_size:
            del self._cache[next(iter(self._cache))]


def _digest(*parts: str):
    """A function from one more part to a 16-byte key of all of them."""

    def feed(state, part: str):
        data = part.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little"))  # so that no two ways of cutting agree
        state.update(data)
        return state

    base = blake2b(digest_size=16)
    for part in parts:
        feed(base, part)
    return lambda part: feed(base.copy(), part).digest()


async def _gather(coroutines: list) -> list:
    """Results in the order of the input. The first exception cancels the rest and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
