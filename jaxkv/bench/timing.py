"""Device time of a call, and the device's ceilings, measured the same way."""

import math
import time
from dataclasses import dataclass
from statistics import median

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.bench.chains import ByDevice, ByHost, Step
from jaxkv.terminal.memory import device_memory
from jaxkv_kernels.mosaic_gpu.runtime import device

CPU_SECONDS, GPU_SECONDS = 0.02, 0.003
"""The timed part of a chain lasts at least this long."""

LEAST_CALLS, MOST_CALLS = 32, 1024
"""Timed calls per round, on GPUs; fewer if they would take longer than BURST_SECONDS.  Published times are medians of
about this few consecutive calls.  Before each round, the host waits to learn whether another one follows.
"""

BURST_SECONDS = 0.006
"""The length of a round of long calls, as in `time_flash_mla.py`.  In longer rounds, the GPU comes closer to its power
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
    return jax.default_backend() == "gpu" and not device.unavailable_reasons(device.CLOCK)


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
