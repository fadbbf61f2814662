"""The allocator and block tables in plain Python, one sequence and one block after the other."""


class PlainAllocator:
    def __init__(self, num_blocks):
        self.free_blocks = list(range(num_blocks))[::-1]
        self.ref_counts = [0] * num_blocks

    def known(self, blocks):
        return [block for block in blocks if 0 <= block < len(self.ref_counts)]

    def take(self, count):
        blocks = [self.free_blocks.pop() for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def allocate(self, counts, max_count):
        """The blocks of each request; None if it does not get them."""
        found, failed = [], False
        for count in counts:
            if not 0 <= count <= max_count:
                found.append(None)
                continue
            failed |= count > len(self.free_blocks)
            found.append(None if failed and count else self.take(count))
        return found

    def share(self, blocks):
        for block in self.known(blocks):
            self.ref_counts[block] += self.ref_counts[block] > 0

    def free(self, blocks):
        blocks = self.known(blocks)
        held = {block for block in blocks if self.ref_counts[block]}
        for block in blocks:
            self.ref_counts[block] = max(self.ref_counts[block] - 1, 0)
        by_last_appearance = list(dict.fromkeys(blocks[::-1]))[::-1]
        self.free_blocks += [x for x in by_last_appearance if x in held and not self.ref_counts[x]]


class PlainTables:
    def __init__(self, num_sequences, max_blocks, num_blocks, block_size):
        self.allocator = PlainAllocator(num_blocks)
        self.tables = [[] for _ in range(num_sequences)]
        self.lengths = [0] * num_sequences
        self.max_blocks, self.block_size = max_blocks, block_size

    def blocks_of(self, length):
        return -(-length // self.block_size)

    def append(self, num_tokens, max_tokens):
        """The slots of each sequence, and its pair of blocks to copy; None if it failed, or if there is no pair."""
        at_first = list(self.allocator.ref_counts)
        found, failed = [], False
        for i, (table, length, count) in enumerate(zip(self.tables, self.lengths, num_tokens, strict=True)):
            end = length + count
            if not 0 <= count <= max_tokens or end > self.max_blocks * self.block_size:
                found.append((None, None))
                continue
            current = table[-1] if count and length % self.block_size else None
            copy = current is not None and self.allocator.ref_counts[current] > 1
            needed = self.blocks_of(end) - self.blocks_of(length) + copy
            failed |= needed > len(self.allocator.free_blocks)
            if failed and (needed or (current is not None and at_first[current] > 1)):
                found.append((None, None))
                continue
            blocks = self.allocator.take(needed)
            pair = None
            if copy:
                pair = current, blocks[0]
                self.allocator.free([current])
                table.pop()
            table += blocks
            self.lengths[i] = end
            size = self.block_size
            found.append(([table[p // size] * size + p % size for p in range(length, end)], pair))
        return found

    def fork(self, parents):
        old = [block for table in self.tables for block in table]
        inside = [parent if 0 <= parent < len(self.tables) else None for parent in parents]
        self.lengths = [0 if parent is None else self.lengths[parent] for parent in inside]
        self.tables = [[] if parent is None else list(self.tables[parent]) for parent in inside]
        self.allocator.share([block for table in self.tables for block in table])
        self.allocator.free(old)

    def truncate(self, lengths):
        self.lengths = [max(min(old, new), 0) for old, new in zip(self.lengths, lengths, strict=True)]
        gone = []
        for table, length in zip(self.tables, self.lengths, strict=True):
            gone += table[self.blocks_of(length) :]
            del table[self.blocks_of(length) :]
        self.allocator.free(gone)


def assert_same_allocator(found, plain):
    """The same free list and counts; and a block is on the list, once, if and only if it has no references."""
    num_free = int(found.num_free)
    assert found.free_blocks[:num_free].tolist() == plain.free_blocks
    assert found.ref_counts.tolist() == plain.ref_counts
    assert sorted(plain.free_blocks) == [block for block, count in enumerate(plain.ref_counts) if not count]
