"""Reasons against layouts, which several kernels share."""

from collections.abc import Collection, Iterator, Mapping

import jax

from jaxkv_kernels.addressing import ROW_LIMIT, Buffer, Pages, dtype_of, table_tokens
from jaxkv_kernels.mosaic_gpu.runtime.arithmetic import OPAQUE_LIMIT
from jaxkv_kernels.mosaic_gpu.sizes import TILE
from jaxkv_kernels.mosaic_gpu.token_rows import ALIGNMENT, origin_step


def steps(pages: Pages, axes: Collection[str]) -> dict[str, int]:
    """The offset, and the strides of blocks and of `axes`, in elements; axes of length 1 have no step.

    Values that do not follow their keys have their own.
    """
    found = {}
    for name, part in zip(("", "value "), pages.parts, strict=False):
        found[f"{name}offset"] = part.offset
        found |= {f"{name}{axis} stride": step for axis, count, step in part.inner_axes if axis in axes and count > 1}
        if part.num_blocks > 1:
            found[f"{name}block stride"] = part.block_stride
    return found


def unaligned(elements: Mapping[str, int], itemsize: int) -> Iterator[str]:
    """Sizes that are not multiples of the unit of bulk copies."""
    for name, count in elements.items():
        if count * itemsize % ALIGNMENT:
            yield f"{name} of {count * itemsize} bytes: supports multiples of {ALIGNMENT}"


def block_sizes(pages: Pages) -> Iterator[str]:
    """A reason against copying tiles of keys from such blocks by TMA."""
    if pages.block_size not in (16, 32, 64, 128, 256):
        yield f"blocks of {pages.block_size} tokens: supports 16, 32, 64, 128 and 256"


def table_sizes(block_tables: jax.Array, block_size: int) -> Iterator[str]:
    """Reasons against block tables [B, M]: kernels compute `opaque_zero` of the indices of requests and key tiles."""
    requests, columns = block_tables.shape
    if requests > OPAQUE_LIMIT:
        yield f"{requests} requests: supports up to {OPAQUE_LIMIT}"
    if table_tokens(block_tables, block_size) > OPAQUE_LIMIT * TILE:
        most = OPAQUE_LIMIT * TILE // block_size
        yield f"block tables of {columns} blocks per request: supports up to {most} of {block_size} tokens"


def origins(pages: Pages, buffer: Buffer) -> Iterator[str]:
    """Reasons against copying from where the strides put pages."""
    strides, sizes = steps(pages, ("layer", "token", "head")), {"buffer": pages.size}
    if pages.two_arrays:
        sizes["value buffer"] = pages.parts[-1].size
    yield from unaligned({**strides, **sizes}, dtype_of(buffer).itemsize)
    size, step = max(((part.size, origin_step(part)) for part in pages.parts), key=lambda each: each[0] // each[1])
    if size // step >= ROW_LIMIT:
        yield (
            f"a buffer of {size} elements whose strides are multiples of {step} only: supports fewer than 2**31 "
            f"steps of that size"
        )
