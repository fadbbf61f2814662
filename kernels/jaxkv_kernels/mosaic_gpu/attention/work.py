"""Device-side: the work of a CTA or cluster, as a plan lists it."""

from typing import Any, NamedTuple

import jax.numpy as jnp


class WorkTile(NamedTuple):
    """A range of steps over the keys of a request; the columns of `Plan.work_tiles`."""

    request: Any
    begin: Any
    """The first step."""
    end: Any
    """The step after the last."""
    keys: Any
    """Tokens of the request that some query sees, counted from `origin`."""
    unmasked_end: Any
    """Steps before it need no mask."""
    split: Any
    """Where the result goes among the splits; -1: it is the whole request's."""
    origin: Any
    """The token at which step 0 begins; not 0 with a window."""


def load_work_tile(work_tiles, n) -> WorkTile:
    """The n-th work tile; beyond the last, the last."""
    n = jnp.minimum(n, work_tiles.shape[0] - 1)
    return WorkTile(*(work_tiles[n, column] for column in range(work_tiles.shape[1])))


def load_work_range(partitions, partition) -> tuple[Any, Any, WorkTile]:
    """The first work tile of a partition, the one after its last, and the columns of the first."""
    n = jnp.minimum(partition, partitions.shape[0] - 1)
    first, *tile = (partitions[n, column] for column in range(partitions.shape[1]))
    return first, partitions[partition + 1, 0], WorkTile(*tile)
