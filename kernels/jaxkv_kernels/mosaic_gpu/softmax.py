"""Online softmax with lazy rescaling.

Weights are exp2(score - running max), and the sums over keys (of weights, and of weighted values) are relative to the
same running max.  Ordinary online softmax would raise the running max in most tiles, and rescale all sums each time.
Here, the running max is raised only when a score exceeds it by more than a threshold.  Until then, weights may exceed
1, up to 2**threshold, which costs no precision.  To detect such scores, each lane checks its own values, and the lanes
vote.  Most tiles therefore need neither row maxima nor a rescale.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.runtime.registers import (
    LANE_COLUMNS,
    WGMMA,
    any_positive,
    filled,
    fold_columns,
    over_columns,
    over_rows,
)
from jaxkv_kernels.tuning import require

EMPTY = float(jnp.finfo(jnp.float32).min)
"""The running max of a row that has seen no key: finite, so that differences are finite; no finite score is lower."""
THRESHOLDS = (0, 4, 8, 12)
"""Values of a configuration's `rescale_threshold` that are worth trying."""


def check_threshold(config) -> None:
    """ValueError unless weights of up to 2**`rescale_threshold` of this configuration fit float16."""
    ok = 0 <= config.rescale_threshold <= 14
    require(ok, config, "rescale_threshold", "0 to 14: weights reach 2**threshold, and float16 at most 65,504")


@dataclass(frozen=True)
class OnlineSoftmax:
    """Online softmax over tiles of scores in base 2 (multiplied by log2(e)), with keys along axis `keys`.

    With keys along axis 1, a quad of lanes holds a row, and each warp votes on its own rows.  With keys along axis 0
    (swapped operands), every warp holds keys of every row, so the whole warpgroup votes, and its warps wait for each
    other.
    """

    keys: int
    threshold: float
    interpret: bool
    max_over_keys: Callable[[jax.Array], jax.Array] | None = None
    """Replaces Pallas's maximum over axis 0, whose scratch memory only one warpgroup may use at a time."""
    tile: plgpu.Layout = WGMMA
    """The layout of tiles of scores."""

    def empty_max(self, rows: int):
        """The initial running max of `rows` rows."""
        return filled(self.tile.reduce(self.keys), EMPTY, rows)

    def update_max(self, scores, running_max, on_raise=None):
        """The running max after a tile of `scores`.  If it was raised, `on_raise` is called with it."""

        def raised():
            new = self._raise(scores, running_max)
            if on_raise is not None:
                on_raise(new)
            return new

        return lax.cond(self._exceeded(scores, running_max), raised, lambda: running_max)

    def rescale(self, old_max, new_max, *sums):
        """Rescales `sums` from `old_max` to `new_max`.  The two are nearly always equal."""
        changed = any_positive(new_max - old_max, interpret=self.interpret, tile=self.tile)
        return lax.cond(changed, lambda: self._multiply(jnp.exp2(old_max - new_max), sums), lambda: sums)

    def update(self, scores, running_max, *sums):
        """`update_max` and `rescale` in one step: the running max after a tile of `scores`, and the rescaled `sums`."""

        def raised(running_max, *sums):
            new = self._raise(scores, running_max)
            return new, *self._multiply(jnp.exp2(running_max - new), sums)

        return lax.cond(self._exceeded(scores, running_max), raised, lambda *same: same, running_max, *sums)

    def weights(self, scores, running_max):
        """The weights exp2(score - running max) of a tile."""
        return jnp.exp2(scores - self._spread(running_max, scores))

    def merge(self, *states):
        """Joins the results of warpgroups over disjoint keys, as factors for their sums of weighted values.

        `states` are their running maxima and row sums.  Returns a factor per row for each of them, which makes them
        relative to the same maximum, and what `finalize` returns of their total: a factor that normalizes it, and
        log-sum-exps in base 2.
        """
        merged_max = reduce(jnp.maximum, (running_max for running_max, _ in states))
        factors = [jnp.exp2(running_max - merged_max) for running_max, _ in states]
        total = reduce(jnp.add, (row_sum * factor for (_, row_sum), factor in zip(states, factors, strict=True)))
        return factors, *self.finalize(total, merged_max)

    def finalize(self, row_sum, running_max, sinks=None):
        """Factors that normalize sums of weighted values, and log-sum-exps in base 2; 0 and -inf for rows without keys.

        `sinks` are logits in base 2, one per row, that are part of the softmax's sum but have no value.  Log-sum-exps
        exclude them.
        """
        empty = row_sum == 0
        row_sum = jnp.where(empty, 1.0, row_sum)
        lse = jnp.where(empty, -math.inf, running_max + jnp.log2(row_sum))
        if sinks is not None:
            row_sum += jnp.exp2(sinks - running_max)
        return jnp.where(empty, 0.0, 1 / row_sum), lse

    def _exceeded(self, scores, running_max):
        limit = running_max + self.threshold
        if self.keys == 1:
            above = fold_columns(jnp.maximum, scores) - over_columns(limit, LANE_COLUMNS)
        else:
            above = scores - over_rows(limit, scores.shape[0])
        return any_positive(above, interpret=self.interpret, warpgroup=self.keys == 0, tile=self.tile)

    def _raise(self, scores, running_max):
        found = scores.max(axis=self.keys) if self.max_over_keys is None else self.max_over_keys(scores)
        return jnp.maximum(running_max, found)

    def _multiply(self, factor, sums):
        return tuple(x * self._spread(factor, x) for x in sums)

    def _spread(self, x, tile):
        """One value per row of queries, broadcast to the shape of `tile`."""
        return over_columns(x, tile.shape[1]) if self.keys == 1 else over_rows(x, tile.shape[0])
