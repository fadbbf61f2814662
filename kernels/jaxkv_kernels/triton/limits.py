"""Which calls the kernels do not take, and why: a function an operation that has such calls."""

from collections.abc import Iterator, Mapping
from typing import Any

TILE_LIMIT = 2**20
QUERY_BYTES = 32768
MOST_BEST = 4096


def nothing(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """No reasons: every call is taken."""
    del arrays, options
    yield from ()


def write_mla(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a call that moves entries."""
    del arrays
    for size in options["entry"].sizes:
        if size > TILE_LIMIT:
            yield f"part of {size} values: takes at most {TILE_LIMIT}, which is what a tile may have in Triton"


write_kv = write_indexer_k = gather_mla = gather_kv = gather_indexer_k = write_mla


def indexer_logits(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against an `indexer_logits` call."""
    del options
    q = arrays["q"]
    heads, dim = (1 << (n - 1).bit_length() for n in q.shape[2:])
    size = heads * dim * max(q.dtype.itemsize, 2)
    if size > QUERY_BYTES:
        yield (
            f"`q` of {q.shape[2]} heads x {q.shape[3]} values of {q.dtype}: takes at most {QUERY_BYTES} bytes a query "
            f"token, with both rounded up to powers of two, which are to stay in shared memory"
        )


def select_topk(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `select_topk` call."""
    del arrays
    if options["k"] > MOST_BEST:
        yield f"`k` of {options['k']}: takes at most {MOST_BEST}"
