"""The judge: one call for one answer and one criterion; a verdict in [0, 1], or missing.

The judge reads the question, the answer and one criterion's description, never its title, weight or
sign: it says whether something is present, and only the reward knows whether that is good (DR Tulu,
arXiv 2511.19399, asks on the same scale of 0 to 2). A verdict that cannot be had is None, never 0.

Not here: what a missing verdict does to a rollout (`reward`) or a criterion (`rubrics`).
"""

import asyncio
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
    """Asks an LM for verdicts and remembers them by content, `cache_size` at most.

    Only verdicts are remembered, never failures. A reply that cannot be read is asked for again up
    to `config.retries` times; one that did not arrive is not, as the LM has its own retries.
    """

    def __init__(
        self,
        lm: LM,
        config: JudgeConfig,
        prompts_dir: Path | str | None = None,
        cache_size: int = 65536,
    ):
        if config.scale not in _SCALES:
            raise ConfigError(f"judge.scale is {config.scale!r}: choose one of {list(_SCALES)}")
        if config.retries < 0:
            raise ConfigError(f"judge.retries is {config.retries}: it must be at least 0")
        self.counts = Counts()
        self.lm, self._config, self._prompts_dir = lm, config, prompts_dir
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
        asked = [(answers[row], criteria[column]) for (row, column), *_ in map(cells.get, unknown)]
        found = await _gather([self._verdict(question, a, c.description) for a, c in asked])
        known |= zip(unknown, found, strict=True)
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

    async def _verdict(self, question: str, answer: str, criterion: str) -> float | None:
        fields = {"question": question, "answer": answer, "criterion": criterion}
        messages = render(_SCALES[self._config.scale][0], fields, self._prompts_dir)
        fields["scale"] = self._config.scale
        request = LMRequest("judge", fields, messages, max_tokens=self._config.max_tokens)
        for attempt in range(self._config.retries + 1):
            self.counts.calls += 1
            self.counts.retried += attempt > 0
            reply = await self._complete(replace(request, salt=str(attempt)))
            if reply.text is None:
                self.counts.last_error = reply.error
                return None
            value = _read_value(reply.text, self._config.scale, reply.finish_reason)
            if value is not None:
                self.counts.clamped += value != _clamp(value)
                return _clamp(value)
            self.counts.last_error = f"no verdict in {reply.text[:100]!r} ({reply.finish_reason})"
        return None

    async def _complete(self, request: LMRequest) -> LMReply:
        """A failure of the LM becomes a missing verdict here, and nowhere else."""
        try:
            return await self.lm.complete(request)
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
