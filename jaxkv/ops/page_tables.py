"""Block tables from the page tables of other libraries."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxkv import data_checks
from jaxkv.checks import Dims, int32, positive_int, running_sum
from jaxkv_kernels.addressing import MAX_SLOTS


def block_tables_from_csr(
    indptr: ArrayLike, indices: ArrayLike, last_page_len: ArrayLike, *, block_size: int, max_blocks: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the block tables and the lengths of requests whose blocks are given in CSR form, as FlashInfer's are.

    The arguments are FlashInfer's `paged_kv_indptr`, `paged_kv_indices`, `paged_kv_last_page_len` and `page_size`.

    Args:
      indptr: int32 [B + 1], running sum of the numbers of blocks, from 0: the blocks of request b are
        `indices[indptr[b] : indptr[b + 1]]`.  A sum that is less than an earlier one is replaced by the earlier one,
        and its request is empty.
      indices: int32 [n], the block ids of all requests, each request's in order.  It may be longer than the last sum;
        if it is shorter, the ids that it lacks are -1 in the tables.
      last_page_len: int32 [B], tokens in the last block of each request, new ones included: from 1 to `block_size`.
        Other numbers are clamped to the range from 0 to `block_size`.  It is ignored for an empty request, as in
        FlashInfer's kernels.
      block_size: tokens per block.
      max_blocks: static number M of columns of the tables.

    Returns:
      (block_tables, seq_lens), in the order in which operations expect them: int32 [B, M], the blocks of each request
      in order, then -1, and int32 [B], its tokens.  A request of more than M blocks keeps the first M.  Its length
      still counts all of its tokens, so that no new token gets the slot of another one: operations clamp lengths to the
      table, and `slots_for` returns -1 for positions past it.

    Raises:
      ValueError: a shape, dtype or static argument is wrong.
    """
    dims = Dims()
    dims.check_ints("last_page_len", last_page_len, "B")
    Dims(**{"B+1": (dims["B"] + 1, "one more than `last_page_len`")}).check_ints("indptr", indptr, "B+1")
    dims.check_ints("indices", indices, "n")
    block_size, max_blocks = positive_int("block_size", block_size), positive_int("max_blocks", max_blocks)
    indices, last_page_len, sums = int32(indices), int32(last_page_len), running_sum(indptr)
    if data_checks.checking():
        _check_data(int32(indptr), sums, dims["n"], last_page_len, block_size, max_blocks)
    return _tables(indices, sums, last_page_len, block_size, max_blocks)


@partial(jax.jit, static_argnames=("block_size", "max_blocks"))
def _tables(indices, sums, last_page_len, block_size: int, max_blocks: int) -> tuple[jax.Array, jax.Array]:
    """The block tables and lengths."""
    counts, end = jnp.diff(sums), indices.size
    column = jnp.arange(max_blocks, dtype=jnp.int32)[None]
    place = jnp.where(column < counts[:, None], sums[:-1, None] + column, end)
    ids = jnp.concatenate([indices, jnp.full(1, -1, jnp.int32)])  # at `end`: no block
    # Lengths of more tokens than int32 can count must not wrap around.
    full = jnp.minimum(counts, MAX_SLOTS // block_size) - 1
    seq_lens = jnp.where(counts > 0, full * block_size + jnp.clip(last_page_len, 0, block_size), 0)
    return ids[jnp.minimum(place, end)], seq_lens


def _check_data(indptr, sums, end, last_page_len, block_size, max_blocks) -> None:
    """Checks that the sums rise from 0 to at most `end`, and that no request has too many blocks or tokens."""
    data_checks.require(indptr[:1] == 0, "indptr", indptr[:1], "a running sum starts at 0")
    data_checks.require(indptr == sums, "indptr", indptr, "a running sum never falls")
    data_checks.require(sums <= end, "indptr", sums, f"`indices` has {end} block ids")
    blocks = jnp.diff(sums, prepend=sums[:1])
    problem = f"the request that ends there has {{blocks}} blocks, and `max_blocks` is {max_blocks}"
    data_checks.require(blocks <= max_blocks, "indptr", sums, problem, blocks=blocks)
    inside = (last_page_len >= 1) & (last_page_len <= block_size)
    data_checks.require(
        inside | (blocks[1:] == 0), "last_page_len", last_page_len, f"a last block has 1 to {block_size} tokens"
    )
