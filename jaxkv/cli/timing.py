"""Device time of a call, and the device's ceilings, measured the same way."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

CPU_SECONDS, GPU_SECONDS = 0.02, 0.003
"""A long chain lasts at least this much longer than the short one: what launching takes varies by little beside it."""

LEAST_CALLS, MOST_CALLS = 32, 1024
"""By which a turn of the long chain differs from one of the short, on GPUs.  Others' times are medians of about so few
calls in a row, and more are nearer to the power limit; the host asks before each turn whether there is another."""

MOST_TURNS = 2**20
"""Where even so many do not last, XLA has left nothing of the calls."""

REST_SECONDS, SUSTAINED_SECONDS = 0.1, 1.0
"""What GPUs rest before each chain, so that all begin at the full clock; and how long one runs without rest, after
which an H200 whose tensor cores are busy is at its power limit, and its clock a fifth lower."""

Step = Callable[[jax.Array, Any, Any], Any]


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, over several chains."""

    median: float
    least: float
    most: float
    calls: int
    """Calls that a chain's time is of."""
    sustained: float | None = None
    """Of one that goes on for a second; None on CPUs, and where it was not asked for."""

    @property
    def spread(self) -> float:
        """The range of the chains, as a fraction of their median."""
        return (self.most - self.least) / self.median


@dataclass(frozen=True)
class Pace:
    """How chains are run."""

    short: int
    long: int
    """Calls of a turn, in the two chains that are compared."""
    difference: float
    """Seconds by which they must differ: turns are added until they do."""
    rest: float
    """Seconds before each comparison."""
    sustained: float
    """Seconds of the one that runs without rest; 0: none does."""


def pace(backend: str, least: float) -> Pace:
    """Of calls that take at least so many seconds."""
    if backend == "cpu":
        return Pace(0, 1, CPU_SECONDS, 0, 0)
    calls = min(max(round(GPU_SECONDS / least), LEAST_CALLS), MOST_CALLS)
    short = calls // 8
    return Pace(short, short + calls, GPU_SECONDS, REST_SECONDS, SUSTAINED_SECONDS)


class Chain:
    """Calls `carry = step(i, carry, fixed)` in a row, in one program.

    A call's time is what a long chain takes longer than a short one, without what it takes to launch a program and to
    learn that it has ended.  A step must depend on its carry: what does not change from call to call, XLA computes once
    for all of them.

    Args:
      step: one call; `i` counts the calls of a chain.
      carry: arrays, donated; caches in it are updated in place.
      fixed: arrays that no call changes.  Shapes are enough for both.
      least: a guess, in seconds, of how long a call takes at the least.
    """

    def __init__(self, step: Step, carry, fixed, *, least: float):
        self._pace = pace(jax.default_backend(), least)

        @partial(jax.jit, donate_argnums=0, static_argnums=3)
        def chain(carry, fixed, turns, calls):
            def turn(i, carry):
                return lax.fori_loop(0, calls, lambda j, carry: step(i * calls + j, carry, fixed), carry)

            return lax.fori_loop(0, turns, turn, carry)

        turns = jax.ShapeDtypeStruct((), jnp.int32)
        self._lowered = [chain.lower(carry, fixed, turns, calls) for calls in (self._pace.short, self._pace.long)]

    def compile(self) -> "Chain":
        """This, ready to be timed."""
        self._compiled = [lowered.compile() for lowered in self._lowered]
        return self

    def time(self, carry, fixed, *, repeats: int, sustain: bool = False) -> Timing:
        """The statistics of `repeats` chains, and with `sustain` of one that goes on."""
        (short, long), difference = self._compiled, self._pace.difference

        def elapsed(chain, turns: int) -> float:
            nonlocal carry
            count = jax.block_until_ready(jnp.int32(turns))
            start = time.perf_counter()
            carry = jax.block_until_ready(chain(carry, fixed, count))
            return time.perf_counter() - start

        def seconds(turns: int) -> float:
            """Of the calls that the long chain has more."""
            less = median(elapsed(short, turns) for _ in range(3))
            return elapsed(long, turns) - less

        jax.block_until_ready((carry, fixed))
        seconds(1)  # loads the program, and touches all memory
        turns, last = 1, min(seconds(1) for _ in range(3))
        while last < difference:
            turns = max(turns + 1, round(1.1 * turns * difference / max(last, difference / 100)))
            if turns > MOST_TURNS:
                raise RuntimeError(f"{turns} turns take no time: does a step depend on its carry?")
            last = min(seconds(turns) for _ in range(3))  # a hiccup must not end the search
        found = []
        for _ in range(repeats):
            time.sleep(self._pace.rest)
            found.append(seconds(turns))
        calls = turns * (self._pace.long - self._pace.short)
        middle, sustained = median(found), None
        if sustain and self._pace.sustained:
            longer = math.ceil(self._pace.sustained / middle)
            sustained = seconds(longer * turns) / (longer * calls)
        return Timing(middle / calls, min(found) / calls, max(found) / calls, calls, sustained)


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches at best: bytes/s of reading, bytes/s read and written of copying, bf16 flops/s."""

    read: float
    copy: float
    matmul: float


def measure_ceilings(device: jax.Device, *, repeats: int) -> Ceilings:
    """Measured now: a reduction over, and an update in place of, a large array; a large square matrix product."""
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


def device_memory(device: jax.Device) -> int:
    """Bytes that arrays may take on the device: what JAX's allocator gives, or the host's memory on CPUs."""
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
