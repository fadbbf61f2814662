"""Sizes that the attention kernels share.

Tiles are 64 rows by 64 keys because a warpgroup's wgmma has 64 rows, and because two such tiles of latents are what
shared memory holds beside the queries.
"""

TILE = 64
"""Rows of a tile of queries, and keys (tokens) of a tile of keys."""
PAIR = 2 * TILE
"""Keys of two tiles: one for each consumer warpgroup."""
LATENT, ROPE = 512, 64
"""The sizes of DeepSeek's entries, which are the largest."""
HALF = LATENT // 2
"""Columns of an MLA latent, and of the output, that one of two consumer warpgroups accumulates."""
