"""Whole blocks, all layers at once: copy within a cache, out of it, into it."""

import jax

from jaxkv.cache import KVCache
from jaxkv.dispatch import checked as checks
from jaxkv.dispatch.backends import Call, run
from jaxkv.dispatch.validate import Dims, check_cache, int32
from jaxkv_kernels.formats.entries import Entry


def copy_blocks(cache: KVCache, src, dst, *, implementation=None) -> KVCache:
    """Copies blocks over others, in every layer.

    Args:
      cache: any cache.  Where blocks are runs (`layout.blocks_are_runs`) all that is packed in the block moves along.
      src: int32 [n], blocks to read; all are read before any is written.
      dst: int32 [n], blocks to overwrite.  A pair with an id outside the cache is skipped.
      implementation: None (the best that takes the call), a name, or a sequence of names.

    Returns:
      The cache with the blocks copied; updated in place where donated.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    check_cache(cache, Entry)
    dims, pages = Dims(), cache.layout.pages
    dims.check_ints("src", src, "n")
    dims.check_ints("dst", dst, "n")
    src, dst = int32(src), int32(dst)
    if checks.checking():
        checks.check_ids("src", src, pages)
        checks.check_ids("dst", dst, pages)
        checks.check_written_once("dst", dst, "block")
    arrays = {"buffer": cache.buffer, "src": src, "dst": dst}
    return KVCache(run(Call("copy_blocks", arrays, {"pages": pages}), implementation), cache.layout)


def read_blocks(cache: KVCache, blocks, *, implementation=None) -> jax.Array:
    """Blocks as they travel.

    Args:
      cache: any cache.
      blocks: int32 [n].
      implementation: None (the best that takes the call), a name, or a sequence of names.

    Returns:
      [n, layout.block_nbytes / itemsize] of the buffer's dtype.  Where blocks are runs (`layout.blocks_are_runs`) a row
      is that run, with its padding and all that is packed in it; else the block's entries in the order in which they
      lie in memory.  0 for an id outside the cache.  Caches whose layouts have equal fingerprints may exchange rows.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    check_cache(cache, Entry)
    Dims().check_ints("blocks", blocks, "n")
    blocks = int32(blocks)
    if checks.checking():
        checks.check_ids("blocks", blocks, cache.layout.pages)
    arrays = {"buffer": cache.buffer, "blocks": blocks}
    return run(Call("read_blocks", arrays, {"pages": cache.layout.pages}), implementation)


def write_blocks(cache: KVCache, blocks, data, *, implementation=None) -> KVCache:
    """Blocks that travelled, stored.

    Args:
      cache: any cache.
      blocks: int32 [n], blocks to overwrite; an id outside the cache is skipped.
      data: [n, layout.block_nbytes / itemsize] of the buffer's dtype, as `read_blocks` gives them for a layout of the
        same fingerprint.
      implementation: None (the best that takes the call), a name, or a sequence of names.

    Returns:
      The cache with the blocks stored; updated in place where donated.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    check_cache(cache, Entry)
    pages = cache.layout.pages
    dims = Dims(E=(pages.block_elements, "the elements of a block that travels"))
    dims.check_ints("blocks", blocks, "n")
    dims.check("data", data, "n E", (str(cache.layout.dtype),))
    blocks = int32(blocks)
    if checks.checking():
        checks.check_ids("blocks", blocks, pages)
        checks.check_written_once("blocks", blocks, "block")
    arrays = {"buffer": cache.buffer, "blocks": blocks, "data": data}
    return KVCache(run(Call("write_blocks", arrays, {"pages": pages}), implementation), cache.layout)
