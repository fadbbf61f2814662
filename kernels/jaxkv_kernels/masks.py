"""Which tokens a query token sees: masks by position, those whose tokens are intervals, and trees of new tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import NamedTuple, override

import jax
import jax.numpy as jnp

from jaxkv_kernels.addressing import MAX_SLOTS
from jaxkv_kernels.integers import as_int

Mask = Callable[[jax.Array, jax.Array], jax.Array]
"""A function of int32 positions of queries and of keys, which are broadcast, to bool: whether a query sees a key.

It is static, and compared by `==`: a program is compiled again for another function.  Define it once, outside of the
function that is traced, and do not let it refer to traced arrays.
"""


class Interval(NamedTuple):
    """Positions from `begin` to below `end`; none if `end` is not larger."""

    begin: jax.Array
    end: jax.Array


class Intervals:
    """Base class of masks by which a query sees the tokens of one or several intervals.

    Masks are combined by `|` and `&`.  A subclass must be hashable (a frozen dataclass) and defines `intervals`.
    """

    def intervals(self, position: jax.Array) -> Sequence[Interval]:
        """What a query at `position` sees: intervals of the shape of `position`, int32, which may overlap.

        There is at least one, and as many for all positions.
        """
        raise NotImplementedError

    def aligned(self, block_size: int) -> bool:
        """Whether each interval begins at a multiple of `block_size`, whatever the position is."""
        return False

    def __call__(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Whether queries at these positions see keys at those, which are broadcast."""
        return reduce(jnp.logical_or, [(key >= begin) & (key < end) for begin, end in self.intervals(query)])

    def __or__(self, other: "Intervals") -> "Intervals":
        """What one of the two masks shows."""
        return _Either(self, other) if isinstance(other, Intervals) else NotImplemented

    def __and__(self, other: "Intervals") -> "Intervals":
        """What both masks show."""
        return _Both(self, other) if isinstance(other, Intervals) else NotImplemented


@dataclass(frozen=True)
class _Either(Intervals):
    one: Intervals
    other: Intervals

    @override
    def intervals(self, position: jax.Array) -> Sequence[Interval]:
        return [*self.one.intervals(position), *self.other.intervals(position)]

    @override
    def aligned(self, block_size: int) -> bool:
        return self.one.aligned(block_size) and self.other.aligned(block_size)


@dataclass(frozen=True)
class _Both(_Either):
    @override
    def intervals(self, position: jax.Array) -> Sequence[Interval]:
        pairs = product(self.one.intervals(position), self.other.intervals(position))
        return [Interval(jnp.maximum(a.begin, b.begin), jnp.minimum(a.end, b.end)) for a, b in pairs]


@dataclass(frozen=True)
class Chunked(Intervals):
    """A query sees the tokens of its own chunk of `size` tokens: those with positions of the same quotient by `size`.

    With a causal mask, this is the attention of Llama 4's layers with rotary embeddings.
    """

    size: int

    def __post_init__(self) -> None:
        _check("size", self.size, 1)

    @override
    def intervals(self, position: jax.Array) -> Sequence[Interval]:
        begin = position - position % min(self.size, MAX_SLOTS)
        return [Interval(begin, _sum(begin, self.size))]

    @override
    def aligned(self, block_size: int) -> bool:
        return self.size % block_size == 0


@dataclass(frozen=True)
class Prefix(Intervals):
    """Every query sees the first `size` tokens of its request: attention sinks, or a prefix that is not causal."""

    size: int

    def __post_init__(self) -> None:
        _check("size", self.size, 0)

    @override
    def intervals(self, position: jax.Array) -> Sequence[Interval]:
        return [Interval(jnp.zeros_like(position), jnp.full_like(position, min(self.size, MAX_SLOTS)))]

    @override
    def aligned(self, block_size: int) -> bool:
        return True


@dataclass(frozen=True)
class Sliding(Intervals):
    """A query at position p sees the tokens from p - `left` to p + `right`; -1 is no limit.

    `Sliding(-1, 0)` is a causal mask.  A mask that is nothing but this is faster as `window`.
    """

    left: int
    right: int

    def __post_init__(self) -> None:
        _check("left", self.left, -1)
        _check("right", self.right, -1)

    @override
    def intervals(self, position: jax.Array) -> Sequence[Interval]:
        left = MAX_SLOTS if self.left == -1 else min(self.left, MAX_SLOTS)
        begin = jnp.maximum(position, left) - left
        end = jnp.full_like(position, MAX_SLOTS) if self.right == -1 else _sum(position, self.right + 1)
        return [Interval(begin, end)]

    @override
    def aligned(self, block_size: int) -> bool:
        return self.left == -1


def _check(name: str, value: int, least: int) -> None:
    """ValueError unless `value` is an integer of at least `least`."""
    number = as_int(value)
    if number is None or number < least:
        raise ValueError(f"`{name}` is {value!r}: expected an int of at least {least} (it is static)")


def _sum(position: jax.Array, count: int) -> jax.Array:
    """`position` + `count`, at most `MAX_SLOTS`."""
    count = min(count, MAX_SLOTS)
    return jnp.minimum(position, MAX_SLOTS - count) + count


def disjoint(intervals: Sequence[Interval]) -> list[Interval]:
    """As many intervals, of which no two share a token, with the same tokens as `intervals` together."""
    if len(intervals) == 1:
        return list(intervals)
    begins, ends = (jnp.stack(x) for x in zip(*intervals, strict=True))
    order = jnp.argsort(begins, axis=0)
    begins, ends = (jnp.take_along_axis(x, order, axis=0) for x in (begins, ends))
    before = jax.lax.cummax(ends, axis=0)[:-1]
    begins = jnp.concatenate([begins[:1], jnp.maximum(begins[1:], before)])
    return [Interval(begin, end) for begin, end in zip(begins, ends, strict=True)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tree:
    """Which of the new tokens of its request a query token sees.  It sees all tokens before them."""

    start: jax.Array
    """int32 [B], the position of the first new token; negative if a request has fewer tokens than new ones."""
    seen: jax.Array
    """bool [B, Q, J]: whether each query token sees the token at position start + j.  It sees none after these."""

    def sees(self, positions: jax.Array) -> jax.Array:
        """Whether each query token sees the tokens at `positions` [S], which are not negative: bool [B, Q, S]."""
        columns, last = (positions - self.start[:, None])[:, None], self.seen.shape[-1] - 1
        new = jnp.take_along_axis(self.seen, jnp.clip(columns, 0, last), axis=-1)
        return (columns < 0) | ((columns <= last) & new)
