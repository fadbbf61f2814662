"""Which calls the kernels take, and the reasons against the others."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxkv_kernels.mosaic_gpu.token_rows import token_rows

LATENT, ROPE = 512, 64
HEAD_DIMS = (64, 128, 192, 256)


def decode_mla(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `decode_mla` call."""
    entry = options["entry"]
    if entry.format not in ("bf16", "f16"):
        yield f"entries of format {entry.format!r}: takes bf16 and f16"
        return
    if entry.sizes != (LATENT, ROPE):
        yield f"entries of {entry.sizes[0]} + {entry.sizes[1]} values: takes {LATENT} + {ROPE}"
    yield from _paged(arrays, options, "q_latent")


def decode_kv(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Reasons against a `decode_kv` call."""
    entry = options["entry"]
    if entry.format not in ("bf16", "f16"):
        yield f"entries of format {entry.format!r}: takes bf16 and f16"
        return
    if not {*entry.sizes} <= {*HEAD_DIMS}:
        yield f"entries of {entry.sizes[0]} + {entry.sizes[1]} values: takes 64, 128, 192 and 256 of each"
    yield from _paged(arrays, options, "q")


def _paged(arrays, options, queries) -> Iterator[str]:
    """Reasons that all kernels have which fetch pages of tokens by TMA."""
    entry, pages = options["entry"], options["pages"]
    for name in ("buffer", queries):
        if arrays[name].dtype != entry.dtype:
            yield f"`{name}` of {arrays[name].dtype}: takes that of the entries, {entry.dtype}"
    if pages.block_size not in (16, 32, 64, 128, 256):
        yield f"blocks of {pages.block_size} tokens: takes 16, 32, 64, 128 and 256"
    try:
        token_rows(pages)
    except ValueError as error:
        yield str(error)
