"""Device-side code that loads the work of a CTA or cluster from a plan."""

from typing import Any, NamedTuple

import jax.numpy as jnp


class WorkTile(NamedTuple):
    """A range of steps over the keys of a request.  The fields are the columns of `Plan.work_tiles`."""

    request: Any
    begin: Any
    """The first step."""
    end: Any
    """The step after the last."""
    keys: Any
    """The number of tokens, counted from `origin`, that some query token of the request sees."""
    unmasked_end: Any
    """The steps before this one need no mask."""
    split: Any
    """The index of the split to store the result to; -1 if it is the result of the whole request."""
    origin: Any
    """The token at which step 0 begins; it may be above 0 with a window."""


def load_work_tile(work_tiles, n) -> WorkTile:
    """Loads the n-th work tile; the last one if n is larger."""
    n = jnp.minimum(n, work_tiles.shape[0] - 1)
    return WorkTile(*(work_tiles[n, column] for column in range(work_tiles.shape[1])))


def load_work_range(partitions, partition) -> tuple[Any, Any, WorkTile]:
    """Loads the index of a partition's first work tile, that of the one after its last, and the first work tile."""
    n = jnp.minimum(partition, partitions.shape[0] - 1)
    first, *tile = (partitions[n, column] for column in range(partitions.shape[1]))
    return first, partitions[partition + 1, 0], WorkTile(*tile)
