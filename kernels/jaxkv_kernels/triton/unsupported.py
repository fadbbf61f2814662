"""Reasons why a call is unsupported although its entries are supported, by operation."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxkv_kernels.logit_cap import too_large

RUN_LIMIT = 2**31 - 2**13
"""The most elements of a block.  Kernels count them in int32, in chunks of at most 2**13."""

TILE_LIMIT = 2**20
MOST_HEADS, MOST_VALUES = {2: 128, 4: 64}, 128
"""Limits of the indexer's queries: heads, by the bytes per value, and values per head."""
MOST_BEST = 4096


def copy_blocks(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a call that moves whole blocks: `copy_blocks`, `read_blocks`, `write_blocks`."""
    del arrays
    if options["pages"].block_elements > RUN_LIMIT:
        yield f"blocks of {options['pages'].block_elements} elements: supports at most {RUN_LIMIT}"


read_blocks = write_blocks = copy_blocks


def write_mla(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a call that moves entries."""
    del arrays
    for size in options["entry"].sizes:
        if size > TILE_LIMIT:
            yield f"part of {size} values: supports at most {TILE_LIMIT}, which is what a tile may have in Triton"


write_kv = write_indexer_k = write_mla


def gather_mla(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a call that gathers entries."""
    yield from write_mla(arrays, options)
    if 0 in options["entry"].sizes:
        yield "part of 0 values: no kernel has a result of no values"


gather_kv = gather_indexer_k = gather_mla


def gather_entries(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a call that gathers the bytes of entries."""
    del arrays
    if options["entry"].nbytes > TILE_LIMIT:
        yield f"entries of {options['entry'].nbytes} bytes: supports at most {TILE_LIMIT}, of a tile in Triton"


def indexer_logits(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against an `indexer_logits` call."""
    del options
    *_, heads, dim = arrays["q"].shape
    most = MOST_HEADS[max(arrays["q"].dtype.itemsize, 2)]
    if heads > most:
        yield f"`q` of {heads} heads of {arrays['q'].dtype}: supports at most {most}, which shared memory holds"
    if dim > MOST_VALUES:
        yield f"keys of {dim} values: supports at most {MOST_VALUES}, which shared memory holds"


def select_topk(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `select_topk` call."""
    del arrays
    if options["k"] > MOST_BEST:
        yield f"`k` of {options['k']}: supports at most {MOST_BEST}"


LATENT, ROPE, HEAD_DIM = 512, 64, 512
"""The largest parts of entries whose tiles fit in shared memory."""


def decode_mla(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `decode_mla` call."""
    yield from _empty(arrays, "q_latent", "block_tables", "slots")
    latent, rope = options["entry"].sizes
    if latent > LATENT or rope > ROPE:
        yield f"entries of {latent} + {rope} values: supports at most {LATENT} + {ROPE}"
    yield from too_large(options)


def decode_mla_sparse(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `decode_mla_sparse` call."""
    if arrays["extra"] is not None:
        yield "`extra`: supports one cache per call"
    yield from decode_mla(arrays, options)
    yield from _batch_invariant(options)


def decode_kv(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `decode_kv` call."""
    yield from _empty(arrays, "q", "block_tables")
    dtype = arrays["q"].dtype if "q" in arrays else options["dtype"]
    if options["entry"].format == "int8" and dtype == "float16":
        # Weights are multiplied by the scales of values, which may be too small for float16.
        yield "`q` of float16: supports bfloat16 and float32 with entries of format 'int8'"
    if max(options["entry"].sizes) > HEAD_DIM:
        yield f"entries of {' + '.join(map(str, options['entry'].sizes))} values: supports at most {HEAD_DIM} of each"
    yield from too_large(options)


def plan_decode(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `plan_decode` call."""
    yield from (decode_mla if options["entry"].one_head else decode_kv)(arrays, options)
    yield from _batch_invariant(options)


def _batch_invariant(options: Mapping[str, Any]) -> Iterator[str]:
    if options["batch_invariant"]:
        yield "a request is split depending on what else is in the batch: cannot be batch-invariant"


def _empty(arrays: Mapping[str, Any], *names: str) -> Iterator[str]:
    for name in names:
        if name in arrays and not arrays[name].size:
            yield f"`{name}` of no values: a kernel would have nothing to do"


def merge_states(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `merge_states` call."""
    del options
    if not arrays["outs"].size:
        yield "outs of no values: a kernel would have nothing to do"
    elif arrays["outs"].shape[-1] > TILE_LIMIT:
        yield f"outs of {arrays['outs'].shape[-1]} values: supports at most {TILE_LIMIT}, as of parts of entries"


MOST_ROWS = 2**15


def fetch_rows(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `fetch_rows` call."""
    if options["hot"].rows > MOST_ROWS:
        yield f"{options['hot'].rows} rows per request: supports at most {MOST_ROWS}, which are a tile of one program"
    if not arrays["positions"].size:
        yield "`positions` of no values: a kernel would have nothing to do"
