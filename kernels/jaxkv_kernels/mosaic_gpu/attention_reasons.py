"""Reasons against attention to entries of some sizes, and by some queries, which several kernels share."""

from collections.abc import Iterator

from jaxkv_kernels.calls import DecodeMLA, PlanDecode
from jaxkv_kernels.formats.entries import Entry, MLAEntry
from jaxkv_kernels.mosaic_gpu.layout_reasons import block_sizes, origins
from jaxkv_kernels.mosaic_gpu.paged_tma import TILE_COLUMNS
from jaxkv_kernels.mosaic_gpu.sizes import LATENT, ROPE


def query_dtype(entry: Entry, dtype, name: str) -> Iterator[str]:
    """A reason against queries that do not have the entries' input dtype; the message calls the queries `name`."""
    if dtype != entry.input_dtype:
        yield f"{name} of {dtype}: supports {entry.input_dtype} with entries of format {entry.format!r}"


def latent_sizes(entry: MLAEntry, *latents: int) -> Iterator[str]:
    """A reason against latents of such sizes; `latents` are the supported numbers of values, by default 512."""
    supported = [(latent, ROPE) for latent in latents or (LATENT,)]
    if entry.sizes not in supported:
        yield f"{values_of(entry)}: supports {' and '.join(f'{latent} + {rope}' for latent, rope in supported)}"


def plain_latents(call: DecodeMLA | PlanDecode) -> Iterator[str]:
    """Reasons against latents that are not quantised, which TMA copies as they are."""
    latent, rope = call.entry.sizes
    if latent % TILE_COLUMNS or latent > LATENT or rope not in (0, 16, 32, 64):
        yield f"{values_of(call.entry)}: supports multiples of {TILE_COLUMNS} up to {LATENT}, + 0, 16, 32 or 64"
    yield from block_sizes(call.pages)
    yield from origins(call.pages, call.buffer)


def values_of(entry: Entry) -> str:
    """What messages call an entry by its sizes."""
    return f"entries of {entry.sizes[0]} + {entry.sizes[1]} values"
