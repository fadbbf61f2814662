"""`ExportedBlocks`: the blocks of a prompt outside a cache, to be adopted by another engine."""

from dataclasses import dataclass

import jax
import numpy as np


@dataclass(frozen=True, eq=False)
class ExportedBlocks:
    """The blocks that hold the cached prefix of a prompt, from `Engine.export`, for `Engine.adopt`.

    All fields but `rows` are strings, bytes and ints, so that each may be sent as it is.  What is received from others
    is checked by `adopt`, except for the contents of the rows.
    """

    prompt: tuple[int, ...]
    """Token ids."""
    cache_salt: tuple[bytes, ...]
    """The parts of the salt of their keys; () without a salt."""
    num_tokens: int
    """How many leading tokens of the prompt have entries in the blocks."""
    model: str
    """`jaxkv.models.fingerprint` of the model."""
    layout: str
    """The fingerprint of the cache's layout, which covers the entries, the size and the order of blocks, and which
    tokens of a block each device has."""
    keys: tuple[bytes, ...]
    """A key for each block [n], as `jaxkv.offload.prefix_keys` computes them.  If the prefix ends inside a block, its
    key is that of the tokens that it has.  Tables follow each other in the order of the model's, and the blocks of a
    table in that of the prompt."""
    rows: jax.Array | np.ndarray
    """The blocks [n, E] of the layout's dtype, as `jaxkv.read_blocks` returns them: an array on the device, or a NumPy
    array, to which `numpy.asarray` converts it."""
