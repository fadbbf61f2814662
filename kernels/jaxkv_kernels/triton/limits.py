"""Which calls the kernels do not take, and why: a function an operation that has such calls."""

from collections.abc import Iterator, Mapping
from typing import Any

TILE_LIMIT = 2**20


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


def merge_states(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `merge_states` call."""
    del options
    if not arrays["outs"].size:
        yield "outs of no values: a kernel would have nothing to do"
    elif arrays["outs"].shape[-1] > TILE_LIMIT:
        yield f"outs of {arrays['outs'].shape[-1]} values: takes at most {TILE_LIMIT}, as of parts of entries"
