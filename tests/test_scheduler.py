"""The scheduler under random use, with token counts only."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minirler.blocks import BlockPool
from minirler.scheduler import PARKED, Scheduler


def make(blocks=8, block_size=4, token_budget=16, max_rows=8):
    return Scheduler(BlockPool(blocks, block_size), token_budget, max_rows)


def step(scheduler, stop=()):
    """One step: (plan, rows that sampled); those in `stop` are finished when they sample."""
    plan = scheduler.schedule()
    sampled = [row for _, rows in scheduler.complete(plan) for row in rows]
    for row in sampled:
        scheduler.append(row)
        if row in stop:
            scheduler.finish(row)
    return plan, sampled


class SchedulerMachine(RuleBasedStateMachine):
    """`lengths` is what every row should hold, `left` how many tokens it may still sample."""

    @initialize(blocks=st.integers(3, 9), block_size=st.integers(1, 4), budget=st.integers(1, 9),
                max_rows=st.integers(1, 5))
    def start(self, blocks, block_size, budget, max_rows):
        self.scheduler = make(blocks, block_size, budget, max_rows)
        self.lengths, self.left, self.next_row = {}, {}, 0
        self.cache = {}  # block -> offset -> (row group, position): what a cache would hold
        self.lines = {}  # row -> identity of each of its tokens

    @rule(n=st.integers(1, 4), length=st.integers(1, 40), tokens=st.integers(1, 9))
    def add(self, n, length, tokens):
        rows = list(range(self.next_row, self.next_row + n))
        if length > self.scheduler.capacity:
            with pytest.raises(ValueError, match=f"{length} .*{self.scheduler.capacity}"):
                self.scheduler.add(rows, length)
            return
        self.next_row += n
        self.scheduler.add(rows, length)
        for row in rows:
            self.lines[row] = [(rows[0], i) for i in range(length)]
            self.left[row] = tokens

    @rule()
    def step(self):
        scheduler = self.scheduler
        plan = scheduler.schedule()
        assert bool(plan.chunks) == scheduler.has_work
        computed = sum(chunk.end - chunk.start for chunk in plan.chunks)
        assert computed <= scheduler.token_budget and len(plan.chunks) <= scheduler.max_rows
        old = {block: dict(slots) for block, slots in self.cache.items()}
        for source, target in plan.copies:
            self.cache[target] = dict(old[source])
        for row, start, end in plan.chunks:
            assert start == scheduler.rows[row].cached < end
            for position in range(start, end):
                block, offset = divmod(position, scheduler.pool.block_size)
                slots = self.cache.setdefault(scheduler.pool.tables[row][block], {})
                slots[offset] = self.lines[row][position]
        for row in [row for _, rows in scheduler.complete(plan) for row in rows]:
            scheduler.append(row)
            self.lines[row].append((row, len(self.lines[row])))
            self.left[row] -= 1
            if self.left[row] == 0 or len(self.lines[row]) > scheduler.capacity:
                self.finish_row(row)

    def finish_row(self, row):
        self.scheduler.finish(row)
        del self.left[row], self.lines[row]

    @precondition(lambda self: self.left)
    @rule(data=st.data(), what=st.sampled_from(["park", "extend", "finish"]), n=st.integers(0, 5))
    def touch(self, data, what, n):
        row = data.draw(st.sampled_from(sorted(self.left)))
        if what == "finish":
            self.finish_row(row)
        elif what == "park":
            self.scheduler.park(row)
        elif len(self.lines[row]) + n <= self.scheduler.capacity:
            self.scheduler.extend(row, n)
            self.lines[row] += [(row, len(self.lines[row]) + i) for i in range(n)]

    @rule()
    def change_weights(self):
        self.scheduler.drop_cache()
        self.cache.clear()
        assert self.scheduler.pool.num_used == 0

    @invariant()
    def what_counts_as_cached_is_in_the_cache(self):
        """No row's keys are lost, overwritten by another's, or computed for a wrong token."""
        for row in self.scheduler.rows.values() if hasattr(self, "scheduler") else ():
            assert row.length == len(self.lines[row.id])
            for position in range(row.cached):
                block, offset = divmod(position, self.scheduler.pool.block_size)
                held = self.cache[self.scheduler.pool.tables[row.id][block]][offset]
                assert held == self.lines[row.id][position]

    @invariant()
    def every_row_is_in_one_place(self):
        if not hasattr(self, "scheduler"):
            return
        s = self.scheduler
        places = [*s.running, *(rank[-1] for rank in s.waiting), *s.leaders,
                  *(row.id for row in s.rows.values() if row.state == PARKED)]
        assert sorted(places) == sorted(self.left) and set(s.pool.tables) <= set(s.rows)
        assert {f: r.id for r in s.rows.values() for f in r.followers} == s.leaders
        assert s.waiting == sorted(row.rank for row in s.rows.values() if row.state == "waiting")

    def teardown(self):
        """Everybody finishes, parked rows too once they are let run; nothing is left."""
        if not hasattr(self, "scheduler"):
            return
        for row in [row.id for row in self.scheduler.rows.values() if row.state == PARKED]:
            self.scheduler.extend(row, 0) if len(self.lines[row]) <= self.scheduler.capacity \
                else self.finish_row(row)
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.left and not self.scheduler.rows and not self.scheduler.leaders
        assert self.scheduler.pool.num_used == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=50, stateful_step_count=30)


def test_decoding_goes_on_beside_a_long_prefill():
    scheduler = make(blocks=64, token_budget=8)
    scheduler.add([0], 3)
    step(scheduler)
    scheduler.add([1], 30)
    chunks = [step(scheduler)[0].chunks for _ in range(5)]
    assert all(c[0] == (0, 3 + i, 4 + i) for i, c in enumerate(chunks))  # one token each step
    assert [c[1] for c in chunks] == [(1, 0, 7), (1, 7, 14), (1, 14, 21), (1, 21, 28), (1, 28, 30)]


def test_waiting_rows_are_admitted_longest_first():
    scheduler = make(blocks=64, token_budget=100, max_rows=2)
    for row, length in enumerate((3, 9, 5, 9)):
        scheduler.add([row], length)
    assert [chunk.row for chunk in scheduler.schedule().chunks] == [1, 3]


def test_forked_rows_come_before_fresh_prompts_even_longer_ones():
    scheduler = make(blocks=64, token_budget=100, max_rows=1)
    scheduler.add([0, 1, 2], 3)
    assert step(scheduler)[1] == [0, 1, 2]
    scheduler.add([3], 50)
    order = []
    while scheduler.rows:
        plan, _ = step(scheduler, stop=(0, 1, 2, 3))
        order += [chunk.row for chunk in plan.chunks]
    assert order == [0, 1, 2, 3]


def test_a_parked_row_keeps_its_cache_while_there_is_room():
    scheduler = make()
    scheduler.add([0], 9)
    step(scheduler)
    scheduler.park(0)
    scheduler.add([1], 8)
    step(scheduler, stop=(1,))
    scheduler.extend(0, 2)
    assert step(scheduler)[0].chunks == [(0, 9, 12)]  # the last sampled one and two forced


def evicted(scheduler, count):
    """Rows in the order in which they lose their blocks, while the oldest runs in every step."""
    lost = []
    for _ in range(12):
        before, oldest = set(scheduler.pool.tables), scheduler.running[0]
        assert oldest in [chunk.row for chunk in step(scheduler)[0].chunks]
        lost += before - set(scheduler.pool.tables)
        if len(lost) == count:
            break
    return lost


@pytest.mark.parametrize("parked, order", [([], [2, 1]), ([0], [0, 2]), ([1], [1, 2])])
def test_parked_rows_yield_first_and_then_the_youngest(parked, order):
    scheduler = make(blocks=9, block_size=1, token_budget=99)
    for row in range(3):
        scheduler.add([row], 2)
    step(scheduler)
    for row in parked:
        scheduler.park(row)
    assert evicted(scheduler, 2) == order


def test_parked_rows_yield_before_those_that_came_back():
    scheduler = make(blocks=9, block_size=1, token_budget=99, max_rows=3)
    for row in range(3):
        scheduler.add([row], 2)
    step(scheduler)
    scheduler.max_rows = 1  # row 2 comes back from a tool, and has to wait
    scheduler.park(1)
    scheduler.extend(2, 0)
    assert evicted(scheduler, 2) == [1, 2]


def test_admission_does_not_take_from_parked_rows_while_others_run():
    scheduler = make(blocks=6, block_size=2, token_budget=99)
    scheduler.add([0], 6)
    scheduler.add([1], 2)
    step(scheduler)
    scheduler.park(0)
    scheduler.add([2], 6)
    assert [chunk.row for chunk in step(scheduler)[0].chunks] == [1]
    scheduler.finish(1)
    assert [chunk.row for chunk in step(scheduler)[0].chunks] == [2]  # nothing runs: all yield


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="token_budget 0"):
        make(token_budget=0)
    with pytest.raises(ValueError, match="max_rows 0"):
        make(max_rows=0)
