"""The online softmax over tiles of scores.

It works in base 2, because `exp2` is one instruction.  Scores are multiplied by log2(e) once; the running maximum and
the log-sum-exps of splits are in base 2 as well.
"""

import numpy as np
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(float("-inf"))
"""The score of a masked key.  Its weight is 0 for every running maximum, because that is finite."""
NO_KEYS = tl.constexpr(float(np.finfo(np.float32).min))
"""The running maximum of a row before its first key.  It is finite, so that a tile of masked keys gives weights of 0
instead of NaN, and no finite score is below it."""
HALF_HEADROOM = tl.constexpr(14.0)
"""float16 weights are at most 2**14 instead of 1.  The smallest float16 is 2**-24, so without this headroom, a weight
below 2**-24 times the largest would become 0; with it, the limit is 2**-38.
"""
POLYNOMIAL_LIMIT = tl.constexpr(0.55)
"""Below this, `1 - exp2(...)` loses bits to cancellation, and tanh is a polynomial (relative error below 2**-23)."""


@triton.jit
def cap_scores(score, CAP: tl.constexpr, DTYPE: tl.constexpr):
    """CAP * tanh(score / CAP), multiplied by log2(e).  If CAP is None, `score` is only multiplied.

    DTYPE is the dtype of the weights.  For 16-bit weights, a shorter formula is precise enough near 0.
    """
    if CAP is None:
        result = score * LOG2E
    else:
        decay = tl.exp2(tl.abs(score) * (-2 * LOG2E / CAP))
        size = CAP * LOG2E * (1 - decay) / (1 + decay)
        result = tl.where(score < 0, -size, size)
        if tl.float32 == DTYPE:
            x = score * (1 / CAP)
            u = x * x
            series = u * (-0.33332957 + u * (0.13320941 + u * (-0.05268408 + u * 0.01645864)))
            result = tl.where(tl.abs(x) < POLYNOMIAL_LIMIT, (score + score * series) * LOG2E, result)
    return result


@triton.jit
def update_max(score, row_max, DTYPE: tl.constexpr):
    """Adds a tile of scores [rows, keys] to the running maximum `row_max` [rows].

    Returns the weights exp2(score - new maximum) of the tile, the factor [rows] by which earlier sums are rescaled, and
    the new maximum.  Where weights will be float16 (DTYPE), the maximum is lowered by HALF_HEADROOM.
    """
    new_max = tl.max(score, axis=1)
    if tl.float16 == DTYPE:
        new_max -= HALF_HEADROOM
    new_max = tl.maximum(row_max, new_max)
    return tl.exp2(score - new_max[:, None]), tl.exp2(row_max - new_max), new_max


@triton.jit
def update_sum(row_sum, rescale, weight):
    """Adds a tile of weights [rows, keys] to the running sums.

    If `row_sum` is [rows], weights are reduced across threads for every tile.  If it is [rows, keys], there is a sum
    per column of the tile, and these are reduced once at the end.  This takes more registers, but no exchange between
    threads in the loop.
    """
    if len(row_sum.shape) == 1:
        result = row_sum * rescale + tl.sum(weight, axis=1)
    else:
        result = row_sum * rescale[:, None] + weight
    return result


@triton.jit
def normalizer(row_sum):
    """The divisor of results: the row sum, or 1 for rows without keys."""
    return tl.where(row_sum == 0, 1.0, row_sum)


@triton.jit
def normalizer_with_sink(row_max, row_sum, sink):
    """Like `normalizer`, with one more key whose score is `sink` (natural, not base 2) and whose value is 0."""
    return normalizer(row_sum) + tl.exp2(sink * LOG2E - tl.where(row_sum == 0, 0.0, row_max))


@triton.jit
def log2_sum(row_max, row_sum):
    """log2 of the sum of exponentials: -inf for rows without keys."""
    return tl.where(row_sum == 0, float("-inf"), row_max + tl.log2(normalizer(row_sum)))
