"""Rollouts: the one place where inference meets the environment.

The sampler decodes in a thread of its own, tools run as tasks meanwhile, and a rollout that waits
for one is parked. Ids are only ever appended: the prompt, what the policy sampled, a tool's output,
and so on; text is decoded from them and never encoded again. A turn ends with the token that
completes a call.

Not here: the grammar (`tools`), and what a rollout is worth (`reward`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from .log import Timers
from .records import Prompt, Rollout, Segment, ToolCall, ToolResult
from .sampler import Sampler, SamplingParams, Token
from .tokenizer import IncrementalDecoder, Tokenizer
from .tools import (
    Executor,
    limit_result,
    parse_answer,
    parse_call,
    parse_citations,
    render_result,
)


@dataclass
class Row:
    """A rollout in the making."""

    id: int  # of the sampler
    rollout: Rollout
    decoder: IncrementalDecoder
    turn: str = ""  # what the policy wrote since the last observation
    num_tokens: int = 0  # after the prompt, sampled and forced
    call: ToolCall | None = None  # the one that it waits for
    task: asyncio.Task | None = None
    due: int = 0  # the sampler step before which the result joins
    done: bool = False


class RolloutEngine:
    """Runs groups of rollouts to their ends; one `run` at a time.

    `max_tokens` counts what follows the prompt, sampled and forced. `max_tool_calls` calls are run;
    any further one is answered by a notice. A rollout ends with a token of `stop_ids`, or with the
    one that completes a text of `stop` in its turn. In deterministic mode a result joins exactly
    `tool_wait_steps` sampler steps after its call, whenever it arrived, so that the make-up of
    every batch, and with it every bit, does not depend on the speed of tools; otherwise on arrival.
    `timers` gets the seconds of "sampling", and of "tools" where decoding stood still for one.
    """

    def __init__(self, sampler: Sampler, tokenizer: Tokenizer, executor: Executor, *,
                 max_tokens: int, max_tool_calls: int, stop_ids: tuple[int, ...],
                 stop: tuple[str, ...] = (), deterministic: bool = False, tool_wait_steps: int = 8,
                 timers: Timers | None = None):
        self.sampler, self.tokenizer, self.executor = sampler, tokenizer, executor
        self.max_tokens, self.max_tool_calls = max_tokens, max_tool_calls
        self.stop_ids, self.stop = tuple(stop_ids), tuple(filter(None, stop))
        self.deterministic, self.tool_wait_steps = deterministic, tool_wait_steps
        self.timers = Timers() if timers is None else timers
        self._rows: dict[int, Row] = {}  # unfinished ones, by the sampler's row id
        self._clock = self._num_sampled = 0  # sampler steps and tokens of this run

    async def run(self, prompts: list[Prompt], prompt_ids: list[list[int]], n: int,
                  params: SamplingParams, step: int, *, noise_step: int | None = None,
                  on_progress: Callable[[int, int], None] | None = None
                  ) -> AsyncIterator[list[Rollout]]:
        """The `n` rollouts of each prompt, in sample order, the moment that its last one ends.

        `step` is recorded as the policy step; the noise is that of (params.seed, prompt id,
        `noise_step`, which is `step` unless given). `on_progress(rollouts done, tokens sampled)` is
        called after every sampler step. Leave the loop early through `contextlib.aclosing`: closing
        cancels the tools and frees the rows. Raises ValueError for a prompt that can never fit.
        """
        if self._rows:
            raise RuntimeError("this engine is in the middle of another run")
        noise_step = step if noise_step is None else noise_step
        params = replace(params, n=n, max_tokens=self.max_tokens, stop_ids=self.stop_ids)
        self._clock, self._num_sampled, rows = 0, 0, []
        try:
            # Leaving this block waits for a step in flight: rows are not freed under its feet.
            with ThreadPoolExecutor(1, "sampler") as thread:
                for prompt, ids in zip(prompts, prompt_ids, strict=True):
                    rows += self._start(prompt, ids, params, step, noise_step)
                groups = [rows[i : i + n] for i in range(0, len(rows), n)]
                while groups:
                    await self._observe()
                    if self.sampler.has_work:
                        await self._decode(thread)
                    if on_progress:
                        on_progress(len(rows) - len(self._rows), self._num_sampled)
                    ended = [group for group in groups if is_done(group)]
                    groups = [group for group in groups if not is_done(group)]
                    for group in ended:
                        yield [row.rollout for row in group]
        finally:
            await self._abandon()

    def _start(self, prompt: Prompt, ids: list[int], params: SamplingParams, step: int,
               noise_step: int) -> list[Row]:
        """Hand one prompt to the sampler, which prefills it once for its `params.n` rows."""
        rows = []
        for sample, row_id in enumerate(self.sampler.add(ids, params, prompt.id, noise_step)):
            first = Segment(list(ids), [0.0] * len(ids), sampled=False, step=step)
            rollout = Rollout(prompt.id, sample, [first])
            rows.append(Row(row_id, rollout, IncrementalDecoder(self.tokenizer)))
        self._rows |= {row.id: row for row in rows}
        return rows

    async def _decode(self, thread: ThreadPoolExecutor) -> None:
        """One sampler step. It runs in a thread, so that tools and judges go on meanwhile."""
        with self.timers("sampling"):
            tokens = await asyncio.get_running_loop().run_in_executor(thread, self.sampler.step)
        self._clock += 1
        self._num_sampled += len(tokens)
        for token in tokens:
            self._take(self._rows[token.row], token)

    def _take(self, row: Row, token: Token) -> None:
        """Append a sampled token; it may end the rollout or complete a call."""
        rollout = row.rollout
        if not rollout.segments[-1].sampled:
            rollout.segments.append(Segment([], [], True, rollout.segments[0].step))
        rollout.segments[-1].ids.append(token.id)
        rollout.segments[-1].logps.append(token.logp)
        row.num_tokens += 1
        if token.stop_reason == "stop":
            return self._end(row, "stop")
        text = row.decoder.push(token.id)
        row.turn += text
        if text and any(stop in row.turn[-len(text) - len(stop) + 1 :] for stop in self.stop):
            return self._end(row, "stop")
        if token.stop_reason or row.num_tokens >= self.max_tokens:
            return self._end(row, "length")
        if ">" in text and (call := parse_call(row.turn)):  # only a ">" can complete a call
            self._call(row, call)

    def _call(self, row: Row, call: ToolCall) -> None:
        """Start a call, or answer it with the notice that there are none left."""
        self._close_turn(row)
        row.call, number, rollout = call, len(row.rollout.calls), row.rollout
        if number >= self.max_tool_calls:
            return self._append(row, limit_result(self.max_tool_calls))
        self.sampler.park(row.id)
        work = self.executor.run(call, rollout.prompt_id, rollout.sample, number)
        row.task, row.due = asyncio.create_task(work), self._clock + self.tool_wait_steps

    async def _observe(self) -> None:
        """Let the results join whose time has come; with nothing to decode, wait for the next."""
        waiting = [row for row in self._rows.values() if row.task]
        if not self.sampler.has_work:
            if not waiting:
                raise RuntimeError(f"the sampler has nothing to run for {list(self._rows)}")
            if self.deterministic:  # nothing decodes: on to the first result that is due
                self._clock = max(self._clock, min(row.due for row in waiting))
            else:
                await self._wait([row.task for row in waiting])
        for row in waiting:  # in the order of their ids
            if self.deterministic and row.due <= self._clock:
                await self._wait([row.task])
            elif self.deterministic or not row.task.done():
                continue
            result, row.task = row.task.result(), None
            self._append(row, result)

    async def _wait(self, tasks: list[asyncio.Task]) -> None:
        """Wait until one of the tasks is done."""
        if not any(task.done() for task in tasks):
            with self.timers("tools"):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    def _append(self, row: Row, result: ToolResult) -> None:
        """Append an observation whole, or end the rollout where it leaves no token to sample."""
        ids = self.tokenizer.encode_untrusted(render_result(result))
        if row.num_tokens + len(ids) >= self.max_tokens:
            return self._end(row, "length")
        rollout = row.rollout
        rollout.calls.append((row.call, result))
        rollout.segments.append(Segment(ids, [0.0] * len(ids), False, rollout.segments[0].step))
        row.num_tokens += len(ids)
        self.sampler.extend(row.id, ids)

    def _close_turn(self, row: Row) -> None:
        row.rollout.text += row.turn + row.decoder.flush()
        row.turn, row.decoder = "", IncrementalDecoder(self.tokenizer)

    def _end(self, row: Row, stop_reason: str) -> None:
        """Read answer and citations from what the policy wrote, and free the row."""
        self._close_turn(row)
        rollout = row.rollout
        rollout.stop_reason = stop_reason
        rollout.answer = parse_answer(rollout.text)
        rollout.citations = parse_citations(rollout.answer or "")
        row.done = True
        self.sampler.finish(row.id)
        del self._rows[row.id]

    async def _abandon(self) -> None:
        """Free what has not ended: nothing is left of a run that was closed or failed."""
        tasks = [row.task for row in self._rows.values() if row.task]
        for row_id in self._rows:
            self.sampler.finish(row_id)
        self._rows.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def is_done(group: list[Row]) -> bool:
    """Whether every rollout of the group has ended."""
    return all(row.done for row in group)
