"""Whether entries with arbitrary strides share elements.  The answer is exact.

`overlapping_entries` compares the entries of one set of strides with each other, at a cost that does not depend on
counts.  `overlapping_planes` compares keys with values, which have strides of their own.

Two entries share an element if and only if they begin less than an entry's width apart.  Let d be the difference of
their indices.  Along each axis, |d_i| is less than the count, and the entries begin d . strides elements apart.  So two
entries overlap if and only if the lattice of the vectors

    (d_1 / count_1, ..., d_n / count_n, d . strides / width)        for integers d

has a point other than 0 in the open cube (-1, 1)^(n + 1).  Such a point is shorter than sqrt(n + 1).  The search tries
the vectors of a reduced basis first.  If none of them lies in the cube, only a bounded number of their combinations are
that short.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

Vector = tuple[Fraction, ...]


def overlapping_entries(
    axes: Mapping[str, tuple[int, int]], width: int
) -> tuple[dict[str, int], dict[str, int]] | None:
    """Two entries of `width` elements that share elements, as their indices by axis; None if no two entries do.

    Args:
      axes: count, at least 2, and stride, at least 1, of each axis by name.
      width: elements of an entry.
    """
    tangled = sorted(axes, key=lambda name: axes[name][1])
    # Entries at different indices of an axis cannot overlap if its stride is at least the extent of all inner axes.
    while tangled and axes[tangled[-1]][1] >= width + sum((axes[name][0] - 1) * axes[name][1] for name in tangled[:-1]):
        tangled.pop()
    counts, strides = [axes[name][0] for name in tangled], [axes[name][1] for name in tangled]
    basis: list[Vector] = [
        (*(Fraction(i == j, count) for j, count in enumerate(counts)), Fraction(stride, width))
        for i, stride in enumerate(strides)
    ]
    for point in _short_points(basis):
        if any(point) and all(abs(x) < 1 for x in point):
            steps = {name: int(x * count) for name, x, count in zip(tangled, point, counts, strict=False)}
            first, second = ({name: max(sign * steps.get(name, 0), 0) for name in axes} for sign in (-1, 1))
            return (first, second) if point[-1] >= 0 else (second, first)
    return None


@dataclass(frozen=True)
class Plane:
    """Entries of `width` elements, the first of which begins at element `offset`."""

    axes: Mapping[str, tuple[int, int]]
    """Count, at least 2, and stride, at least 1, of each axis by name."""
    offset: int
    width: int

    @property
    def end(self) -> int:
        """The element at which the last entry ends."""
        return self.offset + self.width + sum((count - 1) * stride for count, stride in self.axes.values())


def overlapping_planes(first: Plane, second: Plane) -> tuple[dict[str, int], dict[str, int]] | None:
    """An entry of each plane that share elements, as their indices by axis; None if no two entries do.

    Entries i and j share elements if the distance from j to i is more than -(width of i) and less than (width of j).
    The search adds the steps of one axis after the other, the largest stride first, and tries only those indices from
    which the axes that are left still reach such a distance.  Axes of equal strides in both planes are one, since only
    the difference of their indices counts.
    """
    ranges: dict[int, tuple[int, int]] = {}  # the lowest and highest multiple of each stride
    for low_sign, plane in ((0, first), (-1, second)):
        for count, stride in plane.axes.values():
            low, high = ranges.get(stride, (0, 0))
            ranges[stride] = (low - count + 1, high) if low_sign else (low, high + count - 1)
    strides = sorted(ranges, reverse=True)
    lows = [sum(ranges[s][0] * s for s in strides[i:]) for i in range(len(strides) + 1)]
    highs = [sum(ranges[s][1] * s for s in strides[i:]) for i in range(len(strides) + 1)]
    units = [math.gcd(*strides[i:]) for i in range(len(strides))]

    def search(i: int, low: int, high: int) -> tuple[int, ...] | None:
        """Multiples of the strides from the i-th on whose sum is from `low` to `high`."""
        if i == len(strides):
            return () if low <= 0 <= high else None
        if high // units[i] * units[i] < low:
            return None  # no multiple of the unit lies between them
        stride, (least, most) = strides[i], ranges[strides[i]]
        for times in range(
            max(least, -((highs[i + 1] - low) // stride)), min(most, (high - lows[i + 1]) // stride) + 1
        ):
            rest = search(i + 1, low - times * stride, high - times * stride)
            if rest is not None:
                return (times, *rest)
        return None

    distance = second.offset - first.offset
    found = search(0, distance - first.width + 1, distance + second.width - 1)
    if found is None:
        return None
    left = dict(zip(strides, found, strict=True))
    return _indices(first, left, 1), _indices(second, left, -1)


def _indices(plane: Plane, left: dict[int, int], sign: int) -> dict[str, int]:
    """The indices by axis of a plane's share of the multiples `left` of strides, in which its own steps have `sign`."""
    indices = {}
    for axis, (count, stride) in plane.axes.items():
        indices[axis] = min(max(sign * left[stride], 0), count - 1)
        left[stride] -= sign * indices[axis]
    return indices


