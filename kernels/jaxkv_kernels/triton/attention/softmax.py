"""A running softmax over tiles of scores, in powers of two: scores come multiplied by log2(e)."""

import numpy as np
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(float("-inf"))
"""Score of a masked key: its exponential is 0 whatever the running maximum, which is finite."""
EMPTY = tl.constexpr(float(np.finfo(np.float32).min))
"""Running maximum of a row that has seen no key: no finite score is below it, so that only masked keys do not count."""
LIFT = tl.constexpr(14.0)
"""How far the running maximum stays below the scores where weights are float16, which has less room below 1 than above:
a weight of 2**-38 of the largest is not 0 yet."""


@triton.jit
def capped(score, CAP: tl.constexpr):
    """CAP * tanh(score / CAP), of scores and a cap in natural units, in powers of two."""
    if CAP is None:
        result = score * LOG2E
    else:
        decay = tl.exp2(tl.abs(score) * (-2 * LOG2E / CAP))
        size = CAP * LOG2E * (1 - decay) / (1 + decay)
        result = tl.where(score < 0, -size, size)
    return result


@triton.jit
def weighted(score, top, DTYPE: tl.constexpr):
    """Weights of a tile of scores [rows, keys] that are to be DTYPE; what earlier results shrink by; `top` [rows]."""
    new = tl.max(score, axis=1)
    if tl.float16 == DTYPE:
        new -= LIFT
    new = tl.maximum(top, new)
    return tl.exp2(score - new[:, None]), tl.exp2(top - new), new


@triton.jit
def added(sums, shrink, weight):
    """Running sums of weights [rows, keys], by row, or by row and place in a tile, to be added up at the end.

    The latter takes registers, and spares the threads that share a row a word about every tile.
    """
    return sums * shrink + tl.sum(weight, axis=1) if len(sums.shape) == 1 else sums * shrink[:, None] + weight


@triton.jit
def divisor(total):
    """What results are divided by: 1 where there are no keys."""
    return tl.where(total == 0, 1.0, total)


@triton.jit
def log_sum(top, total):
    """log2 of the sum of exponentials: -inf where there are no keys."""
    return tl.where(total == 0, float("-inf"), top + tl.log2(divisor(total)))


@triton.jit
def divisor_with_sink(top, total, sink):
    """What results are divided by where one logit more, in natural units, takes part without a value."""
    return divisor(total) + tl.exp2(sink * LOG2E - tl.where(total == 0, 0.0, top))
