"""Copying, reading and writing whole blocks, in all layers at once."""

import jax

from jaxkv.cache import KVCache
from jaxkv.dispatch import checked as checks
from jaxkv.dispatch.backends import Call, run
from jaxkv.dispatch.validate import Dims, check_cache, int32
from jaxkv.ops.operation import Operation
from jaxkv.ops.samples import array
from jaxkv_kernels.formats.entries import Entry, IndexerEntry, KVEntry, MLAEntry


def copy_blocks(cache: KVCache, src, dst, *, implementation=None) -> KVCache:
    """Copies blocks over other blocks of the same cache, in every layer.

    Args:
      cache: any cache.  If blocks are runs (`layout.blocks_are_runs`), the whole run is copied, including the other
        groups of a `PackedLayout`.
      src: int32 [n], blocks to read.  All are read before any is written.
      dst: int32 [n], blocks to overwrite.  A pair with an id outside the cache is skipped.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      The cache with the blocks copied; updated in place if `cache` is donated.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    return KVCache(run(_bind_copy(cache, src, dst), implementation), cache.layout)


def _bind_copy(cache, src, dst) -> Call:
    check_cache(cache, Entry)
    dims, pages = Dims(), cache.layout.pages
    dims.check_ints("src", src, "n")
    dims.check_ints("dst", dst, "n")
    src, dst = int32(src), int32(dst)
    if checks.checking():
        checks.check_ids("src", src, pages)
        checks.check_ids("dst", dst, pages)
        checks.check_written_once("dst", dst, "block")
    return Call("copy_blocks", {"buffer": cache.buffer, "src": src, "dst": dst}, {"pages": pages})


def read_blocks(cache: KVCache, blocks, *, implementation=None) -> jax.Array:
    """Returns the payloads of blocks, to be stored elsewhere or sent to another cache.

    Args:
      cache: any cache.
      blocks: int32 [n], blocks to read.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      [n, layout.block_nbytes / itemsize] of the buffer's dtype.  If blocks are runs (`layout.blocks_are_runs`), a row
      is that run, with its padding and all groups of a `PackedLayout`.  Otherwise, a row holds the block's entries in
      their order in memory.  The row of an id outside the cache is 0.  Caches whose layouts have equal fingerprints can
      exchange rows.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    return run(_bind_read(cache, blocks), implementation)


def _bind_read(cache, blocks) -> Call:
    check_cache(cache, Entry)
    Dims().check_ints("blocks", blocks, "n")
    blocks = int32(blocks)
    if checks.checking():
        checks.check_ids("blocks", blocks, cache.layout.pages)
    return Call("read_blocks", {"buffer": cache.buffer, "blocks": blocks}, {"pages": cache.layout.pages})


def write_blocks(cache: KVCache, blocks, data, *, implementation=None) -> KVCache:
    """Overwrites blocks with payloads.

    Args:
      cache: any cache.
      blocks: int32 [n], blocks to overwrite; an id outside the cache is skipped.
      data: [n, layout.block_nbytes / itemsize] of the buffer's dtype, as `read_blocks` returns them for a layout with
        the same fingerprint.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      The cache with the blocks stored; updated in place if `cache` is donated.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    return KVCache(run(_bind_write(cache, blocks, data), implementation), cache.layout)


def _bind_write(cache, blocks, data) -> Call:
    check_cache(cache, Entry)
    pages = cache.layout.pages
    dims = Dims(E=(pages.block_elements, "the elements of a block's payload"))
    dims.check_ints("blocks", blocks, "n")
    dims.check("data", data, "n E", (str(cache.layout.dtype),))
    blocks = int32(blocks)
    if checks.checking():
        checks.check_ids("blocks", blocks, pages)
        checks.check_written_once("blocks", blocks, "block")
    return Call("write_blocks", {"buffer": cache.buffer, "blocks": blocks, "data": data}, {"pages": pages})


_IDS = array("int32", 3)


def _sample_write(cache):
    return (cache, _IDS, array(cache.layout.dtype, 3, cache.layout.pages.block_elements)), {}


_ANY = (MLAEntry, KVEntry, IndexerEntry)

OPERATIONS = (
    Operation(copy_blocks, _bind_copy, lambda cache: ((cache, _IDS, _IDS), {}), entries=_ANY),
    Operation(read_blocks, _bind_read, lambda cache: ((cache, _IDS), {}), entries=_ANY),
    Operation(write_blocks, _bind_write, _sample_write, entries=_ANY),
)
