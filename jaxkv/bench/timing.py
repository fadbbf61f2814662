"""Device time of a call, by chains of consecutive calls in one program, and the device's ceilings, measured likewise.

A chain has `turns` rounds of `ahead + calls` calls.  Only the last `calls` of a round are timed, by the clock of the
host or of the device.  While the first `ahead` run, the host launches calls in advance, so that the device does not
wait for it.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv import dispatch
from jaxkv.terminal.memory import device_memory

Step = Callable[[jax.Array, Any, Any], Any]
"""A function f(i, carry, fixed) -> carry that makes the i-th call."""

TURNS = jax.ShapeDtypeStruct((), jnp.int32)
STAMPS = 2**32
"""The number of nanoseconds after which time stamps wrap around."""

CPU_SECONDS, GPU_SECONDS = 0.02, 0.003
"""The timed part of a chain lasts at least this long."""

LEAST_CALLS, MOST_CALLS = 32, 1024
"""Timed calls per round, on GPUs; fewer if they would take longer than BURST_SECONDS.  Published times are medians of
about this few consecutive calls.  Before each round, the host waits to learn whether another one follows.
"""

BURST_SECONDS = 0.006
"""The length of a round of long calls, as in `time_peers.py`.  In longer rounds, the GPU comes closer to its power
limit: sparse attention of 4,096 query tokens takes 3.55 ms in rounds of 4 calls, 3.87 of 32 and 4.19 of 256.
"""

LEAST_SECONDS = 2e-7
"""No kernel launches faster: if a call takes less, XLA has removed it."""

REST_SECONDS, SUSTAINED_SECONDS = 0.1, 1.0
"""The idle time of a GPU before each chain, so that all start at the full clock, and the length of the sustained chain.

After that time, an H200 with busy tensor cores is at its power limit, and its clock is lower by a fifth."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call: statistics over several chains."""

    median: float
    least: float
    most: float
    calls: int
    """Timed calls per chain."""
    sustained: float | None = None
    """Seconds per call of a chain that runs for a second; None on CPUs or if it was not requested."""

    def divided(self, calls: int) -> "Timing":
        """The same, where each step of the chains made `calls` calls."""
        sustained = self.sustained and self.sustained / calls
        each = self.median / calls, self.least / calls, self.most / calls
        return Timing(*each, self.calls * calls, sustained)

    @property
    def spread(self) -> float:
        """The difference of the slowest and the fastest chain, as a fraction of the median."""
        return (self.most - self.least) / self.median


@dataclass(frozen=True)
class Pace:
    """How chains are run."""

    ahead: int
    """Untimed calls at the start of a round.  While they run, the host launches calls in advance."""
    calls: int
    """Timed calls per round, after the untimed ones."""
    least: float
    """Seconds that the timed calls must take; rounds are added until they do."""
    rest: float
    """Seconds of idle time before each chain."""
    sustained: float
    """Seconds of the sustained chain; 0 for none."""


def pace(backend: str, least: float) -> Pace:
    """The pace for calls that take at least `least` seconds each."""
    if backend == "cpu":
        return Pace(0, 1, CPU_SECONDS, 0, 0)
    fewest = min(LEAST_CALLS, math.ceil(BURST_SECONDS / least))
    calls = min(max(round(GPU_SECONDS / least), fewest), MOST_CALLS)
    return Pace(math.ceil(calls / 8), calls, GPU_SECONDS, REST_SECONDS, SUSTAINED_SECONDS)


def has_clock() -> bool:
    """Whether programs can read the device's clock, which is the case on Hopper GPUs."""
    return jax.default_backend() == "gpu" and dispatch.clock() is not None


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
        kernels = dispatch.clock()
        assert kernels is not None, "has_clock() says whether programs can read the device's clock"
        stamp = kernels.stamp

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


class Chain:
    """Consecutive calls `carry = step(i, carry, fixed)` in one program.

    The result of a step must depend on its carry.  Otherwise, XLA would compute it only once for all calls.

    Args:
      step: one call; `i` counts the calls of a chain.
      carry: arrays, donated; caches in it are updated in place.
      fixed: arrays that no call changes.  `carry` and `fixed` may be shapes here.
      least: a lower bound of the seconds per call; a guess is enough.
    """

    def __init__(self, step: Step, carry, fixed, *, least: float):
        self._pace = pace(jax.default_backend(), least)
        timed = ByDevice if has_clock() else ByHost
        self._clocked = timed(step, carry, fixed, ahead=self._pace.ahead, calls=self._pace.calls)

    def compile(self) -> "Chain":
        """Compiles the program; returns the chain."""
        self._clocked.compile()
        return self

    def time(self, carry, fixed, *, repeats: int, sustain: bool = False) -> Timing:
        """Times `repeats` chains and, with `sustain`, one longer chain."""
        calls, least = self._pace.calls, self._pace.least

        def seconds(turns: int) -> float:
            nonlocal carry
            carry, found = self._clocked.run(carry, fixed, turns)
            return found

        jax.block_until_ready((carry, fixed))
        seconds(1)  # loads the program and touches all its memory
        turns, last = 1, min(seconds(1) for _ in range(3))
        while last < least:
            turns = max(turns + 1, round(1.1 * turns * least / max(last, least / 100)))
            if turns * calls * LEAST_SECONDS > least:
                raise RuntimeError(f"{turns * calls} calls take no time: does a step depend on its carry?")
            last = min(seconds(turns) for _ in range(3))  # one slow run must not end the search
        found = []
        for _ in range(repeats):
            time.sleep(self._pace.rest)
            found.append(seconds(turns))
        middle, sustained = median(found), None
        if sustain and self._pace.sustained:
            longer = math.ceil(self._pace.sustained / middle)
            sustained = seconds(longer * turns) / (longer * turns * calls)
        calls *= turns
        return Timing(middle / calls, min(found) / calls, max(found) / calls, calls, sustained)


@dataclass(frozen=True)
class Ceilings:
    """The best measured rates of the device: bytes/s of a read, bytes/s read plus written by a copy, bf16 flops/s."""

    read: float
    copy: float
    matmul: float


def measure_ceilings(device: jax.Device, *, repeats: int) -> Ceilings:
    """Measures the ceilings: a reduction of a large array, an update of it in place, a product of square matrices."""
    cpu = device.platform == "cpu"
    size, side = (2**28, 1024) if cpu else (min(2**32, device_memory(device) // 16), 8192)
    tile = jax.random.normal(jax.random.key(0), (2**20,))
    tiles = size // tile.nbytes
    square = jax.random.normal(jax.random.key(1), (side, side), jnp.bfloat16)

    def read(i, carry, fixed):
        return lax.optimization_barrier((carry[0], carry[0].sum()))

    def copy(i, carry, fixed):
        return -carry

    def matmul(i, carry, fixed):
        return lax.optimization_barrier((carry[0], carry[0] @ fixed))

    def timed(step, carry, fixed):
        return Chain(step, carry, fixed, least=1e-3).compile().time(carry, fixed, repeats=repeats)

    reading = timed(read, (jnp.tile(tile, tiles), jnp.float32(0)), ())
    copying = timed(copy, jnp.tile(tile, tiles), ())
    product = timed(matmul, (square + 0, square + 0), square)
    moved = tiles * tile.nbytes
    return Ceilings(moved / reading.median, 2 * moved / copying.median, 2 * side**3 / product.median)