def _short_points(basis: list[Vector]) -> Iterator[Vector]:
    """Points of the lattice of `basis` [n], those of a reduced basis first, then all of length sqrt(n + 1) or less."""
    basis = _reduced(basis)
    yield from basis
    orthogonal = _orthogonal(basis)
    squares = [_dot(x, x) for x in orthogonal]

    def points(i: int, tail: Vector, room: Fraction) -> Iterator[Vector]:
        """Sums of `tail` and integer multiples of the first i vectors that may be short enough.

        The part of a sum within the span of the first i vectors may have a squared length of at most `room`.
        """
        if i == 0:
            yield tail
            return
        centre = -_dot(tail, orthogonal[i - 1]) / squares[i - 1]
        reach = math.isqrt(math.floor(room / squares[i - 1])) + 1
        for times in range(math.ceil(centre) - reach, math.floor(centre) + reach + 1):
            left = room - (times - centre) ** 2 * squares[i - 1]
            if left >= 0:
                yield from points(i - 1, _add(tail, times, basis[i - 1]), left)

    if basis:
        yield from points(len(basis), (Fraction(0),) * len(basis[0]), Fraction(len(basis) + 1))


def _reduced(basis: list[Vector]) -> list[Vector]:
    """A basis of the same lattice whose vectors are short and nearly orthogonal (Lenstra, Lenstra and Lovasz)."""
    basis, k = list(basis), 1
    while k < len(basis):
        orthogonal = _orthogonal(basis[: k + 1])
        for x, y in zip(reversed(basis[:k]), reversed(orthogonal[:k]), strict=True):
            basis[k] = _add(basis[k], -round(_dot(basis[k], y) / _dot(y, y)), x)
        before, here = orthogonal[k - 1], orthogonal[k]
        along = _dot(basis[k], before) / _dot(before, before)
        if _dot(here, here) >= (Fraction(3, 4) - along**2) * _dot(before, before):
            k += 1
        else:
            basis[k - 1 : k + 1] = basis[k], basis[k - 1]
            k = max(k - 1, 1)
    return basis


def _orthogonal(basis: list[Vector]) -> list[Vector]:
    """The part of each vector that is orthogonal to those before it (Gram and Schmidt)."""
    found: list[Vector] = []
    for vector in basis:
        for other in found:
            vector = _add(vector, -_dot(vector, other) / _dot(other, other), other)
        found.append(vector)
    return found


def _dot(x: Vector, y: Vector) -> Fraction:
    return sum((a * b for a, b in zip(x, y, strict=True)), Fraction(0))


def _add(x: Vector, times: Fraction | int, y: Vector) -> Vector:
    """`x + times * y`."""
    return tuple(a + times * b for a, b in zip(x, y, strict=True))
