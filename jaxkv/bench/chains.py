"""Chains of consecutive calls in one program, timed on the clock of the host or of the device.

A chain is `turns` rounds of `ahead + calls` calls, of which only `calls` are timed: while the others run, the host gets
ahead of the device.
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
"""f(i, carry, fixed) -> carry: the i-th call."""

TURNS = jax.ShapeDtypeStruct((), jnp.int32)
STAMPS = 2**32
"""The number of nanoseconds after which stamps wrap around."""


class ByHost:
    """Timed on the host's clock: the difference between a long chain and a short one.

    The time of a call therefore excludes launching the program and waiting for the notification of its end.
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
        """The carry after chains of `turns` rounds, and the seconds of the timed calls."""

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
    """Timed on a Hopper GPU's clock, which the program reads before and after the timed calls of each round.

    The delay until the host is notified, which varies, is not included.  The time to launch kernels is included if the
    host launches them more slowly than the GPU runs them.
    """

    def __init__(self, step: Step, carry, fixed, *, ahead: int, calls: int):
        from jaxkv_kernels.mosaic_gpu.runtime.stamp import stamp

        @partial(jax.jit, donate_argnums=0)
        def chain(carry, fixed, turns):
            def consecutive(calls: int, first, carry, now):
                """The carry after `calls` calls after the stamp `now`, and what a stamp after them must depend on."""

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
        """The carry after a chain of `turns` rounds, and the seconds of the timed calls."""
        start = time.perf_counter()
        carry, spent = self.long(carry, fixed, jnp.int32(turns))
        seconds = int(spent[0]) % STAMPS / 1e9
        by_host = time.perf_counter() - start
        # Stamps wrap around after longer times, for which the host's clock is accurate enough.
        return carry, seconds if by_host < STAMPS / 1e9 else by_host * self._timed
