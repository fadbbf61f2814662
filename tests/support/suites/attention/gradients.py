"""Gradients of attention, whose backward pass starts from the results of the implementation's kernel."""

import jax.numpy as jnp
import numpy as np

import jaxkv
from support import dense_gradients, scenes
from support.arrays import on_device
from support.dense_gradients import SCALE, Paged, model_of, seen_slots
from support.suites.base import Suite, dtype_of, layout_of


class GradientChecks(Suite):
    """Compares gradients with those of dense attention in float64."""

    exact = "f32"
    heads = 4
    roundings = 64

    def check_kv(self, lengths, tokens, *, sizes=(16, 16), layout="BLNHC", prefill=False, **options):
        """Those of `decode_kv`, or `prefill_kv`, of the last `tokens` of each request."""
        operation = jaxkv.prefill_kv if prefill else jaxkv.decode_kv
        self._check(operation, jaxkv.KVEntry(self.exact, *sizes), lengths, tokens, layout, **options)

    def check_mla(self, lengths, tokens, *, sizes=(128, 16), layout="BLNHC", **options):
        """Those of `decode_mla`."""
        self._check(jaxkv.decode_mla, jaxkv.MLAEntry(self.exact, *sizes), lengths, tokens, layout, **options)

    def _check(self, operation, entry, lengths, tokens, layout, *, block_size=64, **options):
        kv_heads = 1 if entry.one_head else 2
        scene = scenes.scene(entry, num_heads=kv_heads, lengths=lengths, block_size=block_size)
        found = layout_of(layout, entry, num_heads=kv_heads, block_size=block_size)
        q = self.queries(entry, len(lengths), tokens)
        counts, slots = [tokens] * len(lengths), scenes.BLOCKS * block_size
        seen = seen_slots(scene.tables, lengths, counts, block_size=block_size, slots=slots)
        paged = Paged.of(found, seen.any(axis=0), layer=1)

        def run(*arrays):
            requests = on_device(scene.tables), on_device(scene.lengths, jnp.int32)
            return self.run(operation, *arrays, *requests, layer=1, scale=SCALE, return_lse=True, **options)

        dense_gradients.check(run, model_of(entry, seen, **options), q, paged, roundings=self.roundings)

    def check_sparse(self, lengths, tokens, slots, *, sizes=(128, 16)):
        """Those of `decode_mla_sparse`, of so many random slots per query token."""
        entry, rng = jaxkv.MLAEntry(self.exact, *sizes), np.random.default_rng(2)
        found = layout_of("BLNHC", entry)
        total = scenes.BLOCKS * found.block_size
        shape = len(lengths), tokens
        chosen = np.stack([rng.permutation(total)[:slots] for _ in range(np.prod(shape))]).astype(np.int32)
        seen = np.zeros((len(chosen), total), bool)
        np.put_along_axis(seen, chosen, True, axis=1)

        def run(*arrays):
            some = on_device(chosen.reshape(*shape, slots))
            return self.run(jaxkv.decode_mla_sparse, *arrays, some, layer=1, scale=SCALE, return_lse=True)

        paged, q = Paged.of(found, seen.any(axis=0), layer=1), self.queries(entry, *shape)
        dense_gradients.check(run, model_of(entry, seen), q, paged, roundings=self.roundings)

    def queries(self, entry, *rows):
        """Arrays [B, Q, Hq, n_i] of queries."""
        rng = np.random.default_rng(5)
        sizes = entry.sizes if entry.one_head else entry.sizes[:1]
        return [rng.standard_normal((*rows, self.heads, size)).astype(dtype_of(entry)) for size in sizes]


class Gradients(GradientChecks):
    """The gradients of each operation."""

    def test_decode_kv(self):
        self.check_kv((0, 64, 130), 2, logit_cap=2.0)

    def test_prefill_kv(self):
        self.check_kv((3, 130), 70, prefill=True)

    def test_decode_mla(self):
        self.check_mla((0, 64, 130), 2)

    def test_decode_mla_sparse(self):
        self.check_sparse((1, 1), 2, 130)
