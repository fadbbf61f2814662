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

    def search(self, table, count, bound, *, equal=False, slope=None):
        """See `Vectors`."""
        if slope is None:
            side = "right" if equal else "left"
            return jnp.searchsorted(table[:count], bound, side=side, method="compare_all").astype(jnp.int32)
        values = table[:count] + slope[:, None] * jnp.arange(count, dtype=jnp.int32)
        passed = values <= bound[:, None] if equal else values < bound[:, None]
        return passed.sum(axis=1, dtype=jnp.int32)

    def cumsum(self, *xs):
        """See `Vectors`."""
        found = tuple(map(jnp.cumsum, xs))
        return found if len(xs) > 1 else found[0]

    def candidates(self, count, width, evaluate):
        """See `Vectors`."""
        first, second = (x.reshape(count, width) for x in evaluate(self.iota(count * width)))
        return first.max(axis=1), second.sum(axis=1)

    def following(self, x):
        """See `Vectors`."""
        return jnp.concatenate([x[1:], x[-1:]])

    def first_least(self, count, cost):
        """See `Vectors`."""
        return jnp.argmin(cost(self.iota(count))).astype(jnp.int32)


def divide(lengths, unknown, problem: Problem) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`partitions`, `work_tiles` and `split_requests` of a plan for `lengths` [B]; see `Division`."""
    vectors = Arrays()
    division = Division(vectors, problem, lengths, lambda: unknown)
    columns, partition, _ = division.work_tiles(vectors.iota(problem.tiles))
    partitions, last = division.partitions(partition, columns[0])
    split_requests = division.split_requests(partitions[1][:-1], last[:-1])
    return jnp.stack(partitions, axis=1), jnp.stack(columns, axis=1), jnp.stack(split_requests, axis=1)
