"""`Buckets`: the sizes of steps, for each of which a program is compiled ahead."""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import NamedTuple

from jaxkv.serving.program_cache import Compilable
from jaxkv.serving.step_inputs import Schedule

INTERRUPTED_AFTER = 0.1
"""Seconds after which an interrupt is noticed at the latest."""
FEW_CHUNKS = 8
"""Chunks up to which sizes differ by a factor of four: steps with fewer tokens are bound by reading the weights."""
_log = logging.getLogger("jaxkv")


class Shape(NamedTuple):
    """The rows of a step."""

    chunks: int
    """Rows for chunks of prompts, which come first; 0 in steps without chunks."""
    requests: int
    """Rows for the last tokens of requests whose prompts are complete; 0 in steps with nothing but chunks."""


class Buckets:
    """The shapes of steps, and which of them have a compiled program.

    A step without chunks has rows for 1, 2, 4, 8, ... or `max_requests` requests.  With chunks, whose tokens take most
    of the time, there are few: rows for `max_requests` requests, and for as many chunks as the budget of tokens allows,
    or about a half, a quarter, an eighth of that, and so on.  Below `FEW_CHUNKS`, every other of these sizes is left
    out.  Beside about a sixteenth of `max_requests`, there are as many chunks as the budget allows.  Steps of chunks
    alone, such as those of the first prompt of an idle engine, have that many, too, or up to `FEW_CHUNKS`.

    Args:
      max_requests: the most rows of requests.
      budget: the most tokens of a step.
      columns: tokens per row of a request.
      chunk: tokens per row of a chunk.
      max_chunks: the most rows of chunks, beside the budget.
      within: chooses those shapes with chunks, of one or more, that a step may have while requests decode; default all.

    Attributes:
      shapes: all shapes, in the order in which they are needed: first the largest ones, which hold every step, then
        those of few requests, because an engine begins with few.
      ready: the shapes that steps may have.  Those of the largest are compiled when a step needs them, or by `compile`.
      temporaries: bytes of temporary device memory of the program of each shape that `compile` has compiled.
    """

    def __init__(
        self,
        max_requests: int,
        *,
        budget: int,
        columns: int,
        chunk: int,
        max_chunks: int | None = None,
        within: Callable[[Collection[Shape]], Collection[Shape]] | None = None,
    ):
        def most_chunks(requests: int) -> int:
            most = (budget - requests * columns) // chunk
            return most if max_chunks is None else min(most, max_chunks)

        self.largest = Shape(most_chunks(max_requests), max_requests), Shape(0, max_requests)
        chunks, size = [self.largest[0].chunks], 2 ** (self.largest[0].chunks // 2).bit_length() // 2
        while size:
            chunks.append(size)
            size //= 2 if size > FEW_CHUNKS else 4
        sizes = _sizes(max_requests)
        found = {Shape(0, n) for n in sizes} | {Shape(m, max_requests) for m in chunks}
        found |= {Shape(most_chunks(n), n) for n in (*sizes[4:5], 0)} | {Shape(m, 0) for m in chunks if m <= FEW_CHUNKS}
        others = sorted(found.difference(self.largest), key=lambda shape: (shape.requests, shape.chunks))
        self.shapes = [*self.largest, *others]
        self.ready = {*self.largest}
        self._within = within
        self.temporaries: dict[Shape, int] = {}

    def most_chunks(self, requests: int) -> int:
        """The most chunks of a step that also has so many requests: one or more."""
        shapes: Collection[Shape] = [
            shape for shape in self.ready.copy() if shape.chunks and shape.requests >= requests
        ]
        if self._within is not None and requests:
            shapes = self._within(shapes)
        return max(shape.chunks for shape in shapes)

    def fit(self, *schedules: Schedule) -> Shape:
        """The smallest shape that is ready for each of these steps.

        Of chunks that do not fit beside the requests, the last are left to a later step.
        """
        requests = max(len(schedule.decode) for schedule in schedules)
        most = self.most_chunks(requests)
        for schedule in schedules:
            del schedule.prefill[most:]
        chunks = max(len(schedule.prefill) for schedule in schedules)
        return min(shape for shape in self.ready.copy() if shape.chunks >= chunks and shape.requests >= requests)

    def compile(self, programs: Mapping[Shape, Sequence[Callable[[], Compilable]]], *, wait: bool) -> None:
        """Compiles the programs of all shapes in threads; a shape is ready when all its programs are compiled.

        Returns when all are ready or, without `wait`, when the largest are.  The others are compiled after that, in few
        threads, so that those that are needed first are ready first.  An error or an interrupt is raised at once,
        without waiting for other programs.  A compiler cannot be stopped: compilations that have begun then go on in
        the background.  So they do when these buckets are dropped, and Python waits for them before it exits.

        Args:
          programs: functions that lower or find the programs of each shape, that of the layers first.
          wait: whether to wait for all.
        """
        dropped = threading.Event()
        weakref.finalize(self, dropped.set)

        def submit(threads: ThreadPoolExecutor, shape: Shape, lowered: Iterable[Compilable]) -> Future:
            # The task does not refer to these buckets, so that they can be dropped.
            return threads.submit(_compile, shape, lowered, self.ready, self.temporaries, dropped)

        awaited = len(self.shapes if wait else self.largest)
        threads = ThreadPoolExecutor()
        try:
            # Lowered in this thread, whose contexts may configure JAX.
            pending = {
                submit(threads, shape, [lower() for lower in programs[shape]]) for shape in self.shapes[:awaited]
            }
            while pending:
                # In turns: Python notices a signal that arrives just before it waits only after it has waited.
                done, pending = wait_for(pending, timeout=INTERRUPTED_AFTER, return_when=FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
        others = ThreadPoolExecutor(max((os.cpu_count() or 1) // 2, 1), thread_name_prefix="jaxkv-compile")
        for shape in self.shapes[awaited:]:
            submit(others, shape, (lower() for lower in programs[shape])).add_done_callback(_warn)
        others.shutdown(wait=False)


def _sizes(most: int) -> list[int]:
    """`most`, and the powers of two below it, from the largest down."""
    return [most, *(2**n for n in reversed(range((most - 1).bit_length())))]


def _compile(
    shape: Shape,
    lowered: Iterable[Compilable],
    ready: set[Shape],
    temporaries: dict[Shape, int],
    dropped: threading.Event,
) -> None:
    compiled = []
    for program in lowered:
        if dropped.is_set():
            return
        compiled.append(program.compile())
    memory = compiled[0].memory_analysis()
    if memory is not None:
        temporaries[shape] = memory.temp_size_in_bytes
    ready.add(shape)


def _warn(task: Future) -> None:
    if (error := task.exception()) is not None:
        _log.warning("a program was not compiled, so that steps run a larger one: %s", error)
