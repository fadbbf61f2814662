"""Calls in a row, in one program, timed on the host's clock or on the device's.

A chain is `turns` turns of `ahead + calls` calls, of which a time is that of `calls`: while the others run, the host
gets ahead of the device.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Step = Callable[[jax.Array, Any, Any], Any]
"""f(i, carry, fixed) to carry: the i-th call."""

TURNS = jax.ShapeDtypeStruct((), jnp.int32)
STAMPS = 2**32
"""The nanoseconds after which stamps begin anew."""


class ByHost:
    """Timed on the host's clock: what a long chain takes longer than a short one.

    So a call's time is without what it takes to launch a program and to learn that it has ended.
    """

    def __init__(self, step: Step, carry, fixed, *, ahead: int, calls: int):
        @partial(jax.jit, donate_argnums=0, static_argnums=3)
        def chain(carry, fixed, turns, calls):
            def turn(i, carry):
                return lax.fori_loop(0, calls, lambda j, carry: step(i * calls + j, carry, fixed), carry)

            return lax.fori_loop(0, turns, turn, carry)

        self._lowered = [chain.lower(carry, fixed, TURNS, calls) for calls in (ahead, ahead + calls)]

    def compile(self) -> None:
        """Makes it ready to run."""
        self.short, self.long = (lowered.compile() for lowered in self._lowered)

    def run(self, carry, fixed, turns: int) -> tuple[Any, float]:
        """The carry after chains of so many turns, and the seconds of the timed calls."""

        def elapsed(chain) -> float:
            nonlocal carry
            count = jax.block_until_ready(jnp.int32(turns))
            start = time.perf_counter()
            carry = jax.block_until_ready(chain(carry, fixed, count))
            return time.perf_counter() - start

        less = median(elapsed(self.short) for _ in range(3))
        seconds = elapsed(self.long) - less
        return carry, seconds


class ByDevice:
    """Timed on a Hopper GPU's clock, which the program itself reads before and after the timed calls of a turn.

    When the host is notified of the end, which varies, is not part of it.  How fast the host launches kernels is, where
    that is slower than the GPU runs them.
    """

    def __init__(self, step: Step, carry, fixed, *, ahead: int, calls: int):
        from jaxkv_kernels.mosaic_gpu.runtime.stamp import stamp

        @partial(jax.jit, donate_argnums=0)
        def chain(carry, fixed, turns):
            def in_a_row(calls: int, first, carry, now):
                """The carry after so many calls, made after the stamp `now`, and what a stamp after them is made of."""

                def call(j, state):
                    carry, now = state
                    return lax.optimization_barrier((step(first + j, carry, fixed), now))

                return lax.fori_loop(0, calls, call, (carry, now))

            def turn(i, state):
                carry, now, spent = state
                first = i * (ahead + calls)
                carry, now = in_a_row(ahead, first, carry, now)
                begin = stamp(now)
                carry, now = in_a_row(calls, first + ahead, carry, begin)
                end = stamp(now)
                return carry, end, spent + (end - begin)

            zero = jnp.zeros(1, jnp.int32)
            carry, _, spent = lax.fori_loop(0, turns, turn, (carry, zero, zero))
            return carry, spent

        self._lowered = chain.lower(carry, fixed, TURNS)
        self._timed = calls / (ahead + calls)

    def compile(self) -> None:
        """Makes it ready to run."""
        self.long = self._lowered.compile()

    def run(self, carry, fixed, turns: int) -> tuple[Any, float]:
        """The carry after a chain of so many turns, and the seconds of the timed calls."""
        start = time.perf_counter()
        carry, spent = self.long(carry, fixed, jnp.int32(turns))
        seconds = int(spent[0]) % STAMPS / 1e9
        by_host = time.perf_counter() - start
        # Stamps cannot tell longer times; for such, the host's clock is as good.
        return carry, seconds if by_host < STAMPS / 1e9 else by_host * self._timed
