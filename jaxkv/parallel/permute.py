"""Blocks from device to device within one program, reads and writes beside the communication."""

from collections.abc import Hashable, Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxkv import data_checks
from jaxkv.cache import KVCache
from jaxkv.checks import Dims, check_cache, int32
from jaxkv.dispatch import Implementations, run
from jaxkv_kernels import calls
from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.formats.entries import Entry
from jaxkv_kernels.integers import as_int

PIECES, PIECE_BYTES = 5, 2**25
"""The most pieces by default, and the least bytes of each.

While the first piece is sent, all others are read.  By NVLink, sending a fifth of the blocks takes about as long as
reading the rest.  A collective takes about 0.02 ms besides its bytes, a fifth of what a piece of this size takes.
"""


def permute_blocks[E: Entry](
    cache: KVCache[E],
    source_blocks: ArrayLike,
    target_blocks: ArrayLike,
    perm: Sequence[tuple[int, int]],
    *,
    axis: Hashable,
    pieces: int | None = None,
    implementation: Implementations | None = None,
) -> KVCache[E]:
    """Sends blocks, all layers at once, to the caches of other devices: `lax.ppermute` of blocks.

    Call it inside `shard_map`, where each device has a cache of its own (`zeros`).  All devices of the axis take part,
    also those that neither send nor receive; they may belong to several processes of one `jax.distributed` job.

    The blocks are sent in pieces, one after the other.  While the first is sent, the others are read, and while later
    ones are sent, those that have arrived are written.  All blocks are read before any is written, so that a device may
    receive into blocks that it sends.

    Under context parallelism, send along another axis of the mesh than the one that divides the tokens, because other
    devices of that axis hold other tokens of a request.

    Args:
      cache: the cache of this device.
      source_blocks: int32 [n], blocks that this device sends.  Devices that send nothing pass any ids.
      target_blocks: int32 [n], where the receiver stores them: blocks of its cache, chosen by the sender.  A pair with
        an id outside the cache is skipped.  A negative target states that there is nothing to send; `jaxkv.checked`
        reports all other ids outside the cache.
      perm: pairs (sender, receiver) of indices along `axis`.  Each index sends at most once and receives at most once.
      axis: the name of an axis of the mesh, or a tuple of names.
      pieces: the number of pieces, a static int from 1; more than n are not made.  Default: 5, or as many as have at
        least 32 MiB.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      The cache with the received blocks stored, and all other bytes unchanged; updated in place if `cache` is donated.
      A device that receives nothing keeps its cache as it is.  Temporary memory holds the blocks
      that are sent, and up to as many that arrive.

    Raises:
      ValueError: a shape, a dtype, `perm` or `pieces` is wrong.
    """
    check_cache(cache, Entry)
    dims, pages = Dims(), cache.layout.pages
    dims.check_ints("source_blocks", source_blocks, "n")
    dims.check_ints("target_blocks", target_blocks, "n")
    sources, targets = int32(source_blocks), int32(target_blocks)
    if data_checks.checking():
        for name, ids in (("source_blocks", sources), ("target_blocks", targets)):
            data_checks.check_ids(name, ids, pages, used=targets >= 0)
        data_checks.check_written_once("target_blocks", targets, "block")
    dtype, count = cache.layout.dtype, sources.size
    bits = jnp.dtype(f"uint{8 * dtype.itemsize}")  # on CPUs, moving floats can change the bits of NaNs
    number = _pieces(pieces, count, cache.layout.block_nbytes)
    if not count:
        return cache  # XLA for CPUs crashes if a collective has no elements (jax 0.11.2)
    bounds = [count * i // number for i in range(number + 1)]
    parts = [slice(*pair) for pair in pairwise(bounds)]
    inside = (sources >= 0) & (sources < pages.num_blocks)
    # Devices that receive nothing get zeros from `ppermute`: no target.
    targets = lax.ppermute(jnp.where(inside, targets, -1) + 1, axis, perm) - 1

    def read(part: slice) -> jax.Array:
        call = calls.ReadBlocks(buffer=cache.buffer, pages=pages, blocks=sources[part])
        return view_as(run(call, implementation), bits)

    sent = [read(part) for part in parts]
    first = lax.ppermute(sent[0], axis, perm)
    # All reads come before the second piece is sent: none has to wait for it, and XLA need not copy the cache.
    buffer, others = lax.optimization_barrier((cache.buffer, sent[1:]))
    for part, rows in zip(parts, [first, *(lax.ppermute(rows, axis, perm) for rows in others)], strict=True):
        call = calls.WriteBlocks(buffer=buffer, pages=pages, blocks=targets[part], data=view_as(rows, dtype))
        buffer = run(call, implementation)
    return KVCache(buffer, cache.layout)


def _pieces(pieces: int | None, count: int, nbytes: int) -> int:
    """In how many pieces `count` blocks of `nbytes` bytes are sent."""
    number = min(PIECES, max(1, count * nbytes // PIECE_BYTES)) if pieces is None else as_int(pieces)
    if number is None or number < 1:
        raise ValueError(f"`pieces` is {pieces!r}: expected None or an int from 1 (it is static)")
    return max(1, min(number, count))
