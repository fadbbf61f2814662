"""Kernels in Pallas Mosaic GPU for Hopper (sm_90): wgmma, TMA, clusters.

Importing this costs nothing: Pallas comes in with the first kernel that is traced.
"""

from collections.abc import Mapping
from typing import Any

import jax

from jaxkv_kernels.formats.entries import unlisted
from jaxkv_kernels.kernel import operations
from jaxkv_kernels.mosaic_gpu import limits
from jaxkv_kernels.mosaic_gpu.interpreting import interpreting as interpreting

OPERATIONS = operations(
    __name__,
    (
        "write_mla",
        "write_kv",
        "gather_mla",
        "gather_kv",
        "plan_decode",
        "decode_mla",
        "decode_kv",
        "copy_blocks",
        "read_blocks",
        "write_blocks",
    ),
)


def unavailable() -> list[str]:
    """Reasons for which nothing here runs on this machine; none means that it is a Hopper GPU, or interpreted."""
    if interpreting.value:
        return []
    if jax.default_backend() != "gpu":
        return [f"needs an NVIDIA Hopper GPU; the default backend is {jax.default_backend()}"]
    found = getattr(jax.devices()[0], "compute_capability", "unknown")
    return (
        [] if found == "9.0" else [f"needs compute capability 9.0 (Hopper); {jax.devices()[0].device_kind} has {found}"]
    )


def refuses(operation: str, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Reasons against this call on any machine; none means that it is taken."""
    return unlisted(limits.ENTRIES.get(operation, {}), options) or list(getattr(limits, operation)(arrays, options))
