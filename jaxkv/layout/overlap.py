"""Whether entries with arbitrary strides share elements.  The answer is exact, and its cost does not depend on counts.

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
