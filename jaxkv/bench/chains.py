"""Chains of consecutive calls in one program, timed by the clock of the host or of the device.

A chain has `turns` rounds of `ahead + calls` calls.  Only the last `calls` of a round are timed.  While the first
`ahead` run, the host launches calls in advance, so that the device does not wait for it.
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
"""A function f(i, carry, fixed) -> carry that makes the i-th call."""

TURNS = jax.ShapeDtypeStruct((), jnp.int32)
STAMPS = 2**32
"""The number of nanoseconds after which time stamps wrap around."""


class ByHost:
    """Timing by the host's clock: the difference between a chain of all calls and one of only `ahead` calls per round.

    The difference excludes the time to launch the program and to learn that it has ended.
    """

    def __init__(self, step: Step, carry, fixed, *, ahead: int, calls: int):
        @partial(jax.jit, donate_argnums=0, static_argnums=3)
        def chain(carry, fixed, turns, calls):
            def turn(i, carry):
                return lax.fori_loop(0, calls, lambda j, carry: step(i * calls + j, carry, fixed), carry)

            return lax.fori_loop(0, turns, turn, carry)

        self._lowered = [chain.lower(carry, fixed, TURNS, calls) for calls in (ahead, ahead + calls)]

    def compile(self) -> None:
        """Compiles the programs."""
        self.short, self.long = (lowered.compile() for lowered in self._lowered)

    def run(self, carry, fixed, turns: int) -> tuple[Any, float]:
        """Runs chains of `turns` rounds; returns the carry, and the seconds of the timed calls."""

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
    """Timing by a Hopper GPU's clock, which the program reads before and after the timed calls of each round.

    The delay until the host is notified of the end is not included.  The time to launch kernels is included only if the
    host launches them more slowly than the GPU runs them.
    """

    def __init__(self, step: Step, carry, fixed, *, ahead: int, calls: int):
        from jaxkv_kernels.mosaic_gpu.runtime.stamp import stamp

        @partial(jax.jit, donate_argnums=0)
        def chain(carry, fixed, turns):
            def consecutive(calls: int, first, carry, now):
                """Runs calls after the time stamp `now`; returns the carry, and the input of the next time stamp."""

                def call(j, state):
                    carry, now = state
                    return lax.optimization_barrier((step(first + j, carry, fixed), now))

                return lax.fori_loop(0, calls, call, (carry, now))

            def turn(i, state):
                carry, now, spent = state
                first = i * (ahead + calls)
                carry, now = consecutive(ahead, first, carry, now)
                begin = stamp(now)
                carry, now = consecutive(calls, first + ahead, carry, begin)
                end = stamp(now)
                return carry, end, spent + (end - begin)

            zero = jnp.zeros(1, jnp.int32)
            carry, _, spent = lax.fori_loop(0, turns, turn, (carry, zero, zero))
            return carry, spent

        self._lowered = chain.lower(carry, fixed, TURNS)
        self._timed = calls / (ahead + calls)

    def compile(self) -> None:
        """Compiles the programs."""
        self.long = self._lowered.compile()

    def run(self, carry, fixed, turns: int) -> tuple[Any, float]:
        """Runs a chain of `turns` rounds; returns the carry, and the seconds of the timed calls."""
        start = time.perf_counter()
        carry, spent = self.long(carry, fixed, jnp.int32(turns))
        seconds = int(spent[0]) % STAMPS / 1e9
        by_host = time.perf_counter() - start
        # Time stamps wrap around after STAMPS nanoseconds.  The host's clock is accurate enough for such long times.
        return carry, seconds if by_host < STAMPS / 1e9 else by_host * self._timed
