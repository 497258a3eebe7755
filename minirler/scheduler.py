"""Which rows compute which tokens in the next step, and who gives way when blocks run out.

A row is a sequence of `length` tokens of which the first `cached` have their keys and values in the
cache. A step computes chunks of rows, at most `token_budget` tokens together; a row whose tokens
are all computed can sample its next one. Decoding, prefill of a prompt, forced tokens and the
replay of a preempted row are one thing: tokens that are not cached yet.

Order. Running rows keep the order of their admission; those that need one token go first, so that
decoding never waits behind a prefill. Waiting rows that hold blocks (back from a tool, or forked)
are admitted first, then the longest: half-done work drains before fresh work starts, and the
longest rows are the tail that a step would wait for.

When a running row needs blocks, rows that do not run give up theirs (parked ones first), then
younger running ones, last in first out. Whoever gave up computes its tokens anew. The oldest
running row is never preempted and each row fits the pool alone, hence everyone finishes.

Not here: token ids, noise, tensors (`sampler`). No torch, no clock.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import NamedTuple

from .blocks import BlockPool

WAITING, RUNNING, PARKED = "waiting", "running", "parked"


@dataclass
class Row:
    """One sequence. `followers` are rows of the same tokens that wait for this one's prefill."""

    id: int
    length: int
    cached: int = 0
    state: str = PARKED
    rank: tuple = ()  # its entry in `Scheduler.waiting`, while it waits
    followers: list[int] = field(default_factory=list)


class Chunk(NamedTuple):
    """Tokens [start, end) of a row, to be computed in this step."""

    row: int
    start: int
    end: int


