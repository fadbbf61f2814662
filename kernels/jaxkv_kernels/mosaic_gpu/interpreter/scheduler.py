"""The vectors of `tile_scheduler_vectors.py` for Pallas's interpreter, which runs no inline PTX."""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxkv_kernels.mosaic_gpu.tile_scheduler_vectors import Registers, padded


class InterpretedRegisters(Registers):
    """The same operations on arrays."""

    def iota(self, count):
        """See `Vectors`."""
        return jnp.arange(padded(count, self.threads), dtype=jnp.int32)

    def tables(self, **named):
        """See `Vectors`."""
        for name, x in named.items():
            self._scratch[name][...] = x
        return {name: self._scratch[name] for name in named}

    def read(self, table, i):
        """See `Vectors`."""
        return table[i]

    def store(self, start, *tables):
        """Stores vectors to tables."""
        for ref, x in tables:
            ref[pl.ds(start, x.shape[0])] = x

    def take(self, table, i):
        """See `Vectors`."""
        return table[...][i]

    def search(self, table, count, bound, *, equal=False, slope=None):
        """See `Vectors`."""
        side = "right" if equal else "left"
        if slope is None:
            return jnp.searchsorted(table[...][:count], bound, side=side, method="compare_all").astype(jnp.int32)
        values = table[...][:count] + slope[:, None] * jnp.arange(count, dtype=jnp.int32)
        passed = values <= bound[:, None] if equal else values < bound[:, None]
        return passed.sum(axis=1, dtype=jnp.int32)

    def cumsum(self, *xs):
        """See `Vectors`."""
        sums = tuple(map(jnp.cumsum, xs))
        return sums if len(xs) > 1 else sums[0]

    def reduce(self, loads, splits, load, split, candidate):
        """Maxima and sums, by candidate."""
        loads[...] = loads[...].at[candidate].max(load)
        splits[...] = splits[...].at[candidate].add(split)

    def wait(self):
        """Does nothing, because a single thread runs."""

    def following(self, x):
        """See `Vectors`."""
        return jnp.concatenate([x[1:], x[-1:]])

    def first_least(self, count, cost):
        """See `Vectors`."""
        return jnp.argmin(cost(jnp.arange(count, dtype=jnp.int32))).astype(jnp.int32)

    def load(self, ref, count, *row, start=0):
        """Elements of a row; 0 beyond its end."""
        element, width = self.iota(count) + start, ref.shape[-1]
        return jnp.where(element < width, ref[...][(*row, jnp.minimum(element, width - 1))], 0)

    def store_rows(self, ref, columns, start):
        """Stores rows; those beyond the end are dropped."""
        rows = jnp.stack(columns, axis=1)
        row = jnp.arange(rows.shape[0], dtype=jnp.int32) + start
        ref[...] = ref[...].at[row].set(rows, mode="drop")
