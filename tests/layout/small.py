"""Small layouts, and where their entries are by their strides."""

import numpy as np

import jaxkv

MLA = jaxkv.MLAEntry("bf16", latent=6, rope=2)
KV = jaxkv.KVEntry("bf16", head_dim=3, value_dim=2)
BYTE = jaxkv.MLAEntry("fp8", latent=2, rope=1)
INDEXER = jaxkv.IndexerEntry(head_dim=4)

GROUPS = {
    "latent": jaxkv.Group(3, MLA),
    "heads": jaxkv.Group(2, KV, num_heads=3),
    "indexer": jaxkv.Group(1, INDEXER),
}

SIZES = dict(num_layers=3, num_blocks=4, block_size=5)


def addresses(layout):
    """First elements [L, B, H, N] of the entries, as the layout's formula has them."""
    strides = layout.strides
    counts = (layout.num_layers, layout.num_blocks, layout.num_heads, layout.block_size)
    steps = (strides.layer, strides.block, strides.head, strides.token)
    return layout.offset + sum(i * step for i, step in zip(np.indices(counts), steps, strict=True))


def elements(layout):
    """All elements [L, B, H, N, width] of the entries."""
    return addresses(layout)[..., None] + np.arange(layout.width)


def is_run(numbers):
    """Whether the numbers are consecutive, in some order."""
    return np.array_equal(np.sort(numbers, axis=None), numbers.min() + np.arange(numbers.size))


def same_but(layout, size=None, offset=None, **strides):
    """The layout from explicit strides, some of them replaced."""
    given = {axis: getattr(layout.strides, axis) for axis in ("layer", "block", "head", "token", "content")}
    return jaxkv.CacheLayout.from_strides(
        num_layers=layout.num_layers,
        num_blocks=layout.num_blocks,
        block_size=layout.block_size,
        num_heads=layout.num_heads,
        entry=layout.entry,
        strides={**given, **strides},
        offset=layout.offset if offset is None else offset,
        size=layout.size if size is None else size,
        dtype=layout.dtype,
    )
