"""The block pool against a model that stores what every row wrote."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minirler.blocks import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Rows write their own numbers; memory is what a cache would hold, tokens what it should."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(12, 3)
        self.memory = [[None] * 3 for _ in range(12)]
        self.tokens: dict[int, list] = {}
        self.next_row = self.next_token = 0

    def new_row(self):
        self.next_row += 1
        return self.next_row

    def write(self, row, count):
        start, end = len(self.tokens[row]), len(self.tokens[row]) + count
        cost, free = self.pool.cost(row, start, end), self.pool.num_free
        if cost > free:
            before = [list(t) for t in self.pool.tables.values()], list(self.pool.refcounts)
            with pytest.raises(ValueError, match=f"{free} are free"):
                self.pool.reserve(row, start, end)
            assert before == ([list(t) for t in self.pool.tables.values()], self.pool.refcounts)
            return
        copies = self.pool.reserve(row, start, end)
        assert self.pool.num_free == free - cost and len(copies) <= 1
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        for position in range(start, end):
            self.memory[self.pool.tables[row][position // 3]][position % 3] = self.next_token
            self.tokens[row].append(self.next_token)
            self.next_token += 1

    @rule(count=st.integers(1, 8))
    def add(self, count):
        row = self.new_row()
        self.tokens[row] = []
        self.write(row, count)
        if row not in self.pool.tables:
            del self.tokens[row]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), count=st.integers(1, 5))
    def append(self, data, count):
        self.write(data.draw(st.sampled_from(sorted(self.tokens))), count)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data):
        parent, child = data.draw(st.sampled_from(sorted(self.tokens))), self.new_row()
        free = self.pool.num_free
        self.pool.fork(parent, child)
        self.tokens[child] = list(self.tokens[parent])
        assert self.pool.num_free == free

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data):
        row = data.draw(st.sampled_from(sorted(self.tokens)))
        self.pool.free(row)
        del self.tokens[row]
        with pytest.raises(ValueError, match="twice"):
            self.pool.free(row)

    @invariant()
    def every_row_reads_what_it_wrote(self):
        for row, tokens in self.tokens.items():
            table = self.pool.tables[row]
            assert [self.memory[table[i // 3]][i % 3] for i in range(len(tokens))] == tokens

    @invariant()
    def nothing_leaks(self):
        held = [block for table in self.pool.tables.values() for block in table]
        assert [held.count(block) for block in range(12)] == self.pool.refcounts
        assert self.pool.num_used == len(set(held)) == 12 - self.pool.num_free
        assert sorted(set(held) | set(self.pool._free)) == list(range(12))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=30)


def test_fork_of_a_half_full_block_copies_the_tail_before_the_first_write():
    pool = BlockPool(8, 4)
    pool.reserve(0, 0, 6)
    head, tail = pool.tables[0]
    for child in (1, 2):
        pool.fork(0, child)
    copies = [pool.reserve(row, 6, 7) for row in (0, 1, 2)]
    assert [len(c) for c in copies] == [1, 1, 0]  # the last holder writes in place
    assert {c[0][0] for c in copies[:2]} == {tail} and pool.tables[2] == [head, tail]
    assert pool.refcounts[head] == 3 and len({t[1] for t in pool.tables.values()}) == 3
    assert (pool.num_used, pool.num_free) == (4, 4)
    used = []
    for row in (1, 0, 2):
        pool.free(row)
        used.append(pool.num_used)
    assert used == [3, 2, 0]
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(2)


def test_a_fork_at_a_block_border_copies_nothing():
    pool = BlockPool(8, 4)
    pool.reserve(0, 0, 8)
    pool.fork(0, 1)
    assert pool.reserve(1, 8, 9) == [] and pool.tables[1][:2] == pool.tables[0]


def test_a_shared_block_that_is_written_from_its_start_is_replaced_without_a_copy():
    pool = BlockPool(8, 4)
    pool.reserve(0, 0, 8)
    pool.fork(0, 1)
    assert pool.reserve(1, 4, 8) == [] and pool.tables[1][1] != pool.tables[0][1]


def test_wrong_use_is_refused():
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0, 4)
    pool = BlockPool(2, 4)
    pool.reserve(0, 0, 1)
    pool.reserve(1, 0, 1)
    with pytest.raises(ValueError, match="has blocks already"):
        pool.fork(0, 1)
    with pytest.raises(KeyError):
        pool.fork(7, 8)


@pytest.mark.parametrize("is_forked", [False, True])
def test_blocks_of_old_weights_can_only_be_freed(is_forked):
    pool = BlockPool(8, 4)
    pool.reserve(0, 0, 6)
    pool.version += 1
    row = int(is_forked)
    if is_forked:
        pool.fork(0, 1)  # of old blocks: as old as they are
    tables, free = dict(pool.tables), pool.num_free
    with pytest.raises(ValueError, match=f"row {row} holds keys of weights 0, these are 1"):
        pool.reserve(row, 6, 7)
    assert (pool.tables, pool.num_free) == (tables, free)
    pool.free(row)
    assert pool.reserve(row, 0, 7) == []  # computed anew, with the new weights
    pool.reserve(row, 7, 8)