@dataclass
class Plan:
    """One step: first the block `copies` (all reads before any write), then the `chunks`.

    `room` is what is left of the token budget.
    """

    room: int
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """Rows over a `BlockPool`. One step: `schedule`, compute, `complete`, `append` the tokens."""

    def __init__(self, pool: BlockPool, token_budget: int, max_rows: int):
        if token_budget < 1 or max_rows < 1:
            raise ValueError(f"token_budget {token_budget} and max_rows {max_rows} must be >= 1")
        self.pool = pool
        self.token_budget = token_budget
        self.max_rows = max_rows
        self.capacity = pool.num_blocks * pool.block_size  # tokens
        self.rows: dict[int, Row] = {}
        self.leaders: dict[int, int] = {}  # follower -> the row whose prefill it waits for
        self.running: list[int] = []  # in order of admission
        self.waiting: list[tuple] = []  # ranks, the next to admit first
        self.num_evicted = 0  # times a row lost its blocks to another

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self.running or self.waiting)

    # ------------------------------------------------------------------------------ one step

    def schedule(self) -> Plan:
        """Choose the chunks of the next step and reserve their blocks; empty if nothing can run."""
        plan = Plan(room=self.token_budget)
        rows = [self.rows[i] for i in self.running]
        decoding = [row for row in rows if row.length - row.cached == 1]
        for row in decoding + [row for row in rows if row.length - row.cached > 1]:
            # an older row may have evicted this one a moment ago
            if plan.room and row.state == RUNNING and self._make_room(row):
                self._plan(row, plan)
        while plan.room and self.waiting and len(self.running) < self.max_rows:
            row = self.rows[self.waiting[0][-1]]
            if not self._fits(row):
                break
            self._unqueue(row)
            row.state = RUNNING
            self.running.append(row.id)
            self._plan(row, plan)
        return plan

    def complete(self, plan: Plan) -> list[tuple[int, list[int]]]:
        """Note that the plan's chunks are computed; returns who can sample now.

        Each entry is the index of a chunk, and the rows that sample from its last token: the row
        itself and its followers, which from here on are rows of their own that share its blocks.
        """
        ready = []
        for index, (row_id, _, end) in enumerate(plan.chunks):
            row = self.rows[row_id]
            row.cached = end
            if end == row.length:
                ready.append((index, [row_id, *row.followers]))
                for follower in row.followers:
                    del self.leaders[follower]
                    self.pool.fork(row_id, follower)
                    self.rows[follower] = Row(follower, row.length, row.cached)
                    self._enqueue(self.rows[follower])
                row.followers = []
        return ready

    def append(self, row_id: int) -> None:
        """Count one sampled token."""
        self.rows[row_id].length += 1

    # ------------------------------------------------------------------------------ from outside

    def add(self, row_ids: list[int], length: int) -> None:
        """New rows that start with the same `length` tokens, which are computed once for all."""
        if not 1 <= length <= self.capacity:
            raise ValueError(f"a prompt of {length} tokens can never run: the cache has room for 1 "
                             f"to {self.capacity} tokens; raise kv_tokens or shorten the prompt")
        first, *others = row_ids
        self.rows[first] = Row(first, length, followers=others)
        self.leaders.update(dict.fromkeys(others, first))
        self._enqueue(self.rows[first])

    def park(self, row_id: int) -> None:
        """Stop scheduling a row; it keeps its blocks while nobody needs them."""
        row = self._detach(row_id)
        self._unqueue(row)
        row.state = PARKED

    def extend(self, row_id: int, count: int) -> None:
        """Count `count` forced tokens, and run the row (again)."""
        row = self._detach(row_id)
        if row.length + count > self.capacity:
            raise ValueError(f"row {row_id} would hold {row.length + count} tokens, the cache has "
                             f"room for {self.capacity}; raise kv_tokens or end the row")
        self._unqueue(row)
        row.length += count
        self._enqueue(row)

    def finish(self, row_id: int) -> None:
        """Forget a row and free its blocks."""
        row = self._detach(row_id)
        self._unqueue(row)
        if row_id in self.pool.tables:
            self.pool.free(row_id)
        del self.rows[row_id]

    def drop_cache(self) -> None:
        """The weights are new ones: free the blocks of every row, which computes all tokens anew.

        a row that was forgotten here could not be scheduled: its blocks have the old version.
        """
        self.pool.version += 1
        for row in self.rows.values():
            self._release(row)
            if row.state != PARKED:
                self._unqueue(row)
                self._enqueue(row)

    # ------------------------------------------------------------------------------ inside

    def _plan(self, row: Row, plan: Plan) -> None:
        """Reserve blocks for all that `row` has to compute; compute what the budget allows."""
        plan.copies += self.pool.reserve(row.id, row.cached, row.length)
        end = min(row.length, row.cached + plan.room)
        plan.room -= end - row.cached
        plan.chunks.append(Chunk(row.id, row.cached, end))

    def _fits(self, row: Row) -> bool:
        """Whether a waiting row can be admitted now.

        Beside running rows only into free blocks, leaving one for each of them: taking from parked
        rows here would make rows lose their cache by turns. When nothing runs, everybody yields.
        """
        if self.running:
            return self._cost(row) + len(self.running) <= self.pool.num_free
        return self._make_room(row)

    def _make_room(self, row: Row) -> bool:
        """Take blocks from others until `row` can reserve its own; False if nobody has to yield."""
        while self._cost(row) > self.pool.num_free:
            victims = self._victims(row)
            if not victims:
                return False
            gives = (v for v in victims if self.pool.has_own(v.id))  # the others free nothing yet
            self._evict(next(gives, victims[0]))
        return True

    def _victims(self, row: Row) -> list[Row]:
        """Who may lose blocks for `row`, in order: nobody that the plan holds already.

        A row reserves for all its pending tokens on admission, so only decoding rows come here
        while they run, and `schedule` takes those from the oldest to the youngest.
        """
        holders = [self.rows[i] for i in self.pool.tables if i != row.id]
        idle = [r for r in holders if r.state != RUNNING]
        idle.sort(key=lambda r: (r.state != PARKED, -r.id))
        if row.state != RUNNING:
            return idle
        younger = self.running[self.running.index(row.id) + 1:]
        return idle + [self.rows[i] for i in reversed(younger)]

    def _evict(self, row: Row) -> None:
        self.num_evicted += 1
        self._release(row)
        if row.state != PARKED:
            self._unqueue(row)
            self._enqueue(row)

    def _release(self, row: Row) -> None:
        if row.id in self.pool.tables:
            self.pool.free(row.id)
        row.cached = 0

    def _cost(self, row: Row) -> int:
        return self.pool.cost(row.id, row.cached, row.length)

    def _enqueue(self, row: Row) -> None:
        row.state = WAITING
        row.rank = (row.id not in self.pool.tables, -row.length, row.id)
        insort(self.waiting, row.rank)

    def _unqueue(self, row: Row) -> None:
        if row.state == WAITING:
            del self.waiting[bisect_left(self.waiting, row.rank)]
        elif row.state == RUNNING:
            self.running.remove(row.id)

    def _detach(self, row_id: int) -> Row:
        """The row, on its own: neither a follower nor with followers. KeyError if it is unknown."""
        leader = self.leaders.pop(row_id, None)
        if leader is not None:
            self.rows[leader].followers.remove(row_id)
            self.rows[row_id] = Row(row_id, self.rows[leader].length)
            self._enqueue(self.rows[row_id])
        row = self.rows[row_id]
        if row.followers:  # the first of them takes over what is computed
            heir, *others = row.followers
            self.rows[heir] = Row(heir, row.length, row.cached, followers=others)
            del self.leaders[heir]
            self.leaders.update(dict.fromkeys(others, heir))
            if row_id in self.pool.tables:
                self.pool.fork(row_id, heir)
            self._enqueue(self.rows[heir])
            row.followers = []
        return row
