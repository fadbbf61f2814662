"""The division by XLA: for batches that the kernels have no room for, plans made while tracing, and the interpreter."""

import jax
import jax.numpy as jnp

from jaxkv_kernels.mosaic_gpu.attention.planning.division import Division, Problem


class Arrays:
    """`Vectors` of exactly the requested length."""

    def iota(self, count):
        """See `Vectors`."""
        return jnp.arange(count, dtype=jnp.int32)

    def tables(self, **named):
        """See `Vectors`."""
        return named

    def read(self, table, i):
        """See `Vectors`."""
        return table[i]

    def take(self, table, i):
        """See `Vectors`."""
        return table[i]

    def search(self, table, count, bound, *, equal=False):
        """See `Vectors`."""
        side = "right" if equal else "left"
        return jnp.searchsorted(table[:count], bound, side=side, method="compare_all").astype(jnp.int32)

    def cumsum(self, x):
        """See `Vectors`."""
        return jnp.cumsum(x)

    def candidates(self, kind, count, width, evaluate):
        """See `Vectors`."""
        self._width = width
        first, second = (x.reshape(count, width) for x in evaluate(self.iota(count * width)))
        return first.max(axis=1), second.sum(axis=1)

    def following(self, x):
        """See `Vectors`."""
        return jnp.concatenate([x[1:], x[-1:]])


def divide(lengths, unknown, problem: Problem) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`partitions`, `work_tiles` and `split_requests` of a plan for `lengths` [B]; see `Division`."""
    vectors = Arrays()
    division = Division(vectors, problem, lengths, lambda: unknown)
    columns, partition, _ = division.work_tiles(vectors.iota(problem.tiles))
    partitions, first_tiles = division.partitions(partition)
    split_requests = division.split_requests(first_tiles[:-1])
    return jnp.stack(partitions, axis=1), jnp.stack(columns, axis=1), jnp.stack(split_requests, axis=1)
