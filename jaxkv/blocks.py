"""Allocation of blocks on the device: a free list and reference counts, as a pytree.

The functions are pure: they take a state and return a new one, with the same shapes.  They run inside `jax.jit`,
`lax.scan` and `lax.while_loop`, so that a whole beam search or best-of-n is one loop without the host.

- `BlockTables`: the block tables and lengths of several sequences, and the allocator of their blocks.  `append` makes
  room for new tokens, `fork` has sequences continue others, `truncate` shortens or ends them.
- `BlockAllocator`: which blocks are free, and how many references each block has.  `allocate`, `share` and `free` are
  for block tables of your own.

Sequences that come from the same parent share its blocks.  A block with several references is never written: `append`
replaces it by a copy first (copy on write).  Copies of contents are left to `jaxkv.copy_blocks`, because the allocator
knows no cache.  A step of beam search, with one sequence per beam:

    tables = blocks.fork(tables, parents)
    tables, new = blocks.append(tables, jnp.ones_like(parents))
    cache = jaxkv.copy_blocks(cache, new.src, new.dst)
    cache = jaxkv.write_kv(cache, k, v, new.slots[:, 0], layer=layer)
    out = jaxkv.decode_kv(q, cache, tables.block_tables, tables.seq_lens, layer=layer, scale=scale)

As elsewhere in jaxkv, -1 stands for no block and no slot.  Results are deterministic.  Whatever the arguments, a
block is on the free list, once, if and only if it has no references: ids outside the allocator are skipped, and so is
the removal of references that do not exist.  Under `jaxkv.checked`, both raise an error.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxkv import data_checks
from jaxkv.checks import Dims, int32, positive_int
from jaxkv_kernels.addressing import MAX_SLOTS, slots_for, table_tokens

__all__ = ["Appended", "BlockAllocator", "BlockTables", "allocate", "append", "fork", "free", "share", "truncate"]

NONE = -1
"""The id of no block."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class BlockAllocator:
    """A free list of blocks, with reference counts.  A block is on the list if and only if it has no references."""

    free_blocks: jax.Array
    """int32 [N], a stack: the first `num_free` are the ids of the free blocks, and the last of these is allocated next.
    """
    num_free: jax.Array
    """int32 scalar, the number of free blocks."""
    ref_counts: jax.Array
    """int32 [N], the number of references of each block."""

    @staticmethod
    def create(num_blocks: int) -> "BlockAllocator":
        """An allocator of blocks 0 to `num_blocks` - 1, all of them free.  Lower ids are allocated first.

        ValueError unless `num_blocks` is a positive int.
        """
        num_blocks = positive_int("num_blocks", num_blocks)
        return BlockAllocator(
            free_blocks=jnp.arange(num_blocks - 1, -1, -1, dtype=jnp.int32),
            num_free=jnp.asarray(num_blocks, jnp.int32),
            ref_counts=jnp.zeros((num_blocks,), jnp.int32),
        )

    @property
    def num_blocks(self) -> int:
        """N, the number of blocks, free or not."""
        return self.ref_counts.shape[-1]

    @property
    def num_used(self) -> jax.Array:
        """int32 scalar, the number of blocks with references.  A block that is shared counts once."""
        return self.num_blocks - self.num_free


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class BlockTables:
    """The block tables and lengths of B sequences, and the allocator of their blocks.

    `block_tables` and `seq_lens` are arguments of jaxkv's operations.  Several BlockTables, such as those of a beam
    search and of the requests beside it, can use one allocator in turn: `dataclasses.replace(tables, allocator=...)`.
    """

    allocator: BlockAllocator
    block_tables: jax.Array
    """int32 [B, M], the blocks of each sequence in order, then -1."""
    seq_lens: jax.Array
    """int32 [B], tokens per sequence, 0 if it is empty."""
    block_size: int = field(metadata={"static": True})
    """Tokens per block."""

    @staticmethod
    def create(*, num_sequences: int, max_blocks: int, num_blocks: int, block_size: int) -> "BlockTables":
        """Tables of empty sequences, and an allocator all of whose blocks are free.

        Args:
          num_sequences: B.
          max_blocks: M, the most blocks of a sequence.
          num_blocks: blocks of the cache, which all sequences share.
          block_size: tokens per block.

        Raises:
          ValueError: an argument is not a positive int, or the slots of all blocks, or the tokens of a sequence, would
            not fit in int32.
        """
        shape = positive_int("num_sequences", num_sequences), positive_int("max_blocks", max_blocks)
        block_size = positive_int("block_size", block_size)
        allocator = BlockAllocator.create(num_blocks)
        for name, count in (("num_blocks", allocator.num_blocks), ("max_blocks", shape[1])):
            if count * block_size > MAX_SLOTS:
                raise ValueError(f"`{name}` is {count}: expected at most {MAX_SLOTS} tokens, in blocks of {block_size}")
        return BlockTables(
            allocator=allocator,
            block_tables=jnp.full(shape, NONE, jnp.int32),
            seq_lens=jnp.zeros(shape[:1], jnp.int32),
            block_size=block_size,
        )


