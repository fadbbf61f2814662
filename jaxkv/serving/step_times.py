"""`StepTimes`: how long steps of each shape take, from which it follows how many chunks fit within a bound."""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from statistics import median_low
from time import perf_counter

import numpy as np

from jaxkv.serving.buckets import Shape

LATEST = 256
"""How many measurements count.  Steps of one shape take longer when contexts are longer.  A shape that took too long is
not run; it is tried again when it is no longer among these steps, if the estimates of the others allow it."""
LEAST = 3
"""The least measurements of a shape.  With fewer, their median may include the compilation of a program."""


class StepTimes:
    """Measures steps, and chooses shapes that are expected to take at most `bound` seconds.

    A step takes the time from the read of the previous step to its own, or from when it was scheduled if that is later.
    That is the time between two tokens of a request which decodes in both.  The estimate of a shape is the median of
    its measurements.  That of a shape with too few is on the line through the estimates of the others, by their tokens,
    padding included.  It is infinite until a shape with chunks has been measured.

    Args:
      bound: seconds.
      tokens: gives the tokens of a step of a shape.

    Attributes:
      measured: the latest steps, and the seconds that each took.
    """

    def __init__(self, bound: float, tokens: Callable[[Shape], int]):
        self._bound, self._tokens = bound, tokens
        self._unread: deque[tuple[Shape, float]] = deque()
        """Launched steps, and when they were scheduled."""
        self._scheduled = self._last_read = 0.0
        self.measured: deque[tuple[Shape, float]] = deque(maxlen=LATEST)

    def scheduled(self) -> None:
        """Takes note of the time at which the host begins to schedule a step."""
        self._scheduled = perf_counter()

    def launched(self, shape: Shape) -> None:
        """Takes note of a step of this shape, which was scheduled last."""
        self._unread.append((shape, self._scheduled))

    def read(self) -> None:
        """Measures the oldest step that was launched, whose tokens have just been read."""
        shape, start = self._unread.popleft()
        now = perf_counter()
        self.measured.append((shape, now - max(start, self._last_read)))
        self._last_read = now

    def clear(self) -> None:
        """Forgets the launched steps, which are not going to be read."""
        self._unread.clear()

    def within(self, shapes: Collection[Shape]) -> Collection[Shape]:
        """Those of these shapes that are within the bound; if there are none, those with the fewest chunks."""
        expected = self._estimates()
        fewest = min(shape.chunks for shape in shapes)
        found = [shape for shape in shapes if expected(shape) <= self._bound]
        return found or [shape for shape in shapes if shape.chunks == fewest]

    def _estimates(self) -> Callable[[Shape], float]:
        """Gives the estimated seconds of a step of a shape; infinite if too little has been measured."""
        seconds = defaultdict[Shape, list[float]](list)
        for shape, taken in self.measured:
            seconds[shape].append(taken)
        known = {shape: median_low(taken) for shape, taken in seconds.items() if len(taken) >= LEAST}
        # Steps without chunks take about the same time, however many rows they have: alone, they say nothing of chunks.
        measured = known if any(shape.chunks for shape in known) else {}
        offset, slope = _line([self._tokens(shape) for shape in measured], [*measured.values()])
        return lambda shape: known.get(shape, offset + slope * self._tokens(shape))


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Offset and slope, at least 0, of the line with the least squares; infinite offset if `x` has fewer than two
    different values."""
    if len({*x}) < 2:
        return float("inf"), 0.0
    centred = np.subtract(x, np.mean(x))
    slope = max(float(centred @ np.asarray(y) / (centred @ centred)), 0.0)
    return float(np.mean(y) - slope * np.mean(x)), slope
