"""Shared memory and barriers of `schedules/wide.py`, with plain entries and with quantised ones.

Latents have up to 512 values, and their halves are of the same multiple of 64 columns.  If a latent is not a multiple
of 128, columns at the end of the second half are not part of it.  Rotary queries of fewer than 64 values stay in shared
memory of their own.

Barriers (mbarriers), and how many arrivals complete them: of TMA copies for `full`, of consumers for the others.
    q_full, qr_full    the queries have landed (2: halves); their rotary part has landed in p[0] or `qr` (1)
    q_free, p_free     both consumers have multiplied with the queries for the last time (2); p[0] was read for the
                       last time (1).  So the queries of the next work tile are loaded while this one ends.
    k_full[2t + h]     half h of key tile t has landed (1 per page); r_full[t]: its rotary part has landed (1 per page)
    k_free[2t + h]     consumer h, which is the last to multiply this half, is done with it (1 per CTA of the
                       cluster).  k_free[0] also frees K0's rotary part, and k_free[3] K1's.  K1's halves stage the
                       result of a work tile, and are freed once TMA has read it.
    s_issued           S0's products have been issued (1)
    p_ready[t]         P of tile t is in p[t], and the running max after tile t is in stats[0] (1)
    both               both consumers arrive, and both wait (2): both have read the rotary queries, which P0 overwrites;
                       the row sums of both are in stats[1:3]
These order every reuse of `p` and `stats`.  Consumer 0 overwrites P0 and stats[0] only after p_ready[1] and after K0
has landed again, which consumer 1 allowed when it was done with P0.  Consumer 1 overwrites P1 and stats[0] only after
the next p_ready[0].  Automatic barriers are off: within a warpgroup, what one thread writes, others read only through
TMA or wgmma after commit_smem, or after `both`.

Budget, for latents of 512.  Shared memory: Q 64 KiB + K 128 KiB + rotary keys 16 KiB + P 16 KiB + stats and barriers 1
KiB = 225 KiB of 227.  Registers: 240 per lane for consumers, 24 for the producer.

Quantised entries (`fp8`).  The stored bytes of half a tile take half the shared memory of its float16 values.  TMA
copies them to the first half of that memory, and the producer converts them to float16 in place (`convert/`): it waits
for k_landed and arrives k_full, in the order in which the consumers use the halves.  The timeline of the consumers is
the same, with these differences, which leave enough registers for the producer:

- Queries become float16, scaled to fit (`convert/queries.py`).  Their rotary part stays in shared memory, so there is
  no p_free, and q_full also covers it.
- P0 and P1 use the same shared memory: consumer 1 stores P1 once it has multiplied P0.
- Pairs that need a mask have a loop of their own, so that the loop over the others keeps no operands of masks live.
- The rotary keys are converted with the first half of their tile.  Its k_full covers them, so there is no r_full.
- The single scale of all entries is part of the softmax scale, and also multiplies the result.
Shared memory is then Q 72 KiB + K 128 KiB + rotary keys 16 KiB + P 8 KiB + stats 2 KiB = 226 KiB; registers are 216 per
lane for consumers and 72 for the producer.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.config import HALF, TILE
from jaxkv_kernels.mosaic_gpu.attention.convert.e4m3 import raw_halves, raw_ropes
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import rotary_type, swizzled
from jaxkv_kernels.mosaic_gpu.unsupported import ROPE


def plain_types(dtype, half: int, rope: int, *, copies: int, cluster: int, interpret: bool) -> dict[str, Any]:
    """Scratch types where TMA brings keys of the queries' dtype, in `copies` copies per tile and part.

    `half` and `rope`: columns of half a latent, and of the rotary part.
    """
    return {
        "q": swizzled(2, TILE, half, dtype=dtype),
        "k": swizzled(2, 2, TILE, half, dtype=dtype),
        **({"r": rotary_type(2, TILE, rope=rope, dtype=dtype)} if rope else {}),
        **({"qr": rotary_type(TILE, rope=rope, dtype=dtype)} if 0 < rope < ROPE else {}),
        "p": swizzled(2, TILE, TILE, dtype=dtype),
        "stats": plgpu.SMEM((3, TILE), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=2),
        "qr_full": plgpu.Barrier(),
        "q_free": plgpu.Barrier(num_arrivals=2),
        "p_free": plgpu.Barrier(),
        "k_full": plgpu.Barrier(num_arrivals=copies, num_barriers=4),
        "r_full": plgpu.Barrier(num_arrivals=copies, num_barriers=2),
        "k_free": _free(cluster),
        "s_issued": plgpu.Barrier(),
        "p_ready": plgpu.Barrier(num_barriers=2),
        "both": plgpu.Barrier(num_arrivals=2),
        **_operands(4, dtype, interpret),
    }


def quantised_types(dtype, k_dtype, *, copies: int, cluster: int, interpret: bool) -> dict[str, Any]:
    """Scratch types where the producer converts keys to `k_dtype`, and queries and results are of `dtype`.

    "q", "qr", "k" and "r" are views of the same memory: in `dtype`, in `k_dtype`, and as bytes.  Barriers with
    equal numbers of arrivals share an array: their addresses and phases take fewer registers.
    """

    def viewed(*shape, raw=()):
        views = swizzled(*shape, dtype=dtype), swizzled(*shape, dtype=k_dtype), *raw
        # The interpreter reports any two accesses to a union through different views as a race.
        return views if interpret else plgpu.RefUnion(*views)

    return {
        "q": viewed(2, TILE, HALF),
        "qr": viewed(TILE, ROPE),
        "k": viewed(2, 2, TILE, HALF, raw=(raw_halves(),)),
        "r": viewed(2, TILE, ROPE, raw=(raw_ropes(),)),
        "p": swizzled(1, TILE, TILE, dtype=k_dtype),
        "stats": plgpu.SMEM((5, TILE), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=3),
        "k_landed": plgpu.Barrier(num_arrivals=copies, num_barriers=4),
        "r_landed": plgpu.Barrier(num_arrivals=copies, num_barriers=2),
        "k_free": _free(cluster),
        "one_arrives": plgpu.Barrier(num_barriers=7),
        "two_arrive": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        **_operands(2, k_dtype, interpret),
    }


def barriers(memory: dict[str, Any], *, quantised: bool) -> tuple[Any, ...]:
    """From `memory`: q_full, qr_full, q_free, p_free, k_full, r_full, k_free, s_issued, p_ready, both."""
    if quantised:
        one = [memory["one_arrives"].at[n] for n in range(7)]
        free = [memory["k_free"].at[n] for n in range(4)]
        q_free, both = (memory["two_arrive"].at[n] for n in range(2))
        q_full = memory["q_full"]
        return q_full, q_full, q_free, None, one[:4], None, free, one[4], one[5:], both
    counts = {"k_full": 4, "r_full": 2, "k_free": 4, "p_ready": 2}
    arrays = {name: [memory[name].at[n] for n in range(count)] for name, count in counts.items()}
    names = ("q_full", "qr_full", "q_free", "p_free", "k_full", "r_full", "k_free", "s_issued", "p_ready", "both")
    return tuple(arrays.get(name, memory[name]) for name in names)


def _free(cluster: int) -> Any:
    barrier: Any = plgpu.ClusterBarrier(collective_axes=("cta",), num_barriers=4)
    return barrier if cluster > 1 else plgpu.Barrier(num_barriers=4)


def _operands(count: int, dtype, interpret: bool) -> dict[str, Any]:
    """Shared memory for register operands of wgmma, where the interpreter needs them."""
    return {"operands": swizzled(count, TILE, TILE, dtype=dtype)} if interpret else {}