class Appended(NamedTuple):
    """What `append` returns beside the tables."""

    slots: jax.Array
    """int32 [B, max_tokens], where to write the new tokens; -1 beyond their number, and where `ok` is False."""
    src: jax.Array
    """int32 [B], for `jaxkv.copy_blocks`: the blocks to copy; -1 if a sequence needs no copy."""
    dst: jax.Array
    """int32 [B], the blocks to overwrite by the copies; -1 likewise."""
    ok: jax.Array
    """bool [B], whether the tokens were appended.  Otherwise the sequence is as before."""


def allocate(
    allocator: BlockAllocator, counts: ArrayLike, *, max_count: int
) -> tuple[BlockAllocator, jax.Array, jax.Array]:
    """Takes free blocks, each with one reference.

    Requests are served in order, and get all of their blocks or none.  Once the free blocks do not suffice for one, no
    later one gets any.

    Args:
      allocator: the state.
      counts: int32 [B], how many blocks each request needs, from 0 to `max_count`.
      max_count: static, K.

    Returns:
      The new state; int32 [B, K], the blocks of each request, then -1; and bool [B], whether it got its blocks.  A
      request for 0 blocks does; one for fewer or for more than `max_count` does not, and does not affect later ones.

    Raises:
      ValueError: a shape, dtype or static argument is wrong.
    """
    allocator, max_count = _check_allocator(allocator), positive_int("max_count", max_count)
    Dims().check_ints("counts", counts, "B")
    counts = int32(counts)
    valid = (counts >= 0) & (counts <= max_count)
    if data_checks.checking():
        data_checks.require(valid, "counts", counts, f"expected 0 to {max_count}, `max_count`")
    counts = jnp.where(valid, counts, 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    ok = valid & ((ends <= allocator.num_free) | (counts == 0))
    column = jnp.arange(max_count, dtype=jnp.int32)[None]
    taken = ok[:, None] & (column < counts[:, None])
    place = allocator.num_free - 1 - ((ends - counts)[:, None] + column)  # from the top of the stack down
    blocks = jnp.where(taken, allocator.free_blocks.at[place].get(mode="clip"), NONE)
    allocator = replace(
        allocator,
        num_free=allocator.num_free - taken.sum(dtype=jnp.int32),
        ref_counts=allocator.ref_counts.at[_indices(allocator, blocks)].set(1, mode="drop"),
    )
    return allocator, blocks, ok


def share(allocator: BlockAllocator, blocks: ArrayLike) -> BlockAllocator:
    """Adds a reference to each of these blocks, which must have one already.

    Args:
      allocator: the state.
      blocks: int32 of any shape.  A block that appears several times gets as many references.  Ids outside the
        allocator, such as -1, and free blocks are skipped.

    Returns:
      The new state.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    allocator, blocks = _check_allocator(allocator), _flat("blocks", blocks)
    index = _indices(allocator, blocks)
    counts = allocator.ref_counts
    if data_checks.checking():
        _check_blocks(allocator, blocks)
        held = counts.at[index].get(mode="fill", fill_value=1) > 0
        data_checks.require(held, "blocks", blocks, "this block is free")
    return replace(allocator, ref_counts=jnp.where(counts > 0, counts.at[index].add(1, mode="drop"), 0))


def free(allocator: BlockAllocator, blocks: ArrayLike) -> BlockAllocator:
    """Removes a reference from each of these blocks.  Blocks without references become free.

    Args:
      allocator: the state.
      blocks: int32 of any shape.  A block that appears several times loses as many references, but never more than it
        has: freeing a free block does nothing.  Ids outside the allocator, such as -1, are skipped.

    Returns:
      The new state.  The blocks that became free are on top of the free list, in the order in which each of them
      appears last.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    allocator, blocks = _check_allocator(allocator), _flat("blocks", blocks)
    index = _indices(allocator, blocks)
    counts = allocator.ref_counts
    left = counts.at[index].add(-1, mode="drop")
    if data_checks.checking():
        _check_blocks(allocator, blocks)
        enough = left.at[index].get(mode="fill", fill_value=0) >= 0
        data_checks.require(enough, "blocks", blocks, "this block is freed more often than it has references")
    left = jnp.maximum(left, 0)
    order = jnp.arange(len(blocks), dtype=jnp.int32)
    last = jnp.full_like(counts, -1).at[index].max(order, mode="drop")
    freed = (counts > 0) & (left == 0)  # [N]
    pushed = freed.at[index].get(mode="fill", fill_value=False) & (last.at[index].get(mode="clip") == order)
    place = allocator.num_free + jnp.cumsum(pushed, dtype=jnp.int32) - 1
    return replace(
        allocator,
        free_blocks=allocator.free_blocks.at[jnp.where(pushed, place, allocator.num_blocks)].set(blocks, mode="drop"),
        num_free=allocator.num_free + pushed.sum(dtype=jnp.int32),
        ref_counts=left,
    )


def append(tables: BlockTables, num_tokens: ArrayLike, *, max_tokens: int = 1) -> tuple[BlockTables, Appended]:
    """Makes room for new tokens at the ends of sequences.

    A block is allocated wherever one begins.  If new tokens go to a block that is partly filled and shared, a block is
    allocated for a copy of it; but if all sequences that share the block append to it, the last of them keeps it.  Copy
    the contents by `jaxkv.copy_blocks(cache, new.src, new.dst)` before any token is written to its slot, because one of
    the tokens goes to the block that others copy.

    Sequences are served in order, and get all of their blocks or none.  Once the free blocks do not suffice for one,
    no later one gets blocks, nor keeps a block that was shared.

    Args:
      tables: the state.
      num_tokens: int32 [B], new tokens of each sequence, from 0 to `max_tokens`: 0 for a sequence that has ended.
      max_tokens: static.

    Returns:
      The new state, whose `seq_lens` count the new tokens; and `Appended`: slots, copies, and whether it succeeded.
      It fails for a sequence if there are too few free blocks, if its table has too few columns, or if `num_tokens` is
      out of range.  The sequence is then as before.

    Raises:
      ValueError: a shape, dtype or static argument is wrong.
    """
    tables, max_tokens = _check_tables(tables), positive_int("max_tokens", max_tokens)
    (num_sequences, columns), block_size = tables.block_tables.shape, tables.block_size
    Dims(B=(num_sequences, "the sequences of `tables`")).check_ints("num_tokens", num_tokens, "B")
    num_tokens, lengths, allocator = int32(num_tokens), tables.seq_lens, tables.allocator
    inside = (num_tokens >= 0) & (num_tokens <= max_tokens)
    if data_checks.checking():
        data_checks.require(inside, "num_tokens", num_tokens, f"expected 0 to {max_tokens}, `max_tokens`")
    fits = inside & (num_tokens <= table_tokens(tables.block_tables, block_size) - lengths)
    num_tokens = jnp.where(fits, num_tokens, 0)
    ends = lengths + num_tokens

    # The block in the middle of which a sequence continues.
    order = jnp.arange(num_sequences, dtype=jnp.int32)
    first_new = _ceil_div(lengths, block_size)
    continues = (num_tokens > 0) & (lengths % block_size > 0)
    current = tables.block_tables.at[order, first_new - 1].get(mode="clip")
    current = jnp.where(continues, current, NONE)
    index = _indices(allocator, current)
    zeros = jnp.zeros_like(allocator.ref_counts)
    writers = zeros.at[index].add(1, mode="drop").at[index].get(mode="fill", fill_value=0)
    last_writer = zeros.at[index].max(order, mode="drop").at[index].get(mode="fill", fill_value=-1)
    references = allocator.ref_counts.at[index].get(mode="fill", fill_value=0)
    shared = references > 1
    copied = shared & ~((writers == references) & (last_writer == order))
    first_new = first_new - copied.astype(jnp.int32)

    counts = _ceil_div(ends, block_size) - first_new
    max_count = min(_ceil_div(block_size - 1 + max_tokens, block_size), columns)
    allocator, blocks, ok = allocate(allocator, counts, max_count=max_count)
    # Where an earlier sequence failed, one that was to copy the block may still use it.
    failed = lax.cummax((~ok).astype(jnp.int32)) > 0
    ok = fits & ok & ~(shared & failed)
    src = jnp.where(copied & ok, current, NONE)
    place = first_new[:, None] + jnp.arange(max_count, dtype=jnp.int32)[None]
    tables = replace(
        tables,
        allocator=free(allocator, src),
        block_tables=tables.block_tables.at[order[:, None], jnp.where(blocks >= 0, place, columns)].set(
            blocks, mode="drop"
        ),
        seq_lens=jnp.where(ok, ends, lengths),
    )
    token = jnp.arange(max_tokens, dtype=jnp.int32)[None]
    positions = jnp.where((token < num_tokens[:, None]) & ok[:, None], lengths[:, None] + token, -1)
    slots = slots_for(tables.block_tables, positions, block_size=block_size)
    return tables, Appended(slots, src, jnp.where(src >= 0, blocks[:, 0], NONE), ok)


def fork(tables: BlockTables, parents: ArrayLike) -> BlockTables:
    """Has sequences continue others: sequence c of the result has the tokens and the blocks of sequence `parents[c]`.

    Nothing is copied: children share their parent's blocks.  The blocks of sequences that no child continues become
    free, unless others share them.

    Args:
      tables: the state.
      parents: int32 [C], of any length: the parent of each new sequence.  If it is not one of the B sequences, such as
        -1, the new sequence is empty.

    Returns:
      The new state, with C sequences.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    tables = _check_tables(tables)
    Dims().check_ints("parents", parents, "C")
    parents, count = int32(parents), len(tables.seq_lens)
    if data_checks.checking():
        data_checks.require(parents < count, "parents", parents, f"there are {count} sequences")
    index = jnp.where(parents >= 0, parents, count)  # JAX would count negative ones from the end
    block_tables = tables.block_tables.at[index].get(mode="fill", fill_value=NONE)
    seq_lens = tables.seq_lens.at[index].get(mode="fill", fill_value=0)
    allocator = free(share(tables.allocator, block_tables), tables.block_tables)
    return replace(tables, allocator=allocator, block_tables=block_tables, seq_lens=seq_lens)


def truncate(tables: BlockTables, seq_lens: ArrayLike) -> BlockTables:
    """Shortens sequences, and frees the blocks that they no longer need.

    Sequences that have finished are truncated to 0: `truncate(tables, jnp.where(finished, 0, tables.seq_lens))`.

    Args:
      tables: the state.
      seq_lens: int32 [B], how many tokens of each sequence remain.  Negative lengths count as 0, and a sequence that is
        shorter already stays as it is.

    Returns:
      The new state.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    tables = _check_tables(tables)
    count, columns = tables.block_tables.shape
    Dims(B=(count, "the sequences of `tables`")).check_ints("seq_lens", seq_lens, "B")
    seq_lens = int32(seq_lens)
    if data_checks.checking():
        inside = (seq_lens >= 0) & (seq_lens <= tables.seq_lens)
        data_checks.require(inside, "seq_lens", seq_lens, "the sequence has {length} tokens", length=tables.seq_lens)
    seq_lens = jnp.clip(seq_lens, 0, tables.seq_lens)
    column = jnp.arange(columns, dtype=jnp.int32)[None]
    kept = column < _ceil_div(seq_lens, tables.block_size)[:, None]
    return replace(
        tables,
        allocator=free(tables.allocator, jnp.where(kept, NONE, tables.block_tables)),
        block_tables=jnp.where(kept, tables.block_tables, NONE),
        seq_lens=seq_lens,
    )


def _ceil_div(x: Any, y: int) -> Any:
    """The quotient, rounded up: of an int or an array."""
    return -(-x // y)


def _indices(allocator: BlockAllocator, blocks: jax.Array) -> jax.Array:
    """Indices into arrays [N]: those of ids outside the allocator are N, as JAX counts negative ones from the end."""
    return jnp.where((blocks >= 0) & (blocks < allocator.num_blocks), blocks, allocator.num_blocks)


def _flat(name: str, blocks: ArrayLike) -> jax.Array:
    """`blocks` as int32 [n]; ValueError unless they are integers, of any shape."""
    axes = " ".join(f"n{i}" for i in range(len(getattr(blocks, "shape", ()))))
    Dims().check_ints(name, blocks, axes)
    return int32(blocks).reshape(-1)


def _check_blocks(allocator: BlockAllocator, blocks: jax.Array) -> None:
    """Checks at run time that ids are of blocks, or negative (skipped)."""
    count = allocator.num_blocks
    data_checks.require(blocks < count, "blocks", blocks, f"the allocator has blocks 0 to {count - 1}")


def _check_allocator(allocator: Any) -> BlockAllocator:
    """`allocator` with int32 arrays; ValueError unless it is a BlockAllocator whose arrays have the right shapes."""
    if not isinstance(allocator, BlockAllocator):
        raise ValueError(f"`allocator` is a {type(allocator).__name__}: expected a BlockAllocator")
    dims = Dims()
    dims.check_ints("allocator.ref_counts", allocator.ref_counts, "N")
    dims.check_ints("allocator.free_blocks", allocator.free_blocks, "N")
    dims.check_ints("allocator.num_free", allocator.num_free, "")
    return jax.tree.map(int32, allocator)


def _check_tables(tables: Any) -> BlockTables:
    """`tables` with int32 arrays; ValueError unless they are BlockTables whose arrays have the right shapes."""
    if not isinstance(tables, BlockTables):
        raise ValueError(f"`tables` is a {type(tables).__name__}: expected BlockTables")
    dims = Dims()
    dims.check_ints("tables.block_tables", tables.block_tables, "B M")
    dims.check_ints("tables.seq_lens", tables.seq_lens, "B")
    positive_int("tables.block_size", tables.block_size)
    tables = jax.tree.map(int32, tables)
    return replace(tables, allocator=_check_allocator(tables.allocator))
