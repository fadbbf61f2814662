"""Which lanes move an entry, and which entries a CTA moves.

A team is a warp, or half a warp if no field of an entry has more than 16 chunks.  All lanes of a team compute the same
indices.  Mosaic computes scalars in every lane, so a kernel's scalars may differ from team to team.  A branch on such a
scalar must not contain instructions in which all lanes of a warp take part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.entries.fields import Field
from jaxkv_kernels.mosaic_gpu.ptx.fragments import splat
from jaxkv_kernels.mosaic_gpu.runtime.device import multiprocessors
from jaxkv_kernels.mosaic_gpu.runtime.launch import kernel
from jaxkv_kernels.mosaic_gpu.runtime.registers import SCALAR

WARP, WARPGROUP = 32, 128
WARPGROUPS = 2
"""Warpgroups per CTA.  One takes the same time; four take up to 20 % more (H200)."""
TOGETHER, MANY, SHORT = 2, 1024, 4
"""A team moves `TOGETHER` entries if one each would take more than `MANY` lanes per multiprocessor, and an entry has
at most `SHORT` chunks per lane.  Otherwise it moves one.

Times for 8,192 latents in microseconds (H200, data not in the L2 cache).  With 1 and 2 entries per team, `fp8` was
written in 6.2 and 5.3, and read in 6.0 and 5.8.  With 1, 2 and 4, `fp8_ds_mla` was written in 5.5, 5.5 and 5.8, and
read in 6.2, 6.1 and 6.1.
"""


@dataclass(frozen=True)
class Teams:
    """Teams of `lanes` lanes that move `entries` entries."""

    lanes: int
    entries: int
    interpret: bool
    together: int
    """Entries per team."""

    @property
    def in_cta(self) -> int:
        """The number of entries of a CTA."""
        return self._warpgroups * WARPGROUP // self.lanes * self.together

    @property
    def _warpgroups(self) -> int:
        return 1 if self.interpret else WARPGROUPS

    def rounds(self, field: Field) -> int:
        """The number of chunks of a field that a lane moves."""
        return -(-field.chunks // self.lanes)

    def run(
        self, name: str, load: Callable[..., Any], store: Callable[..., None], *operands, out_type: Any = ()
    ) -> Any:
        """Runs a kernel in which `store(load(i, inside, *refs), *refs)` moves entry i.

        A team with several entries loads all of them before it stores the first.  Teams past the last entry load that
        one again, with `inside` False, in which case `store` must store nothing.
        """

        def body(*refs):
            first = lax.axis_index("cta") * self.in_cta

            def move(i):
                entries = [i + n for n in range(self.together)]
                loaded = [load(jnp.minimum(i, self.entries - 1), i < self.entries, *refs) for i in entries]
                for one in loaded:
                    store(one, *refs)

            if self.interpret:
                lax.fori_loop(0, self.in_cta, lambda team, _: move(first + team), None)
            else:
                move(first + lax.div(_thread(), jnp.int32(self.lanes)) * self.together)

        body.__name__ = name
        return kernel(
            body,
            interpret=self.interpret,
            auto_barriers=False,
            out_type=out_type,
            grid=(-(-self.entries // self.in_cta),),
            grid_names=("cta",),
            num_threads=self._warpgroups,
            thread_name="wg",
        )(*operands)


def teams(fields: tuple[Field, ...], entries: int, *, interpret: bool, most: int = TOGETHER) -> Teams:
    """Teams for entries of these fields, with at most `most` entries each."""
    lanes = WARP // 2 if max(field.chunks for field in fields) <= WARP // 2 else WARP
    short = sum(-(-field.chunks // lanes) for field in fields) <= SHORT
    together = most if entries * lanes > MANY * multiprocessors() and short and not interpret else 1
    return Teams(lanes, entries, interpret, together)


def _thread():
    """The index of the calling thread in its CTA."""
    from jax.experimental.mosaic import gpu as mgpu

    @plgpu.inline_mgpu(arg_types=(), return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR))
    def thread(_):
        return splat(mgpu.utils.thread_idx())

    return thread()
