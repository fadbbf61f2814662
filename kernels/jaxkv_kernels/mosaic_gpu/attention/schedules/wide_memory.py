"""Shared memory and barriers of `schedules/wide.py`, with plain entries and with quantised ones."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.mosaic_gpu.attention.config import HALF, TILE
from jaxkv_kernels.mosaic_gpu.attention.convert.e4m3 import raw_halves, raw_ropes
from jaxkv_kernels.mosaic_gpu.runtime.shared_memory import swizzled
from jaxkv_kernels.mosaic_gpu.unsupported import ROPE


def plain_types(dtype, *, copies: int, cluster: int, interpret: bool) -> dict[str, Any]:
    """Scratch types where TMA brings keys of the queries' dtype, in `copies` copies per tile and part."""
    return {
        "q": swizzled(2, TILE, HALF, dtype=dtype),
        "k": swizzled(2, 2, TILE, HALF, dtype=dtype),
        "r": swizzled(2, TILE, ROPE, dtype=dtype),
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
