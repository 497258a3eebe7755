"""Who owns which block of the KV cache: a pool of reference-counted blocks and one table a row.

A block holds `block_size` consecutive tokens of a row. Forked rows share blocks; a row gets its own
copy of a shared block before it writes there. The pool only decides: it returns the copies that
the owner of the memory must carry out, before anything is written.

Not here: the memory itself (`sampler`), who runs or gives way (`scheduler`). No torch, no clock.
"""


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens.

    `tables[row]` lists the blocks of a row in the order of its tokens; a row is known from its
    first `reserve` (or as the child of a `fork`) to its `free`. `version` counts the weights whose
    keys and values the blocks hold: a row whose blocks are of older ones can only free them.
    """

    def __init__(self, num_blocks: int, block_size: int):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need at least one block of one token: {num_blocks} x {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tables: dict[int, list[int]] = {}
        self.version = 0
        self._versions: dict[int, int] = {}  # of each row in `tables`
        self.refcounts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low block numbers go first

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that at least one row holds; a shared block counts once."""
        return self.num_blocks - len(self._free)

    def cost(self, row: int, start: int, end: int) -> int:
        """Free blocks that `reserve` with the same arguments would take."""
        table, first = self.tables.get(row, ()), start // self.block_size
        if end == start + 1 and first < len(table):  # nearly every decoding step
            return int(self.refcounts[table[first]] > 1)
        missing = -(-end // self.block_size) - len(table)
        return max(missing, 0) + len(self._shared(table, start, end))

    def reserve(self, row: int, start: int, end: int) -> list[tuple[int, int]]:
        """Give `row` blocks of its own for the tokens [start, end): the ones it is about to write.

        Returns the (source, target) copies to make first, at most one: only the block that `start`
        falls into can hold older tokens. ValueError, and nothing changed, when too few are free, or
        when the row's blocks are of an older `version`.
        """
        if self._versions.get(row, self.version) != self.version:
            raise ValueError(f"row {row} holds keys of weights {self._versions[row]}, these are "
                             f"{self.version}: free it")  # fmt: skip
        cost = self.cost(row, start, end)
        if cost > self.num_free:
            raise ValueError(f"row {row} needs {cost} blocks for tokens {start} to {end}, "
                             f"{self.num_free} are free")
        table = self.tables.setdefault(row, [])
        self._versions[row] = self.version
        if not cost:
            return []
        copies = []
        for index in self._shared(table, start, end):
            source, table[index] = table[index], self._take()
            self.refcounts[source] -= 1  # stays above 0: it was shared
            if index * self.block_size < start:
                copies.append((source, table[index]))
        while len(table) * self.block_size < end:
            table.append(self._take())
        return copies

    def fork(self, parent: int, child: int) -> None:
        """Let `child`, a new row, share every block of `parent`."""
        if child in self.tables:
            raise ValueError(f"row {child} has blocks already")
        table = self.tables[parent]
        for block in table:
            self.refcounts[block] += 1
        self.tables[child] = list(table)
        self._versions[child] = self._versions[parent]

    def free(self, row: int) -> None:
        """Give up all blocks of `row`; ValueError when it has none to give (freed twice)."""
        if row not in self.tables:
            raise ValueError(f"row {row} holds no blocks: freed twice, or never reserved")
        del self._versions[row]
        for block in self.tables.pop(row):
            self.refcounts[block] -= 1
            if not self.refcounts[block]:
                self._free.append(block)

    def has_own(self, row: int) -> bool:
        """Whether freeing `row` would free a block: the last ones are the least likely shared."""
        return any(self.refcounts[block] == 1 for block in reversed(self.tables[row]))

    def _take(self) -> int:
        block = self._free.pop()
        self.refcounts[block] = 1
        return block

    def _shared(self, table, start: int, end: int) -> list[int]:
        """Indices in `table` of blocks that cover [start, end) and have another holder too."""
        if start >= end:
            return []
        last = min(-(-end // self.block_size), len(table))
        return [i for i in range(start // self.block_size, last) if self.refcounts[table[i]] > 1]
